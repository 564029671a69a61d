"""Model chunks: a model recorded as consecutive parts for pipeline stages, the activations between them, and its
parameters in buckets.

A `Bucket` is parameters whose blocks lie one after another in one flat buffer, to be gathered, reduced and updated
together (`build_buckets`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

from platform.plan.layout import Layout, Mesh, base_axis, pad_to_multiple
from platform.plan.model_types import (
    NF4_UNITS,
    NO_RECOMPUTATION,
    SCALE_BLOCK,
    Operation,
    Parameter,
    Spec,
)
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.op import global_extents
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.registry import Ops, count_flops
from platform.plan.quantisation import WeightTiles, mark_quantised
from platform.plan.schedule import place_layers

FlowSpecs = tuple[tuple[str, Spec], ...]  # activations by name


class RecordableModel(Protocol):
    """Interface of a model as the code that builds plans sees it; platform.model has the implementations.

    A model that can be divided over pipeline stages also has `units`, the names of the smallest parts that it can be
    divided into, in order; only such a model has `part`.
    """

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the global size of every dim of the tensors of the model to plan, by name."""

    def parameters(self) -> Sequence[Parameter]:
        """Return the declarations of all parameters of the model to plan."""

    @property
    def inputs(self) -> Sequence[str]:  # names of the data tensors that a forward pass takes
        """Return the names of the data tensors that a forward pass of the model to plan takes."""

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        """Run the model to plan on data tensors by name, by recording or computing `ops`; return its loss."""

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> dict:
        """Run the units of one chunk of the planned model on the activations `flow`; return those for the next one."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive units (embedding, blocks, head) of a model, planned for one pipeline stage. `units` is empty if the
    model cannot be divided. `number` counts through the whole model.

    `receives`: the activations from the previous chunk; `sends`: the activations for the next chunk. `spans`: names of
    the parameters that each stretch of the chunk's forward pass uses: before the first block, in it, after it, ...
    `blocks`: the name of each block, and the operations in it; no plan that is read from a file has them.
    """

    number: int
    stage: int
    units: tuple[str, ...]
    receives: FlowSpecs
    sends: FlowSpecs
    operations: Mapping[tuple[str, str], PlannedOperation]
    functions: tuple[tuple, ...] = ()  # element by element, of which nothing is planned, see Recorder.note_operation
    kept: tuple[Spec, ...] = ()  # type of x of every recomputed function, see Ops.recomputed
    spans: tuple[tuple[str, ...], ...] = ()
    blocks: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = field(default=(), compare=False)

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Return the names of the parameters that the model chunk's operations use."""
        return frozenset(p.name for o in self.operations.values() for p in o.operation.parameters)

    @cached_property
    def state_names(self) -> frozenset[str]:
        """Return the names of the states, parameters without gradient, that the model chunk's operations read."""
        return frozenset(p.name for o in self.operations.values() for p in o.operation.states)

    @cached_property
    def multi_use_parameters(self) -> frozenset[str]:
        """Return the names of parameters that several of the chunk's operations use, each adding to the gradient."""
        uses = Counter(p.name for o in self.operations.values() for p in o.operation.parameters)
        return frozenset(name for name, n in uses.items() if n > 1)


class RecordedChunk(NamedTuple):
    """Run of one model chunk under a recorder, and the activations that the chunk receives and sends; not yet
    planned."""

    units: Sequence[str]
    ops: Recorder
    receives: FlowSpecs = ()
    sends: FlowSpecs = ()

    def quantise_products(self, *how: Any) -> RecordedChunk:
        """Return this part of a model with some products in 8 bits, by `how` of `mark_quantised`."""
        in_blocks = [span % 2 == 1 for span in self.ops.spans]
        return self._replace(ops=replace(self.ops, operations=mark_quantised(self.ops.operations, in_blocks, *how)))

    def build_chunk(self, number: int, stage: int, operations: Mapping[tuple[str, str], PlannedOperation]) -> Chunk:
        """Return the plan's `Chunk` of this recorded part of a model: of a number, a stage and planned `operations`."""
        planned = {(o.kind, o.name): operations[o.kind, o.name] for o in self.ops.operations}
        spans: list[dict[str, None]] = [{} for _ in range(self.ops.span + 1)]
        for span, operation in zip(self.ops.spans, self.ops.operations, strict=True):
            spans[span].update((p.name, None) for p in operation.parameters)
        keys = [(o.kind, o.name) for o in self.ops.operations]
        return Chunk(
            number,
            stage,
            tuple(self.units),
            self.receives,
            self.sends,
            planned,
            functions=tuple(self.ops.functions),
            kept=tuple(self.ops.kept),
            spans=tuple(map(tuple, spans)),
            blocks=tuple((name, tuple(keys[i:j])) for name, i, j in self.ops.blocks),
        )


