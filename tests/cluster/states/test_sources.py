"""What a run goes on from after a failure: memory, copies at peers, storage, the beginning."""

import json
from pathlib import Path

import pytest

from platform.monitor import MetricsLog
from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import BOOM, events, once_each, steps


def all_of_node_1(crew):
    return dict.fromkeys((1, 3), Dead)


def test_a_node_is_lost_and_its_peers_have_its_state(config, drive):
    config.parallel.zero = 3
    assert drive({"step(4)": [all_of_node_1]}, nodes=2) == 0 and once_each(config)


def test_copies_lost_with_their_owners_leave_storage(config, drive, at_once):
    config.parallel.zero, config.checkpoint.every = 3, 2
    assert drive({"step(4)": [dict.fromkeys((0, 1, 2), Dead)]}) == 0
    assert [step for step, _ in steps(config)] == [1, 2, 3, 3, 4, 5, 6]
    assert "not all is left of" in events(config, "not_whole")[0]["reason"]
    [back] = events(config, "rolled_back")
    assert (back["step"], back["steps_lost"]) == (2, 1) and back["lost_seconds"] > 0
    rows = list(map(json.loads, Path(config.run.dir, "metrics.jsonl").read_text().splitlines()))
    assert back["lost_seconds"] == pytest.approx(rows[2]["step_seconds"])
    [cost] = events(config, "goodput")
    assert cost["steps_lost"] == 1
    kept = sum(row["step_seconds"] for row in MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl")))
    assert cost["useful_seconds"] == pytest.approx(kept)


def test_with_nothing_in_storage_it_begins_again(config, drive):
    config.parallel.zero = 3
    assert drive({"step(4)": [dict.fromkeys((0, 1, 2), Dead)]}) == 0
    assert [step for step, _ in steps(config)] == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert events(config, "rolled_back")[0]["steps_lost"] == 3


@pytest.mark.parametrize(("every", "lost"), [(1, 0), (2, 0), (3, 1), (4, 0), (5, 4)])
def test_it_goes_back_to_the_last_step_held(config, drive, every, lost):
    config.elastic.snapshot_every = every
    assert drive({"step(5)": [{0: BOOM}]}) == 0
    assert [e["steps_lost"] for e in events(config, "rolled_back")] == ([lost] if lost else [])


def late(crew):
    """As on GPUs: the state after a step is held beside the next one."""
    crew.late = True


@pytest.mark.parametrize(("every", "lost"), [(1, 1), (2, 2), (3, 1)])
def test_it_goes_back_to_what_is_acknowledged_a_step_later(config, drive, every, lost):
    """In step 5: the state after step 4 is being copied, or has been and nobody knows."""
    config.elastic.snapshot_every = every
    assert drive({"step(5)": [{0: BOOM}]}, late) == 0
    assert [e["steps_lost"] for e in events(config, "rolled_back")] == [lost]


def test_lost_seconds_count_once(config, drive):
    """Twice back to the same step."""
    config.elastic.snapshot_every = 4
    assert drive({"step(4)": [{0: BOOM}], "step(3)": [{}, {0: BOOM}]}) == 0
    assert [e["steps_lost"] for e in events(config, "rolled_back")] == [3, 2]
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    [cost] = events(config, "goodput")
    assert cost["useful_seconds"] == pytest.approx(sum(row["step_seconds"] for row in rows))


def test_a_checkpoint_that_is_newer_than_memory_is_better(config, drive, at_once):
    config.elastic.snapshot_every, config.checkpoint.every = 2, 3
    assert drive({"step(4)": [{0: BOOM}]}) == 0 and once_each(config)
    [restored] = events(config, "restored")
    assert restored["step"] == 3 and "directory" in restored


@pytest.mark.parametrize("resume", ["never", "PATH"])
def test_the_last_resort_is_the_run_s_own_checkpoint(config, drive, at_once, resume, tmp_path):
    """Not one that lay there, and not where it began."""
    config.elastic.snapshot_every, config.checkpoint.every, config.checkpoint.url = 0, 5, str(tmp_path / "there")
    assert drive() == 0  # leaves steps 5 and 6
    saved = sorted(path for path in (tmp_path / "there").glob("step-*"))
    config.run.dir, config.checkpoint.every = str(tmp_path / "second"), 2
    config.checkpoint.resume = resume if resume == "never" else str(saved[0])
    first = 1 if resume == "never" else 6
    if resume == "never":
        assert drive({"step(4)": [{1: BOOM}], "step(2)": [{0: Dead}]}) == 0
        done = [step for step, _ in steps(config)]
        assert done == [1, 1, 2, 3, 3, 4, 5, 6]  # from nothing, then from its own
    else:
        config.train.steps = 8
        assert drive({"step(8)": [{0: BOOM}]}) == 0
        assert [step for step, _ in steps(config)] == [6, 7, 7, 8]
        assert [e["step"] for e in events(config, "restored")] == [5, 6]
    assert steps(config)[0][0] == first


def test_the_command_that_resumes_goes_on_from_the_newest(config, drive, at_once):
    config.checkpoint.resume, config.checkpoint.every = "never", 2
    assert drive({"step(4)": [{1: BOOM}] * 3}) == 1
    assert "the same command with checkpoint.resume=auto continues after step 2:\n" in drive.out
    command = drive.out.splitlines()[[i for i, x in enumerate(drive.out.splitlines()) if "stopped after" in x][0] + 1]
    assert command.endswith(" checkpoint.resume=auto") and "never" not in command


def test_storage_that_fails_in_the_last_resort_ends_the_run_with_its_name(config, drive, at_once, monkeypatch):
    config.elastic.snapshot_every, config.checkpoint.every = 0, 2

    def fail(crew):
        def no(*args, **keywords):
            raise OSError("the disk is gone")

        monkeypatch.setattr("platform.cluster.origin.find_newest_checkpoint", no)
        return {0: Dead}

    assert drive({"step(4)": [fail]}) == 1
    assert Path(config.run.dir, "config.yaml").exists()
