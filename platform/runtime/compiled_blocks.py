"""Blocks of a model, each compiled as two functions, its forward and its backward pass: they are traced once, and
torch.compile makes each of few kernels, with no graph of autograd between them. A schedule that takes weight gradients
apart gets the backward pass as two functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import chain, repeat
from operator import is_not
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from platform.runtime.communicator import Communicator
from platform.runtime.compilation import TracedFunction
from platform.runtime.einsum import Deferred
from platform.runtime.flat_buffers import (
    FlatBucket,
    TracedGradients,
    add_gradients_together,
    find_bucket_of_copies,
    find_bucket_of_leaf,
)
from platform.runtime.residual import Region
from platform.runtime.traced_collectives import CollectiveTrace, launch_collectives_of

# autograd's thread, whose first kernels are a compiled backward pass's, has no context when it comes to a product
warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")

Home = tuple[FlatBucket, tuple[str, ...]]  # bucket of compute copies, and the parameters that these are
# (bucket, names of parameters that lie one after another in it, indices of their gradients among a block's tensors in
# the same order, number of elements of each)
Destination = tuple[FlatBucket, tuple[str, ...], Sequence[int], Sequence[int]]
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
# where what follows an operand is a result, or other ranks'
_NEVER_ROUNDED = {
    *_PRODUCTS,
    *(getattr(torch.ops.platform, name).default for name in ("multiply_scaled", "launch", "wait")),
}
_is_tensor = partial(is_not, None)  # of an argument; called in C, as all that each block and microbatch costs the host


@dataclass(frozen=True)
class BlockFunctions:
    """A block's functions, to be compiled, of its arguments and of the tensors that it reads beside them (primals).
    `forward(*primals)`: its `outputs`, and the intermediate results that the backward pass needs, which cost no further
    reads or writes. `backward(*primals[kept], *results, *gradients)`: the gradients of all primals, None for one
    without, by the gradients of the outputs. `kept`: indices of the primals that the backward pass needs; `count`:
    number of the arguments."""

    forward: TracedFunction
    backward: TracedFunction
    kept: Sequence[int]
    count: int
    outputs: int = 1

    @cached_property
    def apart(self) -> BackwardParts | None:
        """Return the block's backward pass with products of weight gradients apart; None if there are none."""
        return _take_weight_gradients_apart(self.backward.graph, self.count)

    @cached_property
    def again(self) -> TracedFunction:
        """Return the block's forward pass as it is recomputed: intermediate results alone, and what they need."""
        graph = deepcopy(self.forward.graph)
        output: Any = graph.graph.output_node()
        output.args = (tuple(output.args[0][self.outputs :]),)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return TracedFunction(graph, "block_forward_again")

    @cached_property
    def output_types(self) -> Sequence[tuple[torch.Size, torch.dtype]]:
        """Return the shape and type of each output of the block."""
        output: Any = self.forward.graph.graph.output_node()
        return [(y.meta["val"].shape, y.meta["val"].dtype) for y in output.args[0][: self.outputs]]


class BackwardParts(NamedTuple):
    """Backward pass of a block in two functions. `input_gradients(*arguments)`, of the arguments of the whole one,
    returns its gradients at the indices `early`, which need no product for themselves alone, and then tensors that the
    other needs beside the arguments `kept`; `weight_gradients(*arguments[kept], *tensors)`: the gradients at `late`."""

    input_gradients: TracedFunction
    weight_gradients: TracedFunction
    kept: Sequence[int]
    early: Sequence[int]
    late: Sequence[int]


