"""Work of a plan on one rank, for any hardware: products by shape, bytes of memory, kernels, collectives.

The model's forward pass is recorded once more, as the plan's was; each operation adds its part, as planned, and so do
the functions element by element of which nothing is planned. Equal parts are counted, as all layers are alike.
`step_work` adds up a training step: each chunk's passes, and each stage's update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from platform.plan.chunks import Chunk, RecordableModel
from platform.plan.layout import is_at_index_zero
from platform.plan.model_types import POINTWISE, Operation, Parameter, Spec
from platform.plan.operation_plan import Collective, EinsumGroup, PlannedOperation
from platform.plan.operations.experts import SORTED, share_of_copies
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.plan import Plan
from platform.plan.planner import Planner
from platform.plan.schedule import Schedule
from platform.plan.step_collectives import (
    BucketCollective,
    bucket_collectives,
    list_decodings,
    recompute_gathers,
    transfer_collectives,
)
from platform.plan.whole_blocks import reasons_against_whole_blocks
from platform.predict.systems import System, redoes


class MatrixProduct(NamedTuple):
    """Matrix product of a rank: [rows, inner] times [inner, columns], `batch` times over; `narrows`: True if an operand
    is a layer's weight: some systems compute these products in a narrower type than all else."""

    rows: int
    columns: int
    inner: int
    batch: int = 1
    narrows: bool = False

    @property
    def flops(self) -> float:
        """Return the multiplications and additions of the product, by which it is priced."""
        return 2.0 * self.rows * self.columns * self.inner * self.batch

    @property
    def elements(self) -> int:
        """Return the elements of both operands and of the result, by whose bytes the product is priced."""
        return self.batch * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)

    @property
    def gradient_products(self) -> tuple[MatrixProduct, MatrixProduct]:
        """Return the backward pass's work, as products: the gradients of the first operand and of the second."""
        first = self._replace(columns=self.inner, inner=self.columns)
        return first, self._replace(rows=self.columns, columns=self.inner, inner=self.rows)


# a collective, the parts of a product that it goes beside, and the share of it that may
Beside = tuple[Collective, tuple[MatrixProduct, ...], float]


@dataclass(frozen=True)
class Part:
    """Part of a pass on one rank: matrix `products`, FLOPs inside of one `fused` kernel of attention at its forward
    speed, `bytes` that other kernels read and write, the number of all `kernels`; `collectives` for which the pass
    waits, others that start a product `ahead`, and others that go part by part `beside` some of `products`."""

    products: tuple[MatrixProduct, ...] = ()
    fused: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    collectives: tuple[Collective, ...] = ()
    ahead: tuple[Collective, ...] = ()
    beside: tuple[Beside, ...] = ()


@dataclass
class ChunkWork:
    """Work of a chunk's passes over one microbatch: its parts, each with how often it occurs, and the `calls` of Python
    by which the host launches them, by pass."""

    forward: Counter[Part] = field(default_factory=Counter)
    backward: Counter[Part] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


# Python calls by which our host launches a kernel by itself, and in each pass a block that is compiled as one function:
# 866 and 916 of a layer of GPT and of Llama in both passes, and 71 each (benchmarks/host_cost.py).
CALLS_OF_KERNEL, CALLS_OF_BLOCK = 27, 35
SUMMED = 8  # bytes per element of a weight, of whose gradient a sum in fp32 is read and written
# Of one kernel of attention: its backward pass computes the scores again, five products for two, at a lower speed.
FUSED_BACKWARD = 2.5 / 0.8
# a soft cap has no fused kernel: times that each score, in the type of statistics, is read or written in both passes
CAPPED = 12, 34


def _name_origin(o: Operation) -> str:
    """Return kind and name of the work that makes a product's x again, if it is cheap; "" of another operation."""
    made_by, (before, _, _) = dict(o.attributes).get("made_by", ""), o.name.rpartition(".")
    if made_by == "norm":
        return f"norm {before}.{'norm' if 'd_model' in o.inputs[0].dims else 'kv_latent_norm'}."
    return f"pointwise {before}.up" if made_by else ""


