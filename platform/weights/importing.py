"""Weights that a run starts from (train.init): from a checkpoint, or from a model that transformers saved.

`open_importable` says what such a model is, as our keys and in a configuration, and whether all of it is there;
`import_model` makes a checkpoint of it. `swap_in_averages` puts a checkpoint's averaged weights (train.ema) in the
place of the trained ones.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import (
    NAMED,
    ConfigError,
    format_value,
    format_violation,
    refuse_all,
    refuse_failures,
    rephrase_refusals,
)
from platform.boundary.sealed_blocks import LARGEST_BLOCK
from platform.boundary.storage import Storage, open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import ITEMSIZE, Block, Box, HeldTensor, Piece
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.catalogue import CarriedFiles, list_stored_pieces
from platform.checkpoint.interchange import store_pieces
from platform.checkpoint.manifest import Manifest, Meta, Refused, check_tensors
from platform.checkpoint.moves import Fetch, build_block_fetch, fill_blocks
from platform.config.fields import Config, Model, hash_values
from platform.data.tokenizer_files import has_tokenizer
from platform.model import build_model
from platform.model.tuning import find_adapters
from platform.optimizer.optimizers import AVERAGE
from platform.plan.adapters import can_quantise
from platform.plan.model_types import NF4_BLOCK, NF4_UNITS, Parameter
from platform.runtime.normal_floats import round_to_normal_floats
from platform.runtime.parallel_ops import draw_initial_block
from platform.weights import FROM_HF, tensor_names
from platform.weights.config_keys import QUANTISED
from platform.weights.model_folder import CONFIG, Place, SavedModel, is_saved_model
from platform.weights.stored_adapters import BaseWeights, StoredAdapters, parse_stored_tune, read_base
from platform.weights.tensor_names import HfTensor, find_family, functional_keys, list_parameters, parse_stored_model

SOURCE = "source"  # value of an imported checkpoint's metadata: the config.json that it was imported from


@dataclass(frozen=True)
class Importable:
    """Model that transformers saved, all of which is there: `model`, our configuration of it; `tensors`: theirs, each
    with its name in the files."""

    saved: SavedModel
    model: Model
    tensors: tuple[tuple[HfTensor, str], ...]

    @property
    def pieces_by_tensor(self) -> list[list[Piece[Place]]]:
        """Return the pieces of the weights to import, a list for each tensor in transformers' files."""
        return [self.saved.split_into_pieces(stored, name) for stored, name in self.tensors]


def source_keys(source: str, key: str) -> dict[str, Any]:
    """Return the configuration keys of the model saved at `source`; raises ConfigError, naming the key `key`."""
    return keys_of_saved_model(SavedModel(source, key))


def keys_of_saved_model(saved: SavedModel, drop: Sequence[str] = ()) -> dict[str, Any]:
    """Return the configuration keys, without `model.`, of a saved model, but for tensors to `drop`; ConfigError."""
    with _name_model_in_errors(saved):
        return tensor_names.translate_config_json(saved.config, _list_kept_names(saved, drop))


def _list_kept_names(saved: SavedModel, drop: Sequence[str]) -> list[str]:
    """Return the names of the tensors of a saved model that match no pattern of `drop`."""
    return [name for name in saved.tensors if not any(fnmatchcase(name, pattern) for pattern in drop)]


def complete_model(config: Config, typed: Mapping[str, Any]) -> list[str]:
    """Set the model keys of a configuration in place as the model at its `model.source` has them, except keys that the
    user typed (`typed`: key -> value), and train.init and data.tokenizer where they are not set; then clear
    `model.source`. Return one line per mistake."""
    source, named = config.model.source, config.model.kind == FROM_HF
    config.model.kind = "decoder" if named else config.model.kind
    if not source:
        line = format_violation("model.source", "", "model=from_hf needs a folder that transformers saved", ["FOLDER"])
        return [line] if named else []
    try:
        source_model_keys, place = _read_source(source)
    except ConfigError as error:
        return error.violations
    for key, value in source_model_keys.items():
        if f"model.{key}" not in typed and key != "predict_ahead":  # modules that only some training asks for
            setattr(config.model, key, value)
    config.train.init, config.model.source = config.train.init or place, ""
    said = "data.tokenizer" in typed or config.data.tokenizer != "train" or config.data.kind == "synthetic"
    return [] if said else _set_or_refuse_source_tokenizer(config, place)