@dataclass
class CompiledBlock:
    """Compiled block: its `functions` compute its outputs (activations, then integers) from arguments and `tensors`,
    leaves of autograd that it reads beside them; `homes`: the bucket and parameters of each, None if it is no
    parameter. `reads`: keys of the tensors that differ between passes, which it is called with behind its arguments."""

    functions: BlockFunctions
    tensors: Sequence[Tensor]
    homes: Sequence[Home | None]
    reads: Sequence[tuple] = ()
    communicator: Communicator | None = None
    is_recomputed: bool = False  # a pass with gradients is the second one, whose output no gradient needs
    _destinations: dict[tuple[int, ...], Sequence[Destination]] = field(default_factory=dict)

    def __call__(self, region: Region, deferred: Deferred | None, *arguments: Tensor | None) -> Any:
        """Return the block's output, or all; gradients of its weights are left to `deferred` if that is a list."""
        if torch.is_grad_enabled():
            return _Block.apply(self, region, deferred, *arguments)
        results = self.call(region, self.functions.forward, *filter(_is_tensor, arguments), *self.tensors)
        return results[0] if self.functions.outputs == 1 else tuple(results[: self.functions.outputs])

    def call(self, region: Region, function: TracedFunction, *tensors: Tensor | None) -> Any:
        """Call one of the block's functions, compiled by `region`; its collectives are the communicator's."""
        if self.communicator is None:
            return region(function)(*tensors)
        with launch_collectives_of(self.communicator):
            return region(function.in_turns)(*tensors)

    def _find_destinations(self, of: Sequence[int]) -> Sequence[Destination]:
        """Return where the gradients of the compiled block's tensors at `of` are added, in as few pieces of memory
        as possible."""
        homes = {i: home for i in of if _takes_gradient(home := self.homes[i])}
        first = {id(bucket): i for i, (bucket, _) in reversed(homes.items())}  # on all ranks in one order
        places = {i: (first[id(b)], b.bucket.parameter_ranges[names[0]]) for i, (b, names) in homes.items()}
        order = sorted(homes, key=places.__getitem__)
        runs: list[tuple[FlatBucket, tuple[str, ...], list[int]]] = []
        for i in order:
            bucket, names = homes[i]
            if runs and runs[-1][0] is bucket and bucket.bucket.range_of_parameters((*runs[-1][1], *names)):
                _, before, indices = runs.pop()
                runs.append((bucket, (*before, *names), [*indices, i]))
            else:
                runs.append((bucket, names, [i]))
        return [
            (bucket, names, of, [sum(map(bucket.count_elements, homes[i][1])) for i in of])
            for bucket, names, of in runs
        ]

    def add_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        """Add gradients of a compiled block's parameters, by their indices in `tensors`, to their buckets' sums."""
        if (indices := tuple(gradients)) not in self._destinations:
            self._destinations[indices] = self._find_destinations(indices)
        for bucket, names, members, sizes in self._destinations[indices]:
            memory, new = bucket.gradient_memory(*names)
            places = memory.split(sizes) if len(sizes) > 1 else (memory,)
            add_gradients_together([*zip(places, repeat(new))], [*map(gradients.__getitem__, members)])
        for bucket, names, _, _ in self._destinations[indices]:
            bucket.note_added_gradients(*names)


