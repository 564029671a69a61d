"""Strike a job of Slurm and the workers of its run every few seconds, as long as is asked for: is anything lost, does
anything grow, or remain?

    OMP_NUM_THREADS=1 python benchmarks/soak.py --minutes 20 --seed 0

The job is the script that `python -m platform.jobs slurm` writes, run with stand-ins for Slurm's commands: its node,
Ray's head, supervisor, driver and workers are real. Each life of it ends as Slurm ends one (`ENDS`), and the next one
goes on as a requeue or `sbatch` does; every fourth life has workers that are actors of its Ray, the others forked ones.
Some lives are ended while they start. Meanwhile strike, in turn: signals to random workers (SIGKILL, SIGSTOP), a second
death while the survivors of the first form a mesh, every kind of fault of `elastic.faults`, a flood of strangers at the
driver's port, and a full disk under the run directory (a small tmpfs: needs root, else left out).

Prints a line every so often: resident memory, open files and threads of the driver and (largest) of the workers that
have lived for a while; processes; steps and strikes. Exit status 1 where a step, its samples, loss or gradient norm,
also of one that was done again, is not that of an undisturbed run; a step was lost, though Slurm had left time to save
or memory was whole; a life ended otherwise than it should, or left a process or a file; memory, files or threads grew
by more than `--growth` from the first to the last third of the time; or a kind of strike never happened.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from platform.config.run_rules import FAULT_KINDS  # noqa: E402
from platform.jobs.slurm import render_slurm_job  # noqa: E402
from platform.monitor import JsonLines, compute_goodput, cost_line  # noqa: E402
from platform.monitor.events import parse_event  # noqa: E402
from tests.harness.commands import QUICK, SMALL  # noqa: E402
from tests.harness.process_tree import descendants, gone, parents  # noqa: E402
from tests.harness.process_use import Use, members, port_of, words_of  # noqa: E402
from tests.harness.slurm import SlurmJob  # noqa: E402
from tests.harness.slurm_ends import ENDS, end_life, kill, send  # noqa: E402

STRIKES = ("SIGKILL", "strangers", "second death", "full disk", "SIGSTOP", "second death")  # in turn
TYPED = [
    *(QUICK, *SMALL, "data=synthetic", "precision=fp64", "model.dropout=0.1", "optimizer.schedule=constant"),
    *(
        "optimizer.warmup_steps=2",
        "optimizer.lr=1e-4",
        "train.steps=20000",
        "train.global_batch=16",
        "train.microbatch=2",
    ),
]
LAYOUT = [
    *("tensor=1d", "tensor.axes.t=2", "parallel.data=2", "parallel.zero=1", "elastic.spares=1", "job.workers=5"),
    *(
        "cluster.device=cpu",
        "cluster.threads=1",
        "checkpoint.every=5",
        "train.verify_every=1",
        "elastic.hang_seconds=5",
    ),
    *("elastic.attempts=20", "job.retries=1000", "job.interface=lo", "extend=[tests.doubles.slow_steps]"),
]
STARTING = "while it starts"  # a life that is ended then
WORKERS, FEWEST = 4, 4  # with fewer none is struck
FAULT_STEPS = range(13, 20000, 20)  # of elastic.faults; never the first after a checkpoint, which is not tried again
STEP_SECONDS = "0.2"
NEAR = 4  # steps: a strike must not meet a fault; two who die at once may be all that held a part of the state
OLD = 10.0  # seconds: a process that has lived for longer since a step was done has all that it needs
FLOOD_SECONDS = 5.0
CALM_SECONDS = 15.0  # after a flood, until nobody who said nothing is still connected
FULL_SECONDS = 4.0  # that the disk stays full
DISK_MB = 64
SECOND_SECONDS, SPREAD_SECONDS = 10.0, 0.3  # for a mesh to begin to form after a death; the second one, after that
TOLERANCE = 1e-9  # relative, of loss and gradient norm
LATE_SECONDS, EARLY_SECONDS = (8.0, 30.0), 25.0  # when a life is ended: after its first step, or after its start
LIFELESS = 300.0  # seconds without a step; only bounds a soak that has failed
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): orphans stay below this process


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


@dataclass
class Life:
    """One life of the job. `rows`: in the metrics file at its start; `status`: of its script, None if that was killed;
    `late`: it had done a step, and was not ended while it started."""

    end: str
    crew: str
    rows: int
    late: bool
    status: int | None = None

    @property
    def saves(self) -> bool:
        """Return True if nothing may be lost: there was time, and no Ray that a signal to all processes ends."""
        end = ENDS[self.end]
        return end.status is not None and not (self.crew == "ray" and end.whom == "tree")


class Soak:
    """Lives of a job, one after the other, strikes and what is seen of them. `struck`: how often by what."""

    def __init__(self, folder: Path, disk: Path | None, options: argparse.Namespace):
        self.options, self.disk, self.run_dir = options, disk, (disk or folder) / "run"
        self.chance = random.Random(options.seed)
        self.order = self.chance.sample([*ENDS], len(ENDS))
        self.strikes = [kind for kind in STRIKES if disk or kind != "full disk"]
        self.struck: Counter[str] = Counter(dict.fromkeys((*self.strikes, *ENDS, STARTING), 0))
        self.strikes_done = 0
        faults = [
            f"{s}:{FAULT_KINDS[i % len(FAULT_KINDS)]}:{self.chance.randrange(WORKERS)}"
            for i, s in enumerate(FAULT_STEPS)
        ]
        own = [f"run.dir={self.run_dir}", f"checkpoint.url={self.run_dir}/checkpoints"]
        script = render_slurm_job([*TYPED, *LAYOUT, *own, f"elastic.faults=[{','.join(faults)}]"])
        environment = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), "STEP_SECONDS": STEP_SECONDS}
        self.job = SlurmJob(folder, script, ["node1"], **environment)
        self.seen: list[tuple[str, Use | None, Use | None]] = []  # crew, driver, workers
        self.lives: list[Life] = []
        self.wrong: list[str] = []
        self.born: dict[int, float] = {}
        self.calm_from = 0.0  # strangers that are still connected count among the driver's files
        self.began = self.next_strike = self.next_look = time.monotonic()

    def raw(self) -> list[dict[str, Any]]:
        """Read all rows of the metrics file, also those of steps that were done again later."""
        rows = []
        with suppress(FileNotFoundError):
            for line in (self.run_dir / "metrics.jsonl").read_bytes().splitlines():
                with suppress(ValueError):  # torn
                    rows.append(json.loads(line))
        return rows

    def journal(self) -> list[dict[str, Any]]:
        path = self.run_dir / "journal.jsonl"
        return JsonLines.read_objects(path) if path.exists() else []

    def run(self) -> None:
        """Let the job live, again and again, until the time is over."""
        while time.monotonic() < self.began + 60 * self.options.minutes:
            i, late = len(self.lives), len(self.lives) % 5 != 4
            turn = sum(life.late for life in self.lives)
            end = self.order[turn % len(ENDS)] if late else self.chance.choice(self.order)
            life = Life(end, "ray" if (i + turn // len(ENDS)) % 4 == 2 else "processes", len(self.raw()), late)
            self.lives.append(life)
            self.live(life)
            self.struck[end if life.late else STARTING] += 1

    def live(self, life: Life) -> None:
        """Run one life of the job to its end; note what is wrong with that."""
        name, end, before = f"life {len(self.lives)} ({life.end}, {life.crew})", ENDS[life.end], time.monotonic()
        events = len(self.journal())
        with self.job.started(f"cluster={life.crew}") as process:
            self.watch(life, process)
            if process.poll() is not None:
                self.wrong.append(f"{name}: ended by itself with status {process.returncode}")
            folders = {words_of(pid).split(b"\0")[-2] for pid in descendants() if b"leftovers.py" in words_of(pid)}
            asked = time.monotonic()
            since = self.journal()[events:]
            whole = all(event["event"] != "not_whole" for event in since)  # two deaths may take all copies
            if whole and (lost := sum(event["steps_lost"] for event in since if event["event"] == "rolled_back")):
                self.wrong.append(f"{name}: {lost} steps were lost within it")
            life.status = end_life(end, self.job, process, self.chance)
            took = time.monotonic() - asked
            if life.saves and life.status is None:
                self.wrong.append(f"{name}: did not end within {end.wait:.0f} s")
            elif life.late and life.saves and (life.status, self.job.requeued) != (end.status, end.requeues):
                self.wrong.append(f"{name}: status {life.status}, requeued {self.job.requeued}")
            if self.job.requeued and not end.requeues:
                self.wrong.append(f"{name}: has asked for a requeue")
        if not gone(descendants()):
            self.wrong.append(f"{name}: processes are left")
            kill(descendants())
        for folder in map(os.fsdecode, folders):
            if life.saves and os.path.exists(folder):
                self.wrong.append(f"{name}: {folder} is left")
            shutil.rmtree(folder, ignore_errors=True)
        rows = self.raw()
        print(f"{name}: {before - self.began:.0f} to {asked - self.began:.0f} s, and {took:.1f} s to end with status"
              f" {life.status}; {len(rows) - life.rows} steps, the last one {rows[-1]['step'] if rows else 0}",
              file=sys.stderr, flush=True)  # fmt: skip

    def watch(self, life: Life, process: subprocess.Popen[bytes]) -> None:
        """Watch a life, and strike at its workers, until the moment of its end."""
        began, stepped = time.monotonic(), None
        early = began + self.chance.uniform(0, EARLY_SECONDS)
        while process.poll() is None:
            now, tree = time.monotonic(), parents()
            if not life.late:
                if now >= early:
                    return
            elif stepped is None:
                stepped = now + self.chance.uniform(*LATE_SECONDS) if len(self.raw()) > life.rows else None
                if now > began + LIFELESS:
                    self.wrong.append(f"life {len(self.lives)}: no step in {LIFELESS:.0f} s")
                    return
            elif now >= stepped:
                return
            below = descendants(process.pid)
            drivers = {pid for pid in below if b"platform.launch" in words_of(pid) and b"srun" not in words_of(pid)
                       and b"platform.jobs" not in words_of(pid)}  # fmt: skip
            alive = members(tree, below)
            self.born = {pid: self.born.get(pid, now) for pid in alive | drivers if stepped}
            if stepped and now >= self.next_strike and len(alive) >= FEWEST and self.goes_on():
                self.next_strike = now + self.options.every * self.chance.uniform(0.5, 1.5)
                self.strike(life, alive, min(drivers, default=0))
            if now >= max(self.next_look, self.calm_from):
                self.next_look = now + self.options.look
                self.look(life, drivers, alive, len(below))
            time.sleep(0.5)

    def strike(self, life: Life, alive: set[int], driver: int) -> None:
        """Strike at a worker, or at what the run stands on."""
        kind = self.strikes[self.strikes_done % len(self.strikes)]
        self.strikes_done += 1
        match kind:
            case "strangers" if life.crew == "ray" or not (port := port_of(driver)):
                return  # those are Ray's ports
            case "strangers":
                self.flood(port)
            case "full disk":
                self.fill()
            case "second death":
                if not self.kill_two(alive):
                    return
            case _:
                send([self.chance.choice(sorted(alive))], signal.Signals[kind])
        self.struck[kind] += 1

    def kill_two(self, alive: set[int]) -> bool:
        """Kill a worker, and another one as the mesh without it forms; return whether one formed."""
        first, second = self.chance.sample(sorted(alive), 2)
        formed, deadline = self.formations(), time.monotonic() + SECOND_SECONDS
        send([first], signal.SIGKILL)
        while self.formations() == formed:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        time.sleep(self.chance.uniform(0, SPREAD_SECONDS))
        send([second], signal.SIGKILL)
        return True

    def formations(self) -> int:
        """Return the number of formations that have begun."""
        return sum(event["event"] == "forming" for event in self.journal())

    def flood(self, port: int) -> None:
        """Start a process that floods the driver's port.

        Not that of torch's TCPStore, through which a generation forms: where strangers are connected to it when it is
        closed, libuv keeps their buffers for good (16 KB each, torch 2.13).
        """
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
        time.sleep(FULL_SECONDS)
        filler.unlink()

    def goes_on(self) -> bool:
        """Return whether a step was done since the last strike (on a busy machine new workers take their time) and none
        with an injected fault is near."""
        done = self.raw()[-1]["step"]
        if any(0 <= step - done <= NEAR for step in FAULT_STEPS):
            return False
        last = {event["event"]: i for i, event in enumerate(self.journal())}
        return last["first_step"] > max(last["starting"], last["forming"], last.get("failure", -1))

    def look(self, life: Life, drivers: set[int], alive: set[int], processes: int) -> None:
        """Note and print what the processes that have lived for a while use."""
        now, rows = time.monotonic(), self.raw()
        old = {pid for pid, since in self.born.items() if now - since >= OLD}
        driver, workers = Use.of(drivers & old), Use.of(alive & old)
        self.seen.append((life.crew, driver, workers))
        print(f"{(now - self.began) / 60:7.1f} {driver or ' ' * 21} | {workers or ' ' * 21} | {processes:9} "
              f"{rows[-1]['step'] if rows else 0:6} {self.struck.total():6} {os.getloadavg()[0]:5.1f}",
              file=sys.stderr, flush=True)  # fmt: skip

    def growth(self) -> Iterator[str]:
        """Yield what grew, a line each: the largest of the last third beside that of the first."""
        third = len(self.seen) // 3
        for crew in ("processes", "ray"):
            for who, place in (("driver", 1), ("workers", 2)):
                first, last = ([entry[place] for entry in part if entry[0] == crew and entry[place]]
                               for part in (self.seen[:third], self.seen[-third:]))  # fmt: skip
                if first and last:
                    for name, *uses in zip(Use._fields, zip(*first), zip(*last), strict=True):  # noqa: B905
                        a, b = map(max, uses)
                        if b > a * (1 + self.options.growth) + (3 if name != "mb" else 0):
                            yield f"{crew}: {who}: {name} grew from {a:.0f} to {b:.0f}"

    def lost(self, rows: list[dict[str, Any]]) -> Iterator[str]:
        """Yield what was lost between two lives that should not have been, and tell what was done again."""
        again: Counter[str] = Counter()
        for i, (life, after) in enumerate(zip(self.lives, self.lives[1:], strict=False)):
            if after.rows > life.rows and (followed := rows[after.rows :]):  # else it had nothing to lose
                done = rows[after.rows - 1]["step"]  # by it: a life before may have got farther, and been killed
                steps = done + 1 - followed[0]["step"]
                again[life.end] += steps
                if steps < 0 or (steps and life.saves):
                    yield f"life {i + 1} ({life.end}, {life.crew}): {steps} steps before step {done} were lost"
        print("done again:", ", ".join(f"{kind} {count}" for kind, count in again.items()), file=sys.stderr)


def different(rows: list[dict[str, Any]], folder: Path) -> Iterator[str]:
    """Yield how rows differ from those of the same run in one process that nothing happens to."""
    alone, last = folder / "alone", max((row["step"] for row in rows), default=0)
    own = [
        "cluster=inline",
        "cluster.threads=1",
        "tensor=serial",
        "parallel.data=1",
        f"run.dir={alone}",
        f"train.stop_at={last}",
    ]
    done = subprocess.run([sys.executable, "-m", "platform.launch", *TYPED, *own], capture_output=True, text=True)
    if done.returncode:
        yield f"the undisturbed run ended with {done.returncode}: {done.stderr[-500:]}"
        return
    wanted = {row["step"]: row for row in JsonLines.read_objects(alone / "metrics.jsonl")}
    if {row["step"] for row in rows} != {*wanted}:
        yield f"steps are missing: {sorted({*wanted} - {row['step'] for row in rows})[:10]}"
    most = 0.0
    for row in rows:
        want = wanted[row["step"]]
        if row["samples"] != want["samples"]:
            yield f"step {row['step']}: samples {row['samples']} instead of {want['samples']}"
        for key in ("loss", "grad_norm"):
            apart = abs(row[key] - want[key]) / abs(want[key])
            most = max(most, apart)
            if not apart <= TOLERANCE:
                yield f"step {row['step']}: {key} {row[key]!r} instead of {want[key]!r}"
    print(f"{len(rows)} rows of {len(wanted)} steps; at most {most:.1e} from the undisturbed run", file=sys.stderr)


def verdict(soak: Soak, folder: Path) -> list[str]:
    """Return what is wrong with a soak that has ended, a line each; prints its numbers."""
    rows, events = soak.raw(), soak.journal()
    whole = sum(event["event"] == "not_whole" for event in events)
    injected = Counter(f.split(":")[1] for event in events if event["event"] == "injected" for f in event["faults"])
    struck = soak.struck | Counter({kind: injected[kind] for kind in FAULT_KINDS})
    wrong = [*soak.wrong, *soak.growth(), *soak.lost(rows), *list(different(rows, folder))[:20]]
    wrong += [f"{kind} never struck" for kind in (*soak.struck, *FAULT_KINDS) if not struck[kind]]
    crews = Counter(life.crew for life in soak.lives)
    kinds = f"{crews['processes']} of forked workers, {crews['ray']} of Ray's actors"
    cost = cost_line(compute_goodput(map(parse_event, events)))
    print(f"{len(soak.lives)} lives ({kinds}); {cost}; {whole} times memory was not whole", file=sys.stderr)
    print("strikes:", "; ".join(f"{kind} {count}" for kind, count in struck.items()), file=sys.stderr)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=10, help="seconds between two strikes at workers, on average")
    parser.add_argument("--look", type=float, default=15, help="seconds between two lines")
    parser.add_argument("--growth", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="copy the job's log and the run's records here")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as name, small_disk(name) as disk:
        folder = Path(name)
        print("minutes  driver files threads | workers files threads | processes  steps struck  load", file=sys.stderr)
        soak = Soak(folder, disk, options)
        try:
            soak.run()
            wrong = verdict(soak, folder)
        finally:
            kill(descendants())
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                for path in (folder / "out", *soak.run_dir.glob("*.jsonl")):
                    shutil.copy(path, options.keep)
        print("\n".join(wrong) or "nothing was lost, nothing grew, nothing is left", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
