"""Branches: "any neural network with multiple branches" (D&SP, paper 002) as one more tensor dim.

Isomorphic branches are stacked: their weights have a dim that enumerates them (`branch`; `heads` in a Transformer), so
that the rule shares them over whatever axis a layout puts on it, and joining by sum is a contraction. Branches that
differ in their pointwise function stay stacked (`different`); those of other shapes are a block of their own, and the
results are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from platform.plan.language.ops import Ops, Parameter, Spec

Inside = Callable[..., Any]  # (ops, what each projection gives) -> what the branches hold before they are joined


class Branches:
    """x -> the branches' projections of x -> `inside` -> the join.

    `source` is the Spec of x, `inner` of what the branches hold (it has `dim`), `out` of the result.
    `projections` names the weights from x into every branch; without any, a branch holds its slice of x.
    `slices`: the Spec of x cut into slices, one per branch [... dim part]; without it every branch reads all of x.
    `join`: `sum` maps each branch to `out` by a weight of its own and adds them up; `concatenate` puts the branches
    side by side along the last dim of `out`, which then is as wide as all of them.
    Weights are normal with `std` (`out_std` for the join's), and named after the block.
    """

    def __init__(
        self,
        name: str,
        source: Spec,
        inner: Spec,
        out: Spec,
        *,
        dim: str = "branch",
        projections: Sequence[str] = ("input",),
        slices: Spec | None = None,
        join: str = "sum",
        std: float,
        out_std: float | None = None,
    ):
        assert dim in inner.dims and join in ("sum", "concatenate") and (projections or slices)
        self.name, self.source, self.slices, self.inner, self.out = name, source, slices, inner, out
        read = slices or source

        def weight(part: str, role: str, first: Spec, second: Spec, spread: float) -> Parameter:
            """Between two activations: the dims that only one of them has, and the branch."""
            dims = tuple(d for d in first.dims if d not in second.dims)
            dims += tuple(d for d in second.dims if d not in first.dims or d == dim)
            sizes = tuple((d, n) for d, n in dict((*first.sizes, *second.sizes)).items() if d in dims)
            return Parameter(f"{name}.{part}", dims, role, std=spread, decay=True, sizes=sizes)

        self.weights = [weight(p, "in", read, inner, std) for p in projections]
        joined = std if out_std is None else out_std
        self.joining = [weight("output", "out", out, inner, joined)] if join == "sum" else []

    def parameters(self) -> list[Parameter]:
        return [*self.weights, *self.joining]

    def __call__(self, ops: Ops, x: Any, inside: Inside | None = None) -> Any:
        """`inside(ops, *projected)` computes this rank's branches at once: any ops on tensors that have the dim.

        Branches that differ in their function alone: see `different`.
        """
        read = self.slices or self.source
        if self.slices:
            x = ops.reshape(f"{self.name}.slices", x, self.source, self.slices)
        held = ops.project(x, read, self.weights, [self.inner] * len(self.weights)) if self.weights else (x,)
        y = inside(ops, *held) if inside else held[0]
        if self.joining:
            return ops.project(y, self.inner, self.joining, (self.out,))[0]
        return ops.reshape(f"{self.name}.join", y, self.inner, self.out)


def different(functions: Sequence[str], inner: Spec, dim: str = "branch") -> Inside:
    """The inside of branches that differ: pointwise function i in branch i, computed by the ranks that hold it."""
    return lambda ops, x: ops.pointwise_each(functions, x, inner, dim)
