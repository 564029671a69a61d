"""The one communication rule (docs/numerics.md): layouts in, collectives and their adjoints out.

Worked table: what `contract_layouts` gives for the two linear layers of a Transformer block, h = a W and o = h W, where
a and o are [l b m], h is [l b f] and every W is [m f] (l length, b batch, m d_model, f d_ff). `l/t`: dim l is split
over mesh axis t; `-`: whole everywhere, or nothing to do. AG: all-gather of a dim over an axis; RS: reduce-scatter,
which splits it; AR: all-reduce over an axis; da: the gradient of a. `compute` is the layout of the iteration space of
the local product.

            input        W         compute      output       forward                    backward
    1-D   h -            f/t       f/t          f/t          -                          AR da t
          o f/t          f/t       f/t          -            AR o t                     -
    SP    h l/t          f/t       f/t          f/t          AG a l/t                   RS da l/t
          o f/t          f/t       f/t          l/t          RS o l/t                   AG do l/t
    FSDP  h b/x          m/x       b/x          b/x          AG W m/x                   RS dW m/x
          o b/x          m/x       b/x          b/x          AG W m/x                   RS dW m/x
    2-D   h b/r m/c      m/r f/c   b/r f/c      b/r f/c      AG a m/c, W m/r            RS da m/c, dW m/r
          o b/r f/c      f/r m/c   b/r m/c      b/r m/c      AG h f/c, W f/r            RS dh f/c, dW f/r
    3-D   h l/y b/x m/z  m/zx f/y  b/x f/y m/z  l/z b/x f/y  AG a l/y, W m/x; RS h l/z  AG dh l/z; RS da l/y, dW m/x
          o l/z b/x f/y  m/zx f/y  b/x f/y m/z  l/y b/x m/z  AG h l/z, W m/x; RS o l/y  AG do l/y; RS dh l/z, dW m/x

1-D is Megatron-LM, SP its sequence parallelism; FSDP stores W split over the axis that splits the batch: 3-D on a mesh
(n, 1, 1). 2-D is `tensor=2d_gather`; SUMMA (`tensor=2d`) replaces its gathers by broadcasts of panels. A compute axis
that a parameter lacks, such as `data`, adds nothing here: the gradient stays partial over it, see `partial_axes`.

An activation that is replicated over an axis has the same, whole gradient on every rank of that axis; a split one has
its block of the gradient. A parameter's gradient may stay partial over axes until the end of the step. A tensor that
exists at index 0 of an axis alone (`Layout.only`) has its gradient there alone; on other ranks both are empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from platform.plan.layout import Cut, Cuts, Layout, base_axis, common_prefix


@dataclass(frozen=True)
class RelayoutStep:
    """Move of one tensor between layouts: a collective over the mesh axes `axes`, or a local change, which is free.
    `dim` is the position of the dim that it splits or joins.

    all_gather      joins `dim` over `axes`
    reduce_scatter  sums over `axes` and splits `dim`
    all_reduce      sums over `axes`, which may be several at once
    all_to_all      splits `dim` and joins `joined` over `axes`
    all_to_allv     rows go to the ranks of their experts, or come back: as many as the routing says
    slice           splits `dim`, free
    pad             puts the block back into zeros along `dim`, free: the adjoint of a parameter's slice
    broadcast       gives the tensor of index 0 along `axes` to all
    reduce          sums over `axes` to index 0, which alone keeps the result
    scatter         splits `dim` of the tensor of index 0
    gather          joins `dim` at index 0, which alone keeps the result
    drop            only index 0 keeps the tensor, free
    lend            adds busy experts of other ranks to a parameter's block of experts, its first dim
    give_back       adds the gradients of lent experts to those at the ranks that lent them

    Only the ranks at index 0 of the axes `only` take the step; the others have nothing. `shape`: the shape of the block
    that a broadcast or a scatter gives to ranks that had nothing, or the largest that an all_to_allv leaves,
    or a block's with lent experts, or without. `layer`: the layer whose experts are lent. `zigzag`: the position of the
    dim that it splits or joins whose pieces ranks hold in zigzag, -1 without one; `rounds`: in how many rounds the
    pieces are dealt. `cuts`: how the dims that the step moves are cut on the side on which it splits them, if their
    blocks differ; where ranks get a block, every such dim. Collectives then have the room of the longest block for
    each.
    """

    op: str
    axes: tuple[str, ...]
    dim: int = 0
    joined: int = 0
    only: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    layer: str = ""
    zigzag: int = -1
    rounds: int = 1
    cuts: Cuts = ()

    def uneven_cut_of_dim(self, dim: int) -> Cut | None:
        """Return how the dim at position `dim`, which this step splits or joins, is cut, if its blocks differ."""
        return next((cut for i, cut in self.cuts if i == dim), None)

    def moves_dim(self, dim: int) -> bool:
        """Return True if this move of a conversion splits or joins the dim at position `dim`."""
        return self.op in (*SPLIT, *JOIN) and dim in (self.dim, self.joined if self.op == "all_to_all" else self.dim)

    def apply_to_shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the local shape of the longest block of local shape `shape` after this move of a conversion; `ranks`:
        the number of ranks along the move's `axes` together."""
        if self.shape:
            return self.shape
        out = list(shape)
        if self.op in SPLIT:
            cut = self.uneven_cut_of_dim(self.dim)
            out[self.dim] = cut.longest_extent() if cut else out[self.dim] // ranks
        if self.op in JOIN:
            cut = self.uneven_cut_of_dim(self.dim_joined)
            out[self.dim_joined] = cut.longest_extent(ranks) if cut else out[self.dim_joined] * ranks
        return tuple(out)

    @property
    def dim_joined(self) -> int:
        """Return the position of the dim that this step joins, if it joins one."""
        return self.joined if self.op == "all_to_all" else self.dim


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_allv", "broadcast", "reduce",
               "scatter", "gather", "lend", "give_back")  # fmt: skip
