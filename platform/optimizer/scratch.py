"""Temporary memory of updates: what an optimizer allocates, beside its state, while it updates a worker's parameters.
Pure Python, for forecasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from platform.config.fields import Optimizer
from platform.plan.core.factored import summed_sizes
from platform.plan.core.plan import Plan
from platform.plan.language.layout import at_zero
from platform.plan.language.numbers import matrix_shape
from platform.plan.language.ops import Parameter


@dataclass(frozen=True)
class Update:
    """Update of the parameters of a worker at mesh coordinates `at` of a plan, on a kind of `device` (cpu, cuda).
    `parts`: elements of each parameter of which it updates a part, and whether its weights decay."""

    plan: Plan
    at: Mapping[str, int]
    device: str
    parts: Mapping[str, tuple[int, bool]]

    @property
    def itemsize(self) -> int:
        return self.plan.itemsize["master"]

    @property
    def largest(self) -> int:
        """Return the bytes of the largest part of a parameter."""
        return self.itemsize * max((n for n, _ in self.parts.values()), default=0)


def scratch_of_sgd(o: Optimizer, update: Update) -> int:
    """Return the bytes of the sums of gradients and decayed weights: on a GPU of all parameters at once. On a CPU one
    parameter comes after another, and Nesterov's momentum makes a sum too."""
    decayed = [n for n, decays in update.parts.values() if decays]
    if update.device == "cuda":
        return update.itemsize * sum(decayed)
    return update.itemsize * max((n * (decays + o.nesterov) for n, decays in update.parts.values()), default=0)


def scratch_of_muon(o: Optimizer, update: Update) -> int:
    """Return the bytes that Muon takes: Nesterov's sums of all matrices at once, if it is used, and the most that a
    bucket takes: its joined blocks, and its shard or the iteration of its largest matrix."""
    plan, wide = update.plan, update.itemsize
    ahead = sum(n for name, (n, _) in update.parts.items() if name in plan.matrices) if o.nesterov else 0
    most = 0
    for b in plan.buckets:
        some = [p for p in b.parameters if p.name in plan.matrices]
        if some and at_zero(b.only, update.at):
            made = max(_orthogonal(plan, p, wide) for p in some)
            apart = b.elements // plan.shards if plan.shards > 1 else 0
            most = max(most, wide * (b.elements + apart), wide * b.elements + made)
    return wide * ahead + most


def scratch_of_adafactor(o: Optimizer, update: Update) -> int:
    """Return the bytes of the second moments of the parameter that takes most, made of its rows and columns for its
    update, and of the sums over ranks for all parameters."""
    plan = update.plan
    if not plan.factored:
        return update.largest
    most = max((n for name, (n, _) in update.parts.items() if name in plan.factored), default=0)
    return 2 * (most + sum(map(sum, summed_sizes(plan).values()))) * update.itemsize


def _orthogonal(plan: Plan, p: Parameter, wide: int) -> int:
    """Return the bytes at the peak of making one matrix orthogonal, from its block on (`muon.orthogonal`)."""
    sizes = plan.planner.sizes_of(p)
    rows, columns = matrix_shape(p.role, [sizes[d] for d in p.dims])
    n, square = rows * columns, min(rows, columns) ** 2
    half = plan.itemsize["compute"] == 2
    whole = wide * n if plan.joining(p) else 0
    narrow, item = (2 * n, 2) if half else (0, wide)
    iterated = item * (2 * n + 2 * square)
    turned = item * n * (1 + (rows > columns)) if not half else item * n * (rows > columns) + max(item, wide) * n
    return whole + narrow + max(iterated, turned)


def parts_of(plan: Plan, at: Mapping[str, int], decays: Mapping[str, bool]) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield the parameters that the worker at mesh coordinates `at` updates, as `Update.parts` holds them; `decays`:
    name -> True if its weights decay."""
    for p in plan.at(at["stage"]).parameters:
        if p.name not in plan.frozen and plan.present(p, at):
            start, stop = plan.shard_range(p, at)
            if stop > start:
                yield p.name, (stop - start, decays[p.name])
