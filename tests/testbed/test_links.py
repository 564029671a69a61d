"""Links of a limited rate: the rate holds, both ways, and nothing is left behind, not even by SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.testbed.links import Links, bits_per_second, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

MEGABYTES = 3
RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
connection.recv(1, socket.MSG_PEEK)
begin, got = time.perf_counter(), 0
while part := connection.recv(1 << 16):
    got += len(part)
print(8 * got / (time.perf_counter() - begin))
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
connection.sendall(bytes(int(sys.argv[2])))
connection.close()
"""
LEFT = """
import signal, sys
from tests.testbed.links import Links
with Links(nodes=1, rate="1mbit") as links:
    child = links.start(0, ["sleep", "infinity"])
    print(child.pid, *(holder.pid for holder in links._holders), flush=True)
    signal.pause()
"""


def measured(links: Links, sender: int, receiver: int) -> float:
    """Bits per second of some megabytes between two nodes."""
    address = links.address(receiver)
    there = links.start(receiver, [sys.executable, "-S", "-c", RECEIVE, address], stdout=subprocess.PIPE, text=True)
    assert there.stdout and there.stdout.readline() == "ready\n"
    links.run(sender, [sys.executable, "-S", "-c", SEND, address, str(MEGABYTES << 20)], check=True)
    return float(there.communicate()[0])


def namespaces() -> set[str]:
    """The network namespaces that any process is in."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:  # gone meanwhile, or the kernel's own
            continue
    return found


def gone(pid: int) -> bool:
    """No such process, or one that nobody has reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_rate_holds_both_ways():
    """An unlimited link, as control, is much faster on the same machine at the same time."""
    limit = bits_per_second("100mbit")
    with Links(nodes=2, rate="100mbit") as slow, Links(nodes=2, rate=None) as fast:
        for sender, receiver in ((0, 1), (1, 0)):
            rate = measured(slow, sender, receiver)
            assert rate < 1.1 * limit
            assert measured(fast, sender, receiver) > 2 * rate


def test_nodes_are_apart():
    """A node sees its link and nothing else of the machine."""
    with Links(nodes=2, rate="1gbit") as links:
        seen = links.run(1, ["ip", "-brief", "address"], check=True).stdout
        assert [line.split("@")[0].split()[0] for line in seen.splitlines()] == ["lo", "link0"]
        assert links.address(1) in seen and links.address(0) not in seen
        assert "tbf" in links.run(1, ["tc", "qdisc", "show", "dev", "link0"], check=True).stdout
        here = os.listdir("/sys/class/net")
        assert "link0" not in here and "bridge0" not in here


def test_nothing_is_left():
    with pytest.raises(RuntimeError), Links(nodes=2, rate="10mbit") as links:
        child = links.start(0, ["sleep", "infinity"])
        made = {os.readlink(f"/proc/{holder.pid}/ns/net") for holder in links._holders}
        assert len(made) == 3 and made < namespaces()
        raise RuntimeError
    assert child.poll() is not None
    assert not made & namespaces()


def test_nothing_is_left_by_sigkill():
    driver = subprocess.Popen([sys.executable, "-c", LEFT], stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 3 and not any(map(gone, pids))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("rate", ["", "fast", "100", "0mbit", "-1mbit", "1mbit; reboot"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="mbit"):
        Links(nodes=1, rate=rate)
