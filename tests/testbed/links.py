"""Nodes as namespaces, joined by links of a limited rate: `with Links(nodes=2, rate="100mbit") as links`.

A node has a network, processes, a host name and a table of mounts of its own, and knows the others by name. Its
interface `link0`, at 10.77.0.1 and up, is on the bridge of its rack; of several racks, each is joined to a bridge
`core` by a link of the rate `uplink`. `tc tbf` limits both ends of each link, so that a node sends at `rate` and
receives at `rate`. Nothing is created outside of these namespaces, and none has a name: each one lives as long as the
process that holds it, which the kernel kills when ours ends, in whichever way, and with it every process that was
started on the node. So nothing is left, also after SIGKILL. Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

INTERFACE = "link0"
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
SPACES = {"net": "net", "mount": "mnt", "uts": "uts", "pid": "pid_for_children"}  # option of nsenter -> in /proc/PID/ns
NODE = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
HUB = ("--net",)
# Ignores SIGCHLD: then the kernel itself reaps what a node's processes leave behind, as init does. A shell resets it.
IDLE = "echo; exec env --ignore-signal=CHLD sleep infinity"
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MTU = 9000  # bytes: frames of 1500 would cost this machine more CPU than what ranks compute
HEADER = 64  # bytes, and more than a frame has beside its packet
TICK = 0.004  # seconds between two refills of a token bucket, at the kernel's slowest clock
LARGEST_PACKET = 1 << 16  # bytes that the kernel hands to a link at once, where nobody says fewer
QUEUE = 1 << 24  # bytes that wait at a link: with fewer, slow links drop packets, and wait longer than they send


class Carried(NamedTuple):
    """Bytes that an interface of a node has sent and received since the node was started, headers included."""

    sent: int
    received: int


def bits_per_second(rate: str) -> float:
    """Return the rate that a text such as "100mbit" names. Raises ValueError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not match or not float(match[1]):
        raise ValueError(f"rate={rate!r}: must be a number above 0 with kbit, mbit or gbit, such as 100mbit")
    return float(match[1]) * BITS[match[2]]


