"""The pipeline executor: interprets one stage's row of a schedule's table, and knows no schedule by name.

Sends are asynchronous and keep their buffer until it is sent; a receive is posted where the row says so and waited for
where the value is used. After an output is sent only its autograd graph edge is kept, and its memory is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from platform.parallel.communicator.base import Communicator, Handle
from platform.parallel.kernels.einsum import Deferred
from platform.parallel.sharding.convert import absent
from platform.parallel.sharding.share import gather_parts, keep_part
from platform.plan.core.chunks import Chunk, FlowSpecs
from platform.plan.core.plan import Plan
from platform.plan.schedule.table import BACKWARD_KINDS, SENDS_IN_FLIGHT, Action, Kind, with_completed

PassKey = tuple[int, int]  # chunk, microbatch
Forward = Callable[[Chunk, int, dict[str, Tensor], Deferred | None], dict[str, Tensor]]
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


@dataclass
class PipelineExecutor:
    """Runs schedule rows on the rank of `communicator`, timing each action as a section of its clock. `plan`: that of
    this rank's stage.

    `forward(chunk, microbatch, flow, deferred)` runs a model chunk on the activations received by name (`flow`) and
    returns its output activations by name, or {"loss": ...}, whose gradient is 1. If `deferred` is a list, the backward
    pass appends to it the functions that compute weight gradients. `accumulated(action, done)` is called after each
    backward action; `done` is the chunk number if it was the last of the row for the chunk, else None.
    """

    plan: Plan
    communicator: Communicator
    dtype: torch.dtype  # of activations
    forward: Forward
    accumulated: Accumulated = lambda action, done: None
    peak_live: int = 0  # most forward passes that awaited their backward at once
    _live: dict[PassKey, _Live] = field(default_factory=dict)
    _flow: dict[PassKey, dict[str, Tensor]] = field(default_factory=dict)  # outputs for the next chunk
    _gradients: dict[PassKey, dict[str, Tensor]] = field(default_factory=dict)  # the same for the backward direction
    _arriving: dict[tuple[str, PassKey], dict[str, Handle]] = field(default_factory=dict)
    _sending: deque[Handle] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._chunks = {chunk.number: chunk for chunk in self.plan.chunks}

    def run(self, row: Iterable[Action]) -> None:
        """Run this stage's lowered row of a schedule (compute actions, sends and receives, in order) to its end, with
        all sends completed. Raises StageFailed naming the action that failed."""
        row = list(row)
        self._splits = any(a.kind is Kind.WEIGHT for a in row)
        self.peak_live = 0
        for action, completed in with_completed(row):
            c = self.communicator
            try:
                with c.clock.section(str(action)):
                    _ACTIONS[action.kind](self, action)
                    if action.kind in BACKWARD_KINDS:
                        self.accumulated(action, completed)
            except Exception as error:
                stage = c.coordinates["stage"]
                raise StageFailed(f"rank {c.rank} (stage {stage}) failed at {action}: {error}") from error
        while self._sending:
            self._sending.popleft().wait()
        assert not (self._live or self._flow or self._gradients or self._arriving), "a row ends with nothing left over"

    def _forward(self, action: Action) -> None:
        """Run an action's forward pass on the inputs that arrived or that the chunk before left here; keep what the
        backward pass needs, and leave the detached outputs for the next chunk."""
        chunk, key = self._chunks[action.chunk], (action.chunk, action.microbatch)
        grad = torch.is_grad_enabled()
        if key in self._flow:
            inputs = self._flow.pop(key)
        else:
            inputs = self._arrived("forward", key, chunk.receives)
        inputs = {name: x.detach().requires_grad_(grad) for name, x in inputs.items()}
        deferred: Deferred | None = [] if self._splits else None
        with self.communicator.clock.section("forward"):
            outputs = self.forward(chunk, action.microbatch, inputs, deferred)
        if grad:
            edges = {name: get_gradient_edge(x) for name, x in outputs.items()}
            self._live[key] = _Live(inputs, edges, deferred)
            self.peak_live = max(self.peak_live, len(self._live))
        if chunk.sends:
            self._flow[chunk.number + 1, action.microbatch] = {name: x.detach() for name, x in outputs.items()}

    def _backward(self, action: Action) -> None:
        self._input_gradient(action)
        self._weight_gradient(action)

    def _input_gradient(self, action: Action) -> None:
        """Run an action's backward pass from the gradients of the chunk's outputs (1 for the loss), and leave those of
        its inputs for the chunk before; weight gradients are computed too unless the row defers them."""
        chunk, key = self._chunks[action.chunk], (action.chunk, action.microbatch)
        live = self._live[key]
        gradients: dict[str, Tensor] = {}
        if chunk.sends:
            local = key in self._gradients
            gradients = self._gradients.pop(key) if local else self._arrived("backward", key, chunk.sends)
        with self.communicator.clock.section("backward"):
            torch.autograd.backward(list(live.outputs.values()), [gradients.get(name) for name in live.outputs])
        live.outputs.clear()
        if chunk.receives:
            found = {name: x.grad for name, x in live.inputs.items()}
            assert all(g is not None or absent(live.inputs[name]) for name, g in found.items())
            self._gradients[chunk.number - 1, action.microbatch] = found  # type: ignore[assignment]
        live.inputs.clear()

    def _weight_gradient(self, action: Action) -> None:
        """Compute the weight gradients that the backward pass of an action's chunk and microbatch deferred, if any."""
        live = self._live.pop((action.chunk, action.microbatch))
        with self.communicator.clock.section("backward"):
            while live.deferred:
                live.deferred.pop(0)()

    def _send(self, way: str, action: Action) -> None:
        """Start sending an action's activations (`way` "forward") or their gradients ("backward") to the peer stage:
        one part per rank of what several ranks replicate, if the plan scatters them."""
        assert action.peer is not None
        chunk = self._chunks[action.chunk]
        if way == "forward":
            tensors, flow = self._flow.pop((chunk.number + 1, action.microbatch)), chunk.sends
        else:
            tensors, flow = self._gradients.pop((chunk.number - 1, action.microbatch)), chunk.receives
        for name, spec in self._present(flow):
            x = keep_part(self.communicator, tensors[name], self.plan.shared_axes(spec))
            self._sending.append(self.communicator.send(x, action.peer))
        # Waiting here cannot deadlock: a schedule that would deadlock with blocking sends is refused.
        while len(self._sending) > SENDS_IN_FLIGHT:
            self._sending.popleft().wait()

    def _receive(self, way: str, action: Action) -> None:
        """Post the receives of an action's activations (`way` "forward") or their gradients ("backward") from the peer
        stage."""
        assert action.peer is not None
        chunk = self._chunks[action.chunk]
        flow = chunk.receives if way == "forward" else chunk.sends
        shapes = {
            name: (self.plan.sent_elements(spec),) if self.plan.shared_axes(spec) else self.plan.local_shape(spec)
            for name, spec in self._present(flow)
        }
        coming = {name: self.communicator.receive(shape, self.dtype, action.peer) for name, shape in shapes.items()}
        self._arriving[way, (action.chunk, action.microbatch)] = coming

    def _arrived(self, way: str, key: PassKey, flow: FlowSpecs) -> dict[str, Tensor]:
        """Wait for the tensors that `_receive` posted for `key` (chunk, microbatch), and gather those sent in parts;
        tensors of which this rank has no block are empty."""
        if not flow:
            return {}
        coming, out = self._arriving.pop((way, key)), {}
        for name, spec in flow:
            if name in coming:
                axes, shape = self.plan.shared_axes(spec), self.plan.local_shape(spec)
                out[name] = gather_parts(self.communicator, coming[name].wait(), axes, shape)
            else:
                out[name] = torch.empty(0, dtype=self.dtype, device=self.communicator.device)
        return out

    def _present(self, flow: FlowSpecs) -> FlowSpecs:
        """Return the (name, spec) pairs of `flow`, the activations between two chunks, of which this rank has a block;
        the others are empty tensors here and are neither sent nor received."""
        return tuple((name, spec) for name, spec in flow if self.plan.present(spec, self.communicator.coordinates))


