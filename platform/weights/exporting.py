"""Export of a checkpoint as transformers saves a model: sharded safetensors, config.json, tokenizer files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError, format_violation, refuse_all
from platform.boundary.storage import Storage, write_all_or_nothing
from platform.boundary.terminal import show_phase
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.interchange import write_safetensors
from platform.checkpoint.manifest import Manifest
from platform.checkpoint.moves import read_tensor
from platform.config.fields import Config, Model
from platform.data.tokenizer import Vocabulary
from platform.weights import tensor_names
from platform.weights.config_keys import QUANTISED, ConfigJson, Family, Free
from platform.weights.importing import SOURCE, InitialWeights, open_initial_weights, read_weight
from platform.weights.model_folder import CONFIG, INDEX, SINGLE, WEIGHTS, SavedModel, special_token_ids
from platform.weights.quantised import QuantisedTensor
from platform.weights.stored_adapters import read_base
from platform.weights.tensor_names import HfTensor, choose_family, find_family, functional_keys, list_parameters

METADATA = {"format": "pt"}
TYPES = ("float64", "float32", "bfloat16", "float16")
_LAYER = re.compile(r".*?\blayers\.\d+\.")
SHARD = 5 * 10**9  # bytes of a file, by default: what most storages take at once


class WrittenTensor(NamedTuple):
    """Tensor of an exported file: its element type, its shape, and what reads it from the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of this exported tensor."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Return the bytes of this exported tensor."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Exportable:
    """Checkpoint that transformers can load once it is exported: `family` and `config` (its config.json) say as what;
    `tensors`: theirs; `dtype`: type of all, "" for the types of the checkpoint; `fused`: a layer's experts are in
    stacks; `merged`: the weights, if the checkpoint holds adapters of others; `as_read`: a saved model whose types, and
    forms of quantised tensors, the export has."""

    storage: Storage
    directory: str
    manifest: Manifest
    model: Model
    family: Family
    config: dict[str, Any]
    dtype: str
    fused: bool = False
    merged: InitialWeights | None = None
    as_read: SavedModel | None = None

    @cached_property
    def _types(self) -> dict[str, str]:
        """Map `model.NAME` to the stored element type of each weight."""
        if self.merged:
            return {piece.name: piece.dtype for piece in self.merged.pieces}
        return {name: t.dtype for name, t in self.manifest.tensors.items()}

    @cached_property
    def tensors(self) -> list[HfTensor]:
        """List the tensors of a model to export, named and ordered as transformers stores them, then repeated ones."""
        tensors = tensor_names.list_stored_tensors(self.model, self.family, self.fused)
        by_name = {stored.name: stored for stored in tensors}
        repeats = tensor_names.list_repeats(self.model, self.family, by_name).items()
        return [*tensors, *(replace(by_name[of], name=name) for name, of in repeats if name not in self.family.same)]

    @cached_property
    def _state_names(self) -> set[str]:
        """Return the names of our parameters without gradient, which rounding would change for good."""
        return {name for name, (p, _) in list_parameters(self.model).items() if p.is_state}

    def element_type(self, stored: HfTensor) -> str:
        """Return the element type of an exported tensor, such as "bfloat16"; a router's bias keeps the checkpoint's."""
        if self.as_read and stored.name in self.as_read.tensors:
            return str(self.as_read.tensors[stored.name][1].torch_type).removeprefix("torch.")
        kinds = {self._types[f"model.{part.name}"] for part in stored.parts}
        kept = self._state_names.issuperset(part.name for part in stored.parts)
        return ("" if kept else self.dtype) or max(kinds, key=TYPES[::-1].index)

    def read_stored_tensor(self, stored: HfTensor) -> Tensor:
        """Read a tensor in transformers' form and the exported type from the checkpoint. Raises Refused or OSError."""
        return self._read_numbers(stored).to(DTYPES[self.element_type(stored)]).contiguous()

    def list_written_tensors(self) -> dict[str, WrittenTensor]:
        """Map the names of the tensors to write to what they are: of a quantised one both, values and scales."""
        written = {}
        for stored in self.tensors:
            if self.as_read and (form := self.as_read.find_quantised(stored.name)):
                for i, (name, (_, t)) in enumerate(zip(form.names, (form.values, form.scales), strict=True)):
                    dtype = str(t.torch_type).removeprefix("torch.")
                    written[name] = WrittenTensor(dtype, t.shape, partial(self._read_quantised, form, stored, i))
            else:
                dtype = self.element_type(stored)
                written[stored.name] = WrittenTensor(dtype, stored.shape, partial(self.read_stored_tensor, stored))
        return written

    def _read_quantised(self, form: QuantisedTensor, stored: HfTensor, which: int) -> Tensor:
        """Return the values (0) or the scales (1) of a tensor from the checkpoint that is written as it was read."""
        assert self.as_read, "whose form it has"
        return self.as_read.quantise_tensor(form, self._read_numbers(stored))[which].contiguous()

    def _read_numbers(self, stored: HfTensor) -> Tensor:
        """Return a tensor in transformers' form and the checkpoint's type. Raises Refused or OSError."""
        read = partial(read_tensor, self.storage, self.directory, self.manifest)
        read = partial(read_weight, self.merged) if self.merged else read
        blocks = [read(f"model.{part.name}", part.box) for part in stored.parts]
        return stored.join_blocks(blocks)


