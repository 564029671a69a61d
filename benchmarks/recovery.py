"""What a failure costs, from the journals of real runs of 8 local workers: seconds, beside their goals.

    OMP_NUM_THREADS=1 python benchmarks/recovery.py --trials 20

Every few steps a worker is killed from outside, at a random moment (its time is noted just before). known: until the
driver has journalled the failure; released: until all others are out of their groups; new step: until the end of the
first new step. spare: a spare takes the place; shrink: there is none, and the mesh gets smaller; cold: 8 workers are
needed, and one has to be started. stopped, lock: from SIGSTOP, and from a worker that begins to wait for a lock that
nobody gives back, until the driver knows, under elastic.hang_seconds=3. False alarms are failures that nobody caused.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from tests.harness import chaos  # noqa: E402

WORKERS = 8
HANG = 3.0  # seconds
GOALS = {"known": ("p99", 0.5), "released": ("p99", 1.0), "spare": ("p50", 0.5), "shrink": ("p50", 0.7),
         "cold": ("p50", 1.5), "stopped": ("p99", HANG), "lock": ("p99", HANG)}  # fmt: skip


class Killer(threading.Thread):
    """Sends `number` to a random seated worker after every generation's first step but the last, `trials` times, when
    nobody is starting; then ends the run. `sent`: when."""

    def __init__(self, config: chaos.Config, number: int, trials: int, whole: int, seed: int):
        super().__init__(daemon=True)
        self.config, self.number, self.trials, self.whole = config, number, trials, whole
        self.chance = random.Random(seed)
        self.sent: list[float] = []

    def run(self) -> None:
        struck = 0
        while len(self.sent) < self.trials:
            time.sleep(0.05)
            events = chaos.journal(self.config)
            last = {event["event"]: i for i, event in enumerate(events)}
            ready = len(chaos.members()) >= self.whole and all(map(idle, chaos.members()))
            if not ready or last.get("first_step", -1) < max(last.get("forming", 0), struck):
                continue
            formed = events[last["formed"]]
            if len(formed["workers"]) < WORKERS:
                continue
            time.sleep(self.chance.uniform(0.2, 0.8))
            struck = len(events)
            pid = self.chance.choice(formed["workers"])["pid"]
            self.sent.append(time.time())
            os.kill(pid, self.number)
        while not any(e["event"] == "first_step" and e["time"] > self.sent[-1] for e in chaos.journal(self.config)):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)


def idle(pid: int) -> bool:
    """Whether a process is not starting: it has lived for long enough to have imported torch and dialled in."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK") > SETTLE
    except OSError:
        return False


SETTLE = 12.0  # seconds


def run(name: str, trials: int, number: int = signal.SIGKILL, **elastic: object) -> dict[str, list[float]]:
    """The seconds of each phase, of as many trials."""
    with tempfile.TemporaryDirectory() as folder:
        c = chaos.configured(Path(folder, "run"), 10**6, tensor="1d", axes={"t": 2}, data=4, zero=1, vocab=512)
        c.optimizer.schedule, c.elastic.hang_seconds, c.elastic.attempts = "constant", HANG, 1000
        for key, value in elastic.items():
            setattr(c.elastic, key, value)
        killer = Killer(c, number, trials, WORKERS + c.elastic.spares, seed=len(name))
        killer.start()
        chaos.drive(c)
        events = chaos.journal(c)
    phases: dict[str, list[float]] = {"known": [], "released": [], name: [], "steps lost": []}
    for sent in killer.sent:
        after = [event for event in events if event["time"] >= sent]
        first = {event["event"]: event["time"] - sent for event in reversed(after)}
        phases["known"].append(first["failure"])
        phases["released"].append(first["released"])
        phases[name].append(first["first_step"])
    phases["steps lost"] = [float(event["steps_lost"]) for event in events if event["event"] == "rolled_back"]
    phases["false alarms"] = [float(sum(event["event"] == "failure" for event in events) - len(killer.sent))]
    return phases


def locked(trials: int) -> list[float]:
    """From the step whose worker begins to wait for a lock until the driver knows."""
    with tempfile.TemporaryDirectory() as folder:
        steps = 20 * trials + 5
        c = chaos.configured(Path(folder, "run"), steps, tensor="1d", axes={"t": 2}, data=4, zero=1, vocab=512)
        c.elastic.spares, c.elastic.hang_seconds = 1, HANG
        c.elastic.faults = [f"{20 * i + 10}:lock:{i % WORKERS}:backward" for i in range(trials)]
        chaos.drive(c)
        events = chaos.journal(c)
    starts = [event["time"] for event in events if event["event"] == "injected"]
    return [next(e["time"] for e in events if e["event"] == "failure" and e["time"] > t) - t for t in starts]


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.99 * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--hangs", type=int, default=3, help="trials of each kind of hang")
    parser.add_argument("--only", nargs="*", default=["spare", "shrink", "cold", "stopped", "lock"])
    options = parser.parse_args()
    of = {"spare": {"spares": 1}, "shrink": {}, "cold": {"min_workers": WORKERS}}
    phases: dict[str, list[float]] = {}
    for name in options.only:
        if name in of:
            parts = run(name, options.trials, **of[name])
        elif name == "stopped":
            parts = run("spare", options.hangs, signal.SIGSTOP, spares=1)
            parts = {"stopped": parts["known"], "false alarms": parts["false alarms"]}
        else:
            parts = {"lock": locked(options.hangs)}
        for phase, seconds in parts.items():
            phases.setdefault(phase, []).extend(seconds)
    lost, alarms = phases.pop("steps lost", []), phases.pop("false alarms", [])
    print("| phase | p50 (s) | p99 (s) | longest (s) | trials | goal (s) |\n|---|---|---|---|---|---|", file=sys.stderr)
    for phase, seconds in phases.items():
        which, goal = GOALS[phase]
        met = (median(seconds) if which == "p50" else p99(seconds)) <= goal
        print(f"| {phase} | {median(seconds):.2f} | {p99(seconds):.2f} | {max(seconds):.2f} | {len(seconds)} | "
              f"{which} <= {goal:g}: {'met' if met else 'missed'} |", file=sys.stderr)  # fmt: skip
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"steps lost: {sum(lost):.0f}; false alarms: {sum(alarms):.0f}; {os.cpu_count()} cores, load {load}",
          file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
