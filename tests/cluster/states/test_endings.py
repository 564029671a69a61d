"""A run directory that fails under a run, and ends of every other kind: what is said, what is kept, no traceback."""

import json
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.boundary.world_faults import UNAVAILABLE
from platform.checkpoint.saver import CheckpointSaver
from platform.cluster import endings
from platform.cluster.crew.launchers import open_crew
from platform.monitor import MetricsLog
from tests.doubles.fake_crew import Dead
from tests.harness.disks import small_disk
from tests.harness.scripted_run import events, names, once_each


@pytest.fixture
def disk(config, tmp_path):
    """That of the run directory."""
    with small_disk(tmp_path / "disk") as disk:
        config.run.dir = str(disk.path / "run")
        yield disk


@pytest.fixture
def elsewhere(config, tmp_path):
    """Checkpoints are."""
    config.checkpoint.url = str(tmp_path / "checkpoints")


def fails(disk, how):
    does = {"full": disk.fill, "read-only": disk.read_only, "gone": disk.cover}[how]
    return lambda crew: does()


def heals(disk, how):
    does = disk.free if how == "full" else disk.uncover
    return lambda crew: does()


@pytest.mark.parametrize("how", ["full", "gone"])
def test_what_could_not_be_written_is_written_later(config, drive, disk, elsewhere, how):
    config.train.steps = 40  # some pages
    assert drive({"step(2)": [fails(disk, how)], "step(39)": [heals(disk, how)]}) == 0
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    assert [row["step"] for row in rows] == [*range(1, 41)]
    assert [e["step"] for e in events(config, "first_step", "done")] == [1, 40]
    warnings = [line for line in drive.out.splitlines() if "WARNING" in line]
    assert len(warnings) == 1 and "metrics.jsonl cannot be written" in warnings[0]
    assert re.search(r"metrics.jsonl is written again: \d+ lines? kept", drive.out)


@pytest.mark.parametrize("how", ["full", "gone"])
def test_training_goes_on_while_checkpoints_can_be_written(config, drive, disk, elsewhere, stop, how):
    """Also through a failure, after which plan.json, the journal and new workers' proofs have no place."""
    config.checkpoint.every, config.train.steps = 2, 40
    assert drive({"step(2)": [fails(disk, how)], **{f"step({k})": [{1: Dead}] for k in range(4, 40, 4)}}) == 0
    [last] = sorted(Path(config.checkpoint.url).glob("step-00000040*"))
    assert last.is_dir() and "Traceback" not in drive.out
    for trouble in ("metrics.jsonl lacks ", "journal.jsonl lacks ", "plan.json could not be written"):
        assert trouble in drive.out
    heals(disk, how)(None)
    assert drive() == 0 and "continues after step 40" in drive.out  # its journal does not know that it is done


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_an_end_without_a_place_for_checkpoints_says_what_was_saved(config, drive, disk, at_once, stop, how):
    config.checkpoint.every = 2
    assert drive({"step(3)": [fails(disk, how)], "step(5)": [stop]}) == 75
    assert "stopped by SIGUSR1 after step 5 (3 steps not saved): the same command continues after step 2" in drive.out
    *_, saved, word, command = drive.out.splitlines()
    assert word == "next:" and re.fullmatch("  python -m platform.launch [+]experiment=x .*  # go on", command)
    assert re.fullmatch(r"saved: step 2: /.+/step-00000002-\S+", saved)
    assert "Traceback" not in drive.out + drive.err
    heals(disk, how)(None)
    assert drive() == 0 and "continues after step 2" in drive.out


