"""Weights that a run starts from (train.init): those of a checkpoint, or of a model that transformers saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from platform.weights.folder import CONFIG
from platform.weights.importing import importable, source_keys
from platform.weights.names import parameters_of
from platform.weights.translate import meaning

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
        found = importable(url, KEY, config.model)
        pieces = [piece for some in found.pieces for piece in some]
        there = Model(**source_keys(url, KEY))
        return InitialWeights(bare_url(url), 2, pieces, found.saved.fetch, _differences(there, config.model))
    return _of_checkpoint(url, config.model)


def _listed(url: str) -> dict[str, int]:
    try:
        if found := open_storage(url, KEY).list(""):
            return found
        why = "there is nothing"
    except OSError as error:
        why = f"cannot be read: {error}"
    raise ConfigError(violation(KEY, bare_url(url), why))


def _of_checkpoint(url: str, model: Model) -> InitialWeights:
    """Return the weights of the checkpoint that a URL names, or of the newest good one in the storage."""
    at, name = catalogue.split_url(url)
    storage = open_storage(at, KEY)
    try:
        if name is None:
            found = catalogue.find(storage, deep=False, mark=False)
            if not found.directory:
                reasons = "; ".join(f"{directory}: {reason}" for directory, reason in found.refused)
                raise Refused(reasons or f"holds neither a checkpoint nor a {CONFIG}")
            name = found.directory
        manifest = catalogue.load_manifest(storage, name)
    except (Refused, OSError) as error:
        raise ConfigError(violation(KEY, bare_url(url), str(error))) from None
    lacks, other = [], []
    for parameter, (p, shape) in parameters_of(model).items():
        stored = shape[-1:] + shape[:-1] if manifest.meta.format == 1 and p.turned else shape
        if (t := manifest.tensors.get(f"model.{parameter}")) is None:
            lacks.append(parameter)
        elif t.shape != stored:
            other.append(f"{parameter} is {list(t.shape)}, not {list(stored)}")
    foreign = {n.removeprefix("model.") for n in manifest.tensors if n.startswith("model.")} - parameters_of(
        model
    ).keys()
    words = {"names: missing": lacks, "names: no part of this model": sorted(foreign), "shapes": other}
    if wrong := [
        violation(KEY, bare_url(url), f"{what}: {', '.join(names)}") for what, names in words.items() if names
    ]:
        raise ConfigError(wrong)
    pieces = stored_pieces(manifest, [f"model.{parameter}" for parameter in parameters_of(model)])
    given = manifest.meta.identity.get("model")
    notes = _differences(Config.from_dict({"model": given}).model, model) if isinstance(given, dict) else []
    return InitialWeights(
        bare_url(f"{storage.url}/{name}"), manifest.meta.format, pieces, stored_fetch(storage, name), notes
    )


def _differences(there: Model, here: Model) -> list[str]:
    """Return a line for each key that makes the model `here` compute otherwise than that whose weights it takes."""

    def lines() -> Iterator[str]:
        mine, theirs = meaning(here), meaning(there)
        for key in (key for key in vars(here) if mine.get(key) != theirs.get(key)):
            yield f"model.{key}={getattr(here, key)} here, {getattr(there, key)} where the weights come from"

    return list(lines())
