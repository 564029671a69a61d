"""Random plans against one process in fp64: losses, gradients, their norm, the weights after updates, and averages.

A case is a run under one plan, or under two: the second goes on from a checkpoint of the first, or from its memory.
Ranks are threads. What is illegal must be refused by ConfigError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config, choose_quantisation
from platform.config.ramps import find_batch_size, find_sequence_length, step_sample_range
from platform.config.validation import violations_of_configuration
from platform.data.objectives import register_objective
from platform.model.losses import register_loss
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train.generator import TextGenerator
from platform.train.replies import AskedTexts
from platform.train.trainer import Trainer
from tests.fuzz.draw_data import KINDS, WEIGHED, open_data, weighed, write_files
from tests.fuzz.draw_plans import EXPERTS, RANKS, SCHEDULES, SCHEMES, changed, draw_case
from tests.fuzz.draw_training import OWN_LOSSES
from tests.fuzz.passages import InMemory, OnStorage
from tests.harness.held import check_held, check_stages
from tests.harness.oracle import (
    Result,
    assemble,
    check_bytes,
    compare,
    configure,
    count_flips,
    moments_of,
    numbers_of,
    trainer_of,
)
from tests.harness.registries import as_before
from tests.harness.replay import replay
from tests.harness.threads import run_threads

FOCUSED = ("one token", "uneven replicas", "partial batch", "resume")
CLASSES = (*(f"{scheme}, {schedule}" for scheme in SCHEMES for schedule in SCHEDULES), *FOCUSED, "changed", "refused")
OFTEN = ("resume", "one token", "regions, zb_h1", "regions, table", "changed", "changed")  # many, or often refused
TRIES = 20  # draws until one is legal
ENDS = {1: ((1,), (2,)), 2: ((1, 2), (1, 3), (2, 3))}  # plans of a run -> the last steps of each

Phases = Sequence[range]  # the steps under each of a run's plans
Ranks = Callable[[Config, Plan, Callable[[Communicator], Any]], list[Any]]  # of a plan, each doing some work
Check = Callable[[Random, Sequence[Config], Sequence[Plan]], None]


def on_threads(c: Config, plan: Plan, work: Callable[[Communicator], Any]) -> list[Any]:
    """Do some work on every rank of a plan, each a thread; return the results by rank."""
    return run_threads(plan.mesh, work)


def check(
    r: Random,
    configs: Sequence[Config],
    plans: Sequence[Plan],
    ranks: Ranks = on_threads,
    asks: bool = True,
    passage: OnStorage | InMemory | None = None,
) -> None:
    """Run the plans one after the other and compare each with the same steps of one process. `asks`: also compare an
    evaluation and, of a model that writes texts, the scores of some, with the last weights; `passage`: of the state to
    the second plan, drawn if None.

    Raises AssertionError naming what differs.
    """
    ends = r.choice(ENDS[len(plans)])
    phases = [range(first + 1, end + 1) for first, end in pairwise((0, *ends))]
    expected = alone(configs[0], phases, asks=asks)
    passage = passage or (OnStorage() if len(plans) == 1 or r.random() < 0.5 else InMemory(r))
    before = other = expected[0].initial
    try:
        for number, (c, plan, steps) in enumerate(zip(configs, plans, phases, strict=True)):
            check_stages(plan)
            wanted, last = replace(expected[number], initial=before), steps is phases[-1]
            results = run_phase(c, plan, ranks, steps, passage, (number > 0, not last), asks and last)
            try:
                compare(c, plan, results, wanted)
            except AssertionError:
                # of replicas that a CPU has rounded apart, from memory aligned otherwise, each may be what was kept
                kept = assemble(plan, results, lambda result: result.initial)
                wanted = replace(
                    wanted, initial={n: torch.where(x == other[n], other[n], before[n]) for n, x in kept.items()}
                )
                nudged = alone(configs[0], phases, nudge=2.0**-52, asks=asks)[number]
                compare(c, plan, without_shaky(results, wanted, nudged), wanted)
            assert count_flips(c, plan, results, wanted) == 0, "other numbers in 8 bits"
            check_bytes(of_step(c, plan, steps[0]), results)
            assert replay([result.log for result in results]) is None, "order of launches"
            before, other = (assemble(plan, ranked, lambda result: result.final) for ranked in (results, results[::-1]))
    finally:
        passage.end()
    if configs[-1].optimizer.offload != "none":
        check_no_bit_changes(replace(configs[-1], precision="bf16"), r.choice(("fp32", "split")), ranks)


def check_no_bit_changes(c: Config, masters: str, ranks: Ranks = on_threads) -> None:
    """Compare steps in narrow numbers with states and masters in host memory with those that have all on the device.
    Raises AssertionError naming a weight of another bit."""
    runs = []
    for offload in ("states+masters", "none"):
        one = replace(c, optimizer=replace(c.optimizer, offload=offload, masters=masters))
        for plan in planned([one]):

            def work(communicator: Communicator, one: Config = one, plan: Plan = plan) -> dict[str, Tensor]:
                trainer = trainer_of(one, plan, communicator, open_data(one))
                for step in range(1, one.train.steps + 1):
                    trainer.step(step)
                return {n: trainer.weights.read_master(n).clone() for n in trainer.weights.own_masters}

            runs.append([work(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else ranks(one, plan, work))
    for ours, theirs in zip(*runs, strict=True) if runs else ():
        for name, x in ours.items():
            bits = (w.flatten().view(torch.uint8) for w in (x, theirs[name]))
            assert torch.equal(*bits), f"{name} in host memory"


@contextmanager
def opened(check: Check = check, experts: float = EXPERTS) -> Iterator[Callable[[int], str]]:
    """Yield `attempt`, which keeps its tables in a folder of its own. `experts`: the share of cases that have some."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, as_before():  # a stream may be reading ahead
        write_files(Path(folder))
        for name, loss in OWN_LOSSES.items():
            register_loss(name, loss)
        register_objective(WEIGHED, weighed, KINDS, weighted=True)
        yield lambda seed: attempt(seed, Path(folder), check, experts)
    torch.set_num_threads(threads)