def test_a_run_that_cannot_save_for_long_ends(config, drive, disk, at_once, monkeypatch):
    config.checkpoint.every, config.train.steps, config.elastic.wait = 1, 10**6, 0.0
    monkeypatch.setitem(CheckpointSaver.__init__.__kwdefaults__, "pause", 0.0)
    assert drive({"step(3)": [fails(disk, "full")]}) == UNAVAILABLE
    assert "checkpoints in a row could not be written" in drive.out
    assert "the same command continues after step 2:\n  python -m platform.launch +experiment=x" in drive.out


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_directory_that_is_removed(config, drive, at_once, stop, every):
    """It is made again by what is written: the run goes on, and so does the same command."""
    config.checkpoint.every = every
    assert drive({"step(4)": [lambda crew: shutil.rmtree(config.run.dir)], "step(5)": [stop]}) == 75
    assert [e["saved"] for e in events(config, "drained")] == [5]
    assert drive() == 0 and "continues after step 5" in drive.out
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    assert [row["step"] for row in rows] == [4, 5, 6]


def test_what_was_saved_and_is_gone_is_not_promised(config, drive, at_once):
    config.checkpoint.every = 2
    gone = lambda crew: shutil.rmtree(Path(config.run.dir, "checkpoints")) or {1: ValueError("boom")}  # noqa: E731
    assert drive({"step(4)": [{1: ValueError("boom")}, {1: ValueError("boom")}, gone]}) == 1
    assert "nothing was saved; the same command with checkpoint.resume=never starts again from step 1" in drive.out


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_at_the_start_it_is_refused(config, drive, disk, how):
    fails(disk, how)(None)
    with pytest.raises(ConfigError) as caught:
        drive()
    [line] = caught.value.violations
    assert line.startswith(f"run.dir={config.run.dir}: cannot be used (")
    left = [path for path in Path(config.run.dir).rglob("*") if path.is_file() and path.stat().st_size]
    assert left == []


@pytest.mark.parametrize(
    "file",
    ["metrics.jsonl", "journal.jsonl", "plan.json", "logs", "driver.lock"],
)
def test_a_file_of_the_run_that_is_something_else_is_refused(config, drive, file):
    path = Path(config.run.dir, file)
    if file == "logs":
        path.parent.mkdir(parents=True)
        path.write_text("a file")
    else:
        (path / "x").mkdir(parents=True)
    with pytest.raises(ConfigError, match="^run.dir=.*cannot be used "):
        drive()


# what nobody expects

BEFORE_THE_JOURNAL = ("platform.cluster.driver.open_run_corpus", "platform.cluster.driver.open_monitor")
PLACES = {  # where it happens -> (the last step done, the newest saved)
    "platform.cluster.driver.open_run_corpus": (0, 0),
    "platform.cluster.control.checkpoints.Checkpoints.__init__": (0, 0),
    "platform.cluster.driver.open_monitor": (0, 0),
    "platform.cluster.control.former.GenerationFormer.form_generation": (0, 0),
    "platform.cluster.control.controller.build_metrics_row": (3, 2),
    "platform.cluster.control.checkpoints.Checkpoints.advance_save": (3, 2),
    "platform.cluster.control.recruiter.ReformAdvisor.propose_needed_reform": (4, 4),
    "platform.monitor.monitor.Console.show_step": (4, 2),
}


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(5, "Input/output error"), KeyError("x")])
@pytest.mark.parametrize("place", PLACES)
def test_an_unexpected_error_anywhere(config, drive, at_once, monkeypatch, place, error):
    config.checkpoint.every = 2
    done, saved = PLACES[place]

    def broken(*args, **keywords):
        raise error

    def strike(crew):
        monkeypatch.setattr(place, broken)

    if not done:
        strike(None)
    if isinstance(error, OSError) and "open_monitor" in place:
        assert drive() == UNAVAILABLE  # a fault of the world, in a directory that has a journal already
        assert f"run.dir={config.run.dir}: cannot be used (Input/output error); name a directory " in drive.out
        assert "\n  python -m platform.launch +experiment=x" in drive.out
        assert not {"unexpected", "ConfigError", "Traceback"} & set(re.findall(r"\w+", drive.out + drive.err))
        return
    assert drive({"step(4)": [strike]}) == (UNAVAILABLE if isinstance(error, OSError) else 1)
    assert f"unexpected: {type(error).__name__}: " in drive.out
    assert (f"continues after step {saved}" if saved else "starts again from step 1") in drive.out or not done
    assert "\n  python -m platform.launch +experiment=x" in drive.out
    assert "Traceback" not in drive.out + drive.err
    assert "Traceback" in Path(config.run.dir, "logs", "driver.log").read_text()
    if place not in BEFORE_THE_JOURNAL:
        assert names(config)[-2] == "gave_up"


