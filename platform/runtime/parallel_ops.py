"""The `Ops` of run time: a model's forward pass on one rank's blocks, executing the conversions that the plan lists.

`ActivationWatch` and `gradient_squares` measure activations and gradients by layer, to monitor a run
(`monitor.layers`): each rank sums the squares of its share, and `platform.train.step_report` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.plan.chunks import layer_of_parameter
from platform.plan.gather_order import ParameterPrefetcher
from platform.plan.layout import Stretch, block_shape
from platform.plan.model_types import CROSS_ENTROPY, LABEL_WEIGHTS, PAIRED, REFERENCES, TEACHER, Parameter, Spec
from platform.plan.operation_plan import PlannedOperation, answer_slots, count_classes, is_paired
from platform.plan.operations.attention import KeyValueCache
from platform.plan.operations.op import Op
from platform.plan.operations.registry import Ops
from platform.plan.plan import Plan
from platform.plan.rule import Conversion
from platform.plan.step_collectives import counts_at, counts_gradient
from platform.plan.whole_blocks import find_blocks_with_own_backward, reasons_against_whole_blocks
from platform.runtime import conversion as conversions
from platform.runtime import kernels, residual
from platform.runtime.chunked_loss import LossClasses, LossOfPairs, PairLoss, Targets, TokenLoss
from platform.runtime.communicator import Communicator
from platform.runtime.compilation import CompileTrial, compile_region, select_attention_kernel
from platform.runtime.compiled_blocks import CompiledBlock, compile_block, compile_block_with_own_backward
from platform.runtime.conversion import PendingConversion, convert
from platform.runtime.einsum import Deferred
from platform.runtime.flat_buffers import sum_squares
from platform.runtime.recompute import ActivationOffload, run_recomputed
from platform.runtime.residency import Operands, ParameterResidency
from platform.runtime.residual import Drawing, Region
from platform.runtime.teacher_loss import Distillation


@dataclass
class PassPosition:
    """Place of a forward pass in the run: all that dropout masks depend on besides the operation's name and the global
    element. `inputs`: this rank's blocks of its data tensors, as the model gets them; `tensors`: made for it on first
    use, by what they are: masks that its layers share, starts of random numbers."""

    seed: int = 0
    step: int = 0
    first_sequence: int = 0  # index in the global batch of the first sequence of this microbatch (of all replicas)
    training: bool = True
    ahead: Sequence[float] = ()  # factors of the losses of multi-token prediction, by depth from 1; (): all 1
    inputs: Mapping[str, Mapping[tuple[str, str], Tensor]] = field(default_factory=dict)
    tensors: dict[tuple, Tensor] = field(default_factory=dict)


class TracedBlock(NamedTuple):
    """Block of the model that is compiled as one function; `draws`: the attentions, with the type of their queries,
    whose kernels draw dropout masks in it; `routes`: layers of which its last outputs say how many tokens chose each
    expert, with the axes that split them."""

    compiled: CompiledBlock
    draws: Sequence[tuple[str, Spec]]
    routes: Sequence[tuple[str, Sequence[str]]]


def _find_input(name: str, use: tuple[str, str], p: PassPosition) -> Tensor:
    """Return the block of a pass's data tensor `name` that the operation `use` reads."""
    return p.inputs[name][use]


class PassState(NamedTuple):
    """State of a rank that is of one pass alone, see `ParallelOps` and `ParameterPrefetcher`."""

    position: PassPosition
    deferred: Deferred | None = None
    again: bool = False


class SentRows(NamedTuple):
    """Rows of a rank's tokens in a pass: at each expert, and sent to each rank of the exchange."""

    by_expert: Sequence[int]
    by_rank: Sequence[int]


