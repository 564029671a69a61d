"""Export of a checkpoint as transformers saves a model: sharded safetensors, config.json, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from platform.boundary.refusals import ConfigError, refuse_all, violation
from platform.boundary.storage import Storage, all_or_nothing
from platform.boundary.terminal import phase
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.interchange import write_safetensors
from platform.checkpoint.manifest import Manifest
from platform.checkpoint.moves import read_tensor
from platform.config.fields import Model
from platform.data.tokenizer import Vocabulary
from platform.weights.config_keys import Family, Found, Free
from platform.weights.importing import SOURCE
from platform.weights.model_folder import CONFIG, INDEX, SINGLE, token_ids
from platform.weights.tensor_names import (
    Stored,
    config_of,
    expressing,
    family_of,
    meaning,
    model_keys,
    parameters_of,
    stored_model,
    stored_tensors,
)

METADATA = {"format": "pt"}
TYPES = ("float64", "float32", "bfloat16", "float16")
SHARD = 5 * 10**9  # bytes of a file, by default: what most storages take at once


@dataclass(frozen=True)
class Exportable:
    """Checkpoint that transformers can load once it is exported: `family` and `config` (its config.json) say as what;
    `tensors`: theirs; `dtype`: type of all, "" for the types of the checkpoint; `fused`: a layer's experts are in
    stacks."""

    storage: Storage
    directory: str
    manifest: Manifest
    model: Model
    family: Family
    config: dict[str, Any]
    dtype: str
    fused: bool = False

    @cached_property
    def tensors(self) -> list[Stored]:
        """List the tensors of a model to export, named and ordered as transformers stores them."""
        return stored_tensors(self.model, self.family, self.fused)

    @cached_property
    def _states(self) -> set[str]:
        """Return the names of our parameters without gradient, which rounding would change for good."""
        return {name for name, (p, _) in parameters_of(self.model).items() if p.is_state}

    def type_of(self, stored: Stored) -> str:
        """Return the element type of an exported tensor, such as "bfloat16"; a router's bias keeps the checkpoint's."""
        kinds = {self.manifest.tensors[f"model.{part.name}"].dtype for part in stored.parts}
        kept = self._states.issuperset(part.name for part in stored.parts)
        return ("" if kept else self.dtype) or max(kinds, key=TYPES[::-1].index)

    def read(self, stored: Stored) -> Tensor:
        """Read a tensor in transformers' form and the exported type from the checkpoint. Raises Refused or OSError."""
        blocks = [
            read_tensor(self.storage, self.directory, self.manifest, f"model.{part.name}", part.box)
            for part in stored.parts
        ]
        return stored.join_blocks(blocks).to(DTYPES[self.type_of(stored)]).contiguous()


def exportable(
    storage: Storage,
    directory: str,
    manifest: Manifest,
    family: str = "",
    dtype: str = "",
    like: Found | None = None,
    vocabulary: Vocabulary | None = None,
    fused: bool = False,
) -> Exportable:
    """Describe the transformers model as which a checkpoint can be exported. `family`: the model family to take, "" for
    the first that expresses it; `dtype`: the element type of all tensors, "" for the checkpoint's; `like`: a
    config.json for keys that ours do not express; `vocabulary`: the checkpoint's tokenizer, with the ids of special
    tokens; `fused`: stack the experts of a layer. Raises ConfigError with a line for each mistake."""
    model = stored_model(manifest.meta.identity)
    source = like if like is not None else manifest.meta.values.get(SOURCE)
    if source is not None and not isinstance(source, dict):
        raise ConfigError(violation("checkpoint", directory, f"its {SOURCE} is no config.json"))
    config = _config(model, family, source, token_ids(vocabulary, model))
    chosen = family_of(config)
    if fused and not chosen.fused:
        raise ConfigError(f"--fused: {chosen.architecture} has one form of names; leave it out")
    found = Exportable(storage, directory, manifest, model, chosen, config, dtype, fused)
    refuse_all(_lacking(found))
    config["dtype"] = found.type_of(found.tensors[0])
    config.pop("torch_dtype", None)
    return found


