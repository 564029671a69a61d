"""The planner: layouts, local shapes, contractions and collectives of conversions, for one scheme on one mesh."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from platform.plan.layout import (
    LENGTHS,
    UNEVEN,
    Cut,
    Cuts,
    Layout,
    Mesh,
    Stretch,
    consecutive_ranges,
    local_shape,
    locate_block,
)
from platform.plan.model_types import BranchPlace, Operation, Parameter, Spec, Tensor, tensor_dtype
from platform.plan.operation_plan import Collective, shapes_along_steps
from platform.plan.rule import (
    APPEAR,
    COLLECTIVES,
    JOIN,
    LENDING,
    SPLIT,
    Contraction,
    Conversion,
    RelayoutStep,
    contract_layouts,
    plan_operand_conversion,
    plan_result_conversion,
)
from platform.plan.scheme import REPLICAS, Scheme


def nameless_tensor(tensor: Tensor) -> Hashable:
    """Return all of a tensor on which its layout and shapes depend: of a parameter not its name."""
    return (tensor.role, tensor.dims, tensor.sizes, tensor.place) if isinstance(tensor, Parameter) else tensor


@dataclass(frozen=True)
class Planner:
    """Applies the communication rule to the tensors of operations under one scheme on one mesh. `sizes`: global sizes
    of the model's dims in one microbatch of all replicas, vocab padded; of rows, how many a token has.

    `reduced_at_use[name, kind, parameter]`: axes over which the gradient of this use is reduced in the operation's
    backward, because the parameter's uses differ in their partial axes. `open_sums`: axes over which an activation, or
    its gradient, stays partial between operations, as its type says (`Spec.open`). `frozen`: names of the parameters
    that take no gradient.
    """

    mesh: Mesh
    scheme: Scheme
    sizes: Mapping[str, int]
    reduced_at_use: Mapping[tuple[str, str, str], tuple[str, ...]]
    open_sums: Mapping[Spec, tuple[str, ...]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    _layouts: dict[Hashable, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shapes: dict[Hashable, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _contractions: dict[Hashable, Contraction] = field(default_factory=dict, init=False, repr=False, compare=False)

    def layout(self, tensor: Tensor) -> Layout:
        """Return the layout that the scheme gives an activation or parameter. If the scheme does not name kv_heads,
        they take the longest prefix of the axes of heads whose product divides their number, or that cuts heads into
        whole groups of theirs. Dim rows is split over the axes of the region's experts and of its batch."""
        key = nameless_tensor(tensor)
        if key not in self._layouts:
            self._layouts[key] = self._compute_layout(tensor)
        return self._layouts[key]

    def _compute_layout(self, tensor: Tensor) -> Layout:
        """Compute a layout from the scheme's table of its region or role, without the cache of `layout`."""
        dims = tensor.dims
        layout_dims = (*dims, "heads") if "kv_heads" in dims else dims
        layout_dims = (*layout_dims, "experts", "batch", "length") if "rows" in dims else layout_dims
        if isinstance(tensor, Parameter):
            layout = self.scheme.parameter_layout(tensor.role, layout_dims)
        else:
            layout = self.scheme.activation_layout(tensor.region, layout_dims)
        if "kv_heads" in dims:
            rules = dict(layout)
            heads = rules.pop("heads", ())
            rules.setdefault("kv_heads", self._kv_axes(heads, self.tensor_sizes(tensor)["kv_heads"]))
            layout = Layout.build_canonical(rules, layout.only)
        if "rows" in dims:
            rules = dict(layout.restrict_dims(d for d in dims if d != "rows"))
            rules["rows"] = (*layout["experts"], *layout["batch"], *layout["length"])
            layout = Layout.build_canonical(rules, layout.only)
        if isinstance(tensor, Spec) and (axes := self.open_sums.get(tensor)):
            layout = replace(layout, partial=axes) if tensor.open == "value" else replace(layout, gradient=axes)
        return self._lay_out_on_sub_grid(layout, tensor.place) if tensor.place else layout

    @cached_property
    def branch_axes(self) -> tuple[str, ...]:
        """Return the axes of more than one rank along which the sub-grids of a branch splitting lie, in mesh order."""
        return self.mesh.order_axes(self.scheme.branches)

    def _lay_out_on_sub_grid(self, layout: Layout, place: BranchPlace) -> Layout:
        """Return the layout of a tensor of a branch that one sub-grid computes: there alone, and else as `layout`."""
        number, along = place.find_sub_grid(self.mesh.count_ranks(self.branch_axes)), list[str]()
        for axis in reversed(self.branch_axes):
            number, index = divmod(number, self.mesh.axes[axis])
            along.insert(0, f"{axis}-{index}")
        layout = layout.drop_axes(self.branch_axes)
        return replace(layout, only=(*layout.only, *along))

    def row_expert_axes(self, tensor: Tensor) -> dict[str, tuple[str, ...]]:
        """Return the axes of the experts whose rows an activation has, by dim; {} for a tensor without rows."""
        rows = isinstance(tensor, Spec) and "rows" in tensor.dims
        return {"experts": self.scheme.regions[tensor.region]["experts"]} if rows else {}  # type: ignore[union-attr]

    def _kv_axes(self, heads: Sequence[str], groups: int) -> tuple[str, ...]:
        """Return the longest prefix of `heads`, the axes of query heads, whose ranks divide `groups`, the KV heads; all
        where heads are cut into whole groups of the model's, none for a layer's own number of them."""
        n = len(heads)
        if self.cut_units:
            return tuple(heads) if groups == self.sizes["kv_heads"] else ()
        while groups % self.mesh.count_ranks(heads[:n]):
            n -= 1
        return tuple(heads[:n])

    def operation_key(self, operation: Operation) -> tuple:
        """Return all but this planner on which an operation's plan depends: equal layers share it."""
        at_use = self.reduced_at_use
        summed = (at_use.get((operation.name, operation.kind, p.name)) for p in operation.parameters) if at_use else ()
        still = map(self.is_frozen, operation.parameters) if self.frozen else ()
        return operation.nameless_key, *summed, *still

    def is_frozen(self, tensor: Tensor) -> bool:
        """Return True if a tensor of the plan is a parameter that takes no gradient."""
        return isinstance(tensor, Parameter) and tensor.name in self._frozen_names

    @cached_property
    def _frozen_names(self) -> frozenset[str]:
        """Return the names of `frozen`, to look one up."""
        return frozenset(self.frozen)

    @property
    def num_replicas(self) -> int:
        """Return the number of data-parallel replicas, over all axes of the mesh that number them."""
        return prod(self.mesh.axes.get(axis, 1) for axis in REPLICAS)

    def tensor_sizes(self, tensor: Tensor) -> dict[str, int]:
        """Return a tensor's global size of every dim: the model's (vocab padded), overridden by the tensor's own."""
        sizes = {**self.sizes, **dict(tensor.sizes)}
        # the worst routing: a rank has as many rows of each token as this chooses experts, or as the rank has
        if experts := self.row_expert_axes(tensor):
            ranks, tokens = self.mesh.count_ranks(experts["experts"]), sizes["length"] * sizes["batch"]
            own_experts = max(1, sizes["experts"] // ranks) + self.scheme.lent
            sizes["rows"] = ranks * tokens * min(sizes["rows"], own_experts)
        return sizes

    def count_group_heads(self, keys: Tensor) -> int:
        """Return how many heads of queries share each head of `keys`, which may be repeated already."""
        sizes = {**self.sizes, **dict(keys.sizes)}
        return sizes["heads"] // sizes.get("kv_heads", sizes["heads"])

    def local_shape(self, tensor: Tensor, layout: Layout | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's block of a tensor in `layout`, by default the layout from the scheme."""
        if layout is not None:
            return local_shape(tensor.dims, self.tensor_sizes(tensor), layout, self.mesh, self.cut_units)
        if (key := nameless_tensor(tensor)) not in self._shapes:
            self._shapes[key] = self.local_shape(tensor, self.layout(tensor))
        return self._shapes[key]

    @cached_property
    def cut_units(self) -> dict[str, int]:
        """Return by dim the unit in which its blocks are cut, where that is not one element: heads by whole groups that
        share keys and values, where ranks have as many of these as to split them alike."""
        heads, groups = self.sizes.get("heads", 0), self.sizes.get("kv_heads", 0)
        if not (self.scheme.uneven and groups):
            return {}
        layouts = (*self.scheme.regions.values(), *self.scheme.parameters.values())
        ranks = [self.mesh.count_ranks(layout[dim]) for layout in layouts for dim in ("heads", "kv_heads")]
        differ = any(groups % n for n in ranks) and all(groups >= n for n in ranks)
        return {"heads": heads // groups} if differ else {}

    def can_cut_unevenly(self, dim: str) -> bool:
        """Return True if axes may cut `dim` into blocks that differ: KV heads, if heads are cut by their groups."""
        return self.scheme.uneven and dim in UNEVEN and (dim != "kv_heads" or bool(self.cut_units))

    def find_cuts(self, tensor: Tensor, layout: Layout) -> Cuts:
        """Return how the dims of a tensor are cut in `layout` whose blocks differ."""
        dim_cuts = ((i, self._find_cut_of_dim(tensor, d, layout[d])) for i, d in enumerate(tensor.dims))
        return tuple((i, cut) for i, cut in dim_cuts if cut)

    def _find_cut_of_dim(self, tensor: Tensor, dim: str, axes: Sequence[str]) -> Cut | None:
        """Return how a tensor's `dim` is cut by `axes`, None if into equal blocks."""
        if not self.scheme.uneven:
            return None
        cut = Cut(self.tensor_sizes(tensor)[dim], tuple(axes), self.mesh.count_ranks(axes), self.cut_units.get(dim, 1))
        return cut if cut.size % (cut.blocks * cut.unit) else None

    def cuts_among_dims(self, tensor: Tensor, layout: Layout, dims: Sequence[str]) -> tuple[Cut, ...]:
        """Return how the dims among `dims` whose blocks differ are cut in a tensor's `layout`."""
        return tuple(cut for i, cut in self.find_cuts(tensor, layout) if tensor.dims[i] in dims)

    def plan_contraction(self, operands: Sequence[Tensor], out: Spec, first: Layout | None = None) -> Contraction:
        """Return the contraction of operands to `out`, computed once: see `_compute_contraction`."""
        key = *map(nameless_tensor, operands), out, first
        if key not in self._contractions:  # an operation asks for it, and then the sum of its parameters' gradients
            self._contractions[key] = self._compute_contraction(operands, out, first)
        return self._contractions[key]

    def _compute_contraction(self, operands: Sequence[Tensor], out: Spec, first: Layout | None) -> Contraction:
        """Apply the communication rule's `contract` to operands and their product `out`, all in their own layouts but
        for the `first` operand, if a layout is given; local shapes are filled in."""
        layouts = [self.layout(t) if i or first is None else first for i, t in enumerate(operands)]
        terms = [(t.dims, layout, isinstance(t, Parameter)) for t, layout in zip(operands, layouts, strict=True)]
        c = contract_layouts(terms, (out.dims, self.layout(out)), self.row_expert_axes(out))
        triples = zip(c.inputs, operands, layouts, strict=True)
        inputs = tuple(self.fill_shapes(enter, t, have, c.compute.restrict_dims(t.dims)) for enter, t, have in triples)
        output = self.fill_shapes(c.output, out, c.compute.restrict_dims(out.dims), self.layout(out))
        return replace(c, inputs=inputs, output=output)

    def operand_conversion(
        self, tensor: Tensor, target: Layout, axes: Sequence[str], *, source: Layout | None = None
    ) -> Conversion:
        """Return the conversion by which `tensor` enters an operation that computes on `axes` (the communication rule's
        `operand_conversion`), to layout `target` from its own layout or another `source`; local shapes are filled
        in."""
        source = self.layout(tensor) if source is None else source
        conversion = plan_operand_conversion(tensor.dims, source, target, axes, parameter=isinstance(tensor, Parameter))
        return self.fill_shapes(conversion, tensor, source, target)

    def result_conversion(self, out: Spec, source: Layout) -> Conversion:
        """Return the conversion of an operation's result `out`, in layout `source`, to its own layout, by the
        communication rule's `leave`: it is only split further, and summed where it is partial."""
        target = self.layout(out)
        return self.fill_shapes(plan_result_conversion(out.dims, source, target, source.partial), out, source, target)

    def fill_shapes(self, conversion: Conversion, tensor: Tensor, source: Layout, target: Layout) -> Conversion:
        """Fill in the local shapes, cuts and dtype of a conversion of `tensor` from layout `source` to `target`, and of
        steps `RelayoutStep.shape` where ranks that had nothing get a block, and `RelayoutStep.zigzag`."""
        before, after = self.local_shape(tensor, source), self.local_shape(tensor, target)

        def fill_steps(
            steps: Sequence[RelayoutStep], layout: Layout, shape: tuple[int, ...]
        ) -> tuple[RelayoutStep, ...]:
            """Return a conversion's steps with the local shape filled in where ranks without a block get one."""
            steps_with_shapes = shapes_along_steps(self._fill_cuts(steps, tensor, layout), shape, self.mesh)
            shaped = (replace(step, shape=then) if step.op in APPEAR else step for step, _, then in steps_with_shapes)
            return tuple(self._fill_zigzag(tensor.dims, step) for step in shaped)

        ragged = "rows" in tensor.dims and isinstance(tensor, Spec)
        steps = fill_steps(conversion.forward, source, before), fill_steps(conversion.backward, target, after)
        cuts = self.find_cuts(tensor, source), self.find_cuts(tensor, target)
        return Conversion(*steps, before, after, tensor_dtype(tensor), ragged, cuts)

    def _fill_cuts(self, steps: Sequence[RelayoutStep], tensor: Tensor, layout: Layout) -> tuple[RelayoutStep, ...]:
        """Return the steps of a conversion of a tensor from `layout`, with `RelayoutStep.cuts` filled in."""
        if not self.scheme.uneven:
            return tuple(steps)
        now, out = {d: layout[d] for d in tensor.dims}, list[RelayoutStep]()
        for step in steps:
            moved = dict.fromkeys(tensor.dims) if step.op in APPEAR else {}
            if step.op in JOIN:
                dim = tensor.dims[step.dim_joined]
                moved[dim], now[dim] = now[dim], now[dim][: -len(step.axes)]
            if step.op in SPLIT:
                dim = tensor.dims[step.dim]
                now[dim] += step.axes
                moved[dim] = now[dim]
            dim_cuts = (
                (tensor.dims.index(d), self._find_cut_of_dim(tensor, d, axes or now[d])) for d, axes in moved.items()
            )
            out.append(replace(step, cuts=tuple((i, cut) for i, cut in dim_cuts if cut)))
        return tuple(out)

    def _fill_zigzag(self, dims: Sequence[str], step: RelayoutStep) -> RelayoutStep:
        """Return a step of a conversion with the position, among `dims`, of a dim whose pieces lie in zigzag."""
        if self.scheme.zigzag not in step.axes:
            return step
        moved = [i for i, d in enumerate(dims) if d in LENGTHS and step.moves_dim(i)]
        return replace(step, zigzag=moved[0], rounds=self.scheme.rounds) if moved else step

    def stretches_of_rank(self, dim: str, size: int, layout: Layout, coordinates: Mapping[str, int]) -> list[Stretch]:
        """Return the consecutive positions along a dim of global `size`, in `layout`, that the rank at `coordinates`
        holds, in its order."""
        ((offset, extent),) = locate_block((dim,), {dim: size}, layout, self.mesh, coordinates, self.cut_units)
        dealt = self.count_zigzag_ranks(dim, layout), self.scheme.rounds
        return [Stretch(*bounds) for bounds in consecutive_ranges(offset, extent, size, *dealt)]

    def count_zigzag_ranks(self, dim: str, layout: Layout) -> int:
        """Return how many ranks hold the pieces of a dim in zigzag, in `layout`; 1 if none do."""
        axis = self.scheme.zigzag
        return self.mesh.axes[axis] if dim in LENGTHS and axis in layout[dim] else 1

    def parameter_conversion(self, operation: Operation, p: Parameter, conversion: Conversion) -> Conversion:
        """Extend the conversion of parameter `p` for its use in an operation, if the parameter's uses differ in their
        partial axes, by this use's reduction of the gradient, at the step where the gradient is smallest; and, of
        experts that multiply rows, by the exchange of lent ones. No gradient of a frozen one goes back.

        A sum over an axis of blocks padded with zeros along that axis is replaced by an all-gather of the blocks.
        """
        axes = self.reduced_at_use.get((operation.name, operation.kind, p.name), ())
        back = [replace(s, op="all_gather") if s.op == "pad" and s.axes[0] in axes else s for s in conversion.backward]
        gathered = {s.axes[0] for s, old in zip(back, conversion.backward, strict=True) if s != old}
        if summed := tuple(a for a in axes if a not in gathered):
            at = next((i for i, s in enumerate(conversion.backward) if s.op == "pad"), len(back))
            only = conversion.backward[at].only if at < len(back) else self.layout(p).only
            back.insert(at, RelayoutStep("all_reduce", summed, only=only))
        extended = replace(conversion, backward=tuple(back))
        layer = dict(operation.attributes).get("layer", "")  # of rows of experts
        if layer and self.scheme.lent:
            extended = self._add_lending(layer, extended, self.layout(p).only)
        return replace(extended, backward=()) if self.is_frozen(p) else extended

    def _add_lending(self, layer: str, conversion: Conversion, only: Sequence[str]) -> Conversion:
        """Extend the conversion of a parameter of experts, its first dim, by the exchange of lent experts, and of their
        gradients: where a rank has all of its experts. `layer`: the layer of experts; `only`: the axes at whose index 0
        alone the parameter exists."""

        def widen_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
            """Return the shape of a block of experts, with lent ones."""
            return (shape[0] + self.scheme.lent, *shape[1:]) if shape else shape

        steps, back = conversion.forward, conversion.backward
        moved = [[i for i, s in enumerate(way) if s.moves_dim(0)] for way in (steps, back)]
        at, until = max(moved[0], default=-1) + 1, min(moved[1], default=len(back))
        shapes = (after for *_, after in shapes_along_steps(steps[:at], conversion.before, self.mesh))
        *_, own_shape = conversion.before, *shapes
        appeared = {a for s in steps[:at] if s.op in APPEAR for a in s.axes}
        remaining_only = tuple(a for a in only if a not in appeared)
        lend = RelayoutStep("lend", ("expert",), only=remaining_only, shape=widen_shape(own_shape), layer=layer)
        give_back = replace(lend, op="give_back", shape=own_shape)
        widened = [[replace(s, shape=widen_shape(s.shape)) for s in way] for way in (steps[at:], back[:until])]
        forward, backward = (*steps[:at], lend, *widened[0]), (*widened[1], give_back, *back[until:])
        return replace(conversion, forward=forward, backward=backward, after=widen_shape(conversion.after))

    def collectives_of_conversion(self, conversion: Conversion, regathered: bool = False) -> list[Collective]:
        """Return the collectives that a rank launches for a conversion, in the forward and then in the backward pass;
        `regathered`: the backward pass begins by repeating the forward ones."""
        more, (forward_cuts, backward_cuts) = (conversion.dtype, conversion.ragged), conversion.cuts
        forward = self.collectives_of_steps(conversion.forward, conversion.before, "forward", *more, forward_cuts)
        repeated = [replace(c, phase="backward") for c in forward] if regathered else []
        backward = self.collectives_of_steps(conversion.backward, conversion.after, "backward", *more, backward_cuts)
        return [*forward, *repeated, *backward]

    def collectives_of_steps(
        self,
        steps: Sequence[RelayoutStep],
        shape: tuple[int, ...],
        phase: str,
        dtype: str = "compute",
        ragged: bool = False,
        cuts: Cuts = (),
    ) -> list[Collective]:
        """Return the collectives among the `steps` of a conversion, with the sizes that they have for a block of local
        shape `shape`; `phase` and `dtype` as in Collective, `ragged` and `cuts` as in Conversion."""
        collectives, differ = [], dict(cuts)
        for step, before, after in shapes_along_steps(steps, shape, self.mesh):
            unmoved_cuts = {i: cut for i, cut in differ.items() if not step.moves_dim(i)}
            if step.op in COLLECTIVES:
                counted = after if step.op == "scatter" else before
                if step.op == "all_to_allv":  # of a token's copies, one for each rank, its own stays
                    few, most = sorted((before, after))
                    counted = (min(few[0], most[0] - most[0] // self.mesh.count_ranks(step.axes)), *few[1:])
                rows = counted[0] if ragged else 0
                if step.op in LENDING:
                    rows = abs(after[0] - before[0])
                    counted = (rows, *before[1:])
                op = "all_to_allv" if step.op in LENDING else step.op
                elements, cut = prod(counted), step.uneven_cut_of_dim(step.dim)
                if cut and step.op in ("reduce_scatter", "all_to_all"):  # each block of what is split has room
                    elements = elements // before[step.dim] * after[step.dim] * self.mesh.count_ranks(step.axes)
                room = tuple(unmoved_cuts.values())
                collectives.append(Collective(op, step.axes, elements, dtype, phase, step.only, rows, room))
            differ = unmoved_cuts | self._cuts_after_step(step)
        return collectives

    def _cuts_after_step(self, step: RelayoutStep) -> dict[int, Cut]:
        """Return by position how the dims that a step moves are cut after it, if their blocks differ."""
        ranks, cuts = self.mesh.count_ranks(step.axes), dict[int, Cut]()
        if step.op in JOIN and (cut := step.uneven_cut_of_dim(step.dim_joined)):
            cuts[step.dim_joined] = replace(cut, axes=cut.axes[: -len(step.axes)], blocks=cut.blocks // ranks)
        if step.op in SPLIT and (cut := step.uneven_cut_of_dim(step.dim)):
            cuts[step.dim] = cut
        return cuts

    def statistics_collectives(
        self,
        over: Sequence[str],
        only: tuple[str, ...],
        elements: int,
        phase: str,
        op: str = "all_reduce",
        cuts: tuple[Cut, ...] = (),
    ) -> list[Collective]:
        """Return the one collective `op` by which a norm, softmax or loss merges the statistics (maxima, sums) of a dim
        that is split over the axes `over`; [] if none splits it. `elements`: statistics per rank; `only`: the axes at
        whose index 0 alone ranks take part; `phase` and `cuts` as in Collective."""
        return [Collective(op, tuple(over), elements, "accumulate", phase, only, 0, cuts)] if over else []
