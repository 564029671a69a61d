"""A worker keeps to the CPU cores next to its GPU."""

import os

import pytest

from platform.cluster.crew import worker_host
from platform.cluster.crew.worker_host import bind_near_gpu, cores_near_gpu


@pytest.fixture
def machine(tmp_path):
    """Files of a kernel with two GPUs on two NUMA nodes of four cores."""
    places = {"0000:9A:00.0": "4-6,7", "0000:1B:00.0": "0-3"}
    for number, (place, cores) in enumerate(places.items()):
        (tmp_path / "gpus" / place).mkdir(parents=True)
        (tmp_path / "gpus" / place / "information").write_text(f"Model: H100\nGPU UUID: GPU-{number}f-2e\n")
        (tmp_path / "devices" / place.lower()).mkdir(parents=True)
        (tmp_path / "devices" / place.lower() / "local_cpulist").write_text(f"{cores}\n")
    return tmp_path / "gpus", tmp_path / "devices"


@pytest.mark.parametrize(
    "gpu, cores",
    [
        ("0", {0, 1, 2, 3}),
        ("1", {4, 5, 6, 7}),
        ("GPU-0f-2e", {4, 5, 6, 7}),
        ("2", set()),
        ("GPU-9", set()),
        ("", set()),
    ],
)
def test_cores_are_found_by_number_along_the_bus_and_by_uuid(machine, gpu, cores):
    assert cores_near_gpu(gpu, *machine) == cores


def test_a_machine_that_does_not_tell(tmp_path):
    assert cores_near_gpu("0", tmp_path / "none", tmp_path / "none") == set()


@pytest.mark.parametrize(
    "usable, near, bound",
    [
        ({0, 1, 4, 5}, {0, 1, 2, 3}, {0, 1}),
        ({0, 1}, {0, 1, 2, 3}, set()),  # there already
        ({8, 9}, {0, 1, 2, 3}, set()),  # Slurm gave it others: it keeps those
        ({0, 1}, set(), set()),
    ],
)
def test_a_worker_is_bound_where_that_leaves_it_some_cores(monkeypatch, usable, near, bound):
    set_to = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: set_to.append(cores))
    monkeypatch.setattr(worker_host, "cores_near_gpu", lambda gpu: near if gpu == "3" else {99})
    assert bind_near_gpu({"CUDA_VISIBLE_DEVICES": "3,4"}) == bound
    assert set_to == ([bound] if bound else [])
    assert bind_near_gpu({}) == set()


def test_the_real_call_binds_this_process(monkeypatch):
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    one = {min(cores)}
    monkeypatch.setattr(worker_host, "cores_near_gpu", lambda gpu: one)
    try:
        assert bind_near_gpu({"CUDA_VISIBLE_DEVICES": "0"}) == one == os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, cores)
