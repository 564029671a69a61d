"""Memory model of each operation of `platform.parallel.parallel_ops`: what it allocates, saves and frees.

The numbers follow torch's CPU kernels, and the statements of `platform.parallel` where these show in a layer's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import prod
from typing import Any

from platform.plan.communication.planned import EinsumGroup, Panels
from platform.plan.communication.rule import Conversion
from platform.plan.language.attention_kernels import MATH
from platform.plan.language.functions import EPS
from platform.plan.memory.meter import INTEGER
from platform.plan.memory.metered_attention import AttentionBlock, by_math, hidden, in_one_kernel
from platform.plan.memory.metered_losses import MeteredLosses
from platform.plan.memory.storages import GradientKey, Gradients, MeteredStorage, Saved, Value

_DRAWING = 4  # integers per element alive while random bits are drawn
_PIECE = 1 << 15  # elements whose dropout mask is drawn at once, as platform.parallel.kernels.dropout.DRAWN_AT_ONCE
_OF_RESULT = {"relu", "tanh"}  # functions that save their result, not their input


def where_present(operation: Callable[..., Value]) -> Callable[..., Value]:
    """Wrap an operation of the memory meter so that it hands on an absent (empty) block, its first activation, without
    counting, as `parallel_ops.where_present` does."""

    @wraps(operation)
    def run(self, *arguments, **options):
        x = next(a for a in arguments if isinstance(a, Value))
        return operation(self, *arguments, **options) if x.elements else x

    return run


class Metered(MeteredLosses):
    """Runs a model's forward pass on storages that only count bytes, in the same steps as
    `platform.parallel.parallel_ops.ParallelOps` runs it on tensors."""

    def lookup(self, name, table, tokens, out):
        planned = self.planned("lookup", name)
        _, leave = planned.conversions
        (weight,) = self.converted(planned)
        rows = planned.token_count
        x = self.plain(self.inner(planned, leave), [weight], (self.integers(rows),))
        if planned.over:  # the mask of this rank's rows
            x = self.plain(self.inner(planned, leave), [x], (self.new(rows),))
        return self.apply(x, leave)

    def features(self, name, ids, out):
        x = self.block(out)
        self.integers(x.elements * (_DRAWING + 2))
        return x

    def one_hot(self, name, ids, out):
        return self.block(out)

    def project(self, x, spec, weights, outs, biases=()):
        planned = self.planned("project", weights[0].name)
        fused = planned.adds(self.planned("shift", b.name) for b in biases)
        added = [self.parameter(b) for b in biases] if fused else []
        found = self._einsums(planned, x, spec, [self.parameter(w) for w in weights], outs, added, self.deferred)
        return tuple(map(self.shift, found, outs, biases) if biases and not fused else found)

    def einsum(self, name, x, x_spec, y, y_spec, out):
        return self._einsums(self.planned("einsum", name), x, x_spec, [y], [out])[0]

    def _einsums(self, planned, x, spec, operands, outs, biases=(), deferred=None):
        """Count the einsums of a planned operation of activation x with `operands`, group by group: in SUMMA panels, as
        local products, or with communication; return their results in the order of `outs`."""
        results: dict[int, Value] = {}
        for number, group in enumerate(planned.groups):
            mine = [operands[e.index] for e in group.einsums]
            if group.panels:
                found = self._panels(group, group.panels, self.apply(x, group.x), mine, outs)
            elif group.local and not any(isinstance(w.key, str) for w in mine):
                there = [self.block(outs[e.index]) for e in group.einsums]
                found = [self.plain(y, [x, w], (x.storage, w.storage)) for y, w in zip(there, mine, strict=True)]
            else:
                added = [biases[e.index] for e in group.einsums] if biases else []
                found = self._of_group(planned, number, x, mine, added, deferred)
            results.update((e.index, y) for e, y in zip(group.einsums, found, strict=True))
        return tuple(results[i] for i in range(len(operands)))

    def _of_group(self, planned, number: int, x: Value, operands, biases, deferred) -> list[Value]:
        """Count group `number` of an operation's einsums of x with `operands`, as
        `platform.parallel.kernels.einsum._Einsums` computes it: gather, multiply, add `biases`, convert the results;
        return them."""
        group, use = planned.groups[number], (planned.operation.kind, planned.operation.name, number)
        einsums = group.einsums
        local = self.operands(use, group, operands)
        whole = self.forward(x, group.x)
        self.ahead.onward(use)
        products = self._products(planned, group, operands, biases)
        found = [self.forward(y, e.output) for y, e in zip(products, einsums, strict=True)]
        del products
        stored, regathered = [x, *operands], [group.regathered, *(e.regathered for e in einsums)]
        saved = tuple(
            (s if again else t).storage for s, t, again in zip(stored, [whole, *local], regathered, strict=True)
        )
        widths, lengths = [w.elements for w in stored], [y.elements for y in found]
        width, *sizes = [w.elements for w in (whole, *local)]
        keys = [w.key for w in (*operands, *biases)]
        added = [b.elements for b in biases]

        def rest(held: Any) -> Gradients:
            """Count the gradients of operands and biases from what is `held`: in place where a parameter has one."""
            products = [self._product(k, n, e.operand) for k, n, e in zip(keys, sizes, einsums, strict=False)]
            # all of them are there until the first is reduced
            steps = [
                g and self.convert(g, n, e.operand.backward, e.operand.after)[0]
                for g, n, e in zip(products, sizes, einsums, strict=True)
            ]
            steps += [self.new(n) for n in added]
            for i, key in enumerate(keys):
                if isinstance(key, str) and (g := steps[i]):
                    if not self.leaves.in_place(key):
                        self.leaves.setdefault(key, g)
                    steps[i] = None
            return steps

        def backward(gs: Gradients, saved: Saved) -> Gradients:
            local = [
                self.convert(g, n, e.output.backward, e.output.after)[0]
                for g, n, e in zip(gs, lengths, einsums, strict=True)
            ]
            stored = [Value(w, n, key) for w, n, key in zip(saved[1:], widths[1:], keys, strict=False)]
            kept = self.operands(use, group, stored, back=True)
            x = self.forward(Value(saved[0], widths[0]), group.x).storage if group.regathered else saved[0]
            self.ahead.onward(use, back=True)
            total = self.new(width)  # until it is reduced, after the operands' gradients
            dx = self.convert(total, width, group.x.backward, group.x.after)[0]
            if deferred is None:
                return [dx, *rest((x, local))]
            del kept, total
            deferred.append(partial(rest, (x, local)))
            return [dx, *(None for _ in keys)]

        self.note(found, [x, *operands, *biases], saved, backward)
        return found

    def _products(self, planned, group: EinsumGroup, operands, biases) -> list[Value]:
        """Count the products of a group, not yet converted: one storage where the parameters are one matrix."""
        products = [self.inner(planned, e.output) for e in group.einsums]
        if not (group.joinable and self._follow(operands) and (not biases or self._follow(biases))):
            return products
        sizes = [y.elements for y in products]
        del products
        one = self.new(sum(sizes))
        return [Value(one, n) for n in sizes]

    def _follow(self, operands: Sequence[Value]) -> bool:
        """Return True if operands are parameters that lie one after another in a bucket."""
        names = [w.key for w in operands if isinstance(w.key, str) and w.elements]
        return len(names) == len(operands) and self.plan.bucket_of[names[0]].stretch(names) is not None

    def _product(self, key: GradientKey, elements: int, operand: Conversion) -> MeteredStorage | None:
        """Count the gradient of an einsum's operand, not yet reduced: that of a parameter in its own layout is added
        where it stays."""
        return None if not operand.backward and self.in_place(key) else self.new(elements)

    def _panels(self, group: EinsumGroup, panels: Panels, x: Value, operands: Sequence[Value], outs) -> list[Value]:
        """Count one group of einsums that SUMMA computes, as `platform.parallel.kernels.summa` does: current and next
        panel of both operands, and a product; return the results."""
        einsums, mesh = group.einsums, self.plan.mesh
        local = [self.forward(w, e.operand) for w, e in zip(operands, einsums, strict=True)]
        sizes = [w.elements for w in local]
        axes = [panels.x_axes, *(panels.operand_axes for _ in einsums)]
        pairs = zip([x.elements, *sizes], axes, strict=True)
        one = sum(panels.elements(n, a, mesh) if a else 0 for n, a in pairs)  # no axes: a view
        found = [self.block(outs[e.index]) for e in einsums]
        self.new(2 * one + sum(y.elements for y in found))
        kept = [w if e.regathered else here for w, here, e in zip(operands, local, einsums, strict=True)]
        width = x.elements

        def backward(gs: Gradients, saved: Saved) -> Gradients:
            dx, *dws = (self.new(n) for n in (width, *sizes))
            self.new(one * (panels.count + 1))  # parts of all panels until reduced, and the last panel
            triples = zip(dws, sizes, einsums, strict=True)
            return [dx, *(self.convert(w, n, e.operand.backward, e.operand.after)[0] for w, n, e in triples)]

        self.note(found, [x, *operands], (x.storage, *(w.storage for w in kept)), backward)
        return found

    def reduce(self, name, function, x, spec, out):
        planned = self.planned("reduce", name)
        into, leave = planned.conversions
        x = self.apply(x, into)
        y = self.inner(planned, leave)
        saved: Saved = ()
        if function == "max":
            # each element's share of the gradient where a reduced dim is split, else input and result
            saved = (self.new(x.elements, self.wide),) if planned.over else (x.storage, y.storage)
        return self.apply(self.plain(y, [x], saved), leave)

    def concatenate(self, name, x, specs, out, dim):
        planned = self.planned("concatenate", name)
        *into, leave = planned.conversions
        parts = [self.apply(part, c) for part, c in zip(x, into, strict=True)]
        whole, count = self.inner(planned, leave), len(parts)
        self.note([whole], parts, (), lambda gs, _: [gs[0]] * count)
        return self.apply(whole, leave)

    def reshape(self, name, x, spec, out):
        for conversion in self.planned("reshape", name).conversions:
            x = self.apply(x, conversion)
        return x

    @where_present
    def shift(self, x, spec, parameter):
        (p,) = self.converted(self.planned("shift", parameter.name))
        out, size = self.block(spec), p.elements
        self.note([out], [x, p], (), lambda gs, _: [gs[0], self.new(size)])
        return out

    @where_present
    def norm(self, x, spec, kind, gain, bias, eps=EPS):
        planned = self.planned("norm", gain.name)
        vectors = self.converted(planned)
        n = prod(self.plan.local_shape(spec))
        rows = n // self.plan.local_shape(spec)[-1]
        g = vectors[0].storage
        if not planned.over and kind == "layernorm":
            saved = (x.storage, self.new(rows, self.wide), self.new(rows, self.wide), *(v.storage for v in vectors))
            return self.plain(self.block(spec), [x, *vectors], saved)
        wide = self.widened(x.storage, n)
        if not planned.over:
            normal, rstd = self.new(n, self.wide), self.new(rows, self.wide)
            return self.plain(self.block(spec), [x, *vectors], (wide, normal, rstd, g), n, self.wide)
        centred = self.new(n, self.wide) if kind == "layernorm" else wide
        normal, rstd = self.new(n, self.wide), self.new(rows, self.wide)
        result = self.new(n, self.wide)
        if bias:
            result = self.new(n, self.wide)
        out = Value(self.widened(result, n) and (result if wide is x.storage else self.new(n)), n)
        del centred, result, wide
        return self.plain(out, [x, *vectors], (normal, rstd, g), 3 * n, self.wide)

    @where_present
    def rotate(self, name, x, spec, theta, scaling=None):
        into, leave = self.planned("rotate", name).conversions
        x = self.apply(x, into)
        same, n = self.wide == self.plan.itemsize["compute"], x.elements
        wide = self.widened(x.storage, n)
        whole = self.new(n, self.wide)
        out = Value(whole if same else self.new(n), n)
        del wide, whole
        return self.apply(self.plain(out, [x], (), 0 if same else 2 * n, self.wide), leave)

    @where_present
    def sinusoid(self, name, x, spec, scale, positions=None):
        scaled = self.new(x.elements)
        out = self.plain(self.block(spec), [x])
        del scaled
        return out

    def relative_bias(self, table, scores, *, bidirectional, distance):
        (weight,) = self.converted(self.planned("relative_bias", table.name))
        if not weight.elements:
            return weight
        shape = dict(zip(scores.dims, self.plan.local_shape(scores), strict=True))
        positions = shape["length"] * shape["memory_length"]
        elements = positions * shape["heads"]
        return self.plain(Value(self.new(elements), elements), [weight], (self.integers(positions),), elements)

    @where_present
    def expand_kv(self, name, x, spec, out, *, grouped=False):
        x = self.apply(x, self.planned("expand_kv", name).conversions[0])
        dim, per_group = out.dims.index("heads"), self.plan.sizes["heads"] // self.plan.sizes["kv_heads"]
        have, wanted = (self.plan.local_shape(t)[dim] for t in (spec, out))
        if wanted == have * per_group and (grouped or per_group == 1):
            return x
        return self.plain(self.block(out), [x])

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
        n, shape = x.elements, dict(zip(spec.dims, self.plan.local_shape(spec), strict=True))
        x = self.plain(Value(self.new(n), n), [x])  # scaled
        if bias is not None:
            x = self._with_bias(x, bias)
        if causal:
            positions = shape["length"] * shape["memory_length"]
            hidden = self.integers(positions * (1 if begins is None else shape["batch"]), 1)
            x = self.plain(Value(self.new(n), n), [x], (hidden,))
        if mask is not None:
            hidden = self.integers(shape["batch"] * shape["memory_length"], 1)
            x = self.plain(Value(self.new(n), n), [x], (hidden,))
        if over := self.planned("softmax", name).over:
            part = self.new(n, self.wide)
            part = self.new(n, self.wide)
            del part
        out = self.block(spec)
        return self.plain(out, [x], (out.storage,), n if over else 0)

    def _with_bias(self, scores: Value, bias: Value) -> Value:
        """Count the sum of scores and a bias, whose gradient is a sum of theirs."""
        out = Value(self.new(scores.elements), scores.elements)
        self.note([out], [scores, bias], (), lambda gs, _: [gs[0], self.new(bias.elements)])
        return out

    @where_present
    def fused_attention(self, name, q, k, v, spec, kv, *, scale, causal, window=0, mask=None, begins=None, bias=None):
        query, key = (dict(zip(s.dims, self.plan.local_shape(s), strict=True)) for s in (spec, kv))
        documents = begins is not None
        hides = {"causal": causal, "masked": mask is not None or documents, "biased": bias is not None}
        block = AttentionBlock.of(query, key, **hides)
        if bias is None and mask is None and (window or documents):
            added: Value | None = self._seen(block, window, documents)
        else:
            added = hidden(self, block, bias)
        if self.planned("fused_attention", name).operation["kernel"] == MATH:
            return by_math(self, block, (q, k, v), added, self.dropout_rate)
        return in_one_kernel(self, block, self.block(spec), (q, k, v), added)

    def _seen(self, a: AttentionBlock, window: int, documents: bool) -> Value:
        """Count what hides scores behind a `window` or between `documents`, as `ParallelOps._seen` makes it: once for
        all layers of a pass, and without documents once for all passes."""
        made = self.of_pass if documents else self.standing
        positions = a.length * a.memory_length
        if (window, positions) not in made:
            made[window, positions] = self.new(positions * (a.batch if documents else 1))
        return Value(made[window, positions], positions)

    def fuses_attention(self, name, spec):
        return ("fused_attention", name) in self.plan.operations

    def relayout(self, name, x, spec, out):
        if spec == out:
            return x
        return self.apply(x, self.planned("relayout", name).conversions[0])

    def pointwise(self, function, *x):
        if function == "identity":
            return x[0]
        if function.startswith("gated_"):
            return self.pointwise("multiply", self.pointwise(function.removeprefix("gated_"), x[0]), x[1])
        n = min(v.elements for v in x)
        out = Value(self.new(n), n)
        if function == "add":
            parts = len(x)  # a number: the closure must not keep x alive
            self.note([out], x, (), lambda gs, _: [gs[0]] * parts)
            return out
        return self.plain(out, x, (out.storage,) if function in _OF_RESULT else tuple(v.storage for v in x))

    @where_present
    def scale(self, x, spec, factor):
        return self.plain(self.block(spec), [x])

    @where_present
    def pointwise_each(self, functions, x, spec, dim):
        """Count pointwise functions per slice, as on the rank whose functions save most, if ranks differ."""
        shape = dict(zip(spec.dims, self.plan.local_shape(spec), strict=True))
        n, slices = shape[dim], range(0, len(functions), shape[dim])
        most = max(sum(f in _OF_RESULT for f in functions[i : i + n]) for i in slices)
        saved = [x.storage] if set(functions) - _OF_RESULT - {"identity"} else []
        saved += [self.new(x.elements // n) for _ in range(most)]
        return self.plain(self.block(spec), [x], tuple(saved), x.elements)

    @where_present
    def dropout(self, name, x, spec):
        if not self.dropout_rate:
            return x
        drawn = 2 * min(x.elements, _PIECE)  # the states of the random numbers of a piece, before and after a shift
        out = self.block(spec)
        self.integers(drawn)
        return self.plain(out, [x], (), drawn, INTEGER)