# Unbound and outside the instance: bound methods stored in it would form a reference cycle, which keeps its tensors
# alive until Python's cycle collector runs.
_ACTIONS: Mapping[Kind, Callable[[PipelineExecutor, Action], None]] = {
    Kind.FORWARD: PipelineExecutor._forward,
    Kind.BACKWARD: PipelineExecutor._backward,
    Kind.INPUT: PipelineExecutor._input_gradient,
    Kind.WEIGHT: PipelineExecutor._weight_gradient,
    Kind.SEND_F: lambda self, action: self._send("forward", action),
    Kind.RECV_F: lambda self, action: self._receive("forward", action),
    Kind.SEND_B: lambda self, action: self._send("backward", action),
    Kind.RECV_B: lambda self, action: self._receive("backward", action),
}


def sum_tied(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> None:
    """Sum in place the gradients of tied parameters, which several pipeline stages use (such as the table shared by
    embedding and head): the owner stage adds the other stages' gradients in stage order and sends them the sum.
    `gradients`: parameter name -> this rank's gradient; `plan`: that of this rank's stage."""
    here = communicator.coordinates["stage"]
    for name, (owner, *others) in plan.tied.items():
        if name not in gradients:  # neither this rank nor its peers in other stages have a block
            continue
        g = gradients[name]
        if here == owner:
            for other in others:
                g += communicator.receive(g.shape, g.dtype, other).wait()
            for handle in [communicator.send(g, other) for other in others]:
                handle.wait()
        else:
            communicator.send(g, owner).wait()
            g.copy_(communicator.receive(g.shape, g.dtype, owner).wait())
