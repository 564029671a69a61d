"""The process that workers of cluster=processes are forked from: what it may have, and who dies with whom."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from platform.cluster.crew.forked_workers import ForkServer
from platform.cluster.crew.job import assign_worker
from platform.cluster.crew.launchers import open_crew
from tests.harness.process_tree import descendants, gone, parents

WORKER = "tests.doubles.fake_worker:FakeWorker"


def place(job):
    return assign_worker(job(1), 0, local_rank=0, local_world_size=1, group_rank=0)


@pytest.fixture
def server(job):
    fork_server = ForkServer(place(lambda size: job(size, "platform.cluster:Nothing")))
    yield fork_server
    fork_server.close()


@pytest.fixture
def dialled(server, job):
    """`dialled()`: a worker forked just now, which has dialled and waits for the driver's greeting; its process id."""
    with socket.create_server(("127.0.0.1", 0)) as driver, ExitStack() as connections:
        driver.settimeout(60)

        def fork():
            before = descendants()
            forked = server.fork_worker(place(job), driver.getsockname(), "0" * 64)
            connections.enter_context(driver.accept()[0])  # a worker ends when the driver hangs up
            (pid,) = {pid for pid, parent in parents().items() if parent == server._process.pid} - before
            return forked, pid

        yield fork


def test_how_a_worker_ended_and_that_closing_ends_all(server, dialled):
    (first, one), (second, two), (_, three) = dialled(), dialled(), dialled()
    assert first.describe_exit(0.0) is None
    os.kill(one, signal.SIGTERM)  # the driver decides
    assert first.describe_exit(0.2) is None
    os.kill(one, signal.SIGSEGV)
    assert first.describe_exit(20) == first.describe_exit(0) == "the process was killed by SIGSEGV"
    os.kill(two, signal.SIGSTOP)
    second.kill()
    assert not {one, two} & parents().keys()
    assert second.describe_exit(0) == "the process was killed by SIGKILL"
    second.kill()  # once more does nothing
    os.kill(server._process.pid, signal.SIGSTOP)
    server.close()
    assert gone([three, server._process.pid])


def test_a_driver_with_thousands_of_open_files(server, dialled):
    """Such as the connections of a thousand workers."""
    with ExitStack() as files:
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
            pytest.skip("this user may not open as many")
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        worker, pid = dialled()
        assert worker.describe_exit(0.0) is None
        os.kill(pid, signal.SIGKILL)
        assert worker.describe_exit(20) == "the process was killed by SIGKILL"


@pytest.mark.usefixtures("warm_server")
def test_workers_have_the_environment_and_the_path_of_now(job, monkeypatch, tmp_path):
    (tmp_path / "written_late.py").write_text("""
import os
from tests.doubles.fake_worker import FakeWorker
class Late(FakeWorker):
    def place(self):
        return os.environ["SET_LATE"]
""")
    monkeypatch.setenv("SET_LATE", "ä")
    monkeypatch.syspath_prepend(tmp_path)
    with open_crew("processes", late := job(1, "written_late:Late")) as crew:
        crew.assign_ranks(late, [0])
        assert crew.call_ranks("place") == ["ä"]


@pytest.mark.usefixtures("own_fork_servers")
def test_a_killed_server_takes_its_workers_along_and_another_takes_its_place(job):
    with open_crew("processes", job(2)) as crew:
        server = crew._launcher._server._process.pid
        assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1, "a thread would be missing in what is forked"
        pids = [member.pid for member in crew.ready_members_by_number.values()]
        assert "libtorch" in Path(f"/proc/{server}/maps").read_text(), "imported once"
        os.kill(server, signal.SIGKILL)
        assert gone([server, *pids])
        while crew.ready_members_by_number:
            time.sleep(0.01)
        crew.hire_workers(1)
        while crew.starting_members:
            time.sleep(0.01)
        assert [*crew.ready_members_by_number] == [2]
        inside = descendants(crew._launcher._server._process.pid)
        assert crew.ready_members_by_number[2].pid in inside
    assert gone(inside)


def test_stopped_processes_end_with_the_driver(tmp_path):
    script = f"""
import os, signal
from pathlib import Path
from platform.cluster.crew.launchers import open_crew
from platform.cluster.crew.job import Job
from platform.config.fields import Config
job = Job(Config(), [{{"data": 0}}], "cpu", Path("."), {WORKER!r})
with open_crew("processes", job) as crew:
    for pid in (crew.ready_members_by_number[0].pid, crew._launcher._server._process.pid):
        os.kill(pid, signal.SIGSTOP)
        print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2 and gone(pids)
