import os

import pytest
from process_tree import descendants, gone

from platform.cluster import resources
from platform.cluster.crew import ByRank, open_crew, seating
from platform.config import Cluster, ConfigError

pytestmark = pytest.mark.ray


@pytest.fixture
def two_machines(monkeypatch):
    """A Ray cluster of its own that looks like two machines of 2 CPUs each, at RAY_ADDRESS."""
    from ray.cluster_utils import Cluster as RayCluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def test_a_crew_in_a_cluster_that_is_already_there(two_machines, job, monkeypatch):
    import ray

    said = []
    with pytest.raises(ConfigError, match="cluster=ray: needs 5 CPUs, 4 there"):
        resources.secure(Cluster(kind="ray", device="cpu"), 5, said.append)
    assert resources.available_workers(Cluster(kind="ray")) == 4
    assert resources.secure(Cluster(kind="ray"), 4, said.append) == "cpu"
    with open_crew("ray", job(4)) as crew:
        crew.seat(job(4), seating(crew.members))
        crew.call("form", ByRank(range(4)), 4, job(4).config, crew.store, 1, [0])
        places = crew.call("place")
        workers = {place["pid"] for place in places}
        assert workers < descendants()
    assert [place["GROUP_RANK"] for place in places] == ["0", "0", "1", "1"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {"2"}
    assert not ray.is_initialized()
    assert gone(workers)
    ray.init(address=os.environ["RAY_ADDRESS"], logging_level="error")  # the cluster is still there, and free
    two_machines.wait_for_nodes()
    while ray.available_resources().get("CPU") != 4:
        pass
    ray.shutdown()


def test_no_cluster_at_the_address(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="cluster=ray: no Ray cluster at RAY_ADDRESS=127.0.0.1:1"):
        resources.secure(Cluster(kind="ray"), 1, print)
