"""`python -m platform.status`: of runs that go on, ended, died or are torn, as text and JSON, also by URL."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from platform.monitor import Journal, events
from platform.status import __main__ as status
from tests.monitor.test_verdict import DIED, GOES, MESH, saved

ROW = {"loss": 3.5, "step_seconds": 0.5, "seconds": {"data": 0.0}, "tokens_per_second": 9.0, "generation": 1}


@pytest.fixture
def run(tmp_path):
    """Writes a run directory of these events."""

    def write(entries, owner="", rows=4):
        folder = tmp_path / "runs" / "mine"
        folder.mkdir(parents=True)
        journal = Journal(folder / "journal.jsonl")
        journal.begin_generation()
        for event in entries:
            journal.write(event)
        journal.close()
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i + 1, **ROW}) + "\n" for i in range(rows)))
        (folder / "config.yaml").write_text("train: {steps: 10}")
        (folder / "driver.lock").write_text(owner)
        return folder

    return write


def describe_process(pid):
    return f"process {pid} on {socket.gethostname()}"


def said(capsys, *arguments):
    code = status.main([*map(str, arguments)])
    return code, capsys.readouterr().out


def test_of_a_run_that_goes_on(run, capsys):
    folder = run([*GOES, saved(3)], describe_process(os.getpid()))
    code, text = said(capsys, folder)
    assert code == 0 and text.startswith("run ")
    for words in ("training, driver process", "4 of 10, 0.5 s each", "0:00:03 left", "loss        3.5000",
                  "generation 1: 4 workers, data 2 x t 2", "step 3, ", "step 4, in the workers' memory"):  # fmt: skip
        assert words in text, text


def test_who_looks_for_a_worker_sees_its_process(run, capsys):
    """All are `python -c import json, sys ...` in ps."""
    places = [{"rank": rank, "pid": 70 + rank, "node": f"n{rank // 10}", "number": rank} for rank in range(12)]
    folder = run([*GOES, events.Formed(workers=places)], describe_process(os.getpid()))
    _, text = said(capsys, folder)
    first = ", ".join(f"{70 + rank} (rank {rank})" for rank in range(8))
    rows = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("processes")]
    assert rows == [["processes", f"{first} and 2 more on n0"], ["processes", "80 (rank 10), 81 (rank 11) on n1"]]
    data = json.loads(said(capsys, folder, "--json")[1])
    assert data["processes"][11] == {"rank": 11, "pid": 81, "node": "n1"}
    (folder / "driver.lock").write_text(describe_process(999999999))
    assert "processes" not in said(capsys, folder)[1], "they are gone with their driver"


def test_rate_and_seconds_of_a_step_are_of_the_same_steps(run, capsys):
    folder = run([*GOES], describe_process(os.getpid()), rows=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, **ROW, "tokens_per_second": 90.0, "step_seconds": 0.05}) + "\n")
    _, text = said(capsys, folder)
    assert "4 of 10, 0.5 s each, 9 tokens/s" in text


def test_the_culprit_comes_first(run, capsys):
    code, text = said(capsys, run([*GOES, DIED], describe_process(os.getpid())))
    assert code == 1 and text.startswith("rank 3 [data1 t1] on n3 (worker 3) died in step(5)")
    assert "its log: w-3.log" in text and "re-forming" in text


def test_of_a_driver_that_died_and_of_the_newest_run(run, capsys, monkeypatch):
    folder = run([*GOES, saved(3)], describe_process(999999999))
    monkeypatch.chdir(folder.parents[1])
    code, text = said(capsys)
    assert code == 1 and text.startswith("the driver died without an end after step 4") and "state       died" in text


def test_restarts_of_the_driver_are_counted_apart(run, capsys):
    again = [events.Starting(world_size=4, cluster="ray", device="cpu"), events.TookOver(step=4, steps_lost=1)]
    folder = run([*GOES, saved(3), *again, *GOES[1:], events.Done(step=4, saved=4)])
    _, text = said(capsys, folder)
    assert re.search(r"goodput +\d+\.\d%, 0 failures, 1 restart of the driver, 1 step lost", text), text


def test_json_has_it_as_data(run, capsys):
    code, text = said(capsys, run([*GOES, DIED, MESH, *GOES[2:]], describe_process(os.getpid())), "--json")
    report = json.loads(text)
    assert (code, report["verdict"], report["state"], report["failures"]) == (0, None, "training", 1)


def test_of_torn_and_of_empty_directories(run, capsys, tmp_path):
    folder = run(GOES)
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"event": "spike", "time": 1}\n{"event"')
    (folder / "config.yaml").write_text("- no run's")
    code, text = said(capsys, folder)
    assert code == 0 and "journal.jsonl is not a run's" in text and "config.yaml is not a run's" in text
    assert status.main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_by_url(run, capsys):
    folder = run([*GOES, DIED])
    code, text = said(capsys, f"file://{folder}")
    assert code == 1 and text.startswith("rank 3")


def test_the_command_is_quick_and_imports_no_torch(run):
    folder = run([*GOES, DIED])
    code = "import sys, platform.status.__main__ as s; s.main([sys.argv[1]]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("rank 3"), done.stderr
