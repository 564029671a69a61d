"""SIGKILL of a worker or of the driver while it saves: the same command goes on, and ends where it would have ended."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import find_newest_checkpoint, list_attempts, verify_checkpoint
from platform.checkpoint.moves import read_tensor
from platform.monitor import JsonLines, MetricsLog
from tests.doubles import killer
from tests.harness.commands import QUICK, SMALL, TIMEOUT

COMMAND = (
    "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1 data=synthetic model.dropout=0.1 "
    "optimizer.warmup_steps=2 checkpoint.every=1 elastic.min_workers=2 extend=[tests.doubles.killer] run.dir=run"
).split()
PHASES = {
    "snapshot": ("worker", "snapshot( done)?"),
    "write": ("worker", r"write blocks-\d+.bin .*"),
    "before the manifest": ("driver", "write manifest.json (write|replace)"),
    "after the manifest": ("driver", "write manifest.json done"),
    "pruning": ("driver", "delete (step|manifest|blocks).*"),
}

SEEDS, MOMENTS = range(5), 6


@dataclass
class Run:
    folder: Path
    steps: int
    restored: list[str] = field(default_factory=list)  # what the lives went on from
    torn: list[tuple[str, str]] = field(default_factory=list)  # and what they found beside it

    @property
    def directory(self) -> Path:
        return self.folder / "run"

    @property
    def storage(self):
        return open_storage(str(self.directory / "checkpoints"))

    def journal(self) -> list[dict]:
        path = self.directory / "journal.jsonl"
        return JsonLines.read_objects(path) if path.exists() else []

    def start(self) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "platform.launch", QUICK, *SMALL, *COMMAND, f"train.steps={self.steps}"]
        environment = {**os.environ, killer.FOLDER: str(self.folder)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(line, cwd=self.folder, env=environment, **pipes)

    def life(self, kill: Callable[[subprocess.Popen[str]], None] = lambda process: None) -> int:
        """One launch, which must go on from what is the newest good checkpoint before it; the status."""
        newest, before = find_newest_checkpoint(self.storage), len(self.journal())
        assert all("incomplete" in reason for _, reason in newest.refused), newest.refused
        self.torn += newest.refused
        process = self.start()
        try:
            kill(process)
            out = process.communicate(timeout=TIMEOUT)[0]
        finally:
            process.kill()
            process.wait()
        events = [e for e in self.journal()[before:] if e["event"] == "restored"]  # from memory: no directory
        restored = [e["directory"] for e in events if "directory" in e]
        assert restored[:1] in ([], [newest.directory]), out
        self.restored += restored
        assert process.returncode in (0, 1, -signal.SIGKILL), out
        return process.returncode

    def result(self):
        """Loss and gradient norm of every step, and the last checkpoint's tensors."""
        rows = MetricsLog.read_rows(self.directory / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, self.steps + 1))
        last, before = sorted(
            (a.directory_name for a in list_attempts(self.storage)), reverse=True
        )  # and nothing is left of what was torn
        verify_checkpoint(self.storage, before)
        manifest = verify_checkpoint(self.storage, last)
        assert manifest.meta.step == self.steps
        tensors = {name: read_tensor(self.storage, last, manifest, name) for name in manifest.tensors}
        return [(row["loss"], row["grad_norm"], row["samples"]) for row in rows], tensors


def equal(actual, wanted) -> bool:
    (rows, tensors), (rows_wanted, tensors_wanted) = actual, wanted
    assert tensors.keys() == tensors_wanted.keys() and len(tensors) > 10
    return rows == rows_wanted and all(torch.equal(t, tensors_wanted[name]) for name, t in tensors.items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """`undisturbed(steps)`: what a run gives that nobody kills."""
    results = {}

    def result(steps: int):
        if steps not in results:
            run = Run(tmp_path_factory.mktemp("undisturbed"), steps)
            assert run.life() == 0
            results[steps] = run.result()
        return results[steps]

    return result


def survives(tmp_path: Path, undisturbed, orders: list[tuple[str, str, int]], steps: int) -> None:
    for place, order in enumerate(orders):
        killer.order(tmp_path, place, *order)
    run = Run(tmp_path, steps)
    for _ in range(len(orders) + 1):
        if run.life() == 0:
            break
    assert len(list(tmp_path.glob(f"*{killer.DONE}"))) == len(orders), "every order was obeyed"
    assert run.restored and run.torn
    assert equal(run.result(), undisturbed(steps))


def draw(phase: str, chance: random.Random, saves: int) -> tuple[str, str, int]:
    """An order for a moment of the phase, in one of the first `saves` saves but the very first."""
    who, moment = PHASES[phase]
    per_save = {"write": 9, "before the manifest": 2, "snapshot": 2}.get(phase, 1)
    return (
        who + (str(chance.randrange(2)) if who == "worker" else ""),
        moment,
        chance.randint(per_save + 1, per_save * saves),
    )


@pytest.mark.full
def test_killed_while_saving(tmp_path, undisturbed, record_count):
    chance, phases = random.Random(0), ("write", "before the manifest", "after the manifest")
    record_count("SIGKILL while saving", len(phases), len(phases) + len(PHASES) * len(SEEDS) + MOMENTS)
    survives(tmp_path, undisturbed, [draw(phase, chance, 2) for phase in phases], 12)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_in_every_phase_of_saving(tmp_path, undisturbed, seed):
    chance = random.Random(seed)
    survives(tmp_path, undisturbed, [draw(phase, chance, 2) for phase in PHASES], 16)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_killed_at_any_moment(tmp_path, undisturbed):
    """By the clock, from outside: the driver or a worker."""
    chance, run, killed = random.Random(0), Run(tmp_path, 200), 0
    while killed < MOMENTS:
        generation = max((e["generation"] for e in run.journal()), default=0) + 1

        def kill(process: subprocess.Popen[str], generation: int = generation) -> None:
            of = {}
            while "first_step" not in of:
                assert process.poll() is None
                time.sleep(0.02)
                of = {e["event"]: e for e in run.journal() if e["generation"] == generation}
            time.sleep(chance.uniform(0, 0.4))
            workers = [worker["pid"] for worker in of["formed"]["workers"]]
            os.kill(chance.choice([process.pid, *workers]), signal.SIGKILL)

        assert run.life(kill) != 0, "it was done before it was killed"
        killed += 1
    assert run.life() == 0
    assert run.restored and equal(run.result(), undisturbed(200))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_workers_die_while_they_copy_snapshots_to_their_peers(tmp_path):
    """It takes no launch more: what the survivor holds, and what the copies give, is gone on from."""
    outcomes, numbers = {}, (2, 5)
    for name in ("undisturbed", "struck"):
        folder = tmp_path / name
        folder.mkdir()
        for place, number in enumerate(numbers if name == "struck" else ()):
            killer.order(folder, place, f"worker{place}", "copies", number)
        run = Run(folder, 8)
        assert run.life() == 0
        outcomes[name] = run.result(), [e for e in run.journal() if e["event"] == "failure"]
    (result, failures), (wanted, none) = outcomes["struck"], outcomes["undisturbed"]
    assert failures and not none
    assert len([*(tmp_path / "struck").glob(f"*{killer.DONE}")]) == len(numbers), "every order was obeyed"
    assert equal(result, wanted)
