"""Ray on one node of a job: `python -m platform.jobs node`, which every node of a Slurm allocation runs.

The first node has Ray's head and the supervisor of the run; it writes the head's address into a directory that all
nodes share, and removes nothing there. The others join the head, and join again when their Ray ends or the head has
another address, until the job is over: the script that started it leaves a file `end` there, or removes it all. All
files of Ray are in a directory of this job's own on the node, all ports are free ones, and processes are ended by what
they inherited, never by `ray stop`: a node may run other jobs. Ray does not hear SIGTERM, which Slurm may send to every
process of a job: without Ray no run could save.

A node's GPUs, CPUs and address are read from Slurm's variables and from the machine, whichever of them a site's
configuration sets (`count_gpus`, `count_cpus`, `find_own_address`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname

from platform.boundary import documents
from platform.boundary.interrupts import ENDING
from platform.boundary.local_files import replace_text
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.boundary.terminal import print_line
from platform.cluster.crew import leftovers
from platform.cluster.crew.channel import find_interface, list_addresses
from platform.cluster.crew.job import usable_cores
from platform.cluster.crew.leftovers import block_sigterm
from platform.jobs.job_state import read_last_log_lines, save_ray_log_ends
from platform.jobs.supervisor import END_JOB, DriverSupervisor, SupervisorOptions, wait_until
from platform.launch import FAILED

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_ANYWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}  # reserved for documentation: a route to it is the default route


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the GPUs of this node in the allocation. Slurm says SLURM_GPUS_ON_NODE, or per node in one of the forms
    8, h100:8, gpu:h100:8 and a100:2,h100:2; without any of them CUDA_VISIBLE_DEVICES counts; else 0."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        text = environment.get(name, "")
        listed = name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # 0,1,4-7
        if text and (count := _count_gpu_list(text) if listed else _sum_gpu_counts(text)):
            return count
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return 0 if visible in ("", "-1", "NoDevFiles") else len(visible.split(","))


def _sum_gpu_counts(text: str) -> int:
    """Return the GPUs in Slurm's [gpu:][TYPE:]COUNT[(...)],...: the sum of the COUNTs, 1 for a type without one."""
    parts = re.sub(r"\([^)]*\)", "", text).split(",")
    ends = [part.rpartition(":")[2] for part in parts]
    return sum(int(end) if end.isdigit() else 1 for end in ends)


def _count_gpu_list(text: str) -> int:
    """Return how many GPUs a list of Slurm's such as 0,1,4-7 has."""
    ranges = [part.rpartition(":")[2].partition("-") for part in text.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges if first.isdigit())


def count_cpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of CPUs here: Slurm's for the task, else for the node, else as many as this process may use."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if (text := environment.get(name, "")).isdigit() and int(text):
            return int(text)
    return usable_cores()


def find_own_address(interface: str = "", peer: str = "", version: int = 4) -> str:
    """Return the IP address of this node of a job by which the others reach it: the address of the network interface
    named, else the one from which `peer` (a host of the same job; "" for none) is reached. `version`: IP version, 4 or
    6.

    A host's own name is no way to find it: many resolve it to 127.0.1.1, or to an address of the other version. Raises
    ConfigError for an interface without such an address, and where only loopback is found and there is a peer.
    """
    if interface:
        address_by_name = {name: address for name, address in list_addresses(version)}
        if interface not in address_by_name:
            constraint = f"has no IPv{version} address on node {socket.gethostname()}"
            raise ConfigError("job.interface", interface, constraint, [*address_by_name] or ["job.ip=6"])
        return address_by_name[interface]
    family = _FAMILIES[version]
    try:
        target = socket.getaddrinfo(peer or _ANYWHERE[version], 9, family, socket.SOCK_DGRAM)[0][4]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(target)  # sends nothing: it only chooses the route
            address = str(probe.getsockname()[0])
    except OSError as error:
        if not peer:
            return {4: "127.0.0.1", 6: "::1"}[version]
        reason = f"no route over IPv{version} to node {peer} ({error})"
        raise ConfigError("job.interface", "", reason, [name for name, _ in list_addresses(version)]) from None
    if peer and (address.startswith("127.") or address == "::1"):
        reason = f"{peer} is reached by loopback ({address}), which other nodes cannot reach"
        raise ConfigError("job.interface", "", reason, [name for name, _ in list_addresses(version)])
    return address


def format_endpoint(address: str, port: int) -> str:
    """Format the HOST:PORT of Ray on a job's node, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def find_free_port(address: str) -> int:
    """Return a TCP port that is free at this address now: nodes may be shared with other jobs."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.create_server((address, 0), family=family)) as listener:
        return int(listener.getsockname()[1])


def is_listening(host: str, port: int) -> bool:
    """Return True if a process accepts TCP connections at `host` and `port`, such as Ray's head on a job's node."""
    with suppress(OSError):
        socket.create_connection((host, port), timeout=2.0).close()
        return True
    return False


