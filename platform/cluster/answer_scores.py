"""Scores of a model: losses on held-out text, BLEU of translations as sacrebleu computes it, lm-eval's tasks; and the
file that answers go to (`Lines`), which is refused before a model is loaded if it cannot be written, and never left
with half a line."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any

from platform.boundary.documents import printable_line
from platform.boundary.local_files import refuse_unwritable
from platform.boundary.refusals import ConfigError, format_violation
from platform.boundary.terminal import Say, show_phase
from platform.cluster.asked_model import AskedModel
from platform.cluster.crew.crew import Worker
from platform.cluster.crew.failures import WorkerFailed
from platform.config.fields import Config
from platform.data.corpus import Corpus
from platform.data.streams import PairStream
from platform.data.tokenizer import Vocabulary
from platform.train.replies import Choice

if TYPE_CHECKING:
    from platform.cluster.harness_tasks import HarnessTasks

AT_ONCE = 64  # samples whose text is counted at a time


@dataclass(frozen=True)
class MeasuredLoss:
    """Loss of a model on a text: `nats`, the sum over its predicted `tokens`, which are `words` and `bytes`; 0 of these
    if the text has no tokenizer."""

    source: str
    nats: float
    tokens: int
    words: int
    size: int
    samples: int

    def table_row(self) -> dict[str, Any]:
        """Return a row of the table of an asked model's losses as plain data: source, samples, loss, the numbers of
        tokens, words and bytes, the perplexity per each, and bits per byte; None where words or bytes are unknown."""
        units = {"token": self.tokens, "word": self.words, "byte": self.size}
        row: dict[str, Any] = {"source": self.source, "samples": self.samples, "loss": self.nats / self.tokens}
        for unit, count in units.items():
            row[f"{unit}s"] = count or None
            row[f"perplexity_per_{unit}"] = _finite_perplexity(self.nats, count) if count else None
        row["bits_per_byte"] = self.nats / math.log(2) / self.size if self.size else None
        return row


def _finite_perplexity(nats: float, count: int) -> float | None:
    """Return the perplexity e^(nats / count) of an asked model on a text, None if that is no finite number."""
    try:
        perplexity = math.exp(nats / count)
    except OverflowError:
        return None
    return perplexity if math.isfinite(perplexity) else None


def measure_losses(
    asked: AskedModel, corpus: Corpus, splits: Mapping[str, str], max_samples: int
) -> list[MeasuredLoss]:
    """Measure an asked model's loss, by its workers, on held-out text. `splits`: source -> split of the corpus;
    `max_samples`: samples of each split to evaluate, 0 for all."""
    counts = {split: corpus.count_samples(split) for split in splits.values()}
    samples = {split: min(count, max_samples or count) for split, count in counts.items()}
    losses, rows = asked.ask(Worker.evaluate_splits, samples)[0], []
    for name, split in splits.items():
        tokens = corpus.predicted(split, 0, samples[split])
        units = count_words_and_bytes(corpus, split, samples[split])
        rows.append(MeasuredLoss(name, losses[split] * tokens, tokens, *units, samples[split]))
    return rows


def count_words_and_bytes(corpus: Corpus, split: str, samples: int) -> tuple[int, int]:
    """Count the words, between spaces, and the bytes of the held-out text on which an asked model's loss is measured:
    what the labels of a split's first samples spell, without special tokens; zeros if the corpus has no tokenizer."""
    vocabulary = corpus.vocabulary
    if vocabulary is None:
        return 0, 0
    apart = isinstance(next(iter(corpus.parts[0].streams.values())), PairStream)
    words = size = 0
    inside = False  # a word goes on from the samples before
    with show_phase("counting words", samples, "sequences") as shown:
        for first in shown.iterate_parts(range(0, samples, AT_ONCE), lambda first: min(AT_ONCE, samples - first)):
            labels = corpus.batch(split, first, min(first + AT_ONCE, samples))["labels"]
            texts = [corpus.decode(row[row >= 0].tolist()) for row in (labels if apart else [labels.reshape(-1)])]
            text = ("\n" if apart else "").join(texts)
            spelled = text
            for token in vocabulary.special_tokens:
                text, spelled = text.replace(token, ""), spelled.replace(token, "\n")
            size += len(text.encode(errors="replace")) - apart * (len(texts) - 1)
            words += len(spelled.split()) - (inside and bool(spelled) and not spelled[0].isspace())
            inside = not apart and (not spelled[-1].isspace() if spelled else inside)
    return words, size


def print_losses(rows: Sequence[MeasuredLoss], say: Say, only_source: str) -> None:
    """Print the table of an asked model's losses and perplexities per token, word and byte, a row per held-out text.
    `only_source`: the name of the source, if there is one alone, which has none."""
    units = f"{'per token':>11} {'per word':>12} {'per byte':>9} {'bits/byte':>9}"
    say(f"{'source':<20} {'tokens':>12} {'loss':>9} {units}")
    for row in rows:
        values = row.table_row()
        cells = [values[f"perplexity_per_{unit}"] for unit in ("token", "word", "byte")]
        token, word, byte = ("-" if x is None else f"{x:.5g}" for x in cells)
        bits = "-" if values["bits_per_byte"] is None else f"{values['bits_per_byte']:.4f}"
        head = f"{row.source or only_source:<20} {row.tokens:>12,} {values['loss']:>9.4f}"
        say(f"{head} {token:>11} {word:>12} {byte:>9} {bits:>9}")


