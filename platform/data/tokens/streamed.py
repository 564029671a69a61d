"""Streams: sources that are read and tokenised while they are trained on, block by block; the newest blocks are kept.

A block is whole documents in the order of the source, up to the one in which it reaches data.block characters (one that
alone has as many again is cut). Its tokens are cut into samples like the tokens of a whole source, and these come in an
order drawn from (seed, epoch, block); blocks follow each other, and after the last one the first comes again. So the
order of samples is a function of the source and the seed.

| entry in the cache | holds                                              | is deleted                            |
|--------------------|----------------------------------------------------|---------------------------------------|
| head               | the tokenizer, and the documents held out          | never                                 |
| block N            | the tokens of the block                            | by who has opened KEPT blocks since   |
| end N              | where block N ends, the samples up to there        | never                                 |

Each is made by the first process that asks, while others wait. A run that resumes reads on from the end that it finds,
and tokenises nothing but the block that it is in.
"""

from __future__ import annotations

import fcntl
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock, Thread
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

from platform.boundary import schema
from platform.boundary.schema import Span
from platform.data.permutation import mix, order
from platform.data.sources.stream_blocks import BEGIN, BlockReader, PiecePlace
from platform.data.tokens import cache
from platform.data.tokens.entry import TokenFiles
from platform.data.tokens.streams import Ints

KEPT = 8  # blocks whose tokens stay in the cache
_COUNT = Annotated[int, Span(0, 1 << 50)]
_LAST = -1  # in place of a file: the source has no more
_END = "end-{:08d}"

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    """Description of an end: the file in which the next block begins, -1 if there is none, and the pieces before it
    there; the samples of all blocks up to this one."""

    file: Annotated[int, Span(_LAST, 1 << 50)]
    piece: _COUNT
    samples: _COUNT
    files: dict[str, Any]

    @property
    def last(self) -> bool:
        """Return True if the streamed data source ends with this block."""
        return self.file == _LAST


class _Located(NamedTuple):
    """Block of a sample in the endless order: its epoch and number, the number of its first sample in that order, and
    how many it has."""

    epoch: int
    block: int
    first: int
    samples: int