@pytest.mark.parametrize("soft, said", [(700_000 << 10, "ulimit -d 700000"), (-1, "the machine has none left")])
def test_no_more_memory_names_the_limit(config, drive, at_once, monkeypatch, soft, said):
    """It said "unexpected: MemoryError: ", and no more."""
    limits = {resource.RLIMIT_DATA: (soft, -1)}
    monkeypatch.setattr(endings.resource, "getrlimit", lambda limit: limits.get(limit, (-1, -1)))
    monkeypatch.setattr("platform.cluster.driver.open_run_corpus", raise_memory_error)
    assert drive() == 1 and f"unexpected: MemoryError: this process got no more memory ({said})" in drive.out


def raise_memory_error(*args, **keywords):
    raise MemoryError


class Closed:
    """A standard output that nobody reads."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


@pytest.mark.parametrize("stream", [Closed(), None])
def test_a_terminal_that_is_gone(config, drive, monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    assert drive() == 0 and once_each(config)


def test_an_account_that_cannot_be_made(config, drive):
    def tear(crew):
        path = Path(config.run.dir, "journal.jsonl")
        path.write_text(path.read_text() + '{"garbage\n')

    assert drive({"step(6)": [tear]}) == 0 and "what failures cost cannot be told" in drive.out


def test_a_timeline_that_cannot_be_written(config, drive, monkeypatch):
    class Timeline:
        def add_step(self, *args):
            return {}

        def write_files(self, directory):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("platform.cluster.control.former.Timeline", lambda *args: Timeline())
    config.monitor.timeline = True

    assert drive() == 0 and "the timeline could not be written: [Errno 28]" in drive.out


# workers


def test_workers_on_a_full_disk(job, tmp_path):
    """They print, and are hired, where their logs take nothing."""
    from dataclasses import replace

    with small_disk(tmp_path / "small", "64k") as disk:
        disk.fill()
        with open_crew(
            "processes", replace(job(2, "tests.doubles.fake_worker:Prints"), run_dir=disk.path / "run")
        ) as crew:
            assert sorted(crew.ready_members_by_number) == [0, 1]
            crew.assign_ranks(crew.job, [0, 1])
            crew.call_ranks("form", 0, 1, {}, crew.store, 1, [])
            assert crew.call_ranks("speak") == ["spoken"] * 2


def test_lines_are_kept_within_a_bound(tmp_path, monkeypatch, capsys):
    from platform.monitor import json_records

    monkeypatch.setattr(json_records, "KEPT_BYTES", 100, raising=False)
    with small_disk(tmp_path / "small") as disk:
        lines = json_records.JsonLines(disk.path / "x.jsonl")
        lines.append({"n": 0})
        disk.cover()
        for n in range(1, 100):
            lines.append({"n": n})
        assert len(lines.unwritten_records) == 10
        disk.uncover()
        lines.append({"n": 100})
        numbers = [row["n"] for row in json_records.JsonLines.read_objects(disk.path / "x.jsonl")]
        lines.close()
    assert numbers == [0, *range(90, 101)] or numbers[0] == 0 and numbers[-1] == 100 and len(numbers) <= 12
    assert capsys.readouterr().out.count("cannot be written") == 1


def test_a_torn_line_is_cut_once_that_is_possible(tmp_path, monkeypatch):
    from platform.monitor.json_records import JsonLines

    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append({"n": 0})
    write, cut = os.write, os.ftruncate

    def half(file, data):
        write(file, data[:3])
        return 3

    def no(file, size):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", no)
    lines.append({"n": 1})
    monkeypatch.setattr(os, "write", write)
    lines.append({"n": 2})
    monkeypatch.setattr(os, "ftruncate", cut)
    lines.append({"n": 3})
    lines.close()
    assert [json.loads(line)["n"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
