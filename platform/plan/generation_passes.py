"""Passes of generation: plans of the same model for a few new tokens of every sequence, whose attention also reads what
the passes before have left.

A pass of one token has no length to split. So the axes that split length in training split batch instead: rows are
rows, and the one communication rule says what moves. Where there are fewer long texts than ranks that share a sequence
in training, these share each text here too: every rank keeps a part of its keys and values, reads a part of its tokens,
and all attend together. Weights stay as the run's plan lays them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

from platform.plan.adapters import adapter_sizes, list_adapter_parameters
from platform.plan.chunks import Chunk, RecordableModel, RecordedChunk
from platform.plan.layout import Layout, Mesh, pad_to_multiple
from platform.plan.model_types import NO_RECOMPUTATION, Adapter, Parameter, Spec
from platform.plan.operations.attention import KeyValueCache
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.plan import Plan
from platform.plan.plan_builder import plan_operations
from platform.plan.planner import Planner
from platform.plan.rule import Conversion, relayout_steps
from platform.plan.schedule import Action, Kind
from platform.plan.scheme import REPLICAS, ModelMistake, Scheme, raise_model_mistakes

HEAD = "head"  # the last unit of a model that is asked for logits
ROOM = 64  # tokens of which the room in a cache is a multiple, so that batches of like length share their passes
SCORED = 64  # tokens of each text whose logits are there at once
PIECE = 256  # tokens of a text that one pass reads at most: attention's mask grows with them


@dataclass(frozen=True)
class PassShape:
    """Sizes of a pass: `tokens` new ones of each of `batch` sequences, of which all passes together hold `capacity`;
    logits are asked of the last `asked` ones. `reads`: an encoder reads its source in this pass; `shared`: ranks of a
    context share each sequence."""

    tokens: int
    batch: int
    capacity: int
    asked: int = 1
    reads: bool = False
    shared: bool = False


def generation_scheme(scheme: Scheme, shares_sequences: bool = False, split: bool = False) -> Scheme:
    """Return the scheme of layouts for a pass of generation: axes that split length in training split batch instead.
    Where sequences are `shares_sequences`, axes of contexts split their keys and values in the core of attention, in
    consecutive parts, and if `split`, length everywhere else."""
    shared_axes = [axis for axis, _ in scheme.context] if shares_sequences else []

    def generation_layout(region: str, layout: Layout) -> Layout:
        """Return a region's layout in which the mesh axes that split length split batch instead, after its own."""
        rules = {dim: [a for a in axes if a not in shared_axes] for dim, axes in layout.items() if dim != "length"}
        rules["batch"] = [*layout["batch"], *(a for a in layout["length"] if a not in shared_axes)]
        if region == "core":
            rules["memory_length"] = [*shared_axes, *layout["memory_length"]]
        elif split:
            rules["length"] = shared_axes
        return Layout.build_canonical(rules, layout.only)

    regions = {r: generation_layout(r, layout) for r, layout in scheme.regions.items()}
    return replace(scheme, regions=regions, zigzag="", rounds=1)


def generation_batch_unit(scheme: Scheme, mesh: Mesh, shared: bool = False) -> int:
    """Return the number that divides a generation pass's sequences, so that axes divide each replica's."""
    regions = generation_scheme(scheme, shared).regions.values()
    inner = ([a for a in layout["batch"] if a not in REPLICAS] for layout in regions)
    return mesh.count_ranks([a for a in REPLICAS if a in mesh.axes]) * lcm(*map(mesh.count_ranks, inner))


def cache_unit(scheme: Scheme, mesh: Mesh, shared: bool = False) -> int:
    """Return the number of which a key-value cache's tokens must be a multiple, so that mesh axes divide them."""
    regions = generation_scheme(scheme, shared).regions.values()
    return lcm(*(mesh.count_ranks(layout["memory_length"]) for layout in regions))


def pad_cache_length(plan: Plan, tokens: int, shared: bool = False) -> int:
    """Return the tokens of each text that a key-value cache for `tokens` of it has room for in passes of generation."""
    return pad_to_multiple(tokens, lcm(ROOM, cache_unit(plan.scheme, plan.mesh, shared)))


def batch_rows(plan: Plan) -> int:
    """Return how many texts a generation pass takes, as many as a training pass has sequences."""
    return pad_to_multiple(plan.sizes["batch"], generation_batch_unit(plan.scheme, plan.mesh))


def ranks_per_text(plan: Plan, texts: int, tokens: int) -> int:
    """Return how many ranks share each of so many `texts` of up to so many `tokens` in passes of generation."""
    # a short text, and one of as many as there are ranks, is a single rank's
    is_shared = texts < generation_batch_unit(plan.scheme, plan.mesh) and tokens > PIECE
    shared_axes = [axis for axis, _ in plan.scheme.context] if is_shared and _can_share_texts(plan) else []
    return plan.mesh.count_ranks(shared_axes)


