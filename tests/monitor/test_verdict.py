"""The verdict on a run names the culprit from what the run recorded: a row for each way in which one goes wrong."""

import math
from dataclasses import replace

import pytest

from platform.monitor import events
from platform.monitor.verdict import Evidence, judge_run
from platform.monitor.verdict.evidence import ALIVE, GONE, STOPPED

WORKERS = [
    {"rank": r, "number": r, "node": f"n{r}", "coordinates": {"data": r // 2, "t": r % 2}, "pid": 9} for r in range(4)
]
START = events.Starting(world_size=4, cluster="ray", device="cpu")
MESH = events.Forming(world_size=4, mesh={"data": 2, "t": 2}, reason="", alive=4)
UP = [START, MESH, events.Formed(workers=WORKERS), events.Running(step=1, parameters_per_worker=1)]
GOES = [*UP, events.FirstStep(step=1)]
TRACEBACK = 'Traceback\n  File "a.py", line 3, in step\n    x\n  File "b.py", line 7, in pass_\n    y\nValueError: bad'


def failure(kind, cause, rank=3, **more):
    at = WORKERS[rank]
    own = {"number": rank, "rank": rank, "coordinates": at["coordinates"], "node": at["node"], "log": f"w-{rank}.log"}
    return events.Failure(**own, kind=kind, cause=cause, method="step(5)", step=5, **more)


def gave_up(cause):
    return events.GaveUp(cause=cause, step=4, saved=0)


def saved(step, directory="step-4"):
    return events.Checkpoint(step=step, directory=directory, bytes=1, seconds=1.0)


def unwritten(reason, again=False):
    return events.CheckpointFailed(step=4, directory="step-4", attempt=1, reason=reason, again=again)


def spike(loss, norm=1.0, limit=8.0, policy="stop"):
    return events.Spike(step=5, loss=loss, grad_norm=norm, limit=limit, policy=policy, attempt=1)


def rows(seconds, usual, part, slow=0.0, count=20):
    """Rows of steps that took `usual` seconds, the last eight `seconds` more in one `part`."""
    steps = []
    for step in range(1, count + 1):
        late = seconds if step > count - 8 else slow
        parts = {"data": 0.0, "forward": usual, "exposed_comm": 0.0, "checkpoint": 0.0} | {part: late}
        steps.append({"step": step, "step_seconds": usual + late, "seconds": parts, "generation": 1})
    return steps


def gauged(delayed, threads, **more):
    """Row of a step with what its workers' gauges showed."""
    ranges = {"delayed": delayed, "threads": threads} | more
    return {"step": 4, "workers": {f"{gauge}/median": number for gauge, number in ranges.items()}}


DIED = failure("died", "the process was killed by SIGKILL")
HUNG = failure(
    "hung", "3.1 s at step(5): backward", seen=["rank 1 waits in all_reduce over data"], stack=["m.py:3 in f"]
)
CASES = {  # events after a start, what else is known -> why, rank, words of the line
    "killed": ([*GOES, DIED], {}, "died", 3, "rank 3 [data1 t1] on n3 (worker 3) died in step(5)"),
    "killed, the end": ([*GOES, DIED, gave_up(f"x {DIED.cause}")], {}, "died", 3, "the run gave up: rank 3"),
    "hung": ([*GOES, HUNG], {}, "hung", 3, "backward; the others re-form"),
    "its own error": ([*GOES, failure("failed", TRACEBACK, 1)], {}, "failed", 1, "ValueError: bad"),
    "no memory": ([*GOES, failure("failed", "MemoryError")], {}, "memory", 3, "had no memory left"),
    "lost peers": (
        [*GOES, failure("failed", "RuntimeError: /gloo/x: closed by peer")],
        {},
        "lost peers",
        3,
        "lost its",
    ),
    "damaged": ([*GOES, failure("damaged", "its w is not")], {}, "damaged", 3, "has damaged memory"),
    "undecided": (
        [*GOES, events.Undecided(step=5, tensors=[[[0, 2], "master.w"]]), gave_up("w of a and b differ, and")],
        {},
        "damaged",
        None,
        "rank 0 [data0 t0] on n0 (worker 0) and rank 2",
    ),
    "loss": ([*GOES, spike(math.nan), gave_up("step 5 has a loss of nan")], {}, "loss", None, "a loss of nan"),
    "gradient": ([*GOES, spike(1.0, math.inf, policy="skip")], {}, "loss", None, "a gradient norm of inf"),
    "high loss": ([*GOES, spike(9.0)], {}, "loss", None, "above the limit of 8"),
    "own error": ([*GOES, gave_up("KeyError: 'a'")], {}, "driver", None, "gave up after step 4: KeyError"),
    "stopped": ([*GOES, events.Stopped(signal="SIGTERM", step=4)], {}, "stopped", None, "nothing of it is saved"),
    "drained": ([*GOES, events.Drained(signal="SIGTERM", step=4, saved=4)], {}, "drained", None, "goes on"),
    "notice": (
        [*GOES, events.Notice(numbers=[2]), events.Drained(signal="a notice", step=4, saved=4)],
        {},
        "drained",
        None,
        "rank 2 [data1 t0] on n2",
    ),
    "no places": ([START, events.NoPlaces(cause="4 needed, 2 there")], {}, "places", None, "4 needed, 2 there"),
    "cluster lost": ([*GOES, events.ClusterLost(cause="Ray is silent", step=4)], {}, "cluster", None, "Ray is silent"),
    "too few, the end": (
        [*GOES, DIED, gave_up("3 workers there, and elastic.min_workers=4; no more can come")],
        {},
        "places",
        None,
        "elastic.min_workers=4; no more can come; rank 3 [data1 t1]",
    ),
    "too few": ([*GOES, DIED, events.Waiting(alive=3, reason="needs 4")], {}, "places", None, "rank 3 [data1 t1]"),
    "unsaved": ([*GOES, unwritten("no space"), events.Unsaved(step=9)], {}, "storage", None, "no space"),
    "save fails": ([*GOES, unwritten("no space", again=True)], {}, "storage", None, "after step 4 cannot be written"),
    "refused": ([START, events.Refused(reasons=["model.d_ff=3: x"])], {}, "refused", None, "model.d_ff=3"),
    "driver gone": (GOES, {"driver": GONE, "owner": "process 7 on n0"}, "driver", None, "process 7 on n0 is gone"),
    "driver stopped": (GOES, {"driver": STOPPED, "owner": "process 7 on n0"}, "driver", None, "stopped by a signal"),
    "slow worker": ([*GOES, events.Slow(number=2, rank=2, node="n2", ratio=3.0)], {}, "slow", 2, "3.0 times"),
    "slow outside of passes": (
        [*GOES, events.Slow(number=2, rank=2, node="n2", ratio=3.0, section="other")],
        *({}, "slow", 2, "median, mostly in work outside of passes, update and data"),
    ),
    "busy machine": (GOES, {"rows": [gauged(0.7, 2.0)]}, "slow", None, "70% of its time, and its 2 threads for each"),
    "busy machine, slow steps": (
        *(GOES, {"rows": [*rows(0.5, 0.1, "forward"), gauged(0.7, 2.0)]}),
        *("slow", None, "cluster.threads=1"),
    ),
    "slow link": (GOES, {"rows": rows(0.5, 0.1, "exposed_comm")}, "link", None, "waits for collectives"),
    "slow data": (GOES, {"rows": rows(0.5, 0.1, "data")}, "data", None, "waits for data"),
    "always slow data": (GOES, {"rows": rows(0.5, 0.1, "data", slow=0.5)}, "data", None, "waits for data"),
    "slow disk": (GOES, {"rows": rows(0.5, 0.1, "checkpoint")}, "storage", None, "waits for what is saved"),
}


def stamped(journal):
    return [replace(event, time=100.0 + i, generation=1) for i, event in enumerate(journal)]


@pytest.mark.parametrize("name", CASES)
def test_the_culprit_is_named(name):
    journal, known, why, rank, words = CASES[name]
    verdict = judge_run(Evidence(stamped(journal), **{"driver": ALIVE, "now": 200.0, **known}))
    assert verdict, "nothing is said"
    assert (verdict.why, verdict.rank) == (why, rank) and words in verdict.line, verdict.line
    assert verdict.line.isprintable() and verdict.plain_fields()["attention"] is (why != "drained")


@pytest.mark.parametrize("fault, of_others", [("5:kill:3:backward", False), ("5:kill:2", True), ("4:kill:3", True)])
def test_a_fault_that_the_run_injected_is_blamed_on_nobody_else(fault, of_others):
    injected = events.Injected(step=int(fault[0]), faults=[fault])
    verdict = judge_run(Evidence(stamped([*GOES, injected, DIED]), driver=ALIVE, now=200.0))
    assert verdict and any("a user, the scheduler" in line for line in verdict.details) is of_others
    assert (f"on purpose: elastic.faults={fault}" in verdict.details) is not of_others


def test_a_spike_on_purpose_says_so():
    journal = [*GOES, events.Injected(step=5, faults=["5:nan:1"]), spike(1.0, math.nan)]
    verdict = judge_run(Evidence(stamped(journal), driver=ALIVE, now=200.0))
    assert verdict and verdict.details[1:] == ["on purpose: elastic.faults=5:nan:1"]


@pytest.mark.parametrize("delayed, threads", [(0.7, 1.0), (0.2, 2.0), (math.nan, 2.0), ("0.7", 2.0), (0.7, None)])
def test_no_threads_wait_for_each_other(delayed, threads):
    """One thread waits for no other, and a file of numbers may say anything."""
    for row in (gauged(delayed, threads), {"step": 4, "workers": [1]}, gauged(0.7, 2.0, gpu=0.9)):
        assert judge_run(Evidence(stamped(GOES), [row], driver=ALIVE, now=200.0)) is None


def test_gauges_of_a_slow_worker_far_from_the_others_are_told():
    slow = events.Slow(number=2, rank=2, node="n2", ratio=3.0)
    workers = {"temperature/median": 58.0, "temperature/max": 91.0, "gpu/median": 0.97, "gpu/max": 0.99}
    workers |= {"power/median": 640.0, "power/min": 350.0}
    row = {"step": 4, "workers": workers, "worker_ranks": {"temperature/max": 2, "gpu/max": 2, "power/min": 1}}
    told = "highest temperature of all workers: 91 °C, the median is 58 °C"
    for its, lines in ((row, [told]), ({"step": 4, "workers": 3}, []), ({**row, "workers": {"gpu/max": "NaN"}}, [])):
        verdict = judge_run(Evidence(stamped([*GOES, slow]), [its], driver=ALIVE, now=200.0))
        assert verdict.details == [*lines, "elastic.replace_slow=true gives its seat to a spare"]


def test_stacks_and_witnesses_are_told():
    assert judge_run(Evidence(stamped([*GOES, HUNG]))).stack == ["m.py:3 in f"]
    assert "seen: rank 1 waits in all_reduce over data" in judge_run(Evidence(stamped([*GOES, HUNG]))).details
    assert judge_run(Evidence(stamped([*GOES, failure("failed", TRACEBACK)]))).stack == [
        "a.py:3 in step",
        "b.py:7 in pass_",
    ]


@pytest.mark.parametrize(
    "journal, known",
    [
        ([], {}),
        (GOES, {}),
        (GOES, {"rows": rows(0.1, 0.1, "forward", slow=0.1)}),
        ([*GOES, DIED, events.Released(lost=[3], alive=3, seconds=0.1), *UP[1:], events.FirstStep(step=5)], {}),
        ([*GOES, unwritten("again"), saved(4)], {}),
        ([*GOES, events.Done(step=9)], {"driver": GONE}),
        ([*GOES, events.Slow(number=2, rank=2, node="n2", ratio=3.0), MESH], {}),
    ],
)
def test_nothing_is_wrong(journal, known):
    assert judge_run(Evidence(stamped(journal), **{"driver": ALIVE, "now": 200.0, **known})) is None
