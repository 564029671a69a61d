"""Price of a snapshot: what a node sends to the memory of other nodes, and how often there is time for it. Pure."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import NamedTuple

from platform.checkpoint.blocks.placement import planned_states, planned_tensors
from platform.config.fields import Config
from platform.config.groups.execution_group import AUTO
from platform.optimizer.optimizers import kept_numbers
from platform.plan.core.factored import sides
from platform.plan.core.plan import Plan
from platform.plan.memory.hardware import dense_bf16_peak
from platform.planning.memory_budget import device_kind

NODE = 8  # workers of a node, as long as nobody says otherwise
USED = 0.5  # of a GPU's peak speed, at most: no step is estimated too long


class SnapshotPrice(NamedTuple):
    """Price of one snapshot in memory: `bytes` that leave the node which sends most, the `seconds` that takes at
    cluster.network, and seconds of the training `step` beside it, at least; None where the GPU's speed is not known."""

    bytes: int
    seconds: float
    step: float | None

    @property
    def interval(self) -> int:
        """Return the fewest steps to plan between snapshots, so that a transfer fits; 1 if its time is unknown."""
        return max(1, ceil(self.seconds / self.step)) if self.step else 1


def snapshot_price(config: Config, plan: Plan, per_node: int) -> SnapshotPrice:
    """Predict what a snapshot costs a run under `plan`, of whose consecutive ranks `per_node` are on a node."""
    count = leaving_bytes(config, plan, per_node)
    peak = dense_bf16_peak(config.cluster.gpu) if device_kind(config) == "cuda" else None
    step = peak and plan.flops_per_token * plan.tokens_per_step / (plan.mesh.size * peak * USED)
    return SnapshotPrice(count, count * 8 / (config.cluster.network * 1e9), step)


def leaving_bytes(config: Config, plan: Plan, per_node: int) -> int:
    """Predict, from a plan, the most bytes of a snapshot that leave a node of `per_node` consecutive ranks: the masters
    and moments that no rank of another node holds, once each. They are 0 where there is one node."""
    if plan.mesh.size <= per_node:
        return 0
    kept, lonely = kept_numbers(config), Counter[int]()
    trained = {p.name for p in plan.parameters if p.name not in plan.frozen}
    rows = {p.name: sum(sides(plan, p)) for p in plan.parameters if p.name in plan.factored}
    for held in (*planned_tensors(plan, "model", "float32"), *planned_states(plan, "float32")):
        name = held.name.removeprefix("model.")
        less = name in plan.matrices or name in plan.factored
        numbers = 1 + kept - less if name in trained else 1
        parts = [(box.size * numbers, {rank // per_node for rank in ranks}) for box, ranks in held.holders.items()]
        parts += [(rows[name], set().union(*(nodes for _, nodes in parts)))] if name in rows else []
        for elements, nodes in parts:
            if len(nodes) == 1:
                lonely[nodes.pop()] += elements * plan.itemsize["master"]
    return max(lonely.values(), default=0)


def settle_interval(config: Config, plan: Plan, per_node: int) -> None:
    """Settle elastic.snapshot_every=auto of a configuration by its plan, so that all workers take like snapshots."""
    if config.elastic.snapshot_every == AUTO:
        config.elastic.snapshot_every = snapshot_price(config, plan, per_node).interval