def measure_bleu(asked: AskedModel, corpus: Corpus, split: str, samples: int, beams: int) -> dict[str, Any]:
    """Let an asked model translate the first `samples` texts of a split of pairs, by a beam search, and return the BLEU
    of the translations: "bleu", its "signature" as sacrebleu gives it, and "pairs", their number. `beams`: texts that
    the search keeps. Raises ConfigError for data that are no pairs of texts."""
    from sacrebleu.metrics import BLEU

    if not corpus.vocabulary or not isinstance(next(iter(corpus.parts[0].streams.values())), PairStream):
        raise ConfigError("--bleu", "", "compares translations, and the data are no pairs", ["data=pairs"])
    batch = corpus.batch(split, 0, samples)
    sources = [row[row >= 0].tolist() for row in batch["source"]]
    references = [_decode_translation(corpus, row[row >= 0].tolist()) for row in batch["labels"]]
    choice = Choice(corpus.vocabulary.size, beams=beams)
    tokens = min(asked.model.length - 1, max((batch["labels"] >= 0).sum(1).max() * 2, 8))
    answers = asked.continue_prompts(sources, int(tokens), choice, [asked.end])
    translations = [_decode_translation(corpus, answer.ids) for _, answer in answers]
    metric = BLEU()
    score = metric.corpus_score(translations, [references])
    return {"bleu": score.score, "signature": str(metric.get_signature()), "pairs": samples}


def _decode_translation(corpus: Corpus, ids: list[int]) -> str:
    """Decode the token ids of an asked model's translation to text, without the id that ends it."""
    return corpus.decode([i for i in ids if i != corpus.special.end])


# Tasks of lm-eval during training (eval.tasks): read before anything starts, asked of the workers at evaluations.

KEY = "eval.tasks"


class NotScored(Exception):
    """Signals that an evaluation gives no scores, and why, in a line; the run goes on."""


def violations_of_tasks(config: Config) -> Iterator[str]:
    """Yield a line if a run is to score tasks and lm_eval is not installed, one if its eval.task_folder is missing."""
    e = config.eval
    if e.tasks and find_spec("lm_eval") is None:
        yield f"{KEY}: needs the package lm_eval: pip install 'elastic-platform[eval]'"
    if e.task_folder and not os.path.isdir(e.task_folder):
        yield format_violation("eval.task_folder", e.task_folder, "there is no such folder")


def open_tasks(config: Config) -> RunTasks | None:
    """Load the lm-eval tasks of a run (eval.tasks), None without any. Raises ConfigError if that fails."""
    if not config.eval.tasks:
        return None
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's progress bars would run into the console's lines
    from platform.cluster.harness_tasks import HarnessTasks

    return RunTasks(config, HarnessTasks(config.eval.tasks, config.eval.task_folder, key=KEY))


class RunTasks:
    """Tasks that a run scores its model by."""

    def __init__(self, config: Config, tasks: HarnessTasks):
        """Prepare to score a run's model by lm-eval's `tasks`, on at most eval.task_samples documents of each."""
        self._limit, self._tasks, self._named = config.eval.task_samples, tasks, config.eval.tasks[0]

    def check_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """Raise ConfigError if the run's data has no tokenizer, which the lm-eval tasks of eval.tasks need."""
        if vocabulary is None:
            raise ConfigError(KEY, self._named, "tasks are texts, and the data has no tokenizer", [[]])

    def score_model(self, asked: AskedModel) -> dict[str, float]:
        """Return the scores of a model by eval.tasks, TASK/METRIC -> value. Raises WorkerFailed; NotScored if a task
        fails."""
        try:
            task_metrics = self._tasks.score_model(asked, self._limit)
        except (WorkerFailed, NotScored):
            raise
        except Exception as error:  # of a task's own code: no reason to end a run of weeks
            raise NotScored(printable_line(f"{type(error).__name__}: {error}")) from error
        return {f"{task}/{metric}": value for task, values in task_metrics.items() for metric, value in values.items()}


class Lines:
    """New file at `path`, which the option `flag` names, that lines are added to. If one cannot be written, its part in
    the file is taken back; a file without a line is removed at the end. Raises ConfigError if it cannot be made."""

    def __init__(self, path: str, option_name: str):
        """Create the file for an asked model's answers at `path`, named by option `option_name`. Raises ConfigError."""
        self._path, self._flag, self._whole = path, option_name, 0
        with refuse_unwritable(option_name, path):
            self._file = open(path, "xb", buffering=0)

    def append_line(self, text: str) -> None:
        """Append a line to the file of an asked model's answers. Raises ConfigError, naming the option, on failure."""
        raw = memoryview(f"{text}\n".encode())
        with refuse_unwritable(self._flag, self._path):
            while raw:
                raw = raw[self._file.write(raw) :]
        self._whole = self._file.tell()

    def __enter__(self) -> Lines:
        """Return this file of an asked model's answers, which `__exit__` closes."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close the file of an asked model's answers, cut after its last whole line, and remove it if it has none."""
        with suppress(OSError):
            self._file.truncate(self._whole)
        self._file.close()
        if not self._whole:
            with suppress(OSError):
                os.unlink(self._path)
