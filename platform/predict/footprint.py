"""Peak memory of a worker: a walk along its row of the schedule in bytes, then the gradient reduction and the update.

Passes are measured on the memory meter (`measure_passes`), once for all chunks that are alike but for the numbers of
their layers (`chunk_likeness`). The walk adds up passes in flight, buffers of sends and receives, and gradients as they
come, in the order of `platform.runtime.pipeline`, then `platform.train`. Weights, gradients and optimizer state are
counted by their sizes (`weight_bytes`).
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from platform.plan.chunks import SQUARED_AT_ONCE, Bucket, Chunk, FlowSpecs, RecordableModel
from platform.plan.layout import is_at_index_zero
from platform.plan.model_types import Parameter
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.op import GradientKey, MeteredStorage, Value
from platform.plan.plan import Plan
from platform.plan.quantisation import SCALE_BYTES
from platform.plan.schedule import SENDS_IN_FLIGHT, Action, Kind, mark_completed_chunks
from platform.plan.step_collectives import count_factors_of_rank, grad_norm_slices, matrix_sides, resolve_auto_kernels
from platform.predict.meter import MemoryMeter, MeteredSums

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Names:
    """Names in a chunk with its layers numbered in their order there: layers.7.mlp.up is layers.#0.mlp.up in the chunk
    whose first layer is number 7."""

    def __init__(self) -> None:
        """Begin to rename what a chunk's predicted memory depends on, with no layer numbered yet."""
        self.numbers: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return a name with its numbers as they count in the chunk whose memory is predicted."""
        return _NUMBER.sub(lambda match: self.numbers.setdefault(match[0], f"#{len(self.numbers)}"), name)


def chunk_likeness(plan: Plan, chunk: Chunk, buckets: Sequence[Bucket]) -> tuple:
    """Return what decides the bytes of a chunk's passes: equal for chunks that are alike. `plan`: the stage's plan;
    `buckets`: the buckets of it with parameters of the chunk."""
    name = _Names()
    # an operation of several is not begun ahead
    times = Counter(key for stage_chunk in plan.chunks for key in stage_chunk.operations)
    return (
        tuple((_build_operation_memory_key(plan, o, name), times[key]) for key, o in chunk.operations.items()),
        chunk.functions,
        chunk.receives,
        chunk.sends,
        chunk.kept,
        tuple(tuple(map(name, names)) for names in chunk.spans),
        tuple(_build_bucket_memory_key(plan, bucket, name) for bucket in buckets),
    )


def _build_operation_memory_key(plan: Plan, planned: PlannedOperation, name: _Names) -> tuple:
    """Return what of a planned operation decides the bytes that it takes: all on which its plan depends."""
    o = planned.operation
    summed = tuple(plan.planner.reduced_at_use.get((o.name, o.kind, p.name), ()) for p in o.parameters)
    inputs = tuple((name(t.name), t.dims, t.role, t.sizes) if isinstance(t, Parameter) else t for t in o.inputs)
    attributes = tuple((key, name(value) if isinstance(value, str) else value) for key, value in o.attributes)
    return o.kind, name(o.name), inputs, o.outputs, attributes, o.reads, o.recomputed, planned.once, summed


def _build_bucket_memory_key(plan: Plan, b: Bucket, name: _Names) -> tuple:
    """Return what of a bucket decides the bytes of its sums of gradients."""
    parameters = tuple((name(p.name), p.name in plan.multi_use_parameters) for p in b.parameters)
    return b.axes, b.only, parameters, b.sizes, b.elements, b.sharded, b.shards, b.zero, b.held, b.quantised, b.tiles


Coordinates = Mapping[str, int]  # a worker's place: mesh axis -> index


def weight_bytes(plan: Plan, moments: int, at: Coordinates | None = None) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on the worker at mesh coordinates `at`; default:
    rank 0, which has a block of every tensor of the first stage. Of a frozen parameter there is the compute copy alone.
    The optimizer keeps `moments` numbers of the master type per element of another. It keeps one less for a matrix that
    it updates as a whole, and one per row and per column in place of one where second moments are factored; and moments
    may be stored in fewer bytes."""
    at = at or plan.mesh.rank_coordinates(0)
    masters, buckets = plan.count_masters_of_rank(at), plan.buckets_of_rank(at)
    trained, frozen = ([b for b in buckets if b.frozen == still] for still in (False, True))
    states = sum(prod(plan.global_shape(p)) for p in plan.stage_part(at["stage"]).states)
    compute, master = plan.itemsize["compute"], plan.itemsize["master"]
    # copies to compute with
    apart = [b for b in trained if compute != master or (b.sharded and not b.frees_weights)]
    less = plan.count_masters_of_parameters((*plan.matrices, *plan.factored), at)
    saved = plan.count_saved_state_bytes(plan.count_own_masters(at)) if plan.stored.count else 0
    kept = 2 if plan.stored.masters == "split" else master  # the other half is the copy to compute with
    scales = sum(b.tile_count for b in buckets) * SCALE_BYTES
    copies = sum(b.count_kept_bytes(compute) for b in (*apart, *frozen)) + scales
    return {
        "parameters": masters * kept + states * master + copies,
        "gradients": sum(b.shard_elements if b.zero >= 2 else b.elements for b in trained) * master,
        "optimizer": (masters * moments - less + count_factors_of_rank(plan, at)) * master - saved,
    }


