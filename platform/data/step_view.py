"""View of a training step, as data: the sequences that it learns from, their origins, and the ranks that read them.

`build_document_namer` names the file and record that a document was read from; `count_attention_scores` is the work of
attention on the ranks that share sequences, with the keys that their documents hide; `TokenTexts` are texts of single
tokens, which joined end to end are the text of the whole.
"""

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

from platform.boundary.terminal import escape_unprintable
from platform.config.fields import Config, Data
from platform.data import streams
from platform.data import text_sources as text_sources  # its import registers the kinds of sources
from platform.data.cache_entries import StreamedTokens
from platform.data.corpus import TRAIN, Corpus, SourceTokens
from platform.data.data_files import DataFile, file_size
from platform.data.mixture import list_sources
from platform.data.source_kind import Documents, SourceKind, find_source_kind
from platform.data.streams import JoinedTokens, PairStream, bare_tokens, find_document_starts, read_sequence_batch
from platform.plan.layout import Layout
from platform.plan.plan import Plan
from platform.plan.plan_summary import coordinates_of_context

MOST = 1 << 28  # bytes of a source that is read again to find the files of its documents
NameOf = Callable[[int, int], str]  # number of a document in its stream, position of a token in it -> its name


def build_document_namer(data: Data, part: SourceTokens, stream: Any) -> NameOf:
    """Return the function that names the documents of a source's training `stream`; a source of more than MOST bytes
    is not read for it, and its documents have numbers alone."""
    tokens = bare_tokens(stream)
    if isinstance(tokens, JoinedTokens):
        return lambda number, place: f"{_display_path(tokens.file_of_token(place))}, document {number + 1}"
    streamed = part.streams["train"]
    if isinstance(streamed, StreamedTokens):
        files = find_source_kind(data).find(data)
        parts, root = find_source_kind(data).group_files(files), _common_folder(files)
        block, places = streamed.locate_documents(stream)
        return lambda number, _: f"{_document_name(parts[places[number].file], 0, root)} in block {block}"
    document_names = [] if data.kind == "synthetic" else _read_document_names(data)
    return lambda number, _: document_names[number] if number < len(document_names) else f"document {number + 1}"


def _read_document_names(data: Data) -> list[str]:
    """Return the names of a source's training documents, in the order of their tokens; [] if it is too large."""
    kind = find_source_kind(data)
    document_names: list[str] = []
    files = kind.find(data)
    if sum(map(file_size, files)) > MOST:
        return []

    def read_and_note_names(some: Sequence[DataFile], data: Data, key: str) -> Documents:
        """Read a source's documents as its kind does, and note the name of each."""
        if key != "data.path":
            yield from kind.read(some, data, key)
            return
        groups = kind.group_files(some) if some else [some]
        for number, name, document in _read_named_documents(kind, groups, data, key):
            if number == len(document_names):
                document_names.append(name)
            yield number, document

    splits = replace(kind, read=read_and_note_names).read_splits(files, data)
    return [document_names[number] for number in dict.fromkeys(number for number, _ in splits.read(False))]


def _read_named_documents(
    kind: SourceKind, parts: Sequence[Sequence[DataFile]], data: Data, key: str
) -> Iterator[tuple[int, str, Any]]:
    """Yield (number, name, piece) of each piece of a source's documents, group of files by group."""
    word = "pair" if data.kind == "pairs" else "document"
    before, root = 0, _common_folder([file for files in parts for file in files])
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
    return _display_path(files[0], root) + (f", {word} {number + 1}" if number else "")


def _display_path(file: DataFile | None, root: str = "") -> str:
    """Return the path of a data file, seen from the working directory, else from the folder `root`; or its URL."""
    for folder in (str(Path.cwd()), root):
        if folder and isinstance(file, Path) and file.is_relative_to(folder):
            return str(file.relative_to(folder))
    return str(file)


def _common_folder(files: Sequence[DataFile]) -> str:
    """Return the innermost folder that has all the files of a source; "" for URLs."""
    paths = [file.parent for file in files if isinstance(file, Path)]
    return commonpath(paths) if paths else ""