def attempt(seed: int, folder: Path, check: Check, experts: float) -> str:
    """Draw the case of a seed and check it. Raises AssertionError with the plans where it fails."""
    r = Random(seed)
    wanted = r.choice((*CLASSES[:-1], *OFTEN))
    configs = []
    try:
        for _ in range(TRIES):
            configs = draw(r, wanted, folder, experts)
            plans = planned(configs)
            if plans and suits(configs, plans):
                check(r, configs, plans)
                return wanted
            if not plans and wanted == "changed":
                break
        return "refused"
    except Exception as error:
        raise AssertionError(f"{wanted}: {error!r}; {' then '.join(map(describe, configs))}") from error


def draw(r: Random, wanted: str, folder: Path, experts: float = EXPERTS) -> list[Config]:
    """Draw the plans of a case of this class; `experts`: the share of cases that have some."""
    scheme, _, schedule = wanted.partition(", ")
    if schedule:
        return draw_case(r, scheme, schedule, "", folder, experts)
    configs = draw_case(r, r.choice(SCHEMES), r.choice(SCHEDULES), wanted, folder, experts)
    return changed(r, configs, folder) if wanted == "changed" else configs


def planned(configs: Sequence[Config]) -> list[Plan]:
    """Plan every configuration; [] where one is refused. Any other exception than ConfigError passes."""
    try:
        for c in configs:
            if lines := violations_of_configuration(c):
                raise ConfigError(lines)
        open_data(configs[0])
        return [plan_if_legal(c) for c in configs]
    except ConfigError as error:
        assert error.violations and all(error.violations), "a refusal says why"
        return []


def plan_if_legal(c: Config) -> Plan:
    """Plan a configuration; without asynchronous products or passes in pairs, if they alone are refused."""
    try:
        return make_plan(c)
    except ConfigError as error:
        drawn = {"tensor.async_products=on": c.tensor, "train.pair_passes=on": c.train}
        refused = [key for key in drawn if any(x.startswith(key) for x in error.violations)]
        if not all(x.startswith(tuple(refused)) for x in error.violations) or not refused:
            raise
        for key in refused:
            setattr(drawn[key], key.partition(".")[2].removesuffix("=on"), "auto")
        return plan_if_legal(c)


