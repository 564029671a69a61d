"""Meeting of ranks, each a process, in the TCPStore of the driver; it ends with process groups of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from platform.parallel.communicator.progress import PROGRESS
from platform.parallel.communicator.sockets import open_sockets
from platform.parallel.communicator.torch_distributed import ProcessGroups, join
from platform.plan.language.mesh import Mesh

JOIN_SECONDS = 600.0  # for all ranks to join; the driver ends the wait earlier by closing the store


def meet(rank: int, size: int, address: tuple[str, int], name: int | str, device: str) -> None:
    """Join the default process group of torch.distributed as `rank` of `size`; return once all ranks are there.
    `address`: host and port of the driver's TCPStore; `name`: prefix of this group's keys in it; `device`: device of
    the tensors that the group moves."""
    store = dist.PrefixStore(f"generation/{name}", dist.TCPStore(*address, is_master=False))
    if store.add("there", 1) == size:
        store.set("all", "")
    store.wait(["all"], timedelta(seconds=JOIN_SECONDS))
    join(store, rank, size, device)


def connected(
    mesh: Mesh,
    rank: int,
    address: tuple[str, int],
    name: int | str,
    axes: Iterable[Sequence[str]],
    device: str,
    neighbours: Iterable[tuple[int, int]] = (),
) -> ProcessGroups:
    """Meet the other ranks of `mesh`, as `meet` does, and return the process groups along `axes` and between the pairs
    of stages `neighbours`, with the connections of all of them open."""
    with PROGRESS.waiting("form"):
        before, neighbours = open_sockets(), list(neighbours)
        meet(rank, mesh.size, address, name, device)
        groups = ProcessGroups(mesh, rank, axes, device, neighbours)
        groups.meet(neighbours)
        groups.connections = groups.connections or dict(open_sockets().items() - before.items())
    return groups
