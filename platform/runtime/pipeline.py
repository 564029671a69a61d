"""The pipeline executor: runs one stage's row of a schedule's table, and knows no schedule by name.

A row is compiled once: every action with what it needs of plan and mesh, so that a step only computes, sends and waits.
Where a posted receive holds nothing up (gloo), receives are posted a computation earlier than the row says: the message
of a sender who need not ask first takes one wake-up of a thread instead of three.
Sends are asynchronous and keep their buffer until it is sent; a receive is posted where the row says so and waited for
where the value is used. After an output is sent only its autograd graph edge is kept, and its memory is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from platform.plan.chunks import Chunk, FlowSpecs
from platform.plan.plan import Plan
from platform.plan.schedule import (
    BACKWARD_KINDS,
    COMPUTE,
    RECEIVES,
    SENDS_IN_FLIGHT,
    Action,
    Kind,
    has_pairs,
    mark_completed_chunks,
)
from platform.runtime.communicator import CollectiveHandle, Communicator
from platform.runtime.conversion import copy_own_part, gather_parts, is_absent_block
from platform.runtime.einsum import Deferred
from platform.runtime.turns import PassAbandoned, PassTurns, SwapState

PassKey = tuple[int, int]  # chunk, microbatch
Flow = dict[str, Tensor]  # activations between two chunks by name, or their gradients
Forward = Callable[[Chunk, int, Flow, Deferred | None], Flow]
ComputePass = Callable[[Flow], Flow]
Accumulated = Callable[[Action, int | None], None]


class StageFailed(RuntimeError):
    """Failure of one action of a stage's schedule row; the message names rank, stage, action and microbatch."""


