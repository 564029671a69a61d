"""Meeting of ranks, each a process, in the TCPStore of the driver; it ends with process groups of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from platform.parallel.communicator.progress import PROGRESS
from platform.parallel.communicator.sockets import open_sockets
from platform.parallel.communicator.torch_distributed import ProcessGroups, join
from platform.plan.language.mesh import Mesh

JOIN_SECONDS = 600.0  # for all ranks to join; the driver ends the wait earlier by closing the store


def meet(size: int, address: tuple[str, int], name: int | str) -> dist.Store:
    """Wait for all ranks of a mesh in the driver's TCPStore (host, port); return its part `name`, theirs alone."""
    store = dist.PrefixStore(f"generation/{name}", dist.TCPStore(*address, is_master=False))
    if store.add("there", 1) == size:
        store.set("all", "")
    store.wait(["all"], timedelta(seconds=JOIN_SECONDS))
    return store


def connected(
    mesh: Mesh,
    rank: int,
    address: tuple[str, int],
    name: int | str,
    axes: Iterable[Sequence[str]],
    device: str,
    neighbours: Iterable[tuple[int, int]] = (),
) -> ProcessGroups:
    """Meet the other ranks of `mesh` and join the default process group of torch.distributed; return the process groups
    along `axes` and between the pairs of stages `neighbours`, with the connections of all of them open."""
    with PROGRESS.waiting("form"):
        before, neighbours = open_sockets(), list(neighbours)
        join(meet(mesh.size, address, name), rank, mesh.size, device)
        groups = ProcessGroups(mesh, rank, axes, device, neighbours)
        groups.meet(neighbours)
        if torch.device(device).type != "cuda":
            groups.connections = dict(open_sockets().items() - before.items())
    return groups
