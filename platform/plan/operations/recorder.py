"""Recorder, which turns a model's forward pass into the list of its operations, and the legality of their plan:
`violations_of_layouts` has one message per violation, with the nearest legal values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from platform.plan.layout import UNEVEN, find_divisors
from platform.plan.model_types import (
    AUTO,
    NO_RECOMPUTATION,
    PLAIN,
    Adapter,
    LabelLoss,
    Operation,
    Parameter,
    Recompute,
    Spec,
    tensor_dtype,
)
from platform.plan.operation_plan import rebuilds_inputs
from platform.plan.operations.attention import KeyValueCache
from platform.plan.operations.op import Op
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.planner import Planner
from platform.plan.scheme import REPLICAS, ModelMistake, Scheme, check_specs


@dataclass(frozen=True)
class Symbol:
    """Stand-in for an activation while a model's forward pass is recorded; it carries only the type, and if it is cheap
    to make again, what it is `made_by`: a norm, or a function of elements by name."""

    spec: Spec
    made_by: str = ""


@dataclass
class Recorder(Ops):
    """Records the operations of a model's forward pass as data, without computing anything; the scheme decides
    `fuses_attention`. A data tensor is represented by its name. `loss`: the training loss, in place of
    cross-entropy."""

    scheme: Scheme
    dropout_rate: float = 0.0
    recompute: Recompute = NO_RECOMPUTATION
    fused_dropout: bool = False
    attention_kernel: str = AUTO
    loss: LabelLoss = PLAIN
    operations: list[Operation] = field(default_factory=list)
    # of which nothing is planned: (operations before it, its words)
    functions: list[tuple] = field(default_factory=list)
    kept: list[Spec] = field(default_factory=list)  # type of x of every recomputed function
    sizes: Mapping[str, int] = field(default_factory=dict)  # dim -> size; {}: dims are not checked
    declared: Mapping[str, Parameter] = field(default_factory=dict)  # by name; {}: parameters are not checked
    cache: KeyValueCache | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    leaves_out: bool = True  # results of recomputed operations that no gradient needs
    span: int = 0  # stretch of the forward pass under way: odd in a block, even between blocks
    spans: list[int] = field(default_factory=list)  # by operation
    blocks: list[tuple[str, int, int]] = field(default_factory=list)  # name, and the range of its operations
    weights_of_rows: dict[str, Symbol] = field(default_factory=dict)  # by counts: what is sent with copies of tokens
    _names: set[tuple[str, str]] = field(default_factory=set)
    _legal: set[object] = field(default_factory=set)  # keys of operations whose tensors are legal
    _recomputing: bool = False

    def bind_operation(self, op: Op) -> Callable[..., Any]:
        return partial(op.record_operation, self)

    @property
    def recording_key(self) -> tuple:
        """Return all on which depends what this recorder finds in a model: of the scheme what it asks of it."""
        options = self.dropout_rate, self.recompute, self.fused_dropout, self.attention_kernel, self.loss
        adapters = tuple(self.adapters.values())
        return self.scheme.described_regions, self.scheme.uneven, self.scheme.ring, *options, self.leaves_out, adapters

    def recomputed(self, kind, name, function, spec, x, *more):
        """Record `function`, and that its operations are recomputed if activations of this `kind` are."""
        is_recomputed, is_block = kind == self.recompute.kind, kind == "full"
        if is_recomputed:
            self.check_activation(x, spec)
            self.kept.append(spec)
            self._recomputing = True
        self.span += is_block
        begun = len(self.operations)
        out = function(x, *more)
        self.span += is_block
        if is_block:
            self.blocks.append((name, begun, len(self.operations)))
        if is_recomputed:
            self._recomputing = False
        if is_recomputed and is_block and self.leaves_out:
            self._mark_unneeded_product(begun)
        return out

    def _mark_unneeded_product(self, first_operation: int) -> None:
        """Mark the last product of a recomputed stretch, whose operations begin at `first_operation`, if no gradient
        needs its result: all behind it add or drop."""
        last = len(self.operations) - 1
        while last >= first_operation and _needs_no_value(self.operations[last]):
            last -= 1
        behind = [words[1:] for words in self.functions if words[0] > last]
        if last >= first_operation and all(words[:2] == ("pointwise", "add") for words in behind):
            o = self.operations[last]
            if o.kind == "project" and len(o.outputs) == 1:
                self.operations[last] = replace(o, once=True)

    def record_operation(
        self,
        kind: str,
        name: str,
        x: Sequence,
        inputs: Sequence,
        outputs: Sequence[Spec],
        reads: Sequence[str | None] = (),
        **more: Any,
    ) -> Any:
        """Append an operation to the recorded forward pass of a model; return the symbol of its result, or a tuple of
        several. `x`: the activations, checked against the types with which `inputs` starts; `reads`: the data tensors
        that it reads, if not None; `more`: its attributes."""
        for activation, declared in zip(x, inputs, strict=False):
            self.check_activation(activation, declared)
        attributes = tuple(sorted(more.items()))
        read = tuple(name for name in reads if name)
        operation = Operation(kind, name, tuple(inputs), tuple(outputs), attributes, read, self._recomputing)
        self._refuse_illegal_operation(operation)
        self.operations.append(operation)
        self.spans.append(self.span)
        symbols = tuple(Symbol(s) for s in outputs)
        return symbols[0] if len(symbols) == 1 else symbols

    def _refuse_illegal_operation(self, o: Operation) -> None:
        """Refuse a recorded operation of a model with ModelMistake if its tensors are illegal, if a parameter is not
        declared or declared otherwise, if they are of several branches, or if one of its kind already has its name."""
        kind, name = o.kind, o.name
        if o.nameless_key not in self._legal:  # layers are alike
            self._refuse_illegal_tensors(o)
            self._legal.add(o.nameless_key)
        for p in (t for t in o.inputs if isinstance(t, Parameter)):
            if self.declared and (declared := self.declared.get(p.name)) is not p and declared != p:
                known = "is declared otherwise" if p.name in self.declared else "is not declared"
                legal = self.declared if p.name not in self.declared else ()
                raise ModelMistake(p.name, f"a parameter that {known}, in {kind} {name}", legal)
        places = dict.fromkeys(t.place for t in (*o.inputs, *o.outputs))
        if len(places) > 1 and not OPERATIONS[kind].joins_branches:
            branches = ", ".join(f"branch {place.number}" if place else "no branch" for place in places)
            raise ModelMistake(name, f"has tensors of {branches}, in {kind}", ["split_branches", "sum_branches"])
        if (kind, name) in self._names:
            raise ModelMistake(name, f"several operations {kind} have this name")
        self._names.add((kind, name))

    def _refuse_illegal_tensors(self, o: Operation) -> None:
        """Refuse a recorded operation of a model with ModelMistake if a tensor of it has an unknown region or dim, or
        does not compute in the type of statistics where it should."""
        kind, name = o.kind, o.name
        if self.sizes:
            check_specs(f"{kind} {name}", [*o.inputs, *o.outputs], self.sizes)
        for end, tensors in (("inputs", o.inputs), ("outputs", o.outputs)):
            word = OPERATIONS[kind]
            for t in (t for t in tensors if isinstance(t, Spec) and t.open):
                if word.open.get(end) != t.open:
                    raise ModelMistake(name, f"{end} of {kind} are complete, unlike {t}")
            if end not in word.wide and (wide := [t for t in tensors if tensor_dtype(t) != "compute"]):
                raise ModelMistake(name, f"{end} of {kind} are in the compute type, unlike {wide[0]}")

    def note_operation(self, *words: Any) -> None:
        """Take note of a function element by element, of which nothing is planned, by `words` that say which it is."""
        self.functions.append((len(self.operations), *words))

    def origin_attributes(self, x: Symbol) -> dict[str, str]:
        """Return the attribute of a product that says what makes its x again, none where x is kept instead."""
        made_by = getattr(x, "made_by", "")
        return {"made_by": made_by} if made_by and not self._recomputing and rebuilds_inputs(self.sizes) else {}

    def check_activation(self, x: Symbol, spec: Spec) -> None:
        """Raise ModelMistake if x is no activation, or one of another type than the `spec` that a model declares."""
        if not isinstance(x, Symbol):
            raise ModelMistake(type(x).__name__, f"what flows is what an operation returned, as {spec}")
        if x.spec != spec:
            raise ModelMistake(str(x.spec), f"the model passes it where it declares {spec}", [str(spec)])

    def uses_ring_attention(self, name, spec, kv, apart) -> bool:
        alone = apart and self.scheme.fuses_attention(spec.region) and not self.is_dim_split(spec, "length")
        goes_around = alone or self.scheme.has_ring_attention(spec.region, kv.region)
        return not self.cache and not self.dropout_rate and goes_around

    def is_dim_split(self, spec, dim) -> bool:
        return bool(self.scheme.regions[spec.region][dim])

    def fuses_attention(self, name, spec) -> bool:
        return (self.fused_dropout or not self.dropout_rate) and self.scheme.fuses_attention(spec.region)


def _needs_no_value(o: Operation) -> bool:
    """Return True if no gradient of a recorded operation depends on a value of its inputs."""
    return OPERATIONS[o.kind].needs_no_value or (o.kind, o.name) == (Ops.pointwise.kind, "add")


_ELSEWHERE = "on another axis, or on none"
OWN_HEADS = "linear_key_heads", "linear_value_heads"  # keys of heads of delta rules, whose dim is heads too
KEYS = {"batch": "train.microbatch", "length": "model.length", "memory_length": "model.length"}


class IllegalPlan(ValueError):
    """Error for layouts, sizes or stages under which a model cannot be executed. `violations` has one line each."""

    def __init__(self, violations: Sequence[str]):
        """Construct the error from one line per violation by the layouts of a model's operations."""
        self.violations = list(violations)
        super().__init__("\n".join(self.violations))