def _can_share_texts(plan: Plan) -> bool:
    """Return True if ranks of a plan's contexts can share a text: the model's attention is in region core."""
    regions = {o.operation.outputs[0].region for o in plan.attention_operations}
    # an encoder reads its source whole
    encodes = any(unit.startswith("encoder.") for c in plan.chunks for unit in c.units)
    has_states = any(kind == "delta_rule" for kind, _ in plan.operations)  # which lie by heads, whole for a token
    return bool(plan.scheme.context) and regions <= {"core"} and not encodes and not has_states


@dataclass(frozen=True)
class PassPlanner(Planner):
    """Planner of a pass, in which parameters lie as they do in the run's plan: `lying`, by name. A position table whose
    dim is length there is looked up by position here."""

    lying: Mapping[str, Layout] = field(default_factory=dict)

    def _compute_layout(self, tensor: Spec | Parameter) -> Layout:
        if not isinstance(tensor, Parameter):
            return super()._compute_layout(tensor)
        run_layout = self.lying[tensor.name]
        rules = {"positions" if d == "length" and d not in tensor.dims else d: axes for d, axes in run_layout.items()}
        return Layout.build_canonical(rules, run_layout.only)


@dataclass(frozen=True)
class PlannedPass:
    """Pass, as the ranks of one pipeline stage execute it or of all stages together: the `body` up to the head, and the
    `head` on the tokens that are asked. `placement`: number -> stage of the chunks that take part. `logits`: type of
    the logits; `missing`: activations that chunks read and none makes, where an encoder reads nothing: name -> None.
    `joins`: conversion of the stream from body to head; `gathers`: conversion of the logits to the whole vocabulary."""

    body: Plan
    head: Plan
    placement: Mapping[int, int]
    logits: Spec
    missing: Mapping[str, None]
    joins: Conversion
    gathers: Conversion


def plan_pass(plan: Plan, model: RecordableModel, shape: PassShape, stage: int) -> PlannedPass:
    """Plan a pass of generation of `model` under the layouts of the run's `plan`, for one pipeline `stage`; the chunks
    are the plan's, without the encoder's units in a pass that reads no source. `model`: the run's model, with positions
    that are looked up. Raises ModelMistake for a model that does not give logits part by part, IllegalPlan if axes do
    not divide heads or the sizes of the pass."""
    whole_pass = _plan_all_stages(plan, model, shape)
    head = whole_pass.head.stage_part(plan.chunks[-1].stage)
    return replace(whole_pass, body=whole_pass.body.stage_part(stage), head=head)


def _plan_all_stages(plan: Plan, model: RecordableModel, shape: PassShape) -> PlannedPass:
    """Plan a pass of generation as `plan_pass` does, for all pipeline stages together."""
    last, ranks = plan.chunks[-1], plan.mesh.count_ranks([axis for axis, _ in plan.scheme.context])
    lying = {p.name: plan.layout(p) for p in (*plan.parameters, *plan.states)}
    of_adapters = list_adapter_parameters(plan.adapters)
    parameters = (*(p for p in model.parameters() if not p.is_state), *of_adapters)
    if HEAD not in last.units:
        raise ModelMistake(type(model).__name__, f"its last unit is not called {HEAD}, and gives no logits")

    def plan_chunks(
        tokens: int, parts: Sequence[tuple[int, int, Sequence[str]]], flow: dict[str, Any], split: bool = False
    ) -> Plan:
        """Plan the chunks `parts` (number, stage, units) of a generation pass over `tokens` new tokens per sequence,
        which ranks that share these may `split`, from the activations `flow`, which their results replace."""
        scheme = generation_scheme(plan.scheme, shape.shared, split)
        pass_sizes = {"memory_length": shape.capacity, **model.sizes, "length": tokens, "batch": shape.batch}
        pass_sizes |= adapter_sizes(plan.adapters)
        pass_sizes |= {"slots": tokens} if "slots" in pass_sizes else {}  # whatever tokens it has, a pass drops none
        padded = {**pass_sizes, "vocab": plan.planner.sizes["vocab"]}
        planner = PassPlanner(plan.mesh, scheme, padded, {}, frozen=plan.planner.frozen, lying=lying)
        chunks = tuple(_plan_chunk(planner, model, shape, flow, plan.adapters, *part) for part in parts)
        fields: dict[str, Any] = {"planner": planner, "microbatches": 1, "sequences": shape.batch, "sizes": pass_sizes}
        fields |= {"parameters": parameters, "chunks": chunks, "mlp_chunks": 1, "warnings": ()}
        return replace(plan, recompute=NO_RECOMPUTATION, **fields)

    # only a pass that reads a source runs the units of an encoder, and none what the model has for its training alone
    encoder = [u for c in plan.chunks for u in c.units if u.startswith("encoder.") and not shape.reads]
    run = [u for u in getattr(model, "units", ()) if u != HEAD and u not in encoder]
    missing = {"memory": None} if encoder else {}
    parts = [(c.number, c.stage, tuple(u for u in c.units if u in run)) for c in plan.chunks]
    first = next((number for number, _, units in parts if units), last.number)
    parts = [part for part in parts if part[0] >= first]  # streams pass through, and the head follows the last
    flow: dict[str, Any] = dict(missing)
    body = plan_chunks(shape.tokens, parts, flow, shape.shared and shape.tokens % ranks == 0)
    spec = replace(flow["stream"].spec, sizes=())
    head = plan_chunks(shape.asked, [(last.number, last.stage, (HEAD,))], {"memory": None, "stream": Symbol(spec)})
    *others, end = body.chunks
    body = replace(body, chunks=(*others, replace(end, sends=())))
    placement = {number: stage for number, stage, _ in parts}

    def plan_relayout(planner: Planner, spec: Spec, *layouts: Layout) -> Conversion:
        """Plan the conversion of an activation of a generation pass between two layouts."""
        return planner.fill_shapes(Conversion(relayout_steps(spec.dims, *layouts), ()), spec, *layouts)

    joins = plan_relayout(body.planner, spec, *(part.planner.layout(spec) for part in (body, head)))
    logits = dict(head.chunks[-1].sends)["logits"]
    split = head.planner.layout(logits)
    gathers = plan_relayout(head.planner, logits, split, Layout.build_canonical({"batch": split["batch"]}))
    return PlannedPass(body, head, placement, logits, missing, joins, gathers)