def record_chunks(
    model: RecordableModel,
    recorder: Callable[[], Recorder],
    count: int,
    sizes: Mapping[str, int],
    parts: Sequence[Sequence[str]] = (),
) -> list[RecordedChunk]:
    """Record a model's forward pass, without computing it, as `count` chunks of consecutive units of about equal cost,
    for the stages of a pipeline: at most as many as it has units (embedding, blocks, head). `recorder` makes a new
    Recorder; `sizes`: global sizes of the model's dims; `parts`: the units of every chunk, if they are given."""
    if count == 1:
        ops = recorder()
        recorded = find_recordings(model, ops)
        if () not in recorded:
            model.forward(ops, {name: name for name in model.inputs})
            recorded[()] = ops, {}
        return [RecordedChunk(getattr(model, "units", ()), recorded[()][0])]
    units = getattr(model, "units", ("the model",))
    assert count <= len(units), "platform.predict.make_plan refuses it"

    if not parts:
        places = place_layers([cost for cost, _ in measure_units(model, recorder, sizes)], count)
        parts = [units[unit_range.start : unit_range.stop] for unit_range in places]
    flow, chunks = dict[str, Symbol](), []
    for number, part in enumerate(parts, 1):
        receives = _flow_specs(flow)
        ops, flow = _record_part(model, flow, part, recorder())
        chunks.append(RecordedChunk(part, ops, receives, _flow_specs(flow) if number < count else ()))
    return chunks


def measure_units(
    model: RecordableModel, recorder: Callable[[], Recorder], sizes: Mapping[str, int]
) -> list[tuple[float, tuple]]:
    """Return the forward cost of each unit of a model, and a key that alike ones share; arguments: `record_chunks`."""
    units = _record_units(model, recorder)
    cost_of = {id(unit): sum(forward_cost(o, sizes) for o in unit[1]) for unit in units}  # layers are alike, and one
    return [(cost_of[id(unit)], unit[0]) for unit in units]


def _record_units(
    model: RecordableModel, recorder: Callable[[], Recorder]
) -> Sequence[tuple[tuple, Sequence[Operation]]]:
    """Return a key and the operations of each unit of a model, without recomputation; alike units are one object."""
    recorded: dict[Any, Any] = find_recordings(model, replace(recorder(), recompute=NO_RECOMPUTATION))
    if _record_units not in recorded:
        flow, known, units, results = dict[str, Symbol](), dict[tuple, tuple](), [], dict[tuple, tuple]()
        describe_unit = getattr(model, "describe_unit", lambda unit: None)
        for unit in getattr(model, "units", ()):
            ops = replace(recorder(), recompute=NO_RECOMPUTATION)
            of_alike = () if ops.adapters else describe_unit(unit)  # adapters are of layers by their numbers
            alike = of_alike and (of_alike, tuple(flow.items()))
            if alike not in results:
                ops, flow = _record_part(model, flow, [unit], ops)
                key = tuple(o.nameless_key for o in ops.operations)
                results[alike or (unit,)] = known.setdefault(key, (key, ops.operations)), flow
            one, flow = results[alike or (unit,)]
            units.append(one)
        recorded[_record_units] = units
    return recorded[_record_units]


def _flow_specs(flow: Mapping[str, Symbol]) -> FlowSpecs:
    """Return the names and types of the activations that flow between two chunks of a model."""
    return tuple((name, x.spec) for name, x in flow.items())


