"""The planner: layouts, local shapes, contractions and collectives of conversions, for one scheme on one mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from platform.plan.communication.planned import Collective, shaped, walk
from platform.plan.communication.rule import Contraction, Conversion, Step, contract, enter, partial_axes
from platform.plan.language.layout import Layout, local_shape, padded
from platform.plan.language.mesh import Mesh
from platform.plan.language.ops import Operation, Parameter, Spec
from platform.plan.language.scheme import Scheme


@dataclass(frozen=True)
class Planner:
    """Applies the rule to the tensors of operations under one scheme on one mesh. `sizes`: global dims, vocab padded.

    `reduced_at_use[name, kind, parameter]`: axes over which the gradient of this use is reduced in the operation's
    backward, because the parameter's uses differ in their partial axes. `storage`: axes over which the flattened block
    of every parameter is stored in shards, gathered before each use.
    """

    mesh: Mesh
    scheme: Scheme
    sizes: Mapping[str, int]
    reduced_at_use: Mapping[tuple[str, str, str], tuple[str, ...]]
    storage: tuple[str, ...] = ()
    _layouts: dict[Spec | Parameter, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)

    def layout(self, tensor: Spec | Parameter) -> Layout:
        """Return the layout of an activation or parameter. If the scheme does not name kv_heads, they take the longest
        prefix of the axes of heads whose product divides their number."""
        if tensor not in self._layouts:
            self._layouts[tensor] = self._layout(tensor)
        return self._layouts[tensor]

    def _layout(self, tensor: Spec | Parameter) -> Layout:
        dims = tensor.dims
        wanted = (*dims, "heads") if "kv_heads" in dims else dims
        if isinstance(tensor, Parameter):
            layout = self.scheme.parameter(tensor.role, wanted)
        else:
            layout = self.scheme.activation(tensor.region, wanted)
        if "kv_heads" in dims:
            rules = dict(layout)
            heads = rules.pop("heads", ())
            rules.setdefault("kv_heads", self._kv_axes(heads))
            layout = Layout.of(rules, layout.only)
        return layout

    def _kv_axes(self, heads: Sequence[str]) -> tuple[str, ...]:
        n = len(heads)
        while self.sizes["kv_heads"] % self.mesh.extent(heads[:n]):
            n -= 1
        return tuple(heads[:n])

    def sizes_of(self, tensor: Spec | Parameter) -> dict[str, int]:
        """Return the global sizes of dims for a tensor: the model's, overridden by the tensor's own."""
        return {**self.sizes, **dict(tensor.sizes)}

    def shape(self, tensor: Spec | Parameter, layout: Layout | None = None) -> tuple[int, ...]:
        """Return the local shape of a tensor in `layout`, by default its own."""
        layout = self.layout(tensor) if layout is None else layout
        return local_shape(tensor.dims, self.sizes_of(tensor), layout, self.mesh)

    def shard(self, p: Parameter, axes: Sequence[str]) -> int:
        """Return the elements of one of the equal shards over `axes` of the flattened local block, with padding."""
        n = self.mesh.extent(axes)
        return padded(prod(self.shape(p)), n) // n

    def stored(self, tensor: Spec | Parameter) -> tuple[int, ...]:
        """Return the shape kept on a rank between uses: a block, or a parameter's shard if there are storage axes."""
        if isinstance(tensor, Parameter) and self.storage:
            return (self.shard(tensor, self.storage),)
        return self.shape(tensor)

    def partial(self, operation: Operation) -> dict[str, tuple[str, ...]]:
        """Map each parameter's name to the axes, except storage axes, over which this operation leaves its gradient
        partial."""
        parameters = operation.parameters
        if operation.kind == "project":
            spec = operation.inputs[0]
            pairs = zip(parameters, operation.outputs, strict=True)
            axes = {p.name: self.contraction(spec, p, out).axes for p, out in pairs}
        elif operation.kind == "lookup":
            axes = {p.name: self.lookup_contraction(operation).axes for p in parameters}
        else:
            axes = {p.name: self.layout(operation.outputs[0]).axes for p in parameters}
        found = {p.name: partial_axes(self.layout(p), axes[p.name]) for p in parameters}
        assert all(a in over for a in self.storage for over in found.values()), "every use sums over a storage axis"
        return {name: tuple(a for a in over if a not in self.storage) for name, over in found.items()}

    def contraction(self, x: Spec | Parameter, y: Spec | Parameter, out: Spec) -> Contraction:
        operands = [(t.dims, self.layout(t), isinstance(t, Parameter)) for t in (x, y)]
        c = contract(operands, (out.dims, self.layout(out)))
        inputs = [self.shaped(have, t, c.compute.restrict(t.dims)) for have, t in zip(c.inputs, (x, y), strict=True)]
        return replace(c, inputs=tuple(inputs), output=self.leaving(c, out))

    def enter(
        self, tensor: Spec | Parameter, target: Layout, axes: Sequence[str], *, source: Layout | None = None
    ) -> Conversion:
        """Return the rule's `enter` for a tensor, from its own layout or another `source`."""
        source = self.layout(tensor) if source is None else source
        found = enter(tensor.dims, source, target, axes, parameter=isinstance(tensor, Parameter))
        return self.shaped(found, tensor, target, source)

    def leaving(self, c: Contraction, out: Spec) -> Conversion:
        """Return the conversion of an einsum's local result to the layout of `out`, with shapes."""
        return self.shaped(c.output, out, self.layout(out), c.compute.restrict(out.dims))

    def shaped(
        self, conversion: Conversion, tensor: Spec | Parameter, target: Layout, source: Layout | None = None
    ) -> Conversion:
        """Return a conversion of `tensor` from its own layout or `source` to `target` with `Step.shape` filled in."""
        forward = shaped(conversion.forward, self.shape(tensor, source), self.mesh)
        return Conversion(forward, shaped(conversion.backward, self.shape(tensor, target), self.mesh))

    def lookup_contraction(self, operation: Operation) -> Contraction:
        table, out = operation.inputs[0], operation.outputs[0]
        token_dims = tuple(d for d in out.dims if d not in table.dims)
        one_hot = (*token_dims, table.dims[0])
        # the one-hot is never materialised, so its layout is free: rows split as the table's are, tokens whole
        rows = self.layout(table).restrict(table.dims[:1])
        operands = [(one_hot, rows, False), (table.dims, self.layout(table), True)]
        c = contract(operands, (out.dims, self.layout(out)))
        into = self.shaped(c.inputs[1], table, c.compute.restrict(table.dims))
        return replace(c, inputs=(c.inputs[0], into), output=self.leaving(c, out))

    def parameter_conversion(self, operation: Operation, p: Parameter, conversion: Conversion) -> Conversion:
        """Add to a parameter's conversion the gather over the storage axes and, if the parameter's uses differ in their
        partial axes, this use's reduction, at the step where the gradient is smallest.

        A sum over an axis of blocks padded with zeros along that axis is replaced by an all-gather of the blocks.
        """
        conversion = self._from_storage(p, conversion)
        axes = self.reduced_at_use.get((operation.name, operation.kind, p.name), ())
        backward = [
            replace(s, op="all_gather") if s.op == "pad" and s.axes[0] in axes else s for s in conversion.backward
        ]
        gathered = {s.axes[0] for s, old in zip(backward, conversion.backward, strict=True) if s != old}
        if summed := tuple(a for a in axes if a not in gathered):
            at = next((i for i, s in enumerate(conversion.backward) if s.op == "pad"), len(backward))
            only = conversion.backward[at].only if at < len(backward) else self.layout(p).only
            backward.insert(at, Step("all_reduce", summed, only=only))
        return replace(conversion, backward=tuple(backward))

    def _from_storage(self, p: Parameter, conversion: Conversion) -> Conversion:
        """Add the all-gather of the shards over the storage axes and the reduce-scatter of the gradient into shards."""
        if not self.storage:
            return conversion
        gather = (Step("all_gather", self.storage), Step("unflatten", (), shape=self.shape(p)))
        scatter = (Step("flatten", self.storage), Step("reduce_scatter", self.storage))
        return Conversion(gather + conversion.forward, conversion.backward + scatter)

    def collectives(
        self, steps: Sequence[Step], shape: Sequence[int], phase: str, issue: str, wait: str, dtype: str = "compute"
    ) -> list[Collective]:
        found = walk(steps, shape, self.mesh)
        return [Collective(s.op, s.axes, n, dtype, phase, issue, wait, s.only) for s, n in found]

    def statistics(
        self, over: Sequence[str], only: tuple[str, ...], elements: int, phase: str, op: str = "all_reduce"
    ) -> list[Collective]:
        """Return the collective that merges statistics over the axes `over`, at index 0 of the axes `only`, if any."""
        if not over:
            return []
        return [Collective(op, tuple(over), elements, "accumulate", phase, "statistics ready", "at once", only)]
