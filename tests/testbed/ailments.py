"""Ailments of a run: ways in which one is struck, and what `platform.status` must say of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platform.status.__main__ import status_data
from platform.status.seen_run import read_run_contents
from tests.testbed.ranks import ROOT

PATIENCE = 100.0  # seconds until a run has begun
NAMED = 40.0  # seconds until its ailment must be named; a driver acts on a hang after HANG
HANG = 30
SECONDS = 2.0  # that the command may take
STEADY = 6  # further looks, each half a second later, at what lasts
TINY = (
    "+experiment=gpt_quick model.layers=2 model.d_model=32 model.heads=4 model.length=16 model.vocab=300"
    " data=synthetic eval.every=0 monitor.sample=0 optimizer.warmup_steps=0 optimizer.schedule=constant"
    " train.global_batch=8 train.microbatch=1 train.steps=100000 cluster.device=cpu cluster.threads=1"
    f" elastic.hang_seconds={HANG} elastic.replace=false"
).split()
FOUR = "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=2".split()
ONE = "cluster=inline tensor=serial parallel.data=1".split()


@dataclass(frozen=True)
class Ailment:
    """Ailment of a run. `why`, `rank`, `words`: what the verdict on it must say; `arguments`: of the command; `ailing`:
    what `tests.doubles.ailing` does; `strike`: what is done to the driver's process after a few steps; `lasts`: True if
    it must be named before the driver has acted; `alone`: in one process."""

    why: str
    rank: int | None
    words: str
    arguments: Sequence[str] = ()
    ailing: str = ""
    strike: Callable[[subprocess.Popen[Any]], None] | None = None
    lasts: bool = False
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def fault(text: str, why: str, words: str, *arguments: str, lasts: bool = False) -> Ailment:
    """A fault of `elastic.faults`."""
    rank = None if why == "loss" else int(text.split(":")[1])
    return Ailment(why, rank, words, [f"elastic.faults=[4:{text}]", *arguments], lasts=lasts)


def ailing(how: str, why: str, rank: int | None, words: str, *arguments: str, who: str = "2", **more: Any) -> Ailment:
    """What `tests.doubles.ailing` does to one process from its fourth call on."""
    return Ailment(why, rank, words, ["extend=[tests.doubles.ailing]", *arguments], f"{who}:{how}:4", **more)


def send(number: int) -> Callable[[subprocess.Popen[Any]], None]:
    return lambda process: os.kill(process.pid, number)


STAYS = "elastic.min_workers=4"
SAVES = "checkpoint.every=2"
AILMENTS = {
    "killed at once": fault("kill:1", "died", "rank 1 [data0 t1]"),
    "killed in a backward pass": fault("kill:2:backward", "died", "died in step(4): the process was killed by SIGKILL"),
    "killed in the update": fault("kill:3:optimizer", "died", "rank 3 [data1 t1]"),
    "stopped": fault("stop:1", "hung", "its process is stopped by a signal", lasts=True),
    "stopped in a reduction": fault("stop:2:reduce", "hung", "its process is stopped", lasts=True),
    "raises": fault("raise:0", "failed", "Injected: injected by elastic.faults"),
    "raises in a backward pass": fault("raise:3:backward", "failed", "failed in step(4)"),
    "deadlock in a forward pass": fault("lock:1:forward", "hung", "in forward", lasts=True),
    "deadlock in the update": fault("lock:2:optimizer", "hung", "in optimizer", lasts=True),
    "deadlock in a backward pass": fault("lock:3:backward", "hung", "in backward", lasts=True),
    "deadlock at its data": fault("lock:0:data", "data", "for its data", lasts=True),
    "holds the interpreter": fault("gil:1:backward", "hung", "something holds its interpreter", lasts=True),
    "holds the interpreter at once": fault("gil:3", "hung", "something holds its interpreter", lasts=True),
    "a loss that is no number": fault("nan:1", "loss", "of nan", "train.on_spike=stop"),
    "a skipped loss": fault("nan:2", "loss", "train.on_spike=skip", "train.on_spike=skip"),
    "a flipped bit": fault("flip:1", "damaged", "has damaged memory", "train.verify_every=1"),
    "no memory": ailing("memory", "memory", 2, "had no memory left in step("),
    "sleeps": ailing("sleep", "hung", 2, "blocked for", lasts=True),
    "one step of long work": ailing("toil", "slow", 2, "while 3 others wait", lasts=True),
    "every step is slow": ailing("lag", "slow", 2, "mostly in its forward passes", lasts=True),
    **{
        f"slow {how}": ailing(f"lag {how}", "slow", 2, "mostly in work outside of passes, update and data", lasts=True)
        for how in ("in a step", "between steps", "before a step")
    },
    "its data does not come": ailing("data", "data", 2, "for its data", lasts=True),
    "data is slow": ailing("lazy data", "data", None, "waits for data", who="all"),
    "the disk is full": ailing("full", "storage", None, "No space left on device", SAVES, who="all"),
    "the disk is slow": ailing("slow disk", "storage", None, "storage is slow", SAVES, who="all"),
    "the driver's disk is dead": ailing("dead disk", "driver", None, "the driver itself stands still", who="driver"),
    "an error of the driver": ailing("error", "driver", None, "KeyError", who="driver"),
    "the driver is killed": Ailment("driver", None, "died without an end", strike=send(signal.SIGKILL)),
    "the driver is stopped": Ailment("driver", None, "stopped by a signal", strike=send(signal.SIGSTOP)),
    "drained": Ailment("drained", None, "drained by SIGTERM", [SAVES], strike=send(signal.SIGTERM)),
    "ended with nothing saved": Ailment(
        "stopped", None, "nothing of it is saved", ["checkpoint.on_stop=false"], strike=send(signal.SIGTERM)
    ),
    "too few are left": Ailment("places", None, "no more can come; rank 1", ["elastic.faults=[4:kill:1]", STAYS]),
    "too few are left, and a new one is late": ailing(
        "late", "places", None, "waits for workers, 3 of which are there",
        "elastic.faults=[4:kill:1]", STAYS, "elastic.replace=true", "elastic.wait=60", who="4",
    ),
    "raises, alone": Ailment("failed", 0, "injected", ["elastic.faults=[4:raise:0]"], alone=True),
    "sleeps, alone": ailing("sleep", "hung", 0, "blocked for", who="driver", alone=True, lasts=True),
}  # fmt: skip


class Sick:
    """A run with an ailment, in a context that ends it."""

    def __init__(self, folder: Path, ailment: Ailment):
        self.ailment, self.run_dir, self.log = ailment, folder / "run", folder / "log"
        self.wrong: list[str] = []  # lines of verdicts that accused somebody else

    def __enter__(self) -> Sick:
        kind = ONE if self.ailment.alone else FOUR
        command = [sys.executable, "-m", "platform.launch", *TINY, *kind, *self.ailment.arguments]
        more = {"AILING": self.ailment.ailing} if self.ailment.ailing else {}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"run.dir={self.run_dir}"], stdout=log, stderr=log, env=environment, cwd=ROOT
            )
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
        self.process.wait()

    def verdict(self) -> dict[str, Any]:
        """Wait until the ailment is named, and return how the run is then, as data."""
        deadline = time.monotonic() + PATIENCE
        if strike := self.ailment.strike:
            while not (self.steps() > 4):
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.2)
            strike(self.process)
        status: dict[str, Any] = {"verdict": None}
        while time.monotonic() < deadline + NAMED and not self.named(status):
            time.sleep(0.5)
            if (self.run_dir / "journal.jsonl").exists():
                status = self.look()
        return status

    def look(self) -> dict[str, Any]:
        """Return how the run is, as data, and note whom it accuses wrongly."""
        status = status_data(read_run_contents(self.run_dir))
        said, rank = status["verdict"] or {}, self.ailment.rank
        if (rank is not None and said.get("rank") not in (None, rank)) or said.get("why") == "link":
            self.wrong.append(said["line"])
        return status

    def others_named(self) -> list[str]:
        """Look on at an ailment that lasts, until the driver acts, and return the lines of what else is said of it."""
        others: list[str] = []
        for _ in range(STEADY if self.ailment.lasts else 0):
            time.sleep(0.5)
            seen = self.look()
            if self.acted():
                break
            others += [] if self.named(seen) else [str(seen["verdict"] and seen["verdict"]["line"])]
        return others

    def named(self, status: dict[str, Any]) -> bool:
        """Return True if the verdict is the one on this ailment."""
        said, wanted = status["verdict"] or status.get("last_failure"), self.ailment
        return (
            bool(said) and (said["why"], said.get("rank")) == (wanted.why, wanted.rank) and wanted.words in said["line"]
        )

    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def acted(self) -> bool:
        """Return True if the driver has found a failure by itself."""
        return '"event": "failure"' in (self.run_dir / "journal.jsonl").read_text()


def by_command(run_dir: Path) -> tuple[dict[str, Any], float]:
    """Return what the command says of a run, as data, and the seconds of a processor that it took: on an idle machine
    it takes as long."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "platform.status", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    after = os.times()
    assert done.returncode in (0, 1), done.stderr
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads(done.stdout), seconds
