"""Parameters on one rank: master copies, compute copies and gradients of its blocks or shards."""

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

# precision -> dtype of compute copies, dtype of master copies and summed gradients
DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
}


class Weights:
    """Weights of one rank: its copies of the model's parameters, and their gradients. `compute`: name -> the copy that
    the forward pass reads, of `plan.stored_shape`: this rank's block, or its shard [elements] if parameters are stored
    in shards. `master`: name -> the copy that the optimizer updates, of `plan.master_shape`: the block or its shard,
    the same tensor as in `compute` if dtype and shape agree. A parameter of which this rank has no block is an empty
    tensor."""

    def __init__(self, plan: Plan, communicator: Communicator, seed: int | None):
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
            master = shards.own_part(communicator, block, plan.sharded) if plan.sharded else block
            stored = master if plan.storage else block
            self.master[p.name] = master.requires_grad_()
            same = stored is master and low == self._high
            self.compute[p.name] = leaf(stored if same else stored.detach().to(low))

    @property
    def owned(self) -> dict[str, Tensor]:
        """Return name -> master copy of the parameters of which this rank has a block."""
        return {n: w for n, w in self.master.items() if not absent(w)}

    def accumulate(self) -> None:
        """Add the last microbatch's gradients of the compute copies to their sums over microbatches, which are kept in
        the master dtype. Does nothing where both dtypes agree, as autograd sums those itself."""
        for name, w in self.compute.items():
            if w.dtype != self._high and w.grad is not None:
                g = w.grad.to(self._high)
                self._sums[name] = self._sums[name].add_(g) if name in self._sums else g
                w.grad = None

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Return name -> this rank's gradient summed over microbatches, not yet over ranks: master dtype, shaped as in
        `compute`."""
        found = self._sums or {n: w.grad for n, w in self.compute.items() if w.grad is not None}
        return {n: g for n, g in found.items() if not absent(self.master[n])}

    def receive(self, reduced: Mapping[str, Tensor]) -> None:
        """Replace the gradients summed over microbatches by those reduced over ranks, name -> contiguous tensor shaped
        as in `master`, for the optimizer."""
        self._sums.clear()
        for name, w in self.compute.items():
            w.grad = None
            master, g = self.master[name], reduced.get(name)
            if g is not None:  # fused optimizers read both in memory order and ignore strides
                assert g.shape == master.shape and g.is_contiguous() and master.is_contiguous(), name
            master.grad = g

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return name -> this rank's gradient for the optimizer, reduced over ranks, as given to `receive`; shaped as
        in `master`."""
        return {n: w.grad for n, w in self.owned.items() if w.grad is not None}

    def drop_gradients(self) -> None:
        """Free the reduced gradients of the master copies."""
        for master in self.master.values():
            master.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the compute copies from the master copies after these have changed, and free the gradients. All ranks
        call it together, as masters may be shards that are gathered."""
        self.drop_gradients()
        if self._plan.sharded and not self._plan.storage:
            gradients.gather_masters(self._plan, self._communicator, self.master, self.compute)
            return
        for name, w in self.compute.items():
            if w is not self.master[name]:
                w.copy_(self.master[name])