@dataclass(frozen=True)
class Execution:
    """Settings beside a plan on which the time of a step depends: the kind of `schedule` and, for one that is not among
    EVEN, its `table`; `overlap`: True if collectives of parameters go on beside computation; `moments`: numbers of
    optimizer state per parameter; `streamed`: bytes of one that an update brings from host memory; `dropout`: the
    model's rate, and `fused_dropout` if attention's kernel draws its masks; the `system` that runs the plan; `narrow`:
    the precision of fewer bits in which it computes the products of layers' weights, "" for the plan's; `compiles`:
    True if a GPU's blocks are compiled where they can be; `more_heads`: heads beside the plan's, of multi-token
    prediction, on the last stage; `redone`: words of REDONE, by which it computes operations again, beside what the
    plan does."""

    schedule: str = "none"
    table: Schedule | None = None
    overlap: bool = True
    moments: float = 2
    streamed: float = 0.0
    dropout: float = 0.0
    fused_dropout: bool = False
    system: System = System()
    narrow: str = ""
    compiles: bool = False
    more_heads: int = 0
    redone: frozenset[str] = frozenset()


class _Known(NamedTuple):
    """Work that is known, by all that decides it: an operation's parts in the forward, the backward and the recomputed
    forward pass; a block's, and what it returns."""

    parts: dict[tuple, tuple[Part, Part, Part]]
    blocks: dict[tuple, tuple[ChunkWork, Any]]


class WorkRecorder(Recorder):
    """Recorder of a model's forward pass that notes the work of each operation under a plan."""

    def __init__(self, plan: Plan, chunk: Chunk, execution: Execution, known: _Known, reasons: Mapping[str, str]):
        """Begin a pass of a plan's chunk, as `execution` says; `known` grows. `reasons`: why blocks of the plan are not
        compiled as one function."""
        options = plan.scheme, execution.dropout, plan.recompute, execution.fused_dropout
        super().__init__(*options, adapters=plan.adapters)
        self.plan, self.size, self.work = plan, plan.itemsize["compute"], ChunkWork()
        self.system, self.redone, self._known = execution.system, execution.redone, known
        self._alike = {} if self.redone else _key_blocks(plan, chunk)  # which are redone is said by names
        self._splits = execution.table is not None and execution.table.splits_weight_gradients
        self._reasons = reasons
        self._at = plan.mesh.rank_coordinates(0)  # the busiest rank of its stage: others have fewer branches
        self._whole, self._whole_count = False, 0  # whether the block under way is compiled as one function; how many
        self._last_by_chunks = ""  # product of the feed-forward layer under way, if it is computed in chunks of rows

    def recomputed(self, kind, name, function, spec, x, *more):
        """Note the work of `function`, which computes a block, by one compiled function where that can be; of alike
        blocks the first is run."""
        if kind != "full":
            return super().recomputed(kind, name, function, spec, x, *more)
        self._whole = self._reasons.get(name) == ""
        self._whole_count += self._whole
        key = self._alike.get(name, name), self._whole, x, *more
        if key not in self._known.blocks:
            before, self.work = self.work, ChunkWork()
            self._known.blocks[key] = self.work, super().recomputed(kind, name, function, spec, x, *more)
            self.work = before
        work, out = self._known.blocks[key]
        for pass_name, counts in vars(work).items():
            getattr(self.work, pass_name).update(counts)
        self._whole = False
        return out

    def mlp(self, function, x, spec, inner, hidden, biases, down, out, bias, counts=None):
        """Note the work of a feed-forward layer, in chunks of rows if the plan says so and it can be."""
        self._last_by_chunks = down.name * Ops.mlp.computes_by_chunks(self, x, inner, biases, down, counts)
        y = Ops.mlp.compose_operation(self, function, x, spec, inner, hidden, biases, down, out, bias, counts)
        self._last_by_chunks = ""
        return y

    @property
    def _chunks_of_rows(self) -> int:
        """Return in how many chunks of rows the operation under way is computed."""
        return self.plan.mlp_chunks if self._last_by_chunks else 1

    @staticmethod
    def absent(x: Symbol) -> bool:
        """Return False: the rank has a block of every tensor."""
        return False

    def record_operation(self, kind, name, x, inputs, outputs, reads=(), **more):
        """Note the work of an operation, as planned; return the symbols of its results."""
        symbols = super().record_operation(kind, name, x, inputs, outputs, reads, **more)
        planned = self.plan.operations.get((kind, name))
        if planned and is_at_index_zero(planned.only, self._at):
            o = planned.operation
            accesses = OPERATIONS[kind].accesses_of_both_passes(o, self.plan.operations)
            # a block that is one function keeps what it likes
            chunks = self._chunks_of_rows
            rebuilds = not self._whole and chunks == 1 and not redoes(self.redone, _name_origin(o))
            key = self.plan.planner.operation_key(o), accesses, rebuilds, chunks
            if key not in self._known.parts:  # layers are alike
                forward, backward = _operation_work(self.plan, planned, self.system, rebuilds, chunks)
                leaves_out = planned.once and not self.system.repeats_all
                again = _drop_unneeded_result(forward, planned) if leaves_out else forward
                self._known.parts[key] = forward, backward, again
            forward, backward, again = (self._launch_each_head(o, part) for part in self._known.parts[key])
            is_hidden = self._last_by_chunks not in ("", name)
            self._note_parts(forward, backward, again, redoes(self.redone, f"{kind} {name}"), is_hidden)
        return symbols

    def _launch_each_head(self, o: Operation, part: Part) -> Part:
        """Return a part of an operation, of attention with as many kernels as the system needs for a rank's heads."""
        if not (self.system.head_kernels and part.fused):
            return part
        query = o.inputs[0]
        assert isinstance(query, Spec)
        heads = self.plan.local_shape(query)[query.dims.index("heads")]
        return replace(part, kernels=heads * self.system.head_kernels)

    def _refuse_illegal_operation(self, o) -> None:
        """Judge nothing: the plan has been made of these operations."""

    def _note_parts(
        self, forward: Part, backward: Part, again: Part, redone: bool = False, is_hidden: bool = False
    ) -> None:
        """Count a part of each pass, and part `again` of an operation that is recomputed by the plan or is `redone`,
        and once more if it `is_hidden` in a feed-forward layer in chunks."""
        times = (redone or self._recomputing) + is_hidden
        self.work.forward[forward] += 1
        self.work.backward[backward] += 1
        if times:
            self.work.backward[again] += times
        if not self._whole:
            launched = backward.kernels + times * again.kernels
            self.work.calls.update(forward=CALLS_OF_KERNEL * forward.kernels, backward=CALLS_OF_KERNEL * launched)

    def count_block_calls(self) -> None:
        """Count the calls of the blocks of a chunk, if each is compiled as one function."""
        each = CALLS_OF_BLOCK * self._whole_count
        self.work.calls.update(forward=each, backward=each * (1 + (self.recompute.kind == "full") + self._splits))

    def _note_elementwise(self, spec: Spec, accesses: Sequence[float], redone: bool = False) -> None:
        """Note a function of the elements of an activation, which reads and writes as many as `accesses` says."""
        if not self.plan.layout(spec).has_block(self._at):
            return
        key = spec, self._chunks_of_rows, *accesses
        if key not in self._known.parts:
            count = block_elements(self.plan, spec) * self.size
            forward, backward = (Part(bytes=count * n, kernels=self._chunks_of_rows) for n in accesses)
            self._known.parts[key] = forward, backward, forward
        self._note_parts(*self._known.parts[key], redone, bool(self._last_by_chunks))

    def pointwise(self, function: str, *x: Symbol) -> Symbol:
        """Note a pointwise function of one or two activations."""
        if function != "identity":
            again = bool(self.operations) and redoes(self.redone, f"pointwise {self.operations[-1].name}")
            self._note_elementwise(x[0].spec, Ops.pointwise.accesses_by_inputs[len(x)], again)
        return x[0]

    def residual(self, name: str, x: Symbol, y: Symbol, spec: Spec) -> Symbol:
        """Note a residual connection, one kernel with its dropout."""
        self._note_elementwise(spec, Ops.residual.memory_accesses)
        return x


