"""Flood a port of this machine with what no worker would say, for so many seconds.

    python benchmarks/strangers.py PORT --seconds 5 --seed 0

Connects only to 127.0.0.1. Each connection sends one draw of `tests.fuzz.listener` that takes no secret, or nothing at
all, and is left open as long as there is room for it. Prints how many connections there were.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz import listener  # noqa: E402

OPEN = 512  # connections at a time
PAUSE = 0.001  # seconds between two: a flood, but the machine has other work
SURROGATE = listener.framed(b'{"hello":{"token":"\\ud800","number":0}}')
DRAWS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda chance: b"",
    lambda chance: SURROGATE,
    *(
        lambda chance, draw=draw: draw(chance, None)
        for draw in map(listener.CLAIMS.get, ("bytes", "other protocols", "any JSON", "deep", "oversized", "empty"))
    ),
)


def flood(port: int, seconds: float, seed: int) -> int:
    """Return the number of connections that were made in `seconds`."""
    chance, held, opened = random.Random(seed), deque[socket.socket](), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
            connection.settimeout(0.1)
            held.append(connection)
            opened += 1
            connection.sendall(chance.choice(DRAWS)(chance))
        except OSError:  # hung up, full, or the run is over: all of these are answers
            pass
        if len(held) > OPEN:
            held.popleft().close()
        time.sleep(PAUSE)
    for connection in held:
        connection.close()
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{flood(options.port, options.seconds, options.seed)} connections")


if __name__ == "__main__":
    main()
