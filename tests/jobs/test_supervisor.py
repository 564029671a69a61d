"""The supervisor with drivers that do what a test says: signals reach them, and the rule decides what follows."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster.run_directory import NOTICE
from platform.jobs import supervisor
from platform.jobs.__main__ import main
from platform.jobs.supervisor import DRIVERS, DriverSupervisor, SupervisorOptions, end_ray_job, find_ray_job

# Stands in for `python -m platform.launch`: the n-th one does the n-th thing of LIVES, after doing a step or not.
DRIVER = """
import json, os, signal, sys, time
from platform.cluster.crew.signals import stop_reason
here, lives = os.getcwd(), json.loads(os.environ["LIVES"])
with open("started", "a") as file:
    print(json.dumps([sys.argv[1:], os.environ.get("RAY_ADDRESS")]), file=file)
number = len(open("started").readlines()) - 1
what, step = lives[number]
stopped = []
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda *_, name=name: stopped.append(name))
if step:
    with open("run/metrics.jsonl", "a") as file:
        print(json.dumps({"step": step}), file=file)
event = {"time": 1.0, "generation": 0}
if what in ("unrecorded", "waits", "recorded"):
    with open("run/journal.jsonl", "a") as file:
        print(json.dumps({**event, "event": "starting", "world_size": 1, "cluster": "ray", "device": "cpu"}), file=file)
        if what == "recorded":
            print(json.dumps({**event, "event": "gave_up", "cause": "x", "step": step}), file=file)
if what == "waits":
    open("waiting", "w").close()
    while not stopped:
        time.sleep(0.01)
    time.sleep(0.3)  # as a save does
    print(*stopped, file=open("stopped", "w"))
    print(stop_reason(signal.SIGUSR1), file=open("said", "w"))
    sys.exit(75)
if isinstance(what, int) and what < 0:
    os.kill(os.getpid(), -what)
sys.exit(what if isinstance(what, int) else 1)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "driver.py").write_text(DRIVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "LAUNCHER", (sys.executable, str(tmp_path / "driver.py")))

    def run(*lives, pause=0.0, environment=dict, **told):
        monkeypatch.setenv("LIVES", json.dumps(lives))
        run.supervisor = DriverSupervisor(
            SupervisorOptions(["+experiment=a", "run.dir=run"], **told), environment, pause
        )
        return run.supervisor.run()

    return run


def started() -> list[list]:
    return [json.loads(line) for line in Path("started").read_text().splitlines()]


def record() -> list[dict]:
    return [json.loads(line) for line in Path("run", DRIVERS).read_text().splitlines()]


def test_it_goes_on_until_the_run_is_done(job):
    kill = -int(signal.SIGKILL)
    assert job((75, 3), (75, 6), (kill, 7), ("unrecorded", 8), (0, 9), retries=2) == 0
    ends = [(line["status"], line["step"], line["costs"]) for line in record() if line["event"] == "ended"]
    assert ends == [(75, 3, False), (75, 6, False), (kill, 7, True), (1, 8, True), (0, 9, False)]
    assert record()[-1]["event"] == "closed"
    assert {tuple(arguments[:2]) for arguments, _ in started()} == {("+experiment=a", "run.dir=run")}


@pytest.mark.parametrize("life, status", [((1, 3), 1), (("recorded", 3), 1), ((2, 0), 2)])
def test_what_gave_up_or_was_refused_is_not_tried_again(job, life, status):
    assert job(life, (0, 9)) == status
    assert len(started()) == 1


def test_retries_are_counted_over_all_supervisors_of_a_job(job, capfd):
    assert job((75, 3), elsewhere=True) == 75  # the scheduler starts it again
    with open(Path("run", DRIVERS), "a") as file:  # that one was lost with its node, and this one's supervisor
        print(json.dumps({"event": "started", "time": 1.0, "step": 3}), file=file)
    assert job((75, 3), (-9, 4), (-9, 5), (0, 9), retries=2, elsewhere=True) == 1
    assert len(started()) == 3
    assert "3 retries are spent, and 2 are allowed" in capfd.readouterr().err
    assert job((75, 3), (-9, 4), (-9, 5), (0, 9), retries=2) == 0  # submitted again, it goes on


def test_steps_make_a_stop_free_and_their_lack_costs(job):
    assert job(*[(75, step) for step in range(1, 6)], (0, 9), retries=0) == 0
    assert job(*[(75, 5)] * 12, retries=2) == 1
    assert len(started()) == 6 + 3


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_reaches_the_driver_once_and_ends_the_job(job, number, status):
    """A second one would end it before it has saved: Slurm's preemption sends two."""

    def send():
        while not Path("waiting").exists():
            time.sleep(0.01)
        for _ in range(3):
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    threading.Thread(target=send).start()
    assert job(("waits", 4), (0, 9)) == status
    assert Path("stopped").read_text().split() == ["SIGUSR1"] and len(started()) == 1
    assert Path("said").read_text() == f"{number.name} to its job\n"


