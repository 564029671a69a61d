"""The process in which all of Ray is may hang, end or be cut off, and Ray's head may be silent: the driver goes on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import resources
from platform.cluster.crew import ray_process
from platform.cluster.crew.failures import Failure, Member, NoPlaces, NotThere, WorkerFailed
from platform.cluster.crew.ray_process import RayProcess, find_silence
from platform.cluster.crew.ray_session import cluster_refusal
from platform.config.groups import Cluster
from tests.harness.process_tree import gone

PROGRAM = """
import sys, json
path, fd, *argv = sys.argv[1:]
sys.path[:] = json.loads(path)
from tests.doubles.fake_ray_host import FakeHost
from platform.cluster.crew.ray_process import serve_orders
serve_orders(int(fd), FakeHost)
"""


@pytest.fixture
def ray(monkeypatch):
    """A process with a host that plays Ray."""
    monkeypatch.setattr(ray_process, "_PROGRAM", PROGRAM)
    monkeypatch.setattr(ray_process, "_END_SECONDS", 1.0)
    monkeypatch.setattr(ray_process, "_KILL_SECONDS", 0.5)
    process = RayProcess()
    yield process
    process.close()
    assert gone([process._process.pid])


def until(what, seconds=30):
    """`seconds` only bound a failing test."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server():
    """Starts a server that answers each connection with these bytes, and never more; its address."""
    opened = []

    def serve(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def accept():
            try:
                while True:
                    line = listener.accept()[0]
                    opened.append(line)
                    line.sendall(answer)
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for line in opened:
        line.close()


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SETTINGS, ""),
        (b"\0\0\x12\4\0\0\0\0\0" + bytes(18), ""),  # with settings
        (b"", "it does not answer within 0.2 s"),
        (SETTINGS[:5], "it does not answer within 0.2 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers there is no Ray"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what answers there is no Ray"),
    ],
)
def test_a_sign_of_life_is_one_of_its_protocol(server, monkeypatch, answer, said):
    monkeypatch.setattr(ray_process, "_ANSWER_SECONDS", 0.2)
    assert find_silence(server(answer)) == said


@pytest.mark.parametrize(("address", "said"), [("127.0.0.1:1", "refused"), ("auto", "")])
def test_where_nobody_listens(address, said):
    assert said in find_silence(address)


def test_a_call_that_hangs_holds_up_nobody(ray):
    assert ray.ask("add", 1, 2) == 3
    ray.order("hang")
    began = time.monotonic()
    for number in range(1000):
        ray.order("add", number, "x" * 1000)  # far more than a socket holds
    assert ray.await_exit(7, 0.1) is None and not ray.leaving and not ray.lost
    with pytest.raises(NoPlaces, match="Ray has not answered for 0 s"):
        ray.ask("add", 1, 2, seconds=0.1)
    ray.close()
    assert time.monotonic() - began < 10 and ray._process.returncode == -signal.SIGKILL


def test_what_ends_the_process_is_what_is_said(ray):
    ray.order("abort", "a line\n[2026-11-29 C 12 34] gcs.cc:7:  Check failed: status WrongClusterID \nstack")
    with pytest.raises(NoPlaces, match="has ended .status -6: .*Check failed: status WrongClusterID"):
        ray.ask("add", 1, 2)
    assert "WrongClusterID" in ray.lost and ray.await_exit(1, 60) is None  # at once


def test_exceptions_come_over_as_they_are(ray):
    with pytest.raises(ConfigError) as refused:
        ray.ask("raise_error", ConfigError, ["a=1: is bad", "b=2: too"])
    assert refused.value.violations == ["a=1: is bad", "b=2: too"]
    with pytest.raises(NotThere):
        ray.ask("raise_error", NotThere, "cluster", "ray", "is away")
    with pytest.raises(NoPlaces, match="waited"):
        ray.ask("raise_error", NoPlaces, "waited")
    failure = Failure(Member(3, "host/abcdef0123456789", 7), "died", "start()", "lost", name="worker3")
    with pytest.raises(WorkerFailed) as failed:
        ray.ask("raise_error", WorkerFailed, [failure])
    assert failed.value.failures == [failure]
    assert str(failure) == "worker3 on host (Ray node abcdef01) died in start(): lost"
    with pytest.raises(RuntimeError, match="OSError: boom"):
        ray.ask("raise_error", OSError, "boom")