def offloaded_bytes(plan: Plan, moments: int, at: Coordinates) -> dict[str, int]:
    """Return what of a worker's `weight_bytes` is in host memory beside a GPU, by part (optimizer.offload)."""
    stored, sizes = plan.stored, weight_bytes(plan, moments, at)
    kept = 2 if stored.masters == "split" else plan.itemsize["master"]
    masters = kept * plan.count_masters_of_rank(at) if stored.offloads_masters else 0
    return {"parameters": masters, "optimizer": sizes["optimizer"] * stored.offloads_states}


def state_bytes(plan: Plan, moments: int) -> int:
    """Return the bytes that the optimizer keeps of the whole model, each once, as `weight_bytes` counts them."""
    sizes = {p.name: prod(plan.global_shape(p)) for p in plan.parameters if p.name not in plan.frozen}
    factors = sum(sum(matrix_sides(plan, p)) for p in plan.parameters if p.name in plan.factored)
    numbers = moments * sum(sizes.values()) - sum(sizes.get(n, 0) for n in (*plan.matrices, *plan.factored)) + factors
    return numbers * plan.itemsize["master"] - plan.count_saved_state_bytes(sizes)


def checkpoint_bytes(plan: Plan, moments: int) -> int:
    """Return the bytes of a checkpoint: master copies, states without gradient, and the optimizer's state, each once. A
    frozen weight is saved as its compute copy, and adapters' base not at all."""
    sizes = {p.name: prod(plan.global_shape(p)) for p in plan.parameters}
    frozen = sum(sizes[name] for name in plan.frozen)
    trained = sum(sizes.values()) - frozen + sum(prod(plan.global_shape(p)) for p in plan.states)
    kept = 0 if plan.adapters else frozen * plan.itemsize["compute"]
    return trained * plan.itemsize["master"] + kept + state_bytes(plan, moments)


@dataclass(frozen=True)
class SavedElements:
    """Elements that autograd saves per worker and microbatch, in distinct tensors: `activations`, and copies of
    parameters that were gathered for an operation (`gathered`)."""

    activations: int
    gathered: int

    @property
    def total_elements(self) -> int:
        """Return all elements that autograd saves per worker and microbatch."""
        return self.activations + self.gathered


