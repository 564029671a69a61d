"""A byte that flips in a checkpoint, in each kind of its files: an older one is gone on from, or the run is refused
with the name of the file; nothing is trained on it."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from platform.monitor import JsonLines, MetricsLog
from tests.harness.commands import QUICK, in_this_process

RUN = (
    "cluster=inline tensor=serial parallel.data=1 model.layers=1 model.d_model=32 model.heads=2 model.length=16 "
    "model.vocab=300 train.steps=6 train.global_batch=2 train.microbatch=2 eval.every=0 monitor.sample=0 "
    "optimizer.warmup_steps=2 checkpoint.every=2 checkpoint.keep=3 data=text"
).split()
KINDS = ("blocks-00000.bin", "manifest.json", "tokenizer.json", "tokenizer_config.json")
READ = KINDS[:2]  # when a run goes on; its tokenizer is that of its data


@dataclass(frozen=True)
class Place:
    """A folder with a run; `data`: the folder of its data, `expected`: what it ends with undisturbed."""

    folder: Path
    data: Path
    expected: list[tuple[float, float]] = field(default_factory=list)

    def ends(self, *more: str) -> tuple[int, str]:
        data = [f"data.path={self.data}/d.txt", f"data.cache={self.data}/cache"]
        done = in_this_process(QUICK, *RUN, *data, "run.dir=run", *more, cwd=self.folder)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    @property
    def losses(self) -> list[tuple[float, float]]:
        return [(row["loss"], row["grad_norm"]) for row in MetricsLog.read_rows(self.folder / "run" / "metrics.jsonl")]

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "run" / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that has stopped after step 4 of 6."""
    folder = tmp_path_factory.mktemp("stopped")
    draw = random.Random(0)
    (folder / "d.txt").write_text("".join("".join(draw.choices("abcdefgh ", k=80)) + "\n" for _ in range(2000)))
    run = Place(folder, folder)
    assert run.ends()[0] == 0
    expected = run.losses
    shutil.rmtree(folder / "run")
    assert run.ends("train.stop_at=4")[0] == 0
    assert run.losses == expected[:4]
    return Place(folder, folder, expected)


@pytest.fixture
def place(stopped, tmp_path):
    """A copy of it."""
    shutil.copytree(stopped.folder / "run", tmp_path / "run")
    return replace(stopped, folder=tmp_path)


def flip(file: Path, seed: int, apart: int = 1 << 60) -> None:
    """Flips a bit; `apart`: and one in each further stretch of so many bytes."""
    data, draw = bytearray(file.read_bytes()), random.Random(seed)
    for at in range(draw.randrange(min(len(data), apart)), len(data), apart):
        data[at] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def goes_on(place: Place, kind: str, seed: int) -> None:
    older, newest = place.checkpoints
    flip(newest / kind, seed)
    status, said = place.ends("checkpoint.resume=auto")
    assert (status, place.losses) == (0, place.expected), said
    journal = JsonLines.read_objects(place.folder / "run" / "journal.jsonl")
    restored = [event["directory"] for event in journal if event["event"] == "restored"]
    assert restored == [older.name if kind in READ else newest.name]
    assert (f"{newest.name} is passed over: {kind}" in said) == (kind in READ), said


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_checkpoint_is_gone_on_from(place, kind):
    goes_on(place, kind, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize("kind", KINDS)
def test_any_bit_of_any_file(place, kind, seed):
    goes_on(place, kind, seed)


@pytest.mark.parametrize("kind", READ)
def test_where_none_is_whole_the_run_is_refused(place, kind):
    for checkpoint in place.checkpoints:
        flip(checkpoint / kind, seed=0)
    status, said = place.ends()
    assert status == 2 and kind in said.splitlines()[-1], said
    assert place.losses == place.expected[:4]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_whose_files_are_damaged_start_no_run(place, kind):
    """train.init reads the tokenizer too: whether the data are read by the same one."""
    newest = place.checkpoints[-1]
    flip(newest / kind, seed=0, apart=4096)
    status, said = place.ends(f"train.init={newest}", "run.dir=other")
    assert status == 2 and kind in said.splitlines()[-1], said
    assert not [*(place.folder / "other").glob("metrics.jsonl")]