def suits(configs: Sequence[Config], plans: Sequence[Plan]) -> bool:
    """Say whether a case is small enough to be tried, has a label to predict in every step, and none whose updates
    rounding decides."""
    c = configs[0]
    corpus = open_data(c)
    batches = (corpus.batch("train", *step_sample_range(c.train, k + 1)) for k in range(c.train.steps))
    counts = all(((rows["labels"] >= 0) * rows.get("label_weights", 1)).any() for rows in batches)
    return bool(counts and all(plan.mesh.world_size <= RANKS for plan in plans) and not of_rounding(c))


def of_rounding(c: Config) -> bool:
    """Say whether an update looks at a gradient's direction alone, and rounding of a zero decides it in some step: the
    sign of an element for Lion, a whole matrix for Muon, as a query's is where all tokens that it sees are equal. It
    shows as a gradient that is tiny, or of a whole parameter 0, which another plan rounds to a tiny one; or as other
    weights after initial ones that differ in their last bit."""
    if c.optimizer.kind not in ("lion", "muon"):
        return False
    steps = [range(k, k + 1) for k in range(1, c.train.steps + 1)]
    matrices = set(make_plan(c).matrices)
    for step in (exact_steps := alone(c, steps)):
        sizes = {name: g.abs() for name, g in step.gradients.items()}
        rounding = 1e-13 * max(float(size.max()) for size in sizes.values())
        shaky = (((g > 0) & (g <= rounding)).any() or not g.any() for g in sizes.values())
        if c.optimizer.kind == "lion" and any(shaky):
            return True
        if c.optimizer.kind == "muon" and any(float(sizes[name].max()) <= rounding for name in matrices):
            return True
    nudged = alone(c, steps, nudge=2.0**-52)[-1]
    return any(float((w - nudged.final[name]).abs().max()) > 1e-9 for name, w in exact_steps[-1].final.items())


def without_shaky(results: Sequence[Result], wanted: Result, nudged: Result) -> list[Result]:
    """Return the results without the gradient norms and losses that have too few digits to be compared: those in which
    one process differs from itself by a tenth of the oracle's bound once its initial weights differ in their last bit
    (`nudged`), as where LayerNorm divides two features that an update has made nearly equal."""

    def steady(have: float, want: float, other: float) -> float:
        return want if abs(other - want) > 1e-11 * abs(want) else have

    return [
        replace(
            result,
            grad_norm=steady(result.grad_norm, wanted.grad_norm, nudged.grad_norm),
            losses=tuple(map(steady, result.losses, wanted.losses, nudged.losses)),
        )
        for result in results
    ]


def alone(c: Config, phases: Phases, nudge: float = 0.0, asks: bool = False) -> list[Result]:
    """Compute the same steps in one process without any parallelism, from weights that differ by `nudge` (relative);
    `asks` as in `check`."""
    batch = c.train.global_batch
    together = batch if choose_quantisation(c) is None else c.train.microbatch * c.parallel.data  # with one scale
    one = configure(global_batch=batch, microbatch=together)
    one.model, one.optimizer, one.seed, one.tune, one.quantise = c.model, c.optimizer, c.seed, c.tune, c.quantise
    one.train = replace(c.train, microbatch=together, mlp_chunks=1, pair_passes="auto")
    one.data = c.data
    plan = make_plan(one)
    trainer = trainer_of(one, plan, SingleRank(plan.mesh), open_data(one))
    generator = torch.Generator().manual_seed(0)
    nudged = [w for w in trainer.weights.master.values() if nudge and w.is_floating_point()]
    for weight in nudged:  # which in fp64 are those that it computes with
        weight.data.mul_(1 + nudge * torch.randint(-1, 2, weight.shape, generator=generator, dtype=weight.dtype))
    return [steps_of(trainer, trainer.communicator, steps, asks and steps is phases[-1]) for steps in phases]