EXCHANGES = {"all_to_all", "all_to_allv"}  # of which each rank sends another part to each other one
LENDING = ("lend", "give_back")  # whose launches are all_to_allv of the experts that are lent
SPLIT = ("reduce_scatter", "scatter", "slice", "all_to_all")  # a dim of the block gets shorter
JOIN = ("all_gather", "gather", "pad", "all_to_all")  # a dim of the block gets longer
APPEAR = ("broadcast", "scatter")  # ranks that had nothing get a block
VANISH = ("reduce", "gather", "drop")  # ranks at an index other than 0 lose their block
WIDEN = ("all_gather", "gather", "broadcast")  # blocks grow, or more ranks have one


@dataclass(frozen=True)
class Conversion:
    """Steps that a rank's block of one operand or result of an operation takes between two layouts (forward), and those
    that its gradient takes back (backward).

    `before`, `after`: local shapes in the two layouts, and `dtype`: the tensor's, which the planner fills in; `ragged`:
    its first dim is one of rows, whose sizes are the largest that can be. `cuts`: cuts before, and after, of the
    dims whose blocks differ; the shapes are then the shapes of the longest blocks.
    """

    forward: tuple[RelayoutStep, ...] = ()
    backward: tuple[RelayoutStep, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    dtype: str = "compute"
    ragged: bool = False
    cuts: tuple[Cuts, Cuts] = ((), ())


def relayout_steps(dims: Sequence[str], source: Layout, target: Layout) -> tuple[RelayoutStep, ...]:
    """Return the fewest moves that bring a tensor with dims `dims` from layout `source` to layout `target`: slices
    first (they shrink what moves), one all-to-all for an axis that moves between dims, gathers of the minor axis first.
    """
    now = {d: list(source[d]) for d in dims}
    only = list(source.only)
    target_axes = {a for d in dims for a in target[d]}
    steps: list[RelayoutStep] = []

    def next_axis(d: str) -> str | None:
        """Return the mesh axis that the target layout adds next to dim `d`, None if none can be added yet."""
        goal = target[d]
        return goal[len(now[d])] if len(now[d]) < len(goal) and list(goal[: len(now[d])]) == now[d] else None

    def has_surplus_axis(d: str) -> bool:
        """Return True if dim `d` is still split over an axis that the target layout lacks there."""
        return list(common_prefix(now[d], target[d])) != now[d]

    def next_move() -> RelayoutStep | None:
        """Return the next move towards the target layout, the cheapest kind first; None once it is reached."""
        used = {a for axes in now.values() for a in axes} | {base_axis(a) for a in only}
        if dropped := tuple(a for a in target.only if a not in only and a not in used):
            only.extend(dropped)
            return RelayoutStep("drop", dropped)
        wanting = [(i, d, a) for i, d in enumerate(dims) if (a := next_axis(d))]
        for i, d, a in wanting:
            if a in only:
                only.remove(a)
                now[d].append(a)
                return RelayoutStep("scatter", (a,), i)
            if a not in used:
                now[d].append(a)
                return RelayoutStep("slice", (a,), i)
        if shared := tuple(a for a in only if a not in target.only and a not in target_axes):
            only[:] = [a for a in only if a not in shared]
            return RelayoutStep("broadcast", shared)
        for i, d, a in wanting:
            for j, e in enumerate(dims):
                if e != d and has_surplus_axis(e) and now[e][-1] == a:
                    now[e].pop()
                    now[d].append(a)
                    return RelayoutStep("all_to_all", (a,), i, j)
        surplus_dims = sorted((now[d][-1] in target_axes, j) for j, d in enumerate(dims) if has_surplus_axis(d))
        if not surplus_dims:
            return None
        j = surplus_dims[0][1]
        axis = now[dims[j]].pop()
        if axis not in target.only:
            return RelayoutStep("all_gather", (axis,), j)
        only.append(axis)
        return RelayoutStep("gather", (axis,), j)

    while step := next_move():
        steps.append(step)
    assert all(tuple(now[d]) == target[d] for d in dims), (dims, source, target)
    assert set(only) == set(target.only), (dims, source, target)
    return _fill_only(steps, source.only)


def _adjoint_steps(step: RelayoutStep, partial: Sequence[str], parameter: bool) -> list[RelayoutStep]:
    """Return the moves that undo one forward move of an operand's conversion, taken by its gradient, which is `partial`
    over these axes. `parameter`: the operand is one; then a slice is undone by padding with zeros, which keeps the sum
    partial. Raises ValueError for a parameter that would be used at index 0 alone."""
    match step.op:
        case "all_gather":
            return [replace(step, op="reduce_scatter" if step.axes[0] in partial else "slice")]
        case "slice":
            return [replace(step, op="pad" if parameter else "all_gather")]
        case "all_to_all":
            return [replace(step, dim=step.joined, joined=step.dim)]
        case "broadcast":
            summed = tuple(a for a in step.axes if base_axis(a) in partial)
            unsummed = tuple(a for a in step.axes if a not in summed)
            return [RelayoutStep(op, axes) for op, axes in (("drop", unsummed), ("reduce", summed)) if axes]
    if parameter and step.op in ("drop", "gather"):
        raise ValueError("a parameter of every rank would be used at index 0 alone")
    return [replace(step, op=_ADJOINT[step.op])] if step.op != "all_reduce" else []


_ADJOINT = {"scatter": "gather", "gather": "scatter", "drop": "broadcast", "reduce": "broadcast",
            "reduce_scatter": "all_gather"}  # fmt: skip


def _add_sums(steps: Sequence[RelayoutStep], source: Layout, target: Layout) -> tuple[RelayoutStep, ...]:
    """Return the steps of a conversion with the sums of a tensor that is partial in layout `source`. Where a step takes
    a part of it, that is summed, and what `target` does not leave partial in the end."""
    if not source.partial:
        return tuple(steps)
    out = list[RelayoutStep]()
    for step in steps:
        if step.op == "slice" and step.axes[0] in source.partial:
            step = replace(step, op="reduce_scatter")
        summed = tuple(a for a in step.axes if step.op == "drop" and a in source.partial)
        unsummed = tuple(a for a in step.axes if a not in summed)
        out += [replace(step, axes=unsummed)] if unsummed else []
        out += [RelayoutStep("reduce", summed)] if summed else []
    left = tuple(a for a in source.partial if a not in (*target.axes, *target.only, *target.partial))
    return _fill_only([*out, *([RelayoutStep("all_reduce", left)] if left else [])], source.only)


def _fill_only(steps: Sequence[RelayoutStep], only: Sequence[str]) -> tuple[RelayoutStep, ...]:
    """Fill in which ranks take each move of a conversion (`RelayoutStep.only`): the axes at whose index 0 alone ranks
    take the move. `only`: the axes at whose index 0 alone the tensor exists at the start."""
    axes_at_zero = list(only)
    located = []
    for step in steps:
        if step.op in APPEAR:
            axes_at_zero = [a for a in axes_at_zero if a not in step.axes]
        located.append(replace(step, only=tuple(axes_at_zero)))
        if step.op in VANISH:
            axes_at_zero += step.axes
    return tuple(located)


def plan_operand_conversion(
    dims: Sequence[str], source: Layout, target: Layout, compute_axes: Sequence[str], *, parameter: bool = False
) -> Conversion:
    """Return the conversion by which an operand with dims `dims` enters an operation that computes on `compute_axes`
    (the communication rule, steps 2 and 3): from its layout `source` to `target`, and its gradient back.

    The gradient of an activation is all-reduced over the compute axes that it lacks, but for those over which `source`
    leaves it partial (`Layout.gradient`); a parameter's (`parameter`) stays partial over `partial_axes`. Raises
    ValueError for a parameter that all ranks have and only ranks at index 0 would use.
    """
    forward = _add_sums(relayout_steps(dims, source, target), source, target)
    # The gradient is partial over the compute axes that do not split this operand: undoing a slice gives every
    # rank the whole gradient (for a parameter, zeros around its block).
    partial = [a for a in compute_axes if parameter or a not in target.axes]
    backward = [adjoint for s in reversed(forward) for adjoint in _adjoint_steps(s, partial, parameter)]
    left = (*target.axes, *source.gradient)
    lacking = tuple(a for a in partial_axes(source, compute_axes) if a not in left)
    if lacking and not parameter:
        # all-reduce the smallest tensor: after steps that shrink it or leave fewer ranks, before steps that widen it
        at = next((i for i, s in enumerate(backward) if s.op in WIDEN), len(backward))
        backward.insert(at, RelayoutStep("all_reduce", lacking))
    return Conversion(forward, _fill_only(backward, target.only))


def partial_axes(source: Layout, compute_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which an operation that computes on `compute_axes` leaves the gradient of a parameter in
    layout `source` partial: ranks along them hold summands of it."""
    return tuple(a for a in compute_axes if a not in (*source.axes, *map(base_axis, source.only)))


def plan_result_conversion(dims: Sequence[str], source: Layout, target: Layout, partial: Sequence[str]) -> Conversion:
    """Return the conversion of an operation's local result with dims `dims`, partial (to be summed) over the axes
    `partial`, to its own layout (the communication rule, step 5): from layout `source` to the wanted `target`; `source`
    is a prefix of `target` in every dim."""
    forward: list[RelayoutStep] = []
    left = list(partial)
    for i, d in enumerate(dims):
        for axis in target[d][len(source[d]) :]:
            if axis in left:
                left.remove(axis)
                forward.append(RelayoutStep("reduce_scatter", (axis,), i))
            else:
                forward.append(RelayoutStep("slice", (axis,), i))
    backward = [replace(s, op="all_gather") for s in reversed(forward)]
    to_zero = tuple(a for a in target.only if a in left)
    dropped = tuple(a for a in target.only if a not in (*left, *source.only))
    forward += [RelayoutStep(op, axes) for op, axes in (("drop", dropped), ("reduce", to_zero)) if axes]
    if dropped or to_zero:
        backward.insert(0, RelayoutStep("broadcast", (*dropped, *to_zero)))
    if summed := tuple(a for a in left if a not in (*to_zero, *target.partial)):
        forward.append(RelayoutStep("all_reduce", summed))
    return Conversion(_fill_only(forward, source.only), _fill_only(backward, target.only))


@dataclass(frozen=True)
class Contraction:
    """Outcome of the communication rule for one einsum: its compute layout and the conversions of its operands and its
    result."""

    compute: Layout  # of every dim of the iteration space; `only`: the ranks that compute it
    axes: tuple[str, ...]  # C: all axes in the compute layout
    inputs: tuple[Conversion, ...]
    output: Conversion


NONE_PICKED: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def contract_layouts(
    inputs: Sequence[tuple[Sequence[str], Layout, bool]],
    output: tuple[Sequence[str], Layout],
    picked: Mapping[str, tuple[str, ...]] = NONE_PICKED,
) -> Contraction:
    """Apply the communication rule to an einsum of (dims, layout, is_parameter) operands into a result (dims, layout):
    choose its compute layout and the conversions of operands and result. `picked`: the axes that split, in this
    product, a dim of which another's indices each pick one, as each row of an activation picks its expert; the
    iteration space lacks it.

    Raises ValueError if one axis would split two dims of the iteration space; the message names the axis and the dims.
    """
    out_dims, out = output
    space = list(dict.fromkeys(d for dims, _, _ in inputs for d in dims if d not in picked))
    compute: dict[str, tuple[str, ...]] = {}
    for d in space:
        lists = [layout[d] for dims, layout, _ in inputs if d in dims]
        compute[d] = common_prefix(*lists, out[d]) if d in out_dims else common_prefix(*lists)

    def axes_in_use() -> set[str]:
        """Return the mesh axes that already split a dim of the einsum's compute layout."""
        return {a for axes in compute.values() for a in axes}

    for d in out_dims:  # a dim that no operand splits and the output wants split is sliced first
        for axis in out[d][len(compute[d]) :]:
            if axis in axes_in_use():
                break
            compute[d] += (axis,)

    # computed where the output exists; an axis that splits a dim leaves `only`
    layout = Layout.build_canonical(compute, out.only)
    if clash := layout.find_conflict():
        raise ValueError(f"axis {clash[0]} would split both {clash[1]} and {clash[2]}")
    axes = tuple(dict.fromkeys(a for d in space for a in compute[d]))
    partial = [a for d in space if d not in out_dims for a in compute[d]]
    layout = Layout.build_canonical({**layout, **picked}, layout.only)
    return Contraction(
        compute=layout,
        axes=axes,
        inputs=tuple(
            plan_operand_conversion(dims, have, layout.restrict_dims(dims), axes, parameter=is_parameter)
            for dims, have, is_parameter in inputs
        ),
        output=plan_result_conversion(out_dims, layout.restrict_dims(out_dims), out, partial),
    )
