"""Pieces of each sequence that a rank of a context gets: as many as make attention equal work for all ranks."""

from __future__ import annotations

from dataclasses import replace

from platform.config.fields import Config
from platform.config.rules.mesh_rules import rounds_of_context
from platform.plan.core.plan import Plan
from platform.plan.reports.attention_work import unevenness

EVEN = 1.02  # times the mean of attention's work, which the busiest rank may have
MOST, LEAST = 16, 128  # rounds, and tokens of a piece: kernels are slow on shorter ones


def given_rounds(config: Config) -> int:
    """Return in how many rounds a configuration deals pieces to its ranks of a context: half of the pieces that it
    gives each of them, less where lengths of another plan are no multiple; one where it gives none; 0 if parts lie
    straight."""
    wanted = config.parallel.context_pieces // 2 or 1
    return max((n for n in rounds_of_context(config) if n <= wanted), default=0)


def even_rounds(config: Config, plan: Plan) -> int:
    """Return the fewest rounds by which attention is equal work for all ranks of a plan's contexts, of those that the
    configuration leaves open."""
    planner = plan.planner
    if config.parallel.context_pieces or not planner.scheme.zigzag:
        return planner.scheme.rounds
    longest = min(MOST, config.model.length // (2 * config.parallel.context * LEAST))
    open_ = [n for n in rounds_of_context(config) if n <= max(1, longest)]
    work = {}
    for n in open_:
        work[n] = unevenness(replace(plan, planner=replace(planner, scheme=replace(planner.scheme, rounds=n))))
        if work[n] <= EVEN:
            return n
    return min(work, key=work.__getitem__)