def violations_of_layouts(planner: Planner, operations: Sequence[Operation], microbatch: int) -> list[str]:
    """Check the layouts of all operations that are recorded of a model, before each plans itself: return one message
    per axis that would split two dims of an operation's tensor and per dim that its axes do not divide, with the places
    and the nearest legal values. `microbatch`: sequences per microbatch and replica."""
    alike = list({o.nameless_key: o for o in operations}.values())  # which are legal in nearly all plans
    if len(alike) < len(operations) and not violations_of_layouts(planner, alike, microbatch):
        return []
    clashes: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)  # (axis, dim, dim) -> operations
    splits: dict[tuple[str, int, tuple[str, ...]], dict[str, None]] = defaultdict(dict)  # (dim, size, axes) -> regions
    for o in operations:
        for t in (*o.inputs, *o.outputs):
            layout = planner.layout(t)
            if clash := layout.find_conflict():
                clashes[clash][f"{o.kind} {o.name}: {t if isinstance(t, Spec) else ' '.join(t.dims)}"] = None
            sizes = {**planner.tensor_sizes(t), "batch": microbatch}
            for d, axes in {**layout, **planner.row_expert_axes(t)}.items():
                splits[d, sizes[d], axes][t.region if isinstance(t, Spec) else "parameters"] = None
    lines = [_clash_message(*clash, list(places)) for clash, places in clashes.items()]
    for (d, size, axes), regions in splits.items():
        if line := _division_message(planner, d, size, axes, list(regions)):
            lines.append(line)
    return lines


