"""Ends the processes of an embedded Ray and removes its files once its driver is gone, however the driver ended: after
SIGKILL Ray's agents stay for another minute, a stopped worker for ever, and the files too.

A process of its own, `python leftovers.py DIRECTORY`, with the standard library alone. The driver holds the other end
of its standard input; Ray's processes have inherited MARK=DIRECTORY.
"""

import os
import shutil
import signal
import sys
import time

MARK = "PLATFORM_EMBEDDED_RAY"
PATIENCE = 4.0  # seconds for the processes to end by themselves


def marked(directory: str) -> list[int]:
    """The processes that were started with this mark."""
    mark, found = f"{MARK}={directory}".encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as environment:
                    if mark in environment.read().split(b"\0"):
                        found.append(int(name))
            except OSError:  # somebody else's, or gone
                pass
    return found


def main(directory: str) -> None:
    """Waits for the end of standard input, then until nothing is left."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + PATIENCE
    while left := marked(directory):
        if time.monotonic() > deadline:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
