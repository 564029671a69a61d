"""A call that does not go on: all workers that answer write where they stand, before the driver acts."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from platform.cluster.driver import drive_run
from platform.monitor import JsonLines
from platform.predict.make_plan import make_plan
from platform.runtime.progress import frames_of_other_threads
from platform.status.__main__ import status_text
from platform.status.seen_run import read_run_contents
from platform.train.gauges import read_flight_records
from platform.train.replies import KEPT, prepare_dump_folder, write_dump_summary
from tests.harness.oracle import configure


def stuck(directory, kind, dump=True):
    """A run on two replicas that gives up as its rank 1 stands still in the backward pass of step 3."""
    c = configure(data=2, microbatch=2, d_model=16, vocab=300, precision="fp32")
    c.run.dir, c.data.kind, c.train.steps, c.cluster.kind = str(directory), "synthetic", 4, "processes"
    c.elastic.faults, c.elastic.hang_seconds, c.elastic.attempts = [f"3:{kind}:1:backward"], 1.0, 1
    c.monitor.dump = dump
    assert drive_run(c, make_plan(c), experiment="quick") == 1
    [failure] = [e for e in JsonLines.read_objects(directory / "journal.jsonl") if e["event"] == "failure"]
    assert (failure["kind"], failure["rank"]) == ("hung", 1)
    return failure


@pytest.mark.full
def test_a_blocked_rank_and_its_peer_write_where_they_stand(tmp_path):
    failure = stuck(tmp_path, "lock")
    [folder] = (tmp_path / "dump").iterdir()
    assert failure["dump"] == str(folder) and folder.name.endswith("-step-3")
    waits, blocked = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert blocked["sections"][-1] == "backward" and not blocked["waiting"] and blocked["wait"] is None
    assert "strike" in (folder / "rank-1.stacks.txt").read_text()
    assert waits["waiting"] and waits["wait"][2] == ["data"]
    number = waits["launched"]["data"]
    assert waits["wait"][-1] <= number and number > blocked["launched"]["data"], "who is behind"
    for rank, stand in enumerate((waits, blocked)):
        assert stand["call"] == "step(3)" and stand["rank"] == rank and stand["records"] == ["gloo"]
        record = json.loads((folder / f"rank-{rank}.gloo.json").read_text())
        assert record["entries"][-1]["profiling_name"].startswith("gloo:")
    first, *rows = (folder / "summary.txt").read_text().splitlines()
    assert first.split() == ["rank", "since", "in", "waits", "for", "launched"]
    assert [row.split()[0] for row in rows] == ["rank0[data0]", "rank1[data1]"]
    assert any(str(folder) in line for line in status_text(read_run_contents(tmp_path))), "the verdict points to it"


@pytest.mark.full
@pytest.mark.parametrize("kind, dump", [("gil", True), ("lock", False)])
def test_who_does_not_answer_is_not_waited_for(tmp_path, kind, dump):
    """A rank that holds its interpreter writes nothing, and the others do; with monitor.dump=false none does."""
    failure = stuck(tmp_path, kind, dump)
    assert bool(failure.get("dump")) == dump == (tmp_path / "dump").exists()
    if dump:
        [folder] = (tmp_path / "dump").iterdir()
        assert {path.name for path in folder.iterdir()} >= {"rank-0.json", "rank-0.stacks.txt", "summary.txt"}
        assert "no answer" in (folder / "summary.txt").read_text() and not (folder / "rank-1.json").exists()


def test_old_dumps_go(tmp_path):
    for i in range(KEPT + 3):
        (tmp_path / "dump" / f"2026010{i:02}-000000-step-{i}").mkdir(parents=True)
    (tmp_path / "dump" / "mine").mkdir()
    assert prepare_dump_folder(tmp_path, "step(7)").name.endswith("-step-7")
    left = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert left == [f"2026010{i:02}-000000-step-{i}" for i in range(4, KEPT + 3)] + ["mine"]


def test_files_that_are_no_stands_count_as_no_answer(tmp_path):
    (tmp_path / "rank-0.json").write_text('{"time": "yesterday"}')
    assert write_dump_summary(tmp_path, {0: "rank0", 1: "rank1"}) == 0 and not (tmp_path / "summary.txt").exists()


def test_another_thread_sees_the_stacks_of_a_process():
    with ThreadPoolExecutor(1) as pool:
        stacks = pool.submit(frames_of_other_threads).result()
    name, frames = next(iter(stacks.items()))
    assert name.startswith("main thread (") and any("test_another_thread_sees" in frame for frame in frames)
    assert isinstance(read_flight_records(), dict)
