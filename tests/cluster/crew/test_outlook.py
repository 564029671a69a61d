"""What the driver sees of its workers in a call, and the file in which a look from outside finds it."""

import json
import os
import socket
import threading
import time

import pytest

from platform.cluster.control import pulse
from platform.cluster.control.pulse import Pulse
from platform.cluster.crew import heartbeats
from platform.cluster.crew.failures import Member
from platform.cluster.crew.heartbeats import CallMonitor
from platform.monitor.journal import LiveState, read_live_state
from platform.runtime import progress
from platform.runtime.progress import PROGRESS, Activity, TcpLink, WorkerProgress, read_tcp_links
from platform.train.replies import METHODS
from platform.train.worker import Worker

RANKS, HOST = {7: 0, 8: 1}, socket.gethostname()
MEMBERS = {7: Member(7, HOST, os.getpid()), 8: Member(8, "elsewhere", 5)}


def waits(seconds=1.0, **more):
    return Activity("step(5)", "exposed_comm", True, seconds, **more)


@pytest.fixture
def sight(monkeypatch):
    monkeypatch.setattr(heartbeats, "LOOK_SECONDS", 0.0)
    monitor = CallMonitor()
    monitor.pending = {7, 8}
    monitor.begin_call("step", "step(5)", RANKS, MEMBERS, {7, 8})
    return monitor


def test_workers_are_asked_once_a_call_takes_long():
    monitor, pending = CallMonitor(), {7, 8}
    monitor._round = time.monotonic() + 100
    monitor.begin_call("step", "step(5)", RANKS, MEMBERS, pending)
    begun = monitor.call[1]
    assert monitor.workers_to_ask(pending, begun + 1.9) == []
    assert sorted(monitor.workers_to_ask(pending, begun + 2.0)) == [7, 8]
    assert monitor.workers_to_ask(pending, begun + 3.9) == []  # both owe an answer
    assert monitor.workers_to_ask(pending, begun + 4.0) == []
    monitor.note_heartbeat(7, waits(), begun + 4.1, True)
    assert monitor.workers_to_ask(pending, begun + 6.1) == [7]
    assert monitor.seconds_to_wait(begun + 6.2) == pytest.approx(1.9)


def test_who_is_silent_waits_or_has_answered(sight):
    sight.workers_to_ask({7, 8}, time.monotonic() - 3.0)
    sight.note_heartbeat(8, waits(), time.monotonic(), True)
    first, second = sight.list_workers()
    assert (first.rank, first.owes > 2.9, first.process in "RS", first.activity) == (0, True, True, None)
    assert (second.rank, second.owes, second.activity.section) == (1, None, "exposed_comm")
    assert sight.describe_other_workers(7) == ["rank 1 waiting in exposed_comm"]
    sight.pending.discard(8)
    assert [worker.answered for worker in sight.list_workers()] == [False, True]


def test_the_speed_of_a_link_is_that_of_its_busy_time(sight):
    for sent, busy in ((0, 1.0), (10**6, 1.5), (10**6 + 9, 1.6), (13 * 10**5, 4.6), (16 * 10**5, 7.6)):
        beat = waits(links=[TcpLink("10.0.0.1", "10.0.0.2", sent, busy, 5, 0.5)])
        sight.note_heartbeat(8, beat, time.monotonic(), False)
    [link] = sight.list_links()
    assert (link.node, link.there, link.best, link.queued) == ("elsewhere", "10.0.0.2", 2e6, 5)
    assert link.rate == pytest.approx(1e5, rel=0.05)


def test_a_heartbeat_says_where_a_worker_stands_still(monkeypatch):
    progress, held, up = WorkerProgress(), threading.Event(), threading.Event()

    def stand_still():
        progress.begin_call("step(5)")
        up.set()
        held.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    up.wait()
    assert progress.build_heartbeat().stack == []
    monkeypatch.setattr("platform.runtime.progress.STILL_SECONDS", 0.0)
    assert any(frame.endswith("in stand_still") for frame in progress.build_heartbeat().stack)
    held.set()
    thread.join()


def test_links_are_counted_by_the_kernel(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.bind(("127.0.0.2", 0))  # another address than the other end's
        client.connect(server.getsockname())
        peer, _ = server.accept()
        with peer:
            client.sendall(b"x" * 1000)
            assert len(peer.recv(1000, socket.MSG_WAITALL)) == 1000
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                connection = next(link for link in read_tcp_links() if link.here == "127.0.0.2")
                if connection.sent >= 1000 and not connection.queued:
                    break
            assert (connection.there, connection.queued) == ("127.0.0.1", 0) and connection.sent >= 1000
    monkeypatch.setattr(progress, "open_sockets", lambda: {99999: 0})
    assert read_tcp_links() == []


def test_the_pulse_writes_what_is_seen(tmp_path, monkeypatch, sight):
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.01)
    with Pulse(tmp_path, lambda: LiveState(time=0.0, step=4, usual=0.5)) as beating:
        beating.outlook = sight
        deadline = time.monotonic() + 10
        while (
            not ((tmp_path / "live.json").exists() and read_live_state(tmp_path).workers)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        state = read_live_state(tmp_path)
    assert (state.step, state.call, state.doing, state.pending) == (4, "step(5)", "training", 2)
    assert [worker.number for worker in state.workers] == [7, 8] and abs(state.time - time.time()) < 60
    assert json.loads((tmp_path / "live.json").read_text())["usual"] == 0.5


def test_a_pulse_on_a_disk_that_does_not_answer_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.01)
    held = threading.Event()
    monkeypatch.setattr(pulse, "replace_text", lambda *_: held.wait())
    begin = time.monotonic()
    with Pulse(tmp_path, lambda: LiveState(time=0.0)):
        time.sleep(0.05)
    assert time.monotonic() - begin < 5
    held.set()


def far(method: str, *beats: tuple[int, int]) -> tuple[float, float]:
    monitor = CallMonitor()
    monitor.begin_call(method, f"{method}()", RANKS, MEMBERS, {7, 8})
    for number, (done, total) in zip((7, 8), beats, strict=False):
        monitor.note_heartbeat(number, waits(done=done, total=total), time.monotonic(), True)
    return monitor._progress_of_call(method)


def test_how_far_a_call_is_by_its_heartbeats():
    """Bytes add up; all ranks go through the same sequences; nothing is known before the first heartbeat."""
    PROGRESS.begin_call("")  # of this process, in which other tests may have come far
    assert far("restore", (100, 400), (300, 400)) == (400, 800)
    assert far("evaluate", (64, 256), (128, 256)) == (96, 256)
    assert far("restore") == (0, 0)
    assert far("evaluate", (64, 256), (0, 0)) == (64, 256), "one has not begun"
    with CallMonitor()._show_call_progress("restore") as shown:
        assert shown.unit == "B" and shown.look() == (0, 0)


def test_what_is_shown_are_calls_of_a_worker():
    shown = heartbeats._SHOWN.keys() | heartbeats._FAR.keys()
    assert [word for word in shown if not callable(getattr(Worker, METHODS.get(word, word), None))] == []
