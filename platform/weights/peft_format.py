"""Adapters as PEFT stores them, in and out: adapter_config.json and adapter_model.safetensors, whose tensors are named
after transformers' modules. A `lora_A` is our `down`, a `lora_B` our `up`; of an embedding both are turned. Experts
have one of both for all, [rank x experts, columns] and [rows, rank x experts], as PEFT's `ParamWrapper` reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
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
from platform.config.groups import Tune
from platform.model import build_model
from platform.model.tuning import find_adapters
from platform.plan.adapters import can_adapt, list_target_words
from platform.plan.model_types import Adapter
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
# ends of modules that PEFT 0.21 takes for experts' in a model that has some: adapters of others would do nothing there
RENAMED = (".gate_proj", ".up_proj", ".down_proj")
# keys of PEFT under which an adapter computes something that ours does not, unless they are empty
FOREIGN = ("use_dora", "modules_to_save", "lora_bias")


@dataclass(frozen=True)
class PeftPlace:
    """Place of an adapter at PEFT: the module that it is of, whether that is an embedding, whether it keeps its weight
    with inputs first (`turned`), and the parameter of it that has a matrix for each of `experts`, if any does. It is of
    several `weights` of ours where rows of theirs follow each other, or come in turn (`alternate`)."""

    module: str
    weights: tuple[str, ...]
    turned: bool
    parameter: str = ""
    experts: int = 1
    alternate: bool = False

    @property
    def embeds(self) -> bool:
        """Return True if the module looks its weight's rows up."""
        return self.weights == ("embedding",)

    @property
    def pattern(self) -> str:
        """Return the words by which PEFT's configuration names all places like this one, as PEFT itself does."""
        return rf".*\.{re.escape(self.parameter)}"

    def name_tensors(self, outer: int) -> tuple[str, str]:
        """Return the names of the tensors of our `down` and `up`, of a module that as many `outer` ones wrap."""
        kinds = ("lora_embedding_B", "lora_embedding_A") if self.embeds else ("lora_A.weight", "lora_B.weight")
        module = f"{PREFIX}{self.module}{'.base_layer' * outer}"
        return f"{module}.{kinds[0]}", f"{module}.{kinds[1]}"

    def to_theirs(self, downs: Sequence[Tensor], ups: Sequence[Tensor], joined: bool) -> tuple[Tensor, Tensor]:
        """Return the matrices of our adapters of `weights` as PEFT keeps them: their ranks one after another if
        `joined`, else one `down` for all; of experts `up` with the expert last."""
        downs = [x.reshape(self.experts, -1, prod(x.shape[bool(self.parameter) + 1 :])) for x in downs]
        ups = [x.reshape(self.experts, -1, x.shape[-1]) for x in ups]
        a, b = (torch.cat(downs, 1), _place_diagonally(ups)) if joined else (downs[0], torch.cat(ups, 1))
        if self.alternate:
            b = b.unflatten(1, (len(ups), -1)).transpose(1, 2).flatten(1, 2)
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        return (a.t().contiguous(), b.t().contiguous()) if self.embeds else (a.contiguous(), b.contiguous())

    def to_ours(self, a: Tensor, b: Tensor, rank: int, joined: bool) -> list[tuple[Tensor, Tensor]] | None:
        """Return PEFT's matrices as our `down` and `up` of each of `weights`, of experts [experts, rows, columns]; None
        where they are no such adapters of this rank. `joined` is as in `to_theirs`. Raises RuntimeError for shapes."""
        a, b = (a.t(), b.t()) if self.embeds else (a, b)
        a, b = a.unflatten(0, (self.experts, -1)), b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        count = len(self.weights)
        b = b.unflatten(1, (-1, count)).transpose(1, 2).flatten(1, 2) if self.alternate else b
        ups = b.chunk(count, 1)
        if joined:
            ups = tuple(up[..., i * rank : (i + 1) * rank] for i, up in enumerate(ups))
        is_whole = torch.equal(_place_diagonally(ups) if joined else torch.cat(ups, 1), b)
        if a.shape[1] != rank * (count if joined else 1) or not is_whole:
            return None
        return list(zip(a.split(rank, 1) if joined else [a] * count, ups, strict=True))


def _place_diagonally(blocks: Sequence[Tensor]) -> Tensor:
    """Return for each expert the matrix that has its `blocks` [experts, rows, columns] along its diagonal."""
    return torch.stack([torch.block_diag(*of_expert) for of_expert in zip(*blocks, strict=True)])


def list_places(model: Model, family: Family) -> list[PeftPlace]:
    """List the places at which PEFT can adapt a model: weights alone in their module, and the parameters in which it
    stacks matrices of experts. Places of one module come in the order in which PEFT wraps it."""
    adaptable = {p.name for p in build_model(model).parameters() if can_adapt(p)}
    places = []
    for t in list_stored_tensors(model, family, stacks_experts=bool(model.experts and family.fused)):
        weights, module = tuple(dict.fromkeys(part.name for part in t.parts)), t.name.removesuffix(".weight")
        if not adaptable.issuperset(weights):
            continue
        if t.stacked:
            module, _, parameter = module.rpartition(".")
            places.append(PeftPlace(module, weights, False, parameter, t.stacked, t.alternate))
        elif len(t.parts) == 1:
            places.append(PeftPlace(module, weights, t.turned))
    return places


