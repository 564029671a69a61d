"""Numbers that the driver adds to a run's steps: its forecast of their seconds, and evaluations of the model.

`StepForecaster`: the parts of a step in predicted seconds, beside the measured ones. `Evaluations`: losses on held-out
data, texts that the model makes of prompts, scores by tasks. `build_metrics_row` makes a row of metrics.jsonl of a
step's report (docs/run-directory.md).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, log
from typing import Any

from platform.boundary.documents import error_line
from platform.cluster.answer_scores import NotScored
from platform.cluster.asked_model import Ask, AskedModel, add_boundary_token
from platform.cluster.control.questions import count_validation_samples
from platform.cluster.control.recruiter import Recruiter, ReformProposal
from platform.cluster.control.run_context import Generation, RunContext
from platform.cluster.crew.crew import Crew, T, Worker
from platform.cluster.crew.job import count_threads, usable_cores
from platform.cluster.resources import launcher_kind
from platform.config.fields import Config, training_loss_name
from platform.config.ramps import find_sequence_length
from platform.monitor import MetricsRow, events
from platform.monitor.step_parts import (
    average_parts,
    describe_busy_processors,
    describe_likely_cause,
    is_worth_telling,
    parts_table,
    replanning_line,
)
from platform.monitor.timeline import StepForecast
from platform.plan.generation_passes import batch_rows
from platform.plan.layout import format_count
from platform.plan.model_types import DISTILL, PAIR_LOSSES
from platform.plan.plan import Plan
from platform.plan.plan_summary import REST, fold_into_measured_parts
from platform.predict.calibration import fit_slowdowns
from platform.predict.hardware import Hardware
from platform.predict.price import StepPrice, price_work, simulate_schedule
from platform.predict.step_price import build_step_work, hardware_of_device, step_price
from platform.predict.work import StepWork
from platform.train.replies import Choice, RankRange, StepReport

WINDOW = 50  # last steps that are compared with their prediction
FEWEST = 10  # of which a comparison is worth a word
LEFT = 0.2  # share of a prediction by which steps differ that have left it
WORTH = 0.05  # share of a step by which another plan must be quicker: predictions are no better
FITTED = ", fitted"  # at the end of a hardware's name
AGAIN = 500  # steps between two changes of the plan


class StepForecaster:
    """Forecast of the steps of a run's generation: predicted once its first step is done, and compared with the full
    steps that follow, of the final batch size and length. `parts`: predicted seconds by part, empty if no file
    describes the hardware; `of_step`: all that is predicted of a step of the generation, None if nothing is."""

    def __init__(self, run: RunContext):
        """Prepare to predict the steps of a run's generations."""
        self._run = run
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self.parts: dict[str, float] = {}
        self.of_step: StepForecast | None = None
        self._hardware: Hardware | None = None
        self._work: StepWork | None = None
        self._fitted: Hardware | None = None  # to the run's own steps
        self._first = 0.0  # seconds of the generation's first step
        self._workers: dict[str, float] | None = None  # their gauges in the last step that had new ones
        self._again = 0  # step before which no other plan is taken
        self._proposal: ReformProposal | None = None  # of a better plan, until the mesh re-forms

    def forecast_generation(self, generation: Generation, first_row: MetricsRow) -> None:
        """Predict the steps of a generation, in the journal and for its timeline, if their parts are measured. Done
        after its first step, with that `first_row`, as it may take a second, which no recovery is to pay."""
        config, run = generation.formed.config, self._run
        self._steps.clear()
        self.of_step = None
        self.parts, self._first, self._proposal = {}, first_row.step_seconds, None
        if not first_row.parts:
            return
        try:
            fitted = self._fitted
            self._hardware = fitted or hardware_of_device(config, run.places.device, generation.device)
            self._work = build_step_work(config, generation.plan) if self._hardware else None
        except Exception as error:  # a run needs no forecast
            return run.monitor.say(f"WARNING: steps cannot be predicted ({error_line(error)})")
        if not (self._hardware and self._work):
            return
        seconds, name = (
            self._set_step_prediction(generation, price_work(self._work, self._hardware)),
            self._hardware.name,
        )
        run.journal.write(events.PredictedStep(hardware=name, seconds=seconds, parts=self.parts))
        self.of_step = StepForecast(name, self.parts, partial(simulate_schedule, self._work, self._hardware))
        if generation.timeline:
            generation.timeline.forecast = self.of_step

    def add_step(self, row: MetricsRow) -> None:
        """Note a step that the control loop has committed, if it was predicted, and its workers' gauges."""
        self._workers = row.workers or self._workers
        if row.predicted_seconds and row.parts and not row.skipped:
            self._steps.append(row.parts)

    def propose_better_plan(
        self, crew: Crew, recruiter: Recruiter, generation: Generation, done: int
    ) -> ReformProposal | None:
        """Propose to re-form the mesh by a better plan (elastic.replan) if the last WINDOW steps have left their
        prediction: the hardware is fitted to them, and a plan is chosen for it as after a failure. Return None if none
        pays; journal the finding in either case. `done`: steps of the run that are done."""
        able = self._run.config.elastic.replan and crew.elastic and len(self._steps) == WINDOW
        if not (able and self._hardware and self._work):
            return self._proposal
        predicted = sum(self.parts.values())
        typical_parts = average_parts(self._steps)
        measured = {name: typical_parts[name] for name in self.parts if name in typical_parts}
        seconds = sum(measured.values())
        if abs(seconds - predicted) <= LEFT * predicted or done < self._again:
            return self._proposal
        times = fit_slowdowns(self._work, self._hardware, measured)
        name = self._hardware.name.removesuffix(FITTED) + FITTED
        self._fitted = self._hardware = replace(self._hardware.slow_down(times), name=name)
        recruiter.use_fitted_hardware(self._fitted)
        now = self._set_step_prediction(generation, price_work(self._work, self._fitted))
        self._steps.clear()
        self._again = done + WINDOW
        best = recruiter.choose_best_plan(len(recruiter.usable_members(crew)))
        if not best or best.plan.mesh.world_size < generation.size:
            return None
        then = step_price(best.config, best.plan, self._fitted).seconds
        gain, cost = (now - then) * (self._run.steps - done), generation.seconds + max(0.0, self._first - seconds)
        pays = then < (1 - WORTH) * now and gain > cost
        event = events.Replanning(
            step=done, predicted=predicted, measured=seconds, times=times, chosen=best.reason, now=now, then=then,
            gain=gain, cost=cost, reforms=pays,
        )  # fmt: skip
        self._run.journal.write(event)
        self._run.monitor.say(replanning_line(event))
        if not pays:
            return None
        self._again = done + AGAIN
        self._proposal = ReformProposal(f"another plan is quicker: {best.reason}")
        return self._proposal

    def _set_step_prediction(self, generation: Generation, price: StepPrice) -> float:
        """Note the price of a full step of the generation that runs, and return its seconds."""
        self.parts, generation.predicted_seconds = fold_into_measured_parts(price.seconds_by_part), price.seconds
        return price.seconds

    def report_typical_step(self) -> None:
        """Report a typical step of the control loop's last generation, part by part, to journal and user, if it had
        enough steps; and to the user that its workers waited for processors, if they did."""
        if busy := describe_busy_processors(self._workers):
            self._run.monitor.say(f"WARNING: {busy}")
        if len(self._steps) < FEWEST or not self._hardware:
            return
        measured, count = average_parts(self._steps), len(self._steps)
        event = events.MeasuredStep(steps=count, seconds=sum(measured.values()), parts=measured)
        self._run.journal.write(event)
        if not (is_worth_telling(self.parts, measured) or self._run.config.monitor.timeline):
            return
        lines = [*parts_table(self.parts, measured, self._hardware.name, count)]
        if sum(measured.values()) > sum(self.parts.values()) and not busy and (cause := self._describe_machine_load()):
            lines.append(cause)
        self._run.monitor.say("\n".join(lines))

    def _describe_machine_load(self) -> str:
        """Return the line that says why the processors of this machine are slow for the run's workers; "" if they are
        not, or workers compute elsewhere."""
        config, job = self._run.config, self._run.job
        if job.device != "cpu" or launcher_kind(config.cluster) not in ("inline", "local", "processes"):
            return ""
        cores = usable_cores()
        threads = count_threads(config, job.world_size, cores)
        return describe_likely_cause(os.getloadavg()[0], cores, job.world_size, threads)


