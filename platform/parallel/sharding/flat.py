"""Flat buffers of a bucket's parameters on one rank: compute copies, master copies and gradients, each block a view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from platform.parallel.communicator.base import Communicator, Handle
from platform.parallel.communicator.traced import Arrived
from platform.parallel.sharding.convert import Pending, convert
from platform.plan.core.buckets import Bucket
from platform.plan.core.plan import Plan
from platform.plan.language.layout import at_zero


class FlatBucket:
    """Bucket of parameters on the rank of `communicator`, computed with in dtype `low` and updated in dtype `high`.

    `compute`: parameter name -> the leaf that the forward pass reads, a view of one buffer, which under ZeRO-3 has
    memory only from `gather` to `release`. `master`: parameter name -> what of it this rank updates: the block, or what
    of the flattened block lies in this rank's shard. A bucket of which this rank has nothing has empty tensors.
    `complete`, if set, is called when all parameters have got a gradient in the backward pass under way.
    """

    complete: Callable[[FlatBucket], None] | None = None

    def __init__(self, plan: Plan, communicator: Communicator, bucket: Bucket, low: torch.dtype, high: torch.dtype):
        self.bucket, self._plan, self._communicator = bucket, plan, communicator
        self._low, self._high = low, high
        self.here = at_zero(bucket.only, communicator.coordinates)
        self._shards, self._index = plan.shards, communicator.index(plan.sharded)
        self._shapes = {p.name: plan.local_shape(p) for p in bucket.parameters}
        self._elements = bucket.elements if self.here else 0
        self.masters = self._new(self._elements // self._shards, high)
        whole = not plan.sharded
        one = low == high and (whole or bool(plan.storage))  # compute and master copies are the same memory
        self._whole = self.masters if one and whole else self._new(self._elements, low)
        rows = self._whole.view(self._shards, -1)
        # what is kept of the compute copies: under ZeRO-3 this rank's shard, beside the buffer that it is gathered into
        self.part = self.masters if one else torch.zeros_like(rows[0]) if plan.storage else rows[self._index]
        # Written through an alias with a version counter of its own: autograd would take a gather in the backward pass
        # for a change of what the forward pass saved.
        self._written = self._whole.data.view(self._shards, -1)
        views = {name: self._block(self._whole, name) for name in self._shapes}
        self.compute = {name: view.detach().requires_grad_() for name, view in views.items()}
        own = {name: w.detach().requires_grad_() for name, w in self._masters(self.masters).items()}
        self.master = self.compute if one and whole else own
        self.sums: Tensor | None = None  # gradients summed over microbatches, laid out as the whole buffer
        self.reduced: Tensor | None = None  # this rank's shard of them, summed over passes (ZeRO-2 and 3)
        self._summed: set[str] = set()  # parameters whose gradient is in `sums`
        self._came: set[str] = set()  # parameters whose gradient came in the backward pass under way
        self._reducing: Pending | None = None
        self.launched = False  # a reduction has been started in the backward pass under way
        self._gathering: Handle | Arrived | None = None
        self.resident = True
        for name, w in self.compute.items():
            w.register_post_accumulate_grad_hook(_take)
            _HOMES[w] = ref(self), name
        if plan.storage:
            self.release()

    def _new(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self._communicator.device)

    def _block(self, flat: Tensor, name: str) -> Tensor:
        """Return the block of a parameter in a buffer laid out as the whole one."""
        if not self.here:
            return flat.new_empty(0)
        start, stop = self.bucket.ranges[name]
        return flat[start:stop].view(self._shapes[name])

    def _masters(self, flat: Tensor) -> dict[str, Tensor]:
        """Return name -> what of each parameter lies in a buffer laid out as `masters`: blocks, or flat shards."""
        if not self._plan.sharded or not self.here:
            return {name: self._block(flat, name) for name in self._shapes}
        first, out = self._index * len(flat), {}
        for name, (start, _) in self.bucket.ranges.items():
            a, b = (start + at for at in self.bucket.shard(name, self._index, self._shards))
            out[name] = flat[a - first : b - first] if a < b else flat[:0]
        return out

    # parameters

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        """Set a parameter's master and compute copies from its block of initial values, which is the master copy itself
        if that is whole."""
        if self._plan.sharded:
            start, stop = self.bucket.shard(name, self._index, self._shards)
            self.master[name].copy_(block.view(-1)[start:stop])
        if self._plan.storage:
            self.part.copy_(self.masters)
        elif self.compute is not self.master:
            self.compute[name].copy_(block)

    @torch.no_grad()
    def refresh(self) -> Handle | Arrived | None:
        """Update the compute copies from the master copies; under ZeRO-1 and 2 the gather of the ranks' shards is
        started, and has to be waited for."""
        if self.part is not self.masters:
            self.part.copy_(self.masters)
        return self._gather_into(self._written) if self._plan.sharded and not self._plan.storage else None

    def fresh(self) -> Mapping[str, Tensor]:
        """Return name -> a new compute copy of every block, made from the master copies, for comparison; all ranks that
        divide the bucket call it together."""
        part = self.masters.detach().to(self._low)
        whole = part
        if self._plan.sharded:
            whole = self._communicator.launch("all_gather", part, self._plan.sharded).wait()
        return {name: self._block(whole.view(-1), name) for name in self._shapes}

    def _gather_into(self, out: Tensor) -> Handle | Arrived | None:
        """Start gathering the ranks' shards into `out` [shards, elements of a shard]."""
        if not self.here:
            return None
        return self._communicator.launch("all_gather", self.part, self._plan.sharded, into=out)

    def prefetch(self) -> None:
        """Start gathering the whole buffer (ZeRO-3), unless it is there or on its way."""
        if not self.resident and not self._gathering:
            self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.itemsize)
            self._gathering = self._gather_into(self._written)

    def gather(self) -> None:
        """Make the whole buffer available (ZeRO-3)."""
        self.prefetch()
        if self._gathering:
            self._gathering.wait()
        self._gathering, self.resident = None, True

    def release(self) -> None:
        """Free the memory of the whole buffer (ZeRO-3); views of it stay, and are readable again after `gather`."""
        self._whole.untyped_storage().resize_(0)
        self.resident = False

    # gradients

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Add a parameter's gradient, of any dtype, to `sums`."""
        if not self.here:
            return
        sums, fresh = self.sum_of(name)
        sums.copy_(gradient) if fresh else sums.add_(gradient)
        self.came(name)

    def sum_of(self, name: str) -> tuple[Tensor, bool]:
        """Return the memory in which a parameter's gradients are summed, and True if what is there does not count."""
        return self._block(self._sums(), name), name not in self._summed

    def _sums(self) -> Tensor:
        """Return `sums`, allocated on first use."""
        if self.sums is None:
            dtype = self._low if self._plan.zero >= 2 else self._high
            self.sums = torch.empty(self._elements, dtype=dtype, device=self._communicator.device)
        return self.sums

    def came(self, name: str) -> None:
        """Note that a gradient of a parameter has been added to `sums`."""
        self._summed.add(name)
        self._came.add(name)
        if self.complete and len(self._came) == len(self.compute):
            self.complete(self)

    def gradients(self) -> dict[str, Tensor]:
        """Return name -> gradient of the parameters that have one in `sums`."""
        return {} if self.sums is None else {name: self._block(self.sums, name) for name in self._summed}

    def passed(self) -> None:
        """Note that a backward pass has ended: gradients that come next are of another one."""
        self._came.clear()
        self.launched = False

    @torch.no_grad()
    def reduce(self) -> None:
        """Start reducing `sums`, over the ranks that divide the bucket where that is done in each backward pass
        (ZeRO-2 and 3), else over all ranks."""
        self.settle()
        sums = self._sums()
        for name in self.compute.keys() - self._summed:
            self._block(sums, name).zero_()
        sums[sum(self.bucket.sizes) :].zero_()
        each, last = self._plan.reduction(self.bucket)
        rows = sums.view(self._shards, -1)
        self.launched = True
        self._reducing = convert(self._communicator, rows, each or last, owned=True)
        if each:
            self.sums = None
            self._summed.clear()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the reduction after a backward pass, and add this rank's shard to those of the passes before."""
        if self._reducing is not None:
            part = self._reducing.wait().view(-1)
            self.reduced = part.to(self._high) if self.reduced is None else self.reduced.add_(part)
            self._reducing = None

    @torch.no_grad()
    def proceed(self) -> None:
        """Start what is left to reduce at the end of a step."""
        each, last = self._plan.reduction(self.bucket)
        if not each:
            self._reducing.proceed() if self._reducing else self.reduce()
            return
        self.settle()
        assert self.reduced is not None
        self._reducing = convert(self._communicator, self.reduced.view(1, -1), last, owned=True)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Wait for the reduction that `proceed` went on with; return the reduced gradients, laid out as `masters`."""
        assert self._reducing is not None
        flat = self._reducing.wait().view(-1)
        self._reducing, self.reduced, self.sums = None, None, None
        self._summed.clear()
        self.passed()
        return flat

    def receive(self, flat: Tensor) -> None:
        """Set the gradients of the master copies to their parts of reduced gradients, laid out as `masters`."""
        for name, gradient in self._masters(flat).items():
            self.master[name].grad = gradient


# leaf -> (its bucket, its name), without keeping either alive
_HOMES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def bucket_of(leaf: Tensor) -> tuple[FlatBucket, str] | None:
    """Return the bucket in which a parameter's compute copy lies, and its name; None for a tensor of no bucket."""
    if (found := _HOMES.get(leaf)) is None:
        return None
    bucket, name = found
    return bucket(), name


def _take(leaf: Tensor) -> None:
    """Move the gradient that autograd has left at a leaf into the sums of its bucket."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None and (found := bucket_of(leaf)):
        bucket, name = found
        bucket.add(name, gradient)
