"""Parameters on one rank: master copies, compute copies and gradients of its blocks or shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.parallel_ops import initialise
from platform.parallel.sharding.convert import absent
from platform.parallel.sharding.flat import FlatBucket
from platform.parallel.sharding.residency import Residency, ResidentSpan
from platform.plan.core.ahead import read_in
from platform.plan.core.buckets import common_name
from platform.plan.core.plan import Plan

# precision -> dtype of compute copies, dtype of master copies and summed gradients
DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
}


_PIECE = 1 << 20  # elements that are swapped at once


class Weights:
    """Weights of one rank: its copies of the model's parameters, and their gradients. `compute`: name -> the leaf that
    the forward pass reads, this rank's block. `master`: name -> the copy that the optimizer updates: the block, or what
    of it lies in this rank's shard; the same tensor as in `compute` if dtype and shape agree. A parameter of which this
    rank has nothing is an empty tensor. `residency`, under ZeRO: says when compute copies are there.

    `overlap`: gradients are reduced as soon as the last backward pass has them, and shards gathered a span ahead.
    `seed`: None leaves initial values out, where a state is going to be restored.
    """

    def __init__(self, plan: Plan, communicator: Communicator, seed: int | None, overlap: bool = True):
        """Allocate this rank's weights and gradients under a plan, with the initial values that `seed` gives; None
        leaves these out. `overlap`: reduce gradients during backward passes, and gather shards ahead."""
        self._plan, self._overlap = plan, overlap
        low, high = DTYPES[plan.precision]
        self.buckets = [FlatBucket(plan, communicator, bucket, low, high) for bucket in plan.buckets]
        for flat in self.buckets:
            flat.complete = self._complete
            for p in flat.bucket.parameters if flat.here and seed is not None else ():
                there = flat.master[p.name]
                block = torch.empty(plan.local_shape(p), dtype=high, device=there.device) if plan.sharded else there
                initialise(plan, communicator, p, seed, block)
                flat.fill(p.name, block)
        by_name = {p.name: flat for flat in self.buckets for p in flat.bucket.parameters}
        self.compute = {p.name: by_name[p.name].compute[p.name] for p in plan.parameters}
        self.master = {p.name: by_name[p.name].master[p.name] for p in plan.parameters}
        self.averages: dict[str, Tensor] = {}  # name -> average of a master copy over the updates, if they are kept
        self.residency = self._residency(communicator) if plan.sharded else None
        self._reducing: deque[FlatBucket] = deque()
        self._early = overlap
        self._left: set[int] = set()  # chunks whose last backward pass of the step has not begun
        self._users = [{c.number for c in plan.chunks if c.parameters & flat.compute.keys()} for flat in self.buckets]

    def _residency(self, communicator: Communicator) -> Residency:
        """Construct the Residency of sharded parameters in the spans of this stage's model chunks."""
        frees = bool(self._plan.storage)
        spans = {
            c.number: [
                ResidentSpan(common_name(names) if frees else "", [f for f in self.buckets if read & f.compute.keys()])
                for names, read in zip(c.spans, map(set, c.spans) if frees else read_in(c), strict=True)
            ]
            for c in self._plan.chunks
        }
        return Residency(communicator, spans, frees=frees, turns=self._plan.turns, ahead=self._overlap)

    @property
    def owned(self) -> dict[str, Tensor]:
        """Return name -> master copy of the parameters of which this rank has a part."""
        return {n: w for n, w in self.master.items() if not absent(w)}

    @property
    def trained(self) -> dict[str, Tensor]:
        """Return name -> master copy of the parameters of which this rank has a part, without frozen ones."""
        return {n: w for n, w in self.owned.items() if n not in self._plan.frozen}

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Return name -> this rank's gradient, summed over microbatches and not yet over ranks."""
        return {n: g for flat in self.buckets for n, g in flat.gradients().items()}

    def begin(self, early: bool = True) -> None:
        """Begin a training step's backward passes, which add up gradients. `early`: True if completed gradients can be
        reduced before the end of a backward pass: not where weight gradients are passes of their own."""
        self._early = early and self._overlap
        self._left = {chunk.number for chunk in self._plan.chunks}

    def last(self, chunk: int) -> None:
        """Note that a model chunk's last backward pass of a step begins: gradients that it completes can be reduced."""
        self._left.discard(chunk)

    def _complete(self, flat: FlatBucket) -> None:
        """Start reducing the gradients of a bucket, all of which a backward pass has given, if that is due."""
        if self._early and (self._plan.zero >= 2 or not self._left & self._users[self.buckets.index(flat)]):
            self._reduce(flat)

    def _reduce(self, flat: FlatBucket) -> None:
        """Start reducing a bucket's gradients. Where each pass does so (ZeRO-2 and 3), at most two reductions are under
        way, which frees the memory of the others."""
        flat.reduce()
        if self._plan.zero >= 2:
            self._reducing.append(flat)
            while len(self._reducing) > 2:
                self._reducing.popleft().settle()

    def passed(self, chunk: int, done: bool, whole: bool) -> None:
        """Note the end of a chunk's backward pass, whose gradients are added up. `done`: it was the chunk's last in
        this step; `whole`: all gradients of the pass have come, its weight gradients included."""
        if self.residency:
            self.residency.end()
        if done:
            self._left.discard(chunk)
        if not whole:
            for flat, users in zip(self.buckets, self._users, strict=True):
                if flat.here and chunk in users:
                    flat.halved()
            return
        each = self._plan.zero >= 2
        for flat, users in zip(self.buckets, self._users, strict=True):
            if flat.here and chunk in users:
                if not flat.launched and (each or (done and not self._left & users)):
                    self._reduce(flat)
                flat.passed()
        while self._reducing:
            self._reducing.popleft().settle()

    def finish(self) -> dict[str, Tensor]:
        """Wait for the reductions of a step's gradients; return them, flat by bucket, by its first parameter's name."""
        self._reducing.clear()
        here = [flat for flat in self.buckets if flat.here]
        for flat in here:
            flat.proceed()
        return {next(iter(flat.compute)): flat.finish() for flat in here}

    def receive(self, reduced: Mapping[str, Tensor]) -> None:
        """Set the optimizer's gradients from `reduced`, the result of `finish`, by a bucket's first parameter."""
        for flat in self.buckets:
            if (found := reduced.get(next(iter(flat.compute)))) is not None:
                flat.receive(found)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return name -> this rank's gradient for the optimizer, reduced over ranks, shaped as in `master`."""
        return {n: w.grad for n, w in self.owned.items() if w.grad is not None}

    def drop_gradients(self) -> None:
        """Free the reduced gradients of the master copies."""
        for master in self.master.values():
            master.grad = None

    @torch.no_grad()
    def refresh(self, ahead: bool = False) -> None:
        """Update the compute copies from the master copies after these have changed, and free the gradients. All ranks
        call it together, as masters may be shards that are gathered. `ahead`: if gathers may overlap at all, they run
        under the next forward pass, which waits for each bucket where it reads it first; whatever else reads compute
        copies has to `settle` before."""
        self.drop_gradients()
        self.settle()
        for flat in self.buckets:
            flat.refresh()
        if not (ahead and self._overlap):
            self.settle()

    def settle(self) -> None:
        """Wait for all compute copies that are on their way since an update (ZeRO-1 and 2)."""
        for flat in () if self._plan.storage else self.buckets:
            if not flat.resident:
                flat.gather()

    @torch.no_grad()
    def begin_averages(self) -> None:
        """Keep moving averages of the master weights from now on (train.ema), which begin with their values now."""
        self.averages = {n: w.detach().clone() for n, w in self.trained.items()}

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Update the weights' moving averages, if they are kept: average = decay * average + (1 - decay) * master."""
        if self.averages:
            torch._foreach_lerp_(list(self.averages.values()), list(self.trained.values()), 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the moving averages into the weights during the block, and back after it, in every bit; on all ranks."""
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap averages and master copies in place, piece by piece, and refresh the compute copies."""
        for name, average in self.averages.items():
            for a, b in zip(average.view(-1).split(_PIECE), self.master[name].view(-1).split(_PIECE), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        self.refresh()

    @torch.no_grad()
    def fresh(self) -> dict[str, Tensor]:
        """Return name -> a new compute copy of each parameter's block, from its master; all ranks call it together."""
        return {name: w for flat in self.buckets if flat.here for name, w in flat.fresh().items()}
