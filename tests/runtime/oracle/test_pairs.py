"""Passes in pairs (train.pair_passes): equal to one process, to the last bit as one after the other, in one order."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from platform.plan.schedule import has_pairs, iterate_turns
from platform.plan.simulate import lower_schedule
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import CollectiveHandle
from platform.runtime.parallel_ops import ParallelOps
from platform.runtime.pipeline import PipelineExecutor, StageFailed
from platform.runtime.turns import PassTurns
from tests.fuzz.gpu_plans import on_strict_nccl
from tests.harness.oracle import MODELS, compare, compute, examine, prove, run, serial, trainer_of, validation_loss
from tests.harness.threads import ThreadGroups, run_threads
from tests.runtime.oracle.test_experts import configured
from tests.runtime.test_whole_tensor_blocks import compiling, fast, traced_blocks

__all__ = ["fast", "traced_blocks"]

TWO = {"data": 2, "microbatch": 1, "global_batch": 8}
PIPED = {**TWO, "layers": 4, "global_batch": 12, "stages": 2}
T = {"tensor": "1d", "axes": {"t": 2}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rows, recomputed": ("all tokens", {**TWO, "layers": 1, "zero": 1, "recompute": "full", "dropout": 0.2}),
    "slots, 1f1b": ("shared", {**PIPED, "layers": 2, "pipeline": "1f1b"}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "slots": ("shared", {**TWO, "dropout": 0.2}),
    "interleaved": ("all tokens", {**PIPED, "pipeline": "interleaved", "chunks": 2}),
    "rows, zero 1": ("all tokens", {**TWO, "zero": 1}),
    "zero 2": ("shared", {**TWO, "zero": 2}),
    "zero 1": ("biased", {**TWO, "zero": 1}),
    "rows, zero 2": ("gpt_oss", {**TWO, "zero": 2}),
    "1d": ("shared", {**TWO, **T}),
    "1d, rows": ("all tokens", {**TWO, **T, "recompute": "full"}),
    "1d, whole experts": ("all tokens", {**TWO, **T, "tensor_experts": "whole"}),
    "3d, recomputed": ("shared", {**TWO, "tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}, "recompute": "full"}),
    "2d, gathered again": ("shared", {**TWO, "microbatch": 2, "global_batch": 16, "tensor": "2d_gather",
                                      "axes": {"r": 2, "c": 2}, "gathered": "again", "recompute": "full"}),
    "both stacks": ("both stacks", TWO),
    "first dense": ("first dense", {**TWO, "recompute": "selective"}),
    "data 4": ("every second layer", {**TWO, "data": 4, "global_batch": 12}),
    "1f1b, 4 stages": ("shared", {**PIPED, "pipeline": "1f1b", "stages": 4, "layers": 6, "global_batch": 24}),
    "1f1b, rows, zero 1": ("all tokens", {**PIPED, "pipeline": "1f1b", "zero": 1, "recompute": "full"}),
    "1f1b, 1d": ("shared", {**PIPED, **T, "pipeline": "1f1b"}),
    "interleaved, zero 1": ("shared", {**PIPED, "pipeline": "interleaved", "chunks": 3, "layers": 6, "zero": 1}),
    "rows of a step with padding": ("all tokens", {**TWO, "global_batch": 7}),
}  # fmt: skip
FEW = [name if i == 0 else pytest.param(name, marks=pytest.mark.full) for i, name in enumerate(CASES | MORE)]
EVERY = [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]


def pairs(name: str):
    kind, how = (CASES | MORE)[name]
    return configured(kind, 2, pair_passes="on", **how)


@pytest.mark.parametrize("name", EVERY)
def test_equals_one_process(name):
    plan, _ = prove(c := pairs(name))
    schedule = build_schedule(c, plan.num_replicas, plan.pairs_passes)
    assert plan.pairs_passes and not plan.turns and all(map(has_pairs, schedule.rows))


class Kept(NamedTuple):
    """What a rank has after some steps, one of which is skipped, and an evaluation."""

    losses: list[float]
    skipped: list[bool]
    moved: list[dict[str, int]]
    weights: dict[str, torch.Tensor]
    launches: Counter


def steps(c, plan, communicator) -> Kept:
    torch.set_num_threads(1)
    trainer = trainer_of(c, plan, communicator)
    communicator.log = []
    limits = {2: 0.0}  # of losses: above it, a step changes nothing
    reports = [trainer.step(step, limit=limits.get(step, torch.inf)) for step in (1, 2, 3)]
    losses = [*(report.loss for report in reports), validation_loss(trainer), trainer.step(4).loss]
    weights = {n: w.detach().clone() for n, w in trainer.weights.master.items()}
    return Kept(losses, [r.skipped for r in reports], [dict(r.comm_bytes) for r in reports], weights,
                Counter((launch.op, launch.axes) for launch in communicator.log))  # fmt: skip


@pytest.mark.parametrize(
    "name", [EVERY[0], *(pytest.param(name, marks=pytest.mark.full) for name in [*CASES, *MORE][1:])]
)
def test_no_bit_differs_from_passes_one_after_the_other(name):
    """Over steps with one that is skipped, and an evaluation; as many collectives, and bytes."""
    c = pairs(name)
    c.train.steps = 10
    paired = make_plan(c)
    c.train.pair_passes = "off"
    alone = make_plan(c)
    assert paired.pairs_passes and not alone.pairs_passes
    kept = [run_threads(plan.mesh, lambda communicator, p=plan: steps(c, p, communicator)) for plan in (paired, alone)]
    for ours, theirs in zip(*kept, strict=True):
        assert ours.losses == theirs.losses and ours.skipped == [False, True, False]
        assert ours.moved == theirs.moved and ours.launches == theirs.launches
        assert ours.weights.keys() == theirs.weights.keys()
        assert all(torch.equal(w, theirs.weights[n]) for n, w in ours.weights.items())


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_whole_blocks_wait_in_pairs_too(recompute, traced_blocks):
    """Their launches and waits are operators of a graph, in the same order as function by function."""
    c = compiling(**MODELS["experts"], **TWO, experts_of=2, pair_passes="on", layers=1, recompute=recompute)
    plan, results = run(c)
    assert plan.pairs_passes and traced_blocks and all(traced_blocks)
    examine(c, plan, results)
    c.train.compile = "off"
    for whole, by_function in zip(results, run(c)[1], strict=True):
        assert Counter(whole.log) == Counter(by_function.log)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["rows, recomputed", pytest.param("1f1b, 1d", marks=pytest.mark.full)])
def test_groups_as_strict_as_nccl_run_them(name, early):
    """Whose operations read and write as late as they may, or as early."""
    c = pairs(name)
    plan = make_plan(c)
    examine(c, plan, on_strict_nccl(c, plan, lambda communicator: compute(c, plan, communicator), early))


class Products(TorchDispatchMode):
    """Notes products of matrices of a pass."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
            self.note("product")
        return function(*arguments, **(keywords or {}))


