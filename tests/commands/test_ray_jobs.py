"""`ray job submit --working-dir`, and what Prometheus reads of the run meanwhile. Skipped without ray[default]."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress

import pytest

from platform.monitor import JsonLines, MetricsLog
from platform.monitor.monitor import gauge_name
from tests.harness.commands import QUICK, SMALL, TIMEOUT
from tests.harness.ray_machines import private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.full]
RUN = "train.steps=100000 data=synthetic optimizer.warmup_steps=2 tensor=1d tensor.axes.t=2 parallel.data=1".split()
ON_RAY = "cluster=ray cluster.device=cpu cluster.wait=120 extend=[tests.doubles.slow_steps] eval.every=2".split()


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def scraped(port: int) -> dict[str, dict[str, float]]:
    """What a node offers to Prometheus of runs: run -> gauge -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    gauges: dict[str, dict[str, float]] = {}
    for name, labels, value in re.findall(r"^ray_(platform_\w+)\{(.*)\} (\S+)$", text, re.M):
        run = re.search(r'\brun="([^"]*)"', labels)
        assert run, labels
        gauges.setdefault(run[1], {})[name] = float(value)
    return gauges


def test_a_job_with_a_working_directory_and_its_metrics(tmp_path, root):
    """The code is nowhere but in the folder that is submitted."""
    pytest.importorskip("aiohttp_cors")
    pytest.importorskip("opencensus")
    code = tmp_path / "code"
    for folder in ("platform", "conf", "tests/doubles"):
        shutil.copytree(root / folder, code / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (code / "tests" / "__init__.py").touch()
    dashboard, metrics, run = free_port(), free_port(), tmp_path / "the-run"
    head = {"include_dashboard": True, "dashboard_port": dashboard, "metrics_export_port": metrics}
    head |= {"dashboard_agent_listen_port": free_port()}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH")
        with private_cluster(2, head=head, STEP_SECONDS="0.2", RAY_metrics_report_interval_ms="500"):
            address = f"--address=http://127.0.0.1:{dashboard}"
            ray = [sys.executable, "-m", "ray.scripts.scripts", "job"]
            entry = [sys.executable, "-m", "platform.launch", QUICK, *SMALL, *RUN, *ON_RAY, f"run.dir={run}"]
            submit = [*ray, "submit", address, "--no-wait", "--submission-id=one", "--working-dir", str(code), "--"]
            done = subprocess.run([*submit, *entry], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
            assert done.returncode == 0, done.stdout + done.stderr

            def logs() -> str:
                told = subprocess.run([*ray, "logs", address, "one"], capture_output=True, text=True, cwd=tmp_path)
                return told.stdout + told.stderr

            deadline, by_run = time.monotonic() + TIMEOUT, {}
            while "platform_val_loss" not in by_run.get(run.name, {}):
                assert time.monotonic() < deadline, logs()
                with suppress(OSError):  # it is busy
                    by_run = scraped(metrics)
                time.sleep(0.5)
            subprocess.run([*ray, "stop", address, "one"], cwd=tmp_path, check=True, timeout=TIMEOUT)
    rows = MetricsLog.read_rows(run / "metrics.jsonl")
    gauges = by_run[run.name]
    assert gauges["platform_train_loss"] in [row["loss"] for row in rows]
    assert gauges["platform_perf_step_seconds"] > 0.2
    assert gauges.keys() >= {gauge_name("comm/all_reduce/t"), gauge_name("time/forward"), "platform_tokens"}
    [drained] = [event for event in JsonLines.read_objects(run / "journal.jsonl") if event["event"] == "drained"]
    assert drained["signal"] == "SIGTERM" and drained["step"] == rows[-1]["step"] == drained["saved"]