class _Block(torch.autograd.Function):
    """Autograd function of a `CompiledBlock`."""

    @staticmethod
    def forward(ctx, block: CompiledBlock, region: Region, deferred: Deferred | None, *arguments: Tensor | None):
        """Compute a compiled block's outputs; save the tensors that its backward pass needs."""
        primals: tuple[Any, ...] = (*filter(_is_tensor, arguments), *block.tensors)
        functions = block.functions
        if block.is_recomputed:
            results = block.call(region, functions.again, *primals)
            outputs = [primals[0].new_empty(shape, dtype=dtype) for shape, dtype in functions.output_types]
        else:
            results = block.call(region, functions.forward, *primals)
            outputs, results = results[: functions.outputs], results[functions.outputs :]
        ctx.saved = [*map(primals.__getitem__, functions.kept), *results]
        ctx.block, ctx.region, ctx.deferred, ctx.given = block, region, deferred, [*map(_is_tensor, arguments)]
        if functions.outputs == 1:
            return outputs[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in outputs if not y.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        """Compute the gradients of a compiled block: return its arguments', and add its parameters' to their buckets'
        sums, or leave them for later (zero bubble)."""
        block, count = ctx.block, sum(ctx.given)
        of_outputs: Sequence[Tensor] = gradients
        if len(gradients) > 1:
            of_outputs = _take_float_gradients(gradients, block.functions.output_types)
        saved = (*ctx.saved, *of_outputs)
        del ctx.saved
        apart = None if ctx.deferred is None else block.functions.apart
        if apart is None:
            early: Mapping[int, Tensor] = dict(enumerate(block.call(ctx.region, block.functions.backward, *saved)))
        else:
            results = block.call(ctx.region, apart.input_gradients, *saved)
            early = dict(zip(apart.early, results, strict=False))
            # what is deferred would keep the graph behind an argument
            needed = [*(saved[i].detach() for i in apart.kept), *results[len(early) :]]
            ctx.deferred.append(partial(_add_weight_gradients, block, ctx.region, apart, needed, count))
        block.add_gradients({i - count: g for i, g in early.items() if i >= count and g is not None})
        left, out = iter(range(count)), list[Tensor | None]()
        for is_present in ctx.given:
            out.append(early.get(next(left)) if is_present else None)
        return None, None, None, *out


def _take_float_gradients(
    gradients: Sequence[Tensor | None], output_types: Sequence[tuple[torch.Size, torch.dtype]]
) -> Sequence[Tensor]:
    """Return the gradients of those outputs of a block that are no integers: zeros for one that nothing reads."""
    device = next(g.device for g in gradients if g is not None)
    pairs = zip(gradients, output_types, strict=True)
    return [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype) in pairs
        if dtype.is_floating_point
    ]


@torch.no_grad()
def _add_weight_gradients(
    block: CompiledBlock, region: Region, apart: BackwardParts, needed: Sequence[Tensor], count: int
) -> None:
    """Add the gradients of a block's weights, which lie behind `count` arguments, to their buckets' sums."""
    gradients = block.call(region, apart.weight_gradients, *needed)
    block.add_gradients({i - count: g for i, g in zip(apart.late, gradients, strict=True)})


def _takes_gradient(home: Home | None) -> TypeGuard[Home]:
    """Return True if a tensor that a block reads, of the bucket and parameters `home`, is a parameter and trained."""
    return home is not None and not home[0].bucket.frozen


def compile_block(
    function: Callable[..., Tensor],
    arguments: Sequence[Tensor | None],
    list_tensors_beside: Callable[[], Mapping[int, tuple | None]],
    deferred: Deferred | None = None,
) -> CompiledBlock | None:
    """Trace a block of the model, `function` of activations without collectives, on `arguments` (tensors or None), into
    a compiled forward and backward pass for arguments of these shapes. `list_tensors_beside` gives by id the key of a
    tensor that differs between passes (a mask of documents), None if all passes share it (rotary angles). `deferred`: a
    list if weight gradients come later. Returns None if the block reads another tensor that is no parameter."""
    run_present, activations = _take_present(function, arguments)
    with torch.enable_grad():
        run_present(*activations)  # makes what is alike in all passes
        # saves nothing, as its backward pass never runs: torch 2.14 would keep attention's forever (a cycle in C++)
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda nothing: nothing):
            graph = _remove_detaches(make_fx(run_present)(*activations))
    known = list_tensors_beside()
    tensors = _lift_tensors_to_arguments(graph, lambda t: known.get(id(t)) is None)
    homes = [find_bucket_of_copies(t) for t in tensors]
    if any(home is None and id(t) not in known for t, home in zip(tensors, homes, strict=True)):
        return None
    reads = [key for t in tensors if (key := known.get(id(t)))]
    leaves = [t.detach() for t in tensors]
    pairs = zip(tensors, homes, strict=True)
    primals = [*activations, *(t.detach().requires_grad_(_takes_gradient(home)) for t, home in pairs)]
    traced = _TracedGraph(graph, primals)
    functions = _split_graph(graph.code, tuple(x.requires_grad for x in primals), len(activations), traced)
    if deferred is not None:
        _ = functions.apart  # made here, where a failure leaves the block uncompiled
    return CompiledBlock(functions, leaves[len(reads) :], homes[len(reads) :], reads)