def count_attention_scores(plan: Plan, begins: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many scores each rank of a context computes per head, [ranks, sequences], for sequences of data whose
    documents begin at `begins` [sequences, length]."""
    column, places = np.arange(begins.shape[1]), coordinates_of_context(plan)
    scores = np.zeros((len(places), len(begins)), np.int64)
    for planned in plan.attention_operations:
        operation, out = planned.operation, planned.operation.outputs[0]
        seen = column - (begins if operation["begins"] else np.zeros_like(begins)) + 1
        seen = np.minimum(seen, operation["window"] or len(column))
        for i, at in enumerate(places):
            scores[i] += sum(seen[:, q.first : q.end].sum(1) for q in plan.stretches_of_rank(out, "length", at))
    return scores


def busiest_rank_ratio(work: NDArray[np.int64], together: int) -> float:
    """Return, of so many data sequences `together`, the `work` of ranks that others wait for, in terms of the mean."""
    work_together = np.add.reduceat(work, np.arange(0, work.shape[1], together), 1)
    return float(work_together.max(0).sum() / work_together.mean(0).sum())


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
    def pieces_per_sample(self) -> int:
        """Return the number of sequences that a sample is cut into in this step."""
        return self.taken.config.model.length // self.taken.length

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences of this step."""
        return (self.taken.samples[1] - self.taken.samples[0]) * self.pieces_per_sample

    @cached_property
    def num_labels(self) -> int:
        """Return the number of tokens that this step learns to predict, over which its loss is a mean."""
        return self.corpus.predicted(TRAIN, *self.taken.samples)

    @cached_property
    def work_imbalance(self) -> float:
        """Return the work of attention of the ranks that others of their context wait for, in terms of the mean; 0 if
        no documents are kept apart, or no ranks share a sequence, or the plan is not known."""
        plan = self.taken.plan and self.taken.plan.plan_of_length(self.taken.length)
        if not (plan and plan.scheme.context and self.taken.config.data.document_mask):
            return 0.0
        out, parts = plan.attention_operations[0].operation.outputs[0], []
        first = self.taken.samples[0] * self.pieces_per_sample
        for start in range(first, first + self.num_sequences, _AT_ONCE):
            end = min(start + _AT_ONCE, first + self.num_sequences)
            batch = read_sequence_batch(self.corpus, TRAIN, start, end, self.pieces_per_sample)
            parts.append(count_attention_scores(plan, batch["begins"]))
        return busiest_rank_ratio(np.concatenate(parts, 1), plan.local_shape(out)[out.dims.index("batch")])

    @cached_property
    def reading_ranks(self) -> Sequence[ReadingRanks]:
        """Return which ranks read which sequences of a microbatch; () if the plan is not known."""
        return find_reading_ranks(self.taken.plan.plan_of_length(self.taken.length)) if self.taken.plan else ()

    def read_sequences(self, start: int, end: int) -> Iterator[StepSequence]:
        """Yield the sequences at positions [start, end) of the step's global batch, read as a rank reads them."""
        first, pieces = self.taken.samples[0] * self.pieces_per_sample, self.pieces_per_sample
        rows = read_sequence_batch(self.corpus, TRAIN, first + start, first + end, pieces)
        numbers = np.arange((first + start) // pieces, -(-(first + end) // pieces))
        origins = {}
        for part, stream, places, index in self.corpus.locate_samples(TRAIN, numbers):
            for number, sample in zip(numbers[places], index, strict=True):
                origins[int(number)] = part, stream, int(sample)
        for position in range(start, end):
            number, piece = divmod(first + position, pieces)
            part, stream, sample = origins[number]
            tensors = {name: tensor_rows[position - start] for name, tensor_rows in rows.items()}
            microbatch, row = self._locate_microbatch(position)
            yield StepSequence(
                position=position,
                source=part.name,
                sample=sample,
                piece=piece,
                documents=list(self._document_names(part, stream, sample, piece)),
                microbatch=microbatch,
                readers=[r for r in self.reading_ranks if r.rows[0] <= row < r.rows[1]],
                tensors=tensors,
            )

    def _locate_microbatch(self, position: int) -> tuple[int | None, int]:
        """Return the microbatch of the sequence at a position of the global batch, and its row there."""
        plan = self.taken.plan
        return divmod(position, plan.plan_of_length(self.taken.length).sizes["batch"]) if plan else (None, 0)

    def _document_names(self, part: SourceTokens, stream: Any, sample: int, piece: int) -> Iterator[str]:
        """Yield the names of the documents in a sequence, in order; none if documents have no boundaries."""
        if isinstance(stream, PairStream):
            yield self._document_namer(part, stream)(sample, 0)
            return
        places, begin = getattr(self.corpus.objective, "token_positions", None), self.corpus.special.begin
        if not places or (streams.known_document_starts(stream) is None and (begin < 0 or len(stream) > _SEARCHED)):
            return
        of_sample = places(stream, np.array([sample]))[0]
        if self.pieces_per_sample > 1:
            of_sample = of_sample[piece * self.taken.length : (piece + 1) * self.taken.length]
        of_sample = of_sample[of_sample >= 0]
        numbers = np.searchsorted(self._document_starts(stream), of_sample, "right") - 1
        for number, place in dict(zip(numbers[::-1].tolist(), of_sample[::-1].tolist(), strict=True)).items():
            yield self._document_namer(part, stream)(number, place)

    def _document_starts(self, stream: Any) -> Row:
        """Return the positions at which the documents of a token stream begin."""
        return find_document_starts(stream, self.corpus.special.begin)

    def _document_namer(self, part: SourceTokens, stream: Any) -> NameOf:
        """Return the function that names the documents of a token stream."""
        if id(stream) not in self._names:
            data = next(source.data for source in list_sources(self.taken.config.data) if source.name == part.name)
            self._names[id(stream)] = stream, build_document_namer(data, part, stream)
        return self._names[id(stream)][1]


def find_reading_ranks(plan: Plan) -> list[ReadingRanks]:
    """Return, to show a step's sequences, which ranks read which part of a microbatch's, each part once; what a rank
    reads for several operations counts once."""
    ranks: dict[_MicrobatchPart, list[int]] = {}
    seats: dict[_MicrobatchPart, str] = {}
    stages = [plan.stage_part(stage) for stage in range(plan.num_stages)]
    layouts = [dict.fromkeys(x for name, r in s.reader_layouts.items() if name != "source" for x in r.values())
               for s in stages]  # fmt: skip
    for rank in range(plan.mesh.world_size):
        coordinates = plan.mesh.rank_coordinates(rank)
        stage, rank_parts = stages[coordinates["stage"]], {}
        for layout in layouts[coordinates["stage"]]:
            if layout.has_block(coordinates):
                (first, count), *_ = _list_read_stretches(stage, "batch", layout, coordinates)
                tokens = _list_read_stretches(stage, "length", layout, coordinates)
                axes = plan.mesh.order_axes([*layout["batch"], *layout["length"]])
                part = _MicrobatchPart((first, first + count), tokens)
                rank_parts[part] = " ".join(f"{axis} {coordinates[axis]}" for axis in axes)
        for part in rank_parts:
            if not any(part is not other and part.is_inside(other) for other in rank_parts):
                ranks.setdefault(part, []).append(rank)
                seats.setdefault(part, rank_parts[part])
    return [ReadingRanks(tuple(part_ranks), seats[part], *part) for part, part_ranks in ranks.items()]


def _list_read_stretches(stage: Plan, dim: str, layout: Layout, coordinates: Mapping[str, int]) -> tuple[Stretch, ...]:
    """Return the stretches, (first, number), of the samples' dim that the rank at `coordinates` reads in a layout."""
    return tuple((first, n) for first, n in stage.planner.stretches_of_rank(dim, stage.sizes[dim], layout, coordinates))


class _MicrobatchPart(NamedTuple):
    """Part of a microbatch: some of its sequences, and of each the tokens in some stretches, (first, number)."""

    rows: Stretch
    tokens: tuple[tuple[int, int], ...]

    def is_inside(self, other: _MicrobatchPart) -> bool:
        """Return True if this part of a microbatch's sequences of data lies inside `other`."""
        inside = all(any(a <= first and first + n <= a + m for a, m in other.tokens) for first, n in self.tokens)
        return inside and other.rows[0] <= self.rows[0] and self.rows[1] <= other.rows[1]


def describe_reader(reader: ReadingRanks, length: int) -> str:
    """Return who reads a sequence of data, such as "data 1 (ranks 2-3)", and which tokens, if not all `length`."""
    ranks = ranks_in_words(reader.ranks)
    reader_name = f"{reader.seat} ({ranks})" if reader.seat else ranks
    if sum(n for _, n in reader.tokens) == length:
        return reader_name
    tokens = [f"{first}-{first + n - 1}" for first, n in reader.tokens]
    if len(tokens) > _PIECES:
        return f"{reader_name} tokens {tokens[0]}, {tokens[1]}, ... {tokens[-1]}, {len(tokens)} pieces"
    return f"{reader_name} tokens {' and '.join(tokens)}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the ranks that read a sequence of data in words: "rank 3", "ranks 0-3,8"."""
    runs = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        some = [rank for _, rank in run]
        runs.append(f"{some[0]}-{some[-1]}" if len(some) > 1 else str(some[0]))
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(runs)}"


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

    def spell_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each of consecutive tokens; where several tokens have the bytes of one character, all of
        its text belongs to the last of them."""
        token_texts = [self._spell_token(i) for i in ids]
        start = 0
        for end in range(1, len(ids) + 1):
            if end < len(ids) and _HALF in token_texts[end]:
                continue
            if end - start > 1 and _HALF in token_texts[start]:
                token_texts[start:end] = [""] * (end - start - 1) + [self._decode_behind_anchor(ids[start:end])]
            start = end
        return [_escape_token_text(text) for text in token_texts]

    def _spell_token(self, number: int) -> str:
        """Return the text that a token adds to another one before it."""
        if (text := self._known.get(number)) is None:
            text = self._decode_behind_anchor([number]) or self._named.get(number) or f"<{number}>"
            self._known[number] = text
        return text

    def _decode_behind_anchor(self, ids: Sequence[int]) -> str:
        """Return the text that tokens add to another one before them; a tokenizer may drop a space at the beginning."""
        return self._corpus.decode([*self._anchor_ids, *ids]).removeprefix(self._corpus.decode(self._anchor_ids))

    @cached_property
    def _anchor_ids(self) -> list[int]:
        """Return a token that texts are looked up behind; none for tokens without a tokenizer."""
        return self._corpus.encode("a")[-1:] if self._corpus.vocabulary else []


def _escape_token_text(text: str) -> str:
    """Return a token's text in one line, with signs in the place of ends of lines and tabs."""
    return escape_unprintable("".join(_SIGNS.get(c, c) for c in text))
