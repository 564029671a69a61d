"""Conversion to and from safetensors, one tensor in memory at a time, and torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from platform.boundary import documents, schema
from platform.boundary.local_files import LocalStorage
from platform.boundary.schema import EntryBounds, Malformed, Span
from platform.boundary.storage import Storage, open_storage, write_all_or_nothing
from platform.boundary.terminal import show_phase
from platform.boundary.world_faults import walk_causes
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import Box, HeldTensor, Piece, S, Shapes, list_written_parts
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.catalogue import CarriedFiles, commit_checkpoint, delete_checkpoint, hash_carried_files
from platform.checkpoint.manifest import LARGEST, VALUES, BlockReport, Bytes, FileReport, Manifest, Meta, Name, Refused
from platform.checkpoint.moves import Fetch, read_tensor

META = "elastic_platform_meta"  # key of a checkpoint's `Meta` in the other formats
SAFETENSORS = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "uint8": "U8", "int16": "I16", "bool": "BOOL",
}  # fmt: skip
LARGEST_HEADER = 100_000_000  # bytes: the largest safetensors header, by its specification
_FROM_SAFETENSORS = {short: DTYPES[name] for name, short in SAFETENSORS.items()}
_QUANTISED = {"F8_E4M3": torch.float8_e4m3fn}  # types of published weights that no checkpoint holds
_WRITTEN = {**SAFETENSORS, "float8_e4m3fn": "F8_E4M3"}

Tensors = Iterable[tuple[str, Tensor]]


def export_safetensors(storage: Storage, directory: str, manifest: Manifest, target: str, names: list[str]) -> None:
    """Write the tensors `names` of a checkpoint, one in memory at a time, to one safetensors file `target` (a path or
    URL), whose header carries the checkpoint's `Meta`. Raises FileExistsError if the file exists."""
    described = {name: (t.dtype, t.shape) for name in names for t in [manifest.tensors[name]]}
    folder, file = _split_new_target(target)
    with _show_export_progress(manifest, names) as shown:
        tensors = (read_tensor(storage, directory, manifest, name) for name in shown)
        write_safetensors(folder, file, {META: json.dumps(asdict(manifest.meta))}, described, tensors)


@contextmanager
def _show_export_progress(manifest: Manifest, names: Sequence[str]) -> Iterator[Iterator[str]]:
    """Yield the names of the tensors of a checkpoint to convert; each is shown as done when the next one is taken."""
    sizes = {name: prod(t.shape) * DTYPES[t.dtype].itemsize for name in names for t in [manifest.tensors[name]]}
    with show_phase("exporting", sum(sizes.values()), "B") as shown:
        yield shown.iterate_parts(names, sizes.__getitem__)


def write_safetensors(
    folder: Storage,
    file: str,
    metadata: dict[str, str],
    described: Mapping[str, tuple[str, Sequence[int]]],
    tensors: Iterable[Tensor],
) -> None:
    """Write one safetensors file, an export, into a folder: the `tensors` in order, each in memory only while it is
    written. `described`: their names in this order, with element type and shape."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in described.items():
        end = at + prod(shape) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": _WRITTEN[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    def iterate_chunks() -> Iterator[memoryview]:
        """Yield the bytes of the safetensors file that a checkpoint is converted to: its header, then all tensors."""
        yield memoryview(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            yield memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    folder.write(file, iterate_chunks())


def import_safetensors(source: str) -> tuple[Meta | None, Tensors]:
    """Return (metadata, tensors) of a safetensors file `source` (a path or URL): the `Meta` of the checkpoint that was
    exported to it, None if its header carries none, and (name, tensor) pairs, each tensor read only when the iteration
    comes to it. Raises Malformed, Refused or OSError."""
    folder, file = split_file_url(source)
    metadata, described = read_header(folder, file)
    meta = metadata.get(META, "")

    def read_tensors() -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of every entry of the safetensors file, read one at a time."""
        for name, t in described.items():
            data = bytearray(folder.read(file, *t.data_offsets))
            flat = torch.frombuffer(data, dtype=t.torch_type) if data else torch.empty(0, dtype=t.torch_type)
            yield name, flat.view(t.shape)

    return _parse_meta(meta.encode(errors="surrogatepass")) if meta else None, read_tensors()