def _key_blocks(plan: Plan, chunk: Chunk) -> dict[str, tuple]:
    """Return by name of a chunk's block all that decides its work, which alike blocks share."""
    begins, keys = {key: i for i, key in enumerate(chunk.operations)}, dict[str, tuple]()
    for name, operations in chunk.blocks:
        planned, first = [chunk.operations[key] for key in operations], begins[operations[0]] if operations else 0
        known = ((plan.planner.operation_key(p.operation), p.operation.recomputed, p.only) for p in planned)
        names = (key.removeprefix(name) for _, key in operations)
        behind = [(at - first, *words) for at, *words in chunk.functions if first <= at <= first + len(planned)]
        keys[name] = *known, *names, *behind
    return keys


def record_chunk_work(plan: Plan, model: RecordableModel, execution: Execution) -> list[ChunkWork]:
    """Return the work of every chunk's passes over one microbatch, on a rank that has a block of every tensor."""
    flow: dict[str, Symbol] = {}
    chunk_works, known, reasons = list[ChunkWork](), _Known({}, {}), dict[str, str]()
    for stage in dict.fromkeys(chunk.stage for chunk in plan.chunks if execution.compiles):
        reasons |= reasons_against_whole_blocks(plan.stage_part(stage), "cuda", execution.dropout)
    for chunk in plan.chunks:
        recorder = WorkRecorder(plan.stage_part(chunk.stage), chunk, execution, known, reasons)
        inputs = {name: name for name in model.inputs}
        if chunk.units:
            received, flow = flow, model.part(recorder, inputs, flow, chunk.units)
            if execution.more_heads and chunk is plan.chunks[-1]:
                before = WorkRecorder(recorder.plan, chunk, execution, known, reasons)
                stream = model.part(before, inputs, received, chunk.units[:-1])
                for _ in range(execution.more_heads):
                    model.part(recorder, inputs, stream, chunk.units[-1:])
        else:
            model.forward(recorder, inputs)
        for _, gather in () if execution.system.kept_whole else recompute_gathers(plan, chunk):
            recorder.work.backward[Part(collectives=(gather,))] += 1
        for phase, moved, kernels in list_decodings(recorder.plan, chunk, execution.compiles):
            getattr(recorder.work, phase)[Part(bytes=moved, kernels=kernels)] += 1
        recorder.count_block_calls()
        chunk_works.append(recorder.work)
    return chunk_works


