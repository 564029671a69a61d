"""Branches as one more tensor dim: D&SP for "any neural network with multiple branches" (SUPER, Jain et al.).

Isomorphic branches are stacked: their weights have a dim that enumerates them (`branch`; `heads` in a Transformer). The
layout rule splits that dim over any axis that a layout gives it, and joining by sum is a contraction. Branches that
differ only in their pointwise function stay stacked (`pointwise_per_branch`). Branches of any widths and depths are
`UnlikeBranches`: each is computed on one sub-grid, to which it is dealt by its cost.

`TwoLayer` is the example of Mesh-TensorFlow (Shazeer et al. 2018, section 8): y = relu(x w + bias) v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.layers import Layer
from platform.plan.model_types import BranchPlace, Parameter, Spec
from platform.plan.operations.registry import Ops

Inside = Callable[..., Any]  # (ops, each projection's output) -> the branches' activation before the join


class Branches(Layer):
    """Layer of isomorphic branches: x -> each branch's projections of x -> `inside` -> join.

    `source`: the Spec of x; `inner`: the Spec of the branches' activation, which has `dim`; `out`: the result's Spec.
    `projections`: names of the weights from x into every branch; with none, a branch holds its slice of x.
    `slices`: the Spec of x cut into slices, one per branch [... dim part]; None: every branch reads all of x.
    `join`: `sum` maps each branch to `out` by a weight of its own and adds them up; `concatenate` puts the branches
    side by side along the last dim of `out`, which is as wide as all of them together.
    Weights are normal with `std` (the join's with `out_std`) and named after the layer.
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
        """Construct the weights of a model layer of parallel branches called `name`: one Parameter per projection into
        all branches and, where they are joined by sum, one for the join. The class describes the arguments; `dim`: name
        of the dim that enumerates the branches."""
        assert dim in inner.dims and join in ("sum", "concatenate") and (projections or slices)
        self.name, self.source, self.slices, self.inner, self.out = name, source, slices, inner, out
        read = slices or source

        def build_weight(part: str, role: str, first: Spec, second: Spec, spread: float) -> Parameter:
            """Construct a weight of a model's parallel branches between two activations: its dims are the dims that
            only one of them has, and the branch dim; the contracted dims of an `in` weight come last. `part`: last part
            of its name; `role`: its role, see `Parameter`; `spread`: its initial standard deviation."""
            dims = tuple(d for d in first.dims if d not in second.dims)
            dims += tuple(d for d in second.dims if d not in first.dims or d == dim)
            sizes = tuple((d, n) for d, n in dict((*first.sizes, *second.sizes)).items() if d in dims)
            turned = role == "in"
            dims = dims[turned:] + dims[:turned]
            return Parameter(f"{name}.{part}", dims, role, std=spread, decay=True, sizes=sizes, turned=turned)

        self.weights = [build_weight(p, "in", read, inner, std) for p in projections]
        joined = std if out_std is None else out_std
        self.joining = [build_weight("output", "out", out, inner, joined)] if join == "sum" else []

    def __call__(self, ops: Ops, x: Any, inside: Inside | None = None) -> Any:
        """Run this model layer of parallel branches: project x [source] into the branches, apply `inside` to them, and
        return them joined into one activation [out]. `inside(ops, *projected)` computes all branches of this rank at
        once, with any ops on tensors that have the branch dim; None: the branches are joined as they are. For branches
        that differ only in their pointwise function see `pointwise_per_branch`."""
        read = self.slices or self.source
        if self.slices:
            x = ops.reshape(f"{self.name}.slices", x, self.source, self.slices)
        projected = ops.project(x, read, self.weights, [self.inner] * len(self.weights)) if self.weights else (x,)
        y = inside(ops, *projected) if inside else projected[0]
        if self.joining:
            return ops.project(y, self.inner, self.joining, (self.out,))[0]
        return ops.reshape(f"{self.name}.join", y, self.inner, self.out)


def pointwise_per_branch(functions: Sequence[str], inner: Spec, dim: str = "branch") -> Inside:
    """Return an `inside` for a model's `Branches` that applies the pointwise function `functions[i]` (by name) to
    branch i, on the ranks that hold that branch. `inner`: the Spec of the branches' activation, whose dim `dim`
    enumerates them."""
    return lambda ops, x: ops.pointwise_each(functions, x, inner, dim)


class UnlikeBranches(Layer):
    """Layer of branches that are not alike: x [source] -> each branch of x -> their sum [source].

    A branch splitting (`branch=dsp`) computes each branch on one sub-grid, which alone has its weights; with fewer
    sub-grids than branches some get several. The costliest is dealt first, each to the sub-grid that has least so far.
    A branch costs the elements of its weights, which are the products of a token.
    """

    def __init__(
        self, name: str, source: Spec, builders: Sequence[Callable[[BranchPlace | None], Any]], sizes: Mapping[str, int]
    ):
        """Construct the branches of a model layer called `name`. Each of `builders` returns a branch, which maps
        activations of type `source` to such ones, all of whose tensors have the place that it is given. `sizes`: the
        model's dims."""
        costs = tuple(_count_elements(build(None), sizes) for build in builders)
        self.name, self.source, self.places = name, source, [BranchPlace(i, costs) for i in range(len(costs))]
        self.branches = [build(place) for build, place in zip(builders, self.places, strict=True)]

    def __call__(self, ops: Ops, x: Any) -> Any:
        """Run this model layer of branches that are not alike: return the sum of all branches of x."""
        specs = [replace(self.source, place=place) for place in self.places]
        inputs = ops.split_branches(f"{self.name}.split", x, self.source, specs)
        results = [branch(ops, y) for branch, y in zip(self.branches, inputs, strict=True)]
        return ops.sum_branches(f"{self.name}.sum", results, specs, self.source)


def _count_elements(layer: Layer, sizes: Mapping[str, int]) -> int:
    """Return the elements of the declared weights of a model layer; `sizes`: the model's dims."""
    return sum(prod({**sizes, **dict(p.sizes)}[dim] for dim in p.dims) for p in layer.parameters())


class FeedForwardBranch(Layer):
    """Branch of feed-forward layers, one after another: each widens x [source] to one of `widths`, and narrows it."""

    def __init__(
        self,
        name: str,
        source: Spec,
        widths: Sequence[int],
        place: BranchPlace | None,
        *,
        function: str = "relu",
        std: float,
    ):
        """Construct the weights of a model's branch called `name`, of pointwise `function`, normal with `std`."""
        self.source, self.function = replace(source, place=place), function
        self.pairs, self.inner = list[Parameter](), list[Spec]()
        for i, width in enumerate(widths):
            sizes, dims = (("d_ff", width),), (source.dims[-1], "d_ff")
            weights = {"up": (dims[::-1], "in"), "down": (dims, "out")}
            self.pairs += [
                Parameter(f"{name}.{i}.{part}", d, role, "normal", std, True, sizes, role == "in", place)
                for part, (d, role) in weights.items()
            ]
            self.inner.append(Spec("mlp", (*source.dims[:-1], "d_ff"), (*source.sizes, *sizes), place=place))

    def __call__(self, ops: Ops, x: Any) -> Any:
        """Run this branch of a model: return x after its layers."""
        for up, down, inner in zip(self.pairs[::2], self.pairs[1::2], self.inner, strict=True):
            (h,) = ops.project(x, self.source, (up,), (inner,))
            (x,) = ops.project(ops.pointwise(self.function, h), inner, (down,), (self.source,))
        return x


IO = Spec.of("stream", "length batch io")
HIDDEN = Spec.of("mlp", "length batch hidden")


class TwoLayer:
    """Regression model of Mesh-TensorFlow's example: `forward` maps ids [length, batch] to half the summed squared
    error of y against |x|, where x are fixed random features of the ids.

    hidden = 2 io units can represent |x| = relu(x) + relu(-x) exactly. The paper's batch is length x batch here; the
    shipped configuration has length 1. Labels are not read.
    """

    inputs = ("tokens",)

    def __init__(self, c: ModelConfig):
        """Construct the two weight matrices and the bias of the two-layer example model, and the sizes of its dims."""
        self.sizes = {"length": c.length, "io": c.io, "hidden": c.hidden, "vocab": c.vocab}
        self.w = Parameter("w", ("io", "hidden"), "in", std=1 / sqrt(c.io), decay=True)
        self.bias = Parameter("bias", ("hidden",), "in", "zeros")
        self.v = Parameter("v", ("hidden", "io"), "out", std=1 / sqrt(c.hidden), decay=True)

    def parameters(self) -> list[Parameter]:
        """Return the two-layer example model's declared weights: first matrix w, its bias, second matrix v."""
        return [self.w, self.bias, self.v]

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        """Return the example model's loss: half the summed squared error of y against |x|, x random features of ids."""
        x = ops.features("x", inputs["tokens"], IO)
        (h,) = ops.project(x, IO, (self.w,), (HIDDEN,), (self.bias,))
        (y,) = ops.project(ops.pointwise("relu", h), HIDDEN, (self.v,), (IO,))
        return ops.squared_error("loss", y, ops.pointwise("absolute", x), IO, inputs["tokens"])