class ParallelOps(Ops):
    """Executes a plan's operations on the rank of `communicator`: their common parts are here, each one's forward pass
    is its `run`. `tensors`: parameter name -> local block.

    A data tensor is passed as a mapping from the operations that read it, keyed (kind, name), to this rank's block of
    integers [length, batch] in the layout given by `plan.readers`. An activation or parameter of which this rank has no
    block is an empty tensor. `compiles`: small functions without collectives are compiled (train.compile), each wrapped
    by `compiler`, None if none is. `ahead`: parameters are converted for their operations one matrix product ahead.
    """

    plan: Plan
    kernels, in_kernel = kernels, staticmethod(select_attention_kernel)

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        tensors: Mapping[str, Tensor],
        dropout: float = 0.0,
        compiles: bool = False,
        ahead: bool = True,
    ):
        """Construct one rank's executor of a plan's operations on tensors; `dropout`: probability that an element is
        dropped."""
        self.plan, self.communicator, self.tensors = plan, communicator, tensors
        self.dropout_rate, self.adapters = dropout, plan.adapters
        self.compiler: Region | None = compile_region if compiles else None
        self.position = PassPosition()
        self.deferred: Deferred | None = None  # collects weight gradient computations that a schedule runs later
        self.recompute = plan.recompute
        self.offload = ActivationOffload(communicator.device) if plan.recompute.offload else None
        self.offset = 0  # of the pass: tokens of its sequences that passes before have read (generation)
        # what a plan may name in its place
        self.losses: Mapping[str, TokenLoss | PairLoss | Distillation | None] = {CROSS_ENTROPY: None}
        self.losses_ahead: dict[int, Tensor] = {}  # by depth of multi-token prediction, sums of training passes
        self.measured_depth = 0  # whose loss evaluations measure; 0: the model's own
        self.residency: ParameterResidency | None = None  # of parameters that are gathered for each block
        self.ahead = ParameterPrefetcher(plan, self._start_conversion, ahead)
        self.watched: ActivationWatch | None = None  # sums up the activations of training steps that are followed
        # by layer, how many tokens chose each expert and how many it took, in the passes of a training step: sums on
        # the device, whose memory stays
        self.routed: dict[str, Tensor] = {}
        # by layer, the rows of each expert that passes have sent: kept where it is {} at first
        self.routing: dict[str, list[SentRows]] | None = None
        self.angles: dict[tuple, tuple[Tensor, Tensor]] = {}  # of rotations, alike in all layers and steps
        self._widths: dict[tuple[Spec, int], list[int]] = {}
        self._counters: dict[Spec, list[Tensor]] = {}  # of the dropout masks of activations
        self._masks: dict[tuple, Tensor] = {}  # added to scores, alike in all passes
        self.is_tracing = False  # a block, to be compiled as one function
        self._blocks: dict[tuple, TracedBlock | None] = {}  # by name and arguments
        self._made_for_pass: dict[tuple, Callable[[PassPosition], Tensor]] = {}  # see `tensor_of_pass`
        # of random numbers so far: kind and name of the operation, and elements of a sequence
        self._drawings: dict[tuple[str, str, int], None] = {}
        self._draws: dict[tuple[str, Spec], None] = {}  # of the block that is traced, see `TracedBlock`
        self._routes: dict[tuple[str, Sequence[str]], Tensor] = {}
        self._reasons_against_whole = reasons_against_whole_blocks(plan, communicator.device.type, dropout)
        self._own_backward = find_blocks_with_own_backward(plan)
        tensors_of = (t for o in plan.operations.values() for t in (*o.operation.inputs, *o.operation.outputs))
        # activation -> (offset, extent) per dim of this rank's block
        self.blocks = {t: plan.locate_block(t, communicator.coordinates) for t in tensors_of if isinstance(t, Spec)}

    def bind_operation(self, op: Op) -> Callable[..., Any]:
        bound = op.bind_computation(self, op.run_on_blocks)
        self.__dict__[op.kind] = bound  # which Python finds there from now on
        return bound

    def _start_conversion(self, p: Parameter, conversion: Conversion) -> PendingConversion:
        """Start the collectives that convert this rank's block of a parameter to an operation's layout."""
        return convert(self.communicator, self.tensors[p.name].detach(), conversion.forward, name=f"gather {p.name}")

    def begin_pass(self, inputs: Mapping[str, Mapping[tuple[str, str], Tensor]] = {}) -> None:
        """Begin a forward pass on this rank, of data tensors `inputs`: send the starts of random numbers to the device,
        and wait for gathers of parameters started early but never used."""
        p = self.position
        p.inputs = inputs
        if self._drawings and p.training:
            starts = residual.random_starts([*map(self._find_random_stream, self._drawings)], self.communicator.device)
            p.tensors.update(zip(self._drawings, starts, strict=True))
        for left in self.ahead.begin_pass():
            left.wait()  # of operations that the pass before has left out, as a text sample does the loss
        if self.offload:
            self.offload.begin_pass()

    def begin_generation_pass(self, offset: int, cache: KeyValueCache) -> None:
        """Begin a pass of text generation after `offset` tokens per sequence that the key-value `cache` holds."""
        self.offset, self.cache, self.position = offset, cache, PassPosition(training=False)
        self.angles.clear()
        self.begin_pass()

    def swap_pass_state(self, other: PassState | None) -> PassState:
        """Put what this rank keeps of the `other` pass in place of the present one's, and return that. A pass that only
        begins, and is no forward pass, has a position as it is."""
        before = PassState(self.position, self.deferred, self.ahead.again)
        self.position, self.deferred, self.ahead.again = other or PassState(self.position)
        return before

    def watch(self, name, x, spec):
        """Return x, the activation of layer `name`, unchanged; if monitoring is due, its squares are summed first."""
        if self.watched and self.position.training and not self.ahead.again:
            self.watched.add_squares(name, x, spec)
        return x

    def recomputed(self, kind, name, function, spec, x, *more):
        """Compute `function` of x with the checkpointing of its `kind`; a block is compiled as one where it can be."""
        if kind != "full":
            return self._run_recomputed(kind, function, spec, x, *more)

        def run_block(x: Tensor) -> Any:
            """Run the block on x; it is traced first, where its weights are whole."""
            return self._run_recomputed(kind, self._compile_block(name, function, x, *more), spec, x, *more)

        return self.residency.run_block(run_block, x) if self.residency else run_block(x)

    def _compile_block(self, name: str, function: Callable[..., Any], *arguments: Tensor | None) -> Callable[..., Any]:
        """Return `function`, the model's block that starts at the layer `name`, compiled as one function of its
        `arguments` if every training pass computes it alike; else `function` itself."""
        compiler = self.compiler
        if not compiler or self._reasons_against_whole.get(name, name):
            return function
        if not self.position.training or self.watched:
            return function
        key: tuple = (name,)
        for x in arguments:
            key += (x if x is None else (x.shape, x.dtype),)
        if key not in self._blocks:
            outside, trace = self.deferred, compile_block
            deferred: Deferred | None = None if outside is None else []  # weight gradients, which are in the trace
            self.deferred = None
            traced_function = function
            if name in self._own_backward:
                trace = partial(compile_block_with_own_backward, self.communicator, list(self.tensors.values()))
                self.deferred, traced_function = deferred, partial(self._list_outputs, function)
            if isinstance(compiler, CompileTrial):
                trace = compiler.wrap_with_fallback(f"block {name}", trace, lambda *_: None)
            self.compiler, self.is_tracing, self._draws, self._routes = None, True, {}, {}
            compiled = trace(traced_function, arguments, self._list_tensors_beside_blocks, deferred)
            self.compiler, self.is_tracing, self.deferred = compiler, False, outside
            if compiled and compiled.communicator:  # whose collectives are then as few as planned
                compiled.is_recomputed = self.recompute.kind == "full"
            self._blocks[key] = TracedBlock(compiled, tuple(self._draws), tuple(self._routes)) if compiled else None
        block = self._blocks[key]
        if not block:
            return function
        if block.compiled.reads or block.draws or block.routes:
            return partial(self._run_block_of_pass, block, compiler)
        return partial(block.compiled, compiler, self.deferred)

    def _list_outputs(self, function: Callable[..., Any], *arguments: Tensor | None) -> Sequence[Tensor]:
        """Return the activations that a traced block, `function`, returns, then what its routers have counted."""
        self._routes.clear()
        out = function(*arguments)
        return *(out if isinstance(out, tuple) else (out,)), *self._routes.values()

    def _run_block_of_pass(self, block: TracedBlock, compiler: Region, *arguments: Tensor | None) -> Any:
        """Run a compiled block that reads tensors of this pass, whose attention's kernel draws dropout masks, or whose
        routers count; return its activation, or several."""
        reads = [self.tensor_of_pass(key, self._made_for_pass[key]) for key in block.compiled.reads]
        with self.use_dropout_key(*block.draws[0], self.communicator.device) if block.draws else nullcontext():
            out = block.compiled(compiler, self.deferred, *arguments, *reads)
        if not block.routes:
            return out
        activations, counts = out[: -len(block.routes)], out[-len(block.routes) :]
        for route, counted in zip(block.routes, counts, strict=True):
            self.count_routed(route[0], counted, route[1])
        return activations if len(activations) > 1 else activations[0]

    def _list_tensors_beside_blocks(self) -> dict[int, tuple | None]:
        """Return by id the tensors that blocks read beside activations and parameters: the key of `tensor_of_pass`,
        and no key if all passes share them (angles of rotary embedding, masks, counters of random numbers, states)."""
        shared = (*self._masks.values(), *chain.from_iterable((*self.angles.values(), *self._counters.values())))
        shared += tuple(self.tensors[p.name] for o in self.plan.operations.values() for p in o.operation.states)
        keys: dict[int, tuple | None] = dict.fromkeys(map(id, shared))
        for name, readers in self.position.inputs.items():
            for use, block in readers.items():
                self._made_for_pass[name, use] = partial(_find_input, name, use)
                keys[id(block)] = name, use
        return keys | {id(t): key for key, t in self.position.tensors.items()}

    def tensor_of_pass(self, key: tuple, make: Callable[[PassPosition], Tensor]) -> Tensor:
        """Return the tensor `key` of this pass, made on first use; compiled blocks take it as an argument."""
        self._made_for_pass[key] = make
        if key not in self.position.tensors:
            self.position.tensors[key] = make(self.position)
        return self.position.tensors[key]

    def _run_recomputed(self, kind, function, spec, x, *more):
        """Compute the activation function(x, *more); if the plan recomputes activations of this `kind`, save only the
        arguments for autograd and run the function again in the backward pass."""
        if kind != self.recompute.kind or not torch.is_grad_enabled():
            return function(x, *more)
        pass_state = self.position, self.deferred

        @contextmanager
        def restore_pass_state():
            """Restore, within the context, this forward pass's place in the run, for equal dropout masks."""
            now = self.position, self.deferred, self.ahead.again
            self.position, self.deferred, self.ahead.again = *pass_state, True
            yield
            self.position, self.deferred, self.ahead.again = now

        axes = self.plan.recompute_axes(spec)
        elements = self.plan.elements_per_part(spec, axes)
        return run_recomputed(self.communicator, function, restore_pass_state, axes, elements, self.offload, x, *more)

    def count_routed(self, name: str, counts: Tensor, axes: Sequence[str]) -> None:
        """Add to `routed` the `counts` of the layer `name` in training, of sequences that are split over `axes`."""
        if self.is_tracing:  # they are outputs of the block
            self._routes[name, axes] = counts
            return
        first_pass = self.position.training and not self.ahead.again
        if first_pass and counts_at(self.communicator.coordinates, axes):
            self.routed[name] = self.routed[name].add_(counts) if name in self.routed else counts.clone()

    def record_sent_rows(self, name: str, rows: Iterable[tuple[int, int]], copies: Sequence[int]) -> None:
        """Record, if `routing` is kept, the `rows` at each expert of layer `name`, and the `copies` to each rank."""
        if self.routing is not None and self.position.training and not self.ahead.again:
            every = [0] * self.plan.sizes["experts"]
            for expert, n in rows:
                every[expert] += n
            self.routing.setdefault(name, []).append(SentRows(every, copies))

    # what operations compute with

    absent = staticmethod(conversions.is_absent_block)
    Block = Tensor  # type of a rank's block of an activation

    @staticmethod
    def build_empty_block(tensors: Sequence[Tensor]) -> Tensor:
        """Return an empty tensor of the first's type for a block that a rank lacks; gradients reach all `tensors`."""
        return sum(tensors[1:], tensors[0]).to(tensors[0].dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the compute type, in which the forward pass reads every parameter."""
        return next(iter(self.tensors.values())).dtype

    def parameter_block(self, p: Parameter) -> Tensor:
        """Return this rank's block of the parameter `p`, the tensor that the forward pass reads."""
        return self.tensors[p.name]

    def convert_block(self, x: Tensor, conversion: Conversion) -> Tensor:
        """Convert the local block x to another layout, and its gradient back."""
        return self.convert_blocks([x], [conversion])[0]

    def convert_blocks(self, blocks: Sequence[Tensor], block_conversions: Sequence[Conversion]) -> list[Tensor]:
        """Convert local blocks to other layouts, and their gradients back: their collectives are all launched before
        the first is waited for."""
        return conversions.convert_differentiably(self.communicator, blocks, block_conversions)

    def row_widths(self, spec: Spec, dims: int, over: Sequence[str]) -> list[int]:
        """Return the row width of activation `spec`, the product of its last `dims` dims, on each rank of this rank's
        group along `over`, in mesh order."""
        if (key := (spec, dims)) not in self._widths:
            mesh = self.communicator.mesh
            places = map(mesh.rank_coordinates, mesh.group_of_rank(self.communicator.rank, mesh.order_axes(over)))
            self._widths[key] = [prod(self.plan.block_shape(spec, at)[-dims:]) for at in places]
        return self._widths[key]

    def shape_before(self, conversion: Conversion) -> tuple[int, ...]:
        """Return the shape of this rank's block of what a planned conversion takes."""
        communicator = self.communicator
        return block_shape(conversion.before, conversion.cuts[0], communicator.mesh, communicator.coordinates)

    def group_operands(self, planned: PlannedOperation, number: int) -> Operands:
        """Return the operand tensors of einsum group `number` of an operation, perhaps being gathered already."""
        use, group = (planned.operation.kind, planned.operation.name, number), planned.groups[number]
        ahead = use in self.ahead and not torch.compiler.is_compiling()
        return Operands(self.communicator, group, self.ahead, use) if ahead else Operands(self.communicator, group)

    def convert_parameters(self, planned: PlannedOperation) -> list[Tensor]:
        """Return a planned operation's parameter tensors (no einsum's), converted to the layouts that it needs."""
        operation = planned.operation
        use, parameters = (operation.kind, operation.name, 0), operation.parameters
        ahead = use in self.ahead and not torch.compiler.is_compiling()
        coming = self.ahead.take_parameters(use) if ahead else [None] * len(parameters)
        blocks = [self.tensors[p.name] for p in parameters]
        return conversions.convert_differentiably(self.communicator, blocks, planned.conversions[: len(blocks)], coming)

    @property
    def compiles_functions(self) -> bool:
        """Return True if this rank compiles small functions of tensors without collectives by torch (train.compile)."""
        return self.compiler is not None

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, a pure function of tensors, compiled by torch if this run compiles, else as it is."""
        return self.compiler(function) if self.compiler else function

    def global_positions(self, spec: Spec, dim: str, device: torch.device) -> Tensor:
        """Return the global positions along `dim` of this rank's block of `spec`, int64 [local extent]."""
        return self._pass_positions(spec, dim, device, self.offset if dim == "length" else 0)

    def _pass_positions(self, spec: Spec, dim: str, device: torch.device, first: int = 0) -> Tensor:
        """Return the positions along `dim` of this rank's block of `spec`, counted from `first`, int64 [extent]."""
        stretches = self.block_stretches(spec, dim)
        pieces = [torch.arange(first + i, first + i + n, device=device) for i, n in stretches]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def block_stretches(self, spec: Spec, dim: str) -> list[Stretch]:
        """Return the consecutive positions along `dim` of this rank's block of `spec`, in order."""
        return self.plan.stretches_of_rank(spec, dim, self.communicator.coordinates)

    def fill_padding(self, x: Tensor, spec: Spec, dims: Sequence[str], value: float) -> Tensor:
        """Return x, this rank's block of the activation `spec`, with its padding along `dims` overwritten by `value`:
        the positions beyond the dim's global size (only vocab is ever padded). Sums, maxima and softmax over the dim
        then ignore the padding."""
        for i, dim in enumerate(spec.dims):
            if dim in dims:
                first, n = self.blocks[spec][i]
                real = self.plan.global_shape(spec)[i] - first
                if real < n:
                    padding = torch.arange(n, device=x.device) >= real
                    x = x.masked_fill(padding.view([-1 if d == dim else 1 for d in spec.dims]), value)
        return x

    def random_drawing(
        self, name: str, spec: Spec, device: torch.device, kind: str = Ops.dropout.kind, rate: float | None = None
    ) -> Drawing | None:
        """Return what the dropout named `name` draws its mask from on this rank's block of the activation `spec`, at
        this step and microbatch: counters, start and rate of random numbers. None if nothing is dropped there. `kind`:
        another operation that draws, at its `rate`."""
        p, rate = self.position, self.dropout_rate if rate is None else rate
        if not rate or not p.training:
            return None
        sizes = dict(zip(spec.dims, self.plan.global_shape(spec), strict=True))
        dims = sorted(spec.dims, key=lambda d: d != "batch")  # batch first: its size is unused
        strides = {d: prod(sizes[e] for e in dims[i + 1 :]) for i, d in enumerate(dims)}
        if spec not in self._counters:
            where = [self._pass_positions(spec, d, device) for d in spec.dims]
            self._counters[spec] = residual.random_counters(where, [strides[d] for d in spec.dims])
        drawing = kind, name, strides["batch"]
        self._drawings[drawing] = None

        def make(_: PassPosition) -> Tensor:
            """Make the start of the random numbers in a first pass; in later ones it comes with all others."""
            return residual.random_start(*self._find_random_stream(drawing), device)

        return Drawing(self._counters[spec], self.tensor_of_pass(drawing, make), rate)

    def _find_random_stream(self, drawing: tuple[str, str, int]) -> tuple[int, int]:
        """Return the key of the random numbers of a `drawing` at this step, and the first element of this pass."""
        p, (kind, name, elements) = self.position, drawing
        return residual.derive_key(p.seed, kind, p.step, name), p.first_sequence * elements

    def use_dropout_key(self, name: str, spec: Spec, device: torch.device) -> AbstractContextManager[None]:
        """Return a context that seeds torch's generator for an attention kernel that draws its own dropout mask: by the
        attention's `name`, this rank's block of `spec`, the step and the microbatch."""
        p = self.position
        self._draws[name, spec] = None
        key = residual.derive_key(p.seed, "fused dropout", p.step, name, p.first_sequence, *self.blocks[spec])
        return residual.use_random_key(key, device)

    def additive_attention_mask(
        self, spec: Spec, q: Tensor, k: Tensor, window: int, begins: tuple[str, tuple[str, str]] | None
    ) -> Tensor:
        """Return the attention mask added to the scores of q, of type `spec`, and all k [batch, heads, length, d_kv]:
        -inf for keys hidden by causality, by a `window`, or by `begins` (the data tensor of the positions at which
        documents begin, and the operation that reads it), else 0. It is made once for all layers and, without `begins`,
        for all passes."""
        source = begins and (begins[0], self.plan.reader_layouts[begins[0]][begins[1]])
        length, dtype, device = k.shape[2], q.dtype, q.device
        key = window, q.shape[2], length, dtype, device, source

        def make(p: PassPosition) -> Tensor:
            """Make the attention mask for the data tensors of a pass."""
            starts = p.inputs[begins[0]][begins[1]] if begins else None
            where = self.query_key_positions(spec, length, device)
            return kernels.positions.additive_mask(kernels.positions.unseen_mask(*where, window, starts), dtype)

        if self.offset or begins:
            return self.tensor_of_pass(key, make)
        if key not in self._masks:
            self._masks[key] = make(self.position)
        return self._masks[key]

    def query_key_positions(self, spec: Spec, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the token positions of queries of type `spec`, and of all `length` keys, each int64 [length]."""
        return self.global_positions(spec, "length", device), torch.arange(length, device=device)

    def label_targets(self, planned: PlannedOperation, labels: Mapping[tuple[str, str], Tensor]) -> Targets:
        """Return the labels of a planned cross_entropy, with the data of pairs or, in training, weights of labels."""
        use, names = (planned.operation.kind, planned.operation.name), (LABEL_WEIGHTS, PAIRED, REFERENCES)
        is_used = self.position.training or is_paired(planned.operation)
        more = [self.position.inputs.get(name, {}).get(use) if is_used else None for name in names]
        weights, answers, references = (x if x is None else x.flatten() for x in more)
        classes = self.position.inputs.get(TEACHER, {}).get(use)
        classes = classes if classes is None else classes.flatten(0, 1)
        return Targets(labels[use].flatten(), weights, answers, references, labels[use].shape[1], classes)

    def logit_classes(self, planned: PlannedOperation, spec: Spec, smoothing: float) -> LossClasses:
        """Return the vocabulary columns that this rank holds of the logits `spec`, for a planned cross_entropy, with
        the loss to compute; label smoothing and a user's own loss are used in training only."""
        first, _ = self.blocks[spec][spec.dims.index("vocab")]
        vocab, cap = self.plan.sizes["vocab"], dict(planned.operation.attributes).get("cap", 0.0)
        loss: Any = self.losses[planned.operation["loss"]]
        if is_paired(planned.operation):  # in evaluations too
            pairs = LossOfPairs(loss, planned.tokens["length"], answer_slots(self.plan.sizes["length"]))
            return LossClasses(planned.over, first, vocab, region=self.compiler, pairs=pairs, cap=cap)
        if count_classes(planned.operation) and (self.position.training or loss.measures):
            return LossClasses(planned.over, first, vocab, smoothing, region=self.compiler, teacher=loss, cap=cap)
        if not self.position.training:
            return LossClasses(planned.over, first, vocab, region=self.compiler, cap=cap)
        return LossClasses(planned.over, first, vocab, smoothing, loss, self.compiler, cap=cap)


def initialise(plan: Plan, communicator: Communicator, p: Parameter, seed: int | None, out: Tensor) -> None:
    """Fill this rank's block of a parameter, `out`, by `draw_initial_block`; seed None leaves it to be restored."""
    if seed is not None:
        draw_initial_block(p, plan.global_shape(p), plan.locate_block(p, communicator.coordinates), seed, out)


@torch.no_grad()
def draw_initial_block(
    p: Parameter, shape: Sequence[int], where: Sequence[tuple[int, int]], seed: int, out: Tensor
) -> None:
    """Fill `out`, the block of the parameter `p` of a global `shape` at `where`, (offset, extent) per dim, with its
    initial values (normal, uniform, zeros or ones). They depend on seed, parameter name and global element alone, so
    that the model is the same under every plan."""
    if draw := residual.DRAWS.get(p.init):
        if p.turned:  # the same initial weights as ever
            out, where, shape = out.movedim(-1, 0), [*where[-1:], *where[:-1]], (*shape[-1:], *shape[:-1])
        residual.fill_normal_(out, residual.derive_key(seed, "init", p.name), p.std, where, shape, draw)
    else:
        out.fill_({"zeros": 0.0, "ones": 1.0}[p.init])


Sums = dict[str, Any]  # name of a layer -> sum of squares that this rank counts, an fp64 scalar


class ActivationWatch:
    """Sums the mean squares of each sequence's activations that a rank's forward passes hand to `add_squares`.
    `sequences`: their number in the next microbatch of all replicas; rows behind them are padding, and do not count."""

    sequences = 0

    def __init__(self, plan: Plan, communicator: Communicator):
        """Begin the sums of squares, by layer, of the activations that operations compute on this rank; none yet."""
        self._plan, self._communicator = plan, communicator
        self.sums: Sums = {}

    @torch.no_grad()
    def add_squares(self, name: str, x: Tensor, spec: Spec) -> None:
        """Add the squares of this rank's block x of the activation `spec`, which an operation has computed, to the sum
        of the layer `name`; only elements that this rank counts among equal copies, and no padding sequences."""
        layout = self._plan.layout(spec)
        if not x.numel() or not counts_at(self._communicator.coordinates, layout.axes):
            return
        dim = spec.dims.index("batch")
        first, extent = self._plan.locate_block(spec, self._communicator.coordinates)[dim]
        mine = x.narrow(dim, 0, min(max(0, self.sequences - first), extent)).detach().double()
        global_shape = self._plan.global_shape(spec)
        self.sums[name] = self.sums.get(name, 0.0) + (mine * mine).sum() * (global_shape[dim] / prod(global_shape))


def is_due(every: int, step: int) -> bool:
    """Return True if squares of this rank's activations and gradients are summed at `step`; `every`: monitor.layers."""
    return bool(every) and step % every == 0


@torch.no_grad()
def gradient_squares(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> Sums:
    """Return, by layer, the sum of squares of the reduced gradients on this rank, as fp64 scalars; of a gradient that
    several ranks hold, one counts it. `plan`: the plan of this rank's stage; `gradients`: parameter name -> gradient of
    the part that this rank updates."""
    squares_by_layer: Sums = {}
    for p in plan.parameters:
        if p.name in gradients and counts_gradient(plan, communicator.coordinates, p):
            layer = layer_of_parameter(p.name)
            squares_by_layer[layer] = squares_by_layer.get(layer, 0.0) + sum_squares([gradients[p.name].reshape(-1)])
    return squares_by_layer
