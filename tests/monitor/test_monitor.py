import io
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from platform.config.fields import Config
from platform.monitor import MetricsLog, MetricsRow, open_monitor
from platform.monitor.metrics import wandb_names, wandb_numbers
from platform.monitor.sinks.wandb_sink import build_histogram
from tests.harness.metrics_rows import line, row
from tests.harness.offline_run import history


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def run_driver(run_dir: Path, *, steps: range, before_close: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """A driver with monitor=wandb in its own process."""
    script = f"""
import os, sys
from pathlib import Path
from tests.harness.metrics_rows import line, row
from platform.config.fields import Config
from platform.monitor import monitor as monitors, open_monitor
monitors.STOP_SECONDS = 60.0  # a machine with much else to do
config = Config()
config.monitor.kind = "wandb"
monitor = open_monitor(config, Path(sys.argv[1]), total_steps=9)
for step in range({steps.start}, {steps.stop}):
    monitor.record_step(row(step))
{before_close}
monitor.close(75)
"""
    run_dir.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", script, str(run_dir)],
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_console_only_writes_metrics_and_lines_and_never_imports_wandb(tmp_path: Path) -> None:
    out = io.StringIO()
    monitor = open_monitor(Config(), tmp_path, total_steps=2, stream=out)
    monitor.record_step(row(1))
    monitor.say("hello")
    monitor.record_step(row(2, val_loss=5.0))
    monitor.close(0)
    assert MetricsLog.read_rows(tmp_path / "metrics.jsonl") == [line(1), line(2, val_loss=5.0)]
    assert out.getvalue().splitlines()[2] == "hello"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_driver_may_import_the_monitor_without_heavy_libraries() -> None:
    code = "import sys, platform.monitor; print(sorted({'torch', 'ray', 'wandb', 'hydra'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_metric_without_a_name_is_refused_before_it_is_written(tmp_path: Path) -> None:
    monitor = open_monitor(Config(), tmp_path, total_steps=2, stream=io.StringIO())
    with pytest.raises(TypeError, match="bubbles"):
        monitor.record_step(row(1, bubbles=3))
    assert MetricsLog.read_rows(tmp_path / "metrics.jsonl") == []
    assert {field.name for field in fields(MetricsRow)} - wandb_names().keys() == {"samples"}


def test_without_a_key_wandb_is_offline_in_the_run_directory_and_a_restart_continues_its_id(
    tmp_path: Path, no_account: None
) -> None:
    run_dir = tmp_path / "my run"
    first = run_driver(run_dir, steps=range(1, 4))
    again = run_driver(run_dir, steps=range(3, 6))
    for done in (first, again):
        assert (done.returncode, done.stderr) == (0, "")
        said = [line for line in done.stdout.splitlines() if "W&B" in line or "wandb" in line]
        said = [line for line in said if "is still being sent" not in line]  # on a busy machine it takes longer
        assert said == [f"W&B: offline (no API key); upload with `wandb sync '{run_dir}/wandb'/offline-run-*`"]
    run_id = (run_dir / "wandb" / "run-id").read_text()
    parts = list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert len(parts) == 2 and {part.name for part in parts} == {f"run-{run_id}.wandb"}
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize(
    "env, where",
    [
        ({"WANDB_MODE": "offline"}, "offline (WANDB_MODE); upload"),
        ({"WANDB_MODE": "disabled"}, "disabled (WANDB_MODE)"),
        ({"WANDB_API_KEY": "too-short"}, "offline (WANDB_API_KEY invalid"),
        (
            {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"},
            "offline (Failed to get resume status",
        ),
    ],
    ids=["offline", "disabled", "bad key", "no server"],
)
def test_training_goes_on_whatever_wandb_says(
    tmp_path: Path, no_account: None, env: dict[str, str], where: str
) -> None:
    done = run_driver(tmp_path / "run", steps=range(1, 3), **env)
    assert done.returncode == 0, done.stderr
    assert f"\nW&B: {where}" in done.stdout
    assert "too-short" not in done.stdout + done.stderr
    assert len(MetricsLog.read_rows(tmp_path / "run" / "metrics.jsonl")) == 2


def test_the_death_of_wandb_s_process_is_said_once_and_costs_neither_it_nor_the_run_a_step(
    tmp_path: Path, no_account: None
) -> None:
    kill = """
import time
[sink] = monitor._sinks
while not sink._said:
    time.sleep(0.1)
sink._process.kill()
sink._process.wait()
sink._reader.join()
for step in range(2, 9):
    monitor.record_step(row(step))
"""
    done = run_driver(tmp_path / "run", steps=range(1, 2), before_close=kill)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("W&B: stopped") == 1 and "tried again" in done.stdout
    assert len(MetricsLog.read_rows(tmp_path / "run" / "metrics.jsonl")) == 8
    done = """
import json, time
end = {"time": time.time(), "generation": 1, "event": "done", "step": 9}
(Path(sys.argv[1]) / "journal.jsonl").write_text(json.dumps(end) + chr(10))
"""
    assert run_driver(tmp_path / "run", steps=range(9, 10), before_close=done).returncode == 0
    parts = sorted((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    assert [row["step"] for part in parts for row in history(part) if "train/loss" in row] == [*range(1, 10)]


def test_a_list_is_one_histogram_on_wandb_and_nothing_in_prometheus() -> None:
    """A bin for each expert; of neighbours together where W&B has fewer bins, so that none is left out."""
    assert wandb_numbers(MetricsRow(**vars(row(1)) | {"expert_load": [5, 0, 7]}))["experts/load"] == [5, 0, 7]
    few, many = build_histogram([5, 0, 7]), build_histogram([1] * 1000)
    assert (few.histogram, few.bins) == ([5, 0, 7], [0, 1, 2, 3])
    assert (len(many.histogram), sum(many.histogram), many.bins[-1]) == (500, 1000, 1000)
