"""Strike one run of 8 workers every few seconds, for as long as is asked for: does anything grow, or remain?

    OMP_NUM_THREADS=1 python tests/benchmarks/soak.py --minutes 20 --every 15 --seed 0

What strikes, in turn: signals to random workers (SIGKILL, SIGSTOP), every kind of fault of `elastic.faults`, a flood of
strangers at the driver's port, and a full disk under the run directory (a small tmpfs: needs root, else left out).

Prints a line every so often: resident memory, open files and threads of the driver and (largest) of the workers that
have lived for longer than a minute; processes; steps, failures and goodput. Exit status 1 where memory, files or
threads of the driver or of a long-living worker grew by more than `--growth` from the first to the last third of the
time, a step was lost though memory was whole, the samples were not those of an undisturbed run, a process is left at
the end, or a kind of strike never happened.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from platform.cluster.wire.switchboard import Switchboard  # noqa: E402
from platform.config.checks import FAULT_KINDS  # noqa: E402
from platform.monitor import cost_line, goodput  # noqa: E402
from platform.monitor.records.events import from_plain  # noqa: E402
from tests.harness import chaos  # noqa: E402
from tests.harness.process_tree import descendants, gone  # noqa: E402

STRIKES = ("SIGKILL", "strangers", "SIGKILL", "full disk", "SIGSTOP")  # in turn
FEWEST = 6  # workers: with fewer none is struck
OLD = 60.0  # seconds: a worker that has lived for longer has all that it needs
FLOOD_SECONDS = 5.0
CALM_SECONDS = 15.0  # after a flood, until nobody who said nothing is still connected
NEAR = 4  # steps: a strike must not meet a fault
FULL_SECONDS = 4.0  # that the disk stays full
DISK_MB = 64
FAULT_STEPS = (*range(20, 400, 20), *range(800, 10**5, 400))  # of elastic.faults: every kind soon, however slow a step


class Use(NamedTuple):
    """Of a process."""

    mb: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Use:
        status = Path(f"/proc/{pid}/status").read_text()
        field = {key: value.split()[0] for key, _, value in (line.partition(":") for line in status.splitlines())
                 if value.split()}  # fmt: skip
        return cls(int(field["VmRSS"]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(field["Threads"]))

    @classmethod
    def most(cls, found: list[Use]) -> Use:
        return cls(*(max(values) for values in zip(*found, strict=True)))


def driver_port() -> int | None:
    """Return the port at which the driver in this process waits for its workers, None where it does not."""
    boards = (o for o in gc.get_objects() if isinstance(o, Switchboard))
    return next((board.address[1] for board in boards), None)


@contextmanager
def small_disk(folder: str) -> Iterator[Path | None]:
    """Mount a tmpfs of DISK_MB in `folder`; yields None where this process may not."""
    place = Path(folder, "disk")
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


class Soak(threading.Thread):
    """Strikes and watches, beside the driver in this process. `seen`: (seconds, driver, old workers, processes);
    `struck`: how often by what."""

    def __init__(self, config: chaos.Config, options: argparse.Namespace, disk: Path | None):
        super().__init__(daemon=True)
        self.config, self.options, self.disk, self.over = config, options, disk, threading.Event()
        self.chance = random.Random(options.seed)
        self.seen: list[tuple[float, Use, Use | None, int]] = []
        self.strikes = [kind for kind in STRIKES if disk or kind != "full disk"]
        self.struck: Counter[str] = Counter(dict.fromkeys(self.strikes, 0))
        self.calm_from = 0.0  # strangers that are still connected count among the driver's files

    def run(self) -> None:
        while not any(event["event"] == "first_step" for event in chaos.journal(self.config)):
            if self.over.wait(0.2):  # the run has ended without a step
                return
        self.began = time.monotonic()
        born: dict[int, float] = {}
        next_strike = next_look = self.began + self.options.every
        while (now := time.monotonic()) < self.began + 60 * self.options.minutes and not self.over.wait(0.5):
            alive = chaos.members()
            born = {pid: born.get(pid, now) for pid in alive}
            if now >= next_strike and len(alive) >= FEWEST and self.goes_on():
                next_strike = now + self.options.every * self.chance.uniform(0.5, 1.5)
                self.strike(alive)
            if now >= max(next_look, self.calm_from):
                next_look = now + self.options.look
                self.look(now, [pid for pid, since in born.items() if now - since >= OLD])
        os.kill(os.getpid(), signal.SIGTERM)

    def strike(self, alive: set[int]) -> None:
        kind = self.strikes[self.struck.total() % len(self.strikes)]
        self.struck[kind] += 1
        match kind:
            case "strangers":
                self.flood()
            case "full disk":
                self.fill()
            case _:
                os.kill(self.chance.choice(sorted(alive)), signal.Signals[kind])

    def flood(self) -> None:
        """Start a process that floods the driver's port.

        Not that of torch's TCPStore, through which a generation forms: where strangers are connected to it when it is
        closed, libuv keeps their buffers for good (16 KB each, torch 2.13).
        """
        if not (port := driver_port()):
            return
        self.calm_from = time.monotonic() + FLOOD_SECONDS + CALM_SECONDS
        script, seconds = str(Path(__file__).with_name("strangers.py")), str(FLOOD_SECONDS)
        seed = str(self.chance.randrange(10**6))
        process = subprocess.Popen([sys.executable, script, str(port), "--seconds", seconds, "--seed", seed])
        threading.Thread(target=process.wait, daemon=True).start()  # so that it does not stay a zombie

    def fill(self) -> None:
        """Leave no byte free under the run directory for FULL_SECONDS."""
        assert self.disk is not None
        filler = self.disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1):
                with suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        self.over.wait(FULL_SECONDS)
        filler.unlink()

    def goes_on(self) -> bool:
        """Return whether a step was done since the last strike (on a busy machine new workers take their time) and none
        with an injected fault is near: two who die at once may be all that held a part of the state."""
        done = len(chaos.rows(self.config))
        if any(0 <= step - done <= NEAR for step in FAULT_STEPS):
            return False
        last = {event["event"]: i for i, event in enumerate(chaos.journal(self.config))}
        return last["first_step"] > max(last["forming"], last.get("failure", -1))

    def look(self, now: float, old: list[int]) -> None:
        uses = []
        for pid in old:
            try:
                uses.append(Use.of(pid))
            except (OSError, KeyError):  # it was killed a moment ago
                continue
        driver, workers = Use.of(os.getpid()), Use.most(uses) if uses else None
        self.seen.append((now - self.began, driver, workers, len(descendants())))
        events = chaos.journal(self.config)
        cost, steps = goodput(map(from_plain, events)), len(chaos.rows(self.config))
        w = f"{workers.mb:7.0f} {workers.files:5} {workers.threads:7}" if workers else " " * 21
        print(
            f"{(now - self.began) / 60:7.1f} {driver.mb:7.0f} {driver.files:5} {driver.threads:7} | {w} | "
            f"{len(descendants()):9} {steps:6} {self.struck.total():6} {cost.failures:8} {cost.steps_lost:4} "
            f"{os.getloadavg()[0]:5.1f}",
            file=sys.stderr,
            flush=True,
        )


def growth(soak: Soak) -> list[str]:
    """What grew, a line each: the largest of the last third beside that of the first."""
    seen, lines = soak.seen, []
    first, last = seen[: len(seen) // 3], seen[-len(seen) // 3 :]
    for who, place in (("driver", 1), ("workers", 2)):
        before, after = ([entry[place] for entry in part if entry[place]] for part in (first, last))
        if before and after:
            for name, a, b in zip(Use._fields, Use.most(before), Use.most(after), strict=True):
                if b > a * (1 + soak.options.growth) + (3 if name != "mb" else 0):
                    lines.append(f"{who}: {name} grew from {a:.0f} to {b:.0f}")
    return lines


def configured(folder: Path, seed: int) -> chaos.Config:
    """Return the run that is struck: with ZeRO, a spare, checkpoints, and every kind of fault in turn."""
    config = chaos.configured(folder, 10**6, tensor="1d", axes={"t": 2}, data=4, zero=1, vocab=512)
    config.elastic.spares, config.checkpoint.every, config.train.verify_every = 1, 5, 1
    config.elastic.hang_seconds = 5.0
    config.optimizer.schedule = "constant"
    ranks = random.Random(seed)
    config.elastic.faults = [
        f"{s}:{FAULT_KINDS[i % len(FAULT_KINDS)]}:{ranks.randrange(8)}" for i, s in enumerate(FAULT_STEPS)
    ]
    return config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=15, help="seconds between two strikes, on average")
    parser.add_argument("--look", type=float, default=30, help="seconds between two lines")
    parser.add_argument("--growth", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, small_disk(folder) as disk:
        config = configured(Path(disk or folder, "run"), options.seed)
        print("minutes  driver files threads | workers files threads | processes  steps struck failures lost  load",
              file=sys.stderr)  # fmt: skip
        soak = Soak(config, options, disk)
        soak.start()
        status = chaos.drive(config)
        soak.over.set()
        soak.join()
        found, events = chaos.rows(config), chaos.journal(config)
        wrong = [] if status == 75 else [f"the run ended with status {status}"]
        wrong += growth(soak)
        wrong += [] if gone(descendants()) else ["processes are left"]
        if [row["samples"] for row in found] != [[16 * k, 16 * k + 16] for k in range(len(found))]:
            wrong.append("the samples are not those of an undisturbed run")
        cost = goodput(map(from_plain, events))
        lost = [event for event in events if event["event"] == "not_whole"]
        wrong += [f"{cost.steps_lost} steps were lost"] if cost.steps_lost else []
        injected = Counter(f.split(":")[1] for event in events if event["event"] == "injected" for f in event["faults"])
        struck = soak.struck | Counter({kind: injected[kind] for kind in FAULT_KINDS})
        wrong += [f"{kind} never struck" for kind in (*soak.struck, *FAULT_KINDS) if not struck[kind]]
        print(f"{len(found)} steps; {cost_line(cost)}; {len(lost)} times memory was not whole", file=sys.stderr)
        print("strikes:", ", ".join(f"{kind} {count}" for kind, count in struck.items()), file=sys.stderr)
        print("\n".join(wrong) or "nothing was lost, nothing grew, nothing is left", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