def count_step_flops(plan: Plan, recomputed: bool, execution: Execution = Execution()) -> float:
    """Return the FLOPs of a step of the model, perhaps with `recomputed` operations, and with heads beside its one."""
    operations = [planned.operation for planned in plan.operations.values()]
    redone = [o for o in operations if o.recomputed or redoes(execution.redone, f"{o.kind} {o.name}")]
    again = sum(map(plan.count_seen_flops, redone)) if recomputed else 0.0
    head = sum(plan.count_seen_flops(o) for o in operations if any("vocab" in t.dims for t in o.outputs))
    per_token = (again + 3 * execution.more_heads * head) / (plan.sizes["batch"] * plan.sizes["length"])
    return (plan.flops_per_token + per_token) * plan.tokens_per_step


def block_elements(plan: Plan, spec: Spec) -> float:
    """Return the elements of a rank's block that a step's work counts; of experts' rows as by an even routing."""
    return prod(plan.local_shape(spec)) * even_share_of_planned_rows_of_spec(plan.planner, spec)


def even_share_of_planned_rows_of_spec(planner: Planner, spec: Spec) -> float:
    """Return the share of a rank's most rows of experts that a step's work counts, an even one; 1 for other types."""
    if "rows" not in spec.dims:
        return 1.0
    return _even_rows(planner, spec) / planner.local_shape(spec)[spec.dims.index("rows")]


def _even_rows(planner: Planner, spec: Spec) -> float:
    """Return the rows of experts of an activation that a step's work counts on a rank: of an even routing."""
    sizes = planner.sizes
    return sizes["length"] * sizes["batch"] * sizes["rows"] / planner.mesh.count_ranks(planner.layout(spec)["rows"])


def _even_collectives(plan: Plan, planned: PlannedOperation, by_pair: bool = False) -> list[Collective]:
    """Return an operation's collectives with an even share of their rows; `by_pair`: argument of `even_sent_share`."""
    taken = [c for c in planned.collectives if not (by_pair and c.op == "all_to_allv" and c.dtype == "accumulate")]
    shares = (even_sent_share(plan.planner, planned.operation, c, by_pair) if c.rows else 1.0 for c in taken)
    return [replace(c, elements=int(c.elements * share)) for c, share in zip(taken, shares, strict=True)]


def even_share_of_planned_rows(planner: Planner, o: Operation) -> float:
    """Return `even_share_of_planned_rows_of_spec`, for a step's work, of rows that an operation reads or makes."""
    return next((even_share_of_planned_rows_of_spec(planner, t) for t in _iterate_row_specs(o)), 1.0)


def _iterate_row_specs(o: Operation) -> Iterator[Spec]:
    """Yield the activations of experts' rows by which a step's work counts an operation: made, and read."""
    yield from (t for t in (*o.outputs, *o.inputs) if isinstance(t, Spec) and "rows" in t.dims)


def find_accessed_spec(o: Operation) -> Spec:
    """Return the activation whose elements an operation accesses: rows that it moves, or the first that it makes."""
    moved = _iterate_row_specs(o) if OPERATIONS[o.kind].moves_rows else iter(())
    return next(moved, None) or next(t for t in (*o.outputs, *o.inputs) if isinstance(t, Spec))


