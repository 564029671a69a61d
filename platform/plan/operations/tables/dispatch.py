"""The way of tokens to the slots of their experts, and back."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from platform.plan.language.mistakes import ModelMistake
from platform.plan.operations.op import BlockOp, planned
from platform.plan.operations.tables.route import TOKENS

PLACES = ("experts", "batch", "slots")


def _check(name: str, spec, out) -> None:
    """Raise ModelMistake if tokens of type `spec` do not go to places of type `out`, or back."""
    wanted = (*TOKENS, *out.dims[3:])
    if out.dims[:3] != PLACES or spec.dims != wanted or len(wanted) != 3 or spec.dtype != out.dtype:
        raise ModelMistake(
            name, f"tokens [length batch d] have places [experts batch slots d], unlike {spec} and {out}"
        )


class DispatchOp(BlockOp):
    """Activation x of type `spec` [length batch d_model] in the slots of experts: `out` [experts batch slots d_model].
    A token lies in the next free slot of each of its sequence's experts whose weight, of type `of_weights`, is not 0:
    at most `chosen` of them; empty slots are 0. It computes where the sequences are, each of them whole; the result is
    then converted, by an all-to-all where an axis moves from batch to experts. The slots' gradient may be partial: it
    is summed as the tokens' gradient, which is smaller."""

    wide = ("inputs",)
    open = {"outputs": "gradient"}

    def record(self, ops, name, x, spec, weights, of_weights, out, chosen):
        _check(name, spec, out)
        return ops.record(self.kind, name, [x, weights], [spec, of_weights], [out], chosen=chosen)

    def plan(self, planner, operation):
        """Plan the gathers of whole sequences, and the conversion of the slots; weights get no gradient from here."""
        (spec, of_weights), (out,) = operation.inputs, operation.outputs
        goal = planner.layout(out)
        layout = planner.layout(spec).restrict(spec.dims[1:]).without(goal.gradient)
        given = planner.enter(of_weights, layout.restrict(of_weights.dims), layout.axes)
        enter = planner.enter(spec, layout, (*layout.axes, *goal.gradient))
        leave = planner.enter(out, goal, goal.axes, source=layout)
        conversions = [enter, replace(given, backward=()), leave]
        return planned(planner, operation, layout, conversions)

    def run(self, ops, found, name, x, spec, weights, of_weights, out, chosen):
        """Copy this rank's tokens to the slots of all experts."""
        return ops.kernels.slots.dispatch(x, weights.detach(), ops.plan.planner.sizes_of(out)["slots"], chosen)

    def meter(self, ops, found, name, x, spec, weights, of_weights, out, chosen):
        """Count the memory of the slots; of the tokens' places integers are kept."""
        slots, n = ops.inner(found, found.conversions[-1]), x.elements
        places = _places(ops, found.conversions[-1].before, weights.elements, chosen)
        ops.note([slots], [x], (places,), lambda gs, _: [ops.new(n)])
        return slots


class CombineOp(BlockOp):
    """Sum over its experts of what they made of each token, `y` of type `spec` [experts batch slots d_model], times
    their weights: `out` [length batch d_model], 0 for tokens without an expert. If `y` is partial, so are these sums,
    which are smaller, and summed over ranks last."""

    wide = ("inputs",)
    open = {"inputs": "value"}

    def record(self, ops, name, y, spec, weights, of_weights, out, chosen):
        _check(name, out, spec)
        return ops.record(self.kind, name, [y, weights], [spec, of_weights], [out], chosen=chosen)

    def plan(self, planner, operation):
        """Plan the sum where the sequences are: the slots of all experts are converted to there."""
        (spec, of_weights), (out,) = operation.inputs, operation.outputs
        partial = planner.layout(spec).partial
        layout = planner.layout(out).restrict(out.dims[1:]).without(partial)
        enter = planner.enter(spec, replace(layout.restrict(spec.dims), partial=partial), layout.axes)
        given = planner.enter(of_weights, layout.restrict(of_weights.dims), (*layout.axes, *partial))
        leave = planner.split(out, replace(layout, partial=partial))
        return planned(planner, operation, layout, [enter, given, leave])

    def run(self, ops, found, name, y, spec, weights, of_weights, out, chosen):
        """Add up what the experts made of this rank's tokens, in the type of statistics."""
        return ops.kernels.slots.combine(y, weights, chosen)

    def meter(self, ops, found, name, y, spec, weights, of_weights, out, chosen):
        """Count the memory of the weighted sum; slots and weights are kept."""
        total = ops.inner(found, found.conversions[-1])
        places = _places(ops, found.conversions[0].after, weights.elements, chosen)
        n, slots, by_expert = total.elements, y.elements, weights.elements
        scratch = 0 if ops.wide == ops.plan.itemsize["compute"] else 2 * n  # rows of one place, in the wider type
        ops.new(scratch, ops.wide)
        saved = y.storage, weights.storage, places
        of_weights = ops.plan.itemsize[of_weights.dtype]
        ops.note(
            [total],
            [y, weights],
            saved,
            lambda gs, _: [ops.new(slots), _with_scratch(ops, by_expert, scratch, of_weights)],
        )
        return total


def _places(ops, slots: tuple[int, ...], by_expert: int, chosen: int):
    """Count the integers that say which token lies in each slot, and in which slots each token lies."""
    places = ops.integers(prod(slots[:3]) + by_expert // slots[0] * chosen)
    ops.integers(3 * by_expert)  # while tokens are numbered
    return places


def _with_scratch(ops, elements: int, scratch: int, itemsize: int = 0):
    """Allocate a gradient of `elements`, of `itemsize` as in `Meter.new`, and rows that are added to it."""
    out = ops.new(elements, itemsize)
    ops.new(scratch)
    return out
