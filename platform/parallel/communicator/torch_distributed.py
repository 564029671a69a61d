"""Communicator on torch.distributed, where every rank is a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from platform.parallel.communicator.base import Communicator
from platform.parallel.communicator.progress import PROGRESS
from platform.parallel.communicator.sockets import Sockets, shut_down
from platform.plan.language.mesh import Mesh

TIMEOUT = timedelta(minutes=10)  # of one collective
CONNECT = timedelta(
    seconds=4
)  # of creating a group, once all ranks have joined: a rank that dies meanwhile leaves the others waiting
STAGED_BYTES = 64 << 20  # bytes of host memory that `transfer` moves through GPU memory at a time
# before torch 2.13: all_gather_into_tensor, reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroups(Communicator):
    """Communicator over torch.distributed groups: NCCL on CUDA, gloo on CPU. Needs an initialised default group.

    `axes_of_groups`: the tuples of axes, in mesh order, along which collectives will run; one group is made of each, in
    the same order on every rank. `connections`: the sockets of gloo's groups, which `abort` shuts down; set by the
    caller that forms the groups.
    """

    def __init__(self, mesh: Mesh, rank: int, axes_of_groups: Iterable[Sequence[str]], device: str = "cpu"):
        super().__init__(mesh, rank, device)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self.connections: Sockets = {}
        for axes in axes_of_groups:  # in one order on every rank: creating a group is collective
            mine, _ = dist.new_subgroups_by_enumeration([list(g) for g in mesh.groups(axes)], timeout=CONNECT)
            assert mine is not None
            self._groups[tuple(axes)] = mine
        for group in (None, *self._groups.values()):
            dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)

    def _start(self, op, given, out, axes, group, reduce, root):
        g = self._groups[axes]
        if op == "all_gather":
            work = _all_gather(out.view(-1), given.view(-1), group=g, async_op=True)
        elif op == "reduce_scatter":
            work = _reduce_scatter(out.view(-1), given.view(-1), group=g, async_op=True)
        elif op == "all_to_all":
            work = dist.all_to_all_single(out.view(-1), given.view(-1), group=g, async_op=True)
        elif op == "broadcast":
            work = dist.broadcast(out, group[root], group=g, async_op=True)
        elif op == "scatter":
            parts = list(given.unbind()) if self.rank == group[root] else None
            work = dist.scatter(out, parts, group[root], group=g, async_op=True)
        elif op == "gather":
            parts = list(out.unbind()) if self.rank == group[root] else None
            work = dist.gather(given, parts, group[root], group=g, async_op=True)
        elif op == "reduce":
            work = dist.reduce(out, group[root], group=g, async_op=True)
        else:
            work = dist.all_reduce(out, dist.ReduceOp.MAX if reduce == "max" else dist.ReduceOp.SUM, g, async_op=True)
        return work.wait

    def _send(self, x, peer):
        work = dist.isend(x, peer)
        assert work is not None
        return partial(work.wait, TIMEOUT)

    def _receive(self, out, peer):
        work = dist.irecv(out, peer)
        assert work is not None
        return partial(work.wait, TIMEOUT)

    def exchange(self, messages):
        with PROGRESS.waiting("exchange"):
            sent = torch.tensor([m.numel() for m in messages], device=self.device)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            given = torch.cat(list(messages)).to(self.device)
            sizes = received.tolist()
            out = given.new_empty(sum(sizes))
            dist.all_to_all_single(out, given, sizes, sent.tolist())
            return list(out.cpu().split(sizes))

    def transfer(self, sent, received):
        largest = max((x.numel() for _, x in (*sent, *received)), default=0)
        step = STAGED_BYTES if self.device.type == "cuda" else max(largest, 1)  # bytes at a time
        for at in range(0, largest, step):
            given = [(peer, x[at : at + step].to(self.device)) for peer, x in sent if at < x.numel()]
            wanted = [(peer, x[at : at + step]) for peer, x in received if at < x.numel()]
            got = [x if x.device == self.device else torch.empty_like(x, device=self.device) for _, x in wanted]
            works = [dist.P2POp(dist.isend, x, peer) for peer, x in given]
            works += [dist.P2POp(dist.irecv, x, peer) for x, (peer, _) in zip(got, wanted, strict=True)]
            with PROGRESS.waiting("transfer"):
                for work in dist.batch_isend_irecv(works):
                    work.wait(TIMEOUT)
            for x, (_, out) in zip(got, wanted, strict=True):
                if x is not out:
                    out.copy_(x)

    def collect(self, numbers):
        mine = numbers.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.mesh.size)] if self.rank == 0 else None
        with PROGRESS.waiting("collect"):
            dist.gather(mine, rows)
        return torch.stack(rows).cpu() if rows else None

    def abort(self) -> None:
        if self.device.type == "cuda" and dist.is_initialized():
            for group in [*self._groups.values(), dist.distributed_c10d._get_default_group()]:
                group.abort()
        shut_down(self.connections)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
