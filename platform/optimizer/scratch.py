"""Temporary memory of updates: what an optimizer allocates, beside its state, while it updates a worker's parameters.
Pure Python, for forecasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from platform.config.fields import Optimizer
from platform.plan.core.factored import summed_sizes
from platform.plan.core.plan import Plan
from platform.plan.language.layout import at_zero
from platform.plan.language.ops import Parameter


@dataclass(frozen=True)
class Update:
    """Update of the parameters of a worker at mesh coordinates `at` of a plan. `parts`: elements of each parameter of
    which it updates a part."""

    plan: Plan
    at: Mapping[str, int]
    parts: Mapping[str, int]

    @property
    def itemsize(self) -> int:
        """Return the bytes per element of the master copies that the optimizer updates."""
        return self.plan.itemsize["master"]

    @property
    def largest(self) -> int:
        """Return the bytes of the largest part of a parameter that the worker's optimizer update changes."""
        return self.itemsize * max(self.parts.values(), default=0)


def scratch_of_muon(o: Optimizer, update: Update) -> int:
    """Return the bytes of temporary memory of one Muon update: Nesterov's sums of all matrices at once, if used, plus
    the most that one bucket needs: its gathered buffer and the larger of its shard (0 if not sharded) and the
    Newton-Schulz iteration of its largest matrix."""
    plan, wide = update.plan, update.itemsize
    ahead = sum(n for name, n in update.parts.items() if name in plan.matrices) if o.nesterov else 0
    most = 0
    for b in plan.buckets:
        some = [p for p in b.parameters if p.name in plan.matrices]
        if some and at_zero(b.only, update.at):
            made = max(_orthogonal(plan, p, wide) for p in some)
            apart = b.shard_elements if b.sharded else 0
            most = max(most, wide * (b.elements + apart), wide * b.elements + made)
    return wide * ahead + most


def scratch_of_adafactor(o: Optimizer, update: Update) -> int:
    """Return the bytes of temporary memory of one Adafactor update: the second moments of the largest parameter,
    rebuilt from its rows and columns, and the sums over ranks for all parameters."""
    plan = update.plan
    if not plan.factored:
        return update.largest
    most = max((n for name, n in update.parts.items() if name in plan.factored), default=0)
    return 2 * (most + sum(map(sum, summed_sizes(plan).values()))) * update.itemsize


def _orthogonal(plan: Plan, p: Parameter, wide: int) -> int:
    """Return the peak bytes of temporary memory while Muon gathers a parameter's matrices and makes them
    orthogonal (`muon.orthogonal`). `wide`: bytes per element of master copies."""
    number, rows, columns = p.matrices(plan.planner.shape(p, plan.joined(p)))
    n, square = number * rows * columns, number * min(rows, columns) ** 2
    half = plan.itemsize["compute"] == 2
    whole = wide * n if plan.joining(p) else 0
    narrow, item = (2 * n, 2) if half else (0, wide)
    iterated = item * (2 * n + 2 * square)
    turned = item * n * (1 + (rows > columns)) if not half else item * n * (rows > columns) + max(item, wide) * n
    return whole + narrow + max(iterated, turned)


def parts_of(plan: Plan, at: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield (name, elements) for each parameter of which the worker at mesh coordinates `at` updates a part: the
    entries of `Update.parts`."""
    for p in plan.at(at["stage"]).parameters:
        if p.name not in plan.frozen and plan.present(p, at):
            start, stop = plan.shard_range(p, at)
            if stop > start:
                yield p.name, stop - start
