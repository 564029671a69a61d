"""Flat buffers of a bucket's parameters on one rank: compute copies, master copies and gradients, each block a view.

`local_squared_norm` and `sum_squares` make the norm of the gradient, of which each rank counts its part.
`AdjacentParameters` lie one after another in a bucket, so that one product computes with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from platform.plan.chunks import SQUARED_AT_ONCE, Bucket
from platform.plan.layout import is_at_index_zero
from platform.plan.plan import Plan
from platform.plan.rule import RelayoutStep
from platform.runtime.communicator import ArrivedCollective, CollectiveHandle, Communicator
from platform.runtime.conversion import PendingConversion, convert
from platform.runtime.staged_memory import allocate_host_zeros, allocate_zeros

_HOME = "_flat_home"  # attribute of compute copies, of parameters that follow each other: (their bucket, their names)
TracedGradients = list[tuple[tuple["FlatBucket", tuple[str, ...]], Tensor]]  # of adjacent parameters of a bucket
ON_THE_WAY = 1 << 23  # elements that are copied from host memory at once
MANY = 1 << 16  # elements of a gradient from which on its bytes count for more than a launch


class FlatBucket:
    """Bucket of parameters on the rank of `communicator`, computed with in dtype `low` and updated in dtype `high`.

    `compute`: parameter name -> the leaf that the forward pass reads, a view of one buffer, which after an update under
    ZeRO-1 and 2 is readable from `gather_parameters` on, and under ZeRO-3 has memory only from `gather_parameters` to
    `release_parameters`. `master`: parameter name -> what of it this rank updates: the block, or what of the flattened
    block lies in this rank's shard. A bucket of which this rank has nothing has empty tensors, and a frozen one master
    copies of dtype `low` and no gradients. `complete`, if set, is called when all parameters have got a gradient in the
    backward pass under way.
    """

    complete: Callable[[FlatBucket], None] | None = None

    def __init__(self, plan: Plan, communicator: Communicator, bucket: Bucket, low: torch.dtype, high: torch.dtype):
        """Allocate the flat buffers of a bucket of parameters on this rank: compute copies in dtype `low`, master
        copies in dtype `high`."""
        self.bucket = plan.bucket_of_rank(bucket, communicator.coordinates)
        self._plan, self._communicator = plan, communicator
        high = low if bucket.frozen else high
        self._low, self._high = low, high
        # gradients are summed where kernels add them; else a pass's are collected in `_coming` first
        self._direct = plan.adds_gradients_into_sums(bucket, communicator.device.type)
        self.adds_in = high if self._direct and bucket.zero < 2 else low  # dtype of the memory that kernels add them to
        self.here = is_at_index_zero(bucket.only, communicator.coordinates)
        self._index = communicator.group_index(bucket.sharded)  # of its shard
        self._shapes = {p.name: plan.block_shape(p, communicator.coordinates) for p in bucket.parameters}
        self._elements = bucket.elements if self.here else 0
        self.masters = self._allocate_masters(self._elements // bucket.shards)
        # compute and master copies are the same memory, or what is left of compute copies is
        is_one_memory = low == high and (not bucket.sharded or bucket.frees_weights)
        is_whole = is_one_memory and not bucket.frees_weights
        self._whole = self.masters if is_whole else self._allocate_flat(self._elements, low)
        rows = self._whole.view(self.bucket.shards, -1)
        # what is kept of the compute copies: under ZeRO-3 this rank's shard, beside the buffer that it is gathered into
        self.part = self.masters if is_one_memory else rows[self._index]
        if bucket.frees_weights and not is_one_memory:
            self.part = torch.zeros_like(rows[0])
        self.low = self._allocate_rest_of_masters(plan, high)
        # Written through an alias with a version counter of its own: autograd would take a gather in the backward pass
        # for a change of what the forward pass saved.
        self._written = self._whole.data.view(self.bucket.shards, -1)
        views = {name: self._block_view(self._whole, name) for name in self._shapes}
        trains = not bucket.frozen
        self.compute = {name: view.detach().requires_grad_(trains) for name, view in views.items()}
        own_masters = {name: w.detach().requires_grad_(trains) for name, w in self._master_views(self.masters).items()}
        self.master = self.compute if is_whole else own_masters
        self.sums: Tensor | None = None  # gradients summed over microbatches, laid out as the whole buffer
        self._lasting: Tensor | None = None  # their memory in all steps, if it is always the same
        self._coming: Tensor | None = None  # gradients of the pass under way, where none can be added to `sums` at once
        self._held: set[str] = set()  # parameters whose gradient is in `_coming`
        self._taken: dict[str, Tensor] = {}  # gradients by parameter that are in neither yet
        self.reduced: Tensor | None = None  # this rank's shard of them, summed over passes (ZeRO-2 and 3)
        self._summed: set[str] = set()  # parameters whose gradient is in `sums`
        self._came: set[str] = set()  # parameters whose gradient came in the backward pass under way
        self._first: frozenset[str] = frozenset()  # parameters with a gradient from split-off input-gradient passes
        self._reducing: PendingConversion | None = None
        self.launched = False  # a reduction has been started in the backward pass under way
        self._gathering: CollectiveHandle | ArrivedCollective | None = None
        self.resident = True
        for name, w in self.compute.items():
            if trains:
                w.register_post_accumulate_grad_hook(_take_leaf_gradient)
            setattr(w, _HOME, (ref(self), (name,)))
        self.stretches: list[Tensor] = []  # of `masters`, which the optimizer updates
        self._alone = set(self.master)  # parameters that are in none, and are updated by themselves, or frozen
        self._found: dict[tuple[str, ...], tuple[int, int]] = {}  # (start, stop) of parameters that follow each other
        self._stretches: dict[tuple[str, ...], Tensor] = {}  # their compute copies
        self.traced: TracedGradients | None = None  # what takes gradients instead, while a block is traced
        self.release_parameters()
        if self.low is not None:
            self.masters.untyped_storage().resize_(0)

    def halves_of(self, master: Tensor) -> tuple[Tensor, Tensor]:
        """Return the copy to compute with and what else is kept of a master copy, or of several, in its shape."""
        assert self.low is not None, "masters are kept apart"
        start = int(master.storage_offset() - self.masters.storage_offset())
        parts = (self.part[start : start + master.numel()], self.low[start : start + master.numel()])
        return parts[0].view(master.shape), parts[1].view(master.shape)

    def _allocate_masters(self, elements: int) -> Tensor:
        """Return the memory of so many elements of master copies."""
        return self._allocate_flat(elements, self._high)

    def _allocate_rest_of_masters(self, plan: Plan, high: torch.dtype) -> Tensor | None:
        """Return the memory of low halves of master copies, or of all in host memory; None unless they are apart."""
        if not plan.stored.has_masters_apart or self.bucket.frozen:
            return None
        allocate = allocate_host_zeros if plan.stored.offloads_masters else allocate_zeros
        rest = torch.int16 if plan.stored.masters == "split" else high
        return allocate((len(self.masters),), rest, self._communicator.device)

    def _allocate_flat(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer of zeros, [elements], in this rank's device memory."""
        return torch.zeros(elements, dtype=dtype, device=self._communicator.device)

    def _block_view(self, flat: Tensor, name: str) -> Tensor:
        """Return the view of a parameter's block in `flat`, a buffer laid out as the whole bucket; empty if absent."""
        if not self.here:
            return flat.new_empty(0)
        start, stop = self.bucket.parameter_ranges[name]
        return flat[start:stop].view(self._shapes[name])

    def _master_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return parameter name -> view of its master copy in `flat`, a flat buffer laid out as this bucket's master
        copies: the parameter's block or, under ZeRO, the stretch of its flattened block that lies in this rank's
        shard."""
        if not self.here:
            return {name: flat.new_empty(0) for name in self._shapes}
        if not self.bucket.sharded:
            pieces = flat.split([*self.bucket.sizes, len(flat) - sum(self.bucket.sizes)])
            return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=False)}
        first, out = self._index * len(flat), {}
        for name, (start, _) in self.bucket.parameter_ranges.items():
            a, b = (start + at for at in self.bucket.range_in_shard(name, self._index))
            out[name] = flat[a - first : b - first] if a < b else flat[:0]
        return out

    # parameters

    @torch.no_grad()
    def fill_parameter(self, name: str, block: Tensor) -> None:
        """Set a parameter's master copy and compute copy from the tensor `block`, this rank's block of its initial
        values. Without ZeRO, `block` is the master copy itself, unless masters are kept apart."""
        if self.low is not None:
            if not self.bucket.frees_weights:
                split_masters(block, self.compute[name], torch.empty_like(block, dtype=self.low.dtype))
            split_masters(self.cut_own_master_part(name, block), *self.halves_of(self.master[name]))
            return
        if self.bucket.sharded:
            start, stop = self.bucket.range_in_shard(name, self._index)
            self.master[name].copy_(block.view(-1)[start:stop])
        if self.bucket.frees_weights:
            self.part.copy_(self.masters)
        elif self.compute is not self.master:
            self.compute[name].copy_(block)

    @torch.no_grad()
    def refresh_compute_copies(self) -> None:
        """Update the compute copies from the master copies after an optimizer step; under ZeRO-1 and 2 this starts the
        all-gather of the ranks' shards, for which `gather_parameters` waits."""
        if self.part is not self.masters and self.low is None:
            self.part.copy_(self.masters)
        if self.bucket.sharded and not self.bucket.frees_weights:
            self._gathering = self._launch_gather(self._written)
            self.resident = not self._gathering

    @torch.no_grad()
    def read_host_masters(self) -> None:
        """Set the compute copies of this rank's part from whole master copies in host memory, if they lie there."""
        if self.low is not None and self.low.dtype == self._high:
            copy_by_pieces(self.part, self.low)

    def gather_fresh_copies(self) -> Mapping[str, Tensor]:
        """Return parameter name -> a new compute copy made from the master copies, to check the present copies against;
        all ranks that share the bucket call it together."""
        fresh_part = self.masters.detach().to(self._low) if self.low is None else self.part.clone()
        if self.low is not None and self.low.dtype == self._high:
            copy_by_pieces(fresh_part, self.low)
        fresh_copies = fresh_part
        if self.bucket.sharded:
            fresh_copies = self._communicator.launch("all_gather", fresh_part, self.bucket.sharded).wait()
        return {name: self._block_view(fresh_copies.view(-1), name) for name in self._shapes}

    def _launch_gather(self, out: Tensor) -> CollectiveHandle | ArrivedCollective | None:
        """Start the all-gather of this bucket's parameter shards into `out` [shards, elements of a shard]."""
        if not self.here:
            return None
        name = f"gather {self.bucket.name}"
        return self._communicator.launch("all_gather", self.part, self.bucket.sharded, into=out, name=name)

    def prefetch_parameters(self, as_they_are: bool = False) -> None:
        """Start the all-gather of this bucket's parameters, `as_they_are` or narrow, unless it is done or under way."""
        if not self.resident and not self._gathering:
            self._take_memory()
            self._gathering = self._launch_gather(self._written)

    def _take_memory(self) -> None:
        """Give the compute copies memory, which they had no longer, of undefined content."""
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.itemsize)

    def gather_parameters(self, as_they_are: bool = False) -> None:
        """Wait for the all-gather of this bucket's parameters from the ranks' shards, starting it if need be."""
        self.prefetch_parameters(as_they_are)
        if self._gathering:
            self._gathering.wait()
        self._gathering, self.resident = None, True

    def release_parameters(self) -> None:
        """Free the memory of gathered parameters (ZeRO-3); `gather_parameters` makes views readable again."""
        if self.bucket.frees_weights:
            self._whole.untyped_storage().resize_(0)
            self.resident = False

    @torch.no_grad()
    def gather_whole_blocks(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather this rank's and its peers' `parts` of parameters into whole blocks: name -> block in new memory. Each
        part is laid out as the master copy; a part that no rank gives is zeros. All ranks of the bucket call it
        together."""
        flat = self._allocate_flat(self._elements // self.bucket.shards, self._high)
        for name, part_view in self._master_views(flat).items():
            if name in parts:
                part_view.copy_(parts[name])
        if self.bucket.sharded:
            steps = self._plan.gather_steps(self.bucket)
            flat = convert(self._communicator, flat, steps, name=f"join {self.bucket.name}").wait()
        return {name: self._block_view(flat, name) for name in self._shapes}

    def cut_own_master_part(self, name: str, block: Tensor) -> Tensor:
        """Return this rank's master part of a parameter's tensor `block`: its ZeRO shard, or the whole block."""
        if not self.bucket.sharded:
            return block
        start, stop = self.bucket.range_in_shard(name, self._index)
        return block.reshape(-1)[start:stop]

    # gradients

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Take a parameter's gradient (in memory of its own), to add it to the bucket's sum together with others."""
        if self.traced is not None:
            self.traced.append(((self, (name,)), gradient))
        elif self.here:
            if name in self._taken:
                self.flush_gradients()
            self._taken[name] = gradient
            self._note_computed_gradients((name,))

    def gradient_memory(self, *names: str) -> tuple[Tensor, bool]:
        """Return the stretch of the flat gradient buffer to which a kernel adds the gradients of the parameters
        `names`, adjacent in this order, and True if the kernel must overwrite its content. The kernel calls
        `note_added_gradients` when done."""
        start, stop = self._find_stretch(names)
        if self.traced is not None:
            memory = torch.empty(stop - start, dtype=self._low, device=self._communicator.device)
            self.traced.append(((self, names), memory))
            return memory, True
        if self._direct:
            sums = self._gradient_sum_buffer() if self.sums is None else self.sums
            fresh = self._summed.isdisjoint(names)
            if not (fresh or self._summed.issuperset(names)):
                for name in set(names) - self._summed:
                    self._block_view(sums, name).zero_()
            return sums[start:stop], fresh
        if not self._held.isdisjoint(names):
            self.flush_gradients()
        if self._coming is None:
            self._coming = torch.empty(self._elements, dtype=self._low, device=self._communicator.device)
        return self._coming[start:stop], True

    def count_elements(self, name: str) -> int:
        """Return the number of elements of this rank's block of a parameter."""
        start, stop = self.bucket.parameter_ranges[name]
        return stop - start

    def note_added_gradients(self, *names: str) -> None:
        """Note that a kernel has added gradients of `names` to the memory that `gradient_memory` returned."""
        if self.traced is not None:
            return
        (self._summed if self._direct else self._held).update(names)
        self._note_computed_gradients(names)

    def _note_computed_gradients(self, names: Sequence[str]) -> None:
        """Note that the backward pass has produced the gradients of the parameters `names`; when all of the bucket's
        are there, add them to the sums and call `complete`. A parameter with several uses never counts as there: its
        gradient is complete only when the pass ends."""
        several = self._plan.multi_use_parameters
        self._came.update(names if several.isdisjoint(names) else set(names) - several)
        if len(self._came) == len(self.compute):
            self.flush_gradients()
            if self.complete:
                self.complete(self)

    def _gradient_sum_buffer(self) -> Tensor:
        """Return the flat buffer of the bucket's gradients summed over microbatches, allocated on first use."""
        if self.sums is None:
            dtype = self._low if self.bucket.zero >= 2 else self._high
            memory = None if self.bucket.zero >= 2 else self._lasting
            if memory is None:
                memory = torch.empty(self._elements, dtype=dtype, device=self._communicator.device)
            self.sums = memory
        return self.sums

    def keep_sums(self) -> None:
        """Keep the sums of gradients in the same memory from now on, in all steps: of a shard where each is reduced."""
        if self.bucket.zero < 2:
            self._lasting = self._gradient_sum_buffer()
        elif self._lasting is None:
            shard = self._elements // self.bucket.shards
            self._lasting = torch.empty(shard, dtype=self._high, device=self._communicator.device)

    @property
    def summed(self) -> frozenset[str]:
        """Return the names of the parameters whose gradients are in the sums over microbatches."""
        return frozenset(self._summed if self.reduced is None else self.compute)

    def note_replayed_gradients(self, names: Collection[str]) -> None:
        """Note that a recorded backward pass has run, after which gradients of `names` are in the sums."""
        if self.bucket.zero < 2:
            self._gradient_sum_buffer()
            self._summed.update(names)
        elif names:
            self.keep_sums()
            self.reduced = self._lasting

    def drop_sums(self) -> None:
        """Drop the gradients of a step whose passes have failed, and reductions that they have begun."""
        self.sums = self._coming = self._reducing = None
        for names in (self._summed, self._held, self._came, self._taken):
            names.clear()
        if self.bucket.zero >= 2:
            self.note_replayed_gradients(self.compute)

    def _find_stretch(self, names: tuple[str, ...]) -> tuple[int, int]:
        """Return (start, stop) in the bucket's flat buffer of the adjacent parameters `names`, in this order."""
        if names not in self._found:
            stretch = self.bucket.range_of_parameters(names)
            assert stretch, "parameters that follow each other"
            self._found[names] = stretch
        return self._found[names]

    def flat_compute_copies(self, *names: str) -> Tensor:
        """Return the flat compute copies of the adjacent parameters `names`, a view of this bucket's buffer."""
        if names not in self._stretches:
            start, stop = self._find_stretch(names)
            self._stretches[names] = self._whole[start:stop]
            setattr(self._stretches[names], _HOME, (ref(self), names))
        return self._stretches[names]

    @torch.no_grad()
    def flush_gradients(self) -> None:
        """Add the gradients that wait (taken by `add_gradient`, or of the backward pass under way) to the bucket's
        `sums` over microbatches."""
        if self._taken:
            taken, self._taken = self._taken, {}
            add_gradients_together([self.gradient_memory(name) for name in taken], list(taken.values()))
            (self._summed if self._direct else self._held).update(taken)
        if self._coming is None:
            return
        sums, every = self._gradient_sum_buffer(), len(self.compute)
        together = len(self._held) == every and len(self._summed) in (0, every)
        stretches = [(0, sum(self.bucket.sizes))] if together else [self.bucket.parameter_ranges[n] for n in self._held]
        known = [bool(self._summed)] if together else [name in self._summed for name in self._held]
        for (start, stop), summed in zip(stretches, known, strict=True):
            sum_part, pass_part = sums[start:stop], self._coming[start:stop]
            sum_part.add_(pass_part) if summed else sum_part.copy_(pass_part)
        self._summed |= self._held
        self._held.clear()
        self._coming = None

    def gradient_sums(self) -> dict[str, Tensor]:
        """Return parameter name -> gradient summed over microbatches, for the bucket's parameters that have one."""
        self.flush_gradients()
        return {} if self.sums is None else {name: self._block_view(self.sums, name) for name in self._summed}

    def end_backward_pass(self) -> None:
        """Note that a microbatch's backward pass has ended: the bucket's next gradients are the next one's."""
        self.flush_gradients()
        self._came = set(self._first)
        self.launched = False

    def end_input_gradient_pass(self) -> None:
        """Note that an input-gradient pass has ended, whose deferred weight gradients come in a later action."""
        self.flush_gradients()
        self._first = frozenset(self._came)

    @torch.no_grad()
    def start_reduction(self) -> None:
        """Start reducing the bucket's flat gradients by collectives: in each backward pass over the ranks that shard
        the bucket (ZeRO-2 and 3), else once over all ranks that hold its parameters."""
        self.finish_pass_reduction()
        self.flush_gradients()
        sums = self._gradient_sum_buffer()
        for name in self.compute.keys() - self._summed:
            self._block_view(sums, name).zero_()
        for start, stop in self.bucket.empty_ranges:
            sums[start:stop].zero_()
        each, last = self._plan.reduction_steps(self.bucket)
        rows = sums.view(self.bucket.shards, -1)
        self.launched = True
        self._reducing = self._launch_reduction(rows, each or last)
        if each:
            self.sums = None
            self._summed.clear()

    def _launch_reduction(self, rows: Tensor, steps: Sequence[RelayoutStep]) -> PendingConversion:
        """Start reducing the gradients `rows` [shards, elements of a shard], in place, by the plan's `steps`."""
        return convert(self._communicator, rows, steps, owned=True, name=f"reduce {self.bucket.name}")

    @torch.no_grad()
    def finish_pass_reduction(self) -> None:
        """Wait for the reduction of one backward pass's gradients; add this rank's shard to the sum over passes."""
        if self._reducing is not None:
            shard, self._reducing = self._reducing.wait().view(-1), None
            if self.reduced is not None:
                self.reduced.add_(shard)
            else:
                self.reduced = shard.to(self._high) if self._lasting is None else self._lasting.copy_(shard)

    @torch.no_grad()
    def start_final_reduction(self) -> None:
        """Start the reductions of this bucket's gradients that are left to do at the end of a training step."""
        each, last = self._plan.reduction_steps(self.bucket)
        if not each:
            self._reducing.advance_collective() if self._reducing else self.start_reduction()
            return
        self.finish_pass_reduction()
        assert self.reduced is not None
        self._reducing = self._launch_reduction(self.reduced.view(1, -1), last)

    @torch.no_grad()
    def finish_reduction(self) -> Tensor:
        """Wait for the last reduction of the bucket's gradients in this step; return this rank's reduced gradients as
        one flat tensor laid out as `masters`, and reset the sums for the next step."""
        assert self._reducing is not None
        flat = self._reducing.wait().view(-1)
        self._reducing, self.reduced, self.sums = None, None, None
        self._summed.clear()
        self._first = frozenset()
        self.end_backward_pass()
        return flat

    def assign_gradients(self, flat: Tensor) -> None:
        """Set the `grad` of what the optimizer updates to views of the flat tensor of reduced gradients `flat`."""
        for name, gradient in self._master_views(flat).items() if self._alone else ():
            if name in self._alone:
                self.master[name].grad = gradient
        for stretch in self.stretches:
            first = stretch.storage_offset() - self.masters.storage_offset()
            stretch.grad = flat[first : first + len(stretch)]

    def join_adjacent_masters(self, names: Sequence[str]) -> list[tuple[Tensor, list[str]]]:
        """Join the master copies of parameters `names` that lie one after another in memory: return flat leaves for the
        optimizer to update in their place, each with the names of its parameters. Later gradients are the leaves'."""
        joined: list[tuple[int, int, list[str]]] = []
        begin = self.masters.storage_offset()
        ordered = sorted((int(w.storage_offset() - begin), n) for n in names if (w := self.master[n]).numel())
        for start, name in ordered:
            end = start + self.master[name].numel()
            if joined and joined[-1][1] == start:
                first, _, members = joined.pop()
                joined.append((first, end, [*members, name]))
            else:
                joined.append((start, end, [name]))
        if self.low is not None:  # no view is made of what has no memory
            self.masters.untyped_storage().resize_(len(self.masters) * self.masters.itemsize)
        leaves = [(self.masters[i:j].detach().requires_grad_(), members) for i, j, members in joined]
        if self.low is not None:
            self.masters.untyped_storage().resize_(0)
        self.stretches += [leaf for leaf, _ in leaves]
        self._alone.difference_update(*(members for _, members in leaves))
        return leaves


def split_halves(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Write fp32 numbers as `high`, the nearest bf16 numbers, halves away from zero, and `low`, the int16 differences
    of the bits: exact for every number, infinity and NaN."""
    bits = x.contiguous().view(torch.int32)
    high_bits = (bits + (1 << 15)).bitwise_right_shift_(16)
    high.view(torch.int16).copy_(high_bits)
    low.copy_(high_bits.bitwise_left_shift_(16).neg_().add_(bits))


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 numbers, in new memory, of which `split_halves` has made two halves."""
    return high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low).view(torch.float32)


def split_masters(x: Tensor, high: Tensor, low: Tensor) -> None:
    """Write master numbers as the copies to compute with, `high`, and `low`: int16 halves, or all of them."""
    if low.dtype == torch.int16:
        return split_halves(x, high, low)
    high.copy_(x)
    if low.data_ptr() != x.data_ptr():
        low.copy_(x)
    return None


def join_masters(high: Tensor, low: Tensor) -> Tensor:
    """Return the master numbers that `split_masters` has written: in new memory, or `low`, which has all of them."""
    return join_halves(high, low.to(high.device)) if low.dtype == torch.int16 else low


def copy_by_pieces(copies: Tensor, masters: Tensor) -> None:
    """Copy flat master numbers in host memory to compute copies, in pieces that are rounded on the device."""
    for to, x in zip(copies.split(ON_THE_WAY), masters.split(ON_THE_WAY), strict=True):
        to.copy_(x.to(to.device))


def add_gradients_together(sums: Sequence[tuple[Tensor, bool]], gradients: Sequence[Tensor]) -> None:
    """Add `gradients` to their places in flat gradient buffers, in few kernel launches. `sums`: per gradient, the place
    and True if it holds no sum yet, so that the gradient is copied there."""
    # One launch serves tensors of one type, and copies of one type into another. So few elements of another type than
    # their sums are copied first; many, of which copies would take memory and time, are added one by one.
    groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    for (place, fresh), gradient in zip(sums, gradients, strict=True):
        flat = gradient.reshape(-1)
        if fresh or flat.numel() < MANY or gradient.dtype == place.dtype:
            groups.setdefault((gradient.dtype, fresh), []).append((place, flat))
        else:
            place.add_(flat)
    for (dtype, fresh), pairs in groups.items():
        memories, flats = map(list, zip(*pairs, strict=True))
        if not fresh and dtype != memories[0].dtype:
            narrow, flats = flats, [torch.empty_like(place) for place in memories]
            torch._foreach_copy_(flats, narrow)
        (torch._foreach_copy_ if fresh else torch._foreach_add_)(memories, flats)


def find_bucket_of_leaf(leaf: Tensor) -> tuple[FlatBucket, str] | None:
    """Return the flat bucket that holds a parameter's compute copy, and the parameter's name; None if none does."""
    return None if (home := getattr(leaf, _HOME, None)) is None else (home[0](), home[1][0])


def find_bucket_of_copies(copies: Tensor) -> tuple[FlatBucket, tuple[str, ...]] | None:
    """Return the flat bucket that holds `copies`, the compute copies of one parameter or of several adjacent ones, and
    the parameters' names; None for any other tensor."""
    if (home := getattr(copies, _HOME, None)) is None:
        return None
    bucket, names = home
    return bucket(), names


def _take_leaf_gradient(leaf: Tensor) -> None:
    """Move the gradient that autograd has put in `leaf.grad`, of a parameter's compute copy, to its flat bucket."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None and (home := find_bucket_of_leaf(leaf)):
        bucket, name = home
        bucket.add_gradient(name, gradient)


ROW = 256  # elements that are summed in fp32: enough to read fast, few enough to add up accurately
LEAST = 2.0**-86  # mean square from which on squares that fp32 cannot hold (below 2**-126) do not matter


@torch.no_grad()
def local_squared_norm(
    communicator: Communicator, counted_slices: Mapping[str, Sequence[slice]], gradients: Mapping[str, Tensor]
) -> Tensor:
    """Return this rank's part of the squared 2-norm of the whole model's gradient, an fp64 scalar; the sum over all
    ranks is the total. `gradients`: bucket -> the reduced ones, flat; `counted_slices`: bucket -> what this rank counts
    of them, both by the name of the bucket's first parameter.

    Exact to the last digits of fp64, but for long stretches in fp32 on a CPU: to 1e-6, and where many elements make up
    the norm to 1e-8 (torch's own, in fp32 throughout, is off by 4e-4 at 7 million elements). Gradients in fp32 differ
    by more between two plans, and of one plan all ranks get one and the same number.
    """
    counted_stretches = [flat[stretch] for name, flat in gradients.items() for stretch in counted_slices[name]]
    if not counted_stretches:
        return torch.zeros((), dtype=torch.float64, device=communicator.device)
    return sum_squares(counted_stretches)


def sum_squares(stretches: Sequence[Tensor]) -> Tensor:
    """Sum the squares of flat tensors of gradients, of any size and at least one, as an fp64 scalar."""
    if stretches[0].device.type == "cpu":
        return torch.stack([_sum_squares_on_cpu(x) for x in stretches]).sum()
    return _sum_squares_at_once(stretches)


def _sum_squares_at_once(stretches: Sequence[Tensor]) -> Tensor:
    """Sum the squares of all stretches in fp64 by kernels of a GPU that read each element once."""
    norms = torch.stack(torch._foreach_norm(list(stretches), 2, dtype=torch.float64))
    return norms.dot(norms)


def _sum_squares_on_cpu(x: Tensor) -> Tensor:
    """Sum the squares of a flat tensor on a CPU, in fp64 but for long ones in fp32."""
    if x.dtype == torch.float32 and len(x) > SQUARED_AT_ONCE:
        total = _sum_squares_by_rows(x)
        if len(x) * LEAST <= total < inf:
            return total
    wide = torch.empty(min(len(x), SQUARED_AT_ONCE), dtype=torch.float64, device=x.device)
    sums = [torch.dot(y, y) for y in (wide[: len(piece)].copy_(piece) for piece in x.split(SQUARED_AT_ONCE))]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _sum_squares_by_rows(x: Tensor) -> Tensor:
    """Sum the squares of fp32 gradients x [elements] in fp32 by rows of ROW elements, and the rows' sums in fp64."""
    rows = torch.linalg.vector_norm(x[: len(x) // ROW * ROW].view(-1, ROW), dim=1).double()
    remainder = x[len(x) // ROW * ROW :].double()
    return rows.dot(rows) + remainder.dot(remainder)


class AdjacentParameters(NamedTuple):
    """Parameters whose compute copies lie one after another in a bucket."""

    bucket: FlatBucket
    names: tuple[str, ...]

    @classmethod
    def find_if_adjacent(cls, leaves: Sequence[Tensor | None]) -> AdjacentParameters | None:
        """Return parameters as neighbours in one flat bucket; None if fewer than two, not adjacent, or absent here."""
        homes = [find_bucket_of_leaf(w) for w in leaves if w is not None]
        flats, names = [f[0] for f in homes if f], tuple(f[1] for f in homes if f)
        if len(flats) < max(2, len(leaves)) or any(flat is not flats[0] for flat in flats) or not flats[0].here:
            return None
        return cls(flats[0], names) if flats[0].bucket.range_of_parameters(names) else None

    @property
    def flat_compute_copies(self) -> Tensor:
        """Return the flat compute copies of these adjacent parameters, one stretch of the bucket's buffer."""
        return self.bucket.flat_compute_copies(*self.names)

    def add_gradients(self, compute: Callable[[Tensor, bool], Tensor]) -> None:
        """Add gradients of adjacent parameters to their flat bucket: `compute(memory, fresh)` does so in one kernel."""
        compute(*self.bucket.gradient_memory(*self.names))
        self.bucket.note_added_gradients(*self.names)

    def add_small_gradients(self, compute_total: Callable[..., Tensor]) -> None:
        """Add small gradients of adjacent parameters (biases), which `total(dtype=...)` computes as one flat tensor."""
        ranges = [self.bucket.bucket.parameter_ranges[name] for name in self.names]
        parts = compute_total(dtype=self.bucket.adds_in).split([stop - start for start, stop in ranges])
        for name, part in zip(self.names, parts, strict=True):
            self.bucket.add_gradient(name, part)
