"""Sinusoidal positions."""

from __future__ import annotations

from platform.plan.operations.op import BlockOp


class SinusoidOp(BlockOp):
    """scale * x plus the sinusoidal encoding ("Attention Is All You Need", 3.5) of the index along length, or of the
    data tensor `positions` [length, batch]: sines at even indices of d_model, cosines at odd ones."""

    def record(self, ops, name, x, spec, scale, positions=None):
        return ops.record(self.kind, name, [x], [spec], [spec], [positions], scale=scale)

    def run(self, ops, found, name, x, spec, scale, positions=None):
        """Compute the sinusoidal position encoding of this rank's block, and add it to scale * x."""
        assert spec.dims == ("length", "batch", "d_model")
        if positions is None:
            length = ops.positions(spec, "length", x.device).unsqueeze(1)
        else:
            length = positions[self.kind, name]
        d_model = ops.positions(spec, "d_model", x.device)
        table = ops.kernels.positions.sinusoid(length.flatten(), d_model, ops.plan.sizes["d_model"])
        return x * scale + table.unflatten(0, length.shape).to(x.dtype)

    def meter(self, ops, found, name, x, spec, scale, positions=None):
        """Count the bytes of a scaled activation and of its sum with the sinusoidal position encoding."""
        scaled = ops.new(x.elements)
        out = ops.plain(ops.block(spec), [x])
        del scaled
        return out
