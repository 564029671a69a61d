"""What users of Ray expect of a run in their cluster: placement, labels, a runtime environment, the autoscaler."""

import json
import os
import time

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import resources
from platform.cluster.crew import ray_actors, ray_session
from platform.cluster.crew.failures import NoPlaces
from platform.cluster.crew.ray_actors import Bundle, Demand, worker_bundle
from platform.config.groups import Cluster
from tests.harness.ray_machines import private_cluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def zones():
    """A Ray cluster of its own that looks like two machines of 2 CPUs each, in zones a and b: node id by zone."""
    with private_cluster(head_cpus=0, PYTHONPATH=os.environ["PYTHONPATH"]) as cluster:
        yield {zone: cluster.add_node(num_cpus=2, labels={"zone": zone}).node_id for zone in "ab"}


@pytest.fixture
def joined(zones):
    """This process is connected to it."""
    import ray

    def join(**keys):
        cluster = Cluster(kind="ray", device="cpu", **keys)
        ray_session.join_cluster(cluster)
        return cluster

    yield join
    ray.shutdown()


def of(job, size, cluster, wait=0.1):
    job = job(size)
    job.config.cluster, job.config.elastic.wait = cluster, wait
    return job


def until(what, wanted, seconds=60):
    """`seconds` only bound a failing test."""
    deadline = time.monotonic() + seconds
    while (observed := what()) != wanted:
        assert time.monotonic() < deadline, observed
        time.sleep(0.05)


def located(actors):
    import ray

    nodes = [where.machine for where in ray.get([actor.locate.remote() for actor in actors])]
    for actor in actors:
        ray.kill(actor)
    return nodes


def test_placement_and_labels(zones, joined, job, monkeypatch):
    cluster = joined()

    def refused(size, why):
        with monkeypatch.context() as patch:
            patch.setattr(ray_actors, "_PLACEMENT_SECONDS", 0.5)
            with pytest.raises(NoPlaces, match=why):
                ray_actors._choose_nodes(of(job, size, cluster), size)

    cases = {"pack": 1, "strict_pack": 1, "spread": 2}
    for placement, machines in cases.items():
        cluster.placement = placement
        until(lambda: resources.count_available_workers(Cluster(kind="ray")), 4)  # Ray gives places back later
        assert len(set(ray_actors._choose_nodes(of(job, 2, cluster), 2))) == machines, placement
    cluster.placement = "pack"
    assert len(set(ray_actors._choose_nodes(of(job, 3, cluster), 3))) == 2
    cluster.placement = "strict_pack"
    refused(3, "3 times {'CPU': 1.0}, all on one node, 0 of 3 there")
    for zone, other in ("ab", "ba"):
        cluster.labels = {"zone": f"!in({other}, c)"}
        chosen = ray_actors._choose_nodes(of(job, 2, cluster), 2)
        assert chosen == [zones[zone]] * 2
        assert located([ray_actors._create_actor(of(job, 2, cluster), node) for node in (chosen[0], "")]) == chosen
    until(lambda: resources.count_available_workers(Cluster(kind="ray")), 4)  # the actors' places are free again
    assert resources.count_available_workers(cluster) == 2
    with pytest.raises(
        ConfigError, match=r"needs 3 CPUs, 2 there \(free in the Ray cluster on nodes with cluster.labels"
    ):
        resources.await_worker_places(cluster, 3, print)
    cluster.labels = {"zone": "nowhere"}
    refused(1, r"1 time {'CPU': 1.0} on nodes with {'zone': 'nowhere'}, all on one node")


def test_a_runtime_environment_reaches_the_workers(zones, joined, job):
    import ray

    joined(runtime_env={"env_vars": {"HABIT": "own"}})
    told = ray.remote(num_cpus=1)(lambda: (os.environ["HABIT"], os.environ["PYTHONPATH"]))
    habit, path = ray.get(told.remote())
    assert habit == "own" and str(ray_session.Path(ray_session.__file__).parents[3]) in path.split(os.pathsep)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"env_vars": {"A": 1}}, "env_vars"),
        ({"working_dir": "/nowhere/at/all"}, "nowhere"),
        ({"pip": ["x"], "conda": "y"}, "'pip' field"),
    ],
)
def test_a_runtime_environment_that_ray_refuses_is_a_mistake_of_that_key(joined, environment, why):
    with pytest.raises(ConfigError, match=f"^cluster.runtime_env: Ray refuses it: .*{why}"):
        joined(runtime_env=environment)


def asked():
    """What the autoscaler is asked for: number of bundles of each kind."""
    from ray.experimental import internal_kv

    bundles = json.loads(internal_kv._internal_kv_get("autoscaler_resource_request") or b"[]")
    return {json.dumps(bundle): bundles.count(bundle) for bundle in bundles}


def test_the_demands_of_two_runs_add_up(zones, joined, monkeypatch):
    joined()
    one = Demand(worker_bundle("cpu", {}), lambda: 3)
    until(asked, {'{"CPU": 1.0}': 3})
    other = Demand.__new__(Demand)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    other.__init__(Bundle({"GPU": 1.0}, {}), lambda: 2)
    until(asked, {'{"CPU": 1.0}': 3, '{"GPU": 1.0}': 2})
    one.close()
    until(asked, {'{"GPU": 1.0}': 2})
    other.close(withdraw=False)
    assert asked() == {'{"GPU": 1.0}': 2}  # for whoever takes it up
    again = Demand(Bundle({"GPU": 1.0}, {}), lambda: 1)
    again.close()
    until(asked, {})


def test_a_run_asks_while_it_waits_and_takes_that_back_where_it_gives_up(zones, joined):
    cluster = joined(autoscale=True, wait=1.0)
    seen = []
    with pytest.raises(NoPlaces, match="waited 1 s for 5 CPUs, 4 of 5 there"):
        resources.await_worker_places(cluster, 5, lambda line: seen.append(until(asked, {'{"CPU": 1.0}': 7})), spares=2)
    assert seen
    until(asked, {})
