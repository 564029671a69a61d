"""Resources of a node of a Slurm allocation, and how others reach it: read from Slurm's variables and from the machine,
whichever of them a site's configuration sets."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import closing, suppress

from platform.boundary.refusals import ConfigError, violation
from platform.cluster.wire.interface import addresses

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_ANYWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}  # reserved for documentation: a route to it is the default route


def gpus_here(environment: Mapping[str, str] = os.environ) -> int:
    """Return the GPUs of this node in the allocation. Slurm says SLURM_GPUS_ON_NODE, or per node in one of the forms
    8, h100:8, gpu:h100:8 and a100:2,h100:2; without any of them CUDA_VISIBLE_DEVICES counts; else 0."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        text = environment.get(name, "")
        listed = name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # 0,1,4-7
        if text and (count := _listed(text) if listed else _counted(text)):
            return count
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return 0 if visible in ("", "-1", "NoDevFiles") else len(visible.split(","))


def _counted(text: str) -> int:
    """Return the GPUs in Slurm's [gpu:][TYPE:]COUNT[(...)],...: the sum of the COUNTs, 1 for a type without one."""
    parts = re.sub(r"\([^)]*\)", "", text).split(",")
    ends = [part.rpartition(":")[2] for part in parts]
    return sum(int(end) if end.isdigit() else 1 for end in ends)


def _listed(text: str) -> int:
    """Return how many GPUs a list of Slurm's such as 0,1,4-7 has."""
    ranges = [part.rpartition(":")[2].partition("-") for part in text.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges if first.isdigit())


def cpus_here(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of CPUs here: Slurm's for the task, else for the node, else this process's affinity."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if (text := environment.get(name, "")).isdigit() and int(text):
            return int(text)
    return len(os.sched_getaffinity(0))


def own_address(interface: str = "", peer: str = "", version: int = 4) -> str:
    """Return the IP address of this node by which the others reach it: the address of the network interface named, else
    the one from which `peer` (a host of the same job; "" for none) is reached. `version`: IP version, 4 or 6.

    A host's own name is no way to find it: many resolve it to 127.0.1.1, or to an address of the other version. Raises
    ConfigError for an interface without such an address, and where only loopback is found and there is a peer.
    """
    if interface:
        found = {name: address for name, address in addresses(version)}
        if interface not in found:
            constraint = f"has no IPv{version} address on node {socket.gethostname()}"
            raise ConfigError(violation("job.interface", interface, constraint, [*found] or ["job.ip=6"]))
        return found[interface]
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
        raise ConfigError(violation("job.interface", "", reason, [name for name, _ in addresses(version)])) from None
    if peer and (address.startswith("127.") or address == "::1"):
        reason = f"{peer} is reached by loopback ({address}), which other nodes cannot reach"
        raise ConfigError(violation("job.interface", "", reason, [name for name, _ in addresses(version)]))
    return address


def endpoint(address: str, port: int) -> str:
    """Format HOST:PORT, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def free_port(address: str) -> int:
    """Return a TCP port that is free at this address now: nodes may be shared with other jobs."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.create_server((address, 0), family=family)) as listener:
        return int(listener.getsockname()[1])


def answers(host: str, port: int) -> bool:
    """Return True if a process accepts TCP connections at `host` and `port`, such as Ray's head on a job's node."""
    with suppress(OSError):
        socket.create_connection((host, port), timeout=2.0).close()
        return True
    return False
