"""What anybody can send to the driver's listener, and what a member can that is out of its mind: it is their end."""

import errno
import os
import random
import select
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest

from platform.cluster.crew import channel, switchboard
from platform.cluster.crew.channel import Answer, connect_to_driver, encode_message
from platform.cluster.crew.job import open_tcp_store
from platform.cluster.crew.switchboard import OWN, PER_MEMBER, WorkerSwitchboard
from tests.harness.dialled import dialled, frame, greeting, knocked


@pytest.fixture
def board():
    board = WorkerSwitchboard("127.0.0.1")
    board.expect_members([0, 1])
    yield board
    board.close()


def cut_off(board, *said, **changes):
    """Sends what is said, or the greeting of who has a token as that number, as a stranger, and asserts that nobody
    hears of it, that it is counted and that its connection ends."""
    before = board.refused
    stranger, challenge = knocked(board)
    with stranger:
        stranger.sendall(said[0] if len(said) == 1 else greeting(*said, challenge, **changes))
        assert board.poll_events(0.2) == []
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert board.refused == before + 1


def test_a_lone_surrogate_for_a_token(board):
    cut_off(board, frame(b'{"hello":{"token":"\\ud800","number":0}}'))
    for field in ("proof", "nonce", "node"):
        cut_off(board, board.member_token(0), 0, **{field: "\ud800"})


def test_a_number_is_neither_a_bool_nor_a_float(board):
    for number in (True, 1.0, "1", None, [1], 10**3000):
        cut_off(board, board.member_token(1), number)


def test_who_has_one_token_cannot_claim_another_number(board):
    cut_off(board, board.member_token(0), 1)
    member, _ = dialled(board, 1)
    cut_off(board, board.member_token(1), 1)  # nor its own again
    member.close()


def test_who_answers_without_the_token_is_not_taken_for_the_driver(board):
    with socket.create_server(("127.0.0.1", 0)) as fake, ThreadPoolExecutor(1) as pool:
        line = pool.submit(connect_to_driver, fake.getsockname(), board.member_token(0), 0)
        with fake.accept()[0] as connection:
            connection.sendall(encode_message({"challenge": "0" * 64}) + encode_message({"welcome": "0" * 64}))
            with pytest.raises(PermissionError):
                line.result(20)


class Wire:
    """Whoever listens between a worker and the driver: passes every byte on, and keeps what the worker has said."""

    def __init__(self, board):
        self.board, self.kept = board, bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()

    def carry(self):
        with self._server, self._server.accept()[0] as worker, socket.create_connection(self.board.address) as driver:
            other = {worker: driver, driver: worker}
            while True:
                for end in select.select([worker, driver], [], [])[0]:
                    if not (data := end.recv(1 << 16)):
                        return
                    self.kept += data if end is worker else b""
                    other[end].sendall(data)


def test_what_was_overheard_of_a_handshake_opens_nothing(board):
    """Neither while the member is there, nor when it is gone, nor where its number is expected again, nor at the
    driver's next port."""
    wire = Wire(board)
    threading.Thread(target=wire.carry, daemon=True).start()
    with ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(connect_to_driver, wire.address, board.member_token(0), 0)
        while not (heard := board.poll_events(0.05)):
            pass
        line = dialling.result(20)
    line.send_frame(encode_message(Answer(7, None)))
    assert [number for number, _ in heard] == [0] and until(board) == [(0, Answer(7, None))]
    replayed = bytes(wire.kept)
    greeted = replayed.removesuffix(encode_message(Answer(7, None)))
    assert len(greeted) < len(replayed)
    for data in (replayed, greeted):
        cut_off(board, data)
    line.send_frame(encode_message(Answer(8, None)))
    assert until(board) == [(0, Answer(8, None))]  # who was overheard is not disturbed
    line.close()
    assert until(board) == [(0, None)]
    board.expect_members([0])
    with closing(WorkerSwitchboard("127.0.0.1", key=board._key)) as later:
        later.expect_members([0])
        for place in (board, later):
            cut_off(place, replayed)
            cut_off(place, greeted)
    again, [(number, _)] = dialled(board, 0)
    assert number == 0
    again.close()