def _read_source(source: str) -> tuple[dict[str, Any], str]:
    """Return the keys of the model at `model.source`, and its place: a folder that transformers saved, or a checkpoint
    of ours, by itself or as the newest good one of a storage. Raises ConfigError."""
    shown = strip_url_secrets(source)
    with refuse_failures("model.source", shown, Refused, OSError):
        if is_saved_model(source):
            return source_keys(source, "model.source"), source
        none_reason = f"holds neither a checkpoint nor a {CONFIG}"
        _, name, manifest = catalogue.select_checkpoint(source, "model.source", none_reason=none_reason)
    with rephrase_refusals(lambda line: format_violation("model.source", shown, line)):
        stored_keys = {**vars(parse_stored_model(manifest.meta.identity)), "source": "", "within_documents": False}
    folder = source.rstrip("/")
    return stored_keys, folder if folder.endswith(name) else f"{folder}/{name}"


def _set_or_refuse_source_tokenizer(config: Config, source: str) -> list[str]:
    """Set data.tokenizer in place to the one that lies beside the model at `source`; return a refusal line if none
    does, and one is needed: data=tokens needs none, and with data.foreign_tokenizer any does."""
    folder = source.rstrip("/").rpartition("/")[0] if source.rstrip("/").endswith(".safetensors") else source
    if not has_tokenizer(folder):
        if config.data.kind == "tokens" or config.data.foreign_tokenizer:
            return []
        reason = f"there is none beside the model in {folder}, and one that is trained gives other tokens than it knows"
        return [format_violation("data.tokenizer", "", reason, ["data.tokenizer=PATH", "data.tokenizer=train"])]
    config.data.tokenizer = folder
    return []


def open_importable(source: str, key: str, model: Model | None = None, drop: Sequence[str] = ()) -> Importable:
    """Read the headers of the saved model at `source`, and check them against `model`, by default what its config.json
    says. `drop`: patterns of names to leave out.

    Raises ConfigError with a line for each key that we do not express, and for missing, foreign and misshapen tensors,
    all of them named.
    """
    saved = SavedModel(source, key)
    expected_model = model or Model(**keys_of_saved_model(saved, drop))
    with _name_model_in_errors(saved):
        return Importable(saved, expected_model, tuple(_match_weight_names(saved, expected_model, drop)))


def _match_weight_names(saved: SavedModel, model: Model, drop: Sequence[str]) -> list[tuple[HfTensor, str]]:
    """Return the tensors of a model that transformers saved, each with its name in the files, for `open_importable`."""
    family = find_family(saved.config)
    names = _list_kept_names(saved, drop)
    kinds = (False, True) if family.fused else (False,)
    forms = [tensor_names.list_stored_tensors(model, family, fused) for fused in kinds]
    candidates = [(form, *tensor_names.match_tensor_names(names, form, model, family)) for form in forms]
    form, match, violations = min(candidates, key=lambda one: len(one[0]) - len(one[1].stored_names))
    tensors = [(stored, match.stored_names[stored.name]) for stored in form if stored.name in match.stored_names]
    violations += _violations_of_shapes(saved, tensors)
    refuse_all(violations or list(_violations_of_repeats(saved, match.repeated, match.stored_names)))
    return tensors


def _name_model_in_errors(saved: SavedModel) -> AbstractContextManager[None]:
    """Put the saved model's URL at the start of every line of a ConfigError raised within the context."""
    return rephrase_refusals(lambda line: f"{saved.url}: {line}")