PROMPT = "def "  # that the sample at the end of a run continues, without validation documents
OPENING = 4  # tokens of one that it continues
TEMPERATURE = 0.8  # of the texts that a run shows, which `platform.generate` gives too, with the run's seed


class Evaluations:
    """Evaluates the model of a run between training steps, as the keys of eval say."""

    def __init__(self, run: RunContext):
        """Prepare the evaluations of a run between training steps: held-out losses, texts, and scores by tasks."""
        self._config, self._corpus = run.config, run.corpus
        self._journal, self._monitor, self._tasks, self._signals = run.journal, run.monitor, run.tasks, run.signals

    def evaluate_model(
        self, crew: Crew, plan: Plan, step: int, within: float
    ) -> tuple[dict[str, float], dict[str, float] | None]:
        """Evaluate the model of a crew that is seated under `plan`, after a training step; return its losses by source
        of the data, "" being all, and its scores by TASK/METRIC, None if there are none. `within`: seconds without
        progress, as in `Crew.call_ranks`."""
        losses, asked = self._validation_losses(crew, within), self._config.eval
        texts = self._continue_prompts(crew, plan, asked.prompts, asked.prompt_tokens, within)
        for prompt, text in zip(asked.prompts, texts, strict=True):
            self._journal.write(events.Sampled(step=step, prompt=prompt, text=text))
            self._monitor.say(f"after step {step}: {text!r}")
        scores = self._score_tasks(crew, plan, step, within)
        if training_loss_name(self._config) in (*PAIR_LOSSES, DISTILL) or self._config.model.predict_ahead:
            scores = {**(scores or {}), **self._measure_loss(crew, within)}
        return losses, scores

    def _measure_loss(self, crew: Crew, within: float) -> dict[str, float]:
        """Return the means of the run's `loss_measures` on held-out data, by share."""
        validations, samples = self._corpus.validation_splits, count_validation_samples(self._config, self._corpus)
        by_split = crew.call_ranks(Worker.measure_loss, samples, within=within)[0]
        total = sum(share for _, share in validations.values())
        words = next(iter(by_split.values()), {})
        return {w: sum(by_split[s][w] * share for s, share in validations.values()) / total for w in words}

    def _validation_losses(self, crew: Crew, within: float) -> dict[str, float]:
        """Return the run's validation losses, source of data -> mean per token; "" is the mean of all, by share. Each
        held-out sample is read at most once: the last batch of a small split is shorter, or there are fewer."""
        validations = self._corpus.validation_splits
        samples = count_validation_samples(self._config, self._corpus)
        by_split = crew.call_ranks(Worker.evaluate_splits, samples, within=within)[0]
        losses = {name: by_split[split] for name, (split, _) in validations.items()}
        total = sum(share for _, share in validations.values())
        mean = sum(losses[name] * share for name, (_, share) in validations.items()) / total
        return {**losses, "": mean}

    def show_sample(self, crew: Crew, plan: Plan, step: int) -> None:
        """Print and record a text of monitor.sample tokens that the crew's model writes at a step; none if it is 0."""
        if tokens := self._config.monitor.sample:
            [text] = self._continue_prompts(crew, plan, [prompt := self._choose_prompt()], tokens)
            self._journal.write(events.Sampled(step=step, prompt=prompt, text=text))
            self._monitor.say(f"a sample of {format_count(tokens, 'token')}:\n{text}")

    def _choose_prompt(self) -> str:
        """Return the beginning of the first validation document of the run's text; PROMPT where there is none."""
        split, _ = next(iter(self._corpus.validation_splits.values()), ("", 0.0))
        if not split or not self._corpus.vocabulary:
            return PROMPT
        tensors, special = self._corpus.batch(split, 0, 1), self._corpus.special.front
        ids = [i for i in tensors["source" if "source" in tensors else "tokens"][0].tolist() if i not in special]
        return self._corpus.decode(ids[:OPENING]).rstrip("\ufffd") or PROMPT

    def _continue_prompts(
        self, crew: Crew, plan: Plan, prompts: Sequence[str], tokens: int, within: float = inf
    ) -> list[str]:
        """Return each prompt with the run's model's continuation of `tokens` tokens, or an encoder-decoder's alone."""
        config, corpus = self._config, self._corpus
        asked = self._wrap_model(partial(crew.call_ranks, within=within), plan)
        ids = [corpus.encode(prompt) for prompt in prompts]
        prompt_ids = [add_boundary_token(token_ids, config.model, corpus.special) for token_ids in ids]
        choice = Choice(corpus.vocab, TEMPERATURE, seed=config.seed)
        answers = dict(asked.continue_prompts(prompt_ids, tokens, choice, []))
        shown = [[] if asked.pairs else token_ids for token_ids in ids]
        return [corpus.decode([*token_ids, *answers[n].ids]) for n, token_ids in enumerate(shown)]

    def _wrap_model(self, ask: Ask, plan: Plan) -> AskedModel:
        """Wrap the run's model, asked by `ask`, a call of the crew, to write and score texts in batches."""
        return AskedModel(ask, self._config.model, self._corpus.vocabulary, batch_rows(plan), self._corpus.special)

    def _score_tasks(self, crew: Crew, plan: Plan, step: int, within: float) -> dict[str, float] | None:
        """Return the scores of the model by eval.tasks after a training step, TASK/METRIC -> value; None without tasks,
        or if a task fails or the run is asked to stop meanwhile, as there may be no time for the rest: that is
        journalled. `within`: seconds without progress, as in `Crew.call_ranks`."""
        if not self._tasks:
            return None

        def call_unless_stopping(method: Callable[..., T], *args: Any) -> list[T]:
            """Call all ranks for one batch of the evaluation's tasks; raises NotScored if the run is to stop."""
            if self._signals.stop_requested:
                raise NotScored("the run is to stop")
            return crew.call_ranks(method, *args, within=within)

        try:
            return self._tasks.score_model(self._wrap_model(call_unless_stopping, plan))
        except NotScored as missing:
            self._journal.write(events.NotScored(step=step, reason=str(missing)))
            self._monitor.say(f"after step {step}: eval.tasks gives no scores: {missing}")
            return None