@dataclass
class _Live:
    """State that one forward pass of a chunk keeps for its backward pass: input leaves, the autograd edges of its
    outputs, and the deferred weight gradients (None where the schedule does not split the backward pass)."""

    inputs: dict[str, Tensor]
    outputs: dict[str, GradientEdge]
    deferred: Deferred | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Activation between two chunks as this rank sends it: `shape` of its block, and `sent` of what goes to the other
    stage, one part per rank along the `axes` that replicate it (scatter/gather), else the block."""

    name: str
    shape: tuple[int, ...]
    sent: tuple[int, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Flow:
    """Activations between two chunks: the `parts` of which this rank has a block, and the names of all."""

    parts: tuple[_Part, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolvedAction:
    """Action of a row with its chunk and transfers resolved. `name`: name of its section of the clock; `receives`,
    `sends`: activations from the chunk before and for the chunk after; `completed`: the chunk whose last backward
    action this is; `early`: receives that a computation posts when it has its own inputs."""

    action: Action
    name: str
    chunk: Chunk
    key: PassKey
    before: PassKey  # the same microbatch in the chunk before
    after: PassKey
    receives: _Flow
    sends: _Flow
    completed: int | None
    early: tuple[ResolvedAction, ...] = ()


CompiledRows = dict[int, tuple[Sequence[Action], list[ResolvedAction]]]  # id of a row -> the row itself, compiled


def compile_row(plan: Plan, communicator: Communicator, row: Sequence[Action]) -> list[ResolvedAction]:
    """Resolve this rank's `row` of a pipeline schedule (computations, sends, receives) for execution: each action with
    the model chunk that it runs and the shapes of the tensors that it sends or receives."""

    def resolve_flow(flow: FlowSpecs) -> _Flow:
        """Return the activations in `flow` between two chunks of which this rank has blocks, with their shapes sent."""
        present_flow = [(name, spec) for name, spec in flow if plan.has_block(spec, communicator.coordinates)]
        parts = []
        for name, spec in present_flow:
            axes, shape = plan.scatter_axes(spec), plan.block_shape(spec, communicator.coordinates)
            parts.append(_Part(name, shape, (plan.sent_elements(spec),) if axes else shape, axes))
        return _Flow(tuple(parts), tuple(name for name, _ in flow))

    chunks = {chunk.number: (chunk, resolve_flow(chunk.receives), resolve_flow(chunk.sends)) for chunk in plan.chunks}
    steps = []
    for a, completed in mark_completed_chunks(row):
        chunk, receives, sends = chunks[a.chunk]
        key, before, after = ((a.chunk + way, a.microbatch) for way in (0, -1, 1))
        steps.append(ResolvedAction(a, str(a), chunk, key, before, after, receives, sends, completed))
    return _move_receives_early(steps) if communicator.posts_early else steps


def _move_receives_early(steps: Sequence[ResolvedAction]) -> list[ResolvedAction]:
    """Let this rank post every receive in the row that it executes before the last computation that precedes it, if
    any."""
    moved_steps: list[ResolvedAction] = []
    for step in steps:
        at = next((i for i in reversed(range(len(moved_steps))) if moved_steps[i].action.kind in COMPUTE), None)
        if step.action.kind in RECEIVES and at is not None:
            moved_steps[at] = replace(moved_steps[at], early=(*moved_steps[at].early, step))
        else:
            moved_steps.append(step)
    return moved_steps


@dataclass
class PipelineExecutor:
    """Runs schedule rows on the rank of `communicator`, timing each action as a section of its clock. `plan`: the plan
    of this rank's stage.

    `forward(chunk, microbatch, flow, deferred)` runs a model chunk on the activations received by name (`flow`) and
    returns its output activations by name, or {"loss": ...}, whose gradient is 1. If `deferred` is a list, the backward
    pass appends to it the functions that compute weight gradients. `accumulated(action, done)` is called after each
    backward action; `done` is the chunk number if it was the last of the row for the chunk, else None. `rows`: compiled
    rows, which may be kept from one executor of this rank to the next. `run_pass(action, tensors, compute)` returns the
    tensors by name that an action computes of others, `compute(tensors)`, however it computes them. `swap_state`: of
    passes in pairs, see `PassTurns`.
    """

    plan: Plan
    communicator: Communicator
    dtype: torch.dtype  # of activations
    forward: Forward
    accumulated: Accumulated = lambda action, done: None
    rows: CompiledRows = field(default_factory=dict)
    run_pass: Callable[[Action, Flow, ComputePass], Flow] = lambda action, tensors, compute: compute(tensors)
    swap_state: SwapState = lambda state: state
    peak_live: int = 0  # most forward passes that awaited their backward at once
    _live: dict[PassKey, _Live] = field(default_factory=dict)
    _flow: dict[PassKey, Flow] = field(default_factory=dict)  # outputs for the next chunk
    _gradients: dict[PassKey, Flow] = field(default_factory=dict)  # the same for the backward direction
    _arriving: dict[tuple[str, PassKey], list[CollectiveHandle]] = field(default_factory=dict)
    _sending: deque[CollectiveHandle] = field(default_factory=deque)

    def run_row(self, row: Sequence[Action]) -> None:
        """Execute `row`, this rank's actions of a pipeline schedule, in order on tensors, until all its sends have
        ended. Raises StageFailed naming the action that failed."""
        if id(row) not in self.rows:
            self.rows[id(row)] = row, compile_row(self.plan, self.communicator, row)
        steps = self.rows[id(row)][1]
        self._splits = any(step.action.kind is Kind.WEIGHT for step in steps)
        self.peak_live = 0
        if has_pairs(row):
            with ThreadPoolExecutor(1, "pass") as helper:
                self._execute_actions(steps, helper)
        else:
            self._execute_actions(steps, None)
        while self._sending:
            self._sending.popleft().wait()
        assert not (self._live or self._flow or self._gradients or self._arriving), "a row ends with nothing left over"

    def _execute_actions(self, steps: Sequence[ResolvedAction], helper: Executor | None) -> None:
        """Execute actions of the pipeline schedule in order, the two of a pair at once, one of them by the `helper`."""
        remaining = iter(steps)
        for step in remaining:
            if step.action.paired and helper:
                self._execute_pair(step, next(remaining), helper)
            else:
                self._execute_action(step)

    def _execute_pair(self, forward: ResolvedAction, backward: ResolvedAction, helper: Executor) -> None:
        """Execute a forward pass and a backward pass of the pipeline schedule in turns, the latter by the `helper`: on
        a device, autograd has a thread of its own for it anyway. Raises StageFailed as `_execute_action` does."""
        clock = self.communicator.clock
        depth = len(clock.open_sections)

        def swap_state(other: Any) -> Any:
            """Exchange the state of the pass under way, with its sections of the clock, for the `other` one's."""
            sections, state = other or (None, None)
            return clock.swap_sections(sections, depth), self.swap_state(state)

        self.peak_live = max(self.peak_live, 1 + len(self._live))
        self.communicator.turns = turns = PassTurns(swap_state)
        try:
            turns.run_both(partial(self._execute_action, forward), partial(self._execute_action, backward), helper)
        finally:
            self.communicator.turns = None

    def _execute_action(self, step: ResolvedAction) -> None:
        """Execute one action of the pipeline schedule, timed as a section of the rank's clock. Raises StageFailed
        naming the action, or the early receive, that failed."""
        c = self.communicator
        try:
            with c.clock.time_section(step.name):
                _ACTIONS[step.action.kind](self, step)
                if step.action.kind in BACKWARD_KINDS:
                    self.accumulated(step.action, step.completed)
        except (StageFailed, PassAbandoned):
            raise
        except Exception as error:
            stage = c.coordinates["stage"]
            raise StageFailed(f"rank {c.rank} (stage {stage}) failed at {step.name}: {error}") from error

    def _run_forward(self, step: ResolvedAction) -> None:
        """Run a pipeline chunk's forward pass on its input activations, received from the stage before or left here by
        the chunk before, and leave its outputs for the next chunk."""
        inputs = (
            self._flow.pop(step.key)
            if step.key in self._flow
            else self._wait_for_activations("F", step.key, step.receives)
        )
        self._post_early_receives(step)
        outputs = self.run_pass(step.action, inputs, partial(self._compute_outputs, step))
        if step.chunk.sends:
            self._flow[step.after] = outputs

    def _compute_outputs(self, step: ResolvedAction, inputs: Flow) -> Flow:
        """Compute a chunk's output activations of its `inputs`; return them detached, {} of the last chunk. The
        autograd edges that the backward pass needs are kept."""
        grad = torch.is_grad_enabled()
        inputs = {name: x.detach().requires_grad_(grad) for name, x in inputs.items()}
        deferred: Deferred | None = [] if self._splits else None
        with self.communicator.clock.time_section("forward"):
            outputs = self.forward(step.chunk, step.action.microbatch, inputs, deferred)
        if grad:
            edges = {name: get_gradient_edge(x) for name, x in outputs.items()}
            self._live[step.key] = _Live(inputs, edges, deferred)
            self.peak_live = max(self.peak_live, len(self._live))
        return {name: x.detach() for name, x in outputs.items()} if step.chunk.sends else {}

    def _run_backward(self, step: ResolvedAction) -> None:
        """Run a pipeline chunk's backward pass from its outputs' gradients (1 for the loss), and leave its inputs'
        gradients for the chunk before."""
        gradients: Flow = {}
        if step.chunk.sends:
            local = self._gradients.pop(step.key, None)
            gradients = self._wait_for_activations("B", step.key, step.sends) if local is None else local
        self._post_early_receives(step)
        input_gradients = self.run_pass(step.action, gradients, partial(self._compute_input_gradients, step))
        if step.chunk.receives:
            self._gradients[step.before] = input_gradients

    def _compute_input_gradients(self, step: ResolvedAction, gradients: Flow) -> Flow:
        """Compute the gradients of a chunk's inputs from the `gradients` of its outputs, and weight gradients too,
        unless the schedule defers them."""
        live = self._live[step.key]
        with self.communicator.clock.time_section("backward"):
            torch.autograd.backward(list(live.outputs.values()), [gradients.get(name) for name in live.outputs])
        live.outputs.clear()
        input_gradients = {name: x.grad for name, x in live.inputs.items()}
        assert all(g is not None or is_absent_block(live.inputs[name]) for name, g in input_gradients.items())
        live.inputs.clear()
        if step.action.kind is Kind.BACKWARD:
            self._compute_weight_gradients(step, {})
        return cast(Flow, input_gradients)

    def _run_weight_backward(self, step: ResolvedAction) -> None:
        """Compute the weight gradients that a chunk's backward pass has deferred."""
        self._post_early_receives(step)
        self.run_pass(step.action, {}, partial(self._compute_weight_gradients, step))

    def _compute_weight_gradients(self, step: ResolvedAction, _: Flow) -> Flow:
        """Compute the weight gradients that a chunk's backward pass has deferred; return {}."""
        if deferred := self._live.pop(step.key).deferred:
            with self.communicator.clock.time_section("backward"):
                while deferred:
                    deferred.pop(0)()
        return {}

    def _send_activations(self, tensors: Mapping[str, Tensor], flow: _Flow, step: ResolvedAction) -> None:
        """Start sending activations or their gradients to the peer pipeline stage. If ranks of this stage hold equal
        tensors, each sends one part of them (scatter/gather)."""
        assert step.action.peer is not None
        for part in flow.parts:
            x = copy_own_part(self.communicator, tensors[part.name], part.axes, part.sent[0])
            self._sending.append(self.communicator.send(x, step.action.peer))
        # Waiting here cannot deadlock: a schedule that would deadlock with blocking sends is refused.
        while len(self._sending) > SENDS_IN_FLIGHT:
            self._sending.popleft().wait()

    def _post_early_receives(self, step: ResolvedAction) -> None:
        """Post the receives of later pipeline actions that were moved forward to this computation."""
        for receive in step.early:
            self._execute_action(receive)

    def _post_receives(self, direction_letter: str, flow: _Flow, step: ResolvedAction) -> None:
        """Post receives of activations (`direction_letter` "F") or gradients ("B") from the peer pipeline stage."""
        assert step.action.peer is not None
        receive = self.communicator.receive
        self._arriving[direction_letter, step.key] = [
            receive(part.sent, self.dtype, step.action.peer) for part in flow.parts
        ]

    def _wait_for_activations(self, direction_letter: str, key: PassKey, flow: _Flow) -> dict[str, Tensor]:
        """Wait for the tensors that `_post_receives` posted for `key` (chunk, microbatch), and return them by name.
        Parts sent by several ranks are gathered into whole tensors; a tensor of which this rank has no block is
        empty."""
        if not flow.names:
            return {}
        c = self.communicator
        coming = zip(flow.parts, self._arriving.pop((direction_letter, key)), strict=True)
        out = {part.name: gather_parts(c, handle.wait(), part.axes, part.shape) for part, handle in coming}
        if len(out) < len(flow.names):
            out = {n: out[n] if n in out else torch.empty(0, dtype=self.dtype, device=c.device) for n in flow.names}
        return out


