"""The verdict on a standstill, from what the driver sees of its workers: a row for each way in which they stand."""

from dataclasses import replace

import pytest

from platform.monitor.journal import LiveState, SeenLink, SeenWorker
from platform.monitor.verdict import Evidence, judge_run
from platform.monitor.verdict.evidence import ALIVE
from platform.runtime.progress import Activity, Wait
from tests.monitor.test_verdict import GOES, WORKERS, saved, stamped

NOW = 1000.0
SUM = Wait("all_reduce", "gradients", ["data"])


def beat(section="exposed_comm", waiting=True, seconds=5.0, busy=0.0, wait=SUM, **more):
    stack = ["train/trainer.py:7 in _forward_backward"]
    return Activity(
        "step(5)", section, waiting, seconds, busy=busy, wait=wait if waiting else None, stack=stack, **more
    )


def workers(culprit=None, others=None, owes=None, process="", nodes=2):
    """Four workers in a step, of which rank 3 does something else than the others."""
    seen = []
    for worker in WORKERS:
        rank, node = worker["rank"], f"n{worker['rank'] // nodes}"
        mine = culprit if rank == 3 else others or beat()
        silent = owes if rank == 3 else None
        seen.append(SeenWorker(rank, rank, node, owes=silent, process=process if silent else "", activity=mine))
    return seen


def live(workers=(), links=(), elapsed=6.0, usual=0.5, call="step(5)", **more):
    return LiveState(
        time=NOW - 1, generation=1, doing="training", step=4, usual=usual, call=call, called=NOW - 1 - elapsed,
        workers=list(workers), links=list(links), **more,
    )  # fmt: skip


def link(source, target, rate=1e7, queued=0, quiet=0.0, best=1e7):
    return SeenLink(f"n{source}", f"10.0.0.{source}", f"10.0.0.{target}", rate, best, queued, quiet)


ALL = [(source, target) for source in range(3) for target in range(3) if source != target]
# bytes flow from n0 to n2 to n1 to n0; n2 has become slow, and before that n2 to n1 was never held up by the network
SLOW_RING = [link(0, 2, 1e6, best=6e7), link(1, 0, 1e8, best=1e8), link(2, 1, 2e6, best=3e6)]
SEEN_BY_ONE = [*SLOW_RING[:2], link(2, 1, None, best=None)]
TO_N3 = [link(0, 3, 1e6, best=6e7), link(1, 0, 1e8, best=1e8), link(3, 1, None, best=None)]
CASES = {  # what is seen -> why, rank, words of the line
    "blocked": (live(workers(beat("backward", False, 5.0))), "hung", 3, "blocked for 5.0 s in backward"),
    "stopped": (live(workers(owes=3.0, process="T")), "hung", 3, "its process is stopped by a signal"),
    "holds the interpreter": (live(workers(owes=3.0, process="S")), "hung", 3, "something holds its interpreter"),
    "silent elsewhere": (live(workers(owes=3.0)), "hung", 3, "its node is cut off"),
    "at work": (live(workers(beat("forward", False, 5.0, busy=1.0))), "slow", 3, "at work in forward while 3 others"),
    "blocked at data": (live(workers(beat("data", False, 5.0))), "data", 3, "waits in step(5) for its data"),
    "blocked at a disk": (live(workers(beat("checkpoint", False, 5.0))), "storage", 3, "for its storage"),
    "a device": (
        live(workers(beat("synchronize", device="backward"), beat("synchronize", device="reduce", device_waits=True))),
        "hung",
        3,
        "its device is at work in backward",
    ),
    "a lost message": (
        live(workers(beat())),
        "link",
        None,
        "wait for each other, in all_reduce over data",
    ),
    "a cut link": (
        live(workers(beat()), [link(0, 1), link(1, 0, queued=9, quiet=4.0)]),
        "link",
        None,
        "a link is cut: 9 bytes between n1 and n0",
    ),
    "a cut node": (
        live(workers(owes=3.0), [link(a, b, queued=9, quiet=4.0 if 2 in (a, b) else 0.1) for a, b in ALL]),
        "link",
        None,
        "the network of n2 is cut",
    ),
    "a slow node": (
        live(
            links=[link(a, b, 1e5 if 2 in (a, b) else 1e7) for a, b in [*ALL, (0, 3), (3, 0), (1, 3), (3, 1)]], call=""
        ),
        "link",
        None,
        "the network of n2 is slow: 0.8 Mbit/s",
    ),
    "a slow direction": (
        live(links=[link(a, b, 1e5 if (a, b) == (2, 0) else 1e7) for a, b in ALL], call=""),
        "link",
        None,
        "is slow: 0.8 Mbit/s from n2 to n0",
    ),
    "a slow node in a ring": (
        live(links=SLOW_RING, call=""),
        "link",
        None,
        "the network of n2 is slow: 8 Mbit/s",
    ),
    "a slow node of a ring in which all wait": (live(workers(beat()), SLOW_RING), "link", None, "the network of n2"),
    "a slow node in a ring, seen by one link": (
        live(links=SEEN_BY_ONE, call=""),
        "link",
        None,
        "a link of n2 is slow",
    ),
    "a node whose slow network holds up its answers": (
        live(workers(owes=3.0, nodes=1), TO_N3),
        "link",
        None,
        "a link of n3 is slow",
    ),
    "a silent worker at a network that is slow elsewhere": (
        live(workers(owes=3.0), SLOW_RING),
        "hung",
        3,
        "its node is cut off",
    ),
    "a stopped worker at a slow network": (
        live(workers(owes=3.0, process="T", nodes=1), TO_N3),
        "hung",
        3,
        "its process is stopped by a signal",
    ),
    "a node slow from the start": (
        live(workers(beat()), [link(a, b, 1e5 if 2 in (a, b) else 1e7, best=1e5) for a, b in ALL]),
        "link",
        None,
        "the network of n2 is slow: 0.8 Mbit/s",
    ),
    "a slow save": (live(saving=4, saving_since=NOW - 61.0, call=""), "storage", None, "has taken 60 s, 1.0 s for"),
}


