"""Ray's own GPU resources, without a GPU: each actor gets its device, its NUMA node's cores and its environment."""

import os
from dataclasses import replace

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import resources
from platform.cluster.crew.crew import ByRank
from platform.cluster.crew.launchers import open_crew
from platform.config.groups import Cluster
from tests.doubles.gpu_worker import CORES
from tests.harness.ray_machines import private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.full]


@pytest.fixture
def two_machines_with_gpus():
    """A Ray cluster of its own that looks like two machines of two GPUs each."""
    with private_cluster(head_cpus=2, head={"num_gpus": 2}, PYTHONPATH=os.environ["PYTHONPATH"]) as cluster:
        cluster.add_node(num_cpus=2, num_gpus=2)
        yield cluster


def test_each_actor_has_a_gpu_of_its_own(two_machines_with_gpus, job):
    gpu_job = replace(job(4, "tests.doubles.gpu_worker:GpuWorker"), device="cuda")
    gpu_job.config.cluster.kind, gpu_job.config.cluster.runtime_env = "ray", {"env_vars": {"HABIT": "own"}}
    wanted = Cluster(kind="ray", device="cuda", runtime_env=gpu_job.config.cluster.runtime_env)
    assert resources.count_available_workers(wanted) == 4
    with pytest.raises(ConfigError, match="needs 5 GPUs"):
        resources.await_worker_places(wanted, 5, print)
    assert resources.await_worker_places(wanted, 4, print).device == "cuda"
    with open_crew("ray", gpu_job) as crew:
        crew.assign_ranks(gpu_job, sorted(crew.ready_members_by_number))
        crew.call_ranks("form", ByRank(range(4)), 4, gpu_job.config, crew.store, 1, [0])
        places = crew.call_ranks("place")
    seats = {(place["GROUP_RANK"], place["CUDA_VISIBLE_DEVICES"]) for place in places}
    assert seats == {(node, gpu) for node in "01" for gpu in "01"}, "a GPU of a node has one worker"
    assert len({place["pid"] for place in places}) == 4
    for place in places:
        assert place["near"] == sorted(CORES[place["CUDA_VISIBLE_DEVICES"]]) and place["device"] == "cuda"
        assert place["HABIT"] == "own" and place["LOCAL_WORLD_SIZE"] == "2"
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
