"""Concatenation of activations."""

from __future__ import annotations

from platform.plan.language.mistakes import ModelMistake
from platform.plan.operations.op import Op


class ConcatenateOp(Op):
    """Activations of the same dims joined along `dim`, whose size in `out` is the sum of theirs. A split `dim` is
    gathered first and the result is split again: blocks of the parts are not blocks of the result."""

    def record(self, ops, name, x, specs, out, dim):
        if len(x) != len(specs):
            raise ModelMistake(name, f"concatenates {len(x)} activations of {len(specs)} declared types")
        return ops.record(self.kind, name, x, specs, [out], dim=dim)

    def whole(self, operation):
        """Return the joined dim, which a rank needs whole in all parts and in the result."""
        dim = operation["dim"]
        assert dim != "vocab", "vocab may be padded: its parts would not lie side by side"
        assert all(t.dims == operation.outputs[0].dims for t in operation.inputs), "parts and whole have the same dims"
        return (dim,)

    def run(self, ops, name, x, specs, out, dim):
        """Join this rank's blocks of activations along `dim`, which is whole on the rank, into one activation."""
        import torch

        *into, leave = ops.planned(self.kind, name).conversions
        parts = [ops.apply(part, conversion) for part, conversion in zip(x, into, strict=True)]
        return ops.apply(torch.cat(parts, 0 if ops.absent(parts[0]) else out.dims.index(dim)), leave)

    def meter(self, ops, name, x, specs, out, dim):
        """Count the bytes of concatenated activations, and of the conversions of the parts between layouts."""
        found = ops.planned(self.kind, name)
        *into, leave = found.conversions
        parts = [ops.apply(part, c) for part, c in zip(x, into, strict=True)]
        whole, count = ops.inner(found, leave), len(parts)
        ops.note([whole], parts, (), lambda gs, _: [gs[0]] * count)
        return ops.apply(whole, leave)
