"""Weights that a run starts from (train.init): from a checkpoint, or from a model that transformers saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary.files.file_storage import open_storage
from platform.boundary.files.sealed import LARGEST_BLOCK
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, as_refusal, refuse_all, violation
from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.buffer import DTYPES
from platform.checkpoint.blocks.placement import ITEMSIZE, Piece
from platform.checkpoint.moves import Fetch, stored_fetch
from platform.checkpoint.storage import catalogue
from platform.checkpoint.storage.manifest import Refused
from platform.checkpoint.storage.read import stored_pieces
from platform.config.fields import Config, Model
from platform.weights.averages import with_averages
from platform.weights.folder import CONFIG
from platform.weights.importing import importable, source_keys
from platform.weights.names import parameters_of
from platform.weights.translate import meaning, stored_model

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