def events_of_steps(c, monkeypatch) -> list[list[tuple[str, Any]]]:
    """What each rank does in a step: launches and waits of exchanges, by number, and products, each with its pass."""
    events: dict[int, list[tuple[str, Any]]] = {}
    execute, issue, wait = PipelineExecutor._execute_action, ThreadGroups._issue_collective, CollectiveHandle.wait

    def execute_noting(self, step):
        rank = self.communicator.rank
        with Products(lambda what: events.setdefault(rank, []).append((what, step.name))):
            execute(self, step)

    def pass_of(communicator) -> str:
        return next((n for n in communicator.clock.open_sections[::-1] if n[0].isdigit()), "")

    def issue_noting(self, what, *rest):
        handle = issue(self, what, *rest)
        if what.op.startswith("all_to_all") and self.log is not None:
            handle.noted = self, (len(events.setdefault(self.rank, [])), pass_of(self))
            events[self.rank].append(("launch", handle.noted[1]))
        return handle

    def wait_noting(self):
        result = wait(self)
        if communicator_and_key := getattr(self, "noted", None):
            communicator, key = communicator_and_key
            events[communicator.rank].append(("wait", key))
        return result

    monkeypatch.setattr(PipelineExecutor, "_execute_action", execute_noting)
    monkeypatch.setattr(ThreadGroups, "_issue_collective", issue_noting)
    monkeypatch.setattr(CollectiveHandle, "wait", wait_noting)
    plan = make_plan(c)

    def step(communicator):
        trainer = trainer_of(c, plan, communicator)
        communicator.log = []
        trainer.step(1)

    run_threads(plan.mesh, step)
    return [events[rank] for rank in sorted(events)]


def covered_exchanges(events) -> tuple[Counter, Counter]:
    """By pass the number of exchanges, and of those between whose launch and wait another pass multiplies."""
    every, covered = Counter(), Counter()
    for i, (what, key) in enumerate(events):
        if what == "launch":
            end = events.index(("wait", key))
            others = {name for w, name in events[i:end] if w == "product" and name != key[1]}
            every[key[1]] += 1
            covered[key[1]] += bool(others)
    return every, covered


