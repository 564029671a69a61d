"""What happened, for people."""

from math import nan

from platform.monitor import events
from platform.monitor.goodput import tell_story
from tests.harness.happenings import happening

JOURNAL = [
    happening(0.0, "starting"),
    happening(1.0, "done", step=3),
    happening(100.0, "starting"),
    happening(103.0, "forming", generation=2),
    happening(103.5, "formed", generation=2),
    happening(104.25, "first_step"),
    happening(110.0, "failure"),
    happening(110.125, "released"),
    happening(110.5, "forming", generation=3, world_size=1, mesh={"stage": 1, "data": 1}),
    happening(111.0, "restored"),
    happening(112.0, "first_step", step=9),
    events.Released(time=113.0),
    happening(113.0, "done"),
]


def test_a_spike_is_told_by_the_number_that_is_one():
    spikes = [events.Spike(step=4, loss=7.5, grad_norm=norm, limit=9.0, policy="stop", attempt=1) for norm in (nan, 1)]
    told = tell_story([happening(100.0, "starting"), *spikes]).splitlines()[1:]
    assert [line.partition(" has ")[2] for line in told] == ["a gradient norm of nan: stop", "a loss of 7.5: stop"]


def test_a_fault_is_told_in_words():
    injected = events.Injected(step=20, faults=["20:kill:3:backward", "20:nan:0"])
    told = tell_story([happening(100.0, "starting"), injected]).splitlines()[1:]
    assert [line.strip().partition("  ")[2] for line in told] == [
        "injected fault in step 20: kill rank 3 in backward, nan rank 0"
    ]


def test_the_last_driver_is_told():
    assert tell_story(JOURNAL).splitlines() == [
        "what happened (seconds since the start)",
        "     3.00  generation 2: 4 workers, data 2 x t 2",
        "     4.25  step 1 is done",
        "    10.00  rank 3 on n died in step(9): by SIGKILL",
        "    10.12  released 3 workers in 0.12 s",
        "    10.50  generation 3: 1 worker, 1",
        "    11.00  goes on after step 8, from memory in 0.25 s",
        "    12.00  step 9 is done",
        "    13.00  done: step 10",
    ]
