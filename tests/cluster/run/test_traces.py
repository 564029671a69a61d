"""A run directory's files may be anybody's; and what they show of a run is not done again from step 1 unasked."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint
from platform.checkpoint.manifest import Meta
from platform.cluster.control.checkpoints import Checkpoints
from platform.cluster.origin import find_resume_checkpoint
from platform.cluster.run_directory import RunDirectory
from platform.config.identity import run_identity
from platform.monitor import Journal, MetricsLog, events
from tests.doubles.fake_plan import fake_plan


@pytest.fixture
def run(config) -> Path:
    """The directory of a run that was driven."""
    directory = RunDirectory(config.run.dir)
    with directory.claim(config, {"mesh": {"data": 2}}):
        pass
    return directory.path


KINDS = {
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a loop of links": lambda path: path.symlink_to(path),
    "a dangling link": lambda path: path.symlink_to("/nowhere/at/all"),
}
JOURNALS = {
    "bytes": b"\xff\xfe\x00\n",
    "no JSON": b"hello\n",
    "a number": b"5\n",
    "a list": b"[]\n",
    "deep": b'{"a":' * 100_000 + b"\n",
    "no time": b'{"generation": 1, "event": "starts"}\n',
    "no event": b'{"time": 1, "generation": 1}\n',
    "an event of numbers": b'{"time": 1, "generation": 1, "event": 5}\n',
    "a generation of text": b'{"time": 1, "generation": "1", "event": "starts"}\n',
    "a negative generation": b'{"time": 1, "generation": -1, "event": "starts"}\n',
    "a huge generation": b'{"time": 1, "generation": 1e999, "event": "starts"}\n',
    "a step of text": b'{"time": 1, "generation": 1, "event": "done", "step": "9"}\n',
    "a NaN step": b'{"time": 1, "generation": 1, "event": "done", "step": "NaN"}\n',
    "digits": b'{"time": 1, "generation": ' + b"1" * 100_000 + b"}\n",
    "a key twice": b'{"time": 1, "generation": 1, "event": "done", "event": "done"}\n',
    "half a pair": b'{"time": 1, "generation": 1, "event": "done", "why": "\\ud800"}\n',
    "a line that never ends": b"x" * (17 << 20),
    "a torn line within": b'{"time": 1, "generation": 1, "ev\n{"generation": 1, "event": "starts"}\n',
}
METRICS = {
    "bytes": b"\xff\xfe\x00\n",
    "no JSON": b"hello\n",
    "no step": b'{"loss": 1.0}\n',
    "a step of text": b'{"step": "1"}\n',
    "a NaN step": b'{"step": "NaN"}\n',
    "a list": b"[1]\n",
}
CONFIGS = {
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 2000,
    "itself": b"train: &a\n  steps: *a\n",
    "laughs": b"a: &a [1]\nb: &b [*a, *a]\n",
    "a type": b"seed: five\n",
    "a part that is a number": b"train: 5\n",
    "a part that is null": b"train:\n",
    "an object": b"!!python/object/apply:os.system [true]\n",
    "a key twice": b"seed: 1\nseed: 2\n",
    "large": b"#" * (1 << 20),
    "nothing": b"",
}
CASES = [
    *((name, kind, make) for name in ("journal.jsonl", "metrics.jsonl", "plan.json", "config.yaml", "driver.lock")
      for kind, make in KINDS.items()),
    *((name, what, content) for name, table in (("journal.jsonl", JOURNALS), ("metrics.jsonl", METRICS),
                                               ("config.yaml", CONFIGS)) for what, content in table.items()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "content"), CASES, ids=[f"{n}-{w}" for n, w, _ in CASES])
def test_a_file_that_is_no_runs_is_refused_in_one_line(run, config, name, what, content):
    (run / name).unlink(missing_ok=True)
    content(run / name) if callable(content) else (run / name).write_bytes(content)
    before = sorted((p, p.lstat().st_mtime_ns) for p in run.rglob("*"))
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        RunDirectory(run).check_identity(config)
    [line] = caught.value.violations
    assert line.startswith(f"run.dir={run}: ") and line.isprintable() and len(line) < 600
    assert time.monotonic() - began < 15  # a busy machine
    assert sorted((p, p.lstat().st_mtime_ns) for p in run.rglob("*")) == before
    with pytest.raises(ConfigError), RunDirectory(run).claim(config, {}):
        pass


@pytest.mark.parametrize("content", [b"\xff\x1b[2J\n" * 1000, b""])
def test_any_note_of_an_owner_is_one_line(run, config, content):
    directory = RunDirectory(run)
    with directory.claim(config, {}):
        (run / "driver.lock").write_bytes(content)
        with pytest.raises(ConfigError, match="in use by") as caught, RunDirectory(run).claim(config, {}):
            pass
    assert str(caught.value).isprintable()


def test_a_lock_that_is_a_link_costs_nobody_a_file(run, config):
    (run / "mine.txt").write_text("mine")
    (run / "driver.lock").unlink()
    (run / "driver.lock").symlink_to(run / "mine.txt")
    with pytest.raises(ConfigError), RunDirectory(run).claim(config, {}):
        pass
    assert (run / "mine.txt").read_text() == "mine"


def test_a_torn_last_line_and_an_old_plan_are_in_nobodys_way(run, config):
    (run / "journal.jsonl").write_bytes(b'{"time": 1, "generation": 1, "event": "starts"}\n{"generation"')
    (run / "metrics.jsonl").write_bytes(b"\0" * 100)
    (run / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="late"), RunDirectory(run).claim(config, {}):
        raise ConfigError("late")
    assert (run / "plan.json").read_bytes() == b"\xff\xfe"
    with RunDirectory(run).claim(config, {}) as earlier:
        assert earlier == config.to_dict()


@pytest.mark.parametrize("value", [float("inf"), 1e-9, 3])
def test_every_number_that_is_written_is_read(run, config, value):
    config.optimizer.clip = config.elastic.wait = value
    values = yaml.safe_dump(config.to_dict(), sort_keys=False)
    (run / "config.yaml").write_text(values)
    assert RunDirectory(run).check_identity(config) == config.to_dict()


def did(config, *, journal: int = 0, metrics: int = 0, event=events.FirstStep) -> None:
    """Steps that a run directory shows."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    if journal:
        Journal(Path(config.run.dir, "journal.jsonl")).write(event(step=journal))
    log = MetricsLog(Path(config.run.dir, "metrics.jsonl"))
    for step in range(1, metrics + 1):
        log.append({"step": step, "loss": float("nan")})


