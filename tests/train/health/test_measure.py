"""What one worker measures on itself, and what it finds wrong there."""

import hashlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from platform.config.fields import Config
from platform.plan.layout import Mesh
from platform.train import gauges
from platform.train.gauges import RunningGpuQuery
from platform.train.health import BY_NAME, judge_workers
from platform.train.measurements import (
    CONNECTIONS,
    FULL,
    MEASURES,
    QUICK,
    TOGETHER,
    WorkerBench,
    measure_worker,
    note_gpu_memory,
)
from platform.train.replies import Findings
from tests.doubles import sick_worker
from tests.harness.threads import run_threads


@pytest.fixture
def config(tmp_path):
    config = Config()
    config.run.dir = str(tmp_path)
    return config


def measured(config):
    return measure_worker(config, Path(config.run.dir), "cpu", QUICK)


def test_a_sound_worker(config, tmp_path):
    findings = measured(config)
    assert not findings.errors and findings.readings["wrong"] == 0
    assert findings.facts == {"attention": "flash, heads of 16 in fp32"}
    assert findings.readings.keys() == {"gemm", "wrong", "memory", "write", "read"} <= BY_NAME.keys()
    assert all(value > 0 for name, value in findings.readings.items() if name != "wrong")
    assert MEASURES.keys() <= BY_NAME.keys() | findings.facts.keys()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # what it wrote is gone


@pytest.mark.parametrize(
    ("how", "check"), [("wrong", "wrong"), ("storage", "write"), ("forgetful", "read"), ("products", "gemm")]
)
def test_what_is_wrong_is_found(config, monkeypatch, how, check):
    before = measured(config)
    monkeypatch.setattr(torch, "mm", torch.mm)  # both are put back after the test
    monkeypatch.setattr(sick_worker.measurements, "open_storage", sick_worker.measurements.open_storage)
    sick_worker.HOW[how]()
    findings = measured(config)
    if check == "gemm":
        assert findings.readings["gemm"] < before.readings["gemm"] / 5
    elif check == "wrong":
        assert findings.readings["wrong"] == 1
    else:
        assert findings.errors.keys() == {check} and check not in findings.readings
        assert {"write": "No space left", "read": "not what it reads"}[check] in findings.errors[check]


def test_what_other_threads_of_the_worker_do_does_not_count(config, tmp_path):
    """A new one still loads what it needs, and on a busy machine these threads run in the place of this one."""
    over = threading.Event()

    def loads():
        while not over.is_set():
            hashlib.sha256(bytes(1 << 22))

    other = threading.Thread(target=loads)
    other.start()
    begin = time.process_time()

    def waits():
        while time.process_time() - begin < 1:  # of the other one, nearly
            time.sleep(0.1)

    try:
        assert WorkerBench(config, tmp_path, "cpu", QUICK)._time_once(waits) < 0.3
    finally:
        over.set()
        other.join()


def test_one_core_is_measured_however_many_threads_the_worker_has(config, monkeypatch):
    """Threads that wait for others spin, which on cores that are shared would count."""
    seen, mm, before = [], torch.mm, torch.get_num_threads()
    monkeypatch.setattr(torch, "mm", lambda *a, **k: (seen.append(torch.get_num_threads()), mm(*a, **k)))
    torch.set_num_threads(3)
    try:
        measured(config)
        assert set(seen) == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_run_without_checkpoints_is_measured_in_its_directory(config, tmp_path):
    config.checkpoint.on_stop = config.checkpoint.last = False
    config.checkpoint.url = "/proc/nowhere"
    assert not measured(config).errors
    config.checkpoint.on_stop = True
    assert measured(config).errors.keys() == {"write"}


ROWS, NO_ACTION = "case $1 in *rows*)", "*action*) exit 2;; *)"
SICK = {"gpu driver": "550.54.15", "gpu slowdown": "Active", "gpu link": "8 of 16 PCIe lanes"}
NEW = {**SICK, "gpu driver": "570.1", "gpu recovery": "Reset"}


@pytest.mark.parametrize(
    ("script", "readings", "facts"),
    [
        (f"{ROWS} echo '1, 0';; *) echo '570.1, 3, Active, 8, 16, Reset';; esac", {"ecc": 3.0, "rows": 1.0}, NEW),
        (
            f"{ROWS} echo '0, 0';; {NO_ACTION} echo '550.54.15, 3, Active, 8, 16';; esac",
            {"ecc": 3.0, "rows": 0.0},
            SICK,
        ),
        (
            f"{ROWS} exit 2;; *event*) exit 2;; {NO_ACTION} echo '525.1, 3, Active, 8, 16';; esac",
            {"ecc": 3.0},
            {**SICK, "gpu driver": "525.1"},
        ),
        ("echo '550.54.15, [N/A], [Not Supported], [N/A], 16, [N/A]'", {}, {"gpu driver": "550.54.15"}),
        ("echo no devices were found; exit 6", {}, {}),
        ("sleep 60", {}, {}),
        (None, {}, {}),
    ],
)
def test_what_nvidia_smi_says(tmp_path, monkeypatch, script, readings, facts):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("Device", (), {"uuid": "c0ffee"}))
    monkeypatch.setattr(gauges, "_SECONDS", 0.2 if script == "sleep 60" else 30.0)
    command = tmp_path / "nvidia-smi"
    if script:
        command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if script else str(tmp_path))
    findings = Findings()
    query = RunningGpuQuery()
    query.add_answer(findings)
    assert (findings.readings, findings.facts) == (readings, facts)
    if script:
        asked = (tmp_path / "asked").read_text().splitlines()
        assert all("--id=GPU-c0ffee" in line for line in asked)
        assert script != "sleep 60" or len(asked) == len(gauges.FIELDS), "who does not answer is not asked again"


@pytest.mark.parametrize(("check", "measure"), CONNECTIONS.items())
def test_connections_are_measured_and_their_numbers_checked(monkeypatch, check, measure):
    size = 2 if check == "link" else 3
    findings = run_threads(Mesh.arrange_axes({"stage": 1, TOGETHER: size}), lambda c: measure(c, QUICK))
    assert all(one.readings[check] > 0 and one.readings["wrong"] == 0 for one in findings)

    def damaged(c):
        launch = c.launch

        def wrong(*args):
            received = launch(*args).wait().clone()
            received.view(-1)[5] += 1
            return SimpleNamespace(wait=lambda: received)

        if c.rank == 1:
            c.launch = wrong
        return measure(c, QUICK)

    findings = run_threads(Mesh.arrange_axes({"stage": 1, TOGETHER: size}), damaged)
    assert [one.readings["wrong"] for one in findings] == [6.0 * (rank == 1) for rank in range(size)]


def test_what_a_gpu_says_of_itself(config, monkeypatch):
    device = type("Device", (), {"name": "NVIDIA H100 80GB HBM3", "total_memory": 80 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 80 << 30))
    bench = WorkerBench(config, Path(config.run.dir), "cuda", QUICK)
    note_gpu_memory(bench)
    assert bench.found == Findings({"free": 0.25}, {}, {"gpu": "NVIDIA H100 80GB HBM3", "gpu memory": "80 GiB"})


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [QUICK, FULL], ids=["quick", "full"])
def test_a_gpu(config, sizes):
    findings = measure_worker(config, Path(config.run.dir), "cuda", sizes)
    assert not findings.errors and findings.readings.keys() >= {"gemm", "wrong", "memory", "free", "write", "read"}
    assert findings.facts.keys() >= {"gpu", "gpu memory"}
    own, shared = judge_workers({0: findings}, "cuda")
    assert own == {0: {}} and shared == {}, findings
