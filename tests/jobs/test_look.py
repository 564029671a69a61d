"""What a run directory says of its job: `python -m platform.jobs status|logs`."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from platform.jobs.__main__ import main
from platform.jobs.job_state import describe_status, read_log_lines, save_ray_log_ends
from platform.monitor import Journal, events

START = {"world_size": 2, "cluster": "ray", "device": "cpu"}
WORKERS = [{"rank": rank, "node": f"n{rank}"} for rank in range(2)]
FAILURE = events.Failure(
    number=1, rank=1, coordinates={}, node="n1", method="step", kind="Died", cause="out\nof memory", log="w.log", step=7
)


def written(run_dir, entries, drivers=()):
    """A run directory with these events in its journal, and these lines of its supervisor's."""
    run_dir.mkdir(exist_ok=True)
    journal = Journal(run_dir / "journal.jsonl")
    for event in entries:
        journal.write(event)
    journal.close()
    (run_dir / "drivers.jsonl").write_text("".join(json.dumps({"time": time.time(), **d}) + "\n" for d in drivers))
    return run_dir


LIVES = [
    events.Starting(**START, code={"platform": "0123456789ab"}),
    events.Formed(workers=WORKERS),
    events.Checkpoint(step=6, directory="step-6", bytes=1, seconds=1.0),
    FAILURE,
    events.Starting(**START, code={"platform": "ba9876543210"}),
    events.Restored(step=6, directory="step-6", seconds=1.0),
    events.FirstStep(step=7),
]
DRIVERS = [
    {"event": "started", "step": 0},
    {"event": "ended", "step": 7, "status": -9, "costs": True},
    {"event": "started", "step": 7},
]


def test_lives_state_step_and_the_last_failure(tmp_path):
    run = written(tmp_path / "run", LIVES, DRIVERS)
    (run / "driver.lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    text = "\n".join(describe_status(run))
    assert f"state: running, as it has no end: process {os.getpid()} on {socket.gethostname()}" in text
    assert "step: 7; newest checkpoint: 6 (step-6)" in text and "lives: 2" in text
    assert "to step 7  no end, 2 nodes, 1 failure" in text and "to step 7  no end, other code: ba9876543210" in text
    assert "last failure: worker 1 on n1" in text and "Died: out of memory; w.log" in text
    assert "retries spent since the job was last closed: 2" in text


@pytest.mark.parametrize(
    "more, drivers, said",
    [
        ([], DRIVERS, "lost: it has no end, and is gone: process 999999999"),
        ([events.Drained(step=9, signal="SIGTERM")], [], "ended: drained: SIGTERM"),
        (
            [],
            [*DRIVERS, {"event": "ended", "step": 9, "status": 75}],
            "between two lives: a driver ended with status 75",
        ),
        ([], [*DRIVERS, {"event": "closed", "status": 0}], "ended with status 0 (done)"),
        ([], [*DRIVERS, {"event": "closed", "status": 143}], "ended with status 143 (told to end, and saved)"),
    ],
)
def test_states(tmp_path, more, drivers, said):
    run = written(tmp_path / "run", [*LIVES, *more], drivers)
    (run / "driver.lock").write_text(f"process 999999999 on {socket.gethostname()}")
    assert f"state: {said}" in "\n".join(describe_status(run))


def test_a_starting_driver_is_not_disturbed(tmp_path):
    """The lock is not tried: who takes it at this moment would be refused."""
    run = written(tmp_path / "run", LIVES, DRIVERS)
    (run / "driver.lock").write_text("process 1 on elsewhere")
    before = (run / "driver.lock").stat().st_mtime_ns, sorted(p.name for p in run.iterdir())
    list(describe_status(run))
    assert before == ((run / "driver.lock").stat().st_mtime_ns, sorted(p.name for p in run.iterdir()))


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(f"config: run.dir={tmp_path}/nowhere: holds no run; nearest legal: ")
    assert main(["logs", str(tmp_path / "nowhere")]) == 2
    assert "has no logs" in capsys.readouterr().err
    (tmp_path / "drivers.jsonl").write_text("{}\n{}\n")
    assert main(["status", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_ends_of_logs(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    for name, moment in (("worker-3", 2), ("driver", 1)):
        path = tmp_path / "logs" / f"{name}.log"
        path.write_text("".join(f"{name} \x1b[31m{i}\n" for i in range(30)))
        os.utime(path, (moment, moment))
    (tmp_path / "logs" / "link.log").symlink_to("/etc/passwd")
    assert main(["logs", str(tmp_path), "--lines", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("==>")] == [
        f"==> {tmp_path}/logs/{name}.log <==" for name in ("driver", "worker-3")
    ]
    assert said[1:3] == ["driver  [31m28", "driver  [31m29"] and "\x1b" not in "".join(said)
    assert len(list(read_log_lines(tmp_path, "worker-3", 5))) == 7
    assert main(["logs", str(tmp_path), "worker-9"]) == 2
    assert "nearest legal: driver.log, worker-3.log" in capsys.readouterr().err


def test_what_ray_wrote_on_a_node_outlives_it(tmp_path):
    """Its own directory is removed; the run directory keeps the ends of its files, of every time."""
    own = tmp_path / "ray-1" / "ray" / "session_latest" / "logs"
    own.mkdir(parents=True)
    (own / "raylet.out").write_text("".join(f"line {i}\n" for i in range(1000)))
    (own / "gcs_server.out").write_text("gcs: out of disk\n")
    for cause in ("first", "second"):
        save_ray_log_ends(tmp_path / "run", str(tmp_path / "ray-1"), cause)
    save_ray_log_ends(None, str(tmp_path), "nowhere to keep it")
    text = (tmp_path / "run" / "logs" / f"node-{socket.gethostname()}.log").read_text()
    assert text.count(f"Ray has ended on {socket.gethostname()}") == 2 and "first" in text and "second" in text
    assert "gcs: out of disk" in text and "line 999" in text and "line 800\n" not in text


def test_ray_s_logs_are_kept_when_a_pod_is_told_to_end(tmp_path):
    logs = tmp_path / "tmp" / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    code = "from pathlib import Path; from platform.jobs import job_state as logs; import sys;"
    code += " logs._RAY_PARENT = sys.argv[1]; print('there', flush=True); logs.keep_logs_at_end(Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(tmp_path / "tmp"), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout.readline() == "there\n"
        (logs / "raylet.err").write_text("out of memory\n")
        time.sleep(0.2)
        assert not list((tmp_path / "run").rglob("*.log"))
        keeper.terminate()
        assert keeper.wait(20) == 0
    [kept] = (tmp_path / "run" / "logs").glob("node-*.log")
    assert "Ray has ended" in kept.read_text() and "out of memory" in kept.read_text()
