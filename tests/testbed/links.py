"""Nodes as network namespaces, joined by links of a limited rate: `with Links(nodes=2, rate="100mbit") as links`.

A namespace `hub` holds a bridge; every node has an interface `link0` on it, at 10.77.0.1 and up. `tc tbf` limits both
ends of each link, so that a node sends at `rate` and receives at `rate`. Nothing is created outside of these
namespaces, and no namespace has a name: each one lives as long as the process that holds it, which the kernel kills
when ours ends, in whichever way. So nothing is left, also after SIGKILL. Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

INTERFACE = "link0"
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TICK = 0.004  # seconds between two refills of a token bucket, at the kernel's slowest clock
LARGEST_PACKET = 1 << 16  # bytes that the kernel hands to a link at once


def bits_per_second(rate: str) -> float:
    """Return the rate that a text such as "100mbit" names. Raises ValueError for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not found or not float(found[1]):
        raise ValueError(f"rate={rate!r}: must be a number above 0 with kbit, mbit or gbit, such as 100mbit")
    return float(found[1]) * BITS[found[2]]


@cache
def why_not() -> str:
    """Return why this machine cannot make such links, in one line; "" if it can. Tries it with one node."""
    try:
        with Links(nodes=1, rate="1gbit") as links:
            links.run(0, ["true"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return f"no network namespaces with limited links: {said[-1] if said else error!r}"
    return ""


class Links:
    """Context of `nodes` namespaces, each on the bridge by a link of `rate` in each direction (None: as fast as it
    goes). Raises OSError or CalledProcessError where the machine does not permit them: see `why_not`."""

    def __init__(self, nodes: int, rate: str | None):
        self.nodes, self.rate = nodes, rate
        self._bucket = max(bits_per_second(rate) / 8 * TICK, LARGEST_PACKET) if rate is not None else 0
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Links:
        try:
            self._holders = [self._hold() for _ in range(self.nodes + 1)]
            self._wait_for_namespaces()
            self._inside(self.nodes, "ip link add bridge0 type bridge", "ip link set bridge0 up")
            for node in range(self.nodes):
                self._join(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in (*self._started, *self._holders):
            process.kill()
            process.wait()
        self._started, self._holders = [], []

    @staticmethod
    def address(node: int) -> str:
        """Return the address of a node, which all nodes reach."""
        return f"10.77.{(node + 1) >> 8}.{(node + 1) & 255}"

    def start(self, node: int, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a command on a node, as `subprocess.Popen(command, **how)` does. It is killed, with the processes of
        its group, when the links are taken down. Its environment names the link to gloo and NCCL."""
        names = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
        how["env"] = {**(how.get("env") or os.environ), **names}
        process = subprocess.Popen(self._on(node, command), start_new_session=True, **how)
        self._started.append(process)
        return process

    def run(self, node: int, command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end, as `subprocess.run(command, text=True, capture_output=True, **how)`
        does."""
        return subprocess.run(self._on(node, command), text=True, capture_output=True, **how)

    def _on(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in the namespace of a node, and ends when we do."""
        return [*ENDS_WITH_US, "nsenter", f"--net=/proc/{self._holders[node].pid}/ns/net", "--", *command]

    @staticmethod
    def _hold() -> subprocess.Popen[bytes]:
        """Start a process in a network namespace of its own that does nothing."""
        command = [*ENDS_WITH_US, "unshare", "--net", "--", "sleep", "infinity"]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def _wait_for_namespaces(self) -> None:
        """Wait until every holder has its namespace. Raises CalledProcessError with what `unshare` said."""
        ours = os.readlink("/proc/self/ns/net")
        for holder in self._holders:
            while holder.poll() is None and os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
                time.sleep(0.002)
            if holder.returncode is not None:
                said = holder.stderr.read().decode() if holder.stderr else ""
                raise subprocess.CalledProcessError(holder.returncode, "unshare", stderr=said)

    def _join(self, node: int) -> None:
        """Connect a node to the bridge by a link of the limited rate."""
        hub, port = self.nodes, f"port{node}"
        peer = f"peer name {port} netns {self._holders[hub].pid}"
        self._inside(
            node,
            "ip link set lo up",
            f"ip link add {INTERFACE} type veth {peer}",
            f"ip address add {self.address(node)}/16 dev {INTERFACE}",
            f"ip link set {INTERFACE} up",
            self._limited(INTERFACE),
        )
        self._inside(hub, f"ip link set {port} master bridge0 up", self._limited(port))

    def _limited(self, interface: str) -> str:
        """Return the command that limits what leaves by an interface."""
        if self.rate is None:
            return "true"
        return f"tc qdisc add dev {interface} root tbf rate {self.rate} burst {self._bucket:.0f} latency 100ms"

    def _inside(self, node: int, *commands: str) -> None:
        """Run plain commands in the namespace of a node. Raises CalledProcessError for the first that fails."""
        for command in commands:
            self.run(node, command.split(), check=True)
