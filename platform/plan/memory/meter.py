"""Base of the memory meter: storages and layout conversions of one rank, from which `platform.plan.memory.metered`
makes its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from platform.plan.communication.planned import PlannedOperation
from platform.plan.communication.rule import APPEAR, VANISH, Conversion, Step
from platform.plan.core.plan import Plan
from platform.plan.language.layout import at_zero
from platform.plan.language.ops import Ops, Parameter, Spec
from platform.plan.memory.storages import Backward, Gradients, Key, Ledger, Saved, Storage, Tape, Value

INTEGER = 8  # bytes of a token id, and of an element's index


class Meter(Ops):
    """Creates storages and converts layouts on the rank at `at`, counting bytes in `ledger`. `tape`: what the backward
    pass will do; `leaves`: gradients of parameters; `deferred`: pending computations of weight gradients, None unless
    the schedule splits them off.

    A tensor without elements stands for an absent block; operations pass it on.
    """

    def __init__(self, plan: Plan, dropout: float, at: Mapping[str, int]):
        self.plan, self.dropout_rate, self.recompute, self.at = plan, dropout, plan.recompute, at
        self.ledger, self.tape = Ledger(), Tape()
        self.leaves: dict[Key, Storage] = {}
        self.deferred: list[Callable[[], None]] | None = None
        self.wide = plan.itemsize["accumulate"]
        self.grad = True

    def new(self, elements: int, itemsize: int = 0, *, parameter: bool = False) -> Storage:
        """Allocate `elements` floating-point numbers, of the compute type unless `itemsize` is given."""
        return Storage(self.ledger, elements * (itemsize or self.plan.itemsize["compute"]), elements, parameter)

    def integers(self, elements: int, itemsize: int = INTEGER) -> Storage:
        return Storage(self.ledger, elements * itemsize, 0)

    def widened(self, x: Storage | None, elements: int) -> Storage | None:
        """Cast x to the accumulate type, in which statistics are computed: a copy only if that differs."""
        return x if self.wide == self.plan.itemsize["compute"] else self.new(elements, self.wide)

    def block(self, spec: Spec) -> Value:
        """Allocate this rank's block of an activation."""
        elements = prod(self.plan.local_shape(spec)) if self.plan.present(spec, self.at) else 0
        return Value(self.new(elements), elements)

    def note(self, outs: Sequence[Value], ins: Sequence[Value], saved: Saved, backward: Backward) -> None:
        if self.grad:
            self.tape.note(outs, ins, saved, backward)

    def plain(self, out: Value, ins: Sequence[Value], saved: Saved = (), work: int = 0, itemsize: int = 0) -> Value:
        """Record an operation whose backward allocates a gradient per input, with `work` elements of scratch."""
        sizes = [x.elements for x in ins]

        def backward(_: Gradients, __: Saved) -> Gradients:
            held = self.new(work, itemsize) if work else None  # noqa: F841  (until all gradients are allocated)
            return [self.new(n) for n in sizes]

        self.note([out], ins, saved, backward)
        return out

    def convert(
        self, x: Storage | None, elements: int, steps: Sequence[Step], parameter: bool = False
    ) -> tuple[Storage | None, int]:
        """Return the storage and the elements of a tensor after `steps`, as `platform.parallel.sharding.convert` does
        them. A slice, and a block without its padding, are views of the same memory; a collective writes new memory,
        except a broadcast on its root."""
        for step in steps:
            n, index = self.plan.mesh.extent(step.axes), self.plan.mesh.index(self.at, step.axes)
            if step.op in ("all_gather", "gather", "pad"):
                elements *= n
            elif step.op in ("slice", "reduce_scatter"):
                elements //= n
            elif step.op in APPEAR or step.op == "unflatten":
                elements = prod(step.shape)
            if not at_zero(step.only, self.at):
                continue
            if step.op in VANISH and index:
                x, elements = self.new(0, parameter=parameter), 0
            elif step.op not in ("slice", "drop", "flatten", "unflatten") and (step.op != "broadcast" or index):
                x = self._moved(elements, n, step, parameter)
        return x, elements

    def _moved(self, elements: int, n: int, step: Step, parameter: bool) -> Storage:
        """Allocate a collective's result. A split or joined dim that is not first in memory costs a copy, before or
        after."""
        last = step.joined if step.op == "all_to_all" else step.dim
        before = step.op in ("reduce_scatter", "all_to_all", "scatter") and step.dim
        after = step.op in ("all_gather", "gather", "all_to_all") and last
        copy = self.new(elements * (n if step.op == "reduce_scatter" else 1)) if before else None
        out = self.new(elements, parameter=parameter)
        del copy
        return self.new(elements, parameter=parameter) if after else out

    def apply(self, x: Value, conversion: Conversion) -> Value:
        """Apply a differentiable conversion."""
        if not conversion.forward and not conversion.backward:
            return x
        out = Value(*self.convert(x.storage, x.elements, conversion.forward, isinstance(x.key, str)))
        size = out.elements
        self.note([out], [x], (), lambda gs, _: [self.convert(gs[0], size, conversion.backward)[0]])
        return out

    def parameter(self, p: Parameter, conversion: Conversion | None = None) -> Value:
        """Return a parameter as it is stored, or converted for its use."""
        elements = prod(self.plan.stored_shape(p)) * self.plan.present(p, self.at)
        stored = Value(None, elements, p.name)
        return self.apply(stored, conversion) if conversion else stored

    def planned(self, kind: str, name: str) -> PlannedOperation:
        return self.plan.operations[kind, name]

    def inner(self, planned: PlannedOperation, out: Spec, leave: Conversion) -> int:
        """Return the elements of an operation's local result, before `leave` splits it into the layout of `out`."""
        splits = (s.axes for s in leave.forward if s.op in ("slice", "reduce_scatter"))
        there = at_zero(planned.only, self.at)
        return there * prod(self.plan.local_shape(out)) * prod(self.plan.mesh.extent(axes) for axes in splits)

    def recomputed(self, kind, function, spec, x, *more):
        if kind != self.recompute.kind or not self.grad:
            return function(x, *more)
        given, elements, deferred = [v for v in (x, *more) if v], x.elements, self.deferred
        axes = self.plan.kept_axes(spec) if elements else ()
        kept = x.storage
        if axes:
            self.new(elements)  # padded, before it is cut
            kept = self.new(self.plan.shared_elements(spec, axes))
        self.grad = False
        out = function(x, *more)
        self.grad = True
        sizes = [v and v.elements for v in more]

        def backward(gs: Gradients, saved: Saved) -> Gradients:
            others = iter(saved[1:])
            whole = Value(self.new(elements) if axes else saved[0], elements)
            again = [None if n is None else Value(next(others), n) for n in sizes]
            before, self.tape, self.deferred = (self.tape, self.deferred), Tape(), deferred
            out = function(whole, *again)
            (self.tape, self.deferred), tape = before, self.tape
            assert gs[0]
            gradients = {out.key: gs[0]}
            tape.unwind(gradients, self.leaves)
            return [gradients.get(v.key) for v in (whole, *again) if v]

        self.note([out], given, (kept, *(v.storage for v in given[1:])), backward)
        return out