def read_header(folder: Storage, file: str, quantised: bool = False) -> tuple[dict[str, str], dict[str, ForeignTensor]]:
    """Read the header of a safetensors file in an untrusted folder; return its metadata, and its tensors by name, with
    their place in the file; `quantised`: fp8 is a legal type. Raises Malformed, also for every header that the
    safetensors package refuses, Refused or OSError."""
    if (size := folder.list_sizes("").get(file)) is None:
        raise Refused("there is no such file")
    if size < 8:
        raise Malformed(f"its {size} bytes are too few for a header")
    length = int.from_bytes(folder.read(file, 0, 8), "little")
    if 8 + length > size:
        raise Malformed(f"a header of {length} bytes is longer than the file")
    header = documents.parse_json(folder.read(file, 8, 8 + min(length, LARGEST_HEADER + 1)), LARGEST_HEADER, VALUES)
    if type(header) is not dict or type(metadata := header.pop("__metadata__", {})) is not dict:
        raise Malformed("its header is no map")
    if odd := [key for key, value in metadata.items() if type(value) is not str]:
        raise Malformed("is no text", f"__metadata__.{schema.shorten_value(odd[0])}")
    described = schema.parse_value(dict[Name, ForeignTensor], header)
    located = {name: t.locate_in_file(name, 8 + length, size, quantised) for name, t in described.items()}
    _check_tiling(located, 8 + length, size)
    return metadata, located


def _check_tiling(placed: Mapping[str, ForeignTensor], begin: int, size: int) -> None:
    """Raise Malformed unless the tensors of a safetensors file to convert to a checkpoint, each with its place in the
    file of `size` bytes, tile it from `begin` on: no byte is of two tensors, and none is of no tensor."""
    at, before = begin, ""
    for name, t in sorted(placed.items(), key=lambda item: item[1].data_offsets):
        start, end = t.data_offsets
        if start != at:
            fault = f"overlaps {before}" if start < at else f"leaves {start - at} bytes unused before it"
            raise Malformed(f"{fault}: it begins at {start - begin}, and not at {at - begin}", name)
        at, before = end, name
    if at != size:
        raise Malformed(f"{size - at} bytes behind its last tensor are no tensor's")


@dataclass(frozen=True)
class ForeignTensor:
    """Entry of a safetensors header that describes one tensor; `data_offsets`: [start, end) in the bytes after the
    header, or, if `placed`, in the file."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, Span(0, 1 << 48)], ...], EntryBounds(0, 16)]
    data_offsets: tuple[Bytes, Bytes]

    @property
    def torch_type(self) -> torch.dtype:
        """Return the torch type of this tensor's elements in the safetensors file."""
        return (_FROM_SAFETENSORS | _QUANTISED)[self.dtype]

    def locate_in_file(self, name: str, begin: int, size: int, quantised: bool = False) -> ForeignTensor:
        """Return this entry of a safetensors header with its offsets counted in the whole file, of `size` bytes, whose
        data `begin` after the header. Raises Refused if checkpoints cannot hold the element type of the tensor `name`,
        Malformed unless its offsets span exactly its bytes and end within the file."""
        if self.dtype not in _FROM_SAFETENSORS and not (quantised and self.dtype in _QUANTISED):
            legal = ", ".join(_FROM_SAFETENSORS)
            raise Refused(f"{name}: type {schema.shorten_value(self.dtype)} is not one of {legal}")
        start, end = self.data_offsets
        data_bytes, nbytes = size - begin, prod(self.shape) * self.torch_type.itemsize
        if end - start != nbytes or end > data_bytes:
            raise Malformed(f"{nbytes} bytes do not lie from {start} to {end} of {data_bytes}", name)
        return replace(self, data_offsets=(begin + start, begin + end))