def _violations_of_shapes(saved: SavedModel, tensors: Sequence[tuple[HfTensor, str]]) -> Iterator[str]:
    """Yield one line for all saved tensors of another shape than the model's, and one for tensors that hold no
    floating-point numbers. `tensors`: (tensor expected, its name in the files)."""
    unequal = [(s, name) for s, name in tensors if saved.tensors[name][1].shape != s.shape]
    shapes = [f"{name} is {list(saved.tensors[name][1].shape)}, not {list(s.shape)}" for s, name in unequal]
    if shapes:
        yield f"shapes: {', '.join(shapes)}"
    kinds = [f"{n} is {t.dtype}" for _, n in tensors if not (t := saved.tensors[n][1]).torch_type.is_floating_point]
    if kinds:
        yield f"types: {', '.join(kinds)}; a parameter is of floating-point numbers"


def _violations_of_repeats(
    saved: SavedModel, repeated: Sequence[tuple[str, str]], names_in_files: dict[str, str]
) -> Iterator[str]:
    """Yield a line for saved tensors that should repeat others (tied weights), but are not equal to them."""
    pairs = [(name, names_in_files[of]) for name, of in repeated]
    if unequal_names := [f"{name} differs from {of}" for name, of in pairs if not saved.has_equal_tensors(name, of)]:
        yield f"names: {', '.join(unequal_names)}, to which this config.json ties it"


def import_model(import_source: Importable, storage: Storage, carried: CarriedFiles | None = None) -> str:
    """Make a checkpoint of an importable model on `storage`, block by block, in the element types of its files; return
    the checkpoint's directory. `carried`: files that it carries, such as the tokenizer's."""
    shapes = {f"model.{part.name}": part.shape for stored, _ in import_source.tensors for part in stored.parts}
    identity = {"model": {key: value for key, value in vars(import_source.model).items() if key != "source"}}
    values = {SOURCE: {key: value for key, value in import_source.saved.config.items() if key != QUANTISED}}
    meta = Meta(step=0, samples=0, seed=0, corpus="", identity=identity, configuration="", plan={}, values=values)
    pieces, fetch = import_source.pieces_by_tensor, import_source.saved.fetch_pieces
    return store_pieces(storage, pieces, fetch, shapes, meta, carried)