HEAD, STOP, END = "head.json", "stop", "end"  # files in the directory that all nodes of the job share
_ATTEMPTS = 3  # to start a head, each at other ports
_HEAD_SECONDS = 120.0  # for a head to answer
_JOIN_SECONDS = 900.0  # for the head's address to appear
_AGAIN_SECONDS = 10.0  # before a node joins again
_LOOK_SECONDS = 0.5
_SAID_LINES = 20
_OBJECT_STORE = 10**9  # bytes: no tensor goes through it


@dataclass(frozen=True)
class NodeOptions:
    """Options of a node of a job. `shared`: the directory that all of its nodes share; `peer`: a host name of another
    node, "" for none; `drain`: seconds that Ray takes to leave, in which the run saves; `run_dir`: directory of kept
    logs, known to the head, which announces it."""

    shared: Path
    interface: str = ""
    peer: str = ""
    ip: int = 4
    drain: int = 60
    run_dir: Path | None = None


def build_ray_command(address: str, options: NodeOptions, directory: str, head: str, port: int, gpus: int) -> list[str]:
    """Return the command that starts Ray on a node at `address`, as the head at `port` or, if `head` is an address, as
    another node of its cluster; it runs until it is ended."""
    role = ["--head", f"--port={port}", "--include-dashboard=false"]
    if find_spec("grpc"):  # Ray's client, which nobody uses here, takes port 10001 otherwise, and cannot be left out
        role.append(f"--ray-client-server-port={find_free_port(address)}")
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *([f"--address={head}"] if head else role),
        f"--node-ip-address={address}",
        f"--num-cpus={max(count_cpus(), gpus)}",
        f"--num-gpus={gpus}",
        f"--temp-dir={directory}/ray",
        f"--object-store-memory={_OBJECT_STORE}",
        *(f"--{limit}-worker-port=0" for limit in ("min", "max")),  # any free one
        "--dashboard-agent-listen-port=0",
    ]


def build_drain_command(head: str, node: str, seconds: int) -> list[str]:
    """Return the command that announces to Ray's head at an address that a node (Ray's id) leaves within `seconds`."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={head}", f"--node-id={node}"),
        *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=its job told it to go"),
        f"--deadline-remaining-seconds={seconds}",
    ]


def build_ray_environment(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a node's Ray and workers: collectives use `address`'s interface unless one is set."""
    interface = find_interface(address)
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if interface else ()
    return {**dict.fromkeys(names, interface), **environment}


class RayNode(leftovers.MarkedPrograms):
    """Ray of one node, and the directory of its files; a context that ends its processes and removes the directory,
    however this process ends."""

    def __init__(self, options: NodeOptions):
        """Prepare to run Ray on this node of a job; nothing is started before the context is entered."""
        super().__init__()
        self._options = options

    def __enter__(self) -> RayNode:
        """Create the directory of this node's Ray, and start the process that cleans up once this one ends."""
        with block_sigterm():
            return super().__enter__()

    def start_ray(self, head: str = "", port: int = 0) -> None:
        """Start Ray on this node, as `build_ray_command` says. Raises ConfigError if no address is found for it."""
        o = self._options
        peer = head.rpartition(":")[0].strip("[]") if head else o.peer
        address = find_own_address(o.interface, peer, o.ip)
        command = build_ray_command(address, o, self.directory, head, port, count_gpus())
        # it prints pages of advice, such as to end it by `ray stop`
        with open(self._output_path, "wb") as output_file, block_sigterm():
            environment = build_ray_environment(address, os.environ)
            self.start_main_program(command, environment, stdout=output_file, stderr=output_file)

    @property
    def _output_path(self) -> Path:
        """Return the path of this node's file with the output of the command `ray start`."""
        return Path(self.directory, "ray.out")

    def read_ray_start_output(self) -> str:
        """Return the last lines that the command `ray start` has printed on this node."""
        return "\n".join(read_last_log_lines(self._output_path, _SAID_LINES))

    def keep_logs(self, run_dir: Path | None) -> None:
        """Keep the end of what Ray has written on this node in the run directory, as `save_ray_log_ends` says."""
        save_ray_log_ends(run_dir, self.directory, self.read_ray_start_output())

    def announce_departure(self, head: str) -> bool:
        """Announce to Ray's head that this node leaves: the run saves, Ray ends. Return False if it has not joined."""
        if not (node := self._find_node_id()):
            return False
        with open(self._output_path, "ab") as output_file, block_sigterm():
            command = build_drain_command(head, node, self._options.drain)
            self.start_program(command, os.environ, stdout=output_file, stderr=output_file)
        return True

    def _find_node_id(self) -> str:
        """Return Ray's id of this node, which its processes were started with, "" if none is there yet."""
        for process in leftovers.find_processes_of_directory(self.directory):
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_text(errors="replace")
                if id_match := re.search(r"\0--node[-_]id=([0-9a-f]+)\0", words):
                    return id_match[1]
        return ""


