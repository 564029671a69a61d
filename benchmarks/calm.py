"""Does a run beside a heavy load raise a false alarm? 8 workers that nobody harms, and busy loops of the same priority.

    OMP_NUM_THREADS=1 python benchmarks/calm.py --minutes 20 --loops 30

Counts what the run has journalled of failures and barred workers, none of which anybody has caused. `--control`
stops a worker at the end (SIGSTOP): one alarm, without which there is no telling whether any would have been raised.
Exit status 1 where an alarm was false, the control's was not raised, or a sample was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from tests.harness import chaos  # noqa: E402

HANG = 3.0  # seconds: elastic.hang_seconds
LOOK = 15.0  # seconds between two looks at the load
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes computing, which end with this one."""
    loops = [subprocess.Popen([*ENDS_WITH_US, "sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Watcher(threading.Thread):
    """Notes the load beside the driver in this process, and ends the run after `seconds` from its first step, with
    `control` once a worker was stopped and found. `stopped`: when it was."""

    def __init__(self, config: chaos.Config, seconds: float, control: bool):
        super().__init__(daemon=True)
        self.config, self.seconds, self.control = config, seconds, control
        self.load: list[float] = []
        self.over = threading.Event()
        self.stopped: float | None = None

    def run(self) -> None:
        while not self._of("first_step"):
            if self.over.wait(0.2):
                return
        ends = time.monotonic() + self.seconds
        while (left := ends - time.monotonic()) > 0 and not self.over.wait(min(LOOK, left)):
            self.load.append(os.getloadavg()[0])
            steps, failures = len(chaos.rows(self.config)), len(self._of("failure"))
            print(f"{left / 60:5.1f} minutes left, {steps} steps, {failures} failures, load {self.load[-1]:.1f}",
                  file=sys.stderr, flush=True)  # fmt: skip
        if self.control and not self.over.is_set():
            pid = random.Random(0).choice(self._of("formed")[-1]["workers"])["pid"]
            self.stopped = time.time()
            os.kill(pid, signal.SIGSTOP)
            while not self.over.wait(0.2) and not self._of("failure", self.stopped):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    def _of(self, kind: str, since: float = 0.0) -> list[chaos.Event]:
        return [e for e in chaos.journal(self.config) if e["event"] == kind and e["time"] >= since]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--loops", type=int, default=30)
    parser.add_argument("--control", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, busy(options.loops):
        c = chaos.configured(Path(folder, "run"), 10**6, tensor="1d", axes={"t": 2}, data=4, zero=1, vocab=512)
        c.optimizer.schedule, c.elastic.hang_seconds, c.elastic.attempts = "constant", HANG, 1000
        watcher = Watcher(c, 60 * options.minutes, options.control)
        watcher.start()
        status = chaos.drive(c)
        watcher.over.set()
        watcher.join()
        rows, events = chaos.rows(c), chaos.journal(c)
    since = watcher.stopped or float("inf")
    alarms = [e for e in events if e["event"] in ("failure", "barred") and e["time"] < since]
    known = [e["time"] - since for e in events if e["event"] == "failure" and e["time"] >= since][:1]
    wrong = [f"false alarm: {event}" for event in alarms]
    wrong += [] if status == 75 else [f"the run ended with status {status}"]
    if [row["samples"] for row in rows] != [[16 * k, 16 * k + 16] for k in range(len(rows))]:
        wrong.append("the samples are not those of an undisturbed run")
    if options.control and not known:
        wrong.append("a stopped worker was not found")
    seconds, load = [row["step_seconds"] for row in rows], watcher.load
    print(f"{len(rows)} steps of {median(seconds):.2f} s, the longest {max(seconds):.2f} s; {len(alarms)} false alarms")
    print(f"load {min(load):.1f} to {max(load):.1f}, {mean(load):.1f} on average")
    print("".join(f"a stopped worker was known after {after:.2f} s\n" for after in known), end="")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
