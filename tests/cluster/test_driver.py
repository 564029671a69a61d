import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster.crew.signals import Stopped, StopSignals
from platform.monitor import JsonLines, MetricsLog, MetricsRow
from tests.doubles.fake_plan import fake_plan, run_fake
from tests.harness.process_tree import descendants, gone

pytestmark = pytest.mark.usefixtures("warm_server")


def events(config):
    return JsonLines.read_objects(Path(config.run.dir, "journal.jsonl"))


def names(config):
    """Of the transitions, between the first event of a run and the account at its end."""
    first, *transitions, last = [event["event"] for event in events(config)]
    assert (first, last) == ("starting", "goodput")
    return transitions


def rows(config):
    return MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))


def drive(config, size=2, worker="FakeWorker"):
    return run_fake(config, size, worker)


@pytest.mark.parametrize("kind", ["processes", pytest.param("local", marks=[pytest.mark.ray, pytest.mark.full])])
def test_a_run_from_end_to_end(kind, config, capsys):
    config.cluster.kind = kind
    config.eval.every, config.monitor.sample = 2, 3
    before = descendants()
    assert drive(config) == 0
    assert gone(descendants() - before)
    assert names(config) == ["forming", "formed", "running", "first_step", "checkpoint", "sampled", "released", "done"]
    formed = events(config)[2]
    assert [worker["rank"] for worker in formed["workers"]] == [0, 1]
    assert all(worker.keys() == {"rank", "number", "coordinates", "pid", "node"} for worker in formed["workers"])
    out = capsys.readouterr().out
    assert out.index("plan  2 workers") < out.index("0.2000") < out.index("<1> <1> <1>")
    assert f"run directory: {config.run.dir}" in out
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5]
    assert [row.get("val_loss") for row in rows(config)] == [None, 2.0, None, 2.0, None]
    row = rows(config)[2]
    unusual = {"val_loss", "val_losses", "task_scores", "bubble", "skipped", "recovery_seconds", "loss_scale"}
    unusual |= {"layer_grad_norms", "layer_rms", "experts", "expert_load", "length", "parts", "predicted_seconds"}
    unusual |= {"workers", "worker_ranks", "losses_ahead"}
    assert row.keys() == MetricsRow.__dataclass_fields__.keys() - unusual
    assert row["samples"] == [8, 12] and row["loss"] == 1 / 3 and row["world_size"] == 2 and row["generation"] == 1
    assert row["seconds"] == {"forward": 0.25, "data": 0.0, "checkpoint": 0.0}
    assert row["comm_bytes"] == {"all_reduce/data": 21}
    assert row["peak_memory_bytes"] == 101
    assert row["mfu"] is None
    assert row["tokens_per_second"] == pytest.approx(4 * config.model.length / row["step_seconds"])
    assert row["tflops_per_worker"] == pytest.approx(row["tokens_per_second"] * fake_plan(2).flops_per_token / 2 / 1e12)


def test_a_finished_run_says_so_and_starts_nothing(config, capsys):
    config.cluster.kind = "inline"
    assert drive(config, size=1) == 0
    before = {file: file.read_bytes() for file in Path(config.run.dir).rglob("*") if file.is_file()}
    capsys.readouterr()
    assert drive(config, size=1, worker="NoSuchWorker") == 0
    assert "already done: 5 steps" in capsys.readouterr().out
    assert before == {file: file.read_bytes() for file in Path(config.run.dir).rglob("*") if file.is_file()}


def test_a_failure_names_the_culprit_and_the_run_starts_over_where_it_is_told_to(config, capsys):
    before = descendants()
    assert drive(config, worker="FailsInStep3") == 1
    assert gone(descendants() - before)
    once = ["forming", "formed", "running", "first_step", "failure"]
    again = ["released", "forming", "formed", "running", "rolled_back", "first_step", "failure"]
    assert names(config) == [*once, *again, *again, "released", "gave_up"]  # the same step, three times
    failure = events(config)[5]
    assert (failure["rank"], failure["coordinates"], failure["method"]) == (1, {"stage": 0, "data": 1}, "step(3)")
    assert "ValueError: boom" in failure["cause"]
    out = capsys.readouterr().out
    assert f"rank1[data1] on {gethostname()} failed in step(3): ValueError: boom" in out
    assert f"its log: {config.run.dir}/logs/worker-1.log" in out
    assert "(failure 3 before step 3 was done)" in out
    assert "stopped after step 2: nothing was saved" in out
    with pytest.raises(ConfigError, match="holds no checkpoint to resume from, though step 2 was done"):
        drive(config)
    config.checkpoint.resume = "never"
    assert drive(config) == 0
    assert [(row["step"], row["generation"]) for row in rows(config)] == [(step, 4) for step in range(1, 6)]
    assert len(Path(config.run.dir, "metrics.jsonl").read_text().splitlines()) == 3 * 2 + 5


