"""Peak memory of a worker: a walk along its row of the schedule in bytes, then the gradient reduction and the update.

Passes are measured once for all chunks that are alike. The walk adds up passes in flight, buffers of sends and
receives, and gradients as they come, in the order of `platform.parallel.pipeline`, then `platform.train`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from platform.plan.core.buckets import SQUARED_AT_ONCE
from platform.plan.core.chunks import FlowSpecs, RecordableModel
from platform.plan.core.counted import counted_stretches
from platform.plan.core.plan import Plan
from platform.plan.language.layout import at_zero
from platform.plan.memory.alike import likeness
from platform.plan.memory.measured_passes import Measured, Passes, measure
from platform.plan.memory.meter import Meter
from platform.plan.memory.worker_bytes import weight_bytes
from platform.plan.schedule.table import SENDS_IN_FLIGHT, Action, Kind, with_completed


@dataclass(frozen=True)
class Footprint:
    """Predicted bytes of memory on one worker at its peak within a step. `activations`: kept by the `in_flight` forward
    passes whose backward is not done; `working`: everything else, such as what an operation, its collectives, sends and
    receives take; `reserved`: bytes that a GPU's own libraries take beside all tensors; `host`: bytes of host memory
    that activations are kept in (recompute_offload), on a CPU among the `activations`."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    working: int
    in_flight: int
    reserved: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Return the predicted bytes of a worker's memory at its peak: the sum of all parts."""
        tensors = self.parameters + self.optimizer + self.gradients + self.activations + self.working
        return tensors + self.reserved


def footprint(
    plan: Plan,
    model: RecordableModel,
    row: Iterable[Action],
    stage: int,
    moments: int,
    dropout: float,
    device: str = "cpu",
    scratch: int = 0,
    measured: Measured | None = None,
) -> Footprint:
    """Predict the peak memory of the worker of `stage` at index 0 of the other axes, which has a block of every tensor,
    in any step but the first (which starts without optimizer state). `row`: the stage's row of the schedule with sends
    and receives; `moments`: numbers that the optimizer keeps per parameter element; `dropout`: its rate; `device`: its
    kind (cpu, cuda); `scratch`: bytes that the optimizer takes during the update; `measured`: passes of other stages
    with the same arguments, to which this one's are added."""
    at = {**plan.mesh.coordinates(0), "stage": stage}
    walk = _Walk(plan.at(stage), model, at, dropout, device, {} if measured is None else measured)
    sizes = weight_bytes(plan, moments, at)
    gradients, activations, working, live = walk.run(list(row), scratch)
    host = sum(size * n for size, n in walk.most_left.items())
    activations += host if device == "cpu" else 0
    return Footprint(sizes["parameters"], sizes["optimizer"], gradients, activations, working, live, host=host)


