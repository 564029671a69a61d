"""Weights that a run starts from (train.init): those of a checkpoint, or of a model that transformers saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from platform.boundary.redaction import bare_url
from platform.checkpoint.blocks.placement import Piece
from platform.checkpoint.moves.passing import Fetch
from platform.checkpoint.moves.reshard import stored_fetch
from platform.checkpoint.storage import catalogue
from platform.checkpoint.storage.manifest import Refused
from platform.checkpoint.storage.read import stored_pieces
from platform.checkpoint.storage.storage import open_storage
from platform.config.fields import Config, ConfigError, Model, violation
from platform.weights.averages import with_averages
from platform.weights.folder import CONFIG
from platform.weights.importing import importable
from platform.weights.names import parameters_of
from platform.weights.translate import meaning, model_keys, stored_model

KEY = "train.init"


@dataclass(frozen=True)
class InitialWeights:
    """Weights at `url`: the pieces that tile every parameter (`model.NAME`), and what fetches them. `format`: of the
    checkpoint, 1 where weights are turned; `notes`: lines on what the model here does otherwise."""

    url: str
    format: int
    pieces: Sequence[Piece[Any]]
    fetch: Fetch[Any]
    notes: Sequence[str]


def initial_weights(config: Config) -> InitialWeights:
    """Open the weights that a run starts from and check that they are those of its model. Raises ConfigError with a
    line for each kind of mistake, all names in it: tensors that are missing, foreign or of another shape."""
    url = config.train.init
    if url.rstrip("/").endswith(".safetensors") or CONFIG in _listed(url):
        if config.train.init_averaged:
            raise ConfigError(
                violation("train.init_averaged", True, f"{bare_url(url)} is no checkpoint of a run", [False])
            )
        found = importable(url, KEY, config.model)
        pieces = [piece for some in found.pieces for piece in some]
        there = Model(**model_keys(found.saved.config, found.saved.tensors))
        return InitialWeights(bare_url(url), 2, pieces, found.saved.fetch, _differences(there, config.model))
    return _of_checkpoint(url, config.model, config.train.init_averaged)


def _listed(url: str) -> dict[str, int]:
    try:
        if found := open_storage(url, KEY).list(""):
            return found
        why = "there is nothing"
    except OSError as error:
        why = f"cannot be read: {error}"
    raise ConfigError(violation(KEY, bare_url(url), why))


def _of_checkpoint(url: str, model: Model, averaged: bool) -> InitialWeights:
    """Return the weights, or the averages of them, of the checkpoint that a URL names, or of the newest good one in the
    storage."""
    try:
        storage, name, manifest = catalogue.select(url, KEY, none=f"holds neither a checkpoint nor a {CONFIG}")
        manifest = with_averages(manifest) if averaged else manifest
    except (Refused, OSError) as error:
        raise ConfigError(violation(KEY, bare_url(url), str(error))) from None
    wanted, turned = parameters_of(model), manifest.meta.format == 1
    there = {n.removeprefix("model."): t.shape for n, t in manifest.tensors.items() if n.startswith("model.")}
    shapes = {n: shape[-1:] + shape[:-1] if turned and p.turned else shape for n, (p, shape) in wanted.items()}
    wrong = {
        "names: missing": [n for n in shapes if n not in there],
        "names: no part of this model": [n for n in there if n not in shapes],
        "shapes": [
            f"{n} is {list(there[n])}, not {list(s)}" for n, s in shapes.items() if n in there and there[n] != s
        ],
    }
    if lines := [violation(KEY, bare_url(url), f"{what}: {', '.join(sorted(n))}") for what, n in wrong.items() if n]:
        raise ConfigError(lines)
    notes: list[str] = []
    with suppress(ConfigError):  # of an earlier or later version, which says nothing of what it lacks
        notes = _differences(stored_model(manifest.meta.identity), model)
    pieces, where = stored_pieces(manifest, [f"model.{n}" for n in shapes]), bare_url(f"{storage.url}/{name}")
    return InitialWeights(where, manifest.meta.format, pieces, stored_fetch(storage, name), notes)


def _differences(there: Model, here: Model) -> list[str]:
    """Return a line for each key that makes the model `here` compute otherwise than that whose weights it takes."""

    def lines() -> Iterator[str]:
        mine, theirs = meaning(here), meaning(there)
        for key in (key for key in vars(here) if mine.get(key) != theirs.get(key)):
            yield f"model.{key}={getattr(here, key)} here, {getattr(there, key)} where the weights come from"

    return list(lines())
