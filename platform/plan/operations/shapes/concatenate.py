"""Concatenation of activations."""

from __future__ import annotations

from platform.plan.language.mistakes import ModelMistake
from platform.plan.operations.op import Op


class ConcatenateOp(Op):
    """Activations joined along `dim`, whose size in `out` is the sum of theirs. A split `dim` is gathered first and the
    result is split again: blocks of the parts are not blocks of the result. A part that lacks dims of the result is
    the same all along them, as the rotary key of multi-head latent attention is for all heads."""

    def record(self, ops, name, x, specs, out, dim):
        if len(x) != len(specs):
            raise ModelMistake(name, f"concatenates {len(x)} activations of {len(specs)} declared types")
        return ops.record(self.kind, name, x, specs, [out], dim=dim)

    def whole(self, operation):
        """Return the joined dim, which a rank needs whole in all parts and in the result."""
        dim = operation["dim"]
        assert dim != "vocab", "vocab may be padded: its parts would not lie side by side"
        dims = operation.outputs[0].dims
        assert all(t.dims == tuple(d for d in dims if d in t.dims) for t in operation.inputs), "dims in one order"
        return (dim,)

    def run(self, ops, name, x, specs, out, dim):
        """Join this rank's blocks of activations along `dim`, which is whole on the rank, into one activation."""
        import torch

        *into, leave = ops.planned(self.kind, name).conversions
        parts = ops.apply_each(x, into)
        if ops.absent(parts[0]):
            return ops.apply(torch.cat([part.flatten() for part in parts]), leave)
        whole = dict(zip(out.dims, ops.shape_before(leave), strict=True)) | {dim: -1}
        for i, spec in enumerate(specs):
            where = tuple(slice(None) if d in spec.dims else None for d in out.dims)
            parts[i] = parts[i][where].expand(*whole.values())
        return ops.apply(torch.cat(parts, out.dims.index(dim)), leave)

    def meter(self, ops, name, x, specs, out, dim):
        """Count the bytes of concatenated activations, and of the conversions of the parts between layouts."""
        found = ops.planned(self.kind, name)
        *into, leave = found.conversions
        parts = ops.apply_each(x, into)
        whole, alike = ops.inner(found, leave), [spec.dims != out.dims for spec in specs]
        sizes = [part.elements for part in parts]
        given = list(zip(alike, sizes, strict=True))
        ops.note([whole], parts, (), lambda gs, _: [ops.new(n) if summed else gs[0] for summed, n in given])
        return ops.apply(whole, leave)
