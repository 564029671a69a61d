"""View of a training step, as data: the sequences that it learns from, their origins, and the ranks that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from os.path import commonpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.boundary.terminal import printable
from platform.config.fields import Config, Data
from platform.data import text_sources as text_sources  # its import registers the kinds of sources
from platform.data.cache_entries import StreamedTokens
from platform.data.corpus import TRAIN, Corpus, SourceTokens
from platform.data.data_files import DataFile, size_of
from platform.data.mixture import sources_of
from platform.data.source_kind import Documents, SourceKind, kind_of
from platform.data.streams import JoinedTokens, PairStream, beginnings, beneath, pieces_of, starts_of
from platform.plan.layout import Layout
from platform.plan.plan import Plan
from platform.plan.plan_summary import ranks_of_context

# Names of documents: the file and record that a document of a token stream was read from.

MOST = 1 << 28  # bytes of a source that is read again to find the files of its documents
NameOf = Callable[[int, int], str]  # number of a document in its stream, position of a token in it -> its name


def names_of(data: Data, part: SourceTokens, stream: Any) -> NameOf:
    """Return the function that names the documents of a source's training `stream`; a source of more than MOST bytes
    is not read for it, and its documents have numbers alone."""
    tokens = beneath(stream)
    if isinstance(tokens, JoinedTokens):
        return lambda number, place: f"{_seen_path(tokens.file_at(place))}, document {number + 1}"
    streamed = part.streams["train"]
    if isinstance(streamed, StreamedTokens):
        files = kind_of(data).find(data)
        parts, root = kind_of(data).parts(files), _root(files)
        block, places = streamed.documents(stream)
        return lambda number, _: f"{_document_name(parts[places[number].file], 0, root)} in block {block}"
    found = [] if data.kind == "synthetic" else _read_again(data)
    return lambda number, _: found[number] if number < len(found) else f"document {number + 1}"


def _read_again(data: Data) -> list[str]:
    """Return the names of a source's training documents, in the order of their tokens; [] if it is too large."""
    kind = kind_of(data)
    where: list[str] = []
    files = kind.find(data)
    if sum(map(size_of, files)) > MOST:
        return []

    def read(some: Sequence[DataFile], data: Data, key: str) -> Documents:
        """Read a source's documents as its kind does, and note the name of each."""
        if key != "data.path":
            yield from kind.read(some, data, key)
            return
        for number, name, document in _named_documents(kind, kind.parts(some) if some else [some], data, key):
            if number == len(where):
                where.append(name)
            yield number, document

    splits = replace(kind, read=read).splits(files, data)
    return [where[number] for number in dict.fromkeys(number for number, _ in splits.read(False))]


def _named_documents(
    kind: SourceKind, parts: Sequence[Sequence[DataFile]], data: Data, key: str
) -> Iterator[tuple[int, str, Any]]:
    """Yield (number, name, piece) of each piece of a source's documents, group of files by group."""
    word = "pair" if data.kind == "pairs" else "document"
    before, root = 0, _root([file for files in parts for file in files])
    for files in parts:
        count = 0
        for number, piece in kind.read(files, data, key):
            count = number + 1
            yield before + number, _document_name(files, number, root, word), piece
        before += count


def _document_name(files: Sequence[DataFile], number: int, root: str = "", word: str = "document") -> str:
    """Return the name of document `number` of a group of files, seen from the folder `root`."""
    if len(files) != 1:
        return f"{word} {number + 1}"
    return _seen_path(files[0], root) + (f", {word} {number + 1}" if number else "")


def _seen_path(file: DataFile | None, root: str = "") -> str:
    """Return the path of a data file, seen from the working directory, else from the folder `root`; or its URL."""
    for folder in (str(Path.cwd()), root):
        if folder and isinstance(file, Path) and file.is_relative_to(folder):
            return str(file.relative_to(folder))
    return str(file)


def _root(files: Sequence[DataFile]) -> str:
    """Return the innermost folder that has all the files of a source; "" for URLs."""
    paths = [file.parent for file in files if isinstance(file, Path)]
    return commonpath(paths) if paths else ""


# Work of attention on the ranks that share the sequences of a step, with what their documents hide counted.


