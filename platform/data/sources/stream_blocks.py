"""Blocks of a streamed source: the reader of its documents, block by block. See `platform.data.tokens.streamed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from platform.config.fields import Data
from platform.data.reading.data_files import DataFile

Documents = Iterator[tuple[int, Any]]  # (number of the document, it or its next piece)


def is_streamed(data: Data) -> bool:
    """Return True if a data source is tokenised during training, block by block; one that is held out never is."""
    return data.streaming and data.validation < 1


class PiecePlace(NamedTuple):
    """PiecePlace in a source: a file, and how many pieces of documents come before in it."""

    file: int
    piece: int


BEGIN = PiecePlace(0, 0)


class BlockReader:
    """Reader of the documents in the `parts` of a source, which `read` yields in pieces, block by block from any place:
    `most` characters, by `size` of the pieces, make a block. It reads on from where it is if the place lies there or
    further in the same file; else it opens the place's file again."""

    def __init__(
        self,
        parts: Sequence[Sequence[DataFile]],
        read: Callable[[Sequence[DataFile]], Documents],
        size: Callable[[Any], int],
        most: int,
    ):
        """Prepare to read the files `parts` of a streamed data source in blocks of `most` characters, by `size` of
        pieces."""
        self._parts, self._read, self._size, self._most = parts, read, size, most
        self._rest: Iterator[tuple[PiecePlace, bool, Any]] = iter(())
        self._next: tuple[PiecePlace, bool, Any] | None = None  # what _rest has given and no block has taken

    def block(self, start: PiecePlace) -> tuple[list[tuple[int, Any]], PiecePlace | None]:
        """Read the block of a streamed source that begins at `start`: return its documents in pieces, (number of the
        document, piece) each, and where the next block begins, None at the end of the source. Raises ConfigError,
        OSError."""
        if not self._next or self._next[0].file != start.file or self._next[0] > start:
            self._rest = self._pieces(start)
            self._advance()
        while self._next and self._next[0] < start:
            self._advance()
        found: list[tuple[int, Any]] = []
        size, number = 0, 0
        while self._next:
            place, begins, piece = self._next
            if size >= (self._most if begins else 2 * self._most):
                return found, place
            number += begins
            found.append((number, piece))
            size += self._size(piece)
            self._advance()
        return found, None

    def beginnings(self, start: PiecePlace, end: PiecePlace | None) -> list[PiecePlace]:
        """Return where the documents of the block from `start` to `end` begin; None: to the end of the source."""
        inside = takewhile(lambda piece: end is None or piece[0] < end, self._pieces(start))
        return [place for i, (place, begins, _) in enumerate(inside) if begins or not i]

    def _advance(self) -> None:
        """Read the next piece of a streamed source's documents, and hold it for the next block; None at the end."""
        self._next = None  # what raises is not read on from
        self._next = next(self._rest, None)

    def _pieces(self, start: PiecePlace) -> Iterator[tuple[PiecePlace, bool, Any]]:
        """Yield the pieces of a streamed source's documents from `start` on: (place, True to begin one, piece)."""
        for file in range(start.file, len(self._parts)):
            before = -1
            for count, (document, piece) in enumerate(self._read(self._parts[file])):
                if (place := PiecePlace(file, count)) >= start:
                    yield place, document != before, piece
                before = document
