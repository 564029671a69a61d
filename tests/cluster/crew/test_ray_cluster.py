import os
import signal
import time

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import resources
from platform.cluster.crew.crew import ByRank
from platform.cluster.crew.launchers import open_crew
from platform.config.groups import Cluster
from tests.harness.process_tree import descendants, gone
from tests.harness.ray_machines import drain, private_cluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def two_machines():
    """A Ray cluster of its own that looks like two machines of 2 CPUs each, at RAY_ADDRESS."""
    with private_cluster(head_cpus=2, PYTHONPATH=os.environ["PYTHONPATH"]) as cluster:
        cluster.add_node(num_cpus=2)
        yield cluster


def wait(what, seconds=60):
    """`seconds` only bound a failing test."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.full
def test_a_crew_in_a_cluster_that_is_already_there(two_machines, job, monkeypatch):
    import ray

    said = []
    with pytest.raises(ConfigError, match="cluster=ray: needs 5 CPUs, 4 there"):
        resources.await_worker_places(Cluster(kind="ray", device="cpu"), 5, said.append)
    assert resources.count_available_workers(Cluster(kind="ray")) == 4
    assert resources.await_worker_places(Cluster(kind="ray"), 4, said.append).device == "cpu"
    with open_crew("ray", job(4)) as crew:
        crew.assign_ranks(job(4), sorted(crew.ready_members_by_number))
        crew.call_ranks("form", ByRank(range(4)), 4, job(4).config, crew.store, 1, [0])
        places = crew.call_ranks("place")
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


def test_a_silent_head_holds_up_no_call_of_the_driver(two_machines, job, caplog):
    """Its control store is stopped, a worker dies and another is hired: that one comes when the store goes on."""
    caplog.set_level("INFO", "platform.cluster")
    resources.await_worker_places(Cluster(kind="ray", device="cpu"), 2, print)
    [store] = two_machines.head_node.all_processes["gcs_server"]
    with open_crew("ray", job(2)) as crew:
        os.kill(store.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            os.kill(crew.ready_members_by_number[1].pid, signal.SIGKILL)
            wait(lambda: len(crew.ready_members_by_number) == 1)
            crew.hire_workers(1)
            assert crew.starting_members == {2} and not crew.leaving_members and not crew.lost
            crew._roster.dispose_member(0)
            crew.hire_workers(1)
            assert time.monotonic() - began < 5  # a call of Ray's would wait for the store
            wait(lambda: "it does not answer within 5 s; nobody is lost by that" in caplog.text)
        finally:
            os.kill(store.process.pid, signal.SIGCONT)
        wait(lambda: crew.ready_members_by_number.keys() == {2, 3})
        assert not crew.lost
        wait(lambda: "answers again" in caplog.text)


@pytest.mark.full
def test_machines_go_and_come(two_machines, job, monkeypatch):
    """Hired members wait for a place without keeping anybody; one on a machine about to go is known."""
    other = next(iter(two_machines.worker_nodes))
    assert resources.await_worker_places(Cluster(kind="ray"), 3, print).device == "cpu"
    with open_crew("ray", job(3)) as crew:  # two on one machine, one on the other
        nodes = {number: member.node.rpartition("/")[2] for number, member in crew.ready_members_by_number.items()}
        on_other = {number for number, node in nodes.items() if node == other.node_id}
        assert len(on_other) in (1, 2) and crew.leaving_members == set()

        crew.hire_workers(3)  # there is room for one
        wait(lambda: len(crew.ready_members_by_number) == 4)
        began = time.monotonic()
        assert [crew.ready_members_by_number.keys() for _ in range(20)] and crew.starting_members
        assert time.monotonic() - began < 1

        drain(two_machines, other)
        wait(lambda: crew.leaving_members)
        assert crew.leaving_members == {
            n for n, m in crew.ready_members_by_number.items() if m.node.endswith(other.node_id)
        }
        pids = {crew.ready_members_by_number[number].pid for number in crew.leaving_members}
        crew.dismiss_members(crew.leaving_members)
        assert gone(pids) and len(crew.ready_members_by_number) == 2 and not crew.leaving_members
        two_machines.remove_node(other, allow_graceful=False)

        stopped = crew.ready_members_by_number[min(crew.ready_members_by_number)]
        os.kill(stopped.pid, signal.SIGSTOP)
        crew._roster.dispose_member(stopped.number)
        assert gone([stopped.pid])
        wait(lambda: len(crew.ready_members_by_number) == 2)  # its place is taken
        two_machines.add_node(num_cpus=1)
        wait(lambda: len(crew.ready_members_by_number) == 3)
        assert not crew.starting_members and not crew.unstarted

        crew._launcher._ray.leaving = frozenset([crew._launcher._here])  # as if the driver's own machine goes
        assert crew.leaving_members == crew.ready_members_by_number.keys()


def test_no_cluster_at_the_address(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="cluster=ray: no Ray cluster at RAY_ADDRESS=127.0.0.1:1"):
        resources.await_worker_places(Cluster(kind="ray"), 1, print)
