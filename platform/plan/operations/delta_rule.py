"""The gated delta rule (Yang et al. 2025), an operation with a state along the sequence, and the short convolution of
its queries, keys and values. Passes of generation go on from the states that the passes before have left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from platform.plan.model_types import Operation, Spec
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.op import BlockOp, Value, global_extents, plan_with_vectors, token_fields
from platform.plan.planner import Planner
from platform.plan.scheme import ModelMistake

CHUNK = 64  # tokens of which the writes to a state are one triangular system, as published code has it


class _AlongSequence(BlockOp):
    """Base of operations whose tokens read what tokens before them leave: a rank has whole sequences, and `begins`, a
    data tensor [length, batch], says where documents start afresh. Their parameters are vectors of dims of heads."""

    is_traceable = False

    def plan_operation(self, planner: Planner, operation: Operation) -> PlannedOperation:
        """Plan the operation where its values lie. Raises ValueError for axes that split a sequence or a head."""
        out = operation.outputs[0]
        layout = planner.layout(out)
        if split := [d for d in ("length", "d_kv") if layout[d]]:
            raise ValueError(f"{split[0]} is split over {'+'.join(layout[split[0]])}, and a delta rule needs it whole")
        for spec in operation.inputs:
            if isinstance(spec, Spec) and planner.cuts_among_dims(spec, planner.layout(spec), ["heads"]):
                raise ValueError(f"{'+'.join(layout['heads'])} would not give each rank as many heads")
        read = token_fields(planner, out, layout.restrict_dims(("length", "batch"))) if operation.reads else {}
        return plan_with_vectors(planner, operation, **read)

    def places(self, ops: Any, name: str, begins: Any) -> Any:
        """Return the places of this rank's tokens, for the kernels of delta rules and their convolutions."""
        return ops.kernels.delta_chunks.TokenPlaces(ops.offset, None if begins is None else begins[self.kind, name])

    def store_state(self, ops: Any, name: str, spec: Spec, state: Any) -> None:
        """Store what the next pass of generation goes on from, whose second dim is batch."""
        if ops.cache:
            ops.cache.blocks[name], ops.cache.first[name] = (state,), ops.blocks[spec][1][0]


class ConvolveOp(_AlongSequence):
    """SiLU of the convolution of x, of type `spec` [length batch heads d_kv], along length, of each element by itself,
    with the parameter `taps` [heads d_kv taps]: a token reads itself by the last tap, and tokens before it."""

    memory_accesses = (8, 20)

    def record_operation(self, ops, name, x, spec, taps, *, begins=None):
        return ops.record_operation(self.kind, name, [x], [spec, taps], [spec], [begins])

    def run_on_blocks(self, ops, planned, name, x, spec, taps, *, begins=None):
        """Compute the convolution of this rank's block of x, and keep the last tokens for generation's next pass."""
        from torch import cat

        kernels, places, reach = ops.kernels, self.places(ops, name, begins), taps.shape[-1] - 1
        stored = ops.cache.blocks.get(name) if ops.cache else None
        before = stored[0] if stored else x.new_zeros(reach, *x.shape[1:])
        self.store_state(ops, name, spec, cat((before, x))[len(x) :] if ops.cache else None)
        compute = lambda x, taps: kernels.delta_chunks.convolve(x, taps, before, places)  # noqa: E731
        return kernels.recompute.keep_arguments(compute, x, taps)

    def meter_memory(self, ops, planned, name, x, spec, taps, *, begins=None) -> Value:
        """Count the memory of a convolution, which keeps its arguments and is computed again."""
        scratch = ops.new(3 * x.elements, ops.wide)
        if ops.cache:
            ops.cache.blocks[name] = (ops.tensor(x.elements),)
        out = ops.block(spec)
        del scratch
        return ops.plain(out, [x, taps], (x.storage, taps.storage), 6 * x.elements, ops.wide)


class DeltaRuleOp(_AlongSequence):
    """Gated delta rule of queries q and keys k, of type `key` [length batch heads d_kv], each for as many of the heads
    of values v, of type `value`, as there are more of these; of type `number` [length batch heads] are the logits of
    what a token writes, `strength`, and `decay`, of which exp(rate) * softplus(decay + shift) is what the state loses
    in the logarithm; `rate` and `shift` are parameters [heads]."""

    memory_accesses = (12, 40)

    def record_operation(self, ops, name, q, k, v, strength, decay, key, value, number, rate, shift, *, begins=None):
        """Record a delta rule. Raises ModelMistake for heads that keys do not serve evenly."""
        heads = [{**ops.sizes, **dict(t.sizes)}.get("heads", 1) for t in (value, key)]
        if heads[0] % heads[1]:
            raise ModelMistake(name, f"{heads[1]} heads of keys do not serve {heads[0]} heads of values evenly")
        activations, types = [q, k, v, strength, decay], [key, key, value, number, number, rate, shift]
        return ops.record_operation(self.kind, name, activations, types, [value], [begins])

    def count_flops(self, operation: Operation, sizes: Mapping[str, int]) -> float:
        """Return the FLOPs of the products between tokens of chunks, and with states, of all ranks together."""
        return _delta_rule_flops(*(global_extents(t, sizes) for t in operation.inputs[1:3]))

    def count_block_flops(self, planner: Planner, operation: Operation) -> float:
        """Return the FLOPs of a rank's products."""
        return _delta_rule_flops(
            *(dict(zip(t.dims, planner.local_shape(t), strict=True)) for t in operation.inputs[1:3])
        )

    def run_on_blocks(
        self, ops, planned, name, q, k, v, strength, decay, key, value, number, rate, shift, *, begins=None
    ):  # fmt: skip
        """Compute the delta rule of this rank's heads, from the state before, and keep that for the next pass."""
        stored = ops.cache.blocks.get(name) if ops.cache else None
        arguments = [q, k, v, strength, decay, rate, shift]
        places, state = self.places(ops, name, begins), stored[0][0] if stored else None
        out, state = ops.kernels.delta_chunks.apply_delta_rule(arguments, places, state)
        self.store_state(ops, name, value, state[None])
        return out

    def meter_memory(
        self, ops, planned, name, q, k, v, strength, decay, key, value, number, rate, shift, *, begins=None
    ) -> Value:  # fmt: skip
        """Count the memory of one chunk at a time, and in the backward pass of all states; the arguments are kept."""
        (length, batch, heads, d_value), d_key = ops.plan.local_shape(value), ops.plan.local_shape(key)[-1]
        size, states, count = min(CHUNK, length), batch * heads * d_key * d_value, -(-length // CHUNK)
        rows = batch * heads * size
        scratch = ops.new(rows * (4 * d_key + 5 * d_value + 4 * size) + 2 * states, ops.wide)
        if ops.cache:
            ops.cache.blocks[name] = (ops.tensor(states, ops.wide),)
        out, arguments = ops.block(value), [q, k, v, strength, decay, rate, shift]
        del scratch
        again = rows * (12 * d_key + 14 * d_value + 12 * size) + (count + 3) * states
        return ops.plain(out, arguments, tuple(x.storage for x in arguments), again, ops.wide)


def _delta_rule_flops(key: Mapping[str, int], value: Mapping[str, int]) -> float:
    """Return the forward FLOPs of a delta rule, by the extents of its keys and values."""
    d_key, d_value, size = key["d_kv"], value["d_kv"], min(CHUNK, value["length"])
    of_token = size * (4 * d_key + 3 * d_value) + 6 * d_key * d_value
    return float(value["length"] * value["batch"] * value["heads"] * of_token)
