"""Splits and merges of dims."""

from __future__ import annotations

from platform.plan.language.layout import Layout
from platform.plan.operations.op import BlockOp, planned


class ReshapeOp(BlockOp):
    """Activation with one dim split into two adjacent dims, the major one first, or with two adjacent dims merged into
    one; `out`, its new type, decides which. Axes that cut the major dim into equal blocks need not be gathered, nor the
    minor's if a block's extent along the major is 1."""

    def record(self, ops, name, x, spec, out):
        return ops.record(self.kind, name, [x], [spec], [out])

    def plan(self, planner, operation):
        """Plan a layout whose blocks are the same in both shapes, so that reshaping moves nothing: the merged dim is
        split over the major dim's axes, then over the minor's if a block's extent along the major is 1. A conversion
        before and one after it do the rest."""
        spec, out = operation.inputs[0], operation.outputs[0]
        merges = len(spec.dims) > len(out.dims)
        fine, coarse = (spec, out) if merges else (out, spec)
        (merged,) = (d for d in coarse.dims if d not in fine.dims)
        major, minor = (d for d in fine.dims if d not in coarse.dims)
        assert "vocab" not in (merged, major, minor), "vocab may be padded"
        i = coarse.dims.index(merged)
        assert fine.dims == (*coarse.dims[:i], major, minor, *coarse.dims[i + 1 :]), "two neighbours, in place of one"
        have = planner.layout(fine)
        if dict(planner.cuts(fine, have)).get(fine.dims.index(major)):
            have = Layout.of({d: axes for d, axes in have.items() if d != major}, have.only)
        alone = planner.mesh.extent(have[major]) == planner.sizes_of(fine)[major]
        common = Layout.of({**have, minor: have[minor] if alone else ()}, have.only)
        rules = {d: axes for d, axes in common.items() if d not in (major, minor)}
        joint = Layout.of({**rules, merged: (*common[major], *common[minor])}, common.only)
        if merges:
            steps = (spec, planner.layout(spec), common), (out, joint, planner.layout(out))
        else:
            steps = (spec, planner.layout(spec), joint), (out, common, planner.layout(out))
        conversions = [planner.enter(tensor, target, target.axes, source=source) for tensor, source, target in steps]
        return planned(planner, operation, common, conversions)

    def run(self, ops, found, name, x, spec, out):
        """Merge or split the dims of this rank's block of x, which moves nothing."""
        i = next(i for i, (a, b) in enumerate(zip(spec.dims, out.dims, strict=False)) if a != b)
        return x.flatten(i, i + 1) if len(spec.dims) > len(out.dims) else x.unflatten(i, (ops.blocks[out][i][1], -1))

    def meter(self, ops, found, name, x, spec, out):
        """Return x: a reshaped activation takes no new memory."""
        return x
