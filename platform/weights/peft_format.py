"""Adapters as PEFT stores them, in and out: adapter_config.json and adapter_model.safetensors, whose tensors are named
after transformers' modules. A `lora_A` is our `down`, a `lora_B` our `up`; of an embedding both are turned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from platform.boundary import documents, schema
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.boundary.storage import Storage, open_storage, write_all_or_nothing
from platform.checkpoint.blocks import Box, Piece
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.interchange import import_safetensors, store_pieces, write_safetensors
from platform.checkpoint.manifest import Meta, Refused
from platform.config.fields import Config, Model
from platform.model import build_model
from platform.model.tuning import find_adapters
from platform.plan.adapters import can_adapt, list_target_words
from platform.weights.config_keys import Family
from platform.weights.exporting import METADATA
from platform.weights.importing import SOURCE, open_importable, open_initial_weights, read_weight
from platform.weights.model_folder import read_companions_and_tokenizer_lack
from platform.weights.stored_adapters import BASE, StoredAdapters
from platform.weights.tensor_names import choose_family, find_family, list_stored_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LARGEST_CONFIG = 1 << 20
PREFIX = "base_model.model."
KEYS = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", "inference_mode": True}
# keys of PEFT under which an adapter computes something that ours does not, unless they are empty
FOREIGN = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "lora_bias")


@dataclass(frozen=True)
class PeftPlace:
    """Place of an adapter at PEFT: the module that it is of, whether that is an embedding, and whether it keeps its
    weight with inputs first (`turned`)."""

    module: str
    embeds: bool
    turned: bool

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the tensors of our `down` and `up`."""
        kinds = ("lora_embedding_B", "lora_embedding_A") if self.embeds else ("lora_A.weight", "lora_B.weight")
        return f"{PREFIX}{self.module}.{kinds[0]}", f"{PREFIX}{self.module}.{kinds[1]}"

    def to_theirs(self, matrix: Tensor, rows: int) -> Tensor:
        """Return a matrix of ours, whose first `rows` dims are one of theirs, as PEFT keeps it."""
        flat = matrix.reshape(prod(matrix.shape[:rows]), -1)
        return (flat.t() if self.embeds else flat).contiguous()

    def to_ours(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a matrix of theirs as ours, of this shape."""
        return (matrix.t() if self.embeds else matrix).reshape(shape).contiguous()


def find_places(model: Model, family: Family) -> dict[str, PeftPlace]:
    """Map the name of each weight that is alone in its module, and so can have an adapter at PEFT, to its place."""
    adaptable = {p.name for p in build_model(model).parameters() if can_adapt(p) and not p.num_stack_dims}
    stored = (t for t in list_stored_tensors(model, family) if len(t.parts) == 1 and t.parts[0].name in adaptable)
    return {
        t.parts[0].name: PeftPlace(t.name.removesuffix(".weight"), t.parts[0].name == "embedding", t.turned)
        for t in stored
    }


def export_adapters(stored: StoredAdapters, base: str, folder: Storage) -> list[str]:
    """Write adapters into `folder` as PEFT saves them; return the names of the files. `base`: the place of their base.
    Raises ConfigError for weights that PEFT has no adapter of, FileExistsError, Refused or OSError."""
    places, tune = find_places(stored.model, choose_family(stored.model, "")), stored.tune
    if missing := [name for name in stored.adapters if name not in places]:
        reason = f"{missing[0]} has no adapter at PEFT: its module has other weights, too"
        legal = list_target_words(p for p in build_model(stored.model).parameters() if p.name in places)
        raise ConfigError("tune.targets", tune.targets, reason, legal)
    if taken := {CONFIG, WEIGHTS} & folder.list_sizes("").keys():
        raise FileExistsError(f"{folder.url} has {', '.join(sorted(taken))} already; name another folder")
    tensors: dict[str, Tensor] = {}
    for name, adapter in stored.adapters.items():
        place = places[name]
        for p, theirs in zip((adapter.down, adapter.up), place.names, strict=True):
            tensors[theirs] = place.to_theirs(stored.matrix(p).float(), p.num_row_dims)
    chosen = [places[name] for name in stored.adapters]
    values = {**KEYS, "r": tune.rank, "lora_alpha": tune.alpha, "lora_dropout": tune.dropout, "use_rslora": tune.rslora}
    values |= {"base_model_name_or_path": base, "target_modules": [place.module for place in chosen]}
    values["fan_in_fan_out"] = any(place.turned for place in chosen)
    described = {name: ("float32", tuple(x.shape)) for name, x in sorted(tensors.items())}
    with write_all_or_nothing(folder, [WEIGHTS, CONFIG]) as draft:
        write_safetensors(draft, WEIGHTS, METADATA, described, (tensors[name] for name in described))
        draft.write(CONFIG, [memoryview((json.dumps(values, indent=2, sort_keys=True) + "\n").encode())])
    return [WEIGHTS, CONFIG]


def holds_adapters(url: str) -> bool:
    """Return True if PEFT saved adapters in the folder at `url`; raises OSError, ConfigError."""
    return not url.endswith(".safetensors") and CONFIG in open_storage(url, "source").list_sizes("")


def import_adapters(source: str, base: str, storage: Storage) -> str:
    """Make a checkpoint on `storage` of adapters that PEFT saved at `source`; return its directory. `base`: the folder
    of what they are of, "" for the one that they name. Raises ConfigError, Refused or OSError."""
    values = _read_config(source)
    base = base or values.get("base_model_name_or_path") or ""
    of_base = open_importable(base, "--base")
    model, places = of_base.model, find_places(of_base.model, find_family(of_base.saved.config))
    try:
        tensors = dict(import_safetensors(f"{source.rstrip('/')}/{WEIGHTS}")[1])
    except Malformed as error:
        raise Refused(f"{WEIGHTS}: {error}") from None
    names = [name for name, place in places.items() if place.names[0] in tensors]
    weights = open_initial_weights(replace(Config(), model=model, train=replace(Config().train, init=base)))
    for name in names:  # PEFT saves embeddings and heads beside their adapters
        saved = tensors.pop(f"{PREFIX}{places[name].module}.base_layer.weight", None)
        if saved is not None and not torch.equal(saved, read_weight(weights, f"model.{name}").to(saved.dtype)):
            raise ConfigError("source", source, f"{places[name].module} was trained beside its adapter")
    known = {theirs for name in names for theirs in places[name].names}
    if others := sorted(tensors.keys() ^ known):
        raise ConfigError("source", source, f"{others[0]} is no part of an adapter of {base}")
    targets = _find_short_targets(model, names)
    rslora, scale = bool(values.get("use_rslora")), values.get("lora_alpha")
    numbers = {"rank": values.get("r"), "alpha": scale if isinstance(scale, float) else float(scale or 0)}
    tune = Config.from_dict({"tune": {"kind": "lora", "rslora": rslora, "targets": targets, **numbers}}).tune
    adapters = find_adapters(model, tune, build_model(model))
    sizes = build_model(model).sizes
    pieces, shapes = list[Piece[Tensor]](), dict[str, tuple[int, ...]]()
    for name, adapter in adapters.items():
        for p, theirs in zip((adapter.down, adapter.up), places[name].names, strict=True):
            shape = tuple({**sizes, **dict(p.sizes)}[d] for d in p.dims)
            if prod(shape) != tensors[theirs].numel():
                raise ConfigError("source", source, f"{theirs} is {list(tensors[theirs].shape)}, not of {list(shape)}")
            ours = places[name].to_ours(tensors[theirs], shape)
            dtype = next(word for word, kind in DTYPES.items() if kind == ours.dtype)
            shapes[f"model.{p.name}"] = shape
            pieces.append(Piece(f"model.{p.name}", dtype, Box.whole_tensor(shape), ours))
    values = {SOURCE: of_base.saved.config, BASE: vars(weights.describe_base())}
    identity = {"model": {key: value for key, value in vars(model).items() if key != "source"}}
    identity |= {f"tune.{key}": value for key, value in vars(tune).items()}
    meta = Meta(step=0, samples=0, seed=0, corpus="", identity=identity, configuration="", plan={}, values=values)
    files, _ = read_companions_and_tokenizer_lack(of_base.saved, "--base")
    return store_pieces(storage, [pieces], _copy_from_memory, shapes, meta, files)


def _copy_from_memory(wanted: Sequence[Piece[Tensor]], into: Sequence[Tensor]) -> None:
    """Copy pieces of adapters that are in memory."""
    for piece, memory in zip(wanted, into, strict=True):
        memory.view(piece.source.dtype).copy_(piece.source.flatten())


def _read_config(source: str) -> dict[str, Any]:
    """Return the adapter_config.json at `source`. Raises ConfigError for what our adapters do not express, Refused."""
    try:
        raw = bytes(open_storage(source, "source").read(CONFIG, 0, LARGEST_CONFIG + 1))
        values = schema.parse_value(dict[str, Any], documents.parse_json(raw, LARGEST_CONFIG))
    except Malformed as error:
        raise Refused(f"{CONFIG}: {error}") from None
    for key in FOREIGN:
        if values.get(key):
            raise ConfigError("source", source, f"{CONFIG} has {key}, which our adapters do not express")
    for key in ("peft_type", "bias"):
        if values.get(key, KEYS[key]) != KEYS[key]:
            raise ConfigError("source", source, f"{CONFIG} has another {key} than {KEYS[key]}")
    return values


def _find_short_targets(model: Model, names: list[str]) -> list[str]:
    """Return the words of tune.targets that match just these weights, or their names where no words do."""
    adaptable = [p for p in build_model(model).parameters() if can_adapt(p)]
    words = [w for w in list_target_words(adaptable) if any(n == w or n.endswith(f".{w}") for n in names)]
    matched = {p.name for p in adaptable if any(p.name == w or p.name.endswith(f".{w}") for w in words)}
    return words if matched == {*names} else names
