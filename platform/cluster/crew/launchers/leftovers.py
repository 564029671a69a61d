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
    """The processes that were started with this mark; or, as one that has given itself another title has overwritten
    its environment, that have files open there."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    return [number for number in numbers if number != os.getpid() and _belongs(number, directory)]


def _belongs(process: int, directory: str) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as environment:
            if f"{MARK}={directory}".encode() in environment.read().split(b"\0"):
                return True
        files = f"/proc/{process}/fd"
        return any(os.readlink(f"{files}/{fd}").startswith(f"{directory}/") for fd in os.listdir(files))
    except OSError:  # somebody else's, or gone
        return False


def main(directory: str) -> None:
    """Waits for the end of standard input, then until nothing is left but the driver, if that lives."""
    driver = os.getppid()
    sys.stdin.buffer.read()
    deadline = time.monotonic() + PATIENCE
    while left := [process for process in marked(directory) if process != driver]:
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