def even_sent_share(planner: Planner, o: Operation, c: Collective, by_pair: bool = False) -> float:
    """Return the share of a collective's elements that a step's work counts, by even routing; 1 of no rows. `by_pair`:
    a token's row is counted for each of its experts, as if it were not sent once to each of their ranks."""
    if c.op != "all_to_allv":
        return even_share_of_planned_rows(planner, o) if c.rows else 1.0
    if not OPERATIONS[o.kind].moves_rows:  # lent experts, which are as many as planned
        return 1.0
    spec, experts = next(_iterate_row_specs(o)), planner.sizes["experts"]  # of a rank's tokens, each once to each rank
    experts_of_rank = experts // planner.mesh.count_ranks(find_axes_of_experts(planner, o))
    share = 1 if by_pair else share_of_copies(experts, experts_of_rank, o["chosen"])
    return _even_rows(planner, spec) / c.rows * share


def find_axes_of_experts(planner: Planner, o: Operation) -> Sequence[str]:
    """Return the mesh axes that split the experts to which an operation sends rows."""
    return planner.row_expert_axes(next(_iterate_row_specs(o)))["experts"]


def _operation_work(
    plan: Plan, planned: PlannedOperation, system: System, rebuilds: bool, chunks: int
) -> tuple[Part, Part]:
    """Return the work of a planned operation on a rank, in its forward and its backward pass, as a system does it.
    `rebuilds`: products make inputs again as the plan says; `chunks`: number of chunks of rows."""
    operation = planned.operation
    if planned.groups:
        return _product_work(plan, planned, rebuilds, chunks)
    op, size = OPERATIONS[operation.kind], plan.itemsize["compute"]
    foreign = op.moves_rows and (system.rows_by_node or system.rows_by_pair)
    moved = _even_collectives(plan, planned, foreign)
    sides = {phase: tuple(c for c in moved if c.phase == phase) for phase in ("forward", "backward")}
    if op.chooses_kernel:
        return _attention_work(plan, operation, sides, system.sink_accesses if operation.parameters else 0.0)
    forward, backward = op.accesses_of_both_passes(operation, {} if foreign else plan.operations)
    # by the exchange itself, if it is by node
    ordered = SORTED * (op.moves_rows and system.rows_by_pair and any(c.op == "all_to_allv" for c in moved))
    count = block_elements(plan, find_accessed_spec(operation)) * size
    accesses = {"forward": forward + ordered, "backward": backward + ordered}
    flops = op.count_block_flops(plan.planner, operation)
    fused = {"forward": flops, "backward": FUSED_BACKWARD * flops}
    parts = (Part((), fused[phase], count * n, int(n > 0), sides[phase]) for phase, n in accesses.items())
    return tuple(parts)  # type: ignore[return-value]


def _drop_unneeded_result(forward: Part, planned: PlannedOperation) -> Part:
    """Return the work of an operation that is recomputed but for its result."""
    moved = (*forward.collectives, *(c for c, *_ in forward.beside))
    remaining = Counter(moved) - Counter(planned.results)
    return replace(forward, products=(), kernels=0, collectives=tuple(remaining.elements()), beside=())


def attention_flops(planner: Planner, operation: Operation) -> float:
    """Return the FLOPs that work counts of a rank's attention in one kernel, forward: half if it hides later keys."""
    query, key, value = (dict(zip(t.dims, planner.local_shape(t), strict=True)) for t in operation.inputs[:3])
    # keys that lie as queries do go around, and all are seen
    length = key["memory_length"] if "memory_length" in key else planner.tensor_sizes(operation.inputs[1])["length"]
    window = operation["window"]
    seen = min(length, window) if window else length * (0.5 if operation["causal"] else 1.0)
    return 2.0 * query["batch"] * query["heads"] * query["length"] * seen * (query["d_kv"] + value["d_kv"])


def _attention_work(
    plan: Plan, operation: Operation, sides: Mapping[str, tuple[Collective, ...]], more: float
) -> tuple[Part, Part]:
    """Return the work of attention in one kernel, which reads and writes its queries so often `more` in both passes."""
    flops = attention_flops(plan.planner, operation)
    count = prod(plan.local_shape(operation.inputs[0])) * plan.itemsize["compute"]
    forward, backward = OPERATIONS[operation.kind].memory_accesses
    query, value = (dict(zip(t.dims, plan.local_shape(t), strict=True)) for t in operation.inputs[:3:2])
    scores = flops / (2 * (query["d_kv"] + value["d_kv"])) * plan.itemsize["accumulate"]
    bent, bent_again = (scores * n for n in (CAPPED if "cap" in dict(operation.attributes) else (0, 0)))
    return (
        Part(fused=flops, bytes=count * (forward + more / 3) + bent, kernels=1, collectives=sides["forward"]),
        Part(fused=FUSED_BACKWARD * flops, bytes=count * (backward + more * 2 / 3) + bent_again, kernels=3,
             collectives=sides["backward"]),
    )  # fmt: skip


