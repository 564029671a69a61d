import os
import signal
import subprocess
import sys

import pytest
from process_tree import descendants, gone

from platform.cluster.crew import WorkerFailed, open_crew

KINDS = ["processes", pytest.param("local", marks=pytest.mark.ray)]


def formed(crew):
    return crew.call("form", crew.store, 1, [0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_crew_calls_every_rank_and_leaves_nothing_behind(kind, job, tmp_path):
    before = descendants()
    on_term = signal.getsignal(signal.SIGTERM)
    with open_crew(kind, job(3)) as crew:
        assert [worker["rank"] for worker in formed(crew)] == [0, 1, 2]
        assert crew.call("add", 1, 2) == [3, 4, 5]
        places = crew.call("place")
        inside = descendants() - before
        assert {place["pid"] for place in places} <= inside
        assert signal.getsignal(signal.SIGTERM) is on_term
    for rank, place in enumerate(places):
        assert place["RANK"] == place["LOCAL_RANK"] == str(rank)
        assert place["WORLD_SIZE"] == place["LOCAL_WORLD_SIZE"] == "3"
        assert place["GROUP_RANK"] == "0"
        assert (place["MASTER_ADDR"], int(place["MASTER_PORT"])) == crew.store
    for rank in range(3):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert "from below Python\n" in log and "closed\n" in log
    assert gone(inside)
    crew.close()  # once more does nothing


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_failure_is_raised_while_the_others_hang(kind, job, tmp_path):
    before = descendants()
    with pytest.raises(WorkerFailed, match=r"rank1\[data1\] failed in fail\(1\): ValueError: boom on 1") as caught:
        with open_crew(kind, job(3)) as crew:
            inside = descendants() - before
            crew.call("fail", 1)
    failure = caught.value
    assert (failure.rank, failure.coordinates) == (1, {"stage": 0, "data": 1})
    assert "Traceback" in failure.cause and "in fail" in failure.cause
    assert failure.log == tmp_path / "logs" / "rank-1.log"
    assert failure.log.read_text().endswith("ValueError: boom on 1\n")
    assert inside and gone(inside)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_the_culprit_though_others_complain_first(kind, job):
    before = descendants()
    with pytest.raises(WorkerFailed, match=r"rank2\[data2\] died in lose\(2\)") as caught:
        with open_crew(kind, job(3)) as crew:
            inside = descendants() - before
            crew.call("lose", 2)
    assert caught.value.rank == 2
    if kind == "processes":
        assert caught.value.cause == "the process was killed by SIGKILL"
    assert gone(inside)


def test_a_worker_killed_between_two_calls_fails_the_next(job):
    with pytest.raises(WorkerFailed, match=r"rank0\[data0\] died in add\(1, 2\)"):
        with open_crew("processes", job(2)) as crew:
            os.kill(crew.pids[0], signal.SIGKILL)
            assert gone(crew.pids[:1])
            crew.call("add", 1, 2)


def test_a_worker_that_cannot_start(job):
    before = descendants()
    with pytest.raises(WorkerFailed, match=r"rank1\[data1\] failed in start\(\): MemoryError: no room"):
        open_crew("processes", job(2, "fake_worker:FailsToStart"))
    assert gone(descendants() - before)


def test_a_stopped_worker_does_not_keep_the_crew_from_closing(job, monkeypatch):
    monkeypatch.setattr("platform.cluster.crew.CLOSE_SECONDS", 0.5)
    with open_crew("processes", job(2)) as crew:
        pids = crew.pids
        os.kill(pids[1], signal.SIGSTOP)
    assert gone(pids)


def test_workers_end_when_their_driver_is_killed(job, tmp_path):
    script = """
import os, signal
from pathlib import Path
from platform.cluster.crew import open_crew
from platform.cluster.job import Job
from platform.config import Config
if __name__ == "__main__":
    job = Job(Config().to_dict(), [{"data": 0}, {"data": 1}], "cpu", Path("."), "fake_worker:FakeWorker")
    with open_crew("processes", job) as crew:
        print(*crew.pids, flush=True)
        crew.call("fail", None if input() else 0)  # all hang
"""
    file = tmp_path / "driver.py"
    file.write_text(script)
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
        assert formed(crew)[0]["pid"] == os.getpid()
        assert crew.call("add", 1, 2) == [3]
        with pytest.raises(WorkerFailed, match=r"rank0\[\] failed in fail\(0\): ValueError: boom on 0") as caught:
            crew.call("fail", 0)
    assert isinstance(caught.value.__cause__, ValueError)  # a debugger can go there


def test_cpu_threads_are_shared(job, config):
    config.cluster.threads = 7
    with open_crew("inline", job(1)) as crew:
        assert crew.call("place")[0]["threads"] == 7
