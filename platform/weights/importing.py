"""Weights that a run starts from (train.init): from a checkpoint, or from a model that transformers saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, as_refusal, refuse_all, rephrasing, violation
from platform.boundary.sealed_blocks import LARGEST_BLOCK
from platform.boundary.storage import Storage, open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import ITEMSIZE, Box, Piece
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.catalogue import CarriedFiles, stored_pieces
from platform.checkpoint.interchange import store_pieces
from platform.checkpoint.manifest import Manifest, Meta, Refused
from platform.checkpoint.moves import Fetch, stored_fetch
from platform.config.fields import Config, Model
from platform.data.tokenizer_files import has_tokenizer
from platform.optimizer.optimizers import AVERAGE
from platform.weights import FROM_HF
from platform.weights.model_folder import CONFIG, Place, SavedModel
from platform.weights.tensor_names import (
    Stored,
    family_of,
    matched,
    meaning,
    model_keys,
    parameters_of,
    stored_model,
    stored_tensors,
)

# Import of a model that transformers saved: what it is, as our keys and in a configuration, whether all of it is
# there, and a checkpoint of it.

SOURCE = "source"  # value of an imported checkpoint's metadata: the config.json that it was imported from


@dataclass(frozen=True)
class Importable:
    """Model that transformers saved, all of which is there: `model`, our configuration of it; `tensors`: theirs, each
    with its name in the files."""

    saved: SavedModel
    model: Model
    tensors: tuple[tuple[Stored, str], ...]

    @property
    def pieces(self) -> list[list[Piece[Place]]]:
        """Return the pieces of the weights to import, a list for each tensor in transformers' files."""
        return [self.saved.pieces(stored, name) for stored, name in self.tensors]


def source_keys(source: str, key: str) -> dict[str, Any]:
    """Return the configuration keys of the model saved at `source`; raises ConfigError, naming the key `key`."""
    return keys_of(SavedModel(source, key))


def keys_of(saved: SavedModel) -> dict[str, Any]:
    """Return the configuration keys, without `model.`, of a model that transformers saved. Raises ConfigError."""
    with _naming(saved):
        return model_keys(saved.config, saved.tensors)


def complete_model(config: Config, typed: Mapping[str, Any]) -> list[str]:
    """Set the model keys of a configuration in place as the saved model at its `model.source` has them, except keys
    that the user typed (`typed`: key -> value), and train.init and data.tokenizer where they are not set; then clear
    `model.source`. Return one line per mistake."""
    source, named = config.model.source, config.model.kind == FROM_HF
    config.model.kind = "decoder" if named else config.model.kind
    if not source:
        line = violation("model.source", "", "model=from_hf needs a folder that transformers saved", ["FOLDER"])
        return [line] if named else []
    try:
        found = source_keys(source, "model.source")
    except ConfigError as error:
        return error.violations
    for key, value in found.items():
        if f"model.{key}" not in typed:
            setattr(config.model, key, value)
    config.train.init, config.model.source = config.train.init or source, ""
    said = "data.tokenizer" in typed or config.data.tokenizer != "train" or config.data.kind == "synthetic"
    return [] if said else _complete_tokenizer(config, source)


def _complete_tokenizer(config: Config, source: str) -> list[str]:
    """Set data.tokenizer in place to the one beside the saved model at `source`; return a refusal line if none is."""
    folder = source.rstrip("/").rpartition("/")[0] if source.rstrip("/").endswith(".safetensors") else source
    if not has_tokenizer(folder):
        reason = f"there is none beside the model in {folder}, and one that is trained gives other tokens than it knows"
        return [violation("data.tokenizer", "", reason, ["data.tokenizer=PATH", "data.tokenizer=train"])]
    config.data.tokenizer = folder
    return []


def importable(source: str, key: str, model: Model | None = None, drop: Sequence[str] = ()) -> Importable:
    """Read the headers of the saved model at `source`, and check them against `model`, by default what its config.json
    says. `drop`: patterns of names to leave out.

    Raises ConfigError with a line for each key that we do not express, and for missing, foreign and misshapen tensors,
    all of them named.
    """
    saved = SavedModel(source, key)
    own = model or Model(**keys_of(saved))
    with _naming(saved):
        return Importable(saved, own, tuple(_found(saved, own, drop)))


def _found(saved: SavedModel, model: Model, drop: Sequence[str]) -> list[tuple[Stored, str]]:
    """Return the tensors of a model that transformers saved, each with its name in the files, for `importable`."""
    family = family_of(saved.config)
    names = [name for name in saved.tensors if not any(fnmatchcase(name, pattern) for pattern in drop)]
    forms = [stored_tensors(model, family, fused) for fused in ((False, True) if family.fused else (False,))]
    found = [(wanted, *matched(names, wanted, model, family)) for wanted in forms]
    wanted, match, wrong = min(found, key=lambda one: len(one[0]) - len(one[1].there))
    tensors = [(stored, match.there[stored.name]) for stored in wanted if stored.name in match.there]
    wrong += _misshapen(saved, tensors)
    refuse_all(wrong or list(_unequal(saved, match.repeated, match.there)))
    return tensors