def open_exportable(
    storage: Storage,
    directory: str,
    manifest: Manifest,
    family: str = "",
    dtype: str = "",
    like: ConfigJson | None = None,
    vocabulary: Vocabulary | None = None,
    stacks_experts: bool = False,
    as_read: SavedModel | None = None,
) -> Exportable:
    """Describe the transformers model as which a checkpoint can be exported. `family`: the model family to take, "" for
    the first that expresses it; `dtype`: the element type of all tensors, "" for the checkpoint's; `like`: a
    config.json for keys that ours do not express; `vocabulary`: the checkpoint's tokenizer, with the ids of special
    tokens; `stacks_experts`: stack the experts of a layer; `as_read`: see Exportable. Raises ConfigError with a line
    for each mistake."""
    model = tensor_names.parse_stored_model(manifest.meta.identity)
    source = like if like is not None else manifest.meta.values.get(SOURCE)
    if source is not None and not isinstance(source, dict):
        raise ConfigError("checkpoint", directory, f"its {SOURCE} is no config.json")
    source = source and {key: value for key, value in source.items() if key != QUANTISED}
    config = _choose_config_json(model, family, source, special_token_ids(vocabulary, model))
    chosen_family = find_family(config)
    if stacks_experts and not chosen_family.fused:
        raise ConfigError(f"--fused: {chosen_family.architecture} has one form of names; leave it out")
    merged = open_merged_weights(storage, directory, model) if read_base(manifest) else None
    form = dtype, stacks_experts, merged, as_read
    export = Exportable(storage, directory, manifest, model, chosen_family, config, *form)
    refuse_all([*_violations_of_forms(export), *([] if merged else _violations_of_weights(export))])
    config["dtype"] = export.element_type(export.tensors[0])
    if model.predict_ahead:
        config["num_nextn_predict_layers"] = model.predict_ahead
    config.pop("torch_dtype", None)
    if as_read:
        config[QUANTISED] = as_read.config[QUANTISED]
    return export


def _violations_of_forms(export: Exportable) -> Iterator[str]:
    """Yield a line where tensors cannot be written as another model has them: it has none that are quantised, or has
    some of the exported layers' under names or in shapes that the export has not."""
    if not export.as_read:
        return
    exported, read = {stored.name: stored.shape for stored in export.tensors}, export.as_read.tensors
    layers = {match[0] for name in exported if (match := _LAYER.match(name))}
    quantised = [n for n in export.as_read.quantised_names if not (match := _LAYER.match(n)) or match[0] in layers]
    if lacking := [n for n in quantised if exported.get(n) != read[n][1].shape]:
        yield f"--as-read: {export.as_read.url} has {lacking[0]} in another form, and {len(lacking) - 1} more"
    elif not quantised:
        yield format_violation("--as-read", export.as_read.url, "holds no quantised weights; leave it out")
    if export.dtype:
        yield format_violation("--as-read", export.as_read.url, "says the types of all tensors; leave out --dtype")


def open_merged_weights(storage: Storage, directory: str, model: Model) -> InitialWeights:
    """Open the weights of `model` that a checkpoint of adapters makes of its base. Raises ConfigError."""
    train = replace(Config().train, init=f"{storage.url}/{directory}")
    return open_initial_weights(replace(Config(), model=model, train=train))


def _choose_config_json(model: Model, family: str, source: ConfigJson | None, ids: ConfigJson) -> dict[str, Any]:
    """Return the config.json of transformers for an exported model: its `source` if that still describes the model,
    else a new one with the other keys of the source, or else with the `ids` of special tokens."""
    if source is not None and (not family or source.get("model_type") == family) and _is_config_of_model(source, model):
        return dict(source)
    chosen = choose_family(model, family)
    config = tensor_names.build_config_json(model, chosen)
    free = ids if source is None else {key: value for key, value in source.items() if _is_irrelevant_key(chosen, key)}
    return {**config, **{key: value for key, value in free.items() if key in config or key.endswith("_token_id")}}