def build_metrics_row(
    report: StepReport,
    generation: Generation,
    wall_seconds: float,
    *,
    config: Config,
    stalled: float,
    bubble: dict[str, float] | None,
    val_losses: dict[str, float] | None,
    task_scores: dict[str, float] | None,
    recovery_seconds: float | None,
) -> MetricsRow:
    """Convert rank 0's report on a committed training step, which covers all ranks (see
    `platform.train.step_report`), into its row of metrics.jsonl.

    `step_seconds` is `wall_seconds`, the driver's time from sending the step out to the last rank's answer, so that
    dispatch counts; `seconds` are means over the ranks, `comm_bytes` sums, `peak_memory_bytes` maxima. Throughput
    counts this step's tokens; `parts` add up to its seconds; `mfu` is relative to the peak of a worker, None if that is
    unknown. `config`: the run's. `stalled`: seconds for which saving has held up the run since the step before;
    `bubble`: planned and measured pipeline bubble, None without timeline or pipeline; `val_losses`: losses by source of
    the data, "" being all of them, None if no evaluation followed the step; `task_scores`: likewise, by TASK/METRIC;
    `recovery_seconds`: time since the first failure since the step before, None if there was none.
    """
    first, end = report.samples
    tokens_per_second = (end - first) * config.model.length / wall_seconds
    plan = generation.plan.plan_of_length(find_sequence_length(config, report.step))
    flops_per_worker = tokens_per_second * plan.flops_per_token / report.world_size
    seconds = report.seconds
    return MetricsRow(
        step=report.step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=report.lr,
        tokens=report.tokens,
        samples=[first, end],
        seconds=seconds | {"checkpoint": seconds["checkpoint"] + stalled} if stalled else seconds,
        peak_memory_bytes=report.peak_memory_bytes,
        world_size=report.world_size,
        step_seconds=wall_seconds,
        tokens_per_second=tokens_per_second,
        tflops_per_worker=flops_per_worker / 1e12,
        mfu=flops_per_worker / generation.peak_flops if generation.peak_flops else None,
        comm_bytes=dict(sorted(report.comm_bytes.items())),
        generation=generation.number,
        **_worker_spreads(report.workers),
        skipped=report.skipped or None,
        loss_scale=report.loss_scale,
        length=plan.sizes["length"] if config.train.length_ramp else None,
        **_parts_of_step(report, generation, wall_seconds, config),
        bubble=bubble,
        val_loss=None if val_losses is None else val_losses[""],
        val_losses={name: loss for name, loss in (val_losses or {}).items() if name} or None,
        task_scores=task_scores,
        recovery_seconds=recovery_seconds,
        layer_grad_norms=report.layer_gradients or None,
        layer_rms=report.layer_activations or None,
        experts=_expert_load(report.routed) if any(report.routed) else None,
        losses_ahead={f"loss_ahead_{k}": x for k, x in enumerate(report.losses_ahead, 1)} or None,
        expert_load=report.routed[: len(report.routed) // 2] if any(report.routed) else None,
    )


def _parts_of_step(report: StepReport, generation: Generation, wall_seconds: float, config: Config) -> dict[str, Any]:
    """Return what the control loop puts into a row of the parts of a step, if they were measured: their seconds, which
    add up to `wall_seconds`, and the seconds predicted of a full step, if it is one."""
    if not report.parts:
        return {}
    first, end = report.samples
    full = end - first == config.train.global_batch and find_sequence_length(config, report.step) == config.model.length
    rest = wall_seconds - sum(report.parts.values())
    predicted = generation.predicted_seconds if full else None
    return {"parts": {**report.parts, REST: rest}, "predicted_seconds": predicted}


def _worker_spreads(workers: Mapping[str, RankRange]) -> dict[str, Any]:
    """Return what the control loop puts into a row on the spreads over a step's workers: numbers, ranks at the ends."""
    if not workers:
        return {}
    numbers: dict[str, float] = {}
    ranks: dict[str, int] = {}
    for name, spread in workers.items():
        numbers |= {f"{name}/min": spread.least, f"{name}/median": spread.median, f"{name}/max": spread.most}
        ranks |= {f"{name}/min": spread.least_rank, f"{name}/max": spread.most_rank}
    return {"workers": numbers, "worker_ranks": ranks}


def _expert_load(routed: Sequence[int]) -> dict[str, float]:
    """Return what the control loop puts into a row on experts: how even their load was, and how much was dropped."""
    experts = len(routed) // 2
    chosen, taken = sum(routed[:experts]), sum(routed[experts:])
    shares = [n / chosen for n in routed[:experts]]
    entropy = -sum(share * log(share) for share in shares if share)
    evenness = entropy / log(experts) if experts > 1 else 1.0
    return {"dropped": 1 - taken / chosen, "entropy": evenness, "largest": max(shares) * experts}
