"""Import of a model that transformers saved: what it is, whether all of it is there, and a checkpoint of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from platform.boundary.files.file_storage import Storage
from platform.boundary.refusals import ConfigError
from platform.checkpoint.blocks.placement import Piece
from platform.checkpoint.interchange import store_pieces
from platform.checkpoint.storage.carried import CarriedFiles
from platform.checkpoint.storage.manifest import Meta
from platform.config.fields import Model
from platform.weights.folder import Place, SavedModel
from platform.weights.names import Stored, matched, stored_tensors
from platform.weights.translate import family_of, model_keys

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
        """Return the pieces of all our parameters, by tensor of theirs."""
        return [self.saved.pieces(stored, name) for stored, name in self.tensors]


def source_keys(source: str, key: str) -> dict[str, Any]:
    """Return our model keys, without `model.`, that say what the model at `source` (a folder of transformers, as a path
    or URL) is. Raises ConfigError, naming the configuration key `key` that holds the source."""
    saved = SavedModel(source, key)
    try:
        return model_keys(saved.config, saved.tensors)
    except ConfigError as error:
        raise _of(saved, error) from None


def importable(source: str, key: str, model: Model | None = None, drop: Sequence[str] = ()) -> Importable:
    """Read the headers of the model at `source`, and check them against `model`, by default what its config.json says.
    `drop`: patterns of names to leave out.

    Raises ConfigError with a line for each key that we do not express, and for missing, foreign and misshapen tensors,
    all of them named.
    """
    saved = SavedModel(source, key)
    try:
        own = Model(**model_keys(saved.config, saved.tensors)) if model is None else model
        return Importable(saved, own, tuple(_found(saved, own, drop)))
    except ConfigError as error:
        raise _of(saved, error) from None


def _found(saved: SavedModel, model: Model, drop: Sequence[str]) -> list[tuple[Stored, str]]:
    """Return the tensors of a model that transformers saved, each with its name in the files, as `importable` does."""
    family = family_of(saved.config)
    wanted = stored_tensors(model, family)
    names = [name for name in saved.tensors if not any(fnmatchcase(name, pattern) for pattern in drop)]
    match, wrong = matched(names, wanted, model, family)
    tensors = [(stored, match.there[stored.name]) for stored in wanted if stored.name in match.there]
    wrong += _misshapen(saved, tensors)
    if wrong := wrong or list(_unequal(saved, match.repeated, match.there)):
        raise ConfigError(wrong)
    return tensors


def _of(saved: SavedModel, error: ConfigError) -> ConfigError:
    return ConfigError([f"{saved.url}: {line}" for line in error.violations])


def _misshapen(saved: SavedModel, tensors: Sequence[tuple[Stored, str]]) -> Iterator[str]:
    """Yield one line for all tensors of another shape than the model's, and one for tensors that hold no floating-point
    numbers."""
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
    """Yield a line for tensors that should repeat another one, and do not."""
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
