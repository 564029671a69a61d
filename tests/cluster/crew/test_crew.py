import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from platform.cluster.crew import ray_actors
from platform.cluster.crew.crew import ByRank
from platform.cluster.crew.failures import WorkerFailed
from platform.cluster.crew.launchers import open_crew
from platform.cluster.crew.remote_crew import MemberRoster
from tests.harness.process_tree import descendants, gone

KINDS = ["processes", pytest.param("local", marks=pytest.mark.ray)]
SEEN_ELSEWHERE = [
    "processes",
    pytest.param("local", marks=[pytest.mark.ray, pytest.mark.full]),
]  # by the first test, on Ray


def formed(crew, job, numbers=None, generation=1):
    crew.assign_ranks(job, sorted(crew.ready_members_by_number)[: job.world_size] if numbers is None else numbers)
    size = job.world_size
    return crew.call_ranks("form", ByRank(range(size)), size, job.config, crew.store, generation, [0])


@pytest.mark.usefixtures("own_fork_servers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_crew_calls_every_rank_and_leaves_nothing_behind(kind, job, tmp_path):
    before = descendants()
    on_term = signal.getsignal(signal.SIGTERM)
    with open_crew(kind, job(3)) as crew:
        assert [worker.rank for worker in formed(crew, job(3))] == [0, 1, 2]
        assert crew.call_ranks("add", 1, 2) == [3, 4, 5]
        places = crew.call_ranks("place")
        inside = descendants() - before
        assert {place["pid"] for place in places} <= inside
        assert signal.getsignal(signal.SIGTERM) is on_term
    for number, place in enumerate(places):
        assert place["number"] == number and place["LOCAL_RANK"] == str(number)
        assert place["LOCAL_WORLD_SIZE"] == "3" and place["GROUP_RANK"] == "0"
        assert place["faults"] < 2_000, "it keeps the memory that it frees"
        log = (tmp_path / "logs" / f"worker-{number}.log").read_text()
        assert "from below Python\n" in log and "closed\n" in log
    assert gone(inside)
    crew.close()  # once more does nothing


@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize("kind", SEEN_ELSEWHERE)
def test_the_first_failure_is_raised_while_the_others_hang(kind, job, tmp_path):
    before = descendants()
    with pytest.raises(
        WorkerFailed, match=r"rank1\[data1\] on \S+ failed in fail\(1\): ValueError: boom on 1"
    ) as caught:
        with open_crew(kind, job(3)) as crew:
            formed(crew, job(3))
            inside = descendants() - before
            crew.call_ranks("fail", 1)
    failure = caught.value.culprit
    assert (failure.rank, failure.coordinates) == (1, {"stage": 0, "data": 1})
    assert "Traceback" in failure.cause and "in fail" in failure.cause
    assert failure.log == tmp_path / "logs" / "worker-1.log"
    assert failure.log.read_text().endswith("ValueError: boom on 1\n")
    assert inside and gone(inside)


@pytest.mark.parametrize("kind", SEEN_ELSEWHERE)
def test_a_killed_worker_is_the_culprit_though_others_complain_first(kind, job):
    before = descendants()
    with pytest.raises(WorkerFailed, match=r"rank2\[data2\]( on \S+)? died in lose\(2\)") as caught:
        with open_crew(kind, job(3)) as crew:
            formed(crew, job(3))
            inside = descendants() - before
            crew.call_ranks("lose", 2)
    assert caught.value.culprit.rank == 2
    if kind == "processes":
        assert caught.value.culprit.cause == "the process was killed by SIGKILL"
    assert gone(inside)


def test_a_worker_killed_between_two_calls_fails_the_next(job):
    with pytest.raises(WorkerFailed, match=r"rank0\[data0\]( on \S+)? died in add\(1\)"):
        with open_crew("processes", job(2)) as crew:
            formed(crew, job(2))
            os.kill(crew.ready_members_by_number[0].pid, signal.SIGKILL)
            assert gone([crew.ready_members_by_number[0].pid] if 0 in crew.ready_members_by_number else [])
            crew.call_ranks("add", 1, 2)


def test_a_worker_that_cannot_start(job):
    before = descendants()
    with pytest.raises(WorkerFailed, match=r"worker1( on \S+)? failed in start\(\): MemoryError: no room"):
        open_crew("processes", job(2, "tests.doubles.fake_worker:FailsToStart"))
    assert gone(descendants() - before)


def test_a_stopped_worker_does_not_keep_the_crew_from_closing(job, monkeypatch):
    monkeypatch.setattr("platform.cluster.crew.remote_crew.CLOSE_SECONDS", 0.5)
    with open_crew("processes", job(2)) as crew:
        pids = [member.pid for member in crew.ready_members_by_number.values()]
        os.kill(pids[1], signal.SIGSTOP)
    assert gone(pids)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_end_when_their_driver_is_killed(kind, job, tmp_path):
    script = """
import os, signal
from pathlib import Path
from platform.cluster.crew.crew import ByRank
from platform.cluster.crew.launchers import open_crew
from platform.cluster.crew.job import Job
from platform.config.fields import Config
if __name__ == "__main__":
    job = Job(Config(), [{"data": 0}, {"data": 1}], "cpu", Path("."), "tests.doubles.fake_worker:FakeWorker")
    with open_crew(KIND, job) as crew:
        print(*(member.pid for member in crew.ready_members_by_number.values()), flush=True)
        crew.assign_ranks(job, [0, 1])
        crew.call_ranks("form", ByRank([0, 1]), 2, job.config, crew.store, 1, [0])
        crew.call_ranks("fail", None if input() else 0)  # all hang
"""
    file = tmp_path / "driver.py"
    file.write_text(script.replace("KIND", repr(kind)))
    driver = subprocess.Popen(
        [sys.executable, file], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.stdin.write("hang\n")
    driver.stdin.flush()
    driver.kill()
    driver.wait()
    assert gone(pids)


def test_inline_is_this_process(job):
    with open_crew("inline", job(1)) as crew:
        assert formed(crew, job(1))[0].pid == os.getpid()
        assert crew.call_ranks("add", 1, 2) == [3]
        with pytest.raises(WorkerFailed, match=r"rank0( on \S+)? failed in fail\(0\): ValueError: boom on 0") as caught:
            crew.call_ranks("fail", 0)
    assert isinstance(caught.value.__cause__, ValueError)  # a debugger can go there


def test_cpu_threads_are_shared(job, config):
    config.cluster.threads = 7
    with open_crew("inline", job(1)) as crew:
        crew.assign_ranks(job(1), [0])
        assert crew.call_ranks("place")[0]["threads"] == 7


def test_workers_are_counted_as_they_dial_in(job):
    """Not all at once when the last of them has imported torch; and a Ray that starts is said to."""
    launcher = SimpleNamespace(greeted={})
    roster = MemberRoster(launcher, job(4))
    roster._hired, roster.starting = 4, {0, 1, 2, 3}
    counts = [roster.num_arrived]
    for number in (2, 0):
        launcher.greeted[number] = None
        counts.append(roster.num_arrived)
    roster.starting.remove(2)
    assert [*counts, roster.num_arrived] == [0, 1, 2, 2]


@pytest.mark.parametrize(("embedded", "what"), [(True, "starting Ray"), (False, "joining Ray")])
def test_a_ray_that_starts_is_said_to(job, monkeypatch, embedded, what):
    phases = []
    monkeypatch.setattr(ray_actors, "show_phase", lambda what: phases.append(what) or nullcontext())
    monkeypatch.setattr(ray_actors, "ForkServer", lambda _: SimpleNamespace(listen_for_orders=lambda path: None))
    ray = SimpleNamespace(ask=lambda *_: ("host", "here", "address", "path"), watch_cluster=lambda address: None)
    monkeypatch.setattr(ray_actors, "share_ray_process", lambda unjoined: ray)
    assert ray_actors.RayActors(embedded=embedded).prepare_launch(job(2), 2) == "host"
    assert phases == [what]