def until(board):
    while not (heard := board.poll_events(0.5)):
        pass
    return heard


def test_the_log_is_told_of_every_tenfold_of_strangers(board, caplog):
    for _ in range(25):
        cut_off(board, b"GET / HTTP/1.1\r\n\r\n")
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[4] for line in said] == ["1", "10"]


def test_a_peer_that_says_nothing_is_not_waited_for_longer_than_a_minute(monkeypatch):
    """Somebody else's server at the driver's address, that waits for its client to speak first."""
    monkeypatch.setattr(channel, "_DIAL_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="does not answer: timed out"):
        connect_to_driver(silent.getsockname(), "0" * 64, 0)


def test_a_member_that_a_flood_pushed_out_dials_again(board, monkeypatch):
    monkeypatch.setattr(board, "_most_strangers", lambda: 0)
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(connect_to_driver, board.address, board.member_token(0), 0)
        for _ in range(5):
            assert board.poll_events(0.1) == []
        monkeypatch.undo()
        while not (heard := board.poll_events(0.1)):
            pass
        assert [number for number, _ in heard] == [0] and line.result(20)


def test_strangers_leave_the_members_their_descriptors(monkeypatch):
    monkeypatch.setattr(switchboard, "raise_open_file_limit", lambda: OWN + PER_MEMBER * 2 + 40)
    board = WorkerSwitchboard("127.0.0.1")
    board.expect_members([0, 1])
    with closing(board), ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(socket.create_connection(board.address))
        board.poll_events(0.2)
        assert len(board._strangers) == 40


def test_a_driver_without_a_free_descriptor_does_not_spin(board, monkeypatch):
    tries = []

    def none_free(listener):
        tries.append(listener)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with socket.create_connection(board.address):
        monkeypatch.setattr(socket.socket, "accept", none_free)
        assert board.poll_events(0.5) == []
    assert 1 <= len(tries) < 20


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"answer": 1},
        {"answer": True, "value": 1},
        {"answer": "1", "value": 1},
        {"answer": 1, "error": 5},
        {"answer": 1, "error": "x", "value": 1},
        {"beat": 1},
        {"beat": 1, "progress": {}},
        {"beat": 1, "progress": {"call": "", "section": "", "seconds": "long", "waiting": False}},
        {"hello": {}},
    ],
    ids=str,
)
def test_a_member_that_says_what_no_member_says_is_lost_alone(board, message):
    line, _ = dialled(board, 0)
    line.send_frame(encode_message(message))
    assert board.poll_events(1.0) == [(0, None)]


def test_the_store_of_a_generation_outlives_what_strangers_send():
    """torch's own server, in the driver's process."""
    from torch.distributed import TCPStore

    store = open_tcp_store("127.0.0.1")
    member = TCPStore(store.host, store.port, is_master=False)
    draw = random.Random(0)
    for number in range(300):
        with socket.create_connection((store.host, store.port)) as stranger, suppress(ConnectionError):
            head = draw.choice((b"", b"\0", b"\x3c\x85\xf7\x09", draw.randbytes(1)))
            stranger.sendall(head + draw.choice((draw.randbytes(90), b"\xff" * 90, b"\1" + b"\x7f" * 16)))
        member.set("alive", str(number))
        assert member.get("alive") == str(number).encode()


JUNK = """
import random, socket, time
from platform.cluster.crew.job import open_tcp_store
store, r = open_tcp_store("127.0.0.1"), random.Random(0)
for kind in [*range(20), *range(20)]:
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        greeting = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")  # as a client of torch's begins
        stranger.sendall(greeting + bytes([kind]) + r.randbytes(r.randrange(1, 200)))
        time.sleep(0.01)
time.sleep(0.5)
store.set("a", b"1")
print(store.get("a").decode())
"""


def test_junk_at_the_store_fills_no_log():
    """Torch warns of each message that is none, in 25 lines with a backtrace."""
    clean = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", JUNK], env=clean, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