class StageAlone(PipelineExecutor):
    """Runs a stage's rows by themselves: what it sends is dropped, and what it receives is zeros."""

    def _send_activations(self, tensors: Mapping[str, Tensor], flow: _Flow, step: ResolvedAction) -> None:
        pass

    def _post_receives(self, direction_letter: str, flow: _Flow, step: ResolvedAction) -> None:
        c = self.communicator
        zeros = (partial(torch.zeros, part.sent, dtype=self.dtype, device=c.device) for part in flow.parts)
        self._arriving[direction_letter, step.key] = [
            CollectiveHandle(c.clock, lambda: None, build_zeros) for build_zeros in zeros
        ]


# Unbound and outside the instance: bound methods stored in it would form a reference cycle, which keeps its tensors
# alive until Python's cycle collector runs.
_ACTIONS: Mapping[Kind, Callable[[PipelineExecutor, ResolvedAction], None]] = {
    Kind.FORWARD: PipelineExecutor._run_forward,
    Kind.BACKWARD: PipelineExecutor._run_backward,
    Kind.INPUT: PipelineExecutor._run_backward,
    Kind.WEIGHT: PipelineExecutor._run_weight_backward,
    Kind.SEND_F: lambda self, step: self._send_activations(self._flow.pop(step.after), step.sends, step),
    Kind.RECV_F: lambda self, step: self._post_receives("F", step.receives, step),
    Kind.SEND_B: lambda self, step: self._send_activations(self._gradients.pop(step.before), step.receives, step),
    Kind.RECV_B: lambda self, step: self._post_receives("B", step.sends, step),
}


def sum_tied_gradients(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> None:
    """Sum this rank's gradients of tied parameters, in place, with those on other pipeline stages, such as the table
    that embedding and head share: the owner stage receives the other stages' gradients, adds them in stage order, and
    sends the sum back. `gradients`: parameter name -> this rank's gradient; `plan`: the plan of this rank's stage."""
    own_stage = communicator.coordinates["stage"]
    for name, (owner, *others) in plan.stages_of_tied_parameters.items():
        if name not in gradients:  # neither this rank nor its peers in other stages have a block
            continue
        g = gradients[name]
        if own_stage == owner:
            for other in others:
                g += communicator.receive(g.shape, g.dtype, other).wait()
            for handle in [communicator.send(g, other) for other in others]:
                handle.wait()
        else:
            communicator.send(g, owner).wait()
            g.copy_(communicator.receive(g.shape, g.dtype, owner).wait())