def _take_present(
    function: Callable[..., Any], arguments: Sequence[Tensor | None]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a block's `function` as one of the arguments alone that are not None, and these, as autograd's leaves."""
    present = {i: x for i, x in enumerate(arguments) if x is not None}

    def run_present(*activations: Tensor) -> Any:
        """Return what the block returns, given only the arguments that are not None."""
        every: list[Any] = [None] * len(arguments)
        for i, x in zip(present, activations, strict=True):
            every[i] = x
        return function(*every)

    # as in training: attention keeps what its backward pass needs only where there is one
    return run_present, [x.detach().requires_grad_() for x in present.values()]


def compile_block_with_own_backward(
    communicator: Communicator,
    parameters: Sequence[Tensor],
    function: Callable[..., Sequence[Tensor]],
    arguments: Sequence[Tensor | None],
    list_tensors_beside: Callable[[], Mapping[int, tuple | None]],
    deferred: Deferred | None = None,
) -> CompiledBlock | None:
    """Trace a block of the model as `compile_block` does, with collectives of `communicator` in it and with its own
    backward pass, whose order is so the uncompiled block's; `function` returns several outputs, activations first.
    `parameters`: the model's. `deferred`: a list, to which the backward pass leaves weight gradients, if they come
    later."""
    run_present, activations = _take_present(function, arguments)
    buckets = {home[0] for w in parameters if (home := find_bucket_of_leaf(w))}
    trained, homes, count = [w for w in parameters if w.requires_grad], list[Home | None](), len(activations)

    def compute_gradients(*activations_and_gradients: Tensor) -> list[Tensor | None]:
        """Return the block's outputs, then the gradients of its arguments and of its parameters."""
        inputs, of_outputs = activations_and_gradients[:count], activations_and_gradients[count:]
        trace.last = inputs[0]
        outputs = run_present(*inputs)
        trace.last, differentiable = of_outputs[0], [y for y in outputs if y.is_floating_point()]
        gradients = torch.autograd.grad(differentiable, [*inputs, *trained], of_outputs, allow_unused=True)
        ends = []
        if trace.launches or deferred is not None:
            # results of the last collectives may be of use to no gradient; what is not deferred belongs before it
            trace.last = torch.ops.platform.border(trace.last, [g for _, g in traced] if deferred is not None else [])
            ends.append(trace.last)
        for compute_weight_gradients in deferred or ():
            compute_weight_gradients()
        ends += [trace.last] if ends else []
        of_leaves = zip(map(find_bucket_of_copies, trained), gradients[len(inputs) :], strict=True)
        totals: dict[Home, Tensor] = {}
        for home, g in (*traced, *of_leaves):
            if home and g is not None:
                totals[home] = totals[home].flatten() + g.flatten() if home in totals else g
        homes.extend([*totals, *[None] * len(ends)])
        return [*outputs, *gradients[:count], *totals.values(), *ends]

    with torch.enable_grad(), _trace_collectives(communicator, buckets, activations[0]) as (trace, traced):
        outputs = run_present(*activations)  # and makes what is alike in all passes
        tangents = [torch.zeros_like(y.detach()) for y in outputs if y.is_floating_point()]
        graph = _remove_detaches(make_fx(compute_gradients)(*activations, *tangents))
    known = list_tensors_beside()
    tensors = _lift_tensors_to_arguments(graph, lambda t: known.get(id(t)) is None)
    if any(find_bucket_of_copies(t) is None and id(t) not in known for t in tensors):
        return None
    reads = [key for t in tensors if (key := known.get(id(t)))]
    leaves = [t.detach() for t in tensors]
    is_vector = *[False] * (count + len(reads)), *map(_is_vector, homes)
    wrapped, sizes = _TracedGraph(graph, [*activations, *tangents, *leaves]), (count, len(reads), len(outputs))
    functions = _partition_graph(graph.code, is_vector, *sizes, len(tangents), wrapped)
    if deferred is not None:
        _ = functions.apart
    return CompiledBlock(functions, leaves[len(reads) :], homes, reads, communicator if trace.launches else None)


def _is_vector(home: Home | None) -> bool:
    """Return True if the gradient of this home is a vector."""
    return home is not None and home[0].compute[home[1][0]].dim() < 2


@contextmanager
def _trace_collectives(
    communicator: Communicator, buckets: Iterable[FlatBucket], first: Tensor
) -> Iterator[tuple[CollectiveTrace, TracedGradients]]:
    """Yield what emits operators, behind the tensor `first`, for the collectives that are launched within the context,
    and the gradients of parameters in `buckets` that are added there."""
    trace, traced = CollectiveTrace(communicator, first), TracedGradients()
    communicator.trace = trace
    for flat in buckets:
        flat.traced = traced
    try:
        yield trace, traced
    finally:
        communicator.trace = None
        for flat in buckets:
            flat.traced = None


@cache
def _partition_graph(
    code: str, is_vector: Sequence[bool], count: int, reads: int, outputs: int, tangents: int, traced: _TracedGraph
) -> BlockFunctions:
    """Split a block's traced forward and backward pass by torch's partitioner; cached as `_split_graph`. `tangents`:
    number of the gradients of its `outputs`, behind its `count` arguments."""
    graph, tensors = traced.take_graph()
    aot, inductor = import_module("functorch.compile"), import_module("torch._inductor.decomposition")
    # torch's stand-ins for kernels may lay their results out otherwise than these do
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()
    with torch.no_grad():
        functional = torch.func.functionalize(graph)
        joint = make_fx(functional, inductor.select_decomp_table(), "fake")(*(t.detach() for t in tensors))
    places = joint.graph.find_nodes(op="placeholder")
    for i, place in enumerate(places):
        place._rename(f"tangents_{i}" if count <= i < count + tangents else f"primals_{i}")
        place.target = place.name
    output: Any = joint.graph.output_node()
    results, border = output.args[0], outputs + count
    output.args = ((*results[:border], *[None] * reads, *results[border:]),)
    _mark_rounded_operands(joint)
    joint.recompile()
    forward, backward = aot.min_cut_rematerialization_partition(joint, (), num_fwd_outputs=outputs)
    kept = _keep_primals(forward, backward, outputs)
    _keep_vector_gradients_wide(backward, is_vector)
    functions = TracedFunction(forward, "block_forward"), TracedFunction(backward, "block_backward")
    return BlockFunctions(*functions, kept=kept, count=count + reads, outputs=outputs)


def _mark_rounded_operands(joint: GraphModule) -> None:
    """Mark what rounds operands of products to 8 bits as made again in a block's backward pass."""
    # what 8 bits stand for would take as much memory as each operand, and as each weight
    rounded = set[Node]()
    for node in joint.graph.nodes:
        follows = node.target is torch.ops.platform.operand.default or not rounded.isdisjoint(node.all_input_nodes)
        if follows and node.target not in _NEVER_ROUNDED:
            rounded.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.platform.operand.default):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)


