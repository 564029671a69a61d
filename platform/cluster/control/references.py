"""Reference log-probabilities of pairs of answers: what the model gave every answer before the first step of the run.

The workers score the answers once, with the weights that the run begins with; the driver keeps the numbers in the run's
directory, and hands them to every generation. No second model is held, and a run that goes on at another size compares
with the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import documents, local_files, schema
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.boundary.terminal import show_phase
from platform.cluster.asked_model import AskedModel
from platform.cluster.control.run_context import RunContext
from platform.cluster.crew.crew import Crew, Worker
from platform.config.fields import training_loss_name
from platform.data.streams import PackedStream, known_document_starts, token_loss_mask
from platform.plan.generation_passes import batch_rows
from platform.plan.model_types import REFERRING_LOSSES
from platform.plan.plan import Plan

FILE = "references.bin"  # in a run's directory: a line of JSON, and the numbers, fp64, little-endian
_LARGEST = 1 << 33  # bytes of it
_AT_ONCE = 256  # answers between two signs of progress

Scored = dict[str, list[float]]  # SPLIT/SOURCE -> reference log-probability of each of its answers


@dataclass(frozen=True)
class _Header:
    """First line of the file: hash of the data, number of answers by split and source, hash of the numbers."""

    data: str
    counts: dict[str, int]
    sha256: str


class PairReferences:
    """References of the pairs of a run. `hand_over` gives them to the workers of a generation."""

    def __init__(self, run: RunContext):
        """Prepare the references of a run's pairs of answers; nothing is scored if its loss refers to none."""
        self._run, self._values = run, None if training_loss_name(run.config) in REFERRING_LOSSES else Scored()
        self._path = run.directory.path / FILE

    def hand_over(self, crew: Crew, plan: Plan, step: int) -> None:
        """Give the references of all pairs to the workers of a generation that is seated under `plan` and begins after
        `step`. Before the first step its own model makes them: an earlier start of the run may have had other weights.
        Raises ConfigError if they are lost or damaged later."""
        if self._values == {}:
            return
        if self._values is None and step:
            self._values = self._read_references()
        if self._values is None:
            self._values = self._score_answers(crew, plan)
            local_files.replace_file(self._path, [self._encode(self._values)], durable=True)
        crew.call_ranks(Worker.take_references, self._values)

    def _streams(self) -> Iterator[tuple[str, PackedStream]]:
        """Yield the packed streams of pairs of the run's data, by split and source."""
        for part in self._run.corpus.parts:
            yield from ((f"{split}/{part.name}", stream) for split, stream in part.streams.items())

    def _count_answers(self) -> dict[str, int]:
        """Return how many answers the pairs of the run's data have, by split and source."""
        return {name: len(stream.references) for name, stream in self._streams() if stream.references is not None}

    def _score_answers(self, crew: Crew, plan: Plan) -> Scored:
        """Ask the workers' model for the log-probability of every answer of the data, after its prompt."""
        run = self._run
        asked = AskedModel(
            crew.call_ranks, run.config.model, run.corpus.vocabulary, batch_rows(plan), run.corpus.special
        )
        with show_phase("scoring answers by the reference", sum(self._count_answers().values()), "answers") as shown:
            return {name: _score_stream(asked, stream, shown.count_done) for name, stream in self._streams()}

    def _encode(self, values: Scored) -> bytes:
        """Return the references of pairs as the bytes of their file."""
        raw = b"".join(np.array(numbers, "<f8").tobytes() for numbers in values.values())
        counts, sha256 = {name: len(numbers) for name, numbers in values.items()}, hashlib.sha256(raw).hexdigest()
        header = {"data": self._run.corpus.digest, "counts": counts, "sha256": sha256}
        return json.dumps(header).encode() + b"\n" + raw

    def _read_references(self) -> Scored:
        """Return the references of pairs that the run's directory holds. Raises ConfigError for none, for damaged ones,
        and for another corpus's."""
        try:
            line, _, raw = documents.read_bytes(self._path, _LARGEST).partition(b"\n")
            header = schema.parse_value(_Header, documents.parse_json(line))
            counts = self._count_answers()
            if header.data != self._run.corpus.digest or header.counts != counts:
                raise Malformed("of other data")
            if header.sha256 != hashlib.sha256(raw).hexdigest() or len(raw) != 8 * sum(counts.values()):
                raise Malformed("damaged")
        except FileNotFoundError:
            reason = f"has no {FILE}, by which the run that began compares answers with its first weights"
            raise ConfigError("run.dir", str(self._path.parent), reason, ["the directory in which it began"]) from None
        except (Malformed, OSError) as error:
            reason = f"{FILE} cannot be used: it is {documents.printable_line(error)}"
            raise ConfigError("run.dir", str(self._path.parent), reason, ["another one, to begin anew"]) from None
        bounds = np.cumsum([0, *counts.values()]).tolist()
        numbers = np.frombuffer(raw, "<f8")
        return {name: numbers[a:b].tolist() for name, (a, b) in zip(counts, pairwise(bounds), strict=True)}


def _score_stream(asked: AskedModel, stream: PackedStream, count_done: Callable[[int], Any]) -> list[float]:
    """Return the log-probability that a model gives to the labels of each document of a stream of answers."""
    starts, learned = known_document_starts(stream), token_loss_mask(stream)
    assert starts is not None and learned is not None
    bounds = [*starts.tolist(), len(stream)]
    totals = [0.0] * len(starts)
    for first in range(0, len(starts), _AT_ONCE):
        owners, texts = [], []
        for number in range(first, min(first + _AT_ONCE, len(starts))):
            start, end = bounds[number : number + 2]
            ids = stream[np.arange(start, end)].tolist()
            for a, b in _find_label_stretches(learned[start:end]):
                owners.append(number)
                texts.append((ids[:a], ids[a:b]))
        for owner, scored in zip(owners, asked.score_continuations(texts), strict=True):
            totals[owner] += scored.log_probability
        count_done(min(_AT_ONCE, len(starts) - first))
    return totals


def _find_label_stretches(learned: NDArray[np.bool_]) -> Sequence[tuple[int, int]]:
    """Return where the tokens of a document that are learned lie, as stretches [a, b); its first token never is."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False, False], learned[1:], [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
