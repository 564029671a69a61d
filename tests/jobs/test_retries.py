"""The retry rule: which end of a driver is followed by another one, and what that costs."""

import json
import signal

import pytest

from platform.boundary.schema import Malformed
from platform.jobs.supervisor import DRIVERS, DriverEnd, count_spent_retries, decide_job_status, read_drivers

TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL
AGAIN = None
TABLE = [  # end of the driver -> on Kubernetes, on Slurm, a retry?
    (DriverEnd(0), 0, 0, False),
    (DriverEnd(1), 1, 1, False),  # it gave up, and said so
    (DriverEnd(2, recorded=False), 2, 2, False),  # refused: nothing was started
    (DriverEnd(2, advanced=True), 2, 2, False),
    (DriverEnd(2, advanced=True, has_steps=True), 2, 2, False),  # it met a mistake in a later step
    (DriverEnd(2, recorded=False, has_steps=True), AGAIN, AGAIN, True),  # the same command worked before
    (DriverEnd(69, recorded=False), AGAIN, AGAIN, True),  # a storage without an answer
    (DriverEnd(69, advanced=True, over=True), 75, 75, True),
    (DriverEnd(69, asked=TERM), 143, 143, True),
    (DriverEnd(75, advanced=True), AGAIN, 75, False),
    (DriverEnd(75), AGAIN, 75, True),  # no step: not for ever
    (DriverEnd(75, advanced=True, over=True), 75, 75, False),
    (DriverEnd(75, asked=USR1, advanced=True), 75, 75, False),
    (DriverEnd(75, asked=TERM, advanced=True), 143, 143, False),
    (DriverEnd(0, asked=TERM), 0, 0, False),
    (DriverEnd(1, asked=TERM), 143, 143, False),
    (DriverEnd(-KILL, advanced=True), AGAIN, AGAIN, True),  # the cluster is still there, on Slurm too
    (DriverEnd(137), AGAIN, AGAIN, True),  # as a shell says it
    (DriverEnd(-signal.SIGSEGV, recorded=False), AGAIN, AGAIN, True),
    (DriverEnd(1, recorded=False), AGAIN, AGAIN, True),  # Ray ends a process that has lost its head
    (DriverEnd(-KILL, over=True), 75, 75, True),
]


@pytest.mark.parametrize("end, on_kubernetes, on_slurm, costs", TABLE, ids=str)
def test_the_rule(end, on_kubernetes, on_slurm, costs):
    assert decide_job_status(end, 1, 3, False) == on_kubernetes
    assert decide_job_status(end, 1, 3, True) == on_slurm
    assert end.costs_retry == costs


@pytest.mark.parametrize("end, on_kubernetes, on_slurm, costs", TABLE, ids=str)
def test_retries_that_are_spent_end_what_would_go_on(end, on_kubernetes, on_slurm, costs):
    wanted = (
        1
        if end.is_lost or (end.met_world_fault and end.asked != TERM) or (end.status == 75 and end.asked != TERM)
        else on_kubernetes
    )
    assert decide_job_status(end, 4, 3, False) == wanted


START, LOST, IDLE, FINE, CLOSED = (
    {"event": "started"},
    {"event": "ended", "status": -9, "costs": True},
    {"event": "ended", "status": 75, "costs": True},
    {"event": "ended", "status": 75, "costs": False},
    {"event": "closed"},
)


@pytest.mark.parametrize(
    "lines, count",
    [
        ([], 0),
        ([START, LOST, START, FINE, START, LOST], 2),
        ([START], 1),  # its node went, and the supervisor with it
        ([START, START, START], 3),
        ([START, FINE, START], 1),
        ([START, IDLE, START, LOST, CLOSED], 0),  # the job has ended: who submits it again begins anew
        ([START, LOST, CLOSED, START], 1),
    ],
)
def test_what_is_spent_is_read_from_the_run_directory(lines, count):
    assert count_spent_retries(lines) == count


def test_the_record_is_read_as_anybody_s(tmp_path):
    assert read_drivers(tmp_path) == []
    (tmp_path / DRIVERS).write_text(json.dumps({"event": "started", "time": 1.0, "step": 3}) + "\n")
    assert count_spent_retries(read_drivers(tmp_path)) == 1
    for wrong in ({"event": "gone", "time": 1.0}, {"event": "started"}, {"event": "ended", "time": 1.0, "status": 1e9}):
        (tmp_path / DRIVERS).write_text(json.dumps(wrong) + "\n")
        with pytest.raises(Malformed, match="line 1"):
            read_drivers(tmp_path)