def swap_in_averages(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint to import weights from, with the averaged ones (train.ema) in place of the
    trained ones; frozen weights, which have none, are as they are. Raises Refused if the checkpoint holds no
    averages."""
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

    `compute_hash`: returns a hash of the weights; `base`: the weights that the adapters at `url`, if it has any, adapt.
    Where the model here has a larger vocabulary, its new rows are made of the existing ones (`_extend_vocabulary`)."""

    url: str
    pieces: Sequence[Piece[Any]]
    fetch: Fetch[Any]
    notes: Sequence[str]
    compute_hash: Callable[[], str]
    base: BaseWeights | None = None

    def describe_base(self) -> BaseWeights:
        """Return what adapters of these weights are of: them, or what adapters that are part of them are of."""
        place = self.url if "://" in self.url else os.path.abspath(self.url)
        return self.base or BaseWeights(place, self.compute_hash())


def open_initial_weights(config: Config, *, whole: bool = False) -> InitialWeights:
    """Open the weights that a run starts from and check that they fit its model; `whole`: not of adapters. Raises
    ConfigError with a line for each kind of mistake, all names in it: tensors that are missing, foreign or of another
    shape."""
    url = config.train.init
    if url.rstrip("/").endswith(".safetensors") or CONFIG in _list_source_files(url):
        if config.train.init_averaged:
            reason = f"{strip_url_secrets(url)} is no checkpoint of a run"
            raise ConfigError("train.init_averaged", True, reason, [False])
        source_model = Model(**source_keys(url, KEY))
        model, left_out = _match_depths(config.model, source_model)
        drop = [f"*layers.{number}.*" for number in left_out]
        saved_weights = open_importable(url, KEY, _limit_vocabulary(model, source_model), drop)
        pieces = [piece for some in saved_weights.pieces_by_tensor for piece in some]
        notes = _describe_differences(source_model, config.model)
        saved = saved_weights.saved
        weights = InitialWeights(strip_url_secrets(url), pieces, saved.fetch_pieces, notes, saved.compute_hash)
        return _begin_modules(_extend_vocabulary(weights, model, source_model), config, source_model)
    return _open_checkpoint_weights(config, whole)


def _list_source_files(url: str) -> dict[str, int]:
    """Return the files in which a run's initial weights are (train.init), name -> bytes. Raises ConfigError if there
    are none, or they cannot be listed."""
    try:
        if files := open_storage(url, KEY).list_sizes(""):
            return files
        why = "there is nothing"
    except OSError as error:
        why = f"cannot be read: {error}"
    raise ConfigError(KEY, strip_url_secrets(url), why)


def _open_checkpoint_weights(config: Config, whole: bool) -> InitialWeights:
    """Open the initial weights of a run, or the averages of them, from the checkpoint that train.init names, or the
    newest good one in the storage; `whole`: not of adapters. Raises ConfigError unless they fit the run's model."""
    url, model, averaged = config.train.init, config.model, config.train.init_averaged
    with refuse_failures(KEY, strip_url_secrets(url), Refused, OSError):
        lack = f"holds neither a checkpoint nor a {CONFIG}"
        storage, name, manifest = catalogue.select_checkpoint(url, KEY, none_reason=lack)
        manifest = swap_in_averages(manifest) if averaged else manifest
        base = read_base(manifest)
    if base and whole:
        raise ConfigError(KEY, strip_url_secrets(url), "holds adapters, and adapters are of whole weights")
    if base:
        return _open_adapted_weights(config, base, storage, name, manifest)
    source, notes = model, []
    with suppress(ConfigError):  # of an earlier or later version, which says nothing of what it lacks
        source = parse_stored_model(manifest.meta.identity)
        notes = _describe_differences(source, model)
    model, left_out = _match_depths(model, source)
    dropped = tuple(f"model.layers.{number}." for number in left_out)
    names = [n for n in manifest.tensors if n.startswith("model.") and not n.startswith(dropped)]
    stored_shapes = {n.removeprefix("model."): manifest.tensors[n].shape for n in names}
    shapes = {n: shape for n, (_, shape) in list_parameters(_limit_vocabulary(model, source)).items()}
    unequal_names = [n for n, shape in shapes.items() if stored_shapes.get(n, shape) != shape]
    mismatches = {
        "names: missing": [n for n in shapes if n not in stored_shapes],
        "names: no part of this model": [n for n in stored_shapes if n not in shapes],
        "shapes": [f"{n} is {list(stored_shapes[n])}, not {list(shapes[n])}" for n in unequal_names],
    }
    differences = f"; {_list_some_names(notes)}" if notes else ""
    faults = [f"{fault}: {_list_some_names(sorted(names))}" for fault, names in mismatches.items() if names]
    refuse_all(format_violation(KEY, strip_url_secrets(url), f"{fault}{differences}") for fault in faults)
    pieces = list_stored_pieces(manifest, [f"model.{n}" for n in shapes])
    checkpoint_url = strip_url_secrets(f"{storage.url}/{name}")
    stored = list_stored_pieces(manifest, [n for n in manifest.tensors if n.startswith("model.")])  # left out or not
    hashes = [(p.name, p.dtype, str(p.box), p.source.sha256) for p in stored]
    fetch, compute_hash = build_block_fetch(storage, name), partial(hash_values, sorted(hashes))
    weights = InitialWeights(checkpoint_url, pieces, fetch, notes, compute_hash)
    return _begin_modules(_extend_vocabulary(weights, model, source), config, source)


def _open_adapted_weights(
    config: Config, base: BaseWeights, storage: Storage, directory: str, manifest: Manifest
) -> InitialWeights:
    """Open the weights that a checkpoint of adapters makes of its `base`; for a run that trains such adapters, the base
    and the adapters beside it. Raises ConfigError, also for a base that is not there or is another one."""
    url = strip_url_secrets(f"{storage.url}/{directory}")
    of_base = replace(config, train=replace(config.train, init=base.url, init_averaged=False))
    with rephrase_refusals(lambda line: f"{KEY}={url}: its base: {line}"):
        weights = open_initial_weights(of_base, whole=True)
    check_base(weights, base, url)
    with refuse_failures(KEY, url, Refused, OSError):
        tune, depth = parse_stored_tune(manifest.meta.identity), config.model.predict_ahead
        with suppress(ConfigError):  # of an earlier or later version; of modules left out here, it has adapters, too
            depth = parse_stored_model(manifest.meta.identity).predict_ahead
        model = replace(config.model, predict_ahead=depth)
        stored = StoredAdapters(storage, directory, manifest, model, tune)
        check_tensors(manifest, stored.shapes)
    notes = [*weights.notes]
    if config.tune.kind != tune.kind and "qlora" in (config.tune.kind, tune.kind):
        notes.append(_IN_4_BITS[tune.kind == "qlora", config.tune.kind == "none"])
    elif config.tune.double != tune.double and config.tune.kind == "qlora":
        notes.append(f"adapters trained with tune.double={format_value(tune.double)}: their base is other numbers here")
    if config.tune.kind == "none":
        fetch_base = _fetch_as_quantised(weights, config.model, tune.double) if tune.kind == "qlora" else weights.fetch
        return replace(weights, url=url, fetch=stored.merge_products(fetch_base), base=base, notes=notes)
    if differs := stored.describe_difference(find_adapters(config.model, config.tune, build_model(config.model))):
        raise ConfigError(KEY, url, f"holds other adapters: {differs}")
    of_adapters, fetch_block = list_stored_pieces(manifest, stored.shapes), build_block_fetch(storage, directory)

    def fetch(wanted: Sequence[Piece[Any]], into: Sequence[Tensor]) -> None:
        """Read wanted pieces of the base's weights, and of its adapters."""
        for is_adapter, read in ((False, weights.fetch), (True, fetch_block)):
            pairs = [(p, m) for p, m in zip(wanted, into, strict=True) if (p.name in stored.shapes) == is_adapter]
            read([p for p, _ in pairs], [m for _, m in pairs])

    return replace(weights, url=url, pieces=[*weights.pieces, *of_adapters], fetch=fetch, base=base, notes=notes)


# are adapters of a base in 4 bits, and is the run without any -> what it starts from
_IN_4_BITS = {
    (True, True): "adapters trained with tune=qlora: added to what their base is in 4 bits",
    (True, False): "adapters trained with tune=qlora: their base is not in 4 bits here",
    (False, False): "adapters trained with tune=lora: their base is in 4 bits here",
}


def _fetch_as_quantised(weights: InitialWeights, model: Model, double: bool = False) -> Fetch[Any]:
    """Return a function that reads pieces of weights; the weights that QLoRA keeps in 4 bits, as numbers made of
    these; `double`: their scales are in 8 bits."""
    shapes = {f"model.{name}": shape for name, (p, shape) in list_parameters(model).items() if can_quantise(p)}

    @lru_cache(maxsize=1)
    def round_weight(name: str, box: Box) -> Tensor:
        """Return the numbers that the block `box` of a weight becomes in 4 bits."""
        return round_to_normal_floats(read_weight(weights, name, box).float(), [*NF4_UNITS][double])

    def fetch_quantised(wanted: Sequence[Piece[Any]], into: Sequence[Tensor]) -> None:
        """Read wanted pieces of weights, in 4 bits where they are kept so: by the rows that have whole blocks."""
        pairs = list(zip(wanted, into, strict=True))
        plain = [(piece, memory) for piece, memory in pairs if piece.name not in shapes]
        weights.fetch([piece for piece, _ in plain], [memory for _, memory in plain])
        for piece, memory in pairs:
            if shape := shapes.get(piece.name):
                box = Box.whole_tensor(shape)
                if prod(shape[1:]) % NF4_BLOCK == 0 and not double:  # else all scales have one mean
                    box = Box((piece.box.offset[0], *box.offset[1:]), (piece.box.extent[0], *shape[1:]))
                block = memory.view(DTYPES[piece.dtype]).view(piece.box.extent)
                block.copy_(round_weight(piece.name, box)[piece.box.relative_slices(box)])

    return fetch_quantised


def check_base(weights: InitialWeights, base: BaseWeights, url: str) -> None:
    """Raise ConfigError unless `weights` are the `base` of the adapters at `url`."""
    with refuse_failures(KEY, weights.url, Refused, OSError):
        described = weights.describe_base()
    if described.hash != base.hash:
        reason = f"the adapters of {url} are of other weights (hash {base.hash}, here {described.hash})"
        raise ConfigError(KEY, weights.url, reason, [f"{KEY}={base.url}"])


def _list_some_names(names: Sequence[str]) -> str:
    """Return the first names of imported weights, of which there may be thousands, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def read_weight(weights: InitialWeights, name: str, box: Box | None = None) -> Tensor:
    """Read the weight `name` (`model.NAME`), or its block `box`, in its stored type. Raises Refused or OSError."""
    pieces = [p for p in weights.pieces if p.name == name]
    ends = [[o + n for o, n in zip(p.box.offset, p.box.extent, strict=True)] for p in pieces]
    box = box or Box.whole_tensor([max(of_dim) for of_dim in zip(*ends, strict=True)])
    pieces = [p for p in pieces if p.box.intersect_box(box)]
    tensor = torch.empty(box.extent, dtype=DTYPES[pieces[0].dtype])
    held = HeldTensor(name, pieces[0].dtype, box.extent, {box: (0,)})
    fill_blocks(pieces, weights.fetch, [held], [Block(name, box, tensor)])
    return tensor


class _AddedRows(NamedTuple):
    """Place of rows of a table that weights lack, called `table`: each is the mean of all rows that they have."""

    table: str


def _limit_vocabulary(model: Model, source_model: Model) -> Model:
    """Return `model` with the vocabulary size of the weights that it is initialised from, if that is smaller."""
    return replace(model, vocab=min(model.vocab, source_model.vocab))


def _extend_vocabulary(weights: InitialWeights, model: Model, source_model: Model) -> InitialWeights:
    """Extend imported weights, of the saved model `source_model`, to weights of `model`, whose vocabulary may be
    larger: each new token's row is the mean of the rows of its table, summed in the order of the files, so that it is
    the same under every plan."""
    if model.vocab <= source_model.vocab:
        return weights
    old: dict[str, list[Piece[Any]]] = defaultdict(list)
    for piece in weights.pieces:
        old[piece.name].append(piece)
    tables = {f"model.{n}": shape for n, (p, shape) in list_parameters(model).items() if p.dims[:1] == ("vocab",)}
    first = source_model.vocab
    new = [
        piece for name, shape in tables.items() for piece in _iterate_added_rows(name, shape, first, old[name][0].dtype)
    ]

    @cache
    def compute_mean_row(name: str) -> Tensor:
        """Return the mean of all rows of the table `name` in the initial weights, summed in the order of the files."""
        total = torch.zeros(tables[name][1:], dtype=torch.float64)
        for piece in old[name]:
            memory = torch.empty(piece.nbytes, dtype=torch.uint8)
            weights.fetch([piece], [memory])
            rows = memory.view(DTYPES[piece.dtype]).view(piece.box.extent)
            columns = [slice(a, a + n) for a, n in zip(piece.box.offset[1:], piece.box.extent[1:], strict=True)]
            total[tuple(columns)] += rows.double().sum(0)
        return total / source_model.vocab

    def fetch_or_fill(wanted: Sequence[Piece[Any]], into: Sequence[Tensor]) -> None:
        """Read wanted pieces of imported weights; fill the rows of new tokens with the mean row of their table."""
        pairs = [*zip(wanted, into, strict=True)]
        existing_pairs = [pair for pair in pairs if not isinstance(pair[0].source, _AddedRows)]
        weights.fetch([piece for piece, _ in existing_pairs], [memory for _, memory in existing_pairs])
        for piece, memory in pairs:
            if isinstance(piece.source, _AddedRows):
                memory.view(DTYPES[piece.dtype]).view(piece.box.extent).copy_(compute_mean_row(piece.name))

    names = ", ".join(name.removeprefix("model.") for name in tables)
    note = f"{model.vocab - first} new rows of {names}: each the mean of the {first} that are there"
    return replace(weights, pieces=[*weights.pieces, *new], fetch=fetch_or_fill, notes=[*weights.notes, note])


def _iterate_added_rows(
    name: str, shape: Sequence[int], first: int, dtype: str, source: Any = None
) -> Iterator[Piece[Any]]:
    """Yield the pieces of an initial weight from row `first` on, by default the rows of a table's added tokens."""
    step = max(1, LARGEST_BLOCK // (prod(shape[1:]) * ITEMSIZE[dtype]))
    for a in range(first, shape[0], step):
        box = Box((a, *(0 for _ in shape[1:])), (min(step, shape[0] - a), *shape[1:]))
        yield Piece(name, dtype, box, source or _AddedRows(name))


class _FreshValues(NamedTuple):
    """Parameter of a global `shape` that weights lack, and that begins as in a run from scratch."""

    parameter: Parameter
    shape: tuple[int, ...]


def _match_depths(model: Model, source_model: Model) -> tuple[Model, Sequence[int]]:
    """Return `model` with no more modules of multi-token prediction than its weights have, and their layers beyond."""
    both, last = min(model.predict_ahead, source_model.predict_ahead), source_model.layers + source_model.predict_ahead
    return replace(model, predict_ahead=both), range(source_model.layers + both, last)


def _begin_modules(weights: InitialWeights, config: Config, source_model: Model) -> InitialWeights:
    """Extend imported weights by the modules of multi-token prediction of a run's model that its source lacks, with
    the values of a run from scratch; say which begin so, and which are left out."""
    model, left_out = _match_depths(config.model, source_model)
    notes, modules = list(weights.notes), "modules of multi-token prediction"
    if left_out:
        notes.append(f"{len(left_out)} {modules} left out; model.predict_ahead={source_model.predict_ahead} has all")
    if not (fresh := config.model.predict_ahead - model.predict_ahead):
        return replace(weights, notes=notes)
    if config.tune.kind != "none":
        reason = f"the weights have {model.predict_ahead}, and modules that begin afresh are not for adapters"
        raise ConfigError("model.predict_ahead", config.model.predict_ahead, reason, [model.predict_ahead])
    declared = list_parameters(config.model)
    added = [_FreshValues(*declared[name]) for name in declared if name not in list_parameters(model)]
    names = [(f"model.{value.parameter.name}", value) for value in added]
    pieces = [piece for name, v in names for piece in _iterate_added_rows(name, v.shape, 0, "float32", v)]

    def fetch_or_draw(wanted: Sequence[Piece[Any]], into: Sequence[Tensor]) -> None:
        """Read wanted pieces of imported weights; draw the pieces of fresh modules."""
        pairs = [*zip(wanted, into, strict=True)]
        existing_pairs = [pair for pair in pairs if not isinstance(pair[0].source, _FreshValues)]
        weights.fetch([piece for piece, _ in existing_pairs], [memory for _, memory in existing_pairs])
        for piece, memory in (pair for pair in pairs if isinstance(pair[0].source, _FreshValues)):
            block = memory.view(DTYPES[piece.dtype]).view(piece.box.extent)
            where = list(zip(piece.box.offset, piece.box.extent, strict=True))
            draw_initial_block(piece.source.parameter, piece.source.shape, where, config.seed, block)

    notes.append(f"{fresh} {modules} begin afresh: the weights have none")
    return replace(weights, pieces=[*weights.pieces, *pieces], fetch=fetch_or_draw, notes=notes)


def _describe_differences(source_model: Model, model: Model) -> list[str]:
    """Return a line per key by which the model `model` computes otherwise than the one whose weights initialise it."""
    mine, theirs = (
        {**functional_keys(m), "capacity_factor": m.capacity_factor * (m.experts > 0)} for m in (model, source_model)
    )
    keys = [key for key in vars(model) if mine.get(key) != theirs.get(key)]
    values = [(key, getattr(model, key), getattr(source_model, key)) for key in keys]
    return [f"model.{key}={ours} here, {other} where the weights come from" for key, ours, other in values]