def _is_config_of_model(source: ConfigJson, model: Model) -> bool:
    """Return True if a config.json of transformers describes the model to export, `model`."""
    names = () if model.tied else ("lm_head.weight",)
    with suppress(ConfigError):
        return functional_keys(Model(**tensor_names.translate_config_json(source, names))) == functional_keys(model)
    return False


def _is_irrelevant_key(family: Family, key: str) -> bool:
    """Return True if a key of transformers' config.json does not matter to the model's numbers, or is a token's id."""
    return any(key in rule.key_names for rule in family.rules if isinstance(rule, Free)) or key.endswith("_token_id")


def _violations_of_weights(export: Exportable) -> Iterator[str]:
    """Yield a line for the weights that a checkpoint to export lacks, and one for weights of another shape."""
    checkpoint_tensors, lacks, other_shapes = export.manifest.tensors, [], []
    for name, (_, shape) in list_parameters(export.model).items():
        if f"model.{name}" not in checkpoint_tensors:
            lacks.append(name)
        elif checkpoint_tensors[f"model.{name}"].shape != shape:
            other_shapes.append(f"{name} is {list(checkpoint_tensors[f'model.{name}'].shape)}, not {list(shape)}")
    if lacks:
        yield f"{export.directory}: lacks {', '.join(lacks)}"
    if other_shapes:
        yield f"{export.directory}: {', '.join(other_shapes)}"


def divide_into_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Divide exported tensors (name -> bytes), in order, into lists of names for files of at most `max_bytes` bytes, as
    transformers does; a larger tensor is alone in its file."""
    shards: list[list[str]] = []
    current: list[str] = []
    shard_bytes = 0
    for name, size in sizes.items():
        if size > max_bytes:
            shards.append([name])
            continue
        if shard_bytes + size > max_bytes:
            shards.append(current)
            current, shard_bytes = [], 0
        current.append(name)
        shard_bytes += size
    return [*shards, current] if current else shards


def export_model(
    export: Exportable, folder: Storage, max_file_bytes: int = SHARD, more_files: Mapping[str, bytes] | None = None
) -> list[str]:
    """Export a checkpoint's model into `folder` as transformers saves it, one of its tensors in memory at a time: files
    of safetensors of at most `max_file_bytes` bytes, their index if there are several, and config.json; `more_files`:
    further files by name, such as the tokenizer's. Return the names of all files; there are all of them, or none
    (`write_all_or_nothing`).

    Raises FileExistsError if one, or other weights, are there already; Refused or OSError if the checkpoint cannot be
    read.
    """
    tensors = export.list_written_tensors()
    sizes = {name: t.nbytes for name, t in tensors.items()}
    shards = divide_into_shards(sizes, max_file_bytes)
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = [SINGLE] if len(shards) == 1 else files
    documents = dict(more_files or {})
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = {"total_parameters": sum(prod(t.shape) for t in tensors.values()), "total_size": sum(sizes.values())}
        documents[INDEX] = _encode_json({"metadata": total, "weight_map": where})
    documents[CONFIG] = _encode_json(export.config)  # last: a folder without it is no model
    names = [*files, *documents]
    weights = {name for name in folder.list_sizes("") if name.endswith(WEIGHTS)}  # readers might take those
    if taken_names := sorted(weights | ({*names} & folder.list_sizes("").keys())):
        raise FileExistsError(f"{folder.url} has {', '.join(taken_names)} already; name another folder")
    phase = show_phase("exporting", sum(sizes.values()), "B")
    with write_all_or_nothing(folder, names) as draft_storage, phase as shown:
        for file, shard in zip(files, shards, strict=True):
            order = sorted(shard, key=lambda name: (-tensors[name].itemsize, name))  # as safetensors orders them
            descriptions = {name: (tensors[name].dtype, tensors[name].shape) for name in order}
            read = (tensors[name].read() for name in shown.iterate_parts(order, sizes.__getitem__))
            write_safetensors(draft_storage, file, METADATA, descriptions, read)
        for name, raw in documents.items():
            draft_storage.write(name, [memoryview(raw)])
    return names


def _encode_json(values: Mapping[str, Any]) -> bytes:
    """Return a JSON file of an exported model, such as config.json, as indented bytes with sorted keys."""
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