def is_of_module(name: str, model: Model) -> bool:
    """Return True if a weight is one of a model's modules of multi-token prediction."""
    return name.startswith(tuple(f"layers.{model.layers + i}." for i in range(model.predict_ahead)))


def name_all_tensors(places: Sequence[PeftPlace]) -> dict[PeftPlace, tuple[str, str]]:
    """Return the names of PEFT's tensors of all these places, the last of which in one module wraps those before."""
    modules = [place.module for place in places]
    return {place: place.name_tensors(modules[i + 1 :].count(place.module)) for i, place in enumerate(places)}


def _describe_ranks(places: Iterable[PeftPlace], tune: Tune) -> dict[str, dict[str, float]]:
    """Return the keys by which PEFT knows ranks and scales of `places` with adapters of several weights, joined."""
    counts = {place.pattern: len(place.weights) for place in places}
    more = sqrt if tune.rslora else float  # so that the scale is as that of the others
    alphas = {pattern: tune.alpha * more(n) for pattern, n in counts.items()}
    return {"rank_pattern": {pattern: tune.rank * n for pattern, n in counts.items()}, "alpha_pattern": alphas}


def export_adapters(stored: StoredAdapters, base: str, folder: Storage) -> list[str]:
    """Write adapters into `folder` as PEFT saves them, but for modules of multi-token prediction, which
    transformers lacks; return the names of the files. `base`: the place of their base. Raises ConfigError for weights
    that PEFT has no adapter of, FileExistsError, Refused or OSError."""
    places, tune = list_places(stored.model, choose_family(stored.model, "")), stored.tune
    adapted = {name for name in stored.adapters if not is_of_module(name, stored.model)}
    chosen = [place for place in places if adapted.issuperset(place.weights)]
    renamed = {n for p in chosen if stored.model.experts and p.module.endswith(RENAMED) for n in p.weights}
    if missing := sorted(renamed | adapted - {name for place in chosen for name in place.weights}):
        other = "it takes the name for an expert's" if missing[0] in renamed else "its module has other weights, too"
        reason = f"{missing[0]} has no adapter at PEFT: {other}"
        places = [place for place in places if renamed.isdisjoint(place.weights)]
        known = {name for place in places for name in place.weights}
        legal = list_target_words(p for p in build_model(stored.model).parameters() if p.name in known)
        raise ConfigError("tune.targets", tune.targets, reason, legal)
    if taken := {CONFIG, WEIGHTS} & folder.list_sizes("").keys():
        raise FileExistsError(f"{folder.url} has {', '.join(sorted(taken))} already; name another folder")
    tensors: dict[str, Tensor] = {}
    pairs = {place: [_read_pair(stored, stored.adapters[name]) for name in place.weights] for place in chosen}
    joins = any(not torch.equal(pair[0], of[0][0]) for of in pairs.values() for pair in of)
    for place, names in name_all_tensors(chosen).items():
        downs, ups = zip(*pairs[place], strict=True)
        tensors |= zip(names, place.to_theirs(downs, ups, joins and len(downs) > 1), strict=True)
    values = {**KEYS, "r": tune.rank, "lora_alpha": tune.alpha, "lora_dropout": tune.dropout, "use_rslora": tune.rslora}
    modules = [place.module for place in chosen if not place.parameter]
    values |= {"base_model_name_or_path": base, "target_modules": modules}
    values["target_parameters"] = [f"{place.module}.{place.parameter}" for place in chosen if place.parameter]
    values |= _describe_ranks((place for place in chosen if joins and len(place.weights) > 1), tune)
    values["fan_in_fan_out"] = any(place.turned for place in chosen)
    described = {name: ("float32", tuple(x.shape)) for name, x in sorted(tensors.items())}
    with write_all_or_nothing(folder, [WEIGHTS, CONFIG]) as draft:
        write_safetensors(draft, WEIGHTS, METADATA, described, (tensors[name] for name in described))
        draft.write(CONFIG, [memoryview((json.dumps(values, indent=2, sort_keys=True) + "\n").encode())])
    return [WEIGHTS, CONFIG]