def _naming(saved: SavedModel) -> AbstractContextManager[None]:
    """Put the saved model's URL at the start of every line of a ConfigError raised within the context."""
    return rephrasing(lambda line: f"{saved.url}: {line}")


def _misshapen(saved: SavedModel, tensors: Sequence[tuple[Stored, str]]) -> Iterator[str]:
    """Yield one line for all saved tensors of another shape than the model's, and one for tensors that hold no
    floating-point numbers. `tensors`: (tensor expected, its name in the files)."""
    shapes = [
        f"{name} is {list(there)}, not {list(stored.shape)}"
        for stored, name in tensors
        if (there := saved.tensors[name][1].shape) != stored.shape
    ]
    if shapes:
        yield f"shapes: {', '.join(shapes)}"
    kinds = [f"{name} is {t.dtype}" for _, name in tensors if not (t := saved.tensors[name][1]).type.is_floating_point]
    if kinds:
        yield f"types: {', '.join(kinds)}; a parameter is of floating-point numbers"


def _unequal(saved: SavedModel, repeated: Sequence[tuple[str, str]], there: dict[str, str]) -> Iterator[str]:
    """Yield a line for saved tensors that should repeat others (tied weights), but are not equal to them."""
    if apart := [f"{name} differs from {there[of]}" for name, of in repeated if not saved.equal(name, there[of])]:
        yield f"names: {', '.join(apart)}, to which this config.json ties it"


def import_model(found: Importable, storage: Storage, carried: CarriedFiles | None = None) -> str:
    """Make a checkpoint of an importable model on `storage`, block by block, in the element types of its files; return
    the checkpoint's directory. `carried`: files that it carries, such as the tokenizer's."""
    shapes = {f"model.{part.name}": part.shape for stored, _ in found.tensors for part in stored.parts}
    model = {key: value for key, value in vars(found.model).items() if key != "source"}
    meta = Meta(
        step=0,
        samples=0,
        seed=0,
        corpus="",
        identity={"model": model},
        configuration="",
        plan={},
        values={SOURCE: found.saved.config},
    )
    return store_pieces(storage, found.pieces, found.saved.fetch, shapes, meta, carried)


# Averaged weights of a checkpoint (train.ema) in the place of the trained ones.


