"""What anybody can send to the driver's listener, and what a member can that is out of its mind: it is their end."""

import errno
import json
import os
import socket
import struct
from contextlib import suppress

import pytest

from platform.cluster.channel import dial, encode
from platform.cluster.switchboard import Switchboard


def frame(payload):
    return struct.pack("!I", len(payload)) + payload


def greeting(**fields):
    return frame(json.dumps({"hello": fields}).encode())


@pytest.fixture
def board():
    board = Switchboard("127.0.0.1")
    board.expect([0, 1])
    yield board
    board.close()


def cut_off(board, data):
    """Sends `data` as a stranger and asserts that nobody hears of it and that its connection ends."""
    with socket.create_connection(board.address) as stranger:
        stranger.settimeout(20)
        stranger.sendall(data)
        assert board.poll(0.2) == []
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


@pytest.mark.xfail(strict=True, reason="UnicodeEncodeError ends the driver")
def test_a_lone_surrogate_for_a_token(board):
    cut_off(board, greeting(token="\ud800", number=0))


@pytest.mark.xfail(strict=True, reason="a bool is taken for a number")
def test_a_number_is_neither_a_bool_nor_a_float(board):
    for number in (True, 1.0, "1", None, [1], 10**3000):
        cut_off(board, greeting(token=board.token, number=number))


@pytest.mark.xfail(strict=True, reason="every member has one and the same token")
def test_who_has_one_token_cannot_claim_another_number(board):
    dial(board.address, board.token, 1)
    assert board.poll(0.5) == []


@pytest.mark.xfail(strict=True, reason="the driver spins while nobody can be accepted")
def test_a_driver_without_a_free_descriptor_does_not_spin(board, monkeypatch):
    tries = []

    def none_free(listener):
        tries.append(listener)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with socket.create_connection(board.address):
        monkeypatch.setattr(socket.socket, "accept", none_free)
        assert board.poll(0.5) == []
    assert 1 <= len(tries) < 20


@pytest.mark.xfail(strict=True, reason="what a member sends is taken for what members send")
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
    line = dial(board.address, board.token, 0)
    board.poll(1.0)
    line.send(encode(message))
    assert board.poll(1.0) == [(0, None)]
