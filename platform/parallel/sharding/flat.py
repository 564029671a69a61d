"""Flat buffers of a bucket's parameters on one rank: compute copies, master copies and gradients, each block a view."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.convert import Pending, convert
from platform.plan.core.buckets import Bucket
from platform.plan.core.plan import Plan
from platform.plan.language.layout import at_zero


class FlatBucket:
    """Bucket of parameters on the rank of `communicator`, computed with in dtype `low` and updated in dtype `high`.

    `compute`: parameter name -> the leaf that the forward pass reads, a view of `whole`; under ZeRO-3 that has memory
    only from `gather` to `release`. `master`: parameter name -> what of it this rank updates: the block, or what of the
    flattened block lies in this rank's shard. `arrived(bucket)` is called when the gradients of all parameters have
    come in a backward pass.
    """

    def __init__(self, plan: Plan, communicator: Communicator, bucket: Bucket, low: torch.dtype, high: torch.dtype):
        self.bucket, self._plan, self._communicator = bucket, plan, communicator
        self._low, self._high = low, high
        self.here = at_zero(bucket.only, communicator.coordinates)
        elements = bucket.elements if self.here else 0
        self._shards, self._index = plan.shards, communicator.index(plan.sharded)
        each = elements // self._shards
        new = lambda n, dtype: torch.zeros(n, dtype=dtype, device=communicator.device)  # noqa: E731
        self.masters = new(each, high)
        alike = low == high
        stored = self.masters if alike and (plan.storage or self._shards == 1) else None
        if plan.storage:
            self.part: Tensor = new(each, low) if stored is None else stored
            self.whole = torch.empty(elements, dtype=low, device=communicator.device)
        else:
            self.whole = new(elements, low) if stored is None else stored
            self.part = self.whole.view(self._shards, -1)[self._index] if elements else self.whole
        # Written through an alias with a version counter of its own: autograd would take a gather in the backward pass
        # for a change of what the forward pass saved.
        self._written = self.whole.data
        self._views = {p.name: self._view(self.whole, p.name) for p in bucket.parameters}
        self.compute = {name: view.detach().requires_grad_() for name, view in self._views.items()}
        self.master = {name: self._of_master(name, self.masters) for name in self.compute}
        self._nbytes = self.whole.nbytes
        self.sums: Tensor | None = None  # gradients, laid out as `whole`
        self.reduced: Tensor | None = None  # gradients summed over ranks too, laid out as `masters`
        self.arrived: Callable[[FlatBucket], None] = lambda bucket: None
        self._there: set[str] = set()  # parameters with a gradient in `sums`
        self._pass: set[str] = set()  # parameters whose gradient has come in the backward pass under way
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._resident = not plan.storage
        for name, w in self.compute.items():
            w.register_post_accumulate_grad_hook(_hook(WeakMethod(self._arrive), name))
        if plan.storage:
            self._free()

    def _view(self, flat: Tensor, name: str) -> Tensor:
        """Return the block of a parameter in a buffer laid out as `whole`."""
        if not self.here:
            return flat.new_empty(0)
        start, stop = self.bucket.ranges[name]
        return flat[start:stop].view(self._shapes[name])
