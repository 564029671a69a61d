"""The pipeline executor: interprets one stage's row of a schedule's table, and knows no schedule by name.

Sends are asynchronous and keep their buffer until it has gone; a receive is posted where the row says so and waited for
where the value is used. Of an output only the edge of its autograd graph stays after it was sent, not its memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from platform.parallel.communicator.base import Communicator, Handle
from platform.parallel.kernels.einsum import Deferred
from platform.parallel.sharding.convert import absent
from platform.parallel.sharding.share import gather, scatter
from platform.plan.core.chunks import Chunk, Flow
from platform.plan.core.plan import Plan
from platform.plan.schedule.table import Action, Kind

Key = tuple[int, int]  # chunk, microbatch
Forward = Callable[[Chunk, int, dict[str, Tensor], Deferred | None], dict[str, Tensor]]
SENDS_IN_FLIGHT = 8  # whose buffers are kept; gloo does not say that a send is done until it is waited for


class StageFailed(RuntimeError):
    """An action of a row failed; the message names rank, stage, action and microbatch."""


@dataclass
class _Live:
    """What a forward pass leaves for its backward: leaves that were received, and edges of what came out."""

    inputs: dict[str, Tensor]
    outputs: dict[str, GradientEdge]
    deferred: Deferred | None


@dataclass
class Pipeline:
    """Runs rows on the rank of `communicator`, whose clock has a section per action. `plan`: of its stage.

    `forward(chunk, microbatch, flow, deferred)` runs a model chunk on received activations and returns those that it
    gives by name, or {"loss": ...} with a gradient of 1. Where `deferred` is a list, the backward appends to it what
    computes the gradients of weights. `accumulated(done)` is called after each part of a backward;
    `done`: the chunk, if it was the last part of its last one.
    """

    plan: Plan
    communicator: Communicator
    dtype: torch.dtype  # of activations
    forward: Forward
    accumulated: Callable[[int | None], None] = lambda done: None
    peak_live: int = 0  # forward passes whose backward has not run, at most
    _live: dict[Key, _Live] = field(default_factory=dict)
    _flow: dict[Key, dict[str, Tensor]] = field(default_factory=dict)  # between chunks of this stage, and to be sent
    _gradients: dict[Key, dict[str, Tensor]] = field(default_factory=dict)  # the same on the way back
    _arriving: dict[tuple[str, Key], dict[str, Handle]] = field(default_factory=dict)
    _sending: deque[Handle] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._chunks = {chunk.number: chunk for chunk in self.plan.chunks}

    def run(self, row: Iterable[Action]) -> None:
        """Runs a lowered row to its end; raises StageFailed naming the action that failed."""
        row = list(row)
        self._splits = any(a.kind is Kind.WEIGHT for a in row)
        left: dict[int, int] = defaultdict(int)  # parts of backward passes to come, by chunk
        for action in row:
            left[action.chunk] += action.kind in (Kind.BACKWARD, Kind.WEIGHT)
        self.peak_live = 0
        for action in row:
            c = self.communicator
            try:
                with c.clock.section(str(action)):
                    _ACTIONS[action.kind](self, action)
                    if action.kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT):
                        left[action.chunk] -= action.kind is not Kind.INPUT
                        done = action.kind is not Kind.INPUT and not left[action.chunk]
                        self.accumulated(action.chunk if done else None)
            except Exception as error:
                stage = c.coordinates["stage"]
                raise StageFailed(f"rank {c.rank} (stage {stage}) failed at {action}: {error}") from error
        while self._sending:
            self._sending.popleft().wait()
        assert not (self._live or self._flow or self._gradients or self._arriving), "a row ends with nothing left over"

    def _forward(self, action: Action) -> None:
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
        live = self._live.pop((action.chunk, action.microbatch))
        with self.communicator.clock.section("backward"):
            while live.deferred:
                live.deferred.pop(0)()

    def _send_forward(self, action: Action) -> None:
        flow = self._flow.pop((action.chunk + 1, action.microbatch))
        self._send(flow, self._chunks[action.chunk].sends, action.peer)

    def _send_backward(self, action: Action) -> None:
        gradients = self._gradients.pop((action.chunk - 1, action.microbatch))
        self._send(gradients, self._chunks[action.chunk].receives, action.peer)

    def _send(self, tensors: Mapping[str, Tensor], flow: Flow, peer: int | None) -> None:
        assert peer is not None
        for name, spec in self._present(flow):
            axes, elements = self.plan.shared_axes(spec), self.plan.sent_elements(spec)
            x = scatter(self.communicator, tensors[name], axes, elements)
            self._sending.append(self.communicator.send(x, peer))
        # Safe at any later place, since a schedule is refused if it would stop where sends block.
        while len(self._sending) > SENDS_IN_FLIGHT:
            self._sending.popleft().wait()

    def _receive_forward(self, action: Action) -> None:
        self._receive("forward", action, self._chunks[action.chunk].receives)

    def _receive_backward(self, action: Action) -> None:
        self._receive("backward", action, self._chunks[action.chunk].sends)

    def _receive(self, way: str, action: Action, flow: Flow) -> None:
        assert action.peer is not None
        shapes = {
            name: (self.plan.sent_elements(spec),) if self.plan.shared_axes(spec) else self.plan.local_shape(spec)
            for name, spec in self._present(flow)
        }
        coming = {name: self.communicator.receive(shape, self.dtype, action.peer) for name, shape in shapes.items()}
        self._arriving[way, (action.chunk, action.microbatch)] = coming

    def _arrived(self, way: str, key: Key, flow: Flow) -> dict[str, Tensor]:
        if not flow:
            return {}
        coming, out = self._arriving.pop((way, key)), {}
        for name, spec in flow:
            if name in coming:
                axes, shape = self.plan.shared_axes(spec), self.plan.local_shape(spec)
                out[name] = gather(self.communicator, coming[name].wait(), axes, shape)
            else:
                out[name] = torch.empty(0, dtype=self.dtype, device=self.communicator.device)
        return out

    def _present(self, flow: Flow) -> Flow:
        """What of a flow this rank's place in a stage has a block of; the others hold empty tensors."""
        return tuple((name, spec) for name, spec in flow if self.plan.present(spec, self.communicator.coordinates))


# Not in the instance: what refers to itself lives, with all that it holds, until Python looks for such cycles.
_ACTIONS: Mapping[Kind, Callable[[Pipeline, Action], None]] = {
    Kind.FORWARD: Pipeline._forward,
    Kind.BACKWARD: Pipeline._backward,
    Kind.INPUT: Pipeline._input_gradient,
    Kind.WEIGHT: Pipeline._weight_gradient,
    Kind.SEND_F: Pipeline._send_forward,
    Kind.RECV_F: Pipeline._receive_forward,
    Kind.SEND_B: Pipeline._send_backward,
    Kind.RECV_B: Pipeline._receive_backward,
}


def sum_tied(plan: Plan, communicator: Communicator, gradients: Mapping[str, Tensor]) -> None:
    """Sums the gradients of parameters that several stages use, in place: the owner adds the others' in stage order and
    gives all the sum. `plan`: of this rank's stage."""
    here = communicator.coordinates["stage"]
    for name, (owner, *others) in plan.tied.items():
        if name not in gradients:  # this rank's place in every stage has no block of it
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
