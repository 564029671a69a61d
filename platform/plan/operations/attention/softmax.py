"""Softmax, of attention scores or over any dim."""

from __future__ import annotations

from math import inf, prod

from platform.plan.language.mistakes import ModelMistake
from platform.plan.operations.attention.hiding import hides, reads_of
from platform.plan.operations.op import BlockOp, with_vectors

_PHASES = "forward", "backward"


class SoftmaxOp(BlockOp):
    """softmax(scale * x + bias) of an activation over `dim`. For attention scores [... length memory_length] only:
    `causal` hides positions memory_length > length, and with it `window`, if not 0, those at or before length - window
    (Beltagy et al. 2020), and `begins`, a data tensor [length, batch], those before the position that it gives; `mask`
    is a data tensor [memory_length, batch] whose padding is hidden; `bias` comes from `relative_bias`. It reads `mask`
    or `begins`, not both. A parameter `sink`, of dims of x other than `dim`, is one score more in the sum, whose own
    probability is left out (Xiao et al. 2023): where a head attends to nothing."""

    def record(
        self, ops, name, x, spec, sink=None, *, dim="memory_length", scale=1.0, causal=False, window=0, mask=None,
        begins=None, bias=None,
    ):  # fmt: skip
        """Record a softmax. Raises ModelMistake in a pass of generation if it is causal and `dim` lacks cached keys."""
        ops.check(bias or x, spec)
        if causal and ops.cache and dict(spec.sizes).get(dim) != ops.cache.capacity:
            raise ModelMistake(name, "causal attention that is not of Ops.attention does not see the passes before")
        hidden = hides(name, causal, window, mask, begins)
        inputs = [spec] if sink is None else [spec, sink]
        return ops.record(self.kind, name, [x], inputs, [spec], [mask, begins], dim=dim, scale=scale, **hidden)

    def plan(self, planner, operation):
        """Plan a softmax's collectives over a split dim: maximum and sum all-reduced forward, one sum backward."""
        spec, dim = operation.inputs[0], operation["dim"]
        layout, shape = planner.layout(spec), planner.shape(spec)
        rows = prod(shape) // shape[spec.dims.index(dim)]
        over, only = layout[dim], layout.only
        cuts = planner.cuts_of(spec, layout, [d for d in spec.dims if d != dim])
        forward, backward = (planner.statistics(over, only, rows, phase, cuts=cuts) for phase in _PHASES)
        read = reads_of(planner, operation, layout, spec, "memory_length")
        return with_vectors(planner, operation, [*forward * 2, *backward], over=over, **read)

    def run(
        self, ops, found, name, x, spec, sink=None, *, dim="memory_length", scale=1.0, causal=False, window=0,
        mask=None, begins=None, bias=None,
    ):  # fmt: skip
        """Compute scaled, biased and masked scores, and their softmax over a dim that ranks may split."""
        positions = ops.kernels.positions
        x = x * scale
        if bias is not None:
            x = x + bias
        if causal:
            length, memory = (ops.positions(spec, d, x.device) for d in ("length", "memory_length"))
            starts = None if begins is None else begins[self.kind, name]
            x = x.masked_fill(positions.unseen(length, memory, window, starts), -inf)
        if mask is not None:
            x = x.masked_fill(positions.padding_mask(mask[self.kind, name]), positions.least_number(x.dtype))
        x = ops.without_padding(x, spec, [dim], -inf)
        if sink is not None:
            (dims,) = (p.dims for p in found.operation.parameters)
            sink = sink.view([n if d in dims else 1 for d, n in zip(spec.dims, x.shape, strict=True)])
        return ops.kernels.statistics.softmax(x, spec.dims.index(dim), ops.communicator, found.over, sink)

    def meter(
        self, ops, found, name, x, spec, sink=None, *, dim="memory_length", causal=False, mask=None, begins=None,
        bias=None, **_,
    ):  # fmt: skip
        """Count the memory of the scores that scaling, bias and masks make, and of the probabilities, which are
        kept."""
        n, shape = x.elements, dict(zip(spec.dims, ops.plan.local_shape(spec), strict=True))
        x = ops.plain(ops.tensor(n), [x])  # scaled
        if bias is not None:
            x = ops.sum(ops.tensor(n), [x, bias])
        if causal:
            positions = shape["length"] * shape["memory_length"]
            x = ops.plain(ops.tensor(n), [x], (ops.integers(positions * (1 if begins is None else shape["batch"]), 1),))
        if mask is not None:
            x = ops.plain(ops.tensor(n), [x], (ops.integers(shape["batch"] * shape["memory_length"], 1),))
        own = found.over or sink is not None  # no function of torch
        if own:
            ops.new(n, ops.wide)
        out = ops.block(spec)
        if sink is None:
            return ops.plain(out, [x], (out.storage,), n if own else 0)
        share = ops.new(n // shape[dim], ops.wide)
        return ops.plain(out, [x, sink], (out.storage, share), n)