@cache
def why_not() -> str:
    """Return why this machine cannot make such links, in one line; "" if it can. Tries it with one node."""
    try:
        with Links(nodes=1, rate="1gbit") as links:
            links.run(0, ["true"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return f"no namespaces with limited links: {said[-1] if said else error!r}"
    return ""


class Links:
    """Context of `nodes` nodes, each joined to the bridge of its rack by a link of `rate` in each direction (None: as
    fast as it goes), and `racks` racks, of consecutive nodes, joined by links of `uplink`. Raises OSError or
    CalledProcessError where the machine does not permit them: see `why_not`."""

    def __init__(self, nodes: int, rate: str | None, racks: int = 1, uplink: str | None = None):
        assert nodes % racks == 0
        self.nodes, self.racks, self.rate, self._uplink = nodes, racks, rate, uplink
        for limit in (rate, uplink):
            if limit is not None:
                bits_per_second(limit)
        self._hub: subprocess.Popen[bytes] | None = None
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._started: list[tuple[int, subprocess.Popen[Any]]] = []

    def __enter__(self) -> Links:
        try:
            self._hub = _held(HUB)
            _wait_for([self._hub])
            for rack in range(self.racks):
                self._in_hub(f"ip link add {self._bridge(rack)} type bridge", f"ip link set {self._bridge(rack)} up")
            if self.racks > 1:
                self._in_hub("ip link add core type bridge", "ip link set core up")
                for rack in range(self.racks):
                    self._join_rack(rack)
            self.boot(*range(self.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.crash(*list(self._holders))
        if self._hub:
            self._hub.kill()
            self._hub.wait()
        self._hub = None

    @staticmethod
    def address(node: int) -> str:
        """Return the address of a node, which all nodes reach."""
        return f"10.77.{(node + 1) >> 8}.{(node + 1) & 255}"

    def rack(self, node: int) -> int:
        """Return the number of the rack that a node is in."""
        return node // (self.nodes // self.racks)

    def network(self, node: int) -> str:
        """Return the file that stands for the network of a node."""
        return f"/proc/{self._holders[node].pid}/ns/net"

    def boot(self, *nodes: int) -> None:
        """Start nodes that are not there: with a link, a host name `nodeN`, and no process."""
        self._holders |= {node: _held(NODE) for node in nodes}
        _wait_for([self._holders[node] for node in nodes])
        for node in nodes:
            self._join(node)

    def crash(self, *nodes: int) -> None:
        """Lose nodes as by a power cut: every process there is killed, and no connection is closed: the kernel, which
        would close them, reaches nobody."""
        for node in nodes:
            subprocess.run(self._hub_command(f"ip link set port{node} down"), stderr=subprocess.DEVNULL)
            self._holders[node].kill()
        for node in nodes:
            self._holders.pop(node).wait()
        for node, process in self._started:
            if node in nodes:
                process.kill()
                process.wait()
        self._started = [(node, process) for node, process in self._started if node not in nodes]

    def cut(self, node: int) -> None:
        """Cut a node off from all others, until `heal`; its processes and connections stay."""
        self._in_hub(f"ip link set port{node} down")

    def heal(self, node: int) -> None:
        """Join a node that was cut off to the others again."""
        self._in_hub(f"ip link set port{node} up")

    def slow(self, node: int, rate: str) -> None:
        """Limit a node's link to another rate, in both directions, from now on."""
        for run, interface in ((self._in_hub, f"port{node}"), (lambda c: self._in_node(node, c), INTERFACE)):
            run(f"tc qdisc del dev {interface} root")
            run(self._limited(interface, rate))

    def carried(self, node: int) -> Mapping[str, Carried]:
        """Return what each interface of a node has carried: `lo` between its own processes, `link0` to and from other
        nodes."""
        return _carried(self.run(node, ["ip", "-stats", "-json", "link"], check=True).stdout)

    def carried_by_rack(self, rack: int) -> Carried:
        """Return what the uplink of a rack has carried: from the rack to others, and from others to it."""
        carried = _carried(subprocess.run(self._hub_command("ip -stats -json link"), capture_output=True, text=True,
                                          check=True).stdout)[f"up{rack}"]  # fmt: skip
        return Carried(carried.sent, carried.received)

    def start(self, node: int, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a command on a node, as `subprocess.Popen(command, **how)` does. Whatever it starts, in whichever
        session, is killed when the node is lost or the links are taken down."""
        process = subprocess.Popen(self._on(node, command, how.pop("cwd", None)), start_new_session=True, **how)
        self._started.append((node, process))
        return process

    def run(self, node: int, command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end, as `subprocess.run(command, text=True, capture_output=True, **how)`
        does."""
        return subprocess.run(self._on(node, command, how.pop("cwd", None)), text=True, capture_output=True, **how)

    @staticmethod
    def signal(process: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to the command that `start` has started, which is the child of what entered the node for
        it."""
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(pid), number)

    def _on(self, node: int, command: Sequence[str], cwd: str | os.PathLike[str] | None) -> list[str]:
        """Return the command that runs `command` on a node, in the folder `cwd` (None: ours)."""
        spaces = (f"--{option}=/proc/{self._holders[node].pid}/ns/{name}" for option, name in SPACES.items())
        return [*ENDS_WITH_US, "nsenter", *spaces, "--", "env", f"--chdir={cwd or os.getcwd()}", *command]

    @staticmethod
    def _bridge(rack: int) -> str:
        return f"rack{rack}"

    def _join(self, node: int) -> None:
        """Connect a node to its rack's bridge by a link of the limited rate."""
        port, first = f"port{node}", self._holders[node].pid
        card = f"02:00:00:00:{node >> 8:02x}:{node & 255:02x}"  # the same when it is started anew, as of a machine
        subprocess.run(self._hub_command(f"ip link del {port}"), stderr=subprocess.DEVNULL)  # of a node that was lost
        self._in_hub(
            f"ip link add {port} mtu {MTU} type veth peer name {INTERFACE} address {card} mtu {MTU} netns {first}",
            f"ip link set {port} master {self._bridge(self.rack(node))} up",
            self._limited(port, self.rate),
        )
        self._in_node(
            node,
            f"hostname node{node}",
            "ip link set lo up",
            f"ip address add {self.address(node)}/16 dev {INTERFACE}",
            f"ip link set {INTERFACE} gso_max_size {_at_once(self.rate)} up",
            "sysctl -q net.ipv4.tcp_congestion_control=reno",  # bbr takes a rank that computes for a slow link
            "sysctl -q net.ipv4.tcp_slow_start_after_idle=0",  # a link that is idle between steps is no new link
            self._limited(INTERFACE, self.rate),
        )
        with tempfile.NamedTemporaryFile("w") as names:  # it lives on where it is mounted
            names.write("127.0.0.1 localhost\n")
            names.writelines(f"{self.address(other)} node{other}\n" for other in range(self.nodes))
            names.flush()
            Path(names.name).chmod(0o644)
            self._in_node(node, f"mount --bind {names.name} /etc/hosts")

    def _join_rack(self, rack: int) -> None:
        """Connect a rack's bridge to `core` by a link of the uplink's rate."""
        self._in_hub(
            f"ip link add up{rack} mtu {MTU} type veth peer name down{rack} mtu {MTU}",
            f"ip link set up{rack} master {self._bridge(rack)} up",
            f"ip link set down{rack} master core up",
            self._limited(f"up{rack}", self._uplink),
            self._limited(f"down{rack}", self._uplink),
        )

    @staticmethod
    def _limited(interface: str, rate: str | None) -> str:
        """Return the command that limits what leaves by an interface."""
        if rate is None:
            return "true"
        bucket = max(bits_per_second(rate) / 8 * TICK, 2 * (_at_once(rate) + HEADER))
        return f"tc qdisc add dev {interface} root tbf rate {rate} burst {bucket:.0f} limit {QUEUE}"

    def _in_node(self, node: int, *commands: str) -> None:
        """Run plain commands on a node. Raises CalledProcessError for the first that fails."""
        for command in commands:
            self.run(node, command.split(), check=True)

    def _in_hub(self, *commands: str) -> None:
        """Run plain commands where the bridges are. Raises CalledProcessError for the first that fails."""
        for command in commands:
            subprocess.run(self._hub_command(command), text=True, capture_output=True, check=True)

    def _hub_command(self, command: str) -> list[str]:
        assert self._hub
        return [*ENDS_WITH_US, "nsenter", f"--net=/proc/{self._hub.pid}/ns/net", "--", *command.split()]


def _at_once(rate: str | None) -> int:
    """Return the bytes of the largest packet for a link of this rate, whose bridge passes on only what it has whole."""
    return LARGEST_PACKET if rate is None else int(min(max(bits_per_second(rate) / 8 * TICK, MTU), LARGEST_PACKET))


def _held(options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process in namespaces of its own that says a line and then does nothing."""
    command = [*ENDS_WITH_US, "unshare", *options, "--", "sh", "-c", IDLE]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _wait_for(holders: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until every holder is in its namespaces. Raises CalledProcessError with what `unshare` said."""
    for holder in holders:
        assert holder.stdout and holder.stderr
        if not holder.stdout.readline():
            raise subprocess.CalledProcessError(holder.wait(), "unshare", stderr=holder.stderr.read().decode())


def _carried(printed: str) -> dict[str, Carried]:
    """Read the counters of `ip -stats -json link`, by interface."""
    return {
        link["ifname"]: Carried(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])
        for link in json.loads(printed)
    }
