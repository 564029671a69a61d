"""Import of a model that transformers saved: what it is, as our keys and in a configuration, whether all of it is
there, and a checkpoint of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from platform.boundary.files.file_storage import Storage
from platform.boundary.refusals import ConfigError, refuse_all, rephrasing, violation
from platform.checkpoint.blocks.placement import Piece
from platform.checkpoint.interchange import store_pieces
from platform.checkpoint.storage.carried import CarriedFiles
from platform.checkpoint.storage.manifest import Meta
from platform.config.fields import Config, Model
from platform.data.tokenizers.tokenizer_files import has_tokenizer
from platform.weights import FROM_HF
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