def count_saved_elements(
    plan: Plan, model: RecordableModel, dropout: float = 0.0, at: Coordinates | None = None
) -> SavedElements:
    """Count the elements that autograd saves in one forward pass of a microbatch through `model` under `plan`, besides
    the parameters themselves, on the worker at mesh coordinates `at`; default: rank 0, which has a block of every
    tensor of the first stage. Several chunks are summed. `dropout`: its rate.

    The count is what `platform.runtime.parallel_ops` and torch's CPU kernels keep in fp32 and fp64; index and mask
    tensors of integers and booleans do not count, nor do copies that torch.einsum makes of permuted operands.
    """
    at = at or plan.mesh.rank_coordinates(0)
    plan = resolve_auto_kernels(plan, "cpu", dropout)
    meter = MemoryMeter(plan, dropout, at)
    for chunk in plan.stage_part(at["stage"]).chunks:
        run_chunk(meter, model, chunk, {name: meter.block(spec) for name, spec in chunk.receives})
    saved = meter.tape.distinct_saved_storages()
    return SavedElements(*(sum(s.counted for s in saved if s.parameter == copies) for copies in (False, True)))


def run_chunk(meter: MemoryMeter, model: RecordableModel, chunk: Chunk, flow: Mapping[str, Value]) -> dict[str, Value]:
    """Run the forward pass of one chunk of the model on the memory meter, from the activations `flow` by name; return
    its outputs by name, the last chunk's being the loss."""
    inputs = {name: name for name in model.inputs}
    if chunk.units:
        return model.part(meter, inputs, flow, chunk.units)
    return {"loss": model.forward(meter, inputs)}


@dataclass(frozen=True)
class Passes:
    """Predicted bytes that the passes of one chunk over a microbatch take and keep on a worker.

    `forward`, `backward`, `weights`: peak of the pass (forward, backward or input gradient, weight gradient) above the
    memory before it; `kept`: bytes kept from forward to backward; `outputs`: bytes of outputs not among `kept`;
    `pending`: bytes kept from the input gradient to the weight gradient where they are split; `returned`: bytes of the
    inputs' gradients not among `pending`; `standing`: bytes that the first pass makes and all share; `left`: bytes of
    an activation -> how many such are in host memory from forward to backward. By number of the
    bucket, `begun` and `gradients`: sums of gradients that are there after the input gradient where they are split, and
    in the end, and were not before; `parts`: shards of sums reduced in the end, 0 if one was there before.
    """

    forward: int
    kept: int
    outputs: int
    backward: int
    pending: int
    returned: int
    weights: int
    begun: Mapping[int, int]
    gradients: Mapping[int, int]
    parts: Mapping[int, int]
    standing: int
    left: Counter[int]

    def renumber_buckets(self, numbers: Mapping[int, int]) -> Passes:
        """Return the same bytes with the numbers of buckets replaced."""
        by_bucket = self.begun, self.gradients, self.parts
        begun, gradients, parts = ({numbers[n]: size for n, size in sizes.items()} for sizes in by_bucket)
        return replace(self, begun=begun, gradients=gradients, parts=parts)


Measured = MutableMapping[tuple, Passes]  # chunk's likeness and other circumstances -> its passes, with its own buckets


