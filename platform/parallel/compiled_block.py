"""Blocks of a model in which no collective lies, each compiled as one function: its forward pass is traced once, and
torch.compile makes that and its backward pass of few kernels, which save what they need."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from platform.parallel.kernels.residual import Region
from platform.parallel.sharding.flat import FlatBucket, home_of


@dataclass(frozen=True)
class CompiledBlock:
    """Compiled block: `function(*arguments, *tensors)`, to be compiled, computes its activation. `tensors`: leaves of
    autograd that it reads beside its arguments; `homes`: the bucket and parameters of each, None if it is no
    parameter."""

    function: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    homes: Sequence[tuple[FlatBucket, tuple[str, ...]] | None]

    def __call__(self, region: Region, *arguments: Tensor | None) -> Tensor:
        """Return the block's output, compiled by `region`; its backward pass adds up the parameters' gradients."""
        made = region(self.function)
        if torch.is_grad_enabled():
            return _Block.apply(self, made, *arguments)
        return made(*(x for x in arguments if x is not None), *self.tensors)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the block's parameters, in the order of `tensors`, to their sums."""
        homes = [home for home in self.homes if home]
        places = [bucket.sum_of(*names) for bucket, names in homes]
        for fresh, function in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
            if chosen := [i for i, (_, new) in enumerate(places) if new == fresh]:
                function([places[i][0] for i in chosen], [gradients[i].reshape(-1) for i in chosen])
        for bucket, names in homes:
            bucket.came(*names)


class _Block(torch.autograd.Function):
    """Autograd function of a `CompiledBlock`, whose graph is one of its own."""

    @staticmethod
    def forward(ctx, block: CompiledBlock, made: Callable[..., Tensor], *arguments: Tensor | None):
        """Return the block's activation, computed by `made`, whose graph is kept for the backward pass."""
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inside = [x if x is None else x.detach().requires_grad_(n) for x, n in zip(arguments, needed, strict=True)]
            ctx.out = made(*(x for x in inside if x is not None), *block.tensors)
        ctx.block, ctx.inside = block, inside
        return ctx.out.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        """Return the gradients of the block's arguments, and add its parameters' to their sums."""
        block, out, inside = ctx.block, ctx.out, ctx.inside
        del ctx.out, ctx.inside
        given = [x for x in inside if x is not None and x.requires_grad]
        parameters = [t for t, home in zip(block.tensors, block.homes, strict=True) if home]
        found = torch.autograd.grad(out, [*given, *parameters], gradient)
        block.add(found[len(given) :])
        left = iter(found)
        return None, None, *(next(left) if x is not None and x.requires_grad else None for x in inside)


def compiled_block(
    function: Callable[..., Tensor], arguments: Sequence[Tensor | None], alike: Callable[[], Container[int]]
) -> CompiledBlock | None:
    """Return `function` of activations, a block of a model without collectives, traced for `arguments` like these.
    None if it reads tensors that are neither parameters nor among `alike`, the ids of those alike in all passes."""
    present = {i: x for i, x in enumerate(arguments) if x is not None}

    def given(*activations: Tensor) -> Tensor:
        every: list[Any] = [None] * len(arguments)
        for i, x in zip(present, activations, strict=True):
            every[i] = x
        return function(*every)

    # as in training: attention keeps what its backward pass needs only where there is one
    activations = [x.detach().requires_grad_() for x in present.values()]
    with torch.enable_grad():
        given(*activations)  # makes what is alike in all passes
        graph = _differentiable(make_fx(given)(*activations))
    tensors = _read_beside(graph)
    homes = [home_of(t) for t in tensors]
    known = alike()
    if any(home is None and id(t) not in known for t, home in zip(tensors, homes, strict=True)):
        return None
    leaves = [t.detach().requires_grad_(home is not None) for t, home in zip(tensors, homes, strict=True)]
    return CompiledBlock(_traced(graph.code, _Graph(graph)), leaves, homes)


class _Graph:
    """Traced graph that counts as equal to any other: its code is the key."""

    def __init__(self, graph: GraphModule):
        """Construct the stand-in of a traced graph as an argument of a cached function."""
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Graph)

    def __hash__(self) -> int:
        return 0


@cache
def _traced(code: str, traced: _Graph) -> Callable[..., Tensor]:
    """Return the function of a traced graph; blocks with equal `code`, the layers of a stack, share it."""
    graph = traced.graph

    def block(*tensors: Tensor) -> Tensor:
        """Compute a block from its arguments and the tensors that it reads beside them."""
        return graph(*tensors)

    return block


def _differentiable(graph: GraphModule) -> GraphModule:
    """Return a traced forward pass without the detaching of what autograd functions of our own compute with, as its
    gradient is torch's."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _read_beside(graph: GraphModule) -> list[Tensor]:
    """Turn the tensors that a traced graph reads beside its arguments into further arguments, and return them."""
    nodes = graph.graph.nodes
    found: dict[str, Any] = {}
    tensors = []
    first = next(node for node in nodes if node.op != "placeholder")
    for node in [node for node in nodes if node.op == "get_attr"]:
        if node.target not in found:
            tensors.append(getattr(graph, node.target))
            with graph.graph.inserting_before(first):
                found[node.target] = graph.graph.placeholder(f"beside_{len(tensors)}")
        node.replace_all_uses_with(found[node.target])
        if node is first:
            first = node.next
        graph.graph.erase_node(node)
    graph.recompile()
    return tensors