def generation_groups(plan: Plan, model: RecordableModel) -> set[tuple[str, ...]]:
    """Return the mesh axes of every process group that generation with `model` needs: the axes of its collectives, in
    mesh order, each axis that splits the logits' vocabulary, and all axes together, to broadcast the chosen tokens."""
    mesh = plan.mesh
    group_axes: set[tuple[str, ...]] = {(axis,) for axis in plan.scheme.regions["logits"].axes}
    shape = PassShape(1, generation_batch_unit(plan.scheme, mesh), cache_unit(plan.scheme, mesh), reads=True)
    shapes = [shape]
    if _can_share_texts(plan):
        group_axes |= {(axis,) for axis, _ in plan.scheme.context}
        rows, unit = (f(plan.scheme, mesh, True) for f in (generation_batch_unit, cache_unit))
        shapes += [PassShape(tokens, rows, unit, shared=True) for tokens in (1, unit)]
    for planned in (_plan_all_stages(plan, model, shape) for shape in shapes):
        operations = [o for part in (planned.body, planned.head) for o in part.operations.values()]
        group_axes |= {mesh.order_axes(c.axes) for o in operations for c in o.collectives if c.phase == "forward"}
        sent = [spec for c in planned.body.chunks for _, spec in (*c.receives, *c.sends)]
        group_axes |= {mesh.order_axes(axes) for spec in sent if (axes := planned.body.scatter_axes(spec))}
    return (group_axes | {mesh.order_axes(mesh.axes)}) - {()}


def _plan_chunk(
    planner: PassPlanner,
    model: RecordableModel,
    shape: PassShape,
    flow: dict[str, Any],
    adapters: Mapping[str, Adapter],
    number: int,
    stage: int,
    units: Sequence[str],
) -> Chunk:
    """Record and plan one model chunk of a pass that generates text: its `number`, pipeline `stage` and `units`.
    `flow`: the activations that it receives by name, replaced in place by its results; `adapters`: the plan's."""
    ops = Recorder(planner.scheme, sizes=planner.sizes, cache=KeyValueCache(shape.capacity), adapters=adapters)
    receives = tuple((name, x.spec) for name, x in flow.items() if x is not None)
    absent = {name: x for name, x in flow.items() if x is None}
    inputs = {name: name for name in (*model.inputs, "positions", "begins") if name != "labels"}
    with raise_model_mistakes(model):
        activations = model.part(ops, inputs, dict(flow), units)
    flow.clear()
    flow.update(absent | activations)
    microbatch = shape.batch // planner.num_replicas
    sends = tuple((name, x.spec) for name, x in activations.items() if x is not None)
    operations = plan_operations(planner, ops.operations, microbatch)
    return RecordedChunk(units, ops, receives, sends).build_chunk(number, stage, operations)


def pass_row(placement: Mapping[int, int], stage: int) -> tuple[Action, ...]:
    """Return one pipeline stage's schedule of forward passes, sends and receives for a generation pass of one
    microbatch through the chunks of `placement`, chunk number -> stage, in order of the numbers."""
    row: list[Action] = []
    for chunk in sorted(placement):
        before, after = (placement.get(chunk + offset, placement[chunk]) for offset in (-1, 1))
        if placement[chunk] == stage:
            row += [Action(Kind.RECV_F, 0, chunk, before)] if before != stage else []
            row.append(Action(Kind.FORWARD, 0, chunk))
            row += [Action(Kind.SEND_F, 0, chunk, after)] if after != stage else []
    return tuple(row)