def test_a_signal_to_every_process_reaches_the_driver_through_the_supervisor_alone(job):
    """As some schedulers send it; the driver does not hear theirs, which may be the second one."""

    def send():
        while not Path("waiting").exists():
            time.sleep(0.01)
        os.kill(job.supervisor._driver.pid, signal.SIGTERM)
        time.sleep(0.1)
        assert job.supervisor._driver.poll() is None
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert job(("waits", 4), (0, 9)) == 143
    assert Path("stopped").read_text().split() == ["SIGUSR1"]


def test_a_signal_between_two_drivers_ends_the_job(job):
    def send():
        while not Path("run", DRIVERS).exists() or len(record()) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert job((-9, 4), (0, 9), pause=60.0) == 143
    assert len(started()) == 1


def test_a_driver_whose_cluster_is_lost_makes_way_for_another_here(job):
    def replace():
        while not Path("waiting").exists():
            time.sleep(0.01)
        for _ in range(3):  # told once
            job.supervisor.stop_driver_for_restart()

    addresses = iter(["first:1", "second:2"])
    threading.Thread(target=replace).start()
    status = job(("waits", 4), (0, 9), elsewhere=True, environment=lambda: {"RAY_ADDRESS": next(addresses)})
    assert status == 0 and [address for _, address in started()] == ["first:1", "second:2"]


def test_when_the_job_s_time_is_over_it_ends_saved(job):
    assert job((75, 4), (0, 9), time_limit=0.0) == 75
    [[arguments, _]] = started()
    assert arguments[-1] == "run.time_limit=1" and record()[-1]["status"] == 75


def test_where_nodes_are_taken_away_it_waits_until_they_are_gone(job):
    """This node may be one of them: drivers that stop at once would spend all retries before it is gone."""
    Path("run").mkdir()
    ended = {"time": 1.0, "generation": 1, "event": "drained", "signal": NOTICE, "step": 3, "saved": 3}
    Path("run", "journal.jsonl").write_text(json.dumps(ended) + "\n")
    began = time.monotonic()
    assert job((75, 3), (0, 9), notice=0.5) == 0 and time.monotonic() - began > 0.5
    ended["signal"] = "run.time_limit"
    Path("run", "journal.jsonl").write_text(json.dumps(ended) + "\n")
    assert job((0, 9), (0, 9), (75, 10), (0, 12), notice=600.0) == 0


def test_what_was_lost_before_its_first_checkpoint_starts_over(job):
    """Refused otherwise: the driver cannot know that nobody has taken the checkpoints away."""
    assert job((-9, 0), (-9, 3), (-9, 5), (0, 9)) == 0
    assert [arguments[2:] for arguments, _ in started()] == [[], [], *[["checkpoint.resume=never"]] * 2]


def test_what_has_a_checkpoint_goes_on_from_it(job):
    saved = {"time": 1.0, "generation": 1, "event": "checkpoint", "step": 2, "directory": "d", "bytes": 1, "seconds": 1}
    Path("run").mkdir()
    Path("run", "journal.jsonl").write_text(json.dumps(saved) + "\n")
    assert job((-9, 3), (0, 9)) == 0
    assert [arguments[2:] for arguments, _ in started()] == [[], []]


def test_the_run_directory_must_be_named(tmp_path, capfd, monkeypatch):
    with pytest.raises(ConfigError, match="run.dir=: must be given"):
        DriverSupervisor(SupervisorOptions(["+experiment=a"])).run()
    (tmp_path / "file").touch()
    assert main(["supervise", "--retries=1", "+experiment=a", f"run.dir={tmp_path}/file"]) == 2
    assert "cannot be used" in capfd.readouterr().err


RAY = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": "gpt-x7"}})}


@pytest.mark.parametrize("status, stopped", [(0, False), (1, True), (2, True), (75, True), (143, False)])
def test_a_ray_job_that_no_other_cluster_would_change_is_stopped(monkeypatch, status, stopped):
    """KubeRay retries what failed, with all of its nodes, and not what was stopped."""
    called = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: called.append(command[-4:]))
    monkeypatch.setattr(supervisor, "_STOPPING_SECONDS", 0.01)
    end_ray_job(status, RAY)
    assert called == ([["job", "stop", "--no-wait", "gpt-x7"]] if stopped else [])
    end_ray_job(status, {})
    assert len(called) == stopped


def test_who_is_no_ray_job():
    assert find_ray_job(RAY) == "gpt-x7"
    for text in ("{", "[]", "{}", '{"metadata": {}}'):
        assert find_ray_job({"RAY_JOB_CONFIG_JSON_ENV_VAR": text}) == ""


def test_a_run_directory_has_one_supervisor(job):
    """A second job there is refused before it counts the driver of the first as lost, or ends what is counted."""
    seen = []

    def second():
        while not Path("waiting").exists():
            time.sleep(0.01)
        before = record()
        command = [sys.executable, "-m", "platform.jobs", "supervise", "+experiment=a", "run.dir=run"]
        done = subprocess.run(command, capture_output=True, text=True)
        seen.extend([done.returncode, done.stderr.strip(), record() == before])
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=second).start()
    assert job(("waits", 4), (0, 9)) == 75
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    assert seen == [2, f"config: run.dir=run: has a job already, supervised by {owner}", True]
    assert job(("waits", 4), (0, 9)) == 0, "free again"