def _parse_meta(raw: bytes) -> Meta:
    """Parse the JSON text of a checkpoint's metadata (`Meta`) in an exported file; raises Malformed, OtherFormat."""
    return Meta.parse_json(documents.parse_json(raw, LARGEST, VALUES))


def export_dcp(storage: Storage, directory: str, manifest: Manifest, target: str, names: list[str]) -> None:
    """Write the tensors `names` of a checkpoint to a new local directory `target` in the format of
    torch.distributed.checkpoint; all are in memory at once. The checkpoint's `Meta` becomes a tensor of bytes, so that
    it is not pickled. Raises FileExistsError if the directory exists, OSError if it cannot be written."""
    import torch.distributed.checkpoint as dcp  # imported here: it is slow, and rarely needed
    from torch.distributed.checkpoint.api import CheckpointException

    folder, name = _split_new_target(target)
    meta = json.dumps(asdict(manifest.meta)).encode()
    # One thread: with more, torch 2.13 reports a failed write as a success.
    try:
        staged = write_all_or_nothing(LocalStorage(f"{folder.url}/{name}"), ())
        with _show_export_progress(manifest, names) as shown, _hide_process_group_warning(), staged as staging:
            state = {name: read_tensor(storage, directory, manifest, name) for name in shown}
            state[META] = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
            dcp.save(state, storage_writer=dcp.FileSystemWriter(staging.url, thread_count=1), no_dist=True)
    except CheckpointException as error:  # a BaseException, not an Exception
        causes = [cause for failure, _ in error.failures.values() for cause in walk_causes(failure)]
        disk = next((cause for cause in causes if isinstance(cause, OSError)), None)
        raise disk or OSError(f"{target}: {error}") from error


def import_dcp(source: str) -> tuple[Meta | None, Tensors]:
    """Return (metadata, tensors) of a local directory in the format of torch.distributed.checkpoint (DCP): the `Meta`
    of the checkpoint that was exported to it, None if it holds none, and (name, tensor) pairs, each tensor read only
    when the iteration comes to it.

    DCP's `.metadata` is a pickle, which can run code: only for directories that you trust.
    """
    import torch.distributed.checkpoint as dcp

    described = dcp.FileSystemReader(source).read_metadata().state_dict_metadata

    def load_tensor(name: str) -> Tensor:
        """Read one tensor, by its name, of a directory in torch.distributed.checkpoint's format, for import."""
        entry = described[name]
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}  # type: ignore[union-attr]
        with _hide_process_group_warning():
            dcp.load(state, storage_reader=dcp.FileSystemReader(source), no_dist=True)
        return state[name]

    names = [n for n, entry in described.items() if hasattr(entry, "size") and n != META]
    meta = _parse_meta(bytes(load_tensor(META).tolist())) if META in described else None
    return meta, ((name, load_tensor(name)) for name in names)


def store_tensors(storage: Storage, tensors: Tensors, meta: Meta) -> str:
    """Make a checkpoint on `storage` of whole tensors from another format, a block file for each, one in memory at a
    time; return the checkpoint's directory. Partial files are deleted after a failure."""
    shapes: dict[str, Sequence[int]] = {}

    def iterate_files() -> Iterator[list[Piece[Tensor]]]:
        """Yield the pieces of one imported tensor after another, each with its part of the tensor."""
        for name, tensor in tensors:
            whole_box = Box.whole_tensor(tensor.shape)
            held = HeldTensor.group_holders(name, tensor.dtype, tensor.shape, [(0, whole_box)])
            shapes[name] = held.shape
            boxes = [box for _, box in list_written_parts([held], 0)]
            yield [Piece(name, held.dtype, box, tensor[box.relative_slices(whole_box)]) for box in boxes]

    return store_pieces(storage, iterate_files(), _copy_tensors, shapes, meta)


