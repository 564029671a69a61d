"""Reference log-probabilities of pairs of answers: what the model gave every answer before the first step of the run.

The workers score the answers that the run reads, once and in this order, with the weights that it begins with; the
driver keeps the numbers in the run's directory, and hands them to every generation. No second model is held, and a run
that goes on at another size compares with the same numbers. If it goes on for longer, the workers hold its first
weights again before they form its mesh, and score the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from platform.boundary import documents, local_files, schema
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.boundary.terminal import show_phase
from platform.cluster.asked_model import AskedModel
from platform.cluster.control.questions import leave_out_training, list_read_ranges, seat_model
from platform.cluster.control.run_context import RunContext
from platform.cluster.crew.crew import Crew, Worker
from platform.cluster.crew.failures import Reform
from platform.cluster.crew.job import Job
from platform.config.fields import Config, hash_values, training_loss_name
from platform.data.streams import PackedStream, known_document_starts, token_loss_mask
from platform.plan.generation_passes import batch_rows
from platform.plan.model_types import REFERRING_LOSSES
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.weights.importing import open_initial_weights

FILE = "references.bin"  # in a run's directory: a line of JSON, and the numbers, fp64, little-endian
_LARGEST = 1 << 33  # bytes of it
_AT_ONCE = 256  # answers between two signs of progress

_KEEP_SECONDS = 30  # of scoring, after which the file is written again

Scored = dict[str, NDArray[np.float64]]  # SPLIT/SOURCE -> reference log-probability of each of its answers


@dataclass(frozen=True)
class _Header:
    """First line of the file: hash of the data, number of answers by split and source, hash of the numbers, and of the
    weights that scored them, "" from older versions, which scored all answers."""

    data: str
    counts: dict[str, int]
    sha256: str
    weights: str = ""


class PairReferences:
    """References of the pairs of a run. `ask_workers` completes them for a run that goes on for longer;
    `hand_over` gives them to the workers of a generation."""

    def __init__(self, run: RunContext):
        """Prepare the references of a run's pairs of answers; nothing is scored if its loss refers to none."""
        self._run, self._is_needed = run, training_loss_name(run.config) in REFERRING_LOSSES
        self._values: Scored | None = None
        self._path = run.directory.path / FILE

    def ask_workers(self, crew: Crew, job: Job, seats: Sequence[int], config: Config, number: int, step: int) -> None:
        """Let the members that have the ranks of `job` score what the run reads and its file lacks, after a `step`, by
        the weights with which it began; they are seated again afterwards, for generation `number` under `config`.
        Raises ConfigError if the file is lost or damaged, WorkerFailed."""
        if not self._is_needed or not step or self._values:
            return
        values, weights = self._read_file()
        if self._list_missing(values):
            config, first = leave_out_training(config), hash_first_weights(config)
            if weights != first:
                raise ConfigError("train.init", config.train.init, f"is not what {FILE} is of, and it lacks answers")
            plan, loads = make_plan(config), config.train.init not in ("", "random")
            seat_model(crew, config, plan, number, str(self._run.corpus.entry or ""), fresh=not loads)
            if loads and (failure := crew.call_ranks(Worker.load_initial_weights)[0]):
                raise ConfigError("train.init", config.train.init, failure.reason)
            self._score_missing(crew, plan, values, first)
            crew.release_members()
            crew.assign_ranks(job, seats)
        self._values = values

    def hand_over(self, crew: Crew, config: Config, plan: Plan, step: int) -> None:
        """Give the references of all pairs to the workers of a generation that is seated under `plan` and begins after
        `step`. Before the first step its own model makes them, but for what a file has of the same weights."""
        if not self._is_needed:
            return
        if not self._values and step:
            raise Reform(f"goes on after step {step}, and answers were to be scored by the first weights")
        if not self._values:
            values, weights, first = self._list_unknown(), "", hash_first_weights(config)
            with suppress(ConfigError):  # of other data, or damaged
                values, weights = self._read_file()
            values = values if weights == first else self._list_unknown()
            self._score_missing(crew, plan, values, first)
            self._values = values
        crew.call_ranks(Worker.take_references, {name: numbers.tolist() for name, numbers in self._values.items()})

    @property
    def _streams(self) -> dict[str, PackedStream]:
        """Return the packed streams of pairs of the run's data, by split and source."""
        return {f"{split}/{part.name}": s for part in self._run.corpus.parts for split, s in part.streams.items()}

    def _list_unknown(self) -> Scored:
        """Return NaN for each answer of the pairs of the run's data, by split and source."""
        counts = {name: len(s.references) for name, s in self._streams.items() if s.references is not None}
        return {name: np.full(count, np.nan) for name, count in counts.items()}

    def _list_missing(self, values: Scored) -> list[tuple[str, int]]:
        """Return the answers that the run reads and `values` lack, in the order in which it reads them: name of the
        stream, and number of the document."""
        corpus, streams, missing = self._run.corpus, self._streams, list[tuple[str, int]]()
        first_samples = list(corpus.first_samples.items())
        for number in corpus.list_read_samples(list_read_ranges(self._run, 0)).tolist():
            (split, source), first = next(item for item in reversed(first_samples) if item[1] <= number)
            stream, scored = streams[name := f"{split}/{source}"], values[f"{split}/{source}"]
            starts, documents_of = known_document_starts(stream), stream.stretches(np.array([number - first]))[0]
            assert starts is not None
            chosen = np.searchsorted(starts, documents_of).tolist()
            missing += [(name, n + answer) for n in chosen for answer in (0, 1) if np.isnan(scored[n + answer])]
        return missing

    def _score_missing(self, crew: Crew, plan: Plan, values: Scored, weights: str) -> None:
        """Ask the workers' model, of the hash `weights`, for the log-probability of each missing answer after its
        prompt, and add it to `values` and the file, also if the asking is interrupted."""
        run, missing, written = self._run, self._list_missing(values), monotonic()
        asked = AskedModel(
            crew.call_ranks, run.config.model, run.corpus.vocabulary, batch_rows(plan), run.corpus.special
        )
        readers = {name: _read_answers(stream) for name, stream in self._streams.items()}
        try:
            with show_phase("scoring answers by the reference", len(missing), "answers") as shown:
                for some in (missing[i : i + _AT_ONCE] for i in range(0, len(missing), _AT_ONCE)):
                    texts = [(*place, text) for place in some for text in readers[place[0]](place[1])]
                    totals = dict.fromkeys(some, 0.0)
                    answers = asked.score_continuations([text for *_, text in texts])
                    for (name, document, _), scored in zip(texts, answers, strict=True):
                        totals[name, document] += scored.log_probability
                    for (name, document), total in totals.items():
                        values[name][document] = total
                    shown.count_done(len(some))
                    if monotonic() > written + _KEEP_SECONDS:
                        self._write_file(values, weights)
                        written = monotonic()
        finally:
            self._write_file(values, weights)

    def _write_file(self, values: Scored, weights: str) -> None:
        """Write the references of pairs, by weights of this hash, to the run's directory."""
        raw = b"".join(numbers.astype("<f8").tobytes() for numbers in values.values())
        counts = {name: len(numbers) for name, numbers in values.items()}
        header = _Header(self._run.corpus.digest, counts, hashlib.sha256(raw).hexdigest(), weights)
        local_files.replace_file(self._path, [json.dumps(vars(header)).encode() + b"\n", raw], durable=True)

    def _read_file(self) -> tuple[Scored, str]:
        """Return the references of pairs that the run's directory holds, NaN of answers that were not scored, and the
        hash of the weights. Raises ConfigError for none, for damaged ones, and for another corpus's."""
        try:
            line, _, raw = documents.read_bytes(self._path, _LARGEST).partition(b"\n")
            header = schema.parse_value(_Header, documents.parse_json(line))
            counts = {name: len(numbers) for name, numbers in self._list_unknown().items()}
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
        bounds = np.cumsum([*counts.values()])[:-1]
        return dict(zip(counts, np.split(np.frombuffer(raw, "<f8").copy(), bounds), strict=True)), header.weights


def hash_first_weights(config: Config) -> str:
    """Return a hash of what the weights of a run of this configuration follow from before its first step."""
    loads = config.train.init not in ("", "random")
    base = open_initial_weights(config).describe_base().hash if loads else ""
    return hash_values([config.seed, config.precision, asdict(config.model), asdict(config.tune), base])


def _read_answers(stream: PackedStream) -> Callable[[int], list[tuple[list[int], list[int]]]]:
    """Return a function that reads a document of a stream of answers as texts to score, after their contexts."""
    starts, learned = known_document_starts(stream), token_loss_mask(stream)
    assert starts is not None and learned is not None
    bounds = [*starts.tolist(), len(stream)]

    def read_texts(document: int) -> list[tuple[list[int], list[int]]]:
        """Return (token ids before, token ids to score) of a document of answers."""
        start, end = bounds[document : document + 2]
        ids = stream[np.arange(start, end)].tolist()
        return [(ids[:a], ids[a:b]) for a, b in _find_label_stretches(learned[start:end])]

    return read_texts


def _find_label_stretches(learned: NDArray[np.bool_]) -> Sequence[tuple[int, int]]:
    """Return where the tokens of a document that are learned lie, as stretches [a, b); its first token never is."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False, False], learned[1:], [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