def test_a_spare_process_takes_the_place_of_a_killed_one(config, capsys):
    config.elastic.spares, config.elastic.replace = 1, False
    before = descendants()
    assert drive(config, worker="KilledInStep3") == 0
    assert gone(descendants() - before)
    formed = [event["workers"] for event in events(config) if event["event"] == "formed"]
    assert [[worker["number"] for worker in workers] for workers in formed] == [[0, 1], [0, 2]]
    assert formed[0][0]["pid"] == formed[1][0]["pid"]  # who survives keeps its process
    [failure] = [event for event in events(config) if event["event"] == "failure"]
    assert (failure["kind"], failure["number"], failure["step"]) == ("died", 1, 3)
    assert failure["cause"] == "the process was killed by SIGKILL" and failure["log"].endswith("worker-1.log")
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5]
    assert "1 failure survived, 2 steps lost" in capsys.readouterr().out  # these workers have no memory


def test_a_failure_before_the_first_step_is_not_tried_again(config):
    assert drive(config, worker="FailsInStep1") == 1
    assert names(config) == ["forming", "formed", "running", "failure", "released", "gave_up"]


def test_mistakes_come_before_anything_is_written_or_started(config):
    config.cluster.kind = "inline"
    with pytest.raises(ConfigError, match="cluster=inline"):
        drive(config, size=2)
    config.data.kind, config.data.path = "text", "/no/such/corpus"
    with pytest.raises(ConfigError, match="data.path"):
        drive(config, size=1)
    assert not Path(config.run.dir).exists()


SCRIPT = """
import json, sys
from tests.doubles.fake_plan import run_fake
from platform.cluster.crew.signals import Stopped, StopSignals
from platform.config.fields import Config
if __name__ == "__main__":
    config = Config.from_dict(json.loads(sys.argv[1]))
    sys.exit(run_fake(config, int(sys.argv[3]), sys.argv[2]))
"""


@pytest.fixture
def start(config, tmp_path):
    """Starts a run in a process of its own; what it leaves behind is killed after the test."""
    started = []

    def start(worker, size=2):
        script = tmp_path / "drive.py"
        script.write_text(SCRIPT)
        command = [sys.executable, script, json.dumps(config.to_dict()), worker, str(size)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.full),
    ],
)
def test_a_signal_lets_the_step_finish_and_leaves_nothing_behind(number, config, start):
    config.train.steps = 10**6
    process = start("Slow")
    wait_for(Path(config.run.dir, "metrics.jsonl"), process)
    wait_for(Path(config.run.dir, "rank-1-in-step"), process)
    inside = descendants(process.pid)
    assert len(inside) >= 2
    process.send_signal(number)
    out = process.communicate()[0]
    assert process.returncode == 75, out
    assert gone(inside)
    last = rows(config)[-1]["step"]
    assert f"stopped by {number.name} after step {last}: the same command continues after step {last}" in out
    assert "Traceback" not in out
    assert names(config)[-3:] == ["checkpoint", "released", "drained"]


def test_a_second_signal_ends_a_step_that_hangs(config, start):
    process = start("Slow", size=3)
    wait_for(Path(config.run.dir, "rank-1-in-step"), process)
    inside = descendants(process.pid)
    pid = json.loads(Path(config.run.dir, "rank-1-in-step").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    while "stopping after this step" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # one that comes with the first is the same wish
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out = process.communicate()[0]
    assert process.returncode == 75 and "stopped by SIGINT: nothing was done" in out  # it hung in the first step
    assert gone(inside)


def test_a_signal_after_a_wish_of_another_kind_is_the_first():
    with StopSignals() as signals:
        signals.defer_stop()
        signals.request_stop("run.time_limit")
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped, match="run.time_limit"):
            signals.raise_if_requested()


@pytest.mark.ray
@pytest.mark.full
def test_a_signal_stops_ray_too(config, start):
    config.cluster.kind, config.train.steps = "local", 10**6
    process = start("Slow")
    wait_for(Path(config.run.dir, "rank-1-in-step"), process)
    inside = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out = process.communicate()[0]
    assert process.returncode == 75 and "stopped by SIGINT" in out
    assert gone(inside)


@pytest.mark.full  # tests/commands/test_resume_by_command.py goes on under torchrun
def test_torchrun_starts_the_same_run(config, tmp_path):
    (tmp_path / "drive.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, tmp_path / "drive.py", json.dumps(config.to_dict())]
    done = subprocess.run([*command, "FakeWorker", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert names(config) == ["forming", "formed", "running", "first_step", "released", "done"]
    assert len({worker["pid"] for worker in events(config)[2]["workers"]}) == 2
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5]
    again = subprocess.run([*command, "FakeWorker", "2"], capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.count("already done") == 1
    config.run.dir += "-2"
    command[-1] = json.dumps(config.to_dict())
    failed = subprocess.run([*command, "FailsInStep3", "2"], capture_output=True, text=True)
    assert (
        failed.returncode == 1
        and f"rank1[data1] on {gethostname()} failed in step(3): ValueError: boom" in failed.stdout
    )