@pytest.mark.parametrize("kind", [pytest.param("shared", marks=pytest.mark.full), "all tokens"])
def test_another_pass_multiplies_between_launch_and_wait(kind, monkeypatch):
    """Of every exchange of tokens, two of each layer and pass, but in the first and in the last pass, which are alone;
    numbers of rows, and weights of copies, are waited for at once."""
    c = configured(kind, 2, pair_passes="on", **TWO)
    of_ranks = events_of_steps(c, monkeypatch)
    shapes = [[(w, k if w == "product" else k[1]) for w, k in events] for events in of_ranks]
    assert all(a == b for a, b in pairwise(shapes)), "one order on all ranks"
    for every, covered in map(covered_exchanges, of_ranks):
        alone = {"0F0": 0, "0B3": 0}
        assert covered == dict.fromkeys(every, 2 * c.model.layers) | alone
        small = {"shared": (0, 0), "all tokens": (2, 1)}[kind]  # of a layer: numbers and weights, weights' gradients
        assert [every[name] // c.model.layers - 2 for name in ("0F2", "0B2")] == [*small]


@pytest.mark.full
def test_negative_control_passes_one_after_the_other_cover_no_exchange(monkeypatch):
    c = configured("shared", 2, pair_passes="off", **TWO)
    for every, covered in map(covered_exchanges, events_of_steps(c, monkeypatch)):
        assert sum(every.values()) and not sum(covered.values())


def test_negative_control_a_pass_that_keeps_the_state_of_the_other(monkeypatch):
    """What is computed again in a backward pass draws the dropout of its own microbatch."""
    c = pairs("rows, recomputed")
    monkeypatch.setattr(ParallelOps, "swap_pass_state", lambda self, state: state)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, *run(c), serial(c))


@pytest.mark.parametrize("fails", [pytest.param("0F2", marks=pytest.mark.full), "0B1"])
def test_a_failure_in_a_pair_ends_both_passes(fails, monkeypatch):
    """As the failure of a pass that is alone: named, raised on all ranks, and no thread is left."""
    c = configured("all tokens", 2, pair_passes="on", **TWO)
    launch, before = ThreadGroups.launch_all_to_allv, threading.active_count()

    def fail_there(self, *rest, **more):
        if self.rank == 1 and fails in self.clock.open_sections:
            raise OSError("no more of it")
        return launch(self, *rest, **more)

    monkeypatch.setattr(ThreadGroups, "launch_all_to_allv", fail_there)
    with pytest.raises(StageFailed, match=rf"rank 1 \(stage 0\) failed at {fails}: no more of it"):
        run(c)
    assert threading.active_count() == before


def test_what_interrupts_a_waiting_pass_ends_the_other(monkeypatch):
    """A signal whose handler raises in the host's main thread, while the other pass has the turn."""
    ran = []
    turns = PassTurns(lambda state: state)

    def first():
        monkeypatch.setattr(turns, "_await_turn", interrupted)
        turns.yield_turn()

    def interrupted(number, wait=turns._await_turn):
        if number:
            return wait(number)
        raise KeyboardInterrupt

    def second():
        ran.append("begins")
        turns.yield_turn()
        ran.append("goes on")

    with ThreadPoolExecutor(1) as helper, pytest.raises(KeyboardInterrupt):
        turns.run_both(first, second, helper)
    assert "goes on" not in ran


def test_two_of_a_pair_stand_side_by_side_in_a_lowered_row():
    c = pairs("slots, 1f1b")
    for row in lower_schedule(build_schedule(c, 2, True)):
        for turn in iterate_turns(row):
            assert len(turn) == 1 or [a.kind.value for a in turn] == ["F", "B"]


def test_a_timeline_shows_the_passes_of_a_pair_in_pieces():
    """Which do not overlap, and have their waits inside; a clock books each second once."""
    c = configured("all tokens", 2, pair_passes="on", **TWO)
    c.monitor.timeline = True
    plan = make_plan(c)
    for report in run_threads(plan.mesh, lambda communicator: trainer_of(c, plan, communicator).step(1)):
        sections = report.timeline.sections
        passes = sorted((s.start, s.end, s.section) for s in sections if s.section[0].isdigit())
        assert all(before[1] <= after[0] for before, after in pairwise(passes))
        pieces = Counter(name for *_, name in passes)
        assert pieces["0F0"] == pieces["0B3"] == 1 and min(pieces[name] for name in ("0F1", "0B0", "0F3")) > 2
        waits = [s for s in sections if s.section == "exposed_comm" and s.end <= passes[-1][1]]
        assert waits and all(any(start <= w.start and w.end <= end for start, end, _ in passes) for w in waits)
        assert sum(report.seconds.values()) == pytest.approx(report.step_seconds)
