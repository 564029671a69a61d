"""The interface that an address belongs to."""

import socket

import pytest

from platform.cluster.crew import channel
from platform.cluster.crew.channel import find_interface
from tests.testbed.links import Links, why_not


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1", "::1"])
def test_loopback(address):
    if address == "::1":
        with open("/proc/net/if_inet6") as lines:
            if not any(line.split()[-1] == "lo" for line in lines):
                pytest.skip("this machine has no IPv6")
    assert find_interface(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "no address", ""])
def test_an_address_of_nobody_here(address):
    assert find_interface(address) == ""


def test_addresses_that_others_reach(tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "fd000000000000000000000000000002 02 40 00 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert channel._list_ipv6(table) == [("eth0", "fd00::2"), ("lo", "::1")]
    assert channel._list_ipv6(tmp_path / "none") == []


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_the_way_to_another_node():
    """Both to itself and to the other one."""
    ask = "import sys; from platform.cluster.crew.channel import find_interface as f; print(f(sys.argv[1]))"
    import sys

    with Links(nodes=2, rate=None) as links:
        said = links.run(1, [sys.executable, "-c", ask, links.address(1)], check=True).stdout
        assert said == "link0\n"
    assert "link0" not in [name for _, name in socket.if_nameindex()]
