"""What is known of a bug, and how plans are changed to have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from platform.plan.plan import Plan
from tests.harness.plan_mutants import Steps, with_reductions, with_steps_where
from tests.known_bugs.mutants import Mutant

Change = Callable[[Plan], Plan]


@dataclass(frozen=True)
class KnownBug:
    """A bug of a peer. `where`: issues and pull requests; `what` it was; `ours`: the same in our code or a plan;
    `killer`: a test that `make test` runs, in its first case with the values `case`; `mutant` of our code, or `change`
    of a plan, of which the static check says `line` (None: a plan does not decide it)."""

    where: str
    what: str
    ours: str
    killer: str
    case: Mapping[str, Any] = field(default_factory=dict)
    mutant: Mutant | None = None
    change: Change | None = None
    line: str | None = None


def steps(kind: str, name: str, part: str, way: str, change: Steps) -> Change:
    return lambda plan: with_steps_where(plan, kind, name, part, way, change)


def not_summed(name: str, axis: str) -> Change:
    return lambda plan: with_reductions(plan, name, lambda axes: [a for a in axes if a != axis])


def summed_over(name: str, axis: str) -> Change:
    return lambda plan: with_reductions(plan, name, lambda axes: [*axes, axis])