def measure_passes(
    meter: MemoryMeter,
    model: RecordableModel,
    chunk: Chunk,
    *,
    splits_weight_gradients: bool,
    summed: Collection[int] = (),
    reduced: Collection[int] = (),
) -> Passes:
    """Measure the bytes that the passes of one chunk take on the worker of a new `meter`, by running the model on it.
    `splits_weight_gradients`: weight gradients are separate passes, run later; `summed`, `reduced`: numbers of the
    buckets whose gradients are being summed already, and of which there are shards of reduced sums."""
    ledger = meter.ledger
    meter.deferred = [] if splits_weight_gradients else None
    meter.leaves = sums = MeteredSums(meter, chunk, summed, reduced, early=not splits_weight_gradients)
    flow = {name: meter.block(spec) for name, spec in chunk.receives}
    before = ledger.peak = ledger.now
    outputs = _run_forward(meter, model, chunk, flow)
    standing = sum(mask.nbytes for mask in meter.standing.values())
    most, full, results = ledger.peak - before, ledger.now, [(v.key, v.elements) for v in outputs.values()]
    del outputs
    kept, given_bytes, left = ledger.now - before - standing, full - ledger.now, meter.left
    coming: dict[GradientKey, MeteredStorage] = {key: meter.new(n) for key, n in results}
    start = ledger.peak = ledger.now
    inputs, received = {v.key for v in flow.values()}, sum(v.storage.nbytes for v in flow.values() if v.storage)
    meter.begin_backward(chunk)
    meter.tape.run_backward(coming, sums)
    meter.end_pass()
    meter.of_pass.clear()
    input_gradients = {key: g for key, g in coming.items() if key in inputs}
    coming.clear()
    if splits_weight_gradients:
        sums.flush_all()
    else:
        sums.end_pass()
    backward, begun = ledger.peak - start, sums.begun_bytes() if splits_weight_gradients else {}
    flow.clear()
    bytes_with_gradients = ledger.now
    input_gradients.clear()
    pending = ledger.now - (before - received) - standing - sum(s.nbytes for s in sums.list_held_storages())
    returned = bytes_with_gradients - ledger.now
    start = ledger.peak = ledger.now
    while meter.deferred:
        meter.deferred.pop(0)()
    weights = ledger.peak - start
    if splits_weight_gradients:
        sums.end_pass()
    more = {n: size for n, size in sums.begun_bytes().items() if n not in begun}
    peaks = most - standing, kept, given_bytes, backward, pending, returned, weights
    return Passes(*peaks, begun, more, sums.shard_bytes(), standing, left)


def _run_forward(
    meter: MemoryMeter, model: RecordableModel, chunk: Chunk, flow: Mapping[str, Value]
) -> dict[str, Value]:
    """Run a chunk's forward pass on the memory `meter`, with the data that it reads, from the activations `flow` by
    name; return its outputs by name."""
    tokens = meter.allocate_data(chunk)
    meter.begin_forward(chunk)
    outputs = run_chunk(meter, model, chunk, flow)
    meter.end_forward()
    del tokens
    meter.of_pass.clear()
    return outputs


@dataclass(frozen=True)
class Footprint:
    """Predicted bytes of memory on one worker at its peak within a step. `activations`: kept by the `in_flight` forward
    passes, whose backward is not done; `working`: everything else, such as what an operation, its collectives, sends
    and receives take; `reserved`: bytes that a GPU's own libraries take beside all tensors; `host`: bytes of host
    memory that activations are kept in (recompute_offload), on a CPU among the `activations`, and beside a GPU states
    and masters (optimizer.offload); `recorded`: bytes that other work takes beside the memory of
    recorded passes."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    working: int
    in_flight: int
    reserved: int = 0
    host: int = 0
    recorded: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the predicted bytes of a worker's memory at its peak: the sum of all parts."""
        tensors = self.parameters + self.optimizer + self.gradients + self.activations + self.working
        return tensors + self.recorded + self.reserved


# Bytes of a GPU that no tensor of ours can have: estimates, until they are measured. CUDA's context, workspaces of its
# libraries and compiled kernels; a communicator of NCCL for each group along axes, and for each neighbouring stage and
# direction; and what the allocator loses by rounding, as a share of the rest.
CONTEXT, GROUP, LINE, ROUNDING = 1_500_000_000, 400_000_000, 100_000_000, 0.04


def overhead_bytes(axis_groups: int, stage_links: int, needed: int) -> int:
    """Predict the bytes of a GPU that CUDA, its libraries and NCCL take beside the `needed` bytes of a worker that is
    in so many `axis_groups` along axes and `stage_links` to other stages."""
    return CONTEXT + axis_groups * GROUP + stage_links * LINE + round(ROUNDING * needed)


