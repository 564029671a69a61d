"""Cleanup process of an embedded Ray: ends its processes and removes its files once the driver is gone, however it
ended. Otherwise, after SIGKILL, Ray's agents stay for another minute, and a stopped worker and the files for ever.

Runs as `python leftovers.py DIRECTORY`, with the standard library alone. The driver holds the other end of its standard
input, which ends with the driver, and says AT_ONCE there if it ends Ray itself; Ray's processes have inherited
MARK=DIRECTORY.
"""

import os
import shutil
import signal
import sys
import time

MARK = "PLATFORM_EMBEDDED_RAY"
PATIENCE = 4.0  # seconds for the processes to end by themselves; then they are killed
AT_ONCE = b"at once"  # they are killed without patience
_LOOK_SECONDS = 0.02  # between two looks at the processes


def marked(directory: str) -> list[int]:
    """Return the ids of the processes of the embedded Ray in `directory`, without this process: started with
    MARK=`directory`, or with files open in it, since a process that changes its title overwrites its environment, and
    the mark with it."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    return [number for number in numbers if number != os.getpid() and _belongs(number, directory)]


def _belongs(process: int, directory: str) -> bool:
    """Return True if the process of id `process` belongs to the embedded Ray in `directory`: the variable MARK of its
    environment names that directory, or it has a file in it open."""
    try:
        with open(f"/proc/{process}/environ", "rb") as environment:
            if f"{MARK}={directory}".encode() in environment.read().split(b"\0"):
                return True
        files = f"/proc/{process}/fd"
        return any(os.readlink(f"{files}/{fd}").startswith(f"{directory}/") for fd in os.listdir(files))
    except OSError:  # another user's process, or one that is gone
        return False


def main(directory: str) -> None:
    """Wait for the end of standard input, which comes when the driver ends or closes it, then until no process of the
    embedded Ray in `directory` but the driver is left, killing the ones left after PATIENCE; remove `directory`."""
    driver = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some schedulers send it to all processes of a job
    patience = 0.0 if sys.stdin.buffer.read() == AT_ONCE else PATIENCE
    deadline = time.monotonic() + patience
    while left := [process for process in marked(directory) if process != driver]:
        if time.monotonic() >= deadline:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(_LOOK_SECONDS)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