class _TracedGraph:
    """Traced graph and the tensors that it was traced with; it counts as equal to any other: its code is the key."""

    def __init__(self, graph: GraphModule, primals: Sequence[Tensor]):
        """Wrap a traced graph and the tensors it was traced with, as an argument of a cached function."""
        self._found: tuple[GraphModule, Sequence[Tensor]] | None = (graph, primals)

    def take_graph(self) -> tuple[GraphModule, Sequence[Tensor]]:
        """Return the traced graph and its tensors, once only: the cache must not keep parameters alive."""
        assert self._found
        graph_and_primals, self._found = self._found, None
        return graph_and_primals

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TracedGraph)

    def __hash__(self) -> int:
        return 0


@cache
def _split_graph(code: str, trained: Sequence[bool], count: int, traced: _TracedGraph) -> BlockFunctions:
    """Split the traced forward pass of a model's block into its forward and backward function by torch's AOT autograd.
    Cached by the graph's `code`, by which primals take a gradient (`trained`), and by how many are the block's
    arguments (`count`): blocks that are equal in these, as the layers of a stack are, share one pair of functions."""
    graphs: dict[str, GraphModule] = {}
    graph, primals = traced.take_graph()
    aot, inductor = import_module("functorch.compile"), import_module("torch._inductor.decomposition")

    def graph_keeper(name: str) -> Callable[..., Any]:
        """Return a stand-in for a compiler that records the graph of a pass under `name` (forward, backward),
        uncompiled."""

        def record_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            """Keep the graph of a forward or backward pass; return a function that runs it uncompiled."""
            graphs[name] = graph
            return aot.make_boxed_func(graph)

        return record_graph

    with torch.enable_grad():
        out = aot.aot_function(
            graph,
            fw_compiler=graph_keeper("forward"),
            bw_compiler=graph_keeper("backward"),
            partition_fn=aot.min_cut_rematerialization_partition,
            decompositions=inductor.select_decomp_table(),
        )(*primals)
        torch.autograd.grad(out, [x for x in primals if x.requires_grad], out.detach())
    kept = _keep_primals(graphs["forward"], graphs["backward"])
    _keep_vector_gradients_wide(graphs["backward"], [x.dim() < 2 and x.is_floating_point() for x in primals])
    functions = {name: TracedFunction(graph, f"block_{name}") for name, graph in graphs.items()}
    return BlockFunctions(functions["forward"], functions["backward"], kept, count)


