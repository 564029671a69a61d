"""Real runs on local processes whose workers are killed, stopped and confused at random, beside the same run alone.

What must hold is compared with a world of one in fp64: `differences`. Used by test_chaos.py and by the benchmarks.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from platform.cluster.crew.job import WORKER
from platform.cluster.driver import drive_run
from platform.config.fields import Branch, Config, Parallel, Pipeline
from platform.config.fields import Tensor as TensorConfig
from platform.monitor import JsonLines, MetricsLog
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure
from tests.harness.process_tree import descendants, gone, parents

TOLERANCE = 1e-9  # relative, of loss and gradient norm
KINDS = ("kill", "stop", "raise", "lock", "gil")  # of faults
SECTIONS = ("", "data", "forward", "backward", "exposed_comm", "reduce", "optimizer", "checkpoint")

Event = dict[str, Any]


def configured(folder: Path, steps: int, **layout: Any) -> Config:
    """A run of a tiny model in fp64, `layout` as `tests.harness.oracle.configure` takes it."""
    c = configure(**{"global_batch": 16, "microbatch": 2, "layers": 4, "vocab": 300, **layout})
    c.run.dir, c.data.kind, c.train.steps = str(folder), "synthetic", steps
    c.cluster.kind, c.monitor.every = "processes", 1000
    c.elastic.hang_seconds, c.elastic.attempts = 2.0, 20
    return c


def drive(config: Config, worker: str = WORKER) -> int:
    """The exit status of the whole run, in this process."""
    plan = make_plan(config, stage_of=build_schedule(config, config.parallel.data).placement)
    return drive_run(config, plan, experiment="chaos", worker=worker)


def undisturbed(config: Config, folder: Path) -> list[Event]:
    """The rows of the same run in one process that nothing happens to."""
    c = replace(config, run=replace(config.run, dir=str(folder)), cluster=replace(config.cluster, kind="inline"))
    c = replace(c, tensor=TensorConfig(), branch=Branch(), pipeline=Pipeline(), parallel=Parallel())
    c = replace(c, elastic=type(c.elastic)(), checkpoint=type(c.checkpoint)())
    assert drive(c) == 0
    return rows(c)


def rows(config: Config) -> list[Event]:
    return MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))


def journal(config: Config) -> list[Event]:
    path = Path(config.run.dir, "journal.jsonl")
    return JsonLines.read_objects(path) if path.exists() else []


def differences(actual: Sequence[Event], expected: Sequence[Event]) -> list[str]:
    """What is not as in the undisturbed run, a line each; [] where nothing is."""
    lines = []
    if (ids := [row["samples"] for row in actual]) != (wanted := [row["samples"] for row in expected]):
        lines.append(f"samples {ids} instead of {wanted}")
    for row, other in zip(actual, expected, strict=False):
        for key in ("loss", "grad_norm"):
            if not abs(row[key] - other[key]) <= TOLERANCE * abs(other[key]):
                lines.append(f"step {row['step']}: {key} {row[key]!r} instead of {other[key]!r}")
    return lines


def random_faults(chance: random.Random, steps: int, count: int, ranks: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """So many for elastic.faults, of every kind where there are enough; the first steps and the last are left alone."""
    struck = sorted(chance.sample(range(3, steps), count))
    dealt = [*kinds] * (count // len(kinds)) + chance.sample(kinds, count % len(kinds))
    chance.shuffle(dealt)
    texts = [f"{step}:{kind}:{chance.randrange(ranks)}" for step, kind in zip(struck, dealt, strict=True)]
    sections = (chance.choice(SECTIONS) for _ in texts)
    return [f"{text}:{section}" if section else text for text, section in zip(texts, sections, strict=True)]


@dataclass
class Outside:
    """A thread beside the driver that sends `signals` to random workers of `config`'s run: each after one of `moments`
    is journalled and up to `delay` seconds have passed. `sent`: (time, signal, process id, event) of each."""

    config: Config
    chance: random.Random
    moments: Sequence[str]
    signals: Sequence[int]
    delay: float = 1.0
    sent: list[tuple[float, int, int, str]] = field(default_factory=list)

    def __enter__(self) -> Outside:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        seen = 0
        for number, moment in zip(self.signals, self.moments, strict=True):
            while moment not in (names := [event["event"] for event in journal(self.config)][seen:]):
                if self._over.wait(0.005):
                    return
            seen += names.index(moment) + 1
            if self._over.wait(self.chance.uniform(0, self.delay)):
                return
            if workers := members():
                pid = self.chance.choice(sorted(workers))
                self.sent.append((time.time(), number, pid, moment))
                os.kill(pid, number)


def members() -> set[int]:
    """The worker processes of this one."""
    tree = parents()
    forked = {pid for pid in descendants() if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    return {pid for pid in forked if tree.get(pid) in forked}


@contextmanager
def nothing_left() -> Iterator[None]:
    """That no process, descriptor, thread, shared memory or temporary file remains."""
    resource_tracker.ensure_running()  # multiprocessing's own, one for the life of this process
    processes, held = descendants(), _leavings()
    yield
    assert gone(descendants() - processes), "processes are left"
    deadline = time.monotonic() + 5
    while (left := {k: v for k, v in _leavings().items() if len(v) > len(held[k])}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, {kind: sorted(names - held[kind]) for kind, names in left.items()}


def _leavings() -> dict[str, set[str]]:
    def listed(folder: str) -> set[str]:
        return {name for name in os.listdir(folder) if name.startswith(("torch", "pymp", "psm", "sem.", "gloo"))}

    files = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    return {
        "files": {f"{fd}: {name}" for fd, name in files.items()},
        "threads": {f"{thread.ident} {thread.name}" for thread in threading.enumerate()},
        "shared memory": listed("/dev/shm"),
        "temporary files": listed(tempfile.gettempdir()),
    }


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")
