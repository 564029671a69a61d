"""A service's process that fails is said once, tried again, and never a matter of the run's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from platform.config.fields import Config
from platform.monitor.sinks import sink_process
from platform.monitor.sinks.sink_process import SinkProcess


@pytest.fixture
def config() -> Config:
    config = Config()
    config.monitor.alert_command = "cat >> got"
    return config


def lines_of(sink: SinkProcess, seconds: float = 20.0) -> list[str]:
    until = time.monotonic() + seconds
    while not (lines := sink.take_new_lines()) and time.monotonic() < until:
        time.sleep(0.05)
    return lines


def test_a_process_that_fails_is_started_again(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_process, "AGAIN_SECONDS", 0.0)
    (tmp_path / "sinks").write_text("no folder")
    sink = SinkProcess("alert_command", config, tmp_path)
    [line] = lines_of(sink)
    assert line.startswith("alerts: stopped (") and "FileExistsError" in line and "tried again every minute" in line
    (tmp_path / "sinks").unlink()
    assert lines_of(sink) == ["alerts: monitor.alert_command gets each alert"]
    sink.close(0)
    sink.wait(20)
    assert sink.take_new_lines() == [] and (tmp_path / "sinks" / "alert_command.json").exists()


def test_what_a_package_prints_shows_no_secret(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", tmp_path.name)  # which the error names
    (tmp_path / "sinks").write_text("no folder")
    sink = SinkProcess("alert_command", config, tmp_path)
    [line] = lines_of(sink)
    log = (tmp_path / "logs" / "sink-alert_command.log").read_text()
    assert "${oc.env:SERVICE_TOKEN}/sinks" in log and f"{tmp_path.name}/sinks" not in log + line
    sink.close(0)


def test_a_process_that_cannot_be_started(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_process.sys, "executable", str(tmp_path / "none"))
    sink = SinkProcess("alert_command", config, tmp_path)
    [line] = sink.take_new_lines()
    assert line.startswith("alerts: cannot be started (") and sink.take_new_lines() == []
    sink.close(0)
    sink.wait(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux's")
def test_a_service_leaves_processors_to_the_run_with_all_that_it_has_started() -> None:
    """Also a thread, and a process in a session of its own."""
    script = """
import os, subprocess, threading, time
from platform.monitor.sinks.__main__ import _lower_priority
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
_lower_priority()
pids = [*map(int, os.listdir("/proc/self/task")), child.pid]
print(len(pids), {os.sched_getscheduler(pid) for pid in pids} == {os.SCHED_IDLE})
paths = [f"/proc/{pid}/autogroup" for pid in (os.getpid(), child.pid)]
print({open(path).read().split()[-1] for path in paths if os.path.exists(path)} <= {"19"})
child.kill()
"""
    command = [sys.executable, "-c", script]  # in a session of its own, as a service, so that only that is lowered
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.stdout == "3 True\nTrue\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux's")
def test_an_alert_s_command_gives_no_way(tmp_path: Path, config: Config) -> None:
    """It has a minute, also where the run has all processors."""
    sink = SinkProcess("alert_command", config, tmp_path)
    assert lines_of(sink) == ["alerts: monitor.alert_command gets each alert"]
    time.sleep(1)
    assert sink._process and os.sched_getscheduler(sink._process.pid) == os.SCHED_OTHER
    sink.close(0)
    sink.wait(20)


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_process, "find_spec", lambda name: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = Config()
    config.monitor.tensorboard = config.monitor.mlflow = config.monitor.trackio = True
    assert list(sink_process.violations_of_sinks(config)) == [
        f"monitor={name}: needs the package {name}: pip install {name}, or 'elastic-platform[sinks]' for all services"
        for name in ("tensorboard", "mlflow", "trackio")
    ]
    monkeypatch.setattr(sink_process, "find_spec", lambda name: None if name == "sqlalchemy" else object())
    assert "mlflow-skinny needs the URL of a server" in list(sink_process.violations_of_sinks(config))[0]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://there")
    assert list(sink_process.violations_of_sinks(config)) == []