def with_averages(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint with averaged weights (train.ema) in place of the trained ones; frozen
    weights, which have none, are as they are. Raises Refused if the checkpoint holds no averages."""
    averages = {n.partition(".")[2]: t for n, t in manifest.tensors.items() if n.startswith(f"{AVERAGE}.")}
    if not averages:
        raise Refused("holds no averaged weights: its run had train.ema=0")
    named = {f"model.{n}": replace(t, name=f"model.{n}") for n, t in averages.items()}
    return replace(manifest, tensors={**manifest.tensors, **named})


KEY = "train.init"


@dataclass(frozen=True)
class InitialWeights:
    """Weights at `url`: the pieces that tile every parameter (`model.NAME`), and what fetches them. `notes`: lines
    on what the model here does otherwise.

    Where the model here has a larger vocabulary, its new rows are made of the existing ones (`_grown`)."""

    url: str
    pieces: Sequence[Piece[Any]]
    fetch: Fetch[Any]
    notes: Sequence[str]


def initial_weights(config: Config) -> InitialWeights:
    """Open the weights that a run starts from and check that they fit its model. Raises ConfigError with a line for
    each kind of mistake, all names in it: tensors that are missing, foreign or of another shape."""
    url = config.train.init
    if url.rstrip("/").endswith(".safetensors") or CONFIG in _listed(url):
        if config.train.init_averaged:
            raise ConfigError(
                violation("train.init_averaged", True, f"{bare_url(url)} is no checkpoint of a run", [False])
            )
        there = Model(**source_keys(url, KEY))
        found = importable(url, KEY, _as_large(config.model, there))
        pieces = [piece for some in found.pieces for piece in some]
        notes = _differences(there, config.model)
        return _grown(InitialWeights(bare_url(url), pieces, found.saved.fetch, notes), config.model, there)
    return _of_checkpoint(url, config.model, config.train.init_averaged)


def _listed(url: str) -> dict[str, int]:
    """Return the files in which a run's initial weights are (train.init), name -> bytes. Raises ConfigError if there
    are none, or they cannot be listed."""
    try:
        if found := open_storage(url, KEY).list(""):
            return found
        why = "there is nothing"
    except OSError as error:
        why = f"cannot be read: {error}"
    raise ConfigError(violation(KEY, bare_url(url), why))


def _of_checkpoint(url: str, model: Model, averaged: bool) -> InitialWeights:
    """Open the initial weights of a run, or the averages of them (`averaged`), from the checkpoint that a URL names, or
    the newest good one in the storage. Raises ConfigError unless they fit `model`."""
    with as_refusal(KEY, bare_url(url), Refused, OSError):
        storage, name, manifest = catalogue.select(url, KEY, none=f"holds neither a checkpoint nor a {CONFIG}")
        manifest = with_averages(manifest) if averaged else manifest
    source, notes = model, []
    with suppress(ConfigError):  # of an earlier or later version, which says nothing of what it lacks
        source = stored_model(manifest.meta.identity)
        notes = _differences(source, model)
    there = {n.removeprefix("model."): t.shape for n, t in manifest.tensors.items() if n.startswith("model.")}
    shapes = {n: shape for n, (_, shape) in parameters_of(_as_large(model, source)).items()}
    wrong = {
        "names: missing": [n for n in shapes if n not in there],
        "names: no part of this model": [n for n in there if n not in shapes],
        "shapes": [
            f"{n} is {list(there[n])}, not {list(s)}" for n, s in shapes.items() if n in there and there[n] != s
        ],
    }
    refuse_all([violation(KEY, bare_url(url), f"{what}: {', '.join(sorted(n))}") for what, n in wrong.items() if n])
    pieces, where = stored_pieces(manifest, [f"model.{n}" for n in shapes]), bare_url(f"{storage.url}/{name}")
    found = InitialWeights(where, pieces, stored_fetch(storage, name), notes)
    return _grown(found, model, source)


class _AddedRows(NamedTuple):
    """Place of rows of a table that weights lack, called `table`: each is the mean of all rows that they have."""

    table: str


def _as_large(model: Model, there: Model) -> Model:
    """Return `model` with the vocabulary size of the weights that it is initialised from, if that is smaller."""
    return replace(model, vocab=min(model.vocab, there.vocab))


def _grown(found: InitialWeights, model: Model, there: Model) -> InitialWeights:
    """Extend the initial weights, of the model `there`, to weights of `model`, whose vocabulary may be larger: each new
    token's row is the mean of the rows of its table, summed in the order of the files, so that it is the same under
    every plan."""
    if model.vocab <= there.vocab:
        return found
    old: dict[str, list[Piece[Any]]] = defaultdict(list)
    for piece in found.pieces:
        old[piece.name].append(piece)
    tables = {f"model.{n}": shape for n, (p, shape) in parameters_of(model).items() if p.dims[:1] == ("vocab",)}
    new = [piece for name, shape in tables.items() for piece in _new_rows(name, shape, there.vocab, old[name][0].dtype)]

    @cache
    def mean(name: str) -> Tensor:
        """Return the mean of all rows of the table `name` in the initial weights, summed in the order of the files."""
        total = torch.zeros(tables[name][1:], dtype=torch.float64)
        for piece in old[name]:
            memory = torch.empty(piece.nbytes, dtype=torch.uint8)
            found.fetch([piece], [memory])
            rows = memory.view(DTYPES[piece.dtype]).view(piece.box.extent)
            columns = [slice(a, a + n) for a, n in zip(piece.box.offset[1:], piece.box.extent[1:], strict=True)]
            total[tuple(columns)] += rows.double().sum(0)
        return total / there.vocab

    def fetch(wanted: Sequence[Piece[Any]], into: Sequence[Tensor]) -> None:
        """Read wanted pieces of the initial weights; fill the rows of new tokens with the mean row of their table."""
        pairs = [*zip(wanted, into, strict=True)]
        kept = [pair for pair in pairs if not isinstance(pair[0].source, _AddedRows)]
        found.fetch([piece for piece, _ in kept], [memory for _, memory in kept])
        for piece, memory in pairs:
            if isinstance(piece.source, _AddedRows):
                memory.view(DTYPES[piece.dtype]).view(piece.box.extent).copy_(mean(piece.name))

    names = ", ".join(name.removeprefix("model.") for name in tables)
    note = f"{model.vocab - there.vocab} new rows of {names}: each the mean of the {there.vocab} that are there"
    return replace(found, pieces=[*found.pieces, *new], fetch=fetch, notes=[*found.notes, note])


def _new_rows(name: str, shape: Sequence[int], first: int, dtype: str) -> Iterator[Piece[Any]]:
    """Yield the pieces of an initial embedding table, from row `first` on, that are the rows of added tokens."""
    step = max(1, LARGEST_BLOCK // (prod(shape[1:]) * ITEMSIZE[dtype]))
    for a in range(first, shape[0], step):
        box = Box((a, *(0 for _ in shape[1:])), (min(step, shape[0] - a), *shape[1:]))
        yield Piece(name, dtype, box, _AddedRows(name))


def _differences(there: Model, here: Model) -> list[str]:
    """Return a line per key by which the model `here` computes otherwise than the one whose weights initialise it."""
    mine, theirs = ({**meaning(m), "capacity_factor": m.capacity_factor * (m.experts > 0)} for m in (here, there))
    return [
        f"model.{key}={getattr(here, key)} here, {getattr(there, key)} where the weights come from"
        for key in vars(here)
        if mine.get(key) != theirs.get(key)
    ]