def _take_weight_gradients_apart(backward: GraphModule, count: int) -> BackwardParts | None:
    """Split a block's backward pass by torch's partitioner, as it splits a forward from a backward pass: the second
    part computes the products that only a parameter's gradient needs, and makes cheap tensors again. `count`: number of
    the block's arguments, whose gradients are the first."""
    graph = deepcopy(backward.graph)
    results: Any = graph.output_node().args[0]
    for placeholder in graph.find_nodes(op="placeholder"):  # none is a gradient of the partitioner's
        placeholder._rename(placeholder.name.replace("tangents", "gradient"))
        placeholder.target = placeholder.name
    borders = graph.find_nodes(op="call_function", target=torch.ops.platform.border.default)
    needed = {node for border in borders for node in _list_ancestors(border)}  # by results of the first part
    early, late = list[int](), list[int]()
    for i, gradient in enumerate(results):
        if gradient is None:
            continue
        alone = _list_ancestors(gradient) - needed
        products = [n for n in alone if n.target in _PRODUCTS] if i >= count else []
        for product in products:
            product.meta = {**product.meta, "partitioner_tag": "must_be_in_backward"}
        (late if products else early).append(i)
        needed |= set() if products else alone
    if not late:
        return None
    graph.output_node().meta.pop("desc", None)  # of all gradients
    graph.output_node().args = (tuple(results[i] for i in (*early, *late)),)
    aot, joint = import_module("functorch.compile"), GraphModule(backward, graph)
    inputs, weights = aot.min_cut_rematerialization_partition(joint, (), num_fwd_outputs=len(early))
    kept = _keep_primals(inputs, weights, len(early))
    functions = TracedFunction(inputs, "block_input_gradients"), TracedFunction(weights, "block_weight_gradients")
    return BackwardParts(*functions, kept, early, late)


