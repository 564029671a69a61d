"""Teacher of a run: a trained model whose likeliest classes at every label the run's own model learns.

The workers score the samples that the run reads, each once and in this order, before they form the run's mesh: they
are seated as the mesh of the teacher's plan, which has the same axes, and hold its weights instead of the run's. The
driver keeps the classes in the run's directory (`platform.data.teacher_classes`). No second model is there in training,
and a run that goes on, also at another size, reads the same file; what that lacks, as of a longer run, is asked alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import local_files
from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import ConfigError, format_violation, refuse_all, rephrase_refusals
from platform.boundary.schema import Malformed
from platform.boundary.terminal import show_phase
from platform.cluster.asked_model import violations_of_memory
from platform.cluster.control.questions import leave_out_training, list_read_ranges, seat_model
from platform.cluster.control.run_context import RunContext
from platform.cluster.crew.crew import Crew, Worker
from platform.cluster.crew.failures import Reform
from platform.cluster.crew.job import Job
from platform.cluster.session import TrainedModel, find_trained_model
from platform.config.fields import Config, distill_settings, hash_values
from platform.config.groups import Parallel, Tune
from platform.data import teacher_classes
from platform.data.corpus import Corpus
from platform.data.streams import Ints
from platform.data.teacher_classes import TeacherHeader, decode_records, record_type
from platform.data.tokenizer import Vocabulary, load_named_vocabulary
from platform.plan.generation_passes import batch_rows
from platform.plan.layout import format_count
from platform.plan.plan import Plan
from platform.plan.plan_summary import format_number, format_seconds
from platform.predict.choose_schedule import build_generation_model
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.step_price import step_price
from platform.train.replies import AskedTexts
from platform.weights.importing import open_initial_weights
from platform.weights.model_folder import check_tokenizer

KEY = "train.teacher"
_REPLY = 1 << 27  # bytes of records that workers send at once
_ROWS = 64  # samples whose texts are sorted by length, and then asked in batches


def find_teacher(config: Config) -> TrainedModel:
    """Find the trained model that train.teacher names. Raises ConfigError with a line for each way in which the model
    of `config` cannot learn from it."""
    with rephrase_refusals(lambda line: line.replace("CHECKPOINT=", f"{KEY}=", 1)):
        trained = find_trained_model(config.train.teacher)
    teacher, model, shown = trained.model, config.model, strip_url_secrets(config.train.teacher)
    lines = []
    if teacher.kind != "decoder":
        lines.append(format_violation(KEY, shown, f"is of model.kind={teacher.kind}, and a decoder is needed"))
    if teacher.vocab != model.vocab:
        reason = f"has model.vocab={teacher.vocab}, and the model that learns {model.vocab}: not the same classes"
        lines.append(format_violation(KEY, shown, reason, [f"model.vocab={teacher.vocab}"]))
    if teacher.positions == "learned" and (most := teacher.position_rows or teacher.length) < model.length:
        reason = f"knows {most} positions, and model.length={model.length}"
        lines.append(format_violation(KEY, shown, reason, [f"model.length={most}"]))
    most_classes = _REPLY // record_type(1).itemsize // model.length
    if (settings := distill_settings(config)) and settings.top > most_classes:
        reason = f"of samples of model.length={model.length} at most {most_classes} classes are kept"
        lines.append(
            format_violation("train.loss_settings.top", config.train.loss_settings.get("top"), reason, [most_classes])
        )
    refuse_all(lines)
    check_teacher_vocabulary(config, trained, load_named_vocabulary(config.data))
    return trained


def check_teacher_vocabulary(config: Config, trained: TrainedModel, vocabulary: Vocabulary | None) -> None:
    """Raise ConfigError if the run's tokenizer, None if it is not known, differs from its teacher's."""
    with rephrase_refusals(lambda line: line.replace("that of the weights in", "that of the teacher in")):
        check_tokenizer(config.data, vocabulary, trained.url, trained.files)


def plan_teacher(config: Config, trained: TrainedModel) -> tuple[Config, Plan]:
    """Return the configuration and the plan under which the workers of a run ask its teacher: the same axes as the
    run's `config` has, and nothing that training alone needs. Raises ConfigError for a teacher that cannot be planned
    so, that lacks weights, or that needs more memory than there is."""
    learned, run_model = trained.model.positions == "learned", config.model
    rows = (trained.model.position_rows or trained.model.length) if learned else 0
    model = replace(
        trained.model, length=run_model.length, within_documents=run_model.within_documents, position_rows=rows
    )
    teacher = replace(
        leave_out_training(config),
        model=model,
        tune=Tune(),
        parallel=config.parallel if model.experts else replace(config.parallel, experts=Parallel().experts),
        train=replace(
            config.train, init=trained.url, teacher="", loss="", loss_settings={}, freeze=[], length_ramp=[], ema=0.0
        ),
    )
    shown = strip_url_secrets(config.train.teacher)
    with rephrase_refusals(lambda line: line if line.startswith(KEY) else format_violation(KEY, shown, f"its {line}")):
        plan = make_plan(teacher)
        build_generation_model(teacher)
        open_initial_weights(teacher)
        refuse_all(violations_of_memory(teacher, plan, 1, model.length, 1))
    return teacher, plan


def explain_teacher(config: Config, hardware: Hardware) -> dict[str, Any]:
    """Return what `python -m platform.plan` says of the teacher of a configuration, as JSON-able data, {} without one:
    its size, the bytes that are kept, and the seconds of a forward pass on a hardware: a third of its training's, whose
    backward pass has two products for each. Raises ConfigError."""
    if not (settings := distill_settings(config)) or not config.train.teacher:
        return {}
    teacher, plan = plan_teacher(config, find_teacher(config))
    price = step_price(teacher, plan, hardware)
    return {
        "source": strip_url_secrets(config.train.teacher),
        "parameters": plan.parameter_count,
        "parameters_per_worker": plan.count_parameters_of_rank(plan.mesh.rank_coordinates(0)),
        "kept_bytes_per_token": record_type(settings.top).itemsize,
        "seconds_per_token": price.seconds / 3 / price.tokens,
        "hardware": hardware.name,
    }


def describe_teacher(facts: Mapping[str, Any]) -> str:
    """Return a line on the teacher of a plan, of which `explain_teacher` gave the facts."""
    sizes = f"{facts['parameters']:,} parameters, {facts['parameters_per_worker']:,} on a worker"
    seconds = format_seconds(1e6 * facts["seconds_per_token"])
    kept = f"{facts['kept_bytes_per_token']:,} bytes are kept of each token"
    return (
        f"teacher  {sizes}; asked before the first step, {seconds} for a million tokens ({facts['hardware']}); {kept}"
    )


class RunTeacher:
    """Teacher of a run. `ask_workers` lets the workers score what the run reads and the file lacks; `hand_over` opens
    the file on the workers of a generation."""

    def __init__(self, run: RunContext):
        """Prepare the teacher of a run; there is nothing to do if its loss has none."""
        self._run, self._path = run, run.directory.path / teacher_classes.FILE
        self._asked_after: float = inf  # the step after which the file has all that the run reads

    def ask_workers(self, crew: Crew, job: Job, seats: Sequence[int], config: Config, number: int, step: int) -> None:
        """Let the members that have the ranks of `job` score what the run reads after training step `step`, but for
        what the file has; they are seated again afterwards, for generation `number`, which `config` describes. Raises
        ConfigError, WorkerFailed."""
        settings, corpus = distill_settings(config), self._run.corpus
        if (step := int(min(step, self._asked_after))) == self._asked_after or not settings or not corpus.teacher:
            return
        trained = find_teacher(config)
        teacher, plan = plan_teacher(config, trained)
        weights_hash = open_initial_weights(teacher).describe_base().hash
        samples = [corpus.digest, config.model.length, config.model.within_documents, config.data.packing]
        samples_hash = hash_values([*samples, sorted(corpus.first_samples.items())])
        header = TeacherHeader(samples_hash, weights_hash, settings.temperature, settings.top, config.model.length)
        kept, read = (
            self._find_kept(header, config.model.vocab),
            corpus.list_read_samples(list_read_ranges(self._run, step)),
        )
        missing = read[~np.isin(read, kept)]
        if len(missing):
            size = format_number(len(missing) * header.sample_type.itemsize)
            asked = f"{header.classes} likeliest classes of {format_count(len(missing), 'sample')}, {size}B"
            more = f", beside {format_count(len(kept), 'sample')} that it has" if len(kept) else ""
            shown_teacher = strip_url_secrets(config.train.teacher)
            self._run.monitor.say(f"teacher  {shown_teacher}: {asked} in {self._path.name}{more}")
            self._seat_teacher(crew, teacher, plan, number)
            with show_phase("asking the teacher", len(missing), "samples") as shown:
                parts = self._iterate_parts(crew, plan, header, missing, shown.count_done)
                with local_files.refuse_full_disk("run.dir", self._path.parent):
                    teacher_classes.add_samples(self._path, header, len(kept), parts)
            crew.release_members()
            crew.assign_ranks(job, seats)
        self._asked_after = step

    def hand_over(self, crew: Crew, step: int) -> None:
        """Open the classes of a teacher on the workers of a generation that goes on after `step`. Raises Reform."""
        if not self._run.corpus.teacher:
            return
        if step < self._asked_after:
            self._asked_after = inf  # newer checkpoints are corrupt
            raise Reform(f"goes on after step {step}, and the teacher was asked about later ones")
        crew.call_ranks(Worker.open_teacher)

    def _find_kept(self, header: TeacherHeader, vocab: int) -> Ints:
        """Return the numbers of the samples that the file has of what `header` says; say why if it is not used."""
        try:
            kept_header, kept = teacher_classes.check_file(self._path, vocab)
        except FileNotFoundError:
            return np.empty(0, np.int64)
        except (Malformed, OSError, ValueError) as error:
            reason = f"it is {error}"
        else:
            if kept_header == header:
                return kept
            reason = "it is of another teacher, of other samples or settings"
        self._run.monitor.say(f"{self._path.name} is not used: {reason}; the teacher is asked again")
        return np.empty(0, np.int64)

    def _seat_teacher(self, crew: Crew, teacher: Config, plan: Plan, number: int) -> None:
        """Let the workers form the mesh of the teacher's plan, ahead of generation `number`, and load its weights."""
        seat_model(crew, teacher, plan, number, str(self._run.corpus.entry or ""))
        if failure := crew.call_ranks(Worker.load_initial_weights)[0]:
            raise ConfigError(KEY, strip_url_secrets(teacher.train.init), failure.reason)

    def _iterate_parts(
        self, crew: Crew, plan: Plan, header: TeacherHeader, numbers: Ints, count_done: Any
    ) -> Iterator[bytes]:
        """Yield samples `numbers` as the file has them, in parts, as the workers' teacher says."""
        within, kind = self._run.config.model.within_documents, record_type(header.classes)
        at_once = max(1, min(batch_rows(plan), _REPLY // (kind.itemsize * header.length)))
        for some in np.split(numbers, range(_ROWS, len(numbers), _ROWS)):
            records = np.zeros((len(some), header.length), kind)
            texts = sorted(_find_texts(self._run.corpus, some, within), key=lambda text: -len(text[2]))
            for batch in (texts[i : i + at_once] for i in range(0, len(texts), at_once)):
                ids = AskedTexts([ids for *_, ids in batch])
                answer = crew.call_ranks(Worker.rank_classes, ids, header.classes, header.temperature)[0]
                ends = np.cumsum([len(ids) for *_, ids in batch])[:-1]
                parts = np.split(decode_records(answer, header.classes), ends)
                for (row, start, ids_of_text), part in zip(batch, parts, strict=True):
                    records[row, start : start + len(ids_of_text)] = part
            count_done(len(some))
            yield teacher_classes.encode_samples(header, some, records)


def _find_texts(corpus: Corpus, numbers: Ints, within: bool) -> Iterator[tuple[int, int, list[int]]]:
    """Yield what a teacher reads of samples `numbers`, as (place of its sample among these, first column, token ids):
    each sample as a whole or, `within` documents, each document of it; only what has a label."""
    for part in corpus.parts:
        for split, stream in part.streams.items():
            index = numbers - corpus.first_samples[split, part.name]
            rows = np.flatnonzero((index >= 0) & (index < corpus.objective.samples(stream)))
            if len(rows):
                tensors = corpus.objective.batch(stream, index[rows], np.empty(0, np.uint64))
                yield from _cut_texts(tensors, rows, within)


def _cut_texts(tensors: Any, rows: NDArray[np.int64], within: bool) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the texts of samples, of `rows` in the order of their `tensors`, as `_find_texts` does."""
    for row, number in enumerate(rows.tolist()):
        tokens, labels = tensors["tokens"][row], tensors["labels"][row]
        length = int((tokens >= 0).sum())
        begins = np.unique(tensors["begins"][row][:length]).tolist() if within else [0]
        for start, end in zip(begins, [*begins[1:], length], strict=True):
            if (labels[start:end] >= 0).any():
                yield number, start, tokens[start:end].tolist()
