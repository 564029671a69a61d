import math
import os
import random
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from platform.cluster.crew import channel
from platform.cluster.crew.channel import Answer, Garbled, Hello, Unframer, encode_message
from platform.cluster.crew.heartbeats import HangWatch
from platform.cluster.crew.switchboard import WorkerSwitchboard
from platform.runtime.progress import SYNCHRONIZE, Activity, WorkerProgress
from tests.harness.dialled import dialled, frame, greeting, knocked


@pytest.fixture
def board():
    board = WorkerSwitchboard("127.0.0.1")
    board.expect_members([0, 1])
    yield board
    board.close()


def until(board, count, seconds=20):
    events, deadline = [], time.monotonic() + seconds
    while len(events) < count and time.monotonic() < deadline:
        events += board.poll_events(0.5)
    return events


def test_messages_survive_any_cutting():
    messages = [{"a": [1.5, math.inf, -math.inf]}, {"b": "é" * 5000}, {}]
    stream = b"".join(map(encode_message, messages))
    for size in (1, 7, 4096, len(stream)):
        decoder, decoded = Unframer(), []
        for at in range(0, len(stream), size):
            decoded += decoder.split_messages(stream[at : at + size])
        assert decoded == messages
    [nan] = Unframer().split_messages(encode_message({"x": math.nan}))
    assert math.isnan(nan["x"])
    with pytest.raises(TypeError):
        encode_message({"x": object()})


@pytest.mark.parametrize("payload", [b"[]", b"\xff", b"[" * 3000, b'{"a":', b"9" * 4000])
def test_what_is_no_message_is_garbled(payload):
    with pytest.raises(Garbled):
        list(Unframer().split_messages(frame(payload)))


def test_large_messages_both_ways_at_once(board):
    """8 MiB each: more than any socket buffer, so that both sides write in parts."""
    (line, heard), large = dialled(board, 0, "here"), "x" * (8 << 20)
    received = []

    def member():
        for message in line.receive_messages():
            received.append(message)
            line.send_frame(encode_message(Answer(1, large)))

    threading.Thread(target=member, daemon=True).start()
    [(number, hello)] = heard
    assert isinstance(hello, Hello) and (number, hello.number, hello.node, hello.pid) == (0, 0, "here", os.getpid())
    call = encode_message({"call": large})
    for _ in range(3):
        board.send_frame(0, call)
    assert until(board, 3) == [(0, Answer(1, large))] * 3
    assert received == [{"call": large}] * 3


def hello(board, **changes):
    return partial(greeting, board.member_token(1), 1, **changes)


def test_strangers_are_cut_off_and_harm_nobody(board, monkeypatch):
    good, [(number, _)] = dialled(board, 0)
    assert number == 0
    hostile = {
        "wrong proof": hello(board, proof="0" * 64),
        "no proof": hello(board, proof=None),
        "a proof that is no text": hello(board, proof=[1]),
        "the proof for another nonce": hello(board, nonce="0" * 64),
        "a number that nobody expects": partial(greeting, board.member_token(7), 7),
        "the number of another": partial(greeting, board.member_token(1), 0),
        "the number of who is there": partial(greeting, board.member_token(0), 0),
        "a number that is none": partial(greeting, board.member_token(1), "1"),
        "oversized": struct.pack("!I", 0xFFFFFFFF) + b"x",
        "garbage": os.urandom(3000),
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "deep": frame(b"[" * 3000),
        "the proof for another challenge": greeting(board.member_token(1), 1, channel.new_nonce()),
        "no greeting": frame(b'{"answer": 0}'),
    }
    for what, data in hostile.items():
        stranger, challenge = knocked(board)
        stranger.sendall(data(challenge) if callable(data) else data)
        assert board.poll_events(0.2) == [], what
        try:
            assert stranger.recv(1) == b"", what
        except ConnectionResetError:
            pass
    monkeypatch.setattr("platform.cluster.crew.switchboard._GREETING_SECONDS", 0.3)
    silent, _ = knocked(board)
    assert board.poll_events(0.1) == board.poll_events(0.5) == board.poll_events(0.1) == []
    assert silent.recv(1) == b"" and board.refused == len(hostile) + 1
    good.send_frame(encode_message(Answer(5, None)))
    assert until(board, 1) == [(0, Answer(5, None))]
    late, [(number, _)] = dialled(board, 1)  # the number that they tried is still free
    assert number == 1
    late.close()
    assert until(board, 1) == [(1, None)]


