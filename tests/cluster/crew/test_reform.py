"""Generations of real collectives and a real model: survivors are freed by each other, and go on in their processes."""

import time

import pytest

from platform.cluster.crew.crew import ByRank
from platform.cluster.crew.failures import WorkerFailed
from platform.cluster.crew.job import Job
from platform.cluster.crew.launchers import open_crew
from platform.plan.simulate import stage_rows
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from platform.train.replies import Taken
from tests.cluster.crew.test_generations import fails, form
from tests.harness.oracle import configure

pytestmark = pytest.mark.usefixtures("warm_server")


def left(tmp_path, generation, count, seconds):
    """How many members have left by themselves, after at most this time."""
    deadline = time.monotonic() + seconds
    while (departed := len([*tmp_path.glob(f"left-{generation}-*")])) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return departed


def test_survivors_free_each_other(job, tmp_path):
    """Gloo tells only the neighbours of a dead rank; the others are freed by those, without the driver's doing."""
    six, five = job(6, "tests.doubles.gloo_worker:GlooWorker"), job(5, "tests.doubles.gloo_worker:GlooWorker")
    with open_crew("processes", six) as crew:
        form(crew, six, range(6), 1)
        assert crew.call_ranks("turn") == [36.0] * 6
        assert fails(crew, "turn", 2).kind == "died"
        start = time.monotonic()
        assert left(tmp_path, 1, count=5, seconds=20) == 5
        print(f"5 of 5 survivors were free {time.monotonic() - start:.3f} s after the driver knew")
        assert [failure.member.number for failure in crew.release_members()] == [2]
        survivors = [*crew.ready_members_by_number]
        assert survivors == [0, 1, 3, 4, 5]
        form(crew, five, survivors, 2)
        assert crew.call_ranks("turn") == [25.0] * 5
        with pytest.raises(WorkerFailed):  # the control: where nobody leaves, who is no neighbour waits on
            crew.call_ranks("turn", 2, True)
        assert left(tmp_path, 2, count=4, seconds=1) < 4


def test_the_same_processes_train_under_another_plan(tmp_path):
    """4 replicas lose one in a step and are 3, in place: the step has the same loss and gradient."""

    def generation(crew, number, members):
        c = configure(data=len(members), zero=1, microbatch=1, global_batch=12, vocab=300)
        c.run.dir, c.data.kind = str(tmp_path), "synthetic"
        plan, schedule = make_plan(c), build_schedule(c, len(members))
        coordinates = [plan.mesh.rank_coordinates(rank) for rank in range(plan.mesh.world_size)]
        crew.assign_ranks(Job(c, coordinates, "cpu", tmp_path), members)
        size, ranks = len(members), ByRank(range(len(members)))
        formed = crew.call_ranks("form", ranks, size, c, crew.store, number, list(schedule.placement))
        assert [worker.pid for worker in formed] == [crew.ready_members_by_number[member].pid for member in members]
        crew.call_ranks("build", [stage.encode_rows() for stage in stage_rows([schedule])][0])

    c = configure(data=4, global_batch=12, vocab=300)
    job = Job(c, [{"data": rank} for rank in range(4)], "cpu", tmp_path, "tests.doubles.failing_worker:KilledWorker")
    with open_crew("processes", job) as crew:
        generation(crew, 1, [0, 1, 2, 3])
        [expected, *_] = crew.call_ranks("step", 1)
        culprit = fails(crew, "step", 2)
        assert (culprit.member.number, culprit.kind) == (1, "died"), culprit.cause
        assert [failure.member.number for failure in crew.release_members()] == [1]
        generation(crew, 2, [0, 2, 3])
        report, *others = crew.call_ranks("step", 1)
        assert others == [Taken(1), Taken(1)]
        for key in ("loss", "grad_norm"):
            assert getattr(report, key) == pytest.approx(getattr(expected, key), rel=1e-12)
        assert crew.call_ranks("step", 2)[0].loss != expected.loss