def _read_pair(stored: StoredAdapters, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return the matrices of an adapter, `up` as [experts if there are, rows, rank]. Raises Refused or OSError."""
    down, up = stored.matrix(adapter.down).float(), stored.matrix(adapter.up).float()
    return down, up.flatten(adapter.up.num_stack_dims, -2)


def holds_adapters(url: str) -> bool:
    """Return True if PEFT saved adapters in the folder at `url`; raises OSError, ConfigError."""
    return not url.endswith(".safetensors") and CONFIG in open_storage(url, "source").list_sizes("")


def import_adapters(source: str, base: str, storage: Storage) -> str:
    """Make a checkpoint on `storage` of adapters that PEFT saved at `source`; return its directory. `base`: the folder
    of what they are of, "" for the one that they name. Raises ConfigError, Refused or OSError."""
    values = _read_config(source)
    base = base or values.get("base_model_name_or_path") or ""
    of_base = open_importable(base, "--base")
    model, places = of_base.model, list_places(of_base.model, find_family(of_base.saved.config))
    try:
        tensors = dict(import_safetensors(f"{source.rstrip('/')}/{WEIGHTS}")[1])
    except Malformed as error:
        raise Refused(f"{WEIGHTS}: {error}") from None
    chosen = _choose_places(places, values, tensors)
    named = name_all_tensors(chosen)
    weights = open_initial_weights(replace(Config(), model=model, train=replace(Config().train, init=base)))
    for place in (place for place in chosen if not place.parameter):  # PEFT saves embeddings beside their adapters
        saved, (name,) = tensors.pop(f"{PREFIX}{place.module}.base_layer.weight", None), place.weights
        if saved is not None and not torch.equal(saved, read_weight(weights, f"model.{name}").to(saved.dtype)):
            raise ConfigError("source", source, f"{place.module} was trained beside its adapter")
    if others := sorted(tensors.keys() ^ {theirs for both in named.values() for theirs in both}):
        raise ConfigError("source", source, f"{others[0]} is no part of an adapter of {base}")
    names = [name for place in chosen for name in place.weights]
    targets = _find_short_targets(model, names)
    rslora, scale = bool(values.get("use_rslora")), values.get("lora_alpha")
    numbers = {"rank": values.get("r"), "alpha": scale if isinstance(scale, float) else float(scale or 0)}
    tune = Config.from_dict({"tune": {"kind": "lora", "rslora": rslora, "targets": targets, **numbers}}).tune
    joined = [place for place in chosen if len(place.weights) > 1]
    ranks = {key: values.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    if (joins := any(ranks.values())) and ranks != _describe_ranks(joined, tune):
        raise ConfigError("source", source, f"{CONFIG} has rank_pattern, which our adapters do not express")
    adapters = find_adapters(model, tune, build_model(model))
    sizes = build_model(model).sizes
    pieces, shapes = list[Piece[Tensor]](), dict[str, tuple[int, ...]]()
    for place, both in named.items():
        for name, pair in zip(place.weights, _read_theirs(source, place, both, tensors, tune.rank, joins), strict=True):
            for p, ours in zip((adapters[name].down, adapters[name].up), pair, strict=True):
                shape = tuple({**sizes, **dict(p.sizes)}[d] for d in p.dims)
                if prod(shape) != ours.numel():
                    raise ConfigError("source", source, f"{both[0]} and the other are not of {p.name}, {list(shape)}")
                dtype = next(word for word, kind in DTYPES.items() if kind == ours.dtype)
                shapes[f"model.{p.name}"] = shape
                piece = ours.reshape(shape).contiguous()
                pieces.append(Piece(f"model.{p.name}", dtype, Box.whole_tensor(shape), piece))
    values = {SOURCE: of_base.saved.config, BASE: vars(weights.describe_base())}
    identity = {"model": {key: value for key, value in vars(model).items() if key != "source"}}
    identity |= {f"tune.{key}": value for key, value in vars(tune).items()}
    meta = Meta(step=0, samples=0, seed=0, corpus="", identity=identity, configuration="", plan={}, values=values)
    files, _ = read_companions_and_tokenizer_lack(of_base.saved, "--base")
    return store_pieces(storage, [pieces], _copy_from_memory, shapes, meta, files)


def _choose_places(
    places: Sequence[PeftPlace], values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[PeftPlace]:
    """Return the places of the adapters that PEFT's configuration and tensors name."""
    listed = values.get("target_parameters")
    ends = tuple(f".{target}" for target in listed) if isinstance(listed, list) else ()

    def is_named(place: PeftPlace) -> bool:
        """Return True if a place has an adapter."""
        if place.parameter:
            return f".{place.module}.{place.parameter}".endswith(ends)
        return place.name_tensors(0)[0] in tensors

    return list(filter(is_named, places))


def _read_theirs(
    source: str, place: PeftPlace, names: tuple[str, str], tensors: Mapping[str, Tensor], rank: int, joins: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return our `down` and `up` of each weight at a place, by PEFT's tensors of these names. Raises ConfigError."""
    try:
        pairs = place.to_ours(tensors[names[0]], tensors[names[1]], rank, joins and len(place.weights) > 1)
    except RuntimeError:
        pairs = None
    if pairs is None:
        shapes = " and ".join(str(list(tensors[name].shape)) for name in names)
        raise ConfigError("source", source, f"{names[0]} and the other are {shapes}: no adapter of rank {rank}")
    return pairs


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
