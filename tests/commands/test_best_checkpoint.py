"""The checkpoint with the lowest validation loss is saved and kept, whatever interrupts the run."""

from math import inf, nan

import pytest

from platform.checkpoint.catalogue import Attempt, find_lowest_loss, list_dispensable
from platform.monitor import MetricsLog
from platform.monitor.goodput import validation_losses
from tests.harness.commands import in_this_process

RUN = (
    "+experiment=gpt_quick cluster=inline tensor=serial parallel.data=1 model.layers=1 model.d_model=16 model.heads=2 "
    "model.length=8 model.vocab=300 train.steps=12 train.global_batch=2 train.microbatch=2 eval.every=2 eval.batches=2 "
    "monitor.sample=0 optimizer.warmup_steps=0 optimizer.lr=0.1 optimizer.schedule=constant data=text data.path=a.txt "
    "data.validation=0.3 data.cache=cache checkpoint.best=true checkpoint.keep=1 run.dir=run"
).split()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i} sheep and {i + 1} wolves\n" for i in range(200)))
    return tmp_path


def best_of(place):
    rows = MetricsLog.read_rows(place / "run" / "metrics.jsonl")
    losses = {row["step"]: row["val_loss"] for row in rows if row.get("val_loss") is not None}
    return min(losses, key=losses.get), losses


def kept(place):
    return sorted(int(path.name.split("-")[1]) for path in (place / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("every", [0, 4])
def test_the_best_is_kept_beside_the_newest(place, every):
    arguments = [*RUN, f"checkpoint.every={every}"]
    for more in (["train.stop_at=7"], []):  # the second command knows what the first has measured
        done = in_this_process(*arguments, *more, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
    best, losses = best_of(place)
    assert len(losses) == 6 and best < 12, losses  # such a rate does not go down to the end
    assert kept(place) == sorted({best, 12})
    assert f"lowest val loss {losses[best]:.4f}, after step {best}: " in done.stdout
    assert f"step-{best:08d}-" in done.stdout.partition("lowest val loss")[2]


def test_without_evaluations_it_is_refused(place):
    done = in_this_process(*RUN, "eval.every=0", cwd=place)
    assert done.returncode == 2
    assert "config: checkpoint.best=true: eval.every=0: there are no evaluations; nearest legal: false" in done.stderr


def test_what_is_lowest_of_what_is_there():
    attempts = [Attempt(number, step, "0" * 6) for number, step in [(5, 4), (4, 6), (3, 4), (2, 2), (1, 1)]]
    losses = {1: 3.0, 2: 2.0, 4: 2.0, 5: 0.1, 8: 0.0}
    assert find_lowest_loss(attempts, losses) == [attempts[3]]  # of equal ones the first step
    assert (
        find_lowest_loss(attempts, {4: 1.0}) == [attempts[0]] and find_lowest_loss(attempts, {9: 1.0}) == []
    )  # of one step the newest attempt
    assert list_dispensable(attempts, 1, 0, losses) == [attempts[1], attempts[2], attempts[4]]
    assert list_dispensable(attempts, 1, 0) == attempts[1:]
    rows = [{"step": 1, "val_loss": nan}, {"step": 2, "val_loss": inf}, {"step": 3}, {"step": 4, "val_loss": 1.5}]
    assert validation_losses(rows) == {4: 1.5}