def _config(model: Model, family: str, source: Found | None, ids: Found) -> dict[str, Any]:
    """Return the config.json of transformers for an exported model: its `source` if that still describes the model,
    else a new one with the other keys of the source, or else with the `ids` of special tokens."""
    if source is not None and (not family or source.get("model_type") == family) and _says(source, model):
        return dict(source)
    chosen = expressing(model, family)
    config = config_of(model, chosen)
    free = dict(ids)
    if source is not None:
        free = {key: value for key, value in source.items() if _is_free(chosen, key)}
    return {**config, **{key: value for key, value in free.items() if key in config or key.endswith("_token_id")}}


def _says(source: Found, model: Model) -> bool:
    """Return True if a config.json of transformers describes the model to export, `model`."""
    names = () if model.tied else ("lm_head.weight",)
    with suppress(ConfigError):
        return meaning(Model(**model_keys(source, names))) == meaning(model)
    return False


def _is_free(family: Family, key: str) -> bool:
    """Return True if a key of transformers' config.json does not matter to the model's numbers, or is a token's id."""
    return any(key in rule.names for rule in family.rules if isinstance(rule, Free)) or key.endswith("_token_id")


def _lacking(found: Exportable) -> Iterator[str]:
    """Yield a line for the weights that a checkpoint to export lacks, and one for weights of another shape."""
    there, lacks, other = found.manifest.tensors, [], []
    for name, (_, shape) in parameters_of(found.model).items():
        if f"model.{name}" not in there:
            lacks.append(name)
        elif there[f"model.{name}"].shape != shape:
            other.append(f"{name} is {list(there[f'model.{name}'].shape)}, not {list(shape)}")
    if lacks:
        yield f"{found.directory}: lacks {', '.join(lacks)}"
    if other:
        yield f"{found.directory}: {', '.join(other)}"


def sharded(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divide exported tensors (name -> bytes), in order, into lists of names for files of at most `most` bytes, as
    transformers does; a larger tensor is alone in its file."""
    out: list[list[str]] = []
    current: list[str] = []
    at = 0
    for name, size in sizes.items():
        if size > most:
            out.append([name])
            continue
        if at + size > most:
            out.append(current)
            current, at = [], 0
        current.append(name)
        at += size
    return [*out, current] if current else out


def export_model(
    found: Exportable, folder: Storage, most: int = SHARD, more: Mapping[str, bytes] | None = None
) -> list[str]:
    """Export a checkpoint's model into `folder` as transformers saves it, one of its tensors in memory at a time: files
    of safetensors of at most `most` bytes, their index if there are several, and config.json; `more`: further files by
    name, such as the tokenizer's. Return the names of all files; there are all of them, or none (`all_or_nothing`).

    Raises FileExistsError if one is there already, Refused or OSError if the checkpoint cannot be read.
    """
    tensors = {stored.name: stored for stored in found.tensors}
    kinds = {name: found.type_of(stored) for name, stored in tensors.items()}
    sizes = {name: prod(t.shape) * DTYPES[kinds[name]].itemsize for name, t in tensors.items()}
    shards = sharded(sizes, most)
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    documents = dict(more or {})
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = {"total_parameters": sum(prod(t.shape) for t in tensors.values()), "total_size": sum(sizes.values())}
        documents[INDEX] = _document({"metadata": total, "weight_map": where})
    documents[CONFIG] = _document(found.config)  # last: a folder without it is no model
    names = [*files, *documents]
    if taken := sorted({*names} & folder.list("").keys()):
        raise FileExistsError(f"{folder.url} has {', '.join(taken)} already; name another folder")
    with all_or_nothing(folder, names) as place, phase("exporting", sum(sizes.values()), "B") as shown:
        for file, shard in zip(files, shards, strict=True):
            order = sorted(shard, key=lambda name: (-DTYPES[kinds[name]].itemsize, name))  # as safetensors orders them
            described = {name: (kinds[name], tensors[name].shape) for name in order}
            read = (found.read(tensors[name]) for name in shown.each(order, sizes.__getitem__))
            write_safetensors(place, file, METADATA, described, read)
        for name, raw in documents.items():
            place.write(name, [memoryview(raw)])
    return names


def _document(values: Mapping[str, Any]) -> bytes:
    """Return a JSON file of an exported model, such as config.json, as indented bytes with sorted keys."""
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
