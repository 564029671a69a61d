"""A member in this process: `dial` waits for its welcome, so the switchboard is polled meanwhile."""

import json
import struct
from concurrent.futures import ThreadPoolExecutor

from platform.cluster.wire import secret
from platform.cluster.wire.channel import dial


def frame(payload):
    return struct.pack("!I", len(payload)) + payload


def dialled(board, number, node=""):
    """The line of a member, and what the switchboard has heard since."""
    with ThreadPoolExecutor(1) as pool:
        line, heard = pool.submit(dial, board.address, board.token(number), number, node), []
        while not line.done():
            heard += board.poll(0.02)
        return line.result(), heard


def greeting(token, number, **changes):
    """The frame with which who has this token says that it is this member; `changes`: to what it says."""
    nonce = secret.new()
    fields = {"number": number, "node": "here", "pid": 9, "nonce": nonce}
    fields |= {"proof": secret.proof(token, secret.MEMBER, nonce)}
    return frame(json.dumps({"hello": fields | changes}).encode())
