"""The way of tokens to the slots of their experts, and back."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from platform.plan.language.mistakes import ModelMistake
from platform.plan.operations.op import BlockOp, planned
from platform.plan.operations.storages import Gradients, MeteredStorage, Saved
from platform.plan.operations.tables.route import TOKENS

PLACES = ("experts", "batch", "slots")
SUMMED = 3  # integers that a sum of rows takes for each: its index, where sums begin, and how many rows they have


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
        """Count the memory of the slots, with the numbers of each; where each token lies is kept."""
        n, leave = x.elements, found.conversions[-1]
        slots, places = prod(leave.before[:3]), weights.elements // leave.before[0] * chosen
        held, lies = _places(ops, slots, places, weights.elements)
        read = _tokens(ops, slots), ops.new(slots), ops.integers(SUMMED * slots)
        result = ops.inner(found, leave)
        del held, read

        def backward(_: Gradients, __: Saved) -> Gradients:
            """Count the gradient of the tokens, each a sum over its slots."""
            read = ops.new(places), ops.integers(SUMMED * places)  # noqa: F841  (until the sum is there)
            return [ops.new(n)]

        ops.note([result], [x], (lies,), backward)
        return result


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
        """Count the memory of the weighted sum, with the numbers of each slot; slots, weights and places are kept."""
        shape, by_expert, elements = found.conversions[0].after, weights.elements, y.elements
        slots, places, dtype = prod(shape[:3]), by_expert // shape[0] * chosen, ops.plan.itemsize[of_weights.dtype]
        held, lies = _places(ops, slots, places, by_expert)
        read = ops.new(places, ops.wide), ops.integers(SUMMED * places)
        total = ops.inner(found, found.conversions[-1])
        _rows(ops, total.elements)
        del read

        def backward(_: Gradients, __: Saved) -> Gradients:
            """Count the gradients of slots, each of a token's, and of weights."""
            of_places = ops.new(places, ops.wide), ops.integers(SUMMED * places)
            of_each = ops.new(by_expert, dtype)
            read = _tokens(ops, slots), ops.new(slots, dtype), ops.integers(SUMMED * slots)
            _rows(ops, elements)
            of_slots = ops.new(elements)
            del of_places, read
            return [of_slots, of_each]

        ops.note([total], [y, weights], (y.storage, weights.storage, held, lies), backward)
        return total


def _places(ops, slots: int, places: int, by_expert: int) -> tuple[MeteredStorage, MeteredStorage]:
    """Count the integers that say which token lies in each of the `slots`, and in which `places` each token lies."""
    held, lies = ops.integers(slots), ops.integers(places)
    ops.integers(3 * by_expert)  # while tokens are numbered
    return held, lies


def _tokens(ops, slots: int) -> MeteredStorage:
    """Count the numbers of the tokens in the `slots`, among all tokens of the rank."""
    ops.integers(3 * slots)  # while they are computed
    return ops.integers(slots)


def _rows(ops, elements: int) -> None:
    """Count what a sum of rows takes, of which each is cast to the type of statistics, unless it is that type."""
    if ops.wide != ops.plan.itemsize["compute"]:
        total = ops.new(elements, ops.wide)  # noqa: F841  (beside each row and its cast)
        row = ops.new(elements)  # noqa: F841
        ops.new(elements, ops.wide)
