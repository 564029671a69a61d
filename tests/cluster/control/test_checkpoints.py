"""The driver's part in checkpoints, with workers that are lists."""

from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint
from platform.checkpoint.manifest import FileReport, Meta
from platform.cluster.control.checkpoints import CheckpointCadence, Checkpoints
from platform.cluster.crew.failures import Failure, Member, WorkerFailed
from platform.cluster.origin import find_resume_checkpoint
from platform.config.identity import run_identity
from platform.monitor import Journal, JsonLines
from platform.train.replies import Copied, Unrestored, Unwritten
from tests.doubles.fake_plan import fake_plan


class Answers:
    """A crew of two that answers every call alike. Writing raises or returns what it is told, one after the other."""

    def __init__(self, *written):
        self.written = list(written)

    def call_ranks(self, method, *arguments):
        if method == "snapshot":
            return [Copied({}, {"step": 1.0})] * 2
        if method == "write":
            return [None, None]
        answer = self.written.pop(0)
        if answer == "goes on":
            return [None, FileReport("blocks-00001.bin", 0, [])]
        if isinstance(answer, Exception):
            raise answer
        return [FileReport("blocks-00000.bin", 0, []) if answer == "good" else Unwritten(answer)] * 2


@pytest.fixture
def said():
    return []


@pytest.fixture
def checkpoints(config, said, monkeypatch, tmp_path):
    monkeypatch.setattr("platform.checkpoint.saver.time.sleep", lambda seconds: None)
    monkeypatch.setattr("platform.checkpoint.catalogue._check_files", lambda storage, directory, manifest: None)
    return Checkpoints(
        config, fake_plan(2), find_resume_checkpoint(config), Journal(tmp_path / "journal.jsonl"), said.append
    )


def events(tmp_path):
    return [event["event"] for event in JsonLines.read_objects(tmp_path / "journal.jsonl")]


def save(checkpoints, step, *written):
    crew = Answers(*written)
    checkpoints.begin_save(crew, step)
    checkpoints.finish_save(crew)


def test_a_save_that_fails_is_loud_and_tried_again(checkpoints, config, said, tmp_path):
    save(checkpoints, 3, "OSError: no space", "good")
    assert events(tmp_path) == ["checkpoint_failed", "checkpoint"] and checkpoints.step == 3
    where = f"run.dir={config.run.dir}"
    reason = "OSError: rank 0: OSError: no space; it is tried again"
    assert said == [f"WARNING: checkpoint failed after step 3: {where}: {reason}"]
    assert "continues after step 3" in checkpoints.resume_sentence


def test_steps_go_on_while_workers_write(checkpoints, tmp_path):
    crew = Answers("goes on", "goes on", "good")
    checkpoints.begin_save(crew, 3)
    while len(crew.written) > 1:  # the first call comes when the saver's thread has found a directory
        checkpoints.advance_save(crew)
    assert checkpoints.step == 0 and not events(tmp_path)
    checkpoints.finish_save(crew)
    assert checkpoints.step == 3 and events(tmp_path) == ["checkpoint"]


def test_a_save_that_fails_for_good_stops_nothing(checkpoints, said, tmp_path):
    save(checkpoints, 3, "good")
    save(checkpoints, 4, "gone", "gone", "gone")
    assert events(tmp_path) == ["checkpoint"] + ["checkpoint_failed"] * 3 and checkpoints.step == 3
    assert said[-1].endswith("gone; the newest good one is of step 3, and 1 step would be lost")


def test_a_worker_that_dies_while_it_writes_has_failed(checkpoints):
    dead = WorkerFailed([Failure(Member(1, "here", 1), "died", "write(...)", "killed", 1)])
    with pytest.raises(WorkerFailed):
        save(checkpoints, 3, dead)
    assert checkpoints.step == 0 and "nothing was saved" in checkpoints.resume_sentence


@pytest.mark.parametrize(
    ("every", "stop_at", "step", "last", "stopping", "due"),
    [
        (0, 0, 4, True, False, True), (0, 0, 4, False, True, True), (2, 0, 4, False, False, True),
        (2, 0, 5, False, False, False),
        (2, 0, 5, True, False, True), (2, 0, 5, False, True, True), (0, 5, 5, True, False, True),
        (0, 5, 4, False, True, True), (0, 5, 4, False, False, False),
    ],
)  # fmt: skip
def test_when_one_is_due(checkpoints, config, every, stop_at, step, last, stopping, due):
    config.checkpoint.every, config.train.stop_at = every, stop_at
    checkpoints._cadence = CheckpointCadence(every)
    assert checkpoints.is_save_due(step, last, stopping) is due
    config.checkpoint.on_stop = False
    assert checkpoints.is_save_due(step, last, stopping) is (due and (last or bool(every) and step % every == 0))


def stored(config, **changes):
    """A checkpoint without tensors in the run's storage."""
    storage = open_storage(str(Path(config.run.dir, "checkpoints")))
    meta = {"step": 2, "samples": 8, "seed": 0, "corpus": "c", "identity": run_identity(config), "configuration": ""}
    commit_checkpoint(storage, choose_attempt_directory(storage, 2), {}, [], Meta(**meta | {"plan": {}} | changes))