def _product_work(plan: Plan, planned: PlannedOperation, rebuilds: bool, chunks: int) -> tuple[Part, Part]:
    """Return the work of an operation's matrix products in chunks of rows: in the backward pass the gradients of both
    operands, and the sum of each weight's gradient over the microbatches and their chunks."""
    operation = planned.operation
    forward, backward, ahead, summed = [], [], [], 0.0
    beside: list[Beside] = []
    groups = [g for g in planned.groups if rebuilds and planned.rebuilds_input(g)]
    rebuilt = [_bytes_to_rebuild(plan, operation, g) for g in groups]
    for group in planned.groups:
        shapes = list_group_products(plan.planner, operation, group)
        parts, count = divide_products(plan.planner, operation, group, chunks)
        of_input = [part.gradient_products[0] for part in parts]
        forward += [_narrow_if_scaled(plan, group, product, "forward") for product in parts * count]
        backward += [_narrow_if_scaled(plan, group, product, "input") for product in of_input * count]
        of_weights = () if group.is_frozen else shapes if group.fuses else parts * count
        backward += [_narrow_if_scaled(plan, group, shape.gradient_products[1], "weight") for shape in of_weights]
        beside += list_collectives_beside(plan.planner, operation, group, chunks)
        for e in group.einsums:
            other = operation.inputs[1 + e.index]
            if isinstance(other, Parameter):
                ahead += plan.planner.collectives_of_conversion(e.operand, e.regathered)
                summed += 0.0 if e.frozen else prod(e.operand.before) * SUMMED
    summed *= chunks if plan.microbatches > 1 else chunks - 1
    waited = Counter(_even_collectives(plan, planned)) - Counter([*ahead, *(c for c, *_ in beside)])
    sides = []
    counts = ("forward", forward, 0.0, 0), ("backward", backward, summed + sum(rebuilt), len(rebuilt))
    for phase, products, written, more_kernels in counts:
        waits, begun = (tuple(c for c in moved if c.phase == phase) for moved in (waited.elements(), ahead))
        under = tuple(pair for pair in beside if pair[0].phase == phase)
        sides.append(Part(tuple(products), 0.0, written, len(products) + more_kernels, waits, begun, under))
    return sides[0], sides[1]