def message_of_illegal_operation(o: Operation, error: ValueError) -> str:
    """Return the message that the model's operation `o` cannot plan itself, by the `error` of doing so: the iteration
    space of an operation of legal tensors can still be illegal."""
    return f"tensor: illegal layout: in {o.kind} {o.name}, {error}; legal: one of them {_ELSEWHERE}"


def _clash_message(axis: str, first: str, second: str, places: Sequence[str]) -> str:
    """Return the message that `axis` would split dims `first` and `second` of operations' tensors in `places`."""
    others_note = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return (
        f"tensor: illegal layout: axis {axis} would split both {first} and {second} in {places[0]}{others_note};"
        f" legal: {first} or {second} {_ELSEWHERE}"
    )


def _division_message(planner: Planner, d: str, size: int, axes: Sequence[str], regions: Sequence[str]) -> str | None:
    """Return the message that `axes` do not divide dim `d`, of global size `size`, of operations in the regions
    `regions`, with the nearest legal sizes of both, or None if they do or cut it unevenly. Replicas always divide
    batch; vocab is padded where it is not cut unevenly."""
    axes = [a for a in axes if d != "batch" or a not in REPLICAS]
    n = planner.mesh.count_ranks(axes)
    if size % n == 0 or (d == "vocab" and not planner.scheme.uneven) or (planner.can_cut_unevenly(d) and size >= n):
        return None
    has_own_length = d in ("length", "memory_length") and size != planner.sizes[d]
    linear = [name for name, n in planner.sizes.items() if name in OWN_HEADS and n == size != planner.sizes[d]]
    own = f"model.{linear[0]}" if d == "heads" and linear else KEYS.get(d, f"model.{d}")
    key = "model.source_length" if has_own_length else own
    axis_extents = " x ".join(f"{planner.scheme.key_of_axis(a)}={planner.mesh.axes[a]}" for a in axes)
    sizes = " or ".join(str(k) for k in _legal_sizes(planner, d, size, n) if k and d != "rows")  # which no key sets
    either = f"{key}={sizes}, or " if sizes else ""
    either += "tensor.uneven=true, or " if d in UNEVEN and size >= n and not planner.scheme.uneven else ""
    return (
        f"{key}={size} is not divisible by {axis_extents} ({', '.join(regions)});"
        f" nearest legal: {either}{', or '.join(_list_legal_extent_hints(planner, size, axes))}"
    )