def _record_part(
    model: RecordableModel, flow: dict[str, Symbol], part: Sequence[str], ops: Recorder
) -> tuple[Recorder, dict[str, Symbol]]:
    """Record by `ops` the units `part` of a model on the activations `flow`; return recorder and results."""
    recorded, key = find_recordings(model, ops), (tuple(part), _flow_specs(flow))
    if key not in recorded:
        inputs, received = {name: name for name in model.inputs}, {n: replace(x, made_by="") for n, x in flow.items()}
        recorded[key] = ops, model.part(ops, inputs, received, part)
    return recorded[key]


def find_recordings(model: RecordableModel, recorder: Recorder) -> dict[tuple, tuple[Recorder, dict[str, Symbol]]]:
    """Return what recorders like this one have found in a model, by its units and the types of what flowed in."""
    # a search makes many plans of one model, which so record each part once; beside it what flowed out
    by_settings: dict[tuple, dict] = getattr(model, "recordings", {})
    return by_settings.setdefault(recorder.recording_key, {})


def forward_cost(operation: Operation, sizes: Mapping[str, int]) -> float:
    """Return an operation's forward cost, by which a model's units are divided over pipeline chunks: FLOPs of an
    einsum, else elements written, of all ranks together. `sizes`: global sizes of the model's dims."""
    elements = sum(prod(global_extents(out, sizes).values()) for out in operation.outputs)
    return count_flops(operation, sizes) or float(elements)