def divide_products(
    planner: Planner, operation: Operation, group: EinsumGroup, chunks: int = 1
) -> tuple[list[MatrixProduct], int]:
    """Return a part of each product of a group of einsums, by the ranks of its collective or by chunks, and a count."""
    fused = group.fused_conversion
    count = planner.mesh.count_ranks(fused.forward[0].axes) if fused else chunks
    shapes = list_group_products(planner, operation, group)
    return [shape._replace(rows=-(-shape.rows // count)) for shape in shapes], count


def list_collectives_beside(
    planner: Planner, operation: Operation, group: EinsumGroup, chunks: int = 1
) -> list[Beside]:
    """Return the collectives of a group of einsums that go beside its products: of an asynchronous product all but the
    first part, and x where it is gathered again."""
    parts, count = divide_products(planner, operation, group, chunks)
    of_input = tuple(part.gradient_products[0] for part in parts) * count
    if fused := group.fused_conversion:
        moves = zip(planner.collectives_of_conversion(fused), (tuple(parts * count), of_input), strict=True)
        return [(c, products, 1 - 1 / count) for c, products in moves]
    if not _gathers_beside_input_gradient(group):
        return []
    gathers = planner.collectives_of_conversion(replace(group.x, backward=()))
    return [(replace(c, phase="backward"), of_input, 1.0) for c in gathers]


def _gathers_beside_input_gradient(group: EinsumGroup) -> bool:
    """Return True if the x of a group is gathered again, for gradients of weights, while its own is computed."""
    in_turns = group.panels or "rows" in group.x_dims
    return group.regathered and len(group.x.forward) == 1 and not in_turns


def _bytes_to_rebuild(plan: Plan, operation: Operation, group: EinsumGroup) -> float:
    """Return the bytes that a rank reads and writes to make x of a group of einsums again."""
    elements = prod(group.x.before) * even_share_of_planned_rows(plan.planner, operation)
    return accesses_to_rebuild(operation) * elements * plan.itemsize["compute"]


def accesses_to_rebuild(operation: Operation) -> float:
    """Return how often making x of an operation's products again reads and writes its elements."""
    made_by = operation["made_by"]
    arguments = POINTWISE.get(made_by)
    return (Ops.pointwise.accesses_by_inputs[arguments] if arguments else OPERATIONS[made_by].memory_accesses)[0]


def _narrow_if_scaled(plan: Plan, group: EinsumGroup, product: MatrixProduct, name: str) -> MatrixProduct:
    """Return the work of a product of a group of einsums: narrow if it is in 8 bits, as it is in a plan without."""
    if not plan.has_scaled_products:
        return product
    scaled = group.einsums[0].scaled
    return product._replace(narrows=scaled is not None and name in scaled.products)


def list_group_products(planner: Planner, operation: Operation, group: EinsumGroup) -> list[MatrixProduct]:
    """Return the work of a group of einsums on a rank, after its conversions, as matrix products to price: one if the
    weights are joined, one per panel under SUMMA."""
    x = operation.inputs[0]
    assert isinstance(x, Spec)
    x_sizes = dict(zip(group.x_dims, group.x.after, strict=True))
    if "rows" in x_sizes:
        x_sizes["rows"] = max(1, round(x_sizes["rows"] * even_share_of_planned_rows_of_spec(planner, x)))
    products = []
    for e in group.einsums:
        sizes = {**dict(zip(e.dims, e.operand.after, strict=True)), **x_sizes}
        if panels := group.panels:
            sizes[panels.dim] = planner.tensor_sizes(x)[panels.dim] // panels.count
        rows_of = "rows" in x_sizes and "experts" in e.dims
        shared = [d for d in e.dims if d in e.x_dims and d in e.out_dims]
        batch = prod(sizes[d] for d in shared) if not rows_of else sizes["experts"]
        rows = prod(sizes[d] for d in e.x_dims if d in e.out_dims and d not in e.dims)
        columns = prod(sizes[d] for d in e.dims if d not in e.x_dims and not (rows_of and d == "experts"))
        inner = prod(sizes[d] for d in e.x_dims if d in e.dims and d not in e.out_dims)
        narrows = isinstance(operation.inputs[1 + e.index], Parameter) and "vocab" not in e.dims
        product = MatrixProduct(max(1, rows // batch) if rows_of else rows, columns, inner, batch, narrows)
        products += [product] * (group.panels.count if group.panels else 1)
    if group.can_join_operands:
        return [products[0]._replace(columns=sum(p.columns for p in products))]
    return products


EVEN = ("none", "1f1b", "interleaved", "gpipe")  # schedules whose makespan is known without simulating them


Launches = Mapping[Collective, float]  # collective -> how often it is launched


@dataclass(frozen=True)
class PassWork:
    """Work of one pass of a chunk over a microbatch: its `parts`, each with how often it occurs; the collectives of
    parameters that it `hides`, and the gathers that it `fetches` weights by, one by one; the collectives by which it
    `receives` activations of another stage; and the Python `calls` of its host."""

    parts: tuple[tuple[Part, int], ...]
    hides: Launches
    fetches: Launches
    receives: tuple[Collective, ...]
    calls: int = 0


@dataclass(frozen=True)
class StageWork:
    """Work of a stage once a step: the collectives that sum (`reduces`) the gradients of its `buckets`, gather
    `matrices` for the update, and `updated` parameters; bytes of `tied` parameters; elements of its `masters`."""

    reduces: Launches
    buckets: int
    matrices: Launches
    updated: Launches
    tied: float
    masters: int


@dataclass(frozen=True)
class StepWork:
    """Work of a training step: by chunk its `stages`, and passes `forward` and `backward`; by stage `once` a step."""

    plan: Plan
    execution: Execution
    stages: tuple[int, ...]
    forward: tuple[PassWork, ...]
    backward: tuple[PassWork, ...]
    once: tuple[StageWork, ...]


def step_work(plan: Plan, model: RecordableModel, execution: Execution) -> StepWork:
    """Return the work of a training step of a plan. `model`: the plan's."""
    chunk_works, system = record_chunk_work(plan, model, execution), execution.system
    stages = tuple(chunk.stage for chunk in plan.chunks)
    buckets = {stage: list(bucket_collectives(plan.stage_part(stage))) for stage in dict.fromkeys(stages)}
    same: dict[Part, Part] = {}
    alike: dict[frozenset, tuple[tuple[Part, int], ...]] = {}

    def iterate_passes(phase: str) -> Iterator[PassWork]:
        """Yield the passes of all chunks in one phase; equal parts are one object."""
        for number, work in enumerate(chunk_works):
            counted: Counter[Part] = getattr(work, phase)
            key = frozenset(counted.items())
            if key not in alike:
                alike[key] = tuple((same.setdefault(part, part), n) for part, n in counted.items() if n)
            stage = stages[number]
            moved = _parameter_collectives(plan, buckets[stage], phase, stages.count(stage), system.by_weight)
            calls = work.calls[phase] if system.counts_calls else 0
            yield PassWork(alike[key], *moved, tuple(_iterate_receives(plan, number, phase)), calls)

    return StepWork(
        plan,
        execution,
        stages,
        tuple(iterate_passes("forward")),
        tuple(iterate_passes("backward")),
        tuple(_stage_work(plan, stage, buckets[stage], system.gradient_bytes) for stage in sorted(buckets)),
    )


def _parameter_collectives(
    plan: Plan, buckets: list[BucketCollective], phase: str, chunks: int, by_weight: bool
) -> tuple[Launches, Launches]:
    """Return the collectives of parameters (ZeRO-2 and 3) that a pass of one of a stage's `chunks` hides, and the
    gathers for which it waits; `by_weight` as in System."""
    hides, fetches = Counter[Collective](), Counter[Collective]()
    again = phase == "backward" and plan.recompute.kind == "full"
    for bucket in buckets:
        c, times = bucket.collective, bucket.launches / plan.microbatches / chunks
        if c.phase == phase and by_weight and c.op == "all_gather":
            weights = _count_weights(plan, bucket)
            gathers = 2 * weights - 1 if again else weights  # a layer's last weight is there still from recomputation
            fetches[replace(c, elements=c.elements // weights)] += gathers * times  # type: ignore[assignment]
        elif c.phase == phase:
            hides[replace(c, op="all_reduce") if by_weight else c] += times  # type: ignore[assignment]
    return hides, fetches


def _count_weights(plan: Plan, bucket: BucketCollective) -> int:
    """Return how many weights a collective to price moves; weights that one product joins count once."""
    names = {p.name for p in bucket.parameters}
    inputs = (o.operation.inputs for o in plan.operations.values() if o.groups)
    return max(1, sum(any(isinstance(t, Parameter) and t.name in names for t in each) for each in inputs))


def _iterate_receives(plan: Plan, number: int, phase: str) -> Iterator[Collective]:
    """Yield the collectives, to be priced, that bring chunk `number` what another stage sends it in a pass."""
    chunks = plan.chunks
    first, second = (number - 1, number) if phase == "forward" else (number, number + 1)
    if first >= 0 and second < len(chunks) and chunks[first].stage != chunks[second].stage:
        for _, spec in chunks[first].sends:
            for c, _ in transfer_collectives(plan, spec, chunks[first].stage, chunks[second].stage):
                if c.phase == phase:
                    yield c


def _stage_work(plan: Plan, stage: int, buckets: list[BucketCollective], gradient_bytes: int) -> StageWork:
    """Return what a stage does once a step, after its passes; `gradient_bytes` as in System."""
    stage_plan, at = plan.stage_part(stage), {**plan.mesh.rank_coordinates(0), "stage": stage}
    size = gradient_bytes or plan.itemsize["accumulate"]
    shares = {"gradients": size / plan.itemsize["accumulate"]}
    moved: dict[str, Counter[Collective]] = {place: Counter() for place in ("gradients", "matrices", "parameters")}
    for bucket in (bucket for bucket in buckets if bucket.collective.phase in ("reduce", "update")):
        moved[bucket.place][bucket.collective] += bucket.launches * shares.get(bucket.place, 1.0)  # type: ignore[assignment]
    shared = [(name, stages) for name, stages in plan.stages_of_tied_parameters.items() if stage in stages]
    shards = {name: stage_plan.bucket_by_parameter[name].shard_elements for name, _ in shared}
    tied = sum(2 * (len(stages) - 1) * shards[name] * size for name, stages in shared)
    masters = stage_plan.count_masters_of_rank(at)
    gradients, matrices, parameters = moved.values()
    return StageWork(gradients, len(stage_plan.buckets), matrices, parameters, tied, masters)