def _list_legal_extent_hints(planner: Planner, size: int, axes: Sequence[str]) -> list[str]:
    """Return hints on `axes`, whose product does not divide the `size` of an operation's dim: per axis the extents next
    below and next above that divide it beside the others, or extents of all of them, of which one is not 1, if a change
    of one axis cannot."""
    n, hints = planner.mesh.count_ranks(axes), []
    for a in axes:
        extent = planner.mesh.axes[a]
        if size % (n // extent) == 0:
            hints.append(f"{planner.scheme.key_of_axis(a)}={_nearest_divisors(size // (n // extent), extent)}")
    *others, last = map(planner.scheme.key_of_axis, axes)
    return hints or [
        " ".join([*(f"{key}=1" for key in others if key != last), f"{last}={_nearest_divisors(size, n).split()[0]}"])
    ]


def _nearest_divisors(size: int, n: int) -> str:
    """Return the divisors next below and next above n, which is none, of the `size` of an operation's dim: "2 or 4"."""
    below, above = [k for k in find_divisors(size) if k < n], [k for k in find_divisors(size) if k > n]
    return " or ".join(map(str, [*below[-1:], *above[:1]]))


def _legal_sizes(planner: Planner, d: str, size: int, n: int) -> list[int]:
    """Return the sizes of an operation's dim `d` next below and next above `size` that n ranks divide, 0 for none:
    multiples of n; for heads that share d_model, only divisors of it."""
    if d == "heads" and planner.sizes["d_model"] == size * planner.sizes["d_kv"]:
        legal = [k for k in find_divisors(planner.sizes["d_model"]) if k % n == 0 and k <= 2 * max(size, n)]
        return [max((k for k in legal if k < size), default=0), min((k for k in legal if k > size), default=0)]
    return [size // n * n, size // n * n + n]  # `size` itself is no multiple