def run_phase(
    c: Config,
    plan: Plan,
    ranks: Ranks,
    steps: range,
    passage: OnStorage | InMemory,
    passes: tuple[bool, bool],
    asks: bool,
) -> list[Result]:
    """Compute steps on all ranks of a plan; return the results. `passes`: whether the state comes by a passage, and
    whether it goes on by it; `asks` as in `check`."""
    corpus, end = open_data(c), steps[-1]
    comes, goes = passes
    if comes:
        passage.prepare(plan)
    if goes:
        passage.begin(end)

    def work(communicator: Communicator) -> tuple[Result, Any]:
        trainer = trainer_of(c, plan, communicator, corpus)
        if comes:
            passage.restore(trainer)
        result = steps_of(trainer, communicator, steps, asks)
        check_held(trainer)
        return result, passage.keep(trainer, end) if goes else None

    done = [work(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else ranks(c, plan, work)
    if goes:
        passage.seal(c, plan, end, [kept for _, kept in done])
    return [result for result, _ in done]


def steps_of(trainer: Trainer, communicator: Communicator, steps: range, asks: bool) -> Result:
    """Compute steps: the gradients of the first, loss and gradient norm of each, the weights at both ends, and answers
    if `asks`."""
    initial = numbers_of(trainer)
    gradients: dict[str, Tensor] = {}
    update = trainer._update_weights

    def recorded(norm: float, lr: float) -> None:
        gradients.update((n, g.clone()) for n, g in trainer.weights.gradients.items() if n not in gradients)
        update(norm, lr)  # which clips them in place

    trainer._update_weights = recorded  # type: ignore[method-assign]
    trainer.enter_step(steps[0])
    communicator.log, trainer.ops.routing = [], {}
    reports = [trainer.step(steps[0])]
    log, communicator.log = communicator.log, None
    routing, trainer.ops.routing = trainer.ops.routing, None
    reports += [trainer.step(k) for k in steps[1:]]
    trainer._update_weights = update  # type: ignore[method-assign]
    assert not any(report.skipped for report in reports), "a step was skipped"
    final = numbers_of(trainer)
    (loss, norm), *numbers = [(report.loss, report.grad_norm) for report in reports]
    numbers += [tuple(answers(trainer))] if asks else []
    moved = Counter(reports[0].comm_bytes)
    averages = final | {n: w.detach().clone() for n, w in trainer.weights.averages.items()}
    first, after = (loss, norm, gradients, initial, final), (sum(numbers, ()), moved, log, averages, reports[0].routed)
    states = {n: state.clone() for n, state in trainer.weights.states.items()}
    return Result(communicator.rank, *first, *after, states, routing, moments_of(trainer))


def answers(trainer: Trainer) -> list[float]:
    """Return the loss of an evaluation and, of a model that writes texts, log-probabilities of some."""
    c = trainer.config
    with trainer.use_evaluation_weights():
        losses = [trainer.compute_mean_loss("train", c.train.global_batch)]
    if c.model.kind != "decoder":
        return losses
    draw = Random(c.seed)
    texts = [
        [draw.randrange(c.model.vocab) for _ in range(n)] for n in (c.model.length + 1, 2, c.model.length // 2 + 2)
    ]
    generator = TextGenerator(c, trainer.plan, trainer.communicator, trainer.weights)
    return losses + [s.log_probability for s in generator.score_texts(AskedTexts(texts), [1] * len(texts))]


def of_step(c: Config, plan: Plan, step: int) -> Plan:
    """Plan a configuration, whose plan is `plan`, for a step alone: its batch, and its length of sequences. A smaller
    batch may have too few microbatches for pairs, which move the same bytes."""
    if (batch := find_batch_size(c.train, step)) != c.train.global_batch:
        of_batch = replace(c.train, global_batch=batch, ramp_from=0, ramp_samples=0, pair_passes="auto")
        plan = make_plan(replace(c, train=of_batch))
    return plan.plan_of_length(find_sequence_length(c, step))


def describe(c: Config) -> str:
    """Say what of a configuration is not the default, on one line."""
    plain, parts = asdict(Config()), []
    for group, values in asdict(c).items():
        if not isinstance(values, dict):
            parts += [f"{group}={values}"] if values != plain[group] else []
            continue
        parts += [f"{group}.{k}={v}" for k, v in values.items() if v != plain[group][k]]
    if c.pipeline.file and Path(c.pipeline.file).exists():
        parts.append(f"table={Path(c.pipeline.file).read_text().splitlines()}")
    return " ".join(parts)