def test_a_member_that_speaks_nonsense_is_lost_alone(board):
    (line, _), (other, _) = dialled(board, 0), dialled(board, 1)
    line.send_frame(b"\xff" * 100)
    assert until(board, 1) == [(0, None)]
    board.send_frame(0, encode_message({}))  # to somebody who is gone
    other.send_frame(encode_message(Answer(5, None)))
    assert until(board, 1) == [(1, Answer(5, None))]


def test_many_connections_from_one_process(board):
    """More than the usual limit of 1024 descriptors; the members live in a process of their own."""
    count = 1200
    board.expect_members(range(count))
    script = """
import sys
from platform.cluster.crew.channel import connect_to_driver, encode_message
from platform.cluster.crew.switchboard import raise_open_file_limit
raise_open_file_limit()
port, tokens = int(sys.argv[1]), sys.stdin.read().split()
lines = [connect_to_driver(("127.0.0.1", port), token, number) for number, token in enumerate(tokens)]
for line in lines:
    line.send_frame(encode_message({"answer": next(line.receive_messages())["call"], "value": None}))
lines[0]._connection.recv(1)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(board.address[1])], stdin=subprocess.PIPE)
    try:
        with process.stdin:
            process.stdin.write("\n".join(map(board.member_token, range(count))).encode())
        assert {number for number, message in until(board, count)} == set(range(count))
        call = encode_message({"call": 1})
        for number in range(count):
            board.send_frame(number, call)
        answers = until(board, count)
        assert {number for number, message in answers if message == Answer(1, None)} == set(range(count))
        process.kill()
        assert {number for number, message in until(board, count) if message is None} == set(range(count))
    finally:
        process.kill()
        process.wait()


def beat(seconds, waiting=False, section="forward"):
    return Activity("step(3)", section, waiting, seconds)


def test_who_hangs():
    watch, pending = HangWatch(10.0, start=0.0), {0, 1, 2}
    assert not watch.workers_to_ask(pending, 8.9) and HangWatch(10.0, start=0.0).seconds_to_wait(8.0) == 1.0
    assert set(watch.workers_to_ask(pending, 9.0)) == pending and not watch.workers_to_ask(pending, 9.1)
    watch.note_heartbeat(0, beat(9.0, waiting=True), 9.0)
    watch.note_heartbeat(1, beat(2.0), 9.0)
    assert watch.find_hung(pending, 9.9) == ({}, set())
    assert watch.find_hung(pending, 10.0) == ({2: "no sign of life for 1.0 s"}, {2})
    watch.note_heartbeat(2, beat(10.0, waiting=True), 10.0)
    assert watch.find_hung(pending, 16.9) == ({}, set())  # rank 1 goes on
    watch.note_heartbeat(1, beat(10.0), 17.0)
    assert watch.find_hung(pending, 17.0) == ({1: "10.0 s at step(3): forward"}, {1})
    watch.note_heartbeat(1, beat(6.0, waiting=True), 24.0)  # it went on at 18.0, and has waited since
    assert watch.find_hung(pending, 34.6) == ({}, set())
    hung, blamed = watch.find_hung(pending, 34.7)
    assert hung.keys() == pending and not blamed
    watch.note_answer(34.0)  # another one: those that waited for it may go on
    assert watch.find_hung(pending, 50.6) == ({}, set()) and watch.find_hung(pending, 50.7)[0]
    watch.note_heartbeat(1, Activity("", "", False, 50.0), 50.7)  # its answer is under way
    assert watch.find_hung(pending, 50.7) == ({}, set())


def test_who_is_at_work_or_starved_has_more_time_than_who_is_blocked():
    for busy, known in ((0.0, 3.0), (1.0, 10.0), (0.3, 10.0)):
        watch = HangWatch(3.0, start=0.0)
        assert watch.workers_to_ask({0, 1}, 2.0)
        watch.note_heartbeat(0, beat(2.0, waiting=True), 2.0)
        for now in (2.5, 2.99, 3.0, 5.0, 9.99, 10.0):
            watch.note_heartbeat(1, replace(beat(0.9 * now), busy=busy), now)
            assert (1 in watch.find_hung({0, 1}, now)[1]) == (now >= known), (busy, now)


def test_silence_is_judged_by_how_soon_others_answer():
    """Where they are slow, or nobody is heard at all, it may be the machine that stood still."""
    for slowest, known in ((0.1, 3.0), (0.9, 4.7)):
        watch = HangWatch(3.0, start=0.0, silence=3.0)
        assert set(watch.workers_to_ask({0, 1}, 2.0)) == {0, 1}
        watch.note_heartbeat(0, beat(2.0, waiting=True), 2.0 + slowest)
        for now in (2.95, 3.0, 4.6, 4.7):
            assert (1 in watch.find_hung({0, 1}, now)[1]) == (now >= known), (slowest, now)
    watch = HangWatch(3.0, start=0.0, silence=3.0)
    assert watch.workers_to_ask({0, 1}, 2.0)
    assert watch.find_hung({0, 1}, 11.9) == ({}, set()) and watch.find_hung({0, 1}, 12.0)[1] == {0, 1}


def test_a_thread_that_computes_is_told_from_one_that_is_blocked():
    progress, lock, measured, shares = WorkerProgress(), threading.Lock(), threading.Event(), []

    def work() -> None:
        progress.begin_call("step(3)")
        while not measured.is_set():
            sum(range(1000))
        lock.acquire()

    lock.acquire()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        while progress.build_heartbeat().call != "step(3)":
            time.sleep(0.01)
        progress.build_heartbeat()
        time.sleep(0.2)
        shares.append(progress.build_heartbeat().busy)
        measured.set()
        while progress.build_heartbeat().busy > 0.0:
            time.sleep(0.1)
        time.sleep(0.2)
        shares.append(progress.build_heartbeat().busy)
    finally:
        measured.set()
        lock.release()
        thread.join()
    assert shares[0] > 0.5 and shares[1] < 0.1, shares


def test_silence_in_a_call_without_a_limit():
    """A stopped process is found in a call that may take as long as it likes."""
    watch, pending = HangWatch(math.inf, start=0.0, silence=10.0), {0, 1}
    assert (
        HangWatch(math.inf, start=0.0, silence=10.0).seconds_to_wait(0.0) == 9.0
        and set(watch.workers_to_ask(pending, 9.0)) == pending
    )
    watch.note_heartbeat(0, beat(9.0), 9.1)
    assert watch.find_hung(pending, 18.9) == ({}, set())
    assert watch.find_hung(pending, 19.0) == ({1: "no sign of life for 10.0 s"}, {1})
    watch.note_heartbeat(1, beat(1000.0), 19.0)
    assert watch.find_hung(pending, 2000.0) == ({}, set())


def follow(watch: HangWatch, members, said, start: float, end: float, stops=()) -> set[int]:
    """The driver's loop on a clock of ours, which jumps by (at, seconds) of `stops`; who is blamed at last. `said`: the
    beat of a member at a time, None from one that hangs. What was sent during a stop is heard after it."""
    now, stops, sent = start, sorted(stops), {}
    while now < end:
        for number in [n for n, at in sent.items() if at <= now]:
            watch.note_heartbeat(number, said(number, sent.pop(number)), now)
        if blamed := watch.find_hung(members, now)[0]:
            return set(blamed)
        for number in watch.workers_to_ask(members, now):
            if said(number, now):
                sent[number] = now + 0.01
        after = min([now + max(watch.seconds_to_wait(now), 1e-3), *sent.values()])
        if stops and stops[0][0] <= after:
            at, seconds = stops.pop(0)
            after = max(after, max(now, at) + seconds)
        now = after
    return set()


@pytest.mark.parametrize("seed", range(200))
def test_a_driver_that_stood_still_blames_nobody(seed):
    """Members in a long call that wait for one another; and who does hang is found for all that."""
    draw = random.Random(seed)
    stops = [(draw.uniform(0, 40), draw.uniform(1, 30)) for _ in range(draw.randint(1, 3))]
    how = {"within": draw.choice((3.0, 10.0, 60.0)), "start": 0.0, "silence": 10.0}
    assert not follow(
        HangWatch(**how), {0, 1}, lambda number, now: beat(draw.uniform(0, 1), waiting=True), 0, 60, stops
    )
    hangs = follow(HangWatch(**how), {0, 1}, lambda number, now: number == 0 and beat(0.1, waiting=True), 0, 400, stops)
    assert hangs == {1}


def test_no_limit_asks_nobody():
    watch = HangWatch(math.inf, start=0.0)
    assert (
        watch.seconds_to_wait(1e9) == math.inf
        and not watch.workers_to_ask({0}, 1e9)
        and watch.find_hung({0}, 1e9) == ({}, set())
    )


def at_device(seconds, device, device_waits, completed=7):
    return Activity("step(3)", SYNCHRONIZE, True, seconds, device, device_waits, completed)


def test_who_hangs_where_all_wait_for_their_devices():
    """On GPUs every host waits for its device: whose device is at work, while those of others wait for it, hangs."""

    def judge(beats):
        watch, pending = HangWatch(10.0, start=0.0), set(beats)
        for asked, when in ((9.0, 9.0), (10.0, 19.0)):
            assert set(watch.workers_to_ask(pending, asked)) == pending
            for number, beat in beats.items():
                watch.note_heartbeat(number, beat(when), when)
        return watch.find_hung(pending, 19.0)

    waits = lambda now: at_device(now, "exposed_comm", True)  # noqa: E731
    works = lambda now: at_device(now, "forward", False, 6)  # noqa: E731
    hung, blamed = judge({0: waits, 1: works, 2: waits, 3: waits})
    assert blamed == {1} == hung.keys()
    assert hung[1] == "19.0 s at step(3): synchronize of its device, in forward after 6 waits for others"
    assert judge(dict.fromkeys(range(4), waits))[1] == set(), "a lost message: nobody is to blame, nobody is killed"
    assert judge(dict.fromkeys(range(4), works))[1] == set(), "nobody waits for them"
    moves = lambda now: at_device(1.0, "forward", False)  # noqa: E731
    assert judge({0: waits, 1: moves}) == ({}, set()), "a device that is slow goes on"
    behind = lambda now: beat(now, waiting=True, section="collect")  # noqa: E731
    assert judge({0: behind, 1: works})[1] == {1}


def test_who_prepares_has_as_long_as_a_first_step():
    """Kernels are compiled by other threads and processes, while the main thread is idle."""
    for preparing, known in ((False, 3.0), (True, 120.0)):
        watch = HangWatch(3.0, start=0.0)
        assert watch.workers_to_ask({0, 1}, 2.0)
        watch.note_heartbeat(0, beat(2.0, waiting=True), 2.0)
        for now in (3.0, 9.99, 60.0, 100.0, 120.0):
            watch.note_heartbeat(1, replace(beat(0.9 * now), preparing=preparing), now)
            assert (1 in watch.find_hung({0, 1}, now)[1]) == (now >= known), (preparing, now)
