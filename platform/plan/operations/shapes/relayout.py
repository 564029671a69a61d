"""Moves of an activation to another region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from platform.plan.communication.rule import Conversion, Step
from platform.plan.language.layout import Layout
from platform.plan.operations.op import BlockOp, Op, planned


class RelayoutOp(BlockOp):
    """Activation x in another region, hence another layout, or with renamed dims (length -> memory_length), matched by
    position; `out`: its new type. Its gradient may come partial, and is summed as it moves back."""

    open = {"outputs": "gradient"}

    def record(self, ops, name, x, spec, out):
        if spec == out:
            ops.check(x, spec)
            return x
        return ops.record(self.kind, name, [x], [spec], [out])

    def plan(self, planner, operation):
        """Plan the conversion of an activation from its own layout, its dims renamed, to the output's layout."""
        spec, out = operation.inputs[0], operation.outputs[0]
        renamed = dict(zip(spec.dims, out.dims, strict=True))
        have, goal = planner.layout(spec), planner.layout(out)
        if apart := [d for d in have if planner.units.get(d, 1) != planner.units.get(renamed[d], 1)]:
            raise ValueError(f"{apart[0]} is cut into blocks of whole groups, {renamed[apart[0]]} is not")
        source = Layout.of({renamed[d]: axes for d, axes in have.items()}, have.only)
        conversion = planner.enter(out, goal, (*goal.axes, *goal.gradient), source=source)
        if planner.scheme.slice_via == "all_gather":
            conversion = _without_all_to_all(conversion, planner.scheme.branches)
        return planned(planner, operation, goal, [conversion], only=tuple(a for a in goal.only if a in have.only))

    def run(self, ops, found, name, x, spec, out):
        """Return the activation x, which planned conversions before and after bring to the output's layout."""
        return x

    meter = run


class RelayoutEachOp(Op):
    """Activations that move to other regions together, each a `relayout` with these arguments (name, x, spec, out): all
    their collectives are launched before the first is waited for."""

    def compose(self, ops, *moves):
        return [ops.relayout(*move) for move in moves]

    def run(self, ops, *moves):
        """Return the activations, converted together to the layouts of their outputs."""
        names, blocks, _, _ = zip(*moves, strict=True)
        planned = [ops.plan.operations.get(("relayout", name)) for name in names]
        return ops.apply_each(blocks, [found.conversions[0] if found else Conversion() for found in planned])


def _without_all_to_all(conversion: Conversion, axes: Sequence[str]) -> Conversion:
    """Replace each all-to-all over the branch axes `axes` in a planned conversion by an all-gather and a slice, as
    SUPER (Jain et al.) computes (`branch.slice_via=all_gather`); return the new conversion."""

    def replaced(steps: Sequence[Step]) -> tuple[Step, ...]:
        """Return a conversion's steps with each all-to-all over the branch axes made an all-gather and a slice."""
        out: list[Step] = []
        for s in steps:
            if s.op == "all_to_all" and s.axes[0] in axes:
                out.append(Step("all_gather", s.axes, s.joined, only=s.only, cuts=s.cuts))
                out.append(Step("slice", s.axes, s.dim, only=s.only, cuts=s.cuts))
            else:
                out.append(s)
        return tuple(out)

    return replace(conversion, forward=replaced(conversion.forward), backward=replaced(conversion.backward))
