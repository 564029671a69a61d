"""A crew that loses members and goes on: who is found, who is released, who remains, who takes the place."""

import os
import signal
import time

import pytest

from platform.cluster.crew.crew import ByRank
from platform.cluster.crew.failures import WorkerFailed
from platform.cluster.crew.launchers import open_crew
from tests.harness.process_tree import descendants, gone

pytestmark = pytest.mark.usefixtures("warm_server")
KINDS = ["processes", pytest.param("local", marks=[pytest.mark.ray, pytest.mark.full])]


def form(crew, job, numbers, generation):
    crew.assign_ranks(job, numbers)
    size = job.world_size
    return crew.call_ranks("form", ByRank(range(size)), size, job.config, crew.store, generation, [0])


def fails(crew, method, rank, **within):
    with pytest.raises(WorkerFailed) as caught:
        crew.call_ranks(method, rank, **within)
    return caught.value.culprit


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_failure_costs_exactly_the_culprit(kind, job):
    """SIGKILL, SIGSTOP, a hang and an exception one after the other, in one crew of 4 with a spare."""
    before = descendants()
    with open_crew(kind, job(4), spares=1) as crew:
        assert sorted(crew.ready_members_by_number) == [0, 1, 2, 3, 4]
        form(crew, job(4), [0, 1, 2, 3], 1)

        culprit = fails(crew, "lose", 2)
        assert (culprit.kind, culprit.rank, culprit.member.number) == ("died", 2, 2)
        assert [failure.member.number for failure in crew.release_members()] == [2]
        assert [*crew.ready_members_by_number] == [0, 1, 3, 4]

        form(crew, job(4), [0, 1, 4, 3], 2)  # the spare takes the place
        assert [place["number"] for place in crew.call_ranks("place")] == [0, 1, 4, 3]
        culprit = fails(crew, "stop", 2, within=0.5)
        assert (culprit.kind, culprit.member.number, culprit.coordinates["data"]) == ("hung", 4, 2)
        assert culprit.cause.startswith("no sign of life for ")
        assert [failure.member.number for failure in crew.release_members()] == [4]

        form(crew, job(3), [0, 1, 3], 3)
        crew.hire_workers(1)
        culprit = fails(crew, "hang", 0, within=0.5)
        assert (culprit.kind, culprit.member.number) == ("hung", 0) and "at hang(0)" in culprit.cause
        assert [failure.member.number for failure in crew.release_members()] == [0]
        while crew.starting_members:
            time.sleep(0.05)
        assert not crew.unstarted and [*crew.ready_members_by_number] == [1, 3, 5]

        form(crew, job(3), [1, 3, 5], 4)
        culprit = fails(crew, "fail", 1)
        assert (culprit.kind, culprit.member.number) == ("failed", 3)
        assert crew.release_members() == []  # who only raised can go on
        assert [*crew.ready_members_by_number] == [1, 3, 5]

        form(crew, job(3), [1, 3, 5], 5)
        assert [report.step for report in crew.call_ranks("step", 1, within=60.0)] == [1] * 3
        inside = descendants() - before
        assert {member.pid for member in crew.ready_members_by_number.values()} <= inside
    assert gone(inside)


def test_what_is_nobodys_fault_and_what_happens_beside_a_call(job):
    """One crew of 2 with a spare, in one generation after the other."""
    with open_crew("processes", job(2), spares=1) as crew:
        form(crew, job(2), [0, 2], 1)
        with pytest.raises(WorkerFailed, match="all pending ranks wait for each other") as caught:
            crew.call_ranks("fail", None, within=0.5)
        assert {failure.kind for failure in caught.value.failures} == {"hung"}
        assert crew.release_members() == []  # the store is gone, and so they are free
        assert [*crew.ready_members_by_number] == [0, 1, 2]

        form(crew, job(2), [0, 1], 2)
        assert crew.call_ranks("dawdle", 0, within=0.4) == [None, None]  # slow is not hung

        os.kill(crew.ready_members_by_number[2].pid, signal.SIGKILL)
        crew.hire_workers(1)
        crew._launcher._forked[3].kill()  # it has not even dialled in
        assert crew.call_ranks("add", 1, 2) == [3, 4]  # neither has a rank
        while crew.starting_members or 2 in crew.ready_members_by_number:
            time.sleep(0.02)
        assert [*crew.ready_members_by_number] == [0, 1]
        [failure] = crew.unstarted
        assert (failure.member.number, failure.kind, failure.rank) == (3, "died", None)
        assert crew.release_members() == []  # without need: all remain

        crew.assign_ranks(job(2), [1, 0])
        os.kill(crew.ready_members_by_number[1].pid, signal.SIGSTOP)  # while the others wait for it in the store
        with pytest.raises(WorkerFailed) as caught:
            crew.call_ranks("form", ByRank(range(2)), 2, job(2).config, crew.store, 3, [0], within=2.0)
        assert (caught.value.culprit.member.number, caught.value.culprit.rank) == (1, 0)
        assert [failure.member.number for failure in crew.release_members()] == [1]
        assert [*crew.ready_members_by_number] == [0]