def work_of_documents(plan: Plan, begins: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many scores each rank of a context computes per head, [ranks, sequences], for sequences whose tokens'
    documents begin at `begins` [sequences, length]."""
    column, places = np.arange(begins.shape[1]), ranks_of_context(plan)
    found = np.zeros((len(places), len(begins)), np.int64)
    for planned in plan.attentions:
        operation, out = planned.operation, planned.operation.outputs[0]
        seen = column - (begins if operation["begins"] else np.zeros_like(begins)) + 1
        seen = np.minimum(seen, operation["window"] or len(column))
        for i, at in enumerate(places):
            found[i] += sum(seen[:, q.first : q.end].sum(1) for q in plan.stretches(out, "length", at))
    return found


def busiest(work: NDArray[np.int64], together: int) -> float:
    """Return the `work` of the ranks that others wait for, in so many sequences `together`, in terms of the mean."""
    each = np.add.reduceat(work, np.arange(0, work.shape[1], together), 1)
    return float(each.max(0).sum() / each.mean(0).sum())


_AT_ONCE = 64  # sequences that are read at once
_PIECES = 3  # of a sequence that a line names
_SEARCHED = 1 << 27  # tokens in which documents are looked for, where no index has their starts

Row = NDArray[Any]
Stretch = tuple[int, int]  # of rows: first, behind the last; of tokens: first, number


@dataclass(frozen=True)
class ReadingRanks:
    """Ranks that read the same tokens of a microbatch's sequences. `seat`: places of these ranks along the axes that
    divide the data; `rows`: the range of sequences; `tokens`: the stretches of tokens of each, (first, number)."""

    ranks: tuple[int, ...]
    seat: str
    rows: Stretch
    tokens: tuple[tuple[int, int], ...]


class TakenStep(NamedTuple):
    """Step of a run: the run's configuration, the samples [first, end) of its order, the tokens of a sequence, and the
    plan; None if that is not known, and `why` says so, or what else is to be said."""

    config: Config
    step: int
    samples: tuple[int, int]
    length: int
    plan: Plan | None
    why: str = ""
    corpus: str = ""  # hash of what the run trained on, as its newest checkpoint says


@dataclass(frozen=True)
class StepSequence:
    """Sequence that a step learns from. `position`: its number in the global batch; `sample`: number, in its source, of
    the sample of which it is piece number `piece`; `tensors`: its row of each data tensor, by name."""

    position: int
    source: str
    sample: int
    piece: int
    documents: Sequence[str]
    microbatch: int | None
    readers: Sequence[ReadingRanks]
    tensors: Mapping[str, Row]


@dataclass(frozen=True)
class StepView:
    """View of a training step, of whose samples `corpus` has the tokens."""

    taken: TakenStep
    corpus: Corpus
    _names: dict[int, tuple[Any, NameOf]] = field(default_factory=dict)  # by identity of a stream, which stays

    @property
    def pieces(self) -> int:
        """Return the number of sequences that a sample is cut into in this step."""
        return self.taken.config.model.length // self.taken.length

    @property
    def count(self) -> int:
        """Return the number of sequences of this step."""
        return (self.taken.samples[1] - self.taken.samples[0]) * self.pieces

    @cached_property
    def labels(self) -> int:
        """Return the number of tokens that this step learns to predict, over which its loss is a mean."""
        return self.corpus.predicted(TRAIN, *self.taken.samples)

    @cached_property
    def busiest(self) -> float:
        """Return the work of attention of the ranks that others of their context wait for, in terms of the mean; 0 if
        no documents are kept apart, or no ranks share a sequence, or the plan is not known."""
        plan = self.taken.plan and self.taken.plan.of_length(self.taken.length)
        if not (plan and plan.scheme.context and self.taken.config.data.document_mask):
            return 0.0
        out, first, parts = plan.attentions[0].operation.outputs[0], self.taken.samples[0] * self.pieces, []
        for start in range(first, first + self.count, _AT_ONCE):
            end = min(start + _AT_ONCE, first + self.count)
            parts.append(work_of_documents(plan, pieces_of(self.corpus, TRAIN, start, end, self.pieces)["begins"]))
        return busiest(np.concatenate(parts, 1), plan.local_shape(out)[out.dims.index("batch")])

    @cached_property
    def readers(self) -> Sequence[ReadingRanks]:
        """Return which ranks read which sequences of a microbatch; () if the plan is not known."""
        return ranks_that_read(self.taken.plan.of_length(self.taken.length)) if self.taken.plan else ()

    def sequences(self, start: int, end: int) -> Iterator[StepSequence]:
        """Yield the sequences at positions [start, end) of the step's global batch, read as a rank reads them."""
        first, pieces = self.taken.samples[0] * self.pieces, self.pieces
        rows = pieces_of(self.corpus, TRAIN, first + start, first + end, pieces)
        numbers = np.arange((first + start) // pieces, -(-(first + end) // pieces))
        origins = {}
        for part, stream, places, index in self.corpus.places(TRAIN, numbers):
            for number, sample in zip(numbers[places], index, strict=True):
                origins[int(number)] = part, stream, int(sample)
        for position in range(start, end):
            number, piece = divmod(first + position, pieces)
            part, stream, sample = origins[number]
            tensors = {name: found[position - start] for name, found in rows.items()}
            microbatch, row = self._microbatch_of(position)
            yield StepSequence(
                position=position,
                source=part.name,
                sample=sample,
                piece=piece,
                documents=list(self._document_names(part, stream, sample, piece)),
                microbatch=microbatch,
                readers=[r for r in self.readers if r.rows[0] <= row < r.rows[1]],
                tensors=tensors,
            )

    def _microbatch_of(self, position: int) -> tuple[int | None, int]:
        """Return the microbatch of the sequence at a position of the global batch, and its row there."""
        plan = self.taken.plan
        return divmod(position, plan.of_length(self.taken.length).sizes["batch"]) if plan else (None, 0)

    def _document_names(self, part: SourceTokens, stream: Any, sample: int, piece: int) -> Iterator[str]:
        """Yield the names of the documents in a sequence, in order; none if documents have no boundaries."""
        if isinstance(stream, PairStream):
            yield self._namer(part, stream)(sample, 0)
            return
        places, begin = getattr(self.corpus.objective, "places", None), self.corpus.special.begin
        if not places or (starts_of(stream) is None and (begin < 0 or len(stream) > _SEARCHED)):
            return
        of_sample = places(stream, np.array([sample]))[0]
        if self.pieces > 1:
            of_sample = of_sample[piece * self.taken.length : (piece + 1) * self.taken.length]
        of_sample = of_sample[of_sample >= 0]
        numbers = np.searchsorted(self._starts(stream), of_sample, "right") - 1
        for number, place in dict(zip(numbers[::-1].tolist(), of_sample[::-1].tolist(), strict=True)).items():
            yield self._namer(part, stream)(number, place)

    def _starts(self, stream: Any) -> Row:
        """Return the positions at which the documents of a token stream begin."""
        return beginnings(stream, self.corpus.special.begin)

    def _namer(self, part: SourceTokens, stream: Any) -> NameOf:
        """Return the function that names the documents of a token stream."""
        if id(stream) not in self._names:
            data = next(source.data for source in sources_of(self.taken.config.data) if source.name == part.name)
            self._names[id(stream)] = stream, names_of(data, part, stream)
        return self._names[id(stream)][1]


def ranks_that_read(plan: Plan) -> list[ReadingRanks]:
    """Return which ranks of a plan read which part of a microbatch's sequences, each part once; what a rank reads for
    several operations counts once."""
    ranks: dict[_ReadPart, list[int]] = {}
    seats: dict[_ReadPart, str] = {}
    stages = [plan.at(stage) for stage in range(plan.stages)]
    layouts = [dict.fromkeys(x for name, r in s.readers.items() if name != "source" for x in r.values())
               for s in stages]  # fmt: skip
    for rank in range(plan.mesh.size):
        here = plan.mesh.coordinates(rank)
        stage, mine = stages[here["stage"]], {}
        for layout in layouts[here["stage"]]:
            if layout.present(here):
                (first, count), tokens = _block(stage, "batch", layout, here)[0], _block(stage, "length", layout, here)
                axes = plan.mesh.ordered([*layout["batch"], *layout["length"]])
                mine[_ReadPart((first, first + count), tokens)] = " ".join(f"{axis} {here[axis]}" for axis in axes)
        for part in mine:
            if not any(part is not other and part.within(other) for other in mine):
                ranks.setdefault(part, []).append(rank)
                seats.setdefault(part, mine[part])
    return [ReadingRanks(tuple(found), seats[part], *part) for part, found in ranks.items()]


def _block(stage: Plan, dim: str, layout: Layout, here: Mapping[str, int]) -> tuple[Stretch, ...]:
    """Return the stretches, (first, number), of a dim of the data that the rank at `here` reads in a layout."""
    return tuple((first, n) for first, n in stage.planner.stretches(dim, stage.sizes[dim], layout, here))


class _ReadPart(NamedTuple):
    """Part of a microbatch: some of its sequences, and of each the tokens in some stretches, (first, number)."""

    rows: Stretch
    tokens: tuple[tuple[int, int], ...]

    def within(self, other: _ReadPart) -> bool:
        """Return True if another part has all of this one."""
        inside = all(any(a <= first and first + n <= a + m for a, m in other.tokens) for first, n in self.tokens)
        return inside and other.rows[0] <= self.rows[0] and self.rows[1] <= other.rows[1]


def reader_in_words(reader: ReadingRanks, length: int) -> str:
    """Return who reads, such as "data 1 (ranks 2-3)", and which tokens, if it is not all `length` of a sequence."""
    ranks = ranges(reader.ranks)
    who = f"{reader.seat} ({ranks})" if reader.seat else ranks
    if sum(n for _, n in reader.tokens) == length:
        return who
    tokens = [f"{first}-{first + n - 1}" for first, n in reader.tokens]
    if len(tokens) > _PIECES:
        return f"{who} tokens {tokens[0]}, {tokens[1]}, ... {tokens[-1]}, {len(tokens)} pieces"
    return f"{who} tokens {' and '.join(tokens)}"


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0-3,8"."""
    found = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        some = [rank for _, rank in run]
        found.append(f"{some[0]}-{some[-1]}" if len(some) > 1 else str(some[0]))
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(found)}"


# Texts of single tokens, which joined end to end are the text of the whole.

_HALF = "\ufffd"  # of a character whose bytes are in several tokens
_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


class TokenTexts:
    """Texts of a corpus's tokens, which are safe for any terminal: ends of lines are signs, unprintable characters are
    escaped."""

    def __init__(self, corpus: Corpus):
        """Prepare to look up the texts of the tokens of a corpus."""
        self._corpus = corpus
        self._named: Mapping[int, str] = getattr(corpus.objective, "names", {})
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each of consecutive tokens; where several tokens have the bytes of one character, all of
        its text belongs to the last of them."""
        found = [self._text_behind(i) for i in ids]
        start = 0
        for end in range(1, len(ids) + 1):
            if end < len(ids) and _HALF in found[end]:
                continue
            if end - start > 1 and _HALF in found[start]:
                found[start:end] = [""] * (end - start - 1) + [self._behind(ids[start:end])]
            start = end
        return [_with_signs(text) for text in found]

    def _text_behind(self, number: int) -> str:
        """Return the text that a token adds to another one before it."""
        if (text := self._known.get(number)) is None:
            text = self._behind([number]) or self._named.get(number) or f"<{number}>"
            self._known[number] = text
        return text

    def _behind(self, ids: Sequence[int]) -> str:
        """Return the text that tokens add to another one before them; a tokenizer may drop a space at the beginning."""
        return self._corpus.decode([*self._anchor, *ids]).removeprefix(self._corpus.decode(self._anchor))

    @cached_property
    def _anchor(self) -> list[int]:
        """Return a token that texts are looked up behind; none for tokens without a tokenizer."""
        return self._corpus.encode("a")[-1:] if self._corpus.vocabulary else []


def _with_signs(text: str) -> str:
    """Return a token's text in one line, with signs in the place of ends of lines and tabs."""
    return printable("".join(_SIGNS.get(c, c) for c in text))
