"""Commands say what they do and how far they are while they load, train, save, restore, convert and verify."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from platform.boundary import terminal
from platform.boundary.terminal import LongPhase
from platform.checkpoint.__main__ import main as checkpoint
from platform.launch import main as launch
from platform.weights.__main__ import main as weights

TINY = (
    "+experiment=gpt_quick cluster=processes cluster.device=cpu tensor=1d tensor.axes.t=2 parallel.data=1 "
    "model.layers=1 model.d_model=32 model.heads=2 model.length=32 model.vocab=300 train.steps=4 train.global_batch=2 "
    "train.microbatch=2 eval.every=2 eval.batches=1 monitor.sample=4 optimizer.warmup_steps=0 data=text "
    "data.path=d.txt data.cache=cache checkpoint.every=2 run.dir=run"
).split()


class Shown(NamedTuple):
    """A phase as its user saw it last."""

    what: str
    done: float
    total: float
    unit: str


class Watcher:
    """Stands for the teller of this process's phases, and keeps all of them, however short."""

    def __init__(self) -> None:
        self.seen: list[Shown] = []

    def add_phase(self, one: LongPhase) -> None:
        assert terminal._draw_phase(one, one.began + 2) and one.describe_progress(one.began + 2)

    def end_phase(self, one: LongPhase) -> None:
        one.describe_progress(one.began + 2)
        self.seen.append(Shown(one.what, one.done, one.total, one.unit))

    def taken(self) -> dict[str, list[Shown]]:
        """Return what was seen since the last time, by what it was."""
        phases, self.seen = {one.what: [two for two in self.seen if two.what == one.what] for one in self.seen}, []
        return phases


@pytest.fixture
def watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    monkeypatch.delenv("NO_PROGRESS")
    monkeypatch.chdir(tmp_path)
    display = Watcher()
    monkeypatch.setattr(terminal, "_current_phase_display", lambda: display)
    return display


def whole(shown: list[Shown], unit: str) -> bool:
    """Return True if the first of some phases has said how much there was to do, and in the end that it was done."""
    return shown[0].unit == unit and shown[0].done == shown[0].total > 0


def test_every_phase_of_a_run_and_of_what_becomes_of_its_weights(watcher: Watcher) -> None:
    Path("d.txt").write_text("a text of some words, said again and again\n" * 500)
    assert launch([*TINY, "train.stop_at=2"]) == 0
    seen = watcher.taken()
    assert seen.keys() >= {
        *(
            "importing torch, looking for checkpoints and weights",
            "training a tokenizer of 300 entries on 0.0 million characters",
        ),
        *("waiting for workers", "building the model", "the first step", "evaluating", "writing text"),
        "writing the checkpoint of step 2",
    }, seen
    assert whole(seen["tokenising"], "characters") and whole(seen["starting workers"], "workers")
    assert launch(TINY) == 0
    assert [one.unit for one in watcher.taken()["restoring the checkpoint"]] == [
        "B"
    ]  # workers say how far, if it is long

    for command, line, word in [
        (weights, "export run/checkpoints model", "exporting"),
        (weights, "import model again", "importing"),
        (checkpoint, "export run/checkpoints one.safetensors", "exporting"),
        (checkpoint, "export run/checkpoints dcp --format dcp", "exporting"),
        (checkpoint, "verify again", "verifying step-"),
    ]:
        assert command(line.split()) == 0
        [shown] = [ones for what, ones in watcher.taken().items() if what.startswith(word)]
        assert whole(shown, "B"), line
    assert checkpoint("import one.safetensors third".split()) == 0
    [one] = watcher.taken()["importing"]
    assert one.unit == "B" and one.done > 0  # how much there is only its end shows
