"""What commit 4773d8b9 left behind goes on: its run, checkpoint, plans, journal, metrics and token cache."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from platform.api import Config, Plan, compose, plan
from platform.boundary.storage import open_storage
from platform.checkpoint.blocks import list_held_tensors
from platform.checkpoint.catalogue import list_attempts, verify_checkpoint
from platform.checkpoint.moves import read_tensor
from platform.monitor import events
from platform.monitor.metrics import MetricsLog
from platform.plan import plan_data
from platform.report import __main__ as report
from platform.status import __main__ as status_command
from tests.harness.commands import in_this_process, warm_command

KEPT = Path(__file__).parent
TYPED = (KEPT / "arguments.txt").read_text().splitlines()
PLAN = ("cluster", "tensor", "parallel")
ALONE = ["cluster=inline", "cluster.device=cpu", "tensor=serial", "parallel.data=1"]
SPLIT = ["cluster=processes", "cluster.device=cpu", "tensor=2d", "tensor.axes.r=2", "tensor.axes.c=2"]
MOVED = "resume.allow=[data.path]"  # the data is a copy, elsewhere
# What the same commit gave when it went on
LOSS = {4: 5.502578823650584, 5: 5.465736343008114, 6: 5.455240121900323}
GRAD_NORM = {4: 0.9619475621864312, 5: 0.8807195979488762, 6: 0.8937140294107476}
VALIDATION = {2: 5.568344055040525, 4: 5.470551966254942, 6: 5.445524680400187}
DIGESTS = {"plan.json": "0f582ca4f56e6fd0", "experts.json": "3d9d30f73d31d460"}
EXPERTS = (KEPT / "README.md").read_text().rpartition("with `")[2].partition("`")[0].split()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy of what is kept, which may be changed."""
    for name in ("run", "texts", "cache"):
        shutil.copytree(KEPT / name, tmp_path / name)
    return tmp_path


def typed(*more: str) -> list[str]:
    """The arguments of the kept run but for its plan, then `more`."""
    return [*(a for a in TYPED if not a.startswith(PLAN)), *more]


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder, with its bytes and when it was written."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def goes_on(done: Any, kept: Path) -> None:
    """Check that the kept run ended after its last step, with the numbers that its own commit gave."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after step 4" in done.stdout
    rows = {row["step"]: row for row in MetricsLog.read_rows(kept / "run" / "metrics.jsonl")}
    assert [*rows] == [1, 2, 3, 4, 5, 6]
    for name, wanted in (("loss", LOSS), ("grad_norm", GRAD_NORM), ("val_loss", VALIDATION)):
        assert {step: rows[step][name] for step in wanted} == pytest.approx(wanted, rel=1e-9), name
    last = [*events.read_events(kept / "run" / "journal.jsonl")]
    [restored] = [e for e in last if isinstance(e, events.Restored) and e.directory]
    assert restored.step == 4 and restored.generation == 3


def test_the_run_goes_on_with_its_tokens(kept):
    cached = files(kept / "cache")
    assert len(cached) == 4
    goes_on(in_this_process(*typed(*ALONE, MOVED, "run.dir=run"), cwd=kept), kept)
    assert files(kept / "cache") == cached, "tokenised anew"


@pytest.mark.full
def test_the_run_goes_on_under_a_plan_of_four_ranks(kept):
    goes_on(warm_command(*typed(*SPLIT, MOVED, "parallel.data=1", "run.dir=run"), cwd=kept), kept)


def test_the_checkpoint_is_read_under_another_plan(kept, monkeypatch):
    """Every block that a rank of that plan holds is read, and together they are the whole."""
    monkeypatch.chdir(kept)
    storage = open_storage(str(kept / "run" / "checkpoints"))
    [attempt] = list_attempts(storage)
    manifest = verify_checkpoint(storage, attempt.directory_name)
    other = plan(
        compose(*typed(*SPLIT, "parallel.data=2", "parallel.zero=1", "run.dir=other")[1:], experiment="gpt_quick")
    )
    assert other.mesh.world_size == 8
    seen = set()
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        for held in list_held_tensors(other, kind, torch.float64):
            whole = read_tensor(storage, attempt.directory_name, manifest, held.name)
            assert held.shape == tuple(whole.shape)
            filled = torch.full_like(whole, torch.nan)
            for box in held.holders:
                part = tuple(slice(at, at + n) for at, n in zip(box.offset, box.extent, strict=True))
                filled[part] = read_tensor(storage, attempt.directory_name, manifest, held.name, box)
            assert torch.equal(filled, whole), held.name
            seen.add(held.name)
    assert seen == {name for name in manifest.tensors if name.partition(".")[0] in ("model", "exp_avg", "exp_avg_sq")}


def composed(name: str) -> Config:
    """The configuration of a kept plan."""
    overrides = TYPED[1:] if name == "plan.json" else EXPERTS
    return compose(*overrides, "run.dir=run", experiment="gpt_quick")


@pytest.mark.parametrize("name", DIGESTS)
def test_a_plan_is_read_and_made_again(kept, monkeypatch, name):
    monkeypatch.chdir(kept)
    text = (KEPT / name).read_text()
    kept_plan = plan_data.decode_plan(json.loads(text))
    assert isinstance(kept_plan, Plan) and plan_data.plan_digest(kept_plan) == DIGESTS[name]
    assert json.dumps(plan_data.encode_plan(kept_plan), sort_keys=True, separators=(",", ":")) + "\n" == text
    planned = plan(composed(name))
    # since then values of rotated attention are a tensor of their own, which is one function more
    chunks = [replace(c, functions=tuple(f for f in c.functions if f[1] != "scale")) for c in planned.chunks]
    assert replace(planned, chunks=tuple(chunks)) == kept_plan


def test_the_journal_is_read_and_written_to_the_byte():
    path = KEPT / "run" / "journal.jsonl"
    journal, lines = [*events.read_events(path)], path.read_text().splitlines()
    assert [json.dumps(events.event_to_plain(event)) for event in journal] == lines
    assert all(type(event) is not events.JournalEvent for event in journal), "an unknown word"
    [failure] = [event for event in journal if isinstance(event, events.Failure)]
    assert (failure.kind, failure.method, failure.number) == ("died", "step(3)", 1)
    forming = next(event for event in journal if isinstance(event, events.Forming))
    assert forming.plan == DIGESTS["plan.json"]


def test_the_metrics_are_read():
    rows = MetricsLog.read_rows(KEPT / "run" / "metrics.jsonl")
    assert [(row["step"], row["world_size"]) for row in rows] == [(1, 2), (2, 2), (3, 1), (4, 1)]
    assert rows[-1]["loss"] == LOSS[4]


def test_status_tells_how_the_run_is(kept, capsys):
    assert status_command.main([str(kept / "run"), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["failures"] == 1 and status["verdict"] is None
    assert status_command.main([str(kept / "run")]) == 0
    shown = capsys.readouterr().out
    for words in ("ended: done", "4 of 4", "5.5026", "1 failure"):
        assert words in shown, shown


def test_report_shows_the_run(kept, capsys):
    assert report.main([str(kept / "run"), "--output", str(kept / "report.html")]) == 0
    page = (kept / "report.html").read_text()
    assert "died in step(3)" in page and "5.5026" in page