def predict_footprint(
    plan: Plan,
    model: RecordableModel,
    row: Iterable[Action],
    stage: int,
    moments: int,
    dropout: float,
    device: str = "cpu",
    scratch: int = 0,
    measured: Measured | None = None,
    compiles: str = "",
) -> Footprint:
    """Predict the peak memory of the worker of `stage` that needs most, in any step but the first (which starts without
    optimizer state): the one at index 0 of the other axes or, if branches that are not alike are dealt to sub-grids, of
    another sub-grid. `row`: the stage's row of the schedule with sends and receives; `moments`: numbers that the
    optimizer keeps per parameter element; `dropout`: its rate; `device`: its kind (cpu, cuda); `scratch`: bytes that
    the optimizer takes during the update; `measured`: passes of other stages with the same arguments, to which this
    one's are added; `compiles`: the argument of MemoryMeter."""
    stage_plan, actions = plan.stage_part(stage), list(row)
    places = [{**at, "stage": stage} for at in plan.sub_grid_coordinates]

    def predict_worker(at: Coordinates, known: Measured) -> Footprint:
        """Predict the peak memory of the worker at mesh coordinates `at`; `known` passes are as of `measured`."""
        walk = _MemoryWalk(stage_plan, model, at, dropout, device, compiles, known)
        sizes = weight_bytes(plan, moments, at)
        gradients, activations, working, live = walk.walk_row(actions, scratch)
        host = sum(size * n for size, n in walk.most_left.items())
        activations += host if device == "cpu" else 0
        away = offloaded_bytes(plan, moments, at) if device != "cpu" else {}
        parameters, optimizer = (sizes[part] - away.get(part, 0) for part in ("parameters", "optimizer"))
        host += sum(away.values())
        return Footprint(parameters, optimizer, gradients, activations, working, live, host=host)

    known = {} if measured is None else measured
    footprints = [predict_worker(at, {} if i else known) for i, at in enumerate(places)]
    return max(footprints, key=lambda footprint: footprint.total_bytes)