class _Walk:
    """Walk along one stage's row of the schedule that adds up bytes in use and notes the peak. `kept`: bytes that
    forward passes keep; `held`: bytes by (what, chunk, microbatch that use it), buffers of sends apart."""

    def __init__(
        self,
        plan: Plan,
        model: RecordableModel,
        at: Mapping[str, int],
        dropout: float,
        device: str,
        measured: Measured,
    ):
        """Begin a memory forecast of one stage's schedule row, on the worker at mesh coordinates `at`."""
        self.plan, self.model, self.at, self.dropout, self.device = plan, model, at, dropout, device
        self.kept = self.gradients = self.live = self.standing = 0
        self.most = (0, 0, 0, 0)  # at the peak: gradients, activations, working, in flight
        self.compute, self.master = plan.itemsize["compute"], plan.itemsize["master"]
        self.chunks = {chunk.number: chunk for chunk in plan.chunks}
        self.buckets = [b for b in plan.buckets if at_zero(b.only, at)]
        self.sums: dict[int, int] = {}  # number of a bucket -> bytes of its gradients, being summed
        self.parts: set[int] = set()  # numbers of the buckets with a shard of reduced sums
        self.held: dict[tuple[str, int, int], int] = {}
        self.left: Counter[int] = Counter()  # activations in host memory by their bytes, where memory is used again
        self.most_left: Counter[int] = Counter()
        self.sending: deque[int] = deque()
        self._alike, self._measured = measured, dict[tuple, Passes]()
        self._now: dict[int, Passes] = {}  # by chunk, as long as the same sums are there
        self._likeness: dict[int, tuple] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        self._blocks: dict[tuple, list[tuple[int, int]]] = {}

    def run(self, row: Sequence[Action], scratch: int) -> tuple[int, int, int, int]:
        """Account for the memory of all actions of a stage's schedule, for gradient reductions as they become possible,
        and for the update, which takes `scratch` bytes; return (gradients, activations, working, forward passes in
        flight) at the peak, the first three in bytes."""
        self.splits = any(a.kind is Kind.WEIGHT for a in row)
        incomplete = {completed for _, completed in with_completed(row) if completed is not None}
        for action, completed in with_completed(row):
            _COUNTS[action.kind](self, action)
            if completed is not None:
                incomplete.remove(completed)
                self._reduce(completed, incomplete)
        self._finish(scratch)
        return self.most

    def reach(self, extra: int = 0, kept: int = 0) -> None:
        """Note a new peak of the predicted bytes if the bytes in use plus `extra` exceed it; `kept`: the bytes of
        `extra` that are activations of one more forward pass."""
        working = sum(self.held.values()) + sum(self.sending) + self.standing + extra - kept
        if self.gradients + self.kept + kept + working > sum(self.most[:3]):
            self.most = self.gradients, self.kept + kept, working, self.live + bool(kept)

    def passes(self, chunk: int) -> Passes:
        """Return the bytes that passes of a chunk take, given the buckets whose gradients are being summed."""
        if chunk not in self._now:
            here = self._buckets_of(chunk)
            summed, reduced = (frozenset(here.keys() & numbers) for numbers in (self.sums.keys(), self.parts))
            if (key := (chunk, summed, reduced)) not in self._measured:
                found = self._of_alike(chunk, here, summed, reduced)
                self._measured[key], self.standing = found, max(self.standing, found.standing)
            self._now[chunk] = self._measured[key]
        return self._now[chunk]

    def _buckets_of(self, chunk: int) -> dict[int, int]:
        """Map the numbers of the buckets with parameters of a chunk to their numbers among these."""
        if chunk not in self._numbers:
            names, buckets = self.chunks[chunk].parameters, enumerate(self.plan.buckets)
            self._numbers[chunk] = {n: i for i, n in enumerate(n for n, b in buckets if not names.isdisjoint(b.ranges))}
        return self._numbers[chunk]

    def _of_alike(
        self, chunk: int, here: Mapping[int, int], summed: Collection[int], reduced: Collection[int]
    ) -> Passes:
        """Return the bytes that passes of a chunk take, measured on the first chunk that is alike."""
        one = self.chunks[chunk]
        if chunk not in self._likeness:
            self._likeness[chunk] = likeness(self.plan, one, [self.plan.buckets[n] for n in here])
        begun = (frozenset(here[n] for n in numbers) for numbers in (summed, reduced))
        if (key := (self._likeness[chunk], self.splits, *begun)) not in self._alike:
            meter = Meter(self.plan, self.dropout, self.at, self.device)
            found = measure(meter, self.model, one, splits=self.splits, summed=summed, reduced=reduced)
            self._alike[key] = found.renumbered(here)
        return self._alike[key].renumbered({i: n for n, i in here.items()})

    # passes

    def forward(self, a: Action) -> None:
        """Account for the memory of a chunk's forward pass: its input, its peak, and what it keeps for the backward
        pass."""
        p, chunk = self.passes(a.chunk), self.chunks[a.chunk]
        self._arrive("inputs", a, chunk.receives, self.held.pop(("flow", a.chunk, a.microbatch), None))
        self.reach(p.forward, p.kept)
        self.live += 1
        self.kept += p.kept
        self.left += p.left
        self.most_left |= self.left
        if chunk.sends:
            self.held["flow", a.chunk + 1, a.microbatch] = p.given
        self.reach()

    def backward(self, a: Action) -> None:
        """Account for the memory of a chunk's backward or input-gradient pass: its peak, what it frees, and the
        gradient that it hands to the chunk before."""
        p, chunk = self.passes(a.chunk), self.chunks[a.chunk]
        self._arrive("outputs", a, chunk.sends, self.held.pop(("gradients", a.chunk, a.microbatch), None))
        self.reach(p.backward)
        del self.held["outputs", a.chunk, a.microbatch], self.held["inputs", a.chunk, a.microbatch]
        self.kept += p.pending - p.kept
        self.left -= p.left
        if chunk.receives:
            self.held["gradients", a.chunk - 1, a.microbatch] = p.returned
        if a.kind is Kind.BACKWARD:
            self.live -= 1
            self._accumulate(p.gradients, p.parts)
        else:
            self._accumulate(p.begun, {})

    def weights(self, a: Action) -> None:
        """Account for the memory of a chunk's weight-gradient pass: its peak, what it frees, its sums of gradients."""
        p = self.passes(a.chunk)
        self.reach(p.weights)
        self.kept -= p.pending
        self.live -= 1
        self._accumulate(p.gradients, p.parts)

    def _accumulate(self, begun: Mapping[int, int], parts: Mapping[int, int]) -> None:
        """Add to the memory forecast a pass's new gradient sums and reduced shards: bytes by number of the bucket."""
        if not begun and not parts:
            return
        self._now.clear()
        self.sums |= begun
        self.gradients += sum(begun.values()) + sum(parts.values()) - sum(self.sums.pop(n, 0) for n in parts)
        self.parts |= parts.keys()

    # sends and receives

    def blocks(self, flow: FlowSpecs) -> list[tuple[int, int]]:
        """Return (bytes of the block, bytes of the part that this rank sends) for each activation of a flow between
        chunks that is present on the worker; the part is 0 where the whole block is sent (no scatter/gather)."""
        key = tuple(flow)
        if key not in self._blocks:
            found = []
            for spec in (spec for _, spec in flow if self.plan.present(spec, self.at)):
                part = self.plan.sent_elements(spec) if self.plan.shared_axes(spec) else 0
                found.append((prod(self.plan.local_shape(spec)) * self.compute, part * self.compute))
            self._blocks[key] = found
        return self._blocks[key]

    def receive(self, a: Action) -> None:
        """Account for the memory of a receive: the parts that arrive, or whole blocks without scatter/gather."""
        forward = a.kind is Kind.RECV_F
        flow = self.chunks[a.chunk].receives if forward else self.chunks[a.chunk].sends
        arriving = "arriving F" if forward else "arriving B", a.chunk, a.microbatch
        self.held[arriving] = sum(part or whole for whole, part in self.blocks(flow))
        self.reach()

    def _arrive(self, what: str, a: Action, flow: FlowSpecs, local: int | None) -> None:
        """Account for the memory of a pass's input, `what` being "inputs" (of a forward pass) or "outputs" (their
        gradients, of a backward pass): `local` bytes from a chunk on this stage, or (None) a `flow` that was received
        and is gathered from its parts."""
        self.held.pop(("arriving F" if what == "inputs" else "arriving B", a.chunk, a.microbatch), None)
        received = self.blocks(flow) if local is None else []
        self.held[what, a.chunk, a.microbatch] = local or sum(whole for whole, _ in received)
        self.reach(sum(part for _, part in received))

    def send(self, a: Action) -> None:
        """Account for the memory of a send: the result of the pass becomes buffers of at most SENDS_IN_FLIGHT sends,
        the oldest of which are freed."""
        forward = a.kind is Kind.SEND_F
        key = ("flow", a.chunk + 1, a.microbatch) if forward else ("gradients", a.chunk - 1, a.microbatch)
        for whole, part in self.blocks(self.chunks[a.chunk].sends if forward else self.chunks[a.chunk].receives):
            if part:
                self.reach(whole + part)  # the padded block, and the part that is sent
            else:
                part = min(whole, self.held[key])
                self.held[key] -= part
            self.sending.append(part)
        del self.held[key]
        while len(self.sending) > SENDS_IN_FLIGHT:
            self.sending.popleft()

    # once a step

    def _reduce(self, completed: int, incomplete: Collection[int]) -> None:
        """Account for the shards that ZeRO-1 leaves of buckets whose gradients chunk `completed` completes, as no chunk
        in `incomplete` uses them."""
        others = {p for chunk in incomplete for p in self.chunks[chunk].parameters}
        done = self.chunks[completed].parameters - others
        for n, b in enumerate(self.buckets):
            if b.zero == 1 and not done.isdisjoint(b.ranges) and others.isdisjoint(b.ranges):
                self.held["shard", n, 0] = b.shard_elements * self.master
        self.reach()

    def _finish(self, scratch: int) -> None:
        """Account for the memory at the end of a step: sums of tied gradients over stages, and reduced gradients while
        their norm is taken and during the update; updated shards are gathered in place."""
        self.sending.clear()
        each = {p.name: b.shard_elements * self.master for b in self.buckets for p in b.parameters}
        self.reach(max((each[name] for name in self.plan.tied if name in each), default=0))
        self.held.clear()
        self.gradients = sum(b.shard_elements for b in self.buckets) * self.master
        self.reach(max(self._squares(), scratch))

    def _squares(self) -> int:
        """Return the predicted bytes for summing the squares of a bucket's gradients (`sharding.gradients.squares`), of
        the worker of the stage that needs most: next to none on a GPU, and on a CPU for many fp32 gradients, which are
        summed row by row."""
        if self.device != "cpu":
            return 0
        most, by_rows = SQUARED_AT_ONCE, self.master == 4
        corners = product(*({0, n - 1} for axis, n in self.plan.mesh.shape if axis != "stage"))
        axes = [axis for axis, _ in self.plan.mesh.shape if axis != "stage"]
        places = [{**self.at, **dict(zip(axes, found, strict=True))} for found in corners]
        stretches = (s for at in places for found in counted_stretches(self.plan, at).values() for s in found)
        parts = {s.stop - s.start for s in stretches}
        return max((8 * min(n, most) for n in parts if n <= most or not by_rows), default=0)


_COUNTS: Mapping[Kind, Any] = {
    Kind.FORWARD: _Walk.forward,
    Kind.BACKWARD: _Walk.backward,
    Kind.INPUT: _Walk.backward,
    Kind.WEIGHT: _Walk.weights,
    Kind.SEND_F: _Walk.send,
    Kind.SEND_B: _Walk.send,
    Kind.RECV_F: _Walk.receive,
    Kind.RECV_B: _Walk.receive,
}
