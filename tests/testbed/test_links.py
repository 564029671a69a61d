"""Nodes joined by links of a limited rate: the rate holds, both ways, nodes are lost, cut off and started anew, and
nothing is left behind, not even by SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 5001))
connection, _ = server.accept()
print("connected", flush=True)
connection.settimeout(1)
try:
    print("closed" if connection.recv(1) == b"" else "said")
except TimeoutError:
    print("nothing")
"""
CONNECT = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5001))
        break
    except OSError:
        time.sleep(0.05)
time.sleep(100)
"""
LEFT = """
import signal, sys
from tests.testbed.links import Links
with Links(nodes=1, rate="1mbit") as links:
    child = links.start(0, ["setsid", "--fork", "sleep", "1234567"])
    print(links._hub.pid, links._holders[0].pid, flush=True)
    signal.pause()
"""
DAEMON = "1234567"  # seconds: the argument by which the process of another session is found


def measured(links: Links, sender: int, receiver: int) -> float:
    """Bits per second of some megabytes between two nodes."""
    address = links.address(receiver)
    listener = links.start(receiver, [sys.executable, "-S", "-c", RECEIVE, address], stdout=subprocess.PIPE, text=True)
    assert listener.stdout and listener.stdout.readline() == "ready\n"
    links.run(sender, [sys.executable, "-S", "-c", SEND, address, str(MEGABYTES << 20)], check=True)
    return float(listener.communicate()[0])


def namespaces() -> set[str]:
    """The network namespaces that any process is in."""
    spaces = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            spaces.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:  # gone meanwhile, or the kernel's own
            continue
    return spaces


def gone(pid: int) -> bool:
    """No such process, or one that nobody has reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
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
        interfaces = os.listdir("/sys/class/net")
        assert "link0" not in interfaces and "bridge0" not in interfaces


def test_nothing_is_left():
    with pytest.raises(RuntimeError), Links(nodes=2, rate="10mbit") as links:
        child = links.start(0, ["sleep", "infinity"])
        spaces = {os.readlink(f"/proc/{holder.pid}/ns/net") for holder in (links._hub, *links._holders.values())}
        assert len(spaces) == 3 and spaces < namespaces()
        raise RuntimeError
    assert child.poll() is not None
    # processes that have ended are in theirs until the kernel has cleared them
    until(lambda: not spaces & namespaces())


def until(what, seconds=20):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_left_by_sigkill():
    """Neither what has begun a session of its own."""
    driver = subprocess.Popen([sys.executable, "-c", LEFT], stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    until(lambda: daemons(pids[1]))
    assert len(pids) == 2 and not any(map(gone, pids))
    left = daemons(pids[1])
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until(lambda: all(map(gone, [*pids, *left])))


def daemons(first):
    """The pids of processes on the node whose namespaces `first` holds."""
    namespace = os.readlink(f"/proc/{first}/ns/net")
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")  # empty while it begins to run another command
            if os.readlink(f"/proc/{pid}/ns/net") == namespace and words[:2] == ["sleep", DAEMON]:
                pids.append(int(pid))
        except OSError:
            continue
    return pids


def connects(links, node, other):
    """Whether a node reaches a port of another within a second; nobody listens there."""
    ask = f"exec 3<>/dev/tcp/{links.address(other)}/9"
    try:
        return "refused" in links.run(node, ["bash", "-c", ask], timeout=1).stderr
    except subprocess.TimeoutExpired:
        return False


def test_a_node_is_lost_and_starts_anew():
    with Links(nodes=2, rate="1gbit") as links:
        alone = links.start(1, ["setsid", "--fork", "sleep", DAEMON])
        alone.wait()
        until(lambda: daemons(links._holders[1].pid))  # which is one once it runs its command
        [daemon] = daemons(links._holders[1].pid)
        process = links.start(1, ["sleep", "infinity"])
        assert connects(links, 0, 1)
        links.crash(1)
        until(lambda: gone(daemon))
        assert process.poll() is not None
        until(lambda: not connects(links, 0, 1))
        links.boot(1)
        until(lambda: connects(links, 0, 1) and connects(links, 1, 0))
        assert links.run(1, ["hostname"]).stdout == "node1\n"
        assert links.run(1, ["getent", "hosts", "node0"]).stdout.split() == [links.address(0), "node0"]
        assert "sleep infinity" in links.run(1, ["ps", "-o", "args", "1"]).stdout
        assert not daemons(links._holders[1].pid)


def test_a_lost_node_closes_no_connection():
    """Unlike a process that is killed."""
    with Links(nodes=3, rate="1gbit") as links:
        for node, heard in ((1, "closed\n"), (2, "nothing\n")):
            client = links.start(node, [sys.executable, "-S", "-c", CONNECT, links.address(0)])
            server = links.start(
                0, [sys.executable, "-S", "-c", LISTEN, links.address(0)], stdout=subprocess.PIPE, text=True
            )
            assert server.stdout and server.stdout.readline() == "connected\n"
            if heard == "closed\n":
                links.signal(client, signal.SIGKILL)
            else:
                links.crash(node)
            assert server.communicate()[0] == heard


def test_a_node_is_cut_off_and_joined_again():
    with Links(nodes=3, rate="1gbit") as links:
        stays = links.start(1, ["sleep", "infinity"])
        links.cut(1)
        assert not connects(links, 0, 1) and connects(links, 0, 2)
        links.heal(1)
        until(lambda: connects(links, 0, 1))
        assert stays.poll() is None


def test_racks_are_joined_by_uplinks():
    """What stays in a rack does not load them, and what leaves it is limited by them."""
    with Links(nodes=4, rate=None, racks=2, uplink="50mbit") as links:
        assert [links.rack(node) for node in range(4)] == [0, 0, 1, 1]
        inside = measured(links, 0, 1)
        idle = links.carried_by_rack(0).sent
        assert idle < 1 << 17
        across = measured(links, 0, 3)
        assert across < 1.1 * bits_per_second("50mbit") < inside
        assert links.carried_by_rack(0).sent - idle >= MEGABYTES << 20
        assert links.carried_by_rack(1).received >= MEGABYTES << 20
        assert links.carried(3)["link0"].received >= MEGABYTES << 20 > links.carried(2)["link0"].received


def test_a_signal_reaches_the_command():
    with Links(nodes=1, rate=None) as links:
        command = ["bash", "-c", "trap 'echo heard; exit 7' TERM; echo ready; while :; do sleep 0.05; done"]
        process = links.start(0, command, stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "ready\n"
        links.signal(process, signal.SIGTERM)
        assert process.stdout.readline() == "heard\n" and process.wait() == 7


@pytest.mark.parametrize("rate", ["", "fast", "100", "0mbit", "-1mbit", "1mbit; reboot"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="mbit"):
        Links(nodes=1, rate=rate)
