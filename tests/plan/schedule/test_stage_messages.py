"""Messages between stages on links that they share, beside what was measured on slow links of eight nodes."""

from __future__ import annotations

import pytest

from platform.launch import compose_config
from platform.plan.generators import generate
from platform.plan.schedule import Kind
from platform.plan.simulate import StageMessages, compute_makespan, makespan_over_links, simulate
from platform.predict.make_plan import make_plan
from platform.predict.step_price import read_hardware, step_price

# Mbit/s -> seconds of a message of 256 KiB, measured seconds of 1F1B and interleaved (benchmarks/RESULTS.md)
MEASURED = {25: (0.0839, 8.656, 9.535), 100: (0.0210, 6.115, 5.249), 1000: (0.0021, 5.614, 4.807)}
FORWARD = 0.08


def step(kind: str, message: float, **more) -> float:
    """Seconds of a step of 8 stages and 16 microbatches."""
    chunks = 2 if kind == "interleaved" else 1
    times = {Kind.FORWARD: FORWARD / chunks, Kind.BACKWARD: 2 * FORWARD / chunks}
    messages = StageMessages(lambda source, sink: message, **more)
    return makespan_over_links(messages, generate(kind, 8, chunks, 16), lambda stage, action: times[action.kind])


@pytest.mark.parametrize("rate", MEASURED)
def test_interleaved_beside_1f1b_is_as_measured(rate):
    """Within 3 %, also at 25 Mbit/s, where interleaving loses, as its messages fill the links."""
    message, *measured = MEASURED[rate]
    alternating, interleaved = (step(kind, message, early=True) for kind in ("1f1b", "interleaved"))
    assert interleaved / alternating == pytest.approx(measured[1] / measured[0], rel=0.03)
    assert (interleaved > alternating) == (rate == 25)
    assert [alternating, interleaved] == pytest.approx(measured, rel=0.05)


def test_links_of_their_own_for_each_message_would_not_say_so():
    """The control: the same simulation in which messages overlap freely."""
    times = {1: {Kind.FORWARD: FORWARD, Kind.BACKWARD: 2 * FORWARD}}
    times[2] = {kind: seconds / 2 for kind, seconds in times[1].items()}
    kinds = ("1f1b", 1), ("interleaved", 2)
    free = [simulate(generate(kind, 8, chunks, 16), times[chunks], 0.0839).makespan for kind, chunks in kinds]
    assert free[1] < 0.9 * free[0]


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb_h1", "gpipe"])
def test_messages_that_take_no_time_change_nothing(kind):
    schedule = generate(kind, 4, 2 if kind == "interleaved" else 1, 8)

    def seconds(stage, action):
        return 1.0 + stage / 8 + (action.kind is not Kind.FORWARD)

    plain = compute_makespan(schedule, seconds)
    assert makespan_over_links(StageMessages(lambda source, sink: 1e-9), schedule, seconds) == pytest.approx(plain)


def test_stages_of_a_node_share_its_adapter():
    assert step("interleaved", 0.06) < step("interleaved", 0.06, link=lambda stage: stage // 4)


def test_the_price_of_a_plan_knows_busy_links():
    """On a slow network the stages of an interleaved plan wait for messages as simulated; on a quick one pass by
    pass."""
    overrides = "model.layers=16", "pipeline=interleaved", "pipeline.stages=4", "pipeline.chunks=2", "tensor=serial"
    config = compose_config(["+experiment=gpt_quick", *overrides, "train.global_batch=64", "train.microbatch=1"])
    plan, cpu = make_plan(config), read_hardware("cpu")
    quick, crowded = (
        step_price(config, plan, cpu.slow_down({"device": 1, "node": times, "network": times})) for times in (1, 300)
    )
    assert sum(crowded.seconds_by_part.values()) == pytest.approx(crowded.seconds)
    assert crowded.seconds_by_part["waiting for stage"] > 3 * quick.seconds_by_part["waiting for stage"]
    # sums that are hidden longer slow what they are hidden under
    assert 1 <= crowded.seconds_by_part["computing"] / quick.seconds_by_part["computing"] < 1.03
