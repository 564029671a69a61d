"""A member in this process: `connect_to_driver` waits for its welcome, so the switchboard is polled meanwhile."""

import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

from platform.cluster.crew import channel
from platform.cluster.crew.channel import Unframer, connect_to_driver


def frame(payload):
    return struct.pack("!I", len(payload)) + payload


def dialled(board, number, node=""):
    """The line of a member, and what the switchboard has heard since."""
    with ThreadPoolExecutor(1) as pool:
        line, heard = pool.submit(connect_to_driver, board.address, board.member_token(number), number, node), []
        while not line.done():
            heard += board.poll_events(0.02)
        return line.result(), heard


def knocked(board, **how):
    """A stranger's connection, and the challenge that it got; `how`: of the connecting."""
    connection, frames = socket.create_connection(board.address, **how), Unframer()
    connection.setblocking(False)
    while True:
        assert board.poll_events(0.001) == []
        try:
            [said] = frames.split_messages(connection.recv(4096))
        except BlockingIOError:
            continue
        connection.settimeout(20)
        return connection, said["challenge"]


def greeting(token, number, challenge, **changes):
    """The frame with which who has this token answers a challenge as this member; `changes`: to what it says."""
    nonce = channel.new_nonce()
    fields = {"number": number, "node": "here", "pid": 9, "nonce": nonce}
    fields |= {"proof": channel.compute_proof(token, channel.MEMBER, challenge, nonce)}
    return frame(json.dumps({"hello": fields | changes}).encode())
