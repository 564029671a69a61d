"""Rotary position embedding."""

from __future__ import annotations

from platform.plan.operations.op import BlockOp
from platform.plan.operations.storages import Value


class RotateOp(BlockOp):
    """Rotary position embedding with base `theta` of queries or keys, over d_kv at global positions along length
    (RoFormer; half-split pairs), with angles scaled as `scaling` says."""

    def record(self, ops, name, x, spec, theta, scaling=None):
        return ops.record(self.kind, name, [x], [spec], [spec], theta=theta, scaling=scaling)

    def whole(self, operation):
        """Return d_kv, which a rank needs whole, as the two elements of a rotated pair lie half of it apart."""
        return ("d_kv",)  # rotated pairs lie half of it apart

    def run(self, ops, found, name, x, spec, theta, scaling=None):
        """Compute queries or keys rotated by the angles of their positions, which all layers share."""
        positions = ops.kernels.positions
        wide = ops.kernels.statistics.widened(x).dtype
        where = ops.offset, *ops.blocks[spec][spec.dims.index("length")]
        if (key := (where, x.shape[-1], theta, scaling, wide, x.device)) not in ops.angles:
            length = ops.positions(spec, "length", x.device)
            ops.angles[key] = positions.angles(length, x.shape[-1], theta, wide, scaling)
        shape = [n if d in ("length", "d_kv") else 1 for d, n in zip(spec.dims, x.shape, strict=True)]
        cos, sin = (t.view(shape) for t in ops.angles[key])
        return positions.rotate(x, cos, sin, ops.region(positions.rotated))

    def meter(self, ops, found, name, x, spec, theta, scaling=None):
        """Count the bytes of rotary queries or keys, computed in the type of statistics; nothing is kept."""
        same, n = ops.wide == ops.plan.itemsize["compute"], x.elements
        wide = ops.widened(x.storage, n)
        whole = ops.new(n, ops.wide)
        out = Value(whole if same else ops.new(n), n)
        del wide, whole
        return ops.plain(out, [x], (), 0 if same else 2 * n, ops.wide)
