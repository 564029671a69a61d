"""Mutants of plans: one thing of a plan changed, as a mistake in the code that made it would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch

from platform.plan.chunks import Chunk
from platform.plan.operation_plan import PlannedOperation
from platform.plan.plan import Plan
from platform.plan.rule import JOIN, SPLIT, Conversion, RelayoutStep

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "pad", "broadcast", "reduce")
Change = Callable[[PlannedOperation], PlannedOperation]
Put = Callable[[Conversion], PlannedOperation]
Steps = Callable[[Sequence[RelayoutStep]], Sequence[RelayoutStep]]


def with_operations(plan: Plan, kind: str, name: str, change: Change) -> Plan:
    """Change the operations of a kind whose names match a pattern; there must be some."""
    keys = [key for chunk in plan.chunks for key in chunk.operations if key[0] == kind and fnmatch(key[1], name)]
    assert keys, f"no {kind} {name}"

    def changed(chunk: Chunk) -> Chunk:
        return replace(chunk, operations={k: change(o) if k in keys else o for k, o in chunk.operations.items()})

    return replace(plan, chunks=tuple(map(changed, plan.chunks)))


def with_reductions(plan: Plan, name: str, change: Callable[[Sequence[str]], Sequence[str]]) -> Plan:
    """Change over which axes the gradients of parameters whose names match a pattern are summed once a step."""
    names = [p.name for p in plan.parameters if fnmatch(p.name, name)]
    assert names, f"no parameter {name}"
    return replace(
        plan, reductions={n: tuple(change(axes)) if n in names else axes for n, axes in plan.reductions.items()}
    )


def conversions(
    planned: PlannedOperation,
) -> Iterator[tuple[str, Conversion, Callable[[Conversion], PlannedOperation]]]:
    """Yield every conversion of a planned operation: what it converts, itself, and a function that puts another in its
    place."""
    for i, c in enumerate(planned.conversions):
        before, behind = planned.conversions[:i], planned.conversions[i + 1 :]
        yield str(i), c, lambda new, before=before, behind=behind: replace(planned, conversions=(*before, new, *behind))
    for i, group in enumerate(planned.groups):
        first, rest = planned.groups[:i], planned.groups[i + 1 :]

        def grouped(new, first=first, rest=rest):
            return replace(planned, groups=(*first, new, *rest))

        yield f"{i} x", group.x, lambda new, group=group, put=grouped: put(replace(group, x=new))
        for j, e in enumerate(group.einsums):
            for part in ("operand", "output"):

                def put_part(new, group=group, j=j, e=e, part=part, put=grouped):
                    einsums = (*group.einsums[:j], replace(e, **{part: new}), *group.einsums[j + 1 :])
                    return put(replace(group, einsums=einsums))

                yield f"{i} {j} {part}", getattr(e, part), put_part


def with_steps(part: str, way: str, change: Steps) -> Change:
    """Change the steps of one conversion of an operation, as `conversions` names it, in one way (forward, backward).
    Something must change."""

    def changed(planned: PlannedOperation) -> PlannedOperation:
        ((c, put),) = [(c, put) for name, c, put in conversions(planned) if name == part]
        steps = tuple(change(getattr(c, way)))
        assert steps != getattr(c, way), f"{planned.operation.kind} {planned.operation.name} {part} {way}: {steps}"
        return put(replace(c, **{way: steps}))

    return changed


def without(op: str) -> Steps:
    """Drop the steps of one kind."""
    return lambda steps: [s for s in steps if s.op != op]


def twice(op: str) -> Steps:
    """Take the steps of one kind twice."""
    return lambda steps: [again for s in steps for again in ([s, s] if s.op == op else [s])]


def other(kind: str, **fields) -> Steps:
    """Change fields of the steps of one kind."""
    return lambda steps: [replace(s, **fields) if s.op == kind else s for s in steps]


def every_step(c: Conversion, dims: int, axes: Sequence[str]) -> Iterator[Conversion]:
    """Yield the conversions in which one step is left out, is taken twice, or has another kind, dim or axis."""
    for way in ("forward", "backward"):
        steps = getattr(c, way)
        for i, s in enumerate(steps):
            others = [replace(s, op=op) for op in OPS if op != s.op]
            others += [replace(s, axes=(a,)) for a in axes if (a,) != s.axes]
            others += [replace(s, dim=d) for d in range(dims) if d != s.dim and s.op in SPLIT + JOIN]
            others += [replace(s, joined=d) for d in range(dims) if d != s.joined and s.op == "all_to_all"]
            others += [replace(s, rounds=3 - s.rounds), replace(s, zigzag=-1, rounds=1)] if s.zigzag >= 0 else []
            for new in ([], [s, s], *([other] for other in others)):
                yield replace(c, **{way: (*steps[:i], *new, *steps[i + 1 :])})


def every_reading(o: PlannedOperation, axes: Sequence[str]) -> Iterator[PlannedOperation]:
    """Yield the operations that compute on one axis more or less, or read their data tensor so, or that move a tensor
    in another type."""
    for part, c, put in conversions(o):
        if c.forward or c.backward or "output" in part:
            yield put(replace(c, dtype="compute" if c.dtype == "accumulate" else "accumulate"))
    for axis in axes:
        have, tokens = o.compute_axes, o.tokens
        yield replace(o, compute_axes=tuple(a for a in have if a != axis) if axis in have else (*have, axis))
        if o.operation.reads:
            rules = {d: [a for a in tokens[d] if a != axis] for d in ("batch", "length")}
            rules["batch"] += [] if axis in tokens.axes else [axis]
            yield replace(o, tokens=type(tokens).build_canonical(rules, tokens.only))


def every_reduction(plan: Plan, name: str) -> Iterator[Plan]:
    """Yield the plans in which a parameter's gradient is summed over one axis more or less, or once more."""
    have, axes = plan.reductions[name], [a for a, n in plan.mesh.axes.items() if n > 1]
    others = [tuple(b for b in have if b != a) for a in have] + [(*have, a) for a in axes]
    yield from (replace(plan, reductions={**plan.reductions, name: new}) for new in others)


def with_steps_where(plan: Plan, kind: str, name: str, part: str, way: str, change: Steps) -> Plan:
    """Change the steps of one conversion of the operations of a kind whose names match a pattern, where they change."""

    def changed(planned: PlannedOperation) -> PlannedOperation:
        if planned.operation.kind != kind or not fnmatch(planned.operation.name, name):
            return planned
        matches = [(c, put) for known, c, put in conversions(planned) if known == part]
        for c, put in matches:
            planned = put(replace(c, **{way: tuple(change(getattr(c, way)))}))
        return planned

    chunks = (replace(c, operations={key: changed(o) for key, o in c.operations.items()}) for c in plan.chunks)
    return replace(plan, chunks=tuple(chunks))