@dataclass
class StreamedTokens:
    """Training tokens of a source that is streamed. `folder`: folder of its blocks; `write(folder, documents)` makes
    the entry of a block, and returns its description; `read` reads it; `cut` opens it as a stream of tokens, and
    `count` says how many samples that has."""

    folder: Path
    reader: BlockReader
    write: Callable[[Path, list[tuple[int, Any]]], dict[str, Any]]
    read: Callable[[Path, dict[str, Any]], TokenFiles]
    cut: Callable[[Path, TokenFiles], Any]
    count: Callable[[Any], int]
    seed: int
    _ends: dict[int, _End] = field(default_factory=dict)
    _opened: dict[int, Any] = field(default_factory=dict)
    _newest: int = -1  # of the ends that are there, from the first one on
    _turn: RLock = field(default_factory=RLock)

    def __post_init__(self) -> None:
        """Find out up to which block the cache folder of this streamed data source knows the ends of blocks."""
        there = {path.name for path in self.folder.glob("end-*")}
        while _END.format(self._newest + 1) in there:
            self._newest += 1

    def first(self) -> Any:
        """Return the tokens of this streamed data source's first block. Raises ConfigError, OSError."""
        return self._open(0)

    def places(self, numbers: Ints) -> Iterator[tuple[Any, Ints, Ints]]:
        """Yield each block of this streamed data source that has some of the training samples `numbers`, which ascend:
        its token stream, which of `numbers` these are, and their indices in it. Raises ConfigError, OSError."""
        left = 0
        while left < len(numbers):
            epoch, block, first, samples = self._locate(int(numbers[left]))
            right = int(np.searchsorted(numbers, first + samples))
            index = order(self.seed, mix(epoch, block), samples, numbers[left:right] - first)
            yield self._open(block), np.arange(left, right), index
            left = right

    def documents(self, stream: Any) -> tuple[int, list[PiecePlace]]:
        """Return the number of the block that has been yielded as `stream`, and where its documents begin."""
        block = next(number for number, opened in self._opened.items() if opened is stream)
        end = self._end(block)
        return block, self.reader.beginnings(self._start(block), None if end.last else PiecePlace(end.file, end.piece))

    def _locate(self, number: int) -> _Located:
        """Find the block of this streamed data source that has training sample `number`; blocks up to it are tokenised
        if no run has done so."""
        end = self._end(max(self._newest, 0))
        while not end.last and number >= end.samples:
            end = self._end(self._newest + 1)
        epoch, index = divmod(number, end.samples) if end.last else (0, number)
        block = bisect_right(range(self._newest + 1), index, key=lambda n: self._end(n).samples)
        before = self._before(block)
        return _Located(epoch, block, number - index + before, self._end(block).samples - before)

    def _before(self, block: int) -> int:
        """Return the number of training samples in this streamed source's blocks before block number `block`."""
        return self._end(block - 1).samples if block else 0

    def _start(self, block: int) -> PiecePlace:
        """Return the place (file, piece) in the streamed data source at which block number `block` begins."""
        return PiecePlace(self._end(block - 1).file, self._end(block - 1).piece) if block else BEGIN

    def _end(self, block: int) -> _End:
        """Return where a block of this streamed source ends, from the cache; a block never read before is tokenised
        now."""
        if block not in self._ends:
            entry = self.folder / _END.format(block)
            if not (found := cache.verified(entry, _read_end)):
                start, before = self._start(block), self._before(block)  # not while others wait for us

                def make(_: Path) -> dict[str, Any]:
                    """Tokenize the block; return the description of its end: place in the source, samples so far."""
                    documents, after = self.reader.block(start)
                    shutil.rmtree(self._place(block).parent, ignore_errors=True)  # of an interrupted run
                    file, piece = after or PiecePlace(_LAST, 0)
                    samples = before + self.count(self._tokens(block, lambda: documents))
                    return {"file": file, "piece": piece, "samples": samples}

                found = self._once("ends", entry, make, _read_end)
            self._ends[block] = found
            self._newest = max(self._newest, block)
        return self._ends[block]

    def _place(self, block: int) -> Path:
        """Return the cache folder for the tokens of block number `block` of this streamed data source."""
        return self.folder / f"block-{block:08d}" / "tokens"

    def _tokens(self, block: int, documents: Callable[[], list[tuple[int, Any]]]) -> Any:
        """Return the token stream of a block from the cache; if it is not there, tokenise the block's `documents()`."""
        place = self._place(block)
        return self._once(
            "blocks",
            place,
            lambda folder: self.write(folder, documents()),
            # at once: others delete what they have read
            lambda folder, meta: self.cut(folder, self.read(folder, meta)),
        )

    def _stream(self, block: int) -> Any:
        """Return the token stream of block number `block` of a streamed source, tokenised first if it is not cached."""
        self._end(block)
        start = self._start(block)
        return self._tokens(block, lambda: self.reader.block(start)[0])

    def _open(self, block: int) -> Any:
        """Return the token stream of a streamed source's block, which stays open, and tokenise the next block in a
        thread meanwhile. Blocks that this process opened long before are deleted."""
        if block not in self._opened:
            self._opened[block] = self._stream(block)
            self._delete_old()
            following = 0 if self._end(block).last else block + 1
            Thread(target=self._prepare, args=(following,), daemon=True).start()
        return self._opened[block]

    def _delete_old(self) -> None:
        """Delete the cached tokens of blocks that this process has opened long before. While another process makes a
        block, which may be one of them for its next epoch, they stay until the next call."""
        with _alone(self.folder, "blocks", waits=False) as alone:
            for old in list(self._opened)[:-KEPT] if alone else ():
                self._opened.pop(old, None)
                shutil.rmtree(self._place(old).parent, ignore_errors=True)

    def _prepare(self, block: int) -> None:
        """Tokenize a block of this streamed source ahead of the training steps that will read it; ignore errors."""
        with suppress(Exception):  # who asks for it meets the same
            self._stream(block)

    def _once(
        self,
        kind: str,
        entry: Path,
        make: Callable[[Path], dict[str, Any]],
        read: Callable[[Path, dict[str, Any]], T],
    ) -> T:
        """Return a cache entry of this streamed data source, read by `read`; if it is missing, one process makes it by
        `make` while others wait for the lock of this `kind` of entry."""
        if (found := cache.verified(entry, read)) is not None:
            return found
        with self._turn, _alone(self.folder, kind):
            return cache.fetch(entry, make, read)


def _read_end(folder: Path, meta: dict[str, Any]) -> _End:
    """Read `meta`, the cached description of where a streamed source's block ends. Raises Malformed."""
    return schema.read(_End, meta)


@contextmanager
def _alone(folder: Path, kind: str, waits: bool = True) -> Iterator[bool]:
    """Hold the lock, within the context, by which one process alone makes a kind of cache entry of a streamed source;
    nothing where the file system has no locks. Yield False where another process holds it, unless this one `waits`."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        file = (folder / f"{kind}.lock").open("w")
    except OSError:
        yield True  # what is to be written there says why it can't be
        return
    with file:
        taken = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            taken = True
        except OSError:
            pass
        yield not taken
