"""Rotary position embedding."""

from __future__ import annotations

from platform.plan.operations.op import BlockOp
from platform.plan.operations.storages import Value


class RotateOp(BlockOp):
    """Rotary position embedding with base `theta` of queries or keys, over d_kv at global positions along length
    (RoFormer), with angles scaled as `scaling` says. `width`: number of elements that rotate, at the end of d_kv, 0 for
    all; `pairs`: `halves` if the two elements of a pair are half of these apart, or `neighbours`."""

    def record(self, ops, name, x, spec, theta, scaling=None, width=0, pairs="halves"):
        more = {"theta": theta, "scaling": scaling, "width": width, "pairs": pairs}
        return ops.record(self.kind, name, [x], [spec], [spec], **more)

    def whole(self, operation):
        """Return d_kv, which a rank needs whole, as the two elements of a rotated pair lie half of it apart."""
        return ("d_kv",)

    def run(self, ops, found, name, x, spec, theta, scaling=None, width=0, pairs="halves"):
        """Compute queries or keys rotated by the angles of their positions, which all layers share."""
        positions = ops.kernels.positions
        wide = ops.kernels.statistics.widened(x).dtype
        turned = width or x.shape[-1]
        where = ops.offset, *ops.blocks[spec][spec.dims.index("length")]
        if (key := (where, turned, theta, scaling, pairs, wide, x.device)) not in ops.angles:
            length = ops.positions(spec, "length", x.device)
            ops.angles[key] = positions.angles(length, turned, theta, wide, scaling, pairs)
        sizes = dict(zip(spec.dims, x.shape, strict=True)) | {"d_kv": turned}
        shape = [n if d in ("length", "d_kv") else 1 for d, n in sizes.items()]
        cos, sin = (t.view(shape) for t in ops.angles[key])
        return positions.rotate(x, cos, sin, pairs, ops.region(positions.rotated))

    def meter(self, ops, found, name, x, spec, theta, scaling=None, width=0, pairs="halves"):
        """Count the bytes of rotary queries or keys, computed in the type of statistics; nothing is kept."""
        d_kv = ops.plan.local_shape(spec)[spec.dims.index("d_kv")]
        same, n = ops.wide == ops.plan.itemsize["compute"], x.elements
        turned = n // d_kv * (width or d_kv)
        wide = ops.widened(x.storage, turned)
        part = ops.new(turned, ops.wide)
        part = part if same else ops.new(turned)
        out = Value(part if turned == n else ops.new(n), n)
        del wide, part
        return ops.plain(out, [x], (), turned * (turned < n) if same else 2 * turned, ops.wide)