def axes_of_replication(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes but `stage` over which a tensor in `layout` is replicated: with the scatter/gather
    optimization each of their n ranks sends 1/n of it to the next stage, which gathers it over them (Megatron-LM,
    Narayanan et al. 2021, section 4.1)."""
    others = "stage", *layout.axes, *map(base_axis, layout.only)
    return tuple(a for a in mesh.order_axes(mesh.axes) if a not in others)


_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)|[^.]*")  # a parameter's name up to the layer's number, else its first word
SQUARED_AT_ONCE = 1 << 16  # elements of a reduced bucket that a CPU squares at once in fp64: what fits its cache
# Elements of which shards of at least that many times as many are multiples, so that each begins where the kernels of
# NCCL and of fused updates read it by whole vectors, whatever number of ranks divides the buffer.
SHARD_UNIT = 128
# kind of device -> a product of matrices in 16 bits is added to a sum in fp32 as it is computed (torch has such kernels
# for CUDA alone); else it is rounded to 16 bits first, and added in another pass over both
ADDS_WIDE = {"cpu": False, "cuda": True}
BUCKET_MIB = 25  # size of buckets where nothing is known of the links: the size of torch's DDP


@dataclass(frozen=True)
class Bucket:
    """Parameters whose local blocks lie one after another in one flat buffer on every rank that has them.

    Their gradients are summed over the mesh axes `axes`, by the ranks at index 0 of the axes `only`; the ranks along
    `sharded`, some of these axes, divide the buffer into `shards` equal ones at stage `zero` of ZeRO (0: one shard).
    `sizes`: elements of each block; `elements`: size of the buffer in elements, with zeros at its end so that shards
    are equal, large ones in multiples of SHARD_UNIT. `held`: elements that a rank has of each block, if it has less and
    zeros behind them. `frozen`: its parameters take no gradient, and ranks keep of them what they compute with
    alone, in shards under ZeRO-3. `quantised`: ranks keep them in 4 bits, so many elements (NF4_UNITS) together.
    `tiles`: of each, if they are gathered in 8 bits.
    """

    axes: tuple[str, ...]
    only: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    sizes: tuple[int, ...]
    elements: int
    sharded: tuple[str, ...] = ()
    shards: int = 1
    zero: int = 0
    held: tuple[int, ...] = ()
    frozen: bool = False
    quantised: int = 0
    tiles: tuple[WeightTiles, ...] = ()

    @cached_property
    def name(self) -> str:
        """Return the bucket's display name: the layers of its parameters, such as `layers.0 ... layers.3`."""
        return common_name([p.name for p in self.parameters])

    @cached_property
    def block_key(self) -> tuple:
        """Return what of the bucket's parameters decides which blocks of them a rank has."""
        return tuple((p.dims, p.role, p.sizes) for p in self.parameters)

    @property
    def frees_weights(self) -> bool:
        """Return True if ranks have this bucket's compute copies only while a span reads them."""
        return self.zero == 3 or self.quantised > 0

    def count_kept_bytes(self, itemsize: int) -> int:
        """Return the bytes that a rank keeps of this bucket's compute copies, of `itemsize` bytes, between uses."""
        if self.quantised:
            return self.shard_elements // self.quantised * NF4_UNITS[self.quantised]
        return (self.shard_elements if self.frees_weights else self.elements) * itemsize

    @property
    def has_narrow_gather(self) -> bool:
        """Return True if ranks gather this bucket's parameters in 8 or 4 bits, of which numbers are made."""
        return bool(self.quantised or self.tiles)

    @property
    def narrow_shard_bytes(self) -> int:
        """Return the bytes of one of this bucket's shards in 8 or 4 bits."""
        return self.shard_elements if self.tiles else self.count_kept_bytes(1)

    @cached_property
    def tile_count(self) -> int:
        """Return how many tiles with one scale of 8 bits this bucket is gathered in."""
        return sum(prod(tiles.shape) for tiles in self.tiles)

    @property
    def shard_elements(self) -> int:
        """Return the elements of one of this bucket's equal shards."""
        return self.elements // self.shards

    @cached_property
    def parameter_ranges(self) -> dict[str, tuple[int, int]]:
        """Map the name of each parameter of this bucket to (start, stop) of its block in the flat buffer."""
        begins = accumulate(self.sizes, initial=0)
        triples = zip(self.parameters, begins, self.held or self.sizes, strict=False)
        return {p.name: (begin, begin + size) for p, begin, size in triples}

    @cached_property
    def empty_ranges(self) -> list[tuple[int, int]]:
        """Return the stretches (start, stop) of the flat buffer in which no parameter's block lies."""
        ends = [0, *(stop for _, stop in self.parameter_ranges.values())]
        begins = [*(start for start, _ in self.parameter_ranges.values()), self.elements]
        return [(start, stop) for start, stop in zip(ends, begins, strict=True) if start < stop]

    def range_of_parameters(self, names: Sequence[str]) -> tuple[int, int] | None:
        """Return (start, stop) in the flat buffer of the blocks of `names`; None if not adjacent in this order."""
        ranges = [self.parameter_ranges.get(name, (-1, -1)) for name in names]
        adjacent = all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        return (ranges[0][0], ranges[-1][1]) if adjacent and ranges[0][0] >= 0 else None

    def range_in_shard(self, name: str, index: int) -> tuple[int, int]:
        """Return (start, stop) within the flattened block of the parameter `name` of its elements in this bucket's
        shard number `index`; equal numbers if there is none."""
        start, stop = self.parameter_ranges[name]
        first, last = (min(max(self.shard_elements * i, start), stop) - start for i in (index, index + 1))
        return first, last


def layer_of_parameter(name: str) -> str:
    """Return the layer (`layers.3`), or the part of the model outside of layers (`embedding`), that the parameter
    `name` belongs to."""
    return _LAYER.match(name).group()  # type: ignore[union-attr]


def common_name(names: Iterable[str]) -> str:
    """Return one short name for parameters of the given `names`: the layers (`layers.3`), or parts of the model outside
    of layers (`embedding`), that they belong to; of more than two, the first and the last."""
    parts = list(dict.fromkeys(map(layer_of_parameter, names)))
    return ", ".join(parts) if len(parts) <= 2 else f"{parts[0]} ... {parts[-1]}"


Uses = Iterable[tuple[tuple[int, int], str]]  # ((chunk, span), name of a parameter), in the order of the forward pass


def group_by_span(uses: Uses, tied: Iterable[str]) -> list[tuple[int | str, tuple[str, ...]]]:
    """Group the names of parameters by the span of the model that uses them, in order of first use, each group with
    its chunk; a parameter that several spans use, or that is `tied`, is a group of its own, with its name."""
    spans: dict[str, dict[tuple[int, int], None]] = {}
    for span, name in uses:
        spans.setdefault(name, {})[span] = None
    ungrouped = {*tied, *(name for name, used_spans in spans.items() if len(used_spans) > 1)}
    groups: dict[str | tuple[int, int], list[str]] = {}
    for name, used_spans in spans.items():
        groups.setdefault(name if name in ungrouped else next(iter(used_spans)), []).append(name)
    return [(key if isinstance(key, str) else key[0], tuple(names)) for key, names in groups.items()]


def buckets_to_gather(spans: Sequence[Sequence[Bucket]], keeps_last_span: bool) -> tuple[list[Bucket], list[Bucket]]:
    """Return the parameter buckets that ZeRO-3 gathers in a model chunk's forward pass, and in its backward pass: each
    on entering a span of layers, unless the span before has it gathered. `spans`: the buckets that each span gathers;
    `keeps_last_span`: True if the buckets of the last span stay gathered from the forward to the backward pass."""
    forward = [b for before, span in pairwise([(), *spans]) for b in span if b not in before]
    turn = spans[-1] if keeps_last_span else ()
    backward = [b for before, span in pairwise([turn, *reversed(spans)]) for b in span if b not in before]
    return forward, backward


def build_buckets(
    groups: Iterable[tuple[int | str, Sequence[Parameter]]],
    reductions: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]],
    sizes: Mapping[str, int],
    shards: Mapping[str, int],
    zero: int,
    max_elements: int,
    scaled: Collection[str] = (),
    frozen: Collection[str] = (),
    quantised: int = 0,
    tiles: Mapping[str, WeightTiles] | None = None,
) -> list[Bucket]:
    """Put groups of parameters, which come in the order of the forward pass, into flat buckets.

    `groups`: (key, parameters); neighbours with one key are put together while they have at most `max_elements`
    elements. By name, `reductions`: (`axes`, `only`) as in Bucket; parameters of different ones go to different
    buckets; `sizes`: elements of the local blocks. `shards`: ranks along each axis over which stage `zero` of ZeRO
    shards; `scaled`: names of parameters whose blocks of SCALE_BLOCK elements no shard may divide; `frozen`: names
    of parameters that lie apart from others, as in Bucket; `quantised`: elements in 4 bits that all of them keep
    together, 0 for none; `tiles`: the tiles of each, by its name.
    """
    buckets: list[Bucket] = []
    open_: dict[tuple, list[Parameter]] = {}  # (axes, only, frozen) -> parameters of the bucket being filled
    before: int | str | None = None
    open_elements = 0

    def close_open_buckets() -> None:
        """Make the buckets of the parameters collected so far, one for each way of reducing their gradients."""
        for (axes, only, still), parameters in open_.items():
            # whole blocks first; then parameters that decay, so that the optimizer updates each kind as one stretch
            members = sorted(parameters, key=lambda p: (p.name not in scaled, not p.decay))
            counts = tuple(sizes[p.name] for p in members)
            sharded = tuple(axis for axis in axes if axis in shards and not (still and zero < 3))
            ranks = prod(shards[axis] for axis in sharded)
            large = ranks > 1 and sum(counts) >= SHARD_UNIT * SHARD_UNIT * ranks
            in_blocks = ranks > 1 and (quantised or members[0].name in scaled)
            unit = max(SCALE_BLOCK, quantised) if in_blocks else SHARD_UNIT if large else 1
            size, stage = pad_to_multiple(sum(counts), ranks * unit), zero if sharded else 0
            narrow = tuple(tiles[p.name] for p in members) if tiles and sharded else ()
            how = sharded, ranks, stage, (), still, quantised, narrow
            buckets.append(Bucket(axes, only, tuple(members), counts, size, *how))
        open_.clear()

    for key, parameters in groups:
        more_elements = sum(sizes[p.name] for p in parameters)
        if open_ and (key != before or open_elements + more_elements > max_elements):
            close_open_buckets()
            open_elements = 0
        before, open_elements = key, open_elements + more_elements
        for p in parameters:
            open_.setdefault((*reductions[p.name], p.name in frozen), []).append(p)
    close_open_buckets()
    return buckets
