"""What the driver knows of GPUs without starting CUDA, which would take memory on one of them for the whole run."""

import subprocess
import sys

import pytest

from platform.cluster import resources
from platform.cluster.resources import find_worker_device
from platform.config.fields import Cluster, Config
from platform.predict.remedies import Device

LISTED = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA A100-SXM4-40GB, 40960\nNVIDIA T4, [N/A]\n"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(resources, "gpu_count", lambda: 3)
    return Config(cluster=Cluster(kind="processes", gpu="A30"))


def test_the_smallest_gpu_counts(config, monkeypatch):
    monkeypatch.setattr(resources, "_QUERY", [sys.executable, "-c", f"print({LISTED!r})"])
    assert find_worker_device(config, "cuda", 2) == Device(40960 * 2**20, "NVIDIA A100-SXM4-40GB")


@pytest.mark.parametrize("command", [["/no/such/nvidia-smi"], [sys.executable, "-c", "exit(9)"], ["sleep", "60"]])
def test_where_the_driver_does_not_say_the_named_gpu_counts(config, monkeypatch, command):
    monkeypatch.setattr(resources, "_QUERY", command)
    monkeypatch.setattr(resources, "_SECONDS", 0.5)
    assert find_worker_device(config, "cuda", 2) == Device(24e9, "A30")


def test_a_gpu_that_is_hidden_does_not_count(config, monkeypatch):
    """A small one for the screen, say: the command is asked for the GPUs that CUDA shows."""
    monkeypatch.setattr(resources, "_QUERY", ["sh", "-c", 'echo "GPU $0, 100"'])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert find_worker_device(config, "cuda", 2) == Device(100 * 2**20, "GPU --id=1,3")


def test_cuda_is_not_started_for_it():
    code = """
import sys
from platform.cluster import resources as devices
from platform.config.fields import Cluster, Config
devices.gpu_count = lambda: 1
devices._QUERY = [sys.executable, "-c", "print('NVIDIA L4, 23034')"]
assert devices.find_worker_device(Config(cluster=Cluster(kind="processes")), "cuda", 1).name == "NVIDIA L4"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
