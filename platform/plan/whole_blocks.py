"""Blocks that a rank which compiles runs as one function each: which of them it can, and why not the others.

Runtime, memory meter and price ask `reasons_against_whole_blocks`, and the plan and the run print what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from platform.plan.layout import Mesh
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.fused_attention import hides_most
from platform.plan.operations.registry import OPERATIONS
from platform.plan.plan import Plan
from platform.plan.rule import RelayoutStep

OUTSIDE = ("stage", "data", "zero")  # mesh axes whose collectives lie between blocks


def may_hold_collectives(mesh: Mesh) -> bool:
    """Return True if collectives may lie inside of blocks: along an axis of a mesh that splits more than the batch."""
    return any(n > 1 for axis, n in mesh.axes.items() if axis not in OUTSIDE)


class _Block(NamedTuple):
    """Block of a plan, by its planned `operations`, as it runs on a kind of `device` (cpu, cuda). `dropout`: the
    model's rate."""

    plan: Plan
    operations: Sequence[PlannedOperation]
    device: str
    dropout: float

    @property
    def drawing_kernels(self) -> int:
        """Return the number of attentions in the block whose kernel draws dropout masks itself."""
        return bool(self.dropout) * sum(OPERATIONS[o.operation.kind].chooses_kernel for o in self.operations)

    def is_absent_somewhere(self) -> bool:
        """Return True if ranks of a sub-grid alone compute an operation of the block."""
        return any(o.only or step.only for o in self.operations for step in _list_steps(o))

    def counts_in_passes(self) -> bool:
        """Return True if the host counts rows of experts, or pairs of queries and keys, in each pass."""
        return not all(OPERATIONS[o.operation.kind].is_traceable for o in self.operations) or any(
            hides_most(self.device, self._query_length(o), o.operation["window"], o.operation["begins"])
            for o in self.operations
            if OPERATIONS[o.operation.kind].keys_input >= 0
        )

    def _query_length(self, attention: PlannedOperation) -> int:
        """Return the number of query positions of an attention that the rank has."""
        query = attention.operation.inputs[0]
        return dict(zip(query.dims, self.plan.local_shape(query), strict=True)).get("length", 0)


def _list_steps(planned: PlannedOperation) -> list[RelayoutStep]:
    """Return all steps of an operation's conversions, forward and backward."""
    of_groups = [c for g in planned.groups for c in (g.x, *(c for e in g.einsums for c in (e.operand, e.output)))]
    return [step for c in (*planned.conversions, *of_groups) for step in (*c.forward, *c.backward)]


# why a block is not compiled as one function, and of which block that holds; the first is told
_REASONS: tuple[tuple[str, Callable[[_Block], object]], ...] = (
    (
        "collectives lie in it (train.compile_collectives)",
        lambda b: not b.plan.compiles_collectives and may_hold_collectives(b.plan.mesh),
    ),
    ("ranks of a sub-grid alone compute a part of it", _Block.is_absent_somewhere),
    ("recompute=selective runs its attention again", lambda b: b.plan.recompute.kind == "selective"),
    (
        "its experts' rows, or its attention's pairs, are counted in each pass",
        _Block.counts_in_passes,
    ),
    ("the kernels of several attentions draw its dropout masks", lambda b: b.drawing_kernels > 1),
)


def find_blocks_with_own_backward(plan: Plan) -> frozenset[str]:
    """Return the names of a plan's blocks whose compiled backward pass is their operations' own, not torch's."""
    is_own = may_hold_collectives(plan.mesh) or plan.mlp_chunks > 1 or plan.has_scaled_products
    blocks = (block for chunk in plan.chunks for block in chunk.blocks)
    return frozenset(name for name, keys in blocks if is_own or any(OPERATIONS[kind].sums_rows for kind, _ in keys))


def reasons_against_whole_blocks(plan: Plan, device: str, dropout: float) -> dict[str, str]:
    """Return, by the name of each block of a plan (of several that are recomputed together, the first), why a rank that
    compiles does not run it as one function in training, as a predicate; "" if it does. `dropout`: the model's rate."""
    reasons = {}
    for chunk in plan.chunks:
        for name, keys in chunk.blocks:
            planned = [chunk.operations[key] for key in keys if key in chunk.operations]
            block = _Block(plan, planned, device, dropout)
            reasons[name] = next((reason for reason, holds in _REASONS if holds(block)), "")
    return reasons


def counts_in_passes(plan: Plan, device: str) -> bool:
    """Return True if the host counts rows of experts, or pairs of attention, in each pass of a plan on a `device`."""
    return _Block(plan, list(plan.operations.values()), device, 0.0).counts_in_passes()


def describe_blocks(reasons: Mapping[str, str]) -> list[str]:
    """Return the lines that say which blocks are compiled whole, and why others are not, as `reasons` has them."""
    lines = []
    for reason, group in groupby(reasons, reasons.__getitem__):
        names = list(group)
        where = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        lines.append(f"{where}: {f'function by function, as {reason}' if reason else 'compiled whole'}")
    return lines
