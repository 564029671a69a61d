"""What a node has and how it is reached, whatever a site's Slurm sets."""

import socket

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster.crew.channel import find_interface, list_addresses
from platform.jobs import ray_node
from platform.jobs.ray_node import count_cpus, count_gpus, find_free_port, find_own_address, format_endpoint


@pytest.mark.parametrize(
    "variables, gpus",
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "h100:8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "gpu:h100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "gpu:h100:4(S:0-1)"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:2"}, 4),
        ({"SLURM_GPUS_PER_NODE": "h100"}, 1),
        ({"SLURM_STEP_GPUS": "0,1,4-7"}, 6),
        ({"SLURM_JOB_GPUS": "2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2e"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"SLURM_GPUS_ON_NODE": "", "CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4),
    ],
)
def test_gpus(variables, gpus):
    assert count_gpus(variables) == gpus


def test_cpus():
    assert count_cpus({"SLURM_CPUS_PER_TASK": "96", "SLURM_CPUS_ON_NODE": "128"}) == 96
    assert count_cpus({"SLURM_CPUS_ON_NODE": "128"}) == 128
    assert count_cpus({}) == count_cpus({"SLURM_CPUS_PER_TASK": "(null)"}) > 0


def test_the_address_is_an_interface_s_or_leads_to_the_others():
    assert find_own_address("lo") == "127.0.0.1" and find_interface("127.0.0.1") == "lo"
    assert ("lo", "127.0.0.1") == list_addresses(4)[-1]  # others come first
    assert find_interface("203.0.113.7") == ""
    with pytest.raises(ConfigError, match="job.interface=ib9: has no IPv4 address on node .*; nearest legal: .*lo"):
        find_own_address("ib9")


def resolved(monkeypatch, name, address):
    """Resolve one host name as a site's hosts file might."""
    ask = socket.getaddrinfo
    hosts = {name: address}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more: ask(hosts.get(host, host), *more))


def test_a_peer_that_is_reached_by_loopback_alone_is_refused(monkeypatch):
    """As where a hosts file gives 127.0.1.1 for a node's name: other nodes could not come."""
    resolved(monkeypatch, "node2", "127.0.1.1")
    with pytest.raises(ConfigError, match="node2 is reached by loopback"):
        find_own_address(peer="node2")
    with pytest.raises(ConfigError, match="no route over IPv6 to node node2"):
        find_own_address(peer="node2", version=6)


def test_the_route_to_a_peer_chooses_the_address(monkeypatch):
    other = [address for name, address in list_addresses(4) if name != "lo"]
    if not other:
        pytest.skip("this machine has loopback alone")
    resolved(monkeypatch, "node2", other[0])
    assert find_own_address(peer="node2") == other[0]


def test_without_a_route_one_node_is_on_loopback(monkeypatch):
    monkeypatch.setattr(ray_node, "_ANYWHERE", {4: "no.such.host.invalid", 6: "no.such.host.invalid"})
    assert (find_own_address(), find_own_address(version=6)) == ("127.0.0.1", "::1")


def test_both_versions_of_ip():
    assert format_endpoint("10.0.0.1", 6379) == "10.0.0.1:6379" and format_endpoint("fd00::1", 6379) == "[fd00::1]:6379"
    with socket.create_server(("127.0.0.1", find_free_port("127.0.0.1"))):
        pass
