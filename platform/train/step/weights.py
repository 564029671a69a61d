"""One rank's part of the parameters: master copies, compute copies and gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.leaves import leaf
from platform.parallel.parallel_ops import initialise
from platform.parallel.sharding import gradients, shards
from platform.parallel.sharding.convert import absent
from platform.plan.core.plan import Plan

# precision -> type of the compute copies, and of master copies and summed gradients
DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
}


class Weights:
    """`compute`: name -> what the forward pass reads, `plan.stored_shape`: this rank's block, or its shard [elements]
    where parameters are stored in shards. `master`: name -> what the optimizer updates, `plan.master_shape`: the block
    or the shard, and the same tensor as in `compute` where type and shape agree. What this rank has no block of is
    empty."""

    def __init__(self, plan: Plan, communicator: Communicator, seed: int):
        self._plan, self._communicator = plan, communicator
        low, self._high = DTYPES[plan.precision]
        self.master: dict[str, Tensor] = {}
        self.compute: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        for p in plan.parameters:
            shape = plan.local_shape(p) if plan.present(p, communicator.coordinates) else 0
            block = torch.empty(shape, dtype=self._high, device=communicator.device)
            if not absent(block):
                initialise(plan, communicator, p, seed, block)
            master = shards.own(plan, communicator, block) if plan.sharded else block
            stored = master if plan.storage else block
            self.master[p.name] = master.requires_grad_()
            same = stored is master and low == self._high
            self.compute[p.name] = leaf(stored if same else stored.detach().to(low))

    @property
    def owned(self) -> dict[str, Tensor]:
        """The master copies of which this rank has a block."""
        return {n: w for n, w in self.master.items() if not absent(w)}

    def accumulate(self) -> None:
        """Adds the last microbatch's gradients of the compute copies to their sums in the master's type."""
        for name, w in self.compute.items():
            if w.dtype != self._high and w.grad is not None:
                g = w.grad.to(self._high)
                self._sums[name] = self._sums[name].add_(g) if name in self._sums else g
                w.grad = None

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Name -> this rank's gradient summed over the microbatches, in the master's type, shaped as in `compute`."""
        found = self._sums or {n: w.grad for n, w in self.compute.items() if w.grad is not None}
        return {n: g for n, g in found.items() if not absent(self.master[n])}

    def receive(self, reduced: Mapping[str, Tensor]) -> None:
        """Take the reduced gradients for the optimizer, contiguous as in `master`, in place of the sums."""
        self._sums.clear()
        for name, w in self.compute.items():
            w.grad = None
            master, g = self.master[name], reduced.get(name)
            if g is not None:  # fused optimizers read both in the order of memory, whatever their strides
                assert g.shape == master.shape and g.is_contiguous() and master.is_contiguous(), name
            master.grad = g

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Name -> what `receive` took."""
        return {n: w.grad for n, w in self.owned.items() if w.grad is not None}

    def drop_gradients(self) -> None:
        for master in self.master.values():
            master.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings the compute copies up to the updated master copies and drops the gradients."""
        self.drop_gradients()
        if self._plan.sharded and not self._plan.storage:
            gradients.gather(self._plan, self._communicator, self.master, self.compute)
            return
        for name, w in self.compute.items():
            if w is not self.master[name]:
                w.copy_(self.master[name])
