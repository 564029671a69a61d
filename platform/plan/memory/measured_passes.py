"""Bytes that the passes of one chunk take on a worker, measured by running the model on its memory meter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace

from platform.plan.core.chunks import Chunk, RecordableModel
from platform.plan.memory.meter import Meter
from platform.plan.memory.sums import MeteredSums
from platform.plan.memory.worker_bytes import run_chunk
from platform.plan.operations.storages import GradientKey, MeteredStorage, Value


@dataclass(frozen=True)
class Passes:
    """Predicted bytes that the passes of one chunk over a microbatch take and keep on a worker.

    `forward`, `backward`, `weights`: peak of the pass (forward, backward or input gradient, weight gradient) above the
    memory before it; `kept`: bytes kept from forward to backward; `given`: bytes of outputs not among `kept`;
    `pending`: bytes kept from the input gradient to the weight gradient where they are split; `returned`: bytes of the
    inputs' gradients not among `pending`; `standing`: bytes that the first pass makes and all share; `left`: bytes of
    an activation -> how many such are in host memory from forward to backward. By number of the
    bucket, `begun` and `gradients`: sums of gradients that are there after the input gradient where they are split, and
    in the end, and were not before; `parts`: shards of sums reduced in the end, 0 if one was there before.
    """

    forward: int
    kept: int
    given: int
    backward: int
    pending: int
    returned: int
    weights: int
    begun: Mapping[int, int]
    gradients: Mapping[int, int]
    parts: Mapping[int, int]
    standing: int
    left: Counter[int]

    def renumbered(self, numbers: Mapping[int, int]) -> Passes:
        """Return the same bytes with the numbers of buckets replaced."""
        begun, gradients, parts = (
            {numbers[n]: size for n, size in sizes.items()} for sizes in (self.begun, self.gradients, self.parts)
        )
        return replace(self, begun=begun, gradients=gradients, parts=parts)


Measured = MutableMapping[tuple, Passes]  # chunk's likeness and other circumstances -> its passes, with its own buckets


def measure(
    meter: Meter,
    model: RecordableModel,
    chunk: Chunk,
    *,
    splits: bool,
    summed: Collection[int] = (),
    reduced: Collection[int] = (),
) -> Passes:
    """Measure the bytes that the passes of one chunk take on the worker of a new `meter`, by running the model on it.
    `splits`: weight gradients are separate passes, run later; `summed`, `reduced`: numbers of the buckets whose
    gradients are being summed already, and of which there are shards of reduced sums."""
    ledger = meter.ledger
    meter.deferred = [] if splits else None
    meter.leaves = sums = MeteredSums(meter, chunk, summed, reduced, early=not splits)
    flow = {name: meter.block(spec) for name, spec in chunk.receives}
    before = ledger.peak = ledger.now
    out = _forward(meter, model, chunk, flow)
    standing = sum(mask.nbytes for mask in meter.standing.values())
    most, full, results = ledger.peak - before, ledger.now, [(v.key, v.elements) for v in out.values()]
    del out
    kept, given, left = ledger.now - before - standing, full - ledger.now, meter.left
    coming: dict[GradientKey, MeteredStorage] = {key: meter.new(n) for key, n in results}
    start = ledger.peak = ledger.now
    inputs, received = {v.key for v in flow.values()}, sum(v.storage.nbytes for v in flow.values() if v.storage)
    meter.back(chunk)
    meter.tape.unwind(coming, sums)
    meter.end()
    meter.of_pass.clear()
    found = {key: g for key, g in coming.items() if key in inputs}
    coming.clear()
    if splits:
        sums.flush()
    else:
        sums.passed()
    backward, begun = ledger.peak - start, sums.begun() if splits else {}
    flow.clear()
    whole = ledger.now
    found.clear()
    pending = ledger.now - (before - received) - standing - sum(s.nbytes for s in sums.held())
    returned = whole - ledger.now
    start = ledger.peak = ledger.now
    while meter.deferred:
        meter.deferred.pop(0)()
    weights = ledger.peak - start
    if splits:
        sums.passed()
    more = {n: size for n, size in sums.begun().items() if n not in begun}
    return Passes(
        most - standing, kept, given, backward, pending, returned, weights, begun, more, sums.parts(), standing, left
    )


def _forward(meter: Meter, model: RecordableModel, chunk: Chunk, flow: Mapping[str, Value]) -> dict[str, Value]:
    """Run a chunk's forward pass on the memory `meter`, with the data that it reads, from the activations `flow` by
    name; return its outputs by name."""
    tokens = meter.data(chunk)
    meter.begin(chunk)
    out = run_chunk(meter, model, chunk, flow)
    meter.turn()
    del tokens
    meter.of_pass.clear()
    return out
