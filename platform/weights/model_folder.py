"""A folder of safetensors with a config.json, as transformers saves a model: its headers, and pieces of its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary import documents, schema
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, as_refusal, violation
from platform.boundary.schema import Malformed, OpenMap, Text
from platform.boundary.sealed_blocks import LARGEST_BLOCK, THREADS
from platform.boundary.storage import Storage, open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import Box, HeldTensor, Piece, shares
from platform.checkpoint.catalogue import read_carried
from platform.checkpoint.interchange import ForeignTensor, read_header, split_file
from platform.checkpoint.manifest import Manifest, Name, Refused
from platform.config.fields import Data, Model
from platform.data.chat_templates import ConfinedTokenizer
from platform.data.tokenizer import OWN, Vocabulary, vocabulary_of
from platform.data.tokenizer_files import CONFIG as BESIDE_CONFIG
from platform.data.tokenizer_files import JSON, has_tokenizer, json_of, read_files
from platform.weights.tensor_names import MatrixPart, Stored

if TYPE_CHECKING:
    from tokenizers import Tokenizer


CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
LARGEST_CONFIG, LARGEST_INDEX = 1 << 20, 64 << 20  # bytes
_VALUES = 1 << 21  # of an index: two for each tensor
_HEADERS: dict[tuple[str, ...], dict[str, tuple[str, ForeignTensor]]] = {}  # by the versions of files: the last model's

_File = Annotated[str, Text(r"[\w.-]{1,250}\.safetensors", "the name of a safetensors file")]  # stays in its folder

_Index = Annotated[dict[str, object], OpenMap((("weight_map", dict[Name, _File]),), ("weight_map",))]


class Place(NamedTuple):
    """Bytes [start, end) of a file of a folder, and how they hold a piece: as they are, or (`width` > 0) as rows of so
    many elements, of which columns [first, last), every `step`-th, are the piece turned."""

    file: str
    start: int
    end: int
    width: int = 0
    first: int = 0
    last: int = 0
    step: int = 1


class SavedModel:
    """Model as transformers saves it, at a path or URL `source`: a folder, or one safetensors file beside a
    config.json. `config`: its config.json; `tensors`: name -> (file, description); `place`: the path or URL of its
    folder.

    Raises ConfigError, in one line that names `key` and the source, for what cannot be read or is malformed.
    """

    def __init__(self, source: str, key: str = "source"):
        """Open the model that transformers saved at a path or URL: read its config.json and the headers of its tensors.
        `key`: the configuration key or argument that refusals name."""
        self.url, self._key = bare_url(source), key
        try:
            self._folder, only = _opened(source)
            self.place = source.rstrip("/").rpartition("/")[0] or "." if only else source
            there = self._folder.list("")
            self.config = self._config(there)
            files = [only] if only else self._files(there)
            self.tensors = self._tensors({file: there.get(file) for file in files})
        except (Malformed, Refused, OSError) as error:
            raise self.refused(str(error)) from None

    def small(self, name: str) -> bytes:
        """Return a small file beside the saved weights; b"" if it is missing or larger than a config.json may be."""
        size = self._folder.list("").get(name, 0)
        return bytes(self._folder.read(name)) if 0 < size <= LARGEST_CONFIG else b""

    def refused(self, why: str) -> ConfigError:
        """Return the ConfigError that refuses this saved model for the reason `why`."""
        return ConfigError(violation(self._key, self.url, why))

    def _config(self, there: dict[str, int]) -> dict[str, Any]:
        """Read config.json of the saved model as a map; raises Refused if it is missing or malformed. `there`: name ->
        bytes of the folder's files."""
        if CONFIG not in there:
            raise Refused(f"holds no {CONFIG}")
        raw = self._folder.read(CONFIG, 0, LARGEST_CONFIG + 1)
        try:
            return schema.read(dict[str, Any], documents.from_json(raw, LARGEST_CONFIG))
        except Malformed as error:
            raise Refused(f"{CONFIG}: {error}") from None

    def _files(self, there: dict[str, int]) -> list[str]:
        """Return the names of the safetensors files with the model's weights: all in the index, else model.safetensors,
        else the only one in the folder. `there`: name -> bytes of the folder's files. Raises Refused if that is
        ambiguous."""
        if INDEX in there:
            try:
                raw = self._folder.read(INDEX, 0, LARGEST_INDEX + 1)
                index: dict[str, Any] = schema.read(_Index, documents.from_json(raw, LARGEST_INDEX, _VALUES))
            except Malformed as error:
                raise Refused(f"{INDEX}: {error}") from None
            return sorted(set(index["weight_map"].values()))
        if SINGLE in there:
            return [SINGLE]
        found = sorted(name for name in there if name.endswith(".safetensors"))
        if len(found) != 1:
            raise Refused(f"holds {'several files' if found else 'no file'} of safetensors, and no {INDEX}")
        return found

    def _tensors(self, files: dict[str, int | None]) -> dict[str, tuple[str, ForeignTensor]]:
        """Return the saved model's tensors, name -> (file, description), from its files; cached until one changes."""
        versions = [f"{file} {size} {self._folder.version(file)}" for file, size in files.items() if size is not None]
        key = self._folder.url, *versions
        if len(versions) < len(files) or key not in _HEADERS:
            _HEADERS.clear()
            _HEADERS[key] = dict(self._headers([*files]))
        return _HEADERS[key]

    def _headers(self, files: Sequence[str]) -> Iterator[tuple[str, tuple[str, ForeignTensor]]]:
        """Yield each tensor of the safetensors `files` as (name, (file, description)); raises Refused for a name in
        several files."""
        seen: set[str] = set()
        for file in files:
            try:
                _, described = read_header(self._folder, file)
            except (Malformed, Refused) as error:
                raise Refused(f"{file}: {error}") from None
            if twice := sorted(seen & described.keys()):
                raise Refused(f"{', '.join(twice)}: in several files")
            seen |= described.keys()
            yield from ((name, (file, t)) for name, t in described.items())

    def pieces(self, stored: Stored, name: str) -> list[Piece[Place]]:
        """Return the pieces of our parameters in the tensor `stored` of a saved model, called `name` in its files, each
        of at most LARGEST_BLOCK bytes and a row, in the order of the file where it can be."""
        file, t = self.tensors[name]
        dtype, size = str(t.type).removeprefix("torch."), t.type.itemsize
        begin, _ = t.data_offsets
        out: list[Piece[Place]] = []
        for parts in stored.matrices:
            if stored.turned or stored.alternate:
                out += _turned(parts, dtype, Place(file, begin, begin), size, stored.alternate)
                begin += sum(part.rows * part.columns for part in parts) * size
                continue
            for part in parts:
                whole = HeldTensor(f"model.{part.name}", dtype, part.shape, {part.box: (0,)})
                for share in shares([whole], 0):
                    out.append(Piece(whole.name, dtype, share.box, Place(file, begin, begin + share.nbytes)))
                    begin += share.nbytes
        return out

    def fetch(self, wanted: Sequence[Piece[Place]], into: Sequence[Tensor]) -> None:
        """Read pieces of the saved weights from files into the memory of each, uint8 [bytes]; Refused, OSError."""
        with ThreadPoolExecutor(THREADS, "weights-read") as pool:
            for _ in pool.map(self._read, wanted, into):
                pass

    def _read(self, piece: Piece[Place], memory: Tensor) -> None:
        """Read the bytes of a piece of the saved weights into `memory`, uint8 [bytes], transposed where its place says
        so."""
        place = piece.source
        data = self._folder.read(place.file, place.start, place.end)
        if len(data) != place.end - place.start:
            raise Refused(f"{self.url}/{place.file} is shorter than its header says")
        if not data:
            return
        found = torch.frombuffer(data, dtype=torch.uint8)
        if place.width:
            size = piece.nbytes // piece.box.size
            rows = found.view(-1, place.width, size)[:, place.first : place.last : place.step].transpose(0, 1)
            memory.view(len(rows), -1, size).copy_(rows)
        else:
            memory.copy_(found)

    def equal(self, one: str, other: str) -> bool:
        """Return True if two tensors of the saved model, by their names in its files, are equal in every bit."""
        (file, t), (other_file, u) = self.tensors[one], self.tensors[other]
        if (t.type, t.shape) != (u.type, u.shape):
            return False
        nbytes = prod(t.shape) * t.type.itemsize
        for a in range(0, nbytes, LARGEST_BLOCK):
            b = min(nbytes, a + LARGEST_BLOCK)
            parts = ((f, tensor.data_offsets[0]) for f, tensor in ((file, t), (other_file, u)))
            left, right = (self._folder.read(f, begin + a, begin + b) for f, begin in parts)
            if left != right:
                return False
        return True


