"""A folder of safetensors with a config.json, as transformers saves a model: its headers, pieces of its tensors, and
the files beside its weights: the tokenizer, which data has to share, and how text is generated from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary import documents, schema
from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import ConfigError, refuse_failures
from platform.boundary.schema import Malformed, OpenMap, Text
from platform.boundary.sealed_blocks import LARGEST_BLOCK, THREADS
from platform.boundary.storage import Storage, open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import Box, HeldTensor, Piece, list_written_parts
from platform.checkpoint.catalogue import read_carried_files
from platform.checkpoint.interchange import ForeignTensor, read_header, split_file_url
from platform.checkpoint.manifest import Manifest, Name, Refused
from platform.config.fields import Data, Model, hash_values
from platform.data.chat_templates import ConfinedTokenizer
from platform.data.tokenizer import OWN, Vocabulary, build_vocabulary
from platform.data.tokenizer_files import CONFIG as BESIDE_CONFIG
from platform.data.tokenizer_files import JSON, has_tokenizer, read_json_map, read_tokenizer_files
from platform.weights.config_keys import QUANTISED
from platform.weights.quantised import QuantisedTensor, compute_bytes, find_quantised_tensors, quantise_as_read
from platform.weights.tensor_names import HfTensor, MatrixPart

if TYPE_CHECKING:
    from tokenizers import Tokenizer


CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
WEIGHTS = (".safetensors", ".safetensors.index.json")  # ends of the names of files that say what a model's weights are
LARGEST_CONFIG, LARGEST_INDEX = 1 << 20, 64 << 20  # bytes
_VALUES = 1 << 21  # of an index: two for each tensor
_HEADERS: dict[tuple[str, ...], dict[str, tuple[str, ForeignTensor]]] = {}  # by the versions of files: the last model's

_File = Annotated[str, Text(r"[\w.-]{1,250}\.safetensors", "the name of a safetensors file")]  # stays in its folder

_Index = Annotated[dict[str, object], OpenMap((("weight_map", dict[Name, _File]),), ("weight_map",))]


class Place(NamedTuple):
    """Bytes [start, end) of a file of a folder, and how they hold a piece: as they are, or (`width` > 0) as rows of so
    many elements, of which columns [first, last), every `step`-th, are the piece, `turned` or as they are."""

    file: str
    start: int
    end: int
    width: int = 0
    first: int = 0
    last: int = 0
    step: int = 1
    turned: bool = True


SAMPLES, SAMPLE = 5, 1024  # places in a tensor, and the bytes at each, that a hash of saved weights is of


class SavedModel:
    """Model as transformers saves it, at a path or URL `source`: a folder, or one safetensors file beside a
    config.json. `config`: its config.json; `tensors`: name -> (file, description); `place`: the path or URL of its
    folder.

    Raises ConfigError, in one line that names `key` and the source, for what cannot be read or is malformed.
    """

    def __init__(self, source: str, key: str = "source"):
        """Open the model that transformers saved at a path or URL: read its config.json and the headers of its tensors.
        `key`: the configuration key or argument that refusals name."""
        self.url, self._key = strip_url_secrets(source), key
        try:
            in_file = source.rstrip("/").endswith(".safetensors")
            self._folder, single_file = split_file_url(source) if in_file else (open_storage(source, "source"), "")
            self.place = source.rstrip("/").rpartition("/")[0] or "." if single_file else source
            file_sizes = self._folder.list_sizes("")
            self.config = self._read_config(file_sizes)
            files = [single_file] if single_file else self._list_weight_files(file_sizes)
            stored = self._find_tensors({file: file_sizes.get(file) for file in files})
            self.tensors, self._computed = find_quantised_tensors(stored, self.config)
        except (Malformed, Refused, OSError) as error:
            raise self.build_refusal(str(error)) from None

    def read_small_file(self, name: str) -> bytes:
        """Return a small file beside the saved weights; b"" if it is missing or larger than a config.json may be."""
        size = self._folder.list_sizes("").get(name, 0)
        return bytes(self._folder.read(name)) if 0 < size <= LARGEST_CONFIG else b""

    def build_refusal(self, why: str) -> ConfigError:
        """Return the ConfigError that refuses this saved model for the reason `why`."""
        return ConfigError(self._key, self.url, why)

    def _read_config(self, file_sizes: dict[str, int]) -> dict[str, Any]:
        """Read config.json of the saved model as a map; raises Refused if it is missing or malformed. `file_sizes`:
        name -> bytes of the folder's files."""
        if CONFIG not in file_sizes:
            raise Refused(f"holds no {CONFIG}")
        raw = self._folder.read(CONFIG, 0, LARGEST_CONFIG + 1)
        try:
            return schema.parse_value(dict[str, Any], documents.parse_json(raw, LARGEST_CONFIG))
        except Malformed as error:
            raise Refused(f"{CONFIG}: {error}") from None

    def _list_weight_files(self, file_sizes: dict[str, int]) -> list[str]:
        """Return the names of the safetensors files with the model's weights: all in the index, else model.safetensors,
        else the only one in the folder. `file_sizes`: name -> bytes of the folder's files. Raises Refused if that is
        ambiguous: where both are there, transformers takes model.safetensors."""
        if INDEX in file_sizes:
            try:
                raw = self._folder.read(INDEX, 0, LARGEST_INDEX + 1)
                index: dict[str, Any] = schema.parse_value(_Index, documents.parse_json(raw, LARGEST_INDEX, _VALUES))
            except Malformed as error:
                raise Refused(f"{INDEX}: {error}") from None
            files = sorted(set(index["weight_map"].values()))
            if SINGLE in file_sizes and SINGLE not in files:
                reason = f"holds both {SINGLE} and {INDEX}, which may be two models"
                raise Refused(f"{reason}; name a folder with one of them")
            return files
        if SINGLE in file_sizes:
            return [SINGLE]
        weight_files = sorted(name for name in file_sizes if name.endswith(".safetensors"))
        if len(weight_files) != 1:
            raise Refused(f"holds {'several files' if weight_files else 'no file'} of safetensors, and no {INDEX}")
        return weight_files

    def _find_tensors(self, files: dict[str, int | None]) -> dict[str, tuple[str, ForeignTensor]]:
        """Return the saved model's tensors, name -> (file, description), from its files; cached until one changes."""
        sizes = {file: size for file, size in files.items() if size is not None}
        versions = [f"{file} {size} {self._folder.read_version(file)}" for file, size in sizes.items()]
        key = self._folder.url, *versions
        if len(versions) < len(files) or key not in _HEADERS:
            _HEADERS.clear()
            _HEADERS[key] = dict(self._read_headers([*files]))
        return _HEADERS[key]

    def _read_headers(self, files: Sequence[str]) -> Iterator[tuple[str, tuple[str, ForeignTensor]]]:
        """Yield each tensor of the safetensors `files` as (name, (file, description)); raises Refused for a name in
        several files."""
        seen: set[str] = set()
        for file in files:
            try:
                _, described = read_header(self._folder, file, quantised=bool(self.config.get(QUANTISED)))
            except (Malformed, Refused) as error:
                raise Refused(f"{file}: {error}") from None
            if repeated_names := sorted(seen & described.keys()):
                raise Refused(f"{', '.join(repeated_names)}: in several files")
            seen |= described.keys()
            yield from ((name, (file, t)) for name, t in described.items())

    def split_into_pieces(self, stored: HfTensor, name: str) -> list[Piece[Place]]:
        """Return the pieces of our parameters in the tensor `stored` of a saved model, called `name` in its files, each
        of at most LARGEST_BLOCK bytes and a row, in the order of the file where it can be."""
        file, t = self.tensors[name]
        dtype, size = str(t.torch_type).removeprefix("torch."), t.torch_type.itemsize
        begin, _ = t.data_offsets
        pieces: list[Piece[Place]] = []
        for parts in stored.matrix_parts:
            if stored.beside or stored.turned or stored.alternate:
                place = Place(file, begin, begin)
                if stored.beside:
                    pieces += _cut_columns_beside_others(parts, dtype, place, size)
                else:
                    pieces += _cut_transposed_matrix(parts, dtype, place, size, stored.alternate)
                begin += sum(part.rows * part.columns for part in parts) * size
                continue
            for part in parts:
                held_tensor = HeldTensor(f"model.{part.name}", dtype, part.shape, {part.box: (0,)})
                for share in list_written_parts([held_tensor], 0):
                    pieces.append(Piece(held_tensor.name, dtype, share.box, Place(file, begin, begin + share.nbytes)))
                    begin += share.nbytes
        return pieces

    def fetch_pieces(self, wanted: Sequence[Piece[Place]], into: Sequence[Tensor]) -> None:
        """Read pieces of the saved weights from files into the memory of each, uint8 [bytes]; Refused, OSError."""
        with ThreadPoolExecutor(THREADS, "weights-read") as pool:
            list(pool.map(self._read_piece, wanted, into))

    def _read_piece(self, piece: Piece[Place], memory: Tensor) -> None:
        """Read the bytes of a piece of the saved weights into `memory`, uint8 [bytes], transposed where its place says
        so."""
        place = piece.source
        data = self._read_bytes(place.file, place.start, place.end)
        if len(data) != place.end - place.start:
            raise Refused(f"{self.url}/{place.file} is shorter than its header says")
        if not data:
            return
        raw_bytes = torch.frombuffer(data, dtype=torch.uint8)
        if place.width:
            size = piece.nbytes // piece.box.num_elements
            rows = raw_bytes.view(-1, place.width, size)[:, place.first : place.last : place.step]
            rows = rows.transpose(0, 1) if place.turned else rows
            memory.view(len(rows), -1, size).copy_(rows)
        else:
            memory.copy_(raw_bytes)

    def _read_bytes(self, file: str, start: int, end: int) -> Any:
        """Return bytes [start, end) of a file of the saved weights, or of one that is computed of quantised ones."""
        if (tensor := self._computed.get(file)) is None:
            return self._folder.read(file, start, end)
        return compute_bytes(tensor, start, end, self._folder.read).numpy().data

    def find_quantised(self, name: str) -> QuantisedTensor | None:
        """Return the tensor `name` as it is quantised in the files, None if it is not."""
        return self._computed.get(self.tensors[name][0]) if name in self.tensors else None

    def quantise_tensor(self, tensor: QuantisedTensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers x as values and scales of the form that a quantised tensor of the files has. Raises Refused or
        OSError."""
        return quantise_as_read(tensor, x, self._folder.read)

    @property
    def quantised_names(self) -> list[str]:
        """List the tensors that are quantised in the files, by the names of what they stand for."""
        return [name for name, (file, _) in self.tensors.items() if file in self._computed]

    def compute_hash(self) -> str:
        """Return a hash of all tensors, of each at SAMPLES places: all bytes would take minutes to read."""
        described = sorted((name, file, t) for name, (file, t) in self.tensors.items())
        with ThreadPoolExecutor(THREADS, "weights-hash") as pool:
            hashes = pool.map(lambda entry: self._hash_samples(*entry[1:]), described)
            return hash_values(
                [[name, str(t.dtype), *t.shape, h] for (name, _, t), h in zip(described, hashes, strict=True)]
            )

    def _hash_samples(self, file: str, tensor: Any) -> str:
        """Return a hash of the bytes at SAMPLES places of one tensor in a file."""
        begin, end = tensor.data_offsets
        last = max(begin, end - SAMPLE)
        places = sorted({begin + (last - begin) * i // (SAMPLES - 1) for i in range(SAMPLES)})
        return sha256(b"".join(bytes(self._folder.read(file, a, min(end, a + SAMPLE))) for a in places)).hexdigest()

    def has_equal_tensors(self, one: str, other: str) -> bool:
        """Return True if two tensors of the saved model, by their names in its files, are equal in every bit."""
        (file, t), (other_file, u) = self.tensors[one], self.tensors[other]
        if (t.torch_type, t.shape) != (u.torch_type, u.shape):
            return False
        nbytes = prod(t.shape) * t.torch_type.itemsize
        for a in range(0, nbytes, LARGEST_BLOCK):
            b = min(nbytes, a + LARGEST_BLOCK)
            parts = ((f, tensor.data_offsets[0]) for f, tensor in ((file, t), (other_file, u)))
            left, right = (self._read_bytes(f, begin + a, begin + b) for f, begin in parts)
            if left != right:
                return False
        return True


def is_saved_model(url: str) -> bool:
    """Return True if a URL is a model that transformers saved, not checkpoints; raises OSError, ConfigError."""
    return url.rstrip("/").endswith(".safetensors") or CONFIG in open_storage(url, "source").list_sizes("")


def _cut_transposed_matrix(
    parts: Sequence[MatrixPart], dtype: str, begin: Place, size: int, alternate: bool
) -> Iterator[Piece[Place]]:
    """Yield the pieces of our parameters in a matrix of a saved model that is stored with columns first, from `begin`
    on, in elements of `size` bytes; `alternate`: a row of each in turn."""
    width, columns = sum(part.rows for part in parts), parts[0].columns
    unit = _find_column_index_width(parts[0])
    step = max(1, LARGEST_BLOCK // (width * size * unit)) * unit
    for a in range(0, columns, step):
        b, row = min(columns, a + step), 0
        start, end = (begin.start + at * width * size for at in (a, b))
        for number, part in enumerate(parts):
            rows = (number, width, len(parts)) if alternate else (row, row + part.rows, 1)
            place = Place(begin.file, start, end, width, *rows)
            yield Piece(f"model.{part.name}", dtype, _box_of_columns(part, a, b), place)
            row += part.rows


def _cut_columns_beside_others(
    parts: Sequence[MatrixPart], dtype: str, begin: Place, size: int
) -> Iterator[Piece[Place]]:
    """Yield the pieces of our parameters in a matrix of a saved model in which columns of one follow the last one's,
    from `begin` on, in elements of `size` bytes."""
    width, first = sum(part.columns for part in parts), 0
    step = max(1, LARGEST_BLOCK // (width * size))
    for part in parts:
        for a in range(0, part.rows, step):
            b = min(part.rows, a + step)
            start, end = (begin.start + at * width * size for at in (a, b))
            place = Place(begin.file, start, end, width, first, first + part.columns, turned=False)
            yield Piece(f"model.{part.name}", dtype, Box((a, 0), (b - a, part.columns)), place)
        first += part.columns


def _find_first_column_dim(part: MatrixPart) -> int:
    """Return the first dim of our parameter whose indices are columns, not rows, of its matrix in a saved model."""
    extent = part.box.extent
    return max(i for i in range(len(extent) + 1) if prod(extent[:i]) == part.rows)


def _find_column_index_width(part: MatrixPart) -> int:
    """Return the width of one index of a first column dim in a weight's saved matrix: d_kv for heads, else 1."""
    return prod(part.box.extent[_find_first_column_dim(part) + 1 :])


def _box_of_columns(part: MatrixPart, a: int, b: int) -> Box:
    """Return the block of our parameter that is in columns [a, b), whole heads, of its matrix in a saved model."""
    first, unit = _find_first_column_dim(part), _find_column_index_width(part)
    offset, extent = list(part.box.offset), list(part.box.extent)
    if first < len(extent):
        offset[first], extent[first] = offset[first] + a // unit, (b - a) // unit
    return Box(tuple(offset), tuple(extent))


GENERATION = "generation_config.json"
_ROLES = ("bos", "eos", "pad")


def read_companions_and_tokenizer_lack(saved: SavedModel, key: str) -> tuple[dict[str, bytes], str]:
    """Read the files beside a model that transformers saved (its tokenizer, generation_config.json), name -> bytes,
    and why the tokenizer is not among them, "" if it is. `key`: the configuration key or argument that names the
    model."""
    files: dict[str, bytes] = {}
    if raw := saved.read_small_file(GENERATION):
        files[GENERATION] = raw
    if not has_tokenizer(saved.place):
        return files, "there is none beside it"
    try:
        return {**files, **read_tokenizer_files(saved.place, key=key)}, ""
    except ConfigError as error:
        return files, error.violations[0]


def read_export_files(source: str, storage: Storage, directory: str, manifest: Manifest, most: int) -> dict[str, bytes]:
    """Read the files that go along with an exported checkpoint, by name: the tokenizer's at `source`, a path
    or URL of its file or folder, else the ones that the checkpoint carries. `most`: the most tokens of the model.
    Raises ConfigError, Refused or OSError."""
    carried = read_carried_files(storage, directory, manifest)
    if not source:
        files = carried
    else:
        files = read_tokenizer_files(source, key="--tokenizer")
        files |= {GENERATION: carried[GENERATION]} if GENERATION in carried else {}
    with refuse_failures("--tokenizer", source, Malformed):
        if JSON in files and read_json_map(files, BESIDE_CONFIG) == OWN:  # trained here: it knows no longest text
            described = json.dumps({**OWN, "model_max_length": most}, indent=2) + "\n"
            return {**files, BESIDE_CONFIG: described.encode()}
    return files


def build_vocabulary_if_readable(files: Mapping[str, bytes]) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer among the `files` of a saved model; None if none is readable."""
    try:
        return build_vocabulary(files) if JSON in files else None
    except Malformed:
        return None


def special_token_ids(vocabulary: Vocabulary | None, model: Model) -> dict[str, Any]:
    """Return the keys of an exported model's config.json with the ids that begin, end and pad texts."""
    if vocabulary is None:
        return {}
    start = {"decoder_start_token_id": vocabulary.special.start} if model.kind == "encoder_decoder" else {}
    tokens = {role: vocabulary.named[role] for role in _ROLES if role in vocabulary.named}
    return start | {f"{role}_token_id": vocabulary.tokenizer.token_to_id(token) for role, token in tokens.items()}


def find_companion_files(url: str) -> tuple[str, dict[str, bytes]]:
    """Return where the weights at a URL, of a model that transformers saved or of a checkpoint, have files beside them,
    and these files by name; {} if there are no weights. Raises Refused or OSError if a checkpoint's files are not what
    was written."""
    try:
        if is_saved_model(url):
            saved = SavedModel(url)
            return saved.place, read_companions_and_tokenizer_lack(saved, "source")[0]
        storage, name, manifest = catalogue.select_checkpoint(url, "source")
    except (ConfigError, Refused, OSError):
        return url, {}
    return f"{storage.url}/{name}", read_carried_files(storage, name, manifest)


def check_tokenizer(data: Data, vocabulary: Vocabulary | None, place: str, files: Mapping[str, bytes]) -> None:
    """Raise ConfigError if the tokenizer of the data, None if the data has none, differs from the one of a saved model,
    among the `files` beside its weights at `place`: the model would read other tokens than it knows.
    data.foreign_tokenizer=true allows it."""
    if vocabulary is None or JSON not in files or data.foreign_tokenizer or vocabulary.files.get(JSON) == files[JSON]:
        return
    try:
        known = ConfinedTokenizer(files[JSON])
    except Malformed:
        return
    others, count = _count_differing_ids(known, vocabulary.tokenizer)
    if others:
        place = strip_url_secrets(place)
        reason = f"is not that of the weights in {place}: {others} of its {count} tokens have other ids here"
        legal = [f"data.tokenizer={place}", "data.foreign_tokenizer=true"]
        raise ConfigError("data.tokenizer", strip_url_secrets(data.tokenizer), reason, legal)


def _count_differing_ids(known: ConfinedTokenizer, data_tokenizer: Tokenizer | ConfinedTokenizer) -> tuple[int, int]:
    """Compare a saved model's tokenizer (`known`) with the data's: (tokens that differ, tokens), no special ones."""
    special = known.get_added_tokens_decoder()
    tokens = {token: i for token, i in known.get_vocab().items() if i not in special}
    data_ids = data_tokenizer.get_vocab()
    return sum(data_ids.get(token) != i for token, i in tokens.items()), len(tokens)