def _copy_tensors(pieces: Sequence[Piece[Tensor]], into: Sequence[Tensor]) -> None:
    """Copy pieces of tensors that are converted to a checkpoint's into the memory given for each, uint8 [bytes]."""
    for piece, memory in zip(pieces, into, strict=True):
        memory.copy_(piece.source.contiguous().view(-1).view(torch.uint8))


def store_pieces(
    storage: Storage,
    files: Iterable[Sequence[Piece[S]]],
    fetch: Fetch[S],
    shapes: Shapes,
    meta: Meta,
    carried: CarriedFiles | None = None,
) -> str:
    """Make a checkpoint on `storage` of pieces of tensors from another format, a block file for each of `files` (its
    pieces in order), with one piece in memory at a time; return the checkpoint's directory. `fetch`: function that
    reads pieces into memory; `shapes`: shapes of all tensors, by name; `carried`: files that it carries. Partial files
    are deleted after a failure."""
    directory = catalogue.choose_attempt_directory(storage, meta.step)
    total = sum(piece.nbytes for pieces in files for piece in pieces) if isinstance(files, Sequence) else 0
    try:
        with show_phase("importing", total, "B") as shown:
            shown_files = shown.iterate_parts(files, lambda pieces: sum(p.nbytes for p in pieces))
            numbered = enumerate(shown_files)
            reports = [_write_pieces(storage, directory, n, pieces, fetch, shapes) for n, pieces in numbered]
        catalogue.write_carried_files(storage, directory, carried or {})
        meta = replace(meta, values={**meta.values, **hash_carried_files(carried or {})})
        commit_checkpoint(storage, directory, shapes, reports, meta)
    except BaseException:
        with suppress(OSError):
            delete_checkpoint(storage, directory)
        raise
    return directory


def _write_pieces(
    storage: Storage, directory: str, number: int, pieces: Sequence[Piece[S]], fetch: Fetch[S], shapes: Shapes
) -> FileReport:
    """Write block file `number` of a checkpoint, one piece after another, and return its report."""
    blocks: list[BlockReport] = []
    file = f"blocks-{number:05d}.bin"
    written = 0

    def iterate_chunks() -> Iterator[memoryview]:
        """Yield the bytes of one piece of the checkpoint after another, and note the place and the hash of each."""
        nonlocal written
        for piece in pieces:
            memory = torch.empty(piece.nbytes, dtype=torch.uint8)
            fetch([piece], [memory])
            view = memoryview(memory.numpy().data)
            digest = hashlib.sha256(view).hexdigest()
            blocks.append(BlockReport(piece.name, piece.dtype, tuple(shapes[piece.name]), piece.box, written, digest))
            written += piece.nbytes
            yield view

    storage.write(f"{directory}/{file}", iterate_chunks())
    return FileReport(file, written, blocks)


EXPORTERS = {"safetensors": export_safetensors, "dcp": export_dcp}
IMPORTERS = {"safetensors": import_safetensors, "dcp": import_dcp}


@contextmanager
def _hide_process_group_warning() -> Iterator[None]:
    """Hide the warning of torch.distributed.checkpoint that it runs without a process group, as intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _split_new_target(target: str) -> tuple[Storage, str]:
    """Split the path or URL to which a checkpoint is converted into the storage of its folder and its name there.
    Raises FileExistsError if it exists: a failure midway would destroy it."""
    folder, name = split_file_url(target)
    if name in folder.list_sizes(""):
        raise FileExistsError(f"{target} exists; name another target")
    return folder, name


def split_file_url(url: str) -> tuple[Storage, str]:
    """Split the path or URL of a file of tensors to import or export into its folder's storage and its name."""
    if "://" in url:
        folder, _, name = url.rpartition("/")
        return open_storage(folder, "target"), name
    return LocalStorage(Path(url).absolute().parent), Path(url).name