def _list_ancestors(node: Node) -> set[Node]:
    """Return a node of a traced graph and all that it is computed from."""
    ancestors, left = set[Node](), [node]
    while left:
        if (last := left.pop()) not in ancestors:
            ancestors.add(last)
            left += last.all_input_nodes
    return ancestors


def _keep_primals(forward: GraphModule, backward: GraphModule, count: int = 1) -> list[int]:
    """Change a block's traced graphs in place so that the backward pass reads the inputs of the forward pass (primals)
    itself, with its own views of them, instead of getting them as results of the forward pass, since a compiled
    function copies every result to new memory. Returns the indices of these primals, which are from now on the first
    arguments of `backward`. `count`: number of the forward pass's own results."""
    primals = forward.graph.find_nodes(op="placeholder")
    output: Any = forward.graph.output_node()
    results, saved = output.args[0][:count], output.args[0][count:]
    inputs = backward.graph.find_nodes(op="placeholder")
    kept_primals: dict[int, Node] = {}
    handed = []  # saved values that are still results of the forward pass
    replaced = []
    for value, argument in zip(saved, inputs, strict=False):
        views = []
        source = value
        while source.op == "call_function" and getattr(source.target, "is_view", False):
            views.append(source)
            source = source.args[0]
        if source.op != "placeholder":
            handed.append(value)
            continue
        number = primals.index(source)
        if number not in kept_primals:
            with backward.graph.inserting_before(inputs[0]):
                kept_primals[number] = backward.graph.placeholder(f"kept_{number}")
                kept_primals[number].meta.update(source.meta)
        view_node = kept_primals[number]
        with backward.graph.inserting_before(inputs[-1].next):
            for view in reversed(views):
                view_node = backward.graph.call_function(view.target, (view_node, *view.args[1:]), view.kwargs)
                view_node.meta.update(view.meta)
        argument.replace_all_uses_with(view_node)
        replaced.append(argument)
    for argument in replaced:
        backward.graph.erase_node(argument)
    output.args = ((*results, *handed),)
    for graph in (forward, backward):
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return list(kept_primals)


def _keep_vector_gradients_wide(backward: GraphModule, is_vector: Sequence[bool]) -> None:
    """Change a block's traced backward pass in place so that it returns gradients of vectors (`is_vector` of each
    gradient), which are sums over all rows, in the type in which it adds them up: they are added to sums in that type,
    and a cast would be a kernel of its own."""
    output: Any = backward.graph.output_node()
    gradients = list(output.args[0])
    for i, gradient in enumerate(gradients):
        if is_vector[i] and gradient is not None and gradient.target is torch.ops.prims.convert_element_type.default:
            gradients[i] = gradient.args[0]
    output.args = (tuple(gradients),)
    backward.graph.eliminate_dead_code()
    backward.recompile()


def _remove_detaches(graph: GraphModule) -> GraphModule:
    """Remove every `detach` from a traced pass, in place, and return it: torch may derive the block's backward pass
    from this graph, in place of our own autograd functions that detach their inputs."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _lift_tensors_to_arguments(graph: GraphModule, place: Callable[[Tensor], bool]) -> list[Tensor]:
    """Turn the tensors that a traced graph reads without getting them as arguments (parameters, masks) into further
    arguments of the graph, in place; return these tensors in order: those first of which `place` is less."""
    nodes = graph.graph.nodes
    uses: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "get_attr":
            uses.setdefault(str(node.target), []).append(node)
    tensors = {name: getattr(graph, name) for name in uses}
    order = sorted(tensors, key=lambda name: place(tensors[name]))
    first = next(node for node in nodes if node.op != "placeholder")
    for number, name in enumerate(order, 1):
        with graph.graph.inserting_before(first):
            placeholder = graph.graph.placeholder(f"beside_{number}")
        for node in uses[name]:
            node.replace_all_uses_with(placeholder)
    for node in chain.from_iterable(uses.values()):
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensors[name] for name in order]