def test_another_corpus_is_refused(checkpoints, config, said, tmp_path):
    stored(config, corpus="of yesterday")
    again = Checkpoints(
        config, fake_plan(2), find_resume_checkpoint(config), Journal(tmp_path / "journal.jsonl"), said.append
    )
    again.check_corpus("of yesterday")
    with pytest.raises(ConfigError, match="^data=synthetic: its corpus is of today now, and was of yesterday for "):
        again.check_corpus("of today")


def test_what_resume_means(config):
    assert find_resume_checkpoint(config).directory is None
    stored(config)
    assert find_resume_checkpoint(config).manifest.meta.step == 2
    config.optimizer.lr = 0.5
    cure = r"is of another run; .* resume.allow=\[optimizer.lr\]. What differs:\noptimizer.lr: 0.001 there, 0.5 here"
    with pytest.raises(ConfigError, match=cure):
        find_resume_checkpoint(config)
    config.resume.allow = ["optimizer.lr"]
    assert find_resume_checkpoint(config).manifest.meta.step == 2
    config.resume.allow, config.checkpoint.resume = [], "never"
    assert find_resume_checkpoint(config) is None


def test_auto_starts_again_only_where_nothing_sound_would_be_left_behind(config):
    root = Path(config.run.dir, "checkpoints")
    (root / "step-00000002-000001-aaaaaa").mkdir(parents=True)
    assert find_resume_checkpoint(config).directory is None  # half-written, by a run that was killed in its first save
    (root / "step-00000004-000002-bbbbbb" / "manifest.json").mkdir(parents=True)  # cannot be read
    with pytest.raises(ConfigError, match="holds no checkpoint.*bbbbbb: .*Is a directory.*nearest legal: .*=never"):
        find_resume_checkpoint(config)
    stored(config)
    assert find_resume_checkpoint(config).manifest.meta.step == 2


@pytest.mark.parametrize(
    "answer", [Unrestored("failed", "Permission denied"), Unrestored("refused", "has no model.w")], ids=str
)
def test_what_the_workers_cannot_restore_is_refused(config, said, tmp_path, answer):
    stored(config)
    checkpoints = Checkpoints(
        config, fake_plan(2), find_resume_checkpoint(config), Journal(tmp_path / "journal.jsonl"), said.append
    )
    crew = Answers()
    crew.call_ranks = lambda method, *arguments: [answer]
    with pytest.raises(ConfigError, match=f"step-00000002-.*: cannot be resumed from: {answer.reason}"):
        checkpoints.restore_workers(crew)


@pytest.mark.parametrize(
    ("every", "stop_at", "saved", "last", "lacks"),
    [(2, 0, 4, 5, True), (2, 0, 5, 5, False), (0, 0, 0, 5, True), (0, 3, 0, 3, True), (0, 3, 5, 3, False)],
)
def test_whether_the_end_is_saved(checkpoints, config, every, stop_at, saved, last, lacks):
    config.checkpoint.every, config.train.stop_at, checkpoints.step = every, stop_at, saved
    assert checkpoints.is_last_step_unsaved(last) is lacks


def test_only_the_holder_of_the_lease_marks_a_corrupt_checkpoint(checkpoints, config, said, tmp_path):
    """A command that is refused later, or waits for another driver to end, must not write to that driver's storage."""
    save(checkpoints, 3, "good")
    storage = checkpoints._storage
    [directory] = [name for name in storage.list_sizes("") if name.startswith("step-")]
    storage.write(f"{directory}/manifest.json", [memoryview(b"torn")])
    looked = find_resume_checkpoint(config)
    assert looked is not None and looked.directory is None and looked.refused[0][0] == directory
    assert "BAD.txt" not in storage.list_sizes(directory)
    config.checkpoint.every = 1  # only who saves takes the lease
    Checkpoints(config, fake_plan(2), looked, Journal(tmp_path / "second.jsonl"), said.append)
    assert "BAD.txt" in storage.list_sizes(directory)


def test_a_storage_that_never_takes_a_save_is_said_louder_the_longer(checkpoints, config, said, tmp_path):
    """Three lines a save of the same failure, which never grew, were not read."""
    config.elastic.wait = 1e6
    for step in (3, 6, 9, 12):
        save(checkpoints, step, *["OSError: no space"] * 3)
    assert events(tmp_path) == ["checkpoint_failed"] * 12
    assert len(said) == 2 + 4 and [line.partition(":")[0] for line in said][-2:] == ["ALARM"] * 2
    assert "; this run has none yet, and 12 steps would be lost; 4 saves in a row have failed, for " in said[-1]
    save(checkpoints, 15, "good")
    save(checkpoints, 18, *["OSError: no space"] * 3)
    assert said[-1].startswith("WARNING") and said[-1].endswith(
        "the newest good one is of step 15, and 3 steps would be lost"
    )