def is_saved(url: str) -> bool:
    """Return True if a URL is a model that transformers saved, not checkpoints; raises OSError, ConfigError."""
    return url.rstrip("/").endswith(".safetensors") or CONFIG in open_storage(url, "source").list("")


def _opened(source: str) -> tuple[Storage, str]:
    """Open the folder of a model that transformers saved; return it, and the .safetensors file in `source`, or ""."""
    if source.rstrip("/").endswith(".safetensors"):
        return split_file(source)
    return open_storage(source, "source"), ""


def _turned(
    parts: Sequence[MatrixPart], dtype: str, begin: Place, size: int, alternate: bool
) -> Iterator[Piece[Place]]:
    """Yield the pieces of our parameters in a matrix of a saved model that is stored with columns first, from `begin`
    on, in elements of `size` bytes; `alternate`: a row of each in turn."""
    width, columns = sum(part.rows for part in parts), parts[0].columns
    unit = _unit(parts[0])
    step = max(1, LARGEST_BLOCK // (width * size * unit)) * unit
    for a in range(0, columns, step):
        b, row = min(columns, a + step), 0
        start, end = (begin.start + at * width * size for at in (a, b))
        for number, part in enumerate(parts):
            rows = (number, width, len(parts)) if alternate else (row, row + part.rows, 1)
            yield Piece(f"model.{part.name}", dtype, _columns(part, a, b), Place(begin.file, start, end, width, *rows))
            row += part.rows


def _first_column(part: MatrixPart) -> int:
    """Return the first dim of our parameter whose indices are columns, not rows, of its matrix in a saved model."""
    extent = part.box.extent
    return max(i for i in range(len(extent) + 1) if prod(extent[:i]) == part.rows)


def _unit(part: MatrixPart) -> int:
    """Return the width of one index of a first column dim in a weight's saved matrix: d_kv for heads, else 1."""
    return prod(part.box.extent[_first_column(part) + 1 :])


def _columns(part: MatrixPart, a: int, b: int) -> Box:
    """Return the block of our parameter that is in columns [a, b), whole heads, of its matrix in a saved model."""
    first, unit = _first_column(part), _unit(part)
    offset, extent = list(part.box.offset), list(part.box.extent)
    if first < len(extent):
        offset[first], extent[first] = offset[first] + a // unit, (b - a) // unit
    return Box(tuple(offset), tuple(extent))


# Files beside a model's weights: its tokenizer, which data has to share, and how text is generated from it.

GENERATION = "generation_config.json"
_ROLES = ("bos", "eos", "pad")


def beside(saved: SavedModel, key: str) -> tuple[dict[str, bytes], str]:
    """Read the files beside a model that transformers saved (its tokenizer, generation_config.json), name -> bytes,
    and why the tokenizer is not among them, "" if it is. `key`: the configuration key or argument that names the
    model."""
    found: dict[str, bytes] = {}
    if raw := saved.small(GENERATION):
        found[GENERATION] = raw
    if not has_tokenizer(saved.place):
        return found, "there is none beside it"
    try:
        return {**found, **read_files(saved.place, key=key)}, ""
    except ConfigError as error:
        return found, error.violations[0]


def to_export(source: str, storage: Storage, directory: str, manifest: Manifest, length: int) -> dict[str, bytes]:
    """Read the files that go along with an exported checkpoint, by name: the tokenizer's at `source`, a path
    or URL of its file or folder, else the ones that the checkpoint carries. `length`: the most tokens of the model.
    Raises ConfigError, Refused or OSError."""
    carried = read_carried(storage, directory, manifest)
    if not source:
        found = carried
    else:
        found = read_files(source, key="--tokenizer")
        found |= {GENERATION: carried[GENERATION]} if GENERATION in carried else {}
    with as_refusal("--tokenizer", source, Malformed):
        if JSON in found and json_of(found, BESIDE_CONFIG) == OWN:  # trained here: it knows no longest text
            described = json.dumps({**OWN, "model_max_length": length}, indent=2) + "\n"
            return {**found, BESIDE_CONFIG: described.encode()}
    return found


def vocabulary_in(files: Mapping[str, bytes]) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer in the `files` beside a model's weights; None if none is readable."""
    try:
        return vocabulary_of(files) if JSON in files else None
    except Malformed:
        return None


def token_ids(vocabulary: Vocabulary | None, model: Model) -> dict[str, Any]:
    """Return the keys of an exported model's config.json with the ids that begin, end and pad texts."""
    if vocabulary is None:
        return {}
    start = {"decoder_start_token_id": vocabulary.special.start} if model.kind == "encoder_decoder" else {}
    tokens = {role: vocabulary.named[role] for role in _ROLES if role in vocabulary.named}
    return start | {f"{role}_token_id": vocabulary.tokenizer.token_to_id(token) for role, token in tokens.items()}


def files_beside(url: str) -> tuple[str, dict[str, bytes]]:
    """Return where the weights at a URL, of a model that transformers saved or of a checkpoint, have files beside them,
    and these files by name; {} if there are no weights. Raises Refused or OSError if a checkpoint's files are not what
    was written."""
    try:
        if is_saved(url):
            saved = SavedModel(url)
            return saved.place, beside(saved, "source")[0]
        storage, name, manifest = catalogue.select(url, "source")
    except (ConfigError, Refused, OSError):
        return url, {}
    return f"{storage.url}/{name}", read_carried(storage, name, manifest)


def check_tokenizer(data: Data, given: Vocabulary | None, place: str, files: Mapping[str, bytes]) -> None:
    """Raise ConfigError if the tokenizer of the data, None if the data has none, differs from that beside a model's
    weights, among the `files` at `place`: the model would read other tokens than it knows. data.foreign_tokenizer=true
    allows it."""
    if given is None or JSON not in files or data.foreign_tokenizer or given.files.get(JSON) == files[JSON]:
        return
    try:
        known = ConfinedTokenizer(files[JSON])
    except Malformed:
        return
    others, count = _otherwise(known, given.tokenizer)
    if others:
        reason = f"is not that of the weights in {bare_url(place)}: {others} of its {count} tokens have other ids here"
        legal = [f"data.tokenizer={bare_url(place)}", "data.foreign_tokenizer=true"]
        raise ConfigError(violation("data.tokenizer", bare_url(data.tokenizer), reason, legal))


def _otherwise(known: ConfinedTokenizer, here: Tokenizer | ConfinedTokenizer) -> tuple[int, int]:
    """Compare a model's tokenizer (`known`) with the data's: (tokens that differ, tokens), without special ones."""
    special = known.get_added_tokens_decoder()
    tokens = {token: i for token, i in known.get_vocab().items() if i not in special}
    there = here.get_vocab()
    return sum(there.get(token) != i for token, i in tokens.items()), len(tokens)