def known(sight, **more):
    return Evidence(stamped([*GOES, saved(2)]), **{"driver": ALIVE, "now": NOW, "live": sight, **more})


@pytest.mark.parametrize("name", CASES)
def test_the_culprit_is_named_while_it_lasts(name):
    sight, why, rank, words = CASES[name]
    verdict = judge_run(known(sight))
    assert verdict, "nothing is said"
    assert (verdict.why, verdict.rank) == (why, rank) and words in verdict.line, verdict.line


def test_a_whole_node_is_named():
    silent = [replace(worker, owes=3.0, activity=None) for worker in workers() if worker.rank > 1]
    verdict = judge_run(known(live([*silent, *workers()[:2]])))
    assert verdict.node == "n1" and "all 2 workers on n1 give no sign of life" in verdict.line


def test_witnesses_and_stack():
    verdict = judge_run(known(live(workers(beat("backward", False, 5.0)))))
    assert verdict.details == ["seen: ranks 0, 1 and 2 waiting in all_reduce over data (gradients)"]
    assert verdict.stack == ["train/trainer.py:7 in _forward_backward"] and verdict.since == NOW - 6.0


def test_a_silent_driver_is_named():
    verdict = judge_run(known(replace(live(call=""), time=NOW - 30, doing="saving"), wrote=NOW - 40, owner="process 7"))
    assert verdict.why == "driver" and "written nothing for 30 s, process 7" in verdict.line


@pytest.mark.parametrize(
    "sight",
    [
        live(workers(beat("forward", False, 1.0, busy=1.0)), elapsed=1.0),
        live(workers(beat("forward", False, 5.0, busy=1.0)), elapsed=5.0, usual=4.0),
        live(workers(beat("compile f", False, 8.0, preparing=True)), usual=None, elapsed=8.0),
        live(workers(), elapsed=6.0, call="build(...)"),
        live(workers(owes=1.0)),  # may be the one that all others wait for
        live(workers(beat(), owes=1.0)),
        live(links=[link(a, b, 1e5 if 2 in (a, b) else 1e7, best=1e5) for a, b in ALL], call=""),
        live(saving=4, saving_since=NOW - 3.0, call=""),
    ],
)
def test_patience(sight):
    assert judge_run(known(sight)) is None
