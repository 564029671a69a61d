"""Reading stored blocks, each verified by its SHA-256, in large contiguous ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from platform.boundary.files.file_storage import Storage
from platform.boundary.files.sealed import FileRange, hashes_of
from platform.checkpoint.blocks.placement import Piece
from platform.checkpoint.storage.manifest import NAME, Corrupt, Manifest, Refused, StoredBlock


def stored_pieces(manifest: Manifest, names: Iterable[str] | None = None) -> list[Piece[StoredBlock]]:
    """Return the stored blocks of the tensors `names` of a checkpoint (default: of all) as pieces to read, each as a
    whole, ordered by file and by place in it."""
    chosen = [manifest.tensors[name] for name in (manifest.tensors if names is None else names)]
    found = [Piece(t.name, t.dtype, block.box, block) for t in chosen for block in t.blocks]
    return sorted(found, key=lambda piece: (piece.source.file, piece.source.at, piece.nbytes))


def read_pieces(
    storage: Storage,
    directory: str,
    wanted: Sequence[Piece[StoredBlock]],
    into: Sequence[memoryview] = (),
    count: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Read stored blocks of a checkpoint, in the order of `stored_pieces`, into the memory given for each, and verify
    them; without memory nothing is kept. `count`: function that gets the bytes of each block once it is read. Raises
    Corrupt if they are not the written bytes, Refused if the checkpoint is deleted meanwhile, OSError if the storage
    fails; the memory is then undefined."""
    spans = [FileRange(f"{directory}/{piece.source.file}", piece.source.at, piece.nbytes) for piece in wanted]
    done = 0
    try:
        with closing(hashes_of(storage, spans, into)) as found:
            for piece, digest in zip(wanted, found, strict=True):
                block, done = piece.source, done + 1
                if digest != block.sha256:
                    place = f"bytes {block.at} to {block.at + piece.nbytes}"
                    raise Corrupt(f"{block.file}: {place} ({piece.name} {piece.box}) are not what was written")
                count(piece.nbytes)
    except FileNotFoundError:
        if NAME not in storage.list(directory):
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(f"{wanted[done].source.file} is missing") from None
