"""Sizes on one worker: bytes of parameters, gradients and optimizer state, and elements that autograd saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from platform.plan.core.chunks import Chunk, RecordableModel
from platform.plan.core.factored import factors_at, sides
from platform.plan.core.fused import settled
from platform.plan.core.plan import Plan
from platform.plan.memory.meter import Meter
from platform.plan.operations.storages import Value

Coordinates = Mapping[str, int]  # a worker's place: mesh axis -> index


def weight_bytes(plan: Plan, moments: int, at: Coordinates | None = None) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on the worker at mesh coordinates `at`; default:
    rank 0, which has a block of every tensor of the first stage. The optimizer keeps `moments` numbers of the master
    type per element of a parameter that is not frozen; one less of matrices that it updates as a whole, and of those
    whose second moments are factored, of which it keeps one per row and per column."""
    at = at or plan.mesh.coordinates(0)
    masters, buckets = plan.masters_at(at), plan.buckets_at(at)
    states = sum(prod(plan.global_shape(p)) for p in plan.at(at["stage"]).states)
    compute, master = plan.itemsize["compute"], plan.itemsize["master"]
    apart = [b for b in buckets if compute != master or (b.sharded and not b.stored)]  # copies to compute with
    less = plan.masters_of(plan.frozen, at) * moments + plan.masters_of((*plan.matrices, *plan.factored), at)
    return {
        "parameters": (masters + states) * master
        + sum(b.shard_elements if b.stored else b.elements for b in apart) * compute,
        "gradients": sum(b.shard_elements if b.zero >= 2 else b.elements for b in buckets) * master,
        "optimizer": (masters * moments - less + factors_at(plan, at)) * master,
    }


def state_elements(plan: Plan, moments: int) -> int:
    """Return how many numbers the optimizer keeps of the whole model, each once: `moments` per element of a parameter
    that is not frozen; `moments` - 1 per element of a matrix that it updates as a whole; and where second moments are
    factored, `moments` - 1 per element besides one number per row and per column."""
    sizes = {p.name: prod(plan.global_shape(p)) for p in plan.parameters if p.name not in plan.frozen}
    factors = sum(sum(sides(plan, p)) for p in plan.parameters if p.name in plan.factored)
    return moments * sum(sizes.values()) - sum(sizes.get(n, 0) for n in (*plan.matrices, *plan.factored)) + factors


@dataclass(frozen=True)
class SavedElements:
    """Elements that autograd saves per worker and microbatch, in distinct tensors: `activations`, and copies of
    parameters that were gathered for an operation (`gathered`)."""

    activations: int
    gathered: int

    @property
    def total(self) -> int:
        """Return all elements that autograd saves per worker and microbatch."""
        return self.activations + self.gathered


def saved_for_backward(
    plan: Plan, model: RecordableModel, dropout: float = 0.0, at: Coordinates | None = None
) -> SavedElements:
    """Count the elements that autograd saves in one forward pass of a microbatch through `model` under `plan`, besides
    the parameters themselves, on the worker at mesh coordinates `at`; default: rank 0, which has a block of every
    tensor of the first stage. Several chunks are summed. `dropout`: its rate.

    The count is what `platform.parallel.parallel_ops` and torch's CPU kernels keep in fp32 and fp64; index and mask
    tensors of integers and booleans do not count, nor do copies that torch.einsum makes of permuted operands.
    """
    at = at or plan.mesh.coordinates(0)
    plan = settled(plan, "cpu", dropout)
    meter = Meter(plan, dropout, at)
    for chunk in plan.at(at["stage"]).chunks:
        run_chunk(meter, model, chunk, {name: meter.block(spec) for name, spec in chunk.receives})
    saved = meter.tape.saved()
    return SavedElements(*(sum(s.counted for s in saved if s.parameter == copies) for copies in (False, True)))


def run_chunk(meter: Meter, model: RecordableModel, chunk: Chunk, flow: Mapping[str, Value]) -> dict[str, Value]:
    """Run the forward pass of one chunk of the model on the memory meter, from the activations `flow` by name; return
    its outputs by name, the last chunk's being the loss."""
    inputs = {name: name for name in model.inputs}
    if chunk.units:
        return model.part(meter, inputs, flow, chunk.units)  # type: ignore[attr-defined]
    return {"loss": model.forward(meter, inputs)}