def stored(config, step: int = 2) -> str:
    storage = open_storage(str(Path(config.run.dir, "checkpoints")))
    directory = choose_attempt_directory(storage, step)
    meta = {"step": step, "samples": 8, "seed": 0, "corpus": "c", "identity": run_identity(config), "configuration": ""}
    commit_checkpoint(storage, directory, {}, [], Meta(**meta, plan={}))
    return directory


FAILURE = events.Failure(
    number=1, rank=1, coordinates={}, node="n", method="step(1)", kind="died", cause="killed", log=None, step=1
)
SHOWN = [
    {"journal": 7}, {"metrics": 7}, {"journal": 3, "metrics": 7},
    {"journal": 7, "event": partial(events.Checkpoint, directory="d", bytes=9, seconds=0.5)},
    {"journal": 7, "event": events.Unsaved},
    {"journal": 7, "event": events.Done},
]  # fmt: skip


@pytest.mark.parametrize("shown", SHOWN)
def test_steps_without_a_checkpoint_are_not_done_again_unasked(config, shown):
    did(config, **shown)
    with pytest.raises(ConfigError) as caught:
        find_resume_checkpoint(config)
    [line] = caught.value.violations
    assert "holds no checkpoint to resume from, though step 7 was done" in line and config.run.dir in line
    assert "checkpoint.resume=never" in line
    config.checkpoint.resume = "never"
    assert find_resume_checkpoint(config) is None
    config.checkpoint.resume = "auto"
    stored(config)
    assert find_resume_checkpoint(config).manifest.meta.step == 2


def test_a_run_that_did_no_step_starts_at_the_first(config):
    assert find_resume_checkpoint(config).directory is None
    did(config, journal=0, metrics=0)
    Journal(Path(config.run.dir, "journal.jsonl")).write(FAILURE)
    assert find_resume_checkpoint(config).directory is None


def test_the_end_says_how_the_run_starts_again(config, tmp_path):
    checkpoints = Checkpoints(
        config, fake_plan(2), find_resume_checkpoint(config), Journal(tmp_path / "journal.jsonl"), print
    )
    assert checkpoints.resume_sentence == "nothing was saved; the same command starts again from step 1"
    did(config, metrics=3)
    assert checkpoints.resume_override == "checkpoint.resume=never"
    assert "the same command with checkpoint.resume=never starts again from step 1" in checkpoints.resume_sentence


def test_a_run_whose_only_checkpoint_turns_out_corrupt_does_not_start_over(config, tmp_path):
    """Its workers find that out. One that never saved does: nobody has those steps any more."""
    did(config, metrics=3)
    directory = stored(config)
    checkpoints = Checkpoints(
        config, fake_plan(2), find_resume_checkpoint(config), Journal(tmp_path / "journal.jsonl"), print
    )
    assert checkpoints.step == 2
    Path(config.run.dir, "checkpoints", directory, "BAD.txt").write_text("corrupt")
    with pytest.raises(ConfigError, match="though step 3 was done.*corrupt"):
        checkpoints.select_newest_again()
    config.checkpoint.resume = "never"
    fresh = Checkpoints(
        config, fake_plan(2), find_resume_checkpoint(config), Journal(tmp_path / "journal.jsonl"), print
    )
    config.checkpoint.resume = "auto"
    fresh.select_newest_again()
    assert fresh.step == 0