class Torn:
    def __reduce__(self):
        return int, ("x",)


def test_an_order_that_cannot_be_read_ends_it_and_is_no_silence(ray):
    ray.order("add", Torn(), 1)
    with pytest.raises(NoPlaces, match="has ended"):
        ray.ask("add", 1, 2)


def test_news(ray):
    ray.order("send", "leaving", frozenset("a"))
    ray.order("send", "ended", 4, "it was killed")
    assert ray.await_exit(4, 30) == "it was killed" and ray.leaving == {"a"}


def test_signals_for_all_processes_of_a_job_are_the_drivers(ray):
    pid = ray.ask("process")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert ray.ask("add", 1, 2) == 3


@pytest.mark.parametrize("hangs", [False, True])
def test_it_ends_with_a_driver_that_is_killed(hangs):
    driver = f"""
import os, time
from platform.cluster.crew import ray_process
ray_process._PROGRAM = {PROGRAM!r}
ray = ray_process.RayProcess()
print(ray.ask("process"), flush=True)
{hangs} and ray.order("hang")
time.sleep(0.2)
os._exit(9)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", driver], env=environment, capture_output=True, text=True)
    pid = int(done.stdout)
    until(lambda: gone([pid]))


def test_a_store_that_stays_silent_is_lost_and_one_that_comes_back_is_not(ray, monkeypatch, caplog):
    """Once silence has lasted half of Ray's own limit without a break."""
    now, silent = [0.0], [True]
    monkeypatch.setattr(ray_process, "_KNOCK_SECONDS", 0.001)
    monkeypatch.setattr(ray_process, "find_silence", lambda address: "refused" if silent[0] else "")
    monkeypatch.setattr(ray_process, "monotonic", lambda: now[0])
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")
    caplog.set_level("INFO", "platform.cluster")
    ray.watch_cluster("h:1")
    until(lambda: "Ray at h:1: refused" in caplog.text)
    now[0] = 9.0
    time.sleep(0.1)
    silent[0] = False
    until(lambda: "Ray at h:1 answers again after 9 s" in caplog.text)
    silent[0], now[0] = True, 100.0
    until(lambda: caplog.text.count("Ray at h:1: refused") == 2)
    now[0] = 109.0
    time.sleep(0.1)
    assert not ray.lost
    now[0] = 111.0
    until(lambda: ray.lost)
    assert ray.lost == "Ray at h:1 gives no sign of life for 11 s (refused)"


def test_a_cluster_that_comes_late_is_waited_for(monkeypatch):
    """Its head too, within cluster.wait; without a wait it is refused, as what may come."""
    late = iter(["refused"] * 3 + [""])
    asked = []

    class Joined:
        joined = False

        def ask(self, *order, **_):
            asked.append(order)

    joined = Joined()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray_process, "find_silence", lambda address: next(late))
    monkeypatch.setattr(ray_process, "share_ray_process", lambda: joined)
    monkeypatch.setattr(resources, "sleep", lambda seconds: None)
    assert resources.join_ray(Cluster(kind="ray", wait=60)) is joined and len(asked) == 1
    joined.joined, late = False, iter(["refused"] * 100)
    with pytest.raises(NotThere, match=r"no Ray cluster at RAY_ADDRESS=127.0.0.1:1 \(refused\)"):
        resources.join_ray(Cluster(kind="ray"))
    clock = iter(range(100))
    monkeypatch.setattr(resources, "monotonic", lambda: next(clock))
    with pytest.raises(NoPlaces, match="waited 5 s: cluster=ray: no Ray cluster"):
        resources.join_ray(Cluster(kind="ray", wait=5))


def test_all_of_what_ray_says_is_said_in_one_line():
    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11\nThis process: Ray: 2.59.0"
    )
    error = cluster_refusal("h:1", text)
    assert not isinstance(error, NotThere) and "cluster=local" not in str(error)  # no waiting cures it
    [line] = error.violations
    assert "started with: Ray: 2.60.0 Python: 3.11 This process: Ray: 2.59.0" in line
