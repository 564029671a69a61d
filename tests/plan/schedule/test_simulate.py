"""Bubble, memory and idle time of the shipped schedules against their closed forms."""

import itertools

import pytest

from platform.plan.generators import generate
from platform.plan.schedule import Kind, Schedule, ScheduleError
from platform.plan.simulate import NOMINAL, lower_schedule, simulate
from tests.plan.blocking import replay_blocking

UNIT = dict.fromkeys(NOMINAL, 1.0)


def cases(stages, chunks, microbatches):
    """(kind, p, v, m) of everything that is legal in these ranges."""
    for p, v, m in itertools.product(range(1, stages + 1), range(1, chunks + 1), range(1, microbatches + 1)):
        yield from ((kind, p, v, m) for kind in ("gpipe", "1f1b") if v == 1)
        yield from ((kind, p, v, m) for kind in ("interleaved", "zb_h1") if v == 1 or m >= p)


def group_of(p: int, m: int) -> int:
    return next((n for n in range(p, m) if m % n == 0), m)


def check(kind: str, p: int, v: int, m: int) -> None:
    """Everything that is known about one schedule, against its table."""
    schedule = generate(kind, p, v, m)
    replay_blocking(lower_schedule(schedule))
    run = simulate(schedule)
    held = (v - 1) * group_of(p, m)
    warmup = {
        "gpipe": lambda r: m,
        "1f1b": lambda r: p - r - 1,
        "interleaved": lambda r: (2 if v > 1 else 1) * (p - r - 1) + held,
        "zb_h1": lambda r: p - 1 + held,  # r of them wait for their weight gradient
    }[kind]
    pending = [[(a.kind is Kind.INPUT) - (a.kind is Kind.WEIGHT) for a in row] for row in schedule.rows]
    pending = [max(itertools.accumulate(row)) for row in pending]  # weight gradients
    assert run.peak_live == tuple(min(warmup(r) + 1, m * v) for r in range(p))
    if kind == "zb_h1":
        # 1F1B's bubble is (p-1)(F+I+W); split off, W fills two of those three where there are enough of them
        assert run.bubble == pytest.approx((p - 1 + max(0, p - m)) / (3 * v * m))
        assert pending == [min(r + 1, m * v) for r in range(p)]
    else:
        assert run.bubble == pytest.approx((p - 1) / (v * m))
        assert simulate(schedule, UNIT).bubble == pytest.approx((p - 1) / (v * m))
        assert pending == [0] * p
    assert run.busy == pytest.approx([3 * v * m] * p)


def test_closed_forms():
    tried = [check(*case) for case in cases(stages=5, chunks=3, microbatches=12)]
    assert len(tried) > 400


@pytest.mark.full
def test_closed_forms_of_thousands():
    tried = [check(*case) for case in cases(stages=8, chunks=4, microbatches=40)]
    assert len(tried) > 2000


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 0.5), (1.0, 1.1, 0.9), (2.0, 3.0, 1.0)])
def test_zero_bubble_with_unequal_times(forward, inputs, weights):
    """ZB-H1's bubble is (p-1)(F + I - W) of the paper, where W is not the longest."""
    p, m = 4, 12
    times = {Kind.FORWARD: forward, Kind.INPUT: inputs, Kind.WEIGHT: weights}
    run = simulate(generate("zb_h1", p, 1, m), times)
    assert run.makespan - m * sum(times.values()) == pytest.approx((p - 1) * (forward + inputs - weights))


def test_a_longer_group_would_keep_the_bubble_and_hold_more():
    """Why the smallest group is taken: Megatron's tables for 8 microbatches in groups of 4, and for one group of 7."""
    run, prime = simulate(generate("interleaved", 4, 2, 8)), simulate(generate("interleaved", 4, 2, 7))
    assert run.peak_live == (11, 9, 7, 5) and prime.peak_live == (14, 12, 10, 8)
    assert prime.bubble == pytest.approx(3 / 14)


def test_transfers_delay_but_keep_no_stage_busy():
    schedule = generate("1f1b", 2, 1, 1)
    run = simulate(schedule, transfer=0.5)
    assert [(str(e.action), e.start, e.end) for e in run.timeline] == [
        ("0F0", 0.0, 1.0),
        ("1F0", 1.5, 2.5),
        ("1B0", 2.5, 4.5),
        ("0B0", 5.0, 7.0),
    ]
    assert run.makespan == 7.0 and run.busy == (3.0, 3.0)
    alone = generate("interleaved", 1, 2, 2)
    assert simulate(alone, transfer=0.5).makespan == simulate(alone).makespan


def test_times_may_depend_on_stage_and_chunk():
    """The slowest stage paces the pipeline: m times its own time, and the others' once."""
    run = simulate(generate("1f1b", 4, 1, 16), lambda stage, action: 2.0 if action.chunk == 3 else 1.0)
    assert run.makespan == 16 * 4 + 3 * 2
    assert run.busy == (32, 32, 32, 64) and run.bubble == pytest.approx(6 / 64)


def test_the_timeline_holds_every_action_once_and_no_stage_does_two_at_a_time():
    schedule = generate("zb_h1", 3, 2, 6)
    run = simulate(schedule, transfer=0.3)
    for stage, row in enumerate(schedule.rows):
        own = [e for e in run.timeline if e.stage == stage]
        assert tuple(e.action for e in own) == row
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))


def test_a_deadlock_is_named():
    good = generate("1f1b", 2, 1, 2)
    crossed = Schedule("crossed", 2, 1, 2, (good.rows[0], good.rows[1][::-1]))
    with pytest.raises(ScheduleError, match="deadlock: .*stage 1 is stuck at 1B1, which waits for 1F1"):
        simulate(crossed)