class _MemoryWalk:
    """Walk along one stage's row of the schedule that adds up bytes in use and notes the peak. `kept`: bytes that
    forward passes keep; `held`: bytes by (what, chunk, microbatch that use it), buffers of sends apart."""

    def __init__(
        self,
        plan: Plan,
        model: RecordableModel,
        at: Mapping[str, int],
        dropout: float,
        device: str,
        compiles: str,
        measured: Measured,
    ):
        """Begin a memory forecast of one stage's schedule row, on the worker at mesh coordinates `at`."""
        self.plan, self.model, self.at, self.dropout, self.device = plan, model, at, dropout, device
        self.compiles = compiles
        self.kept = self.gradients = self.live = self.standing = self.forward_of_pair = 0
        self.most = (0, 0, 0, 0)  # at the peak: gradients, activations, working, in flight
        self.compute, self.master = plan.itemsize["compute"], plan.itemsize["master"]
        self.chunks = {chunk.number: chunk for chunk in plan.chunks}
        self.buckets = [b for b in plan.buckets if is_at_index_zero(b.only, at) and not b.frozen]
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

    def walk_row(self, row: Sequence[Action], scratch: int) -> tuple[int, int, int, int]:
        """Account for the memory of all actions of a stage's schedule, for gradient reductions as they become possible,
        and for the update, which takes `scratch` bytes; return (gradients, activations, working, forward passes in
        flight) at the peak, the first three in bytes."""
        self.splits = any(a.kind is Kind.WEIGHT for a in row)
        incomplete = {completed for _, completed in mark_completed_chunks(row) if completed is not None}
        for action, completed in mark_completed_chunks(row):
            _COUNTS[action.kind](self, action)
            if completed is not None:
                incomplete.remove(completed)
                self._count_reduced_shards(completed, incomplete)
        self._count_update_memory(scratch)
        return self.most

    def note_peak(self, extra: int = 0, kept: int = 0) -> None:
        """Note a new peak of the predicted bytes if the bytes in use plus `extra` exceed it; `kept`: the bytes of
        `extra` that are activations of one more forward pass."""
        working = sum(self.held.values()) + sum(self.sending) + self.standing + extra - kept
        if self.gradients + self.kept + kept + working > sum(self.most[:3]):
            self.most = self.gradients, self.kept + kept, working, self.live + bool(kept)

    def find_passes(self, chunk: int) -> Passes:
        """Return the bytes that passes of a chunk take, given the buckets whose gradients are being summed."""
        if chunk not in self._now:
            bucket_numbers = self._number_buckets(chunk)
            summed, reduced = (frozenset(bucket_numbers.keys() & numbers) for numbers in (self.sums.keys(), self.parts))
            if (key := (chunk, summed, reduced)) not in self._measured:
                chunk_passes = self._measure_passes_once(chunk, bucket_numbers, summed, reduced)
                self._measured[key], self.standing = chunk_passes, max(self.standing, chunk_passes.standing)
            self._now[chunk] = self._measured[key]
        return self._now[chunk]

    def _number_buckets(self, chunk: int) -> dict[int, int]:
        """Map the numbers of the buckets with parameters of a chunk to their numbers among these."""
        if chunk not in self._numbers:
            names, buckets = self.chunks[chunk].parameter_names, enumerate(self.plan.buckets)
            of_chunk = (n for n, b in buckets if not names.isdisjoint(b.parameter_ranges))
            self._numbers[chunk] = {n: i for i, n in enumerate(of_chunk)}
        return self._numbers[chunk]

    def _measure_passes_once(
        self, chunk: int, bucket_numbers: Mapping[int, int], summed: Collection[int], reduced: Collection[int]
    ) -> Passes:
        """Return the bytes that passes of a chunk take, measured on the first chunk that is alike."""
        layout = self.chunks[chunk]
        if chunk not in self._likeness:
            self._likeness[chunk] = chunk_likeness(self.plan, layout, [self.plan.buckets[n] for n in bucket_numbers])
        begun = (frozenset(bucket_numbers[n] for n in numbers) for numbers in (summed, reduced))
        if (key := (self._likeness[chunk], self.splits, *begun)) not in self._alike:
            meter = MemoryMeter(self.plan, self.dropout, self.at, self.device, compiles=self.compiles)
            measured = measure_passes(
                meter, self.model, layout, splits_weight_gradients=self.splits, summed=summed, reduced=reduced
            )
            self._alike[key] = measured.renumber_buckets(bucket_numbers)
        return self._alike[key].renumber_buckets({i: n for n, i in bucket_numbers.items()})

    # passes

    def count_forward(self, a: Action) -> None:
        """Account for the memory of a chunk's forward pass: its input, its peak, and what it keeps for the backward
        pass."""
        p, chunk = self.find_passes(a.chunk), self.chunks[a.chunk]
        self._count_input_memory("inputs", a, chunk.receives, self.held.pop(("flow", a.chunk, a.microbatch), None))
        if not a.paired:
            self.note_peak(p.forward, p.kept)
            self.kept += p.kept
        self.live += 1
        self.left += p.left
        self.most_left |= self.left
        if chunk.sends:
            self.held["flow", a.chunk + 1, a.microbatch] = p.outputs
        if a.paired:
            self.forward_of_pair = a.chunk
        else:
            self.note_peak()

    def count_backward(self, a: Action) -> None:
        """Account for the memory of a chunk's backward or input-gradient pass: its peak, what it frees, and the
        gradient that it hands to the chunk before."""
        p, chunk = self.find_passes(a.chunk), self.chunks[a.chunk]
        self._count_input_memory("outputs", a, chunk.sends, self.held.pop(("gradients", a.chunk, a.microbatch), None))
        if a.paired:
            self._count_pair(self.forward_of_pair, a.chunk)
        else:
            self.note_peak(p.backward)
        del self.held["outputs", a.chunk, a.microbatch], self.held["inputs", a.chunk, a.microbatch]
        self.kept += p.pending - p.kept
        self.left -= p.left
        if chunk.receives:
            self.held["gradients", a.chunk - 1, a.microbatch] = p.returned
        if a.kind is Kind.BACKWARD:
            self.live -= 1
            self._add_gradient_bytes(p.gradients, p.parts)
        else:
            self._add_gradient_bytes(p.begun, {})

    def _count_pair(self, forward_chunk: int, backward_chunk: int) -> None:
        """Account for the memory of a pair, whose passes go on in turns: what one keeps grows as the other's is freed,
        so that the peak of each, at a head, is beside about a block of the other."""
        ahead, back = self.find_passes(forward_chunk), self.find_passes(backward_chunk)
        ahead_part, back_part = (
            p.kept // max(1, len(self.chunks[chunk].blocks))
            for p, chunk in ((ahead, forward_chunk), (back, backward_chunk))
        )
        self.live -= 1  # of two, what is kept of one in part is counted by itself
        self.note_peak(back.backward + ahead_part, ahead_part)
        self.kept += ahead.kept - back.kept
        self.note_peak(ahead.forward - ahead.kept + back_part, back_part)
        self.kept += back.kept
        self.live += 1

    def count_weights(self, a: Action) -> None:
        """Account for the memory of a chunk's weight-gradient pass: its peak, what it frees, its sums of gradients."""
        p = self.find_passes(a.chunk)
        self.note_peak(p.weights)
        self.kept -= p.pending
        self.live -= 1
        self._add_gradient_bytes(p.gradients, p.parts)

    def _add_gradient_bytes(self, new_sums: Mapping[int, int], parts: Mapping[int, int]) -> None:
        """Add to the memory forecast a pass's new gradient sums and reduced shards: bytes by number of the bucket."""
        if not new_sums and not parts:
            return
        self._now.clear()
        self.sums |= new_sums
        self.gradients += sum(new_sums.values()) + sum(parts.values()) - sum(self.sums.pop(n, 0) for n in parts)
        self.parts |= parts.keys()

    # sends and receives

    def block_bytes(self, flow: FlowSpecs) -> list[tuple[int, int]]:
        """Return (bytes of the block, bytes of the part that this rank sends) for each activation of a flow between
        chunks that is present on the worker; the part is 0 where the whole block is sent (no scatter/gather)."""
        key = tuple(flow)
        if key not in self._blocks:
            sizes = []
            for spec in (spec for _, spec in flow if self.plan.has_block(spec, self.at)):
                sent = self.plan.sent_elements(spec) if self.plan.scatter_axes(spec) else 0
                sizes.append((prod(self.plan.local_shape(spec)) * self.compute, sent * self.compute))
            self._blocks[key] = sizes
        return self._blocks[key]

    def count_receive(self, a: Action) -> None:
        """Account for the memory of a receive: the parts that arrive, or whole blocks without scatter/gather."""
        forward = a.kind is Kind.RECV_F
        flow = self.chunks[a.chunk].receives if forward else self.chunks[a.chunk].sends
        arriving = "arriving F" if forward else "arriving B", a.chunk, a.microbatch
        self.held[arriving] = sum(sent_bytes or full_bytes for full_bytes, sent_bytes in self.block_bytes(flow))
        self.note_peak()

    def _count_input_memory(self, side: str, a: Action, flow: FlowSpecs, local: int | None) -> None:
        """Account for the memory of a pass's input, `side` being "inputs" (of a forward pass) or "outputs" (their
        gradients, of a backward pass): `local` bytes from a chunk on this stage, or (None) a `flow` that was received
        and is gathered from its parts."""
        self.held.pop(("arriving F" if side == "inputs" else "arriving B", a.chunk, a.microbatch), None)
        received = self.block_bytes(flow) if local is None else []
        self.held[side, a.chunk, a.microbatch] = local or sum(full_bytes for full_bytes, _ in received)
        self.note_peak(sum(sent_bytes for _, sent_bytes in received))

    def count_send_buffers(self, a: Action) -> None:
        """Account for the memory of a send: the result of the pass becomes buffers of at most SENDS_IN_FLIGHT sends,
        the oldest of which are freed."""
        forward, chunk = a.kind is Kind.SEND_F, self.chunks[a.chunk]
        key = ("flow", a.chunk + 1, a.microbatch) if forward else ("gradients", a.chunk - 1, a.microbatch)
        for full_bytes, sent_bytes in self.block_bytes(chunk.sends if forward else chunk.receives):
            if sent_bytes:
                self.note_peak(full_bytes + sent_bytes)  # the padded block, and the part that is sent
            else:
                sent_bytes = min(full_bytes, self.held[key])
                self.held[key] -= sent_bytes
            self.sending.append(sent_bytes)
        del self.held[key]
        while len(self.sending) > SENDS_IN_FLIGHT:
            self.sending.popleft()

    # once a step

    def _count_reduced_shards(self, completed_chunk: int, incomplete_chunks: Collection[int]) -> None:
        """Account for the shards that ZeRO-1 leaves of buckets whose gradients chunk `completed_chunk` completes, as no
        chunk in `incomplete_chunks` uses them."""
        others = {p for chunk in incomplete_chunks for p in self.chunks[chunk].parameter_names}
        done = self.chunks[completed_chunk].parameter_names - others
        for n, b in enumerate(self.buckets):
            if b.zero == 1 and not done.isdisjoint(b.parameter_ranges) and others.isdisjoint(b.parameter_ranges):
                self.held["shard", n, 0] = b.shard_elements * self.master
        self.note_peak()

    def _count_update_memory(self, scratch: int) -> None:
        """Account for the memory at the end of a step: sums of tied gradients over stages, and reduced gradients while
        their norm is taken and during the update; updated shards are gathered in place."""
        self.sending.clear()
        each = {p.name: b.shard_elements * self.master for b in self.buckets for p in b.parameters}
        self.note_peak(max((each[name] for name in self.plan.stages_of_tied_parameters if name in each), default=0))
        self.held.clear()
        self.gradients = sum(b.shard_elements for b in self.buckets) * self.master
        self.note_peak(max(self._squares_bytes(), scratch))

    def _squares_bytes(self) -> int:
        """Return the predicted bytes for summing the squares of a bucket's gradients (`sharding.gradients.squares`), of
        the worker of the stage that needs most: next to none on a GPU, and on a CPU for many fp32 gradients, which are
        summed row by row."""
        if self.device != "cpu":
            return 0
        most, by_rows = SQUARED_AT_ONCE, self.master == 4
        corners = product(*({0, n - 1} for axis, n in self.plan.mesh.shape if axis != "stage"))
        axes = [axis for axis, _ in self.plan.mesh.shape if axis != "stage"]
        places = [{**self.at, **dict(zip(axes, values, strict=True))} for values in corners]
        stretches = (s for at in places for values in grad_norm_slices(self.plan, at).values() for s in values)
        parts = {s.stop - s.start for s in stretches}
        return max((8 * min(n, most) for n in parts if n <= most or not by_rows), default=0)


_COUNTS: Mapping[Kind, Any] = {
    Kind.FORWARD: _MemoryWalk.count_forward,
    Kind.BACKWARD: _MemoryWalk.count_backward,
    Kind.INPUT: _MemoryWalk.count_backward,
    Kind.WEIGHT: _MemoryWalk.count_weights,
    Kind.SEND_F: _MemoryWalk.count_send_buffers,
    Kind.SEND_B: _MemoryWalk.count_send_buffers,
    Kind.RECV_F: _MemoryWalk.count_receive,
    Kind.RECV_B: _MemoryWalk.count_receive,
}
