"""The `Ops` of run time: a model's forward pass on one rank's blocks, executing the conversions that the plan lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.parallel.attention import in_kernel
from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels import positions as kernels
from platform.parallel.kernels import random, statistics
from platform.parallel.kernels.einsum import Deferred, einsums
from platform.parallel.kernels.table_rows import rows
from platform.parallel.loss_ops import PassPosition
from platform.parallel.pointwise_ops import PointwiseOps, where_present
from platform.parallel.recompute import recomputed
from platform.parallel.sharding.convert import Pending, absent, apply, convert
from platform.parallel.sharding.residency import Residency
from platform.parallel.watched import Watched
from platform.plan.communication.planned import PlannedOperation
from platform.plan.communication.rule import Conversion, relayout_steps
from platform.plan.core.ahead import Ahead
from platform.plan.core.plan import Plan
from platform.plan.language.functions import CROSS_ENTROPY
from platform.plan.language.layout import Layout
from platform.plan.language.ops import Parameter, Spec


class ParallelOps(PointwiseOps):
    """Executes a plan's operations on the rank of `communicator`. `tensors`: parameter name -> local block.

    A data tensor is passed as a mapping from the operations that read it, keyed (kind, name), to this rank's block of
    integers [length, batch] in the layout given by `plan.readers`. An activation or parameter of which this rank has no
    block is an empty tensor. `compiles`: small functions without collectives are compiled (train.compile). `ahead`:
    parameters that are converted for their operations are so a matrix product ahead.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        tensors: Mapping[str, Tensor],
        dropout: float = 0.0,
        compiles: bool = False,
        ahead: bool = True,
    ):
        self.plan, self.communicator, self.tensors = plan, communicator, tensors
        self.dropout_rate, self.compiles = dropout, compiles
        self.position = PassPosition()
        self.deferred: Deferred | None = None  # collects weight gradient computations that a schedule runs later
        self.recompute = plan.recompute
        self.offset = 0  # of the pass: tokens of its sequences that passes before have read (generation)
        self.losses, self.label_weights = {CROSS_ENTROPY: None}, {}
        self.residency: Residency | None = None  # of parameters that are gathered for each block
        self.ahead = Ahead(plan, self._start, ahead)
        self.watched: Watched | None = None  # sums up the activations of training steps, where somebody follows them
        self._counters = {}
        self._angles: dict[tuple, tuple[Tensor, Tensor]] = {}  # of rotations, alike in all layers and steps
        self._masks: dict[tuple, Tensor] = {}  # added to scores, alike in all passes
        tensors_of = (t for o in plan.operations.values() for t in (*o.operation.inputs, *o.operation.outputs))
        # activation -> (offset, extent) per dim of this rank's block
        self._blocks = {t: plan.block(t, communicator.coordinates) for t in tensors_of if isinstance(t, Spec)}

    def _start(self, p: Parameter, conversion: Conversion) -> Pending:
        """Start the conversion of a parameter for an operation."""
        return convert(self.communicator, self.tensors[p.name].detach(), conversion.forward, name=f"gather {p.name}")

    def begin(self) -> None:
        """Begin a forward pass."""
        for left in self.ahead.begin():
            left.wait()  # of operations that the pass before has left out, as a text sample does the loss

    def watch(self, name, x, spec):
        if self.watched and self.position.training and not self.ahead.again:
            self.watched.see(name, x, spec)
        return x

    def recomputed(self, kind, function, spec, x, *more):
        if kind == "full" and self.residency:
            return self.residency.block(lambda x: self._recomputed(kind, function, spec, x, *more), x)
        return self._recomputed(kind, function, spec, x, *more)

    def _recomputed(self, kind, function, spec, x, *more):
        """Compute function(x, *more), again in the backward pass if activations of this `kind` are recomputed."""
        if kind != self.recompute.kind or not torch.is_grad_enabled():
            return function(x, *more)
        here = self.position, self.deferred

        @contextmanager
        def restore():
            now = self.position, self.deferred, self.ahead.again
            self.position, self.deferred, self.ahead.again = *here, True
            yield
            self.position, self.deferred, self.ahead.again = now

        return recomputed(self.communicator, function, restore, self.plan.kept_axes(spec), x, *more)

    def _range(self, spec: Spec, dim: str, device: torch.device) -> Tensor:
        """Return the global positions along `dim`, int64 [local extent], of this rank's block of the activation
        `spec`."""
        first, n = self._blocks[spec][spec.dims.index(dim)]
        first += self.offset if dim == "length" else 0
        return torch.arange(first, first + n, device=device)

    def lookup(self, name, table, tokens, out):
        planned = self._planned("lookup", name)
        tokens = tokens["lookup", name]
        _, leave = planned.conversions
        (weight,) = self._converted(planned)
        if absent(weight):
            return apply(self.communicator, weight, leave)
        if planned.over:  # a token whose row another rank holds gives zeros: the sum over `over` completes the lookup
            row = tokens.clamp_min(0) - self.communicator.index(planned.over) * weight.shape[0]
            mine = (row >= 0) & (row < weight.shape[0])
            x = rows(weight, row.clamp(0, weight.shape[0] - 1))
            x = x * mine.view(*mine.shape, *(1 for _ in weight.shape[1:])).to(weight.dtype)
        else:
            x = rows(weight, tokens.clamp_min(0))
        return apply(self.communicator, x, leave)

    def features(self, name, ids, out):
        size, key = self.plan.sizes[out.dims[-1]], random.key("features", name)
        return self._of_ids("features", name, ids, out, lambda ids, column: random.normal(key, ids * size + column))

    def one_hot(self, name, ids, out):
        return self._of_ids("one_hot", name, ids, out, lambda ids, column: ids == column)

    def _of_ids(self, kind, name, ids, out, compute):
        """Compute an activation from the data tensor `ids` alone, for `features` and `one_hot`: return compute(ids
        [length, batch, 1], global positions along the last dim of `out`) on this rank's block, in the parameters'
        dtype."""
        found, dtype = ids[kind, name], next(iter(self.tensors.values())).dtype
        if not absent(found):
            found = compute(found.unsqueeze(-1), self._range(out, out.dims[-1], found.device))
        return found.to(dtype).requires_grad_()

    def project(self, x, spec, weights, outs, biases=()):
        tensors = [self.tensors[w.name] for w in weights]
        planned = self._planned("project", weights[0].name)
        fused = planned.adds(self._planned("shift", b.name) for b in biases)
        added = [self.tensors[b.name] for b in biases] if fused else []
        found = self._einsums(planned, x, tensors, added, self.deferred)
        if fused or not biases:
            return found
        return tuple(self.shift(y, out, b) for y, out, b in zip(found, outs, biases, strict=True))

    def einsum(self, name, x, x_spec, y, y_spec, out):
        return self._einsums(self._planned("einsum", name), x, [y])[0]

    def _einsums(
        self,
        planned: PlannedOperation,
        x: Tensor,
        operands: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        deferred: Deferred | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the planned einsums of the activation x with `operands` (parameters or one activation), group by
        group, and return the outputs in the order of `operands`. `biases`, `deferred`: see
        `platform.parallel.kernels.einsum.einsums`."""
        results: dict[int, Tensor] = {}
        for number, group in enumerate(planned.groups):
            indices = [e.index for e in group.einsums]
            added = [biases[i] for i in indices] if biases else ()
            mine = [operands[i] for i in indices]
            found = einsums(self._coming(planned, number), x, mine, added, deferred=deferred)
            results.update(zip(indices, found, strict=True))
        return tuple(results[i] for i in range(len(operands)))

    def reduce(self, name, function, x, spec, out):
        planned = self._planned("reduce", name)
        into, leave = planned.conversions
        gone = [d for d in spec.dims if d not in out.dims]
        x = apply(self.communicator, x, into)
        if absent(x):
            return apply(self.communicator, x, leave)
        x = self._without_padding(x, spec, gone, -torch.inf if function == "max" else 0)
        places, kept = [spec.dims.index(d) for d in gone], [d for d in spec.dims if d in out.dims]
        if function == "max":
            y = statistics.maximum(x, places, self.communicator, planned.over)
        else:
            y = x.sum(places) if gone else x
        if function == "mean":
            y = y / prod(n for d, n in zip(spec.dims, self.plan.global_shape(spec), strict=True) if d in gone)
        return apply(self.communicator, y.permute([kept.index(d) for d in out.dims]), leave)

    def _without_padding(self, x: Tensor, spec: Spec, dims: Sequence[str], value: float) -> Tensor:
        """Return x, this rank's block of `spec`, with `value` at the positions along `dims` that lie beyond the dim's
        global size: the padding of a split dim (only vocab is ever padded), hidden from a sum, maximum or softmax over
        it."""
        for i, dim in enumerate(spec.dims):
            if dim in dims:
                first, n = self._blocks[spec][i]
                real = self.plan.global_shape(spec)[i] - first
                if real < n:
                    padding = torch.arange(n, device=x.device) >= real
                    x = x.masked_fill(padding.view([-1 if d == dim else 1 for d in spec.dims]), value)
        return x

    def concatenate(self, name, x, specs, out, dim):
        *into, leave = self._planned("concatenate", name).conversions
        parts = [apply(self.communicator, part, conversion) for part, conversion in zip(x, into, strict=True)]
        whole = torch.cat(parts, 0 if absent(parts[0]) else out.dims.index(dim))
        return apply(self.communicator, whole, leave)

    def reshape(self, name, x, spec, out):
        into, leave = self._planned("reshape", name).conversions
        x = apply(self.communicator, x, into)
        if absent(x):
            return apply(self.communicator, x, leave)
        i = next(i for i, (a, b) in enumerate(zip(spec.dims, out.dims, strict=False)) if a != b)
        x = x.flatten(i, i + 1) if len(spec.dims) > len(out.dims) else x.unflatten(i, (self._blocks[out][i][1], -1))
        return apply(self.communicator, x, leave)

    @where_present
    def shift(self, x, spec, parameter):
        (p,) = self._converted(self._planned("shift", parameter.name))
        assert tuple(d for d in spec.dims if d in parameter.dims) == parameter.dims
        for i, d in enumerate(spec.dims):
            if d not in parameter.dims:
                p = p.unsqueeze(i)
        return x + p

    @where_present
    def rotate(self, name, x, spec, theta, scaling=None):
        into, leave = self._planned("rotate", name).conversions
        x = apply(self.communicator, x, into)
        wide = statistics.widened(x).dtype
        where = self.offset, *self._blocks[spec][spec.dims.index("length")]
        if (key := (where, x.shape[-1], theta, scaling, wide, x.device)) not in self._angles:
            length = self._range(spec, "length", x.device)
            self._angles[key] = kernels.angles(length, x.shape[-1], theta, wide, scaling)
        shape = [n if d in ("length", "d_kv") else 1 for d, n in zip(spec.dims, x.shape, strict=True)]
        cos, sin = (t.view(shape) for t in self._angles[key])
        return apply(self.communicator, kernels.rotate(x, cos, sin, self._region(kernels.rotated)), leave)

    @where_present
    def sinusoid(self, name, x, spec, scale, positions=None):
        assert spec.dims == ("length", "batch", "d_model")
        length = (
            self._range(spec, "length", x.device).unsqueeze(1) if positions is None else positions["sinusoid", name]
        )
        d_model = self._range(spec, "d_model", x.device)
        table = kernels.sinusoid(length.flatten(), d_model, self.plan.sizes["d_model"])
        return x * scale + table.unflatten(0, length.shape).to(x.dtype)

    def relative_bias(self, table, scores, *, bidirectional, distance):
        (weight,) = self._converted(self._planned("relative_bias", table.name))
        if absent(weight):
            return weight
        length, memory = (self._range(scores, d, weight.device) for d in ("length", "memory_length"))
        offsets = memory - length.unsqueeze(1)
        bucket = kernels.relative_bucket(offsets, self.plan.sizes["buckets"], distance, bidirectional)
        return F.embedding(bucket, weight).permute(2, 0, 1)  # [heads, length, memory_length]

    @where_present
    def expand_kv(self, name, x, spec, out, *, grouped=False):
        planned = self._planned("expand_kv", name)
        (conversion,) = planned.conversions
        x = apply(self.communicator, x, conversion)
        dim = out.dims.index("heads")
        first_head, heads = self._blocks[out][dim]
        per_group = self.plan.sizes["heads"] // self.plan.sizes["kv_heads"]
        if first_head % per_group == 0 and heads == x.shape[dim] * per_group:  # whole groups: a plain repeat
            return x if grouped or per_group == 1 else x.repeat_interleave(per_group, dim)
        have, _ = self._blocks[spec][dim]
        index = torch.arange(first_head, first_head + heads, device=x.device) // per_group - have
        return x.index_select(dim, index)

    @where_present
    def softmax(
        self,
        name,
        x,
        spec,
        *,
        dim="memory_length",
        scale=1.0,
        causal=False,
        window=0,
        mask=None,
        begins=None,
        bias=None,
    ):
        planned = self._planned("softmax", name)
        x = x * scale
        if bias is not None:
            x = x + bias
        if causal:
            length, memory = (self._range(spec, d, x.device) for d in ("length", "memory_length"))
            starts = None if begins is None else begins["softmax", name]
            x = x.masked_fill(kernels.unseen(length, memory, window, starts), -torch.inf)
        if mask is not None:
            x = x.masked_fill(kernels.padding_mask(mask["softmax", name]), torch.finfo(x.dtype).min)
        x = self._without_padding(x, spec, [dim], -torch.inf)
        return statistics.softmax(x, spec.dims.index(dim), self.communicator, planned.over)

    @where_present
    def fused_attention(self, name, q, k, v, spec, kv, *, scale, causal, window=0, mask=None, begins=None, bias=None):
        order = [spec.dims.index(d) for d in ("batch", "heads", "length", "d_kv")]
        back = [("batch", "heads", "length", "d_kv").index(d) for d in spec.dims]
        q, k, v = (t.permute(order) for t in (q, k, v))
        padding = None if mask is None else kernels.padding_mask(mask["fused_attention", name])
        starts = None if begins is None else begins["fused_attention", name]
        whole = not causal or q.shape[2] == k.shape[2]  # else q's are the last of all positions, not the first
        if bias is None and padding is None and starts is None and not window and whole:
            seen = None
        elif bias is None and padding is None:
            seen, causal = self._seen(q, k, window, starts), False
        else:
            behind = kernels.unseen(*self._lengths(q, k), window, starts) if causal else None
            seen, causal = kernels.attention_mask(q, behind, padding, bias), False
        rate = self.dropout_rate if self.position.training else 0.0
        more = {"is_causal": causal, "scale": scale, "enable_gqa": k.shape[1] != q.shape[1]}
        kernel = self._planned("fused_attention", name).operation["kernel"]
        with self._seeded(name, spec, q.device) if rate else nullcontext(), in_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, seen, rate, **more).permute(back)

    def _seen(self, q: Tensor, k: Tensor, window: int, begins: Tensor | None) -> Tensor:
        """Return what is added to the scores of whole q and k [batch, heads, length, d_kv], so that causality, a
        `window` and the positions `begins` hide the others. All layers share it, and without `begins` all passes."""
        key = window, q.shape[2], k.shape[2], q.dtype, q.device, begins if begins is None else id(begins)
        known = self.position.masks if self.offset or begins is not None else self._masks
        if key not in known:
            known[key] = kernels.as_added(kernels.unseen(*self._lengths(q, k), window, begins), q.dtype)
        return known[key]

    def _lengths(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions along the lengths of whole q and k [batch, heads, length, d_kv]."""
        length = torch.arange(self.offset, self.offset + q.shape[2], device=q.device)
        return length, torch.arange(k.shape[2], device=k.device)

    def _seeded(self, name: str, spec: Spec, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which a kernel that draws its own dropout mask draws that of the attention `name` on this
        rank's block of `spec`, at the present position in the run."""
        p = self.position
        key = random.key(p.seed, "fused dropout", p.step, name, p.first_sequence, *self._blocks[spec])
        return random.seeded(key, device)

    def fuses_attention(self, name, spec):
        return ("fused_attention", name) in self.plan.operations

    def relayout(self, name, x, spec, out):
        if spec == out:
            return x
        (conversion,) = self._planned("relayout", name).conversions
        return apply(self.communicator, x, conversion)

    def gathered(self, x: Tensor, spec: Spec) -> Tensor:
        """Gather the local block x of an activation into the whole tensor on every rank, without gradient and without
        vocab padding: logits, for sampling text."""
        whole = convert(self.communicator, x, relayout_steps(spec.dims, self.plan.layout(spec), Layout())).wait()
        for i, size in enumerate(self.plan.global_shape(spec)):
            whole = whole.narrow(i, 0, size)
        return whole


def initialise(plan: Plan, communicator: Communicator, p: Parameter, seed: int | None, out: Tensor) -> None:
    """Fill `out`, this rank's block of the parameter `p`, with its initial values (normal, zeros or ones), as a
    function of (seed, parameter name, global element) alone: the same model under every plan. `seed` None leaves it
    undefined, to be restored."""
    if seed is None:
        return
    with torch.no_grad():
        if p.init == "normal":
            where, shape = plan.block(p, communicator.coordinates), plan.global_shape(p)
            if p.turned:  # the same numbers as ever: a run that began with the last dim first goes on
                out, where, shape = out.movedim(-1, 0), [*where[-1:], *where[:-1]], shape[-1:] + shape[:-1]
            random.fill_normal_(out, random.key(seed, "init", p.name), p.std, where, shape)
        else:
            out.fill_({"zeros": 0.0, "ones": 1.0}[p.init])