class _RayHead:
    """Keeps Ray's head alive on this node: a thread starts another one, at other ports, when it has ended."""

    def __init__(self, node: RayNode, options: NodeOptions):
        """Prepare to run Ray's head on this `node` of a job; it has no address before it is started."""
        self._node, self._options = node, options
        self._address = ""

    def start_head(self) -> None:
        """Start Ray's head and publish its address to the job's other nodes. Raises ConfigError if it does not
        start."""
        for attempt in range(_ATTEMPTS):
            o = self._options
            address = find_own_address(o.interface, o.peer, o.ip)
            port = find_free_port(address)
            self._node.start_ray(port=port)
            wait_until(lambda: not self._node.is_running or is_listening(address, port), _HEAD_SECONDS)  # noqa: B023
            if is_listening(address, port):
                self._address = format_endpoint(address, port)
                o.shared.mkdir(0o700, parents=True, exist_ok=True)
                head = {"address": self._address, "run_dir": str(o.run_dir or "")}
                replace_text(o.shared / HEAD, json.dumps(head), 0o600)
                print_line(f"node: {gethostname()}: Ray's head is at {self._address}")
                return
            self._node.end()
            self._node.keep_logs(o.run_dir)
            tried = f"attempt {attempt + 1} of {_ATTEMPTS}"
            host = gethostname()
            print_line(
                f"{self._node.read_ray_start_output()}\nnode: {host}: Ray's head did not start, {tried}", sys.stderr
            )
        raise ConfigError("node: Ray's head does not start on this node; what it says is above")

    def prepare_environment(self) -> dict[str, str]:
        """Return the environment of a driver, with the address of Ray's head; start the head again if it has ended.
        Raises ConfigError if it does not start."""
        if not self._node.is_running:
            why = f"node: {gethostname()}: Ray's head has ended, as above: it is started again"
            print_line(f"{self._node.read_ray_start_output()}\n{why}", sys.stderr)
            self._node.end()
            self._node.keep_logs(self._options.run_dir)
            self.start_head()
        return {"RAY_ADDRESS": self._address}


def run_head(options: NodeOptions, supervision: SupervisorOptions) -> int:
    """Run Ray's head and the supervisor of a run on this node; return the job's exit status. A file `stop` in the
    shared directory stops the run as SIGUSR1 does: by which process a signal of Slurm is received is a site's choice,
    a file is not."""
    with RayNode(options) as node:
        head = _RayHead(node, options)
        head.start_head()
        supervisor = DriverSupervisor(supervision, head.prepare_environment)
        threading.Thread(target=_watch_stop_file, args=(node, options.shared / STOP, supervisor), daemon=True).start()
        return supervisor.run()


def _watch_stop_file(node: RayNode, stop: Path, supervisor: DriverSupervisor) -> None:
    """Wait for the file `stop`, then ask for a stop of the job. Without a head Ray ends the driver after a minute, in
    which that can still save: have it replaced."""
    while not stop.exists():
        if not node.is_running:
            supervisor.stop_driver_for_restart()
        time.sleep(_LOOK_SECONDS)
    supervisor.note_stop_signal(signal.SIGUSR1)


def run_worker_node(options: NodeOptions) -> int:
    """Keep this node in the job's Ray cluster until the job is over or a stop signal, after which it leaves in at most
    `drain` seconds; return the exit status."""
    shared, going = options.shared, threading.Event()
    over = lambda: (shared / END).exists() or not shared.exists()  # noqa: E731  its script says so, or has removed it
    ends = lambda: going.is_set() or over()  # noqa: E731
    head = partial(_read_head_value, shared, "address")
    with RayNode(options) as node:
        for number in ENDING:  # but for these, they are for the head alone
            signal.signal(number, (lambda *_: going.set()) if number in END_JOB else signal.SIG_IGN)
        while not ends():
            wait_until(lambda: head() or ends(), _JOIN_SECONDS)
            if not (address := head()):
                if ends():
                    break
                print_line(f"node: no head of Ray wrote its address to {shared} in {_JOIN_SECONDS:.0f} s", sys.stderr)
                return FAILED
            node.start_ray(address)
            wait_until(lambda: ends() or not node.is_running or head() not in (address, ""))  # noqa: B023
            if going.is_set() and node.is_running and node.announce_departure(address):
                wait_until(lambda: over() or not node.is_running, options.drain)
            if not (node.is_running or ends()):
                why = f"node: {gethostname()}: Ray has ended here; it joins again"
                print_line(f"{node.read_ray_start_output()}\n{why}", sys.stderr)
                run_dir = _read_head_value(shared, "run_dir")
                node.keep_logs(Path(run_dir) if run_dir else None)
            node.end()
            wait_until(ends, _AGAIN_SECONDS)
    return 0


def _read_head_value(shared: Path, name: str) -> str:
    """Read what the head wrote to the shared directory, its `address` or its `run_dir`, "" if that is not there."""
    with suppress(OSError, Malformed, KeyError, TypeError):
        return str(documents.read_json_file(shared / HEAD)[name])
    return ""
