"""Choices of attention: a kernel that can compute every attention of a plan, and how many pieces of each sequence each
rank of a context gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from platform.boundary.refusals import violation
from platform.config.fields import Config
from platform.config.rules.mesh_rules import rounds_of_context
from platform.plan.core.fused import fused_attentions, traits_of
from platform.plan.core.plan import Plan
from platform.plan.language.attention_kernels import AUTO, KERNELS, MATH, reason_against
from platform.plan.language.layout import LEAST_PIECE, MOST_ROUNDS
from platform.plan.reports.attention_work import unevenness

EVEN = 1.02  # times the mean of attention's work, which the busiest rank may have
OF_WINDOW = 16, 128  # rounds at most, and tokens of a piece at least, where they make a window's work even
_WHERE = {"cpu": "on a CPU", "cuda": "on a GPU"}


def kernel_violations(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if train.attention_kernel names a kernel that cannot compute some attention of the plan on
    the workers' devices, or if the plan has no fused attention at all. Where cluster.device is `auto`, only a kernel
    that neither a CPU nor a GPU can run is refused."""
    kernel, key = config.train.attention_kernel, "train.attention_kernel"
    if kernel in (AUTO, MATH):
        return
    rate = config.model.dropout
    traits = dict.fromkeys(traits_of(plan, o, rate, config.train.deterministic) for o in fused_attentions(plan))
    if not traits:
        yield violation(
            key, kernel, f"no attention of this plan is computed by one kernel{_unfused(rate)}", [AUTO, MATH]
        )
        return
    device = config.cluster.device
    kinds = {kind: where for kind, where in _WHERE.items() if device in (kind, "auto")}
    why = {
        (kind, name): next(filter(None, (reason_against(name, kind, t) for t in traits)), "")
        for kind in kinds
        for name in KERNELS
    }
    legal = [name for name in KERNELS if not all(why[kind, name] for kind in kinds)]
    if kernel not in legal:
        reasons = (f"{where} it {why[kind, kernel]}" for kind, where in kinds.items())
        yield violation(key, kernel, "; ".join(reasons), legal)


def _unfused(dropout: float) -> str:
    """Return the remark of an attention kernel refused for a plan that model.dropout may be why none fits; or ""."""
    return " (model.dropout draws masks that no kernel draws; model.fused_dropout=true lets it)" if dropout else ""


def given_rounds(config: Config) -> int:
    """Return in how many rounds a configuration deals pieces to ranks of a context, 0 if parts lie straight."""
    # another plan of the run has fewer pieces where they do not divide lengths
    wanted = config.parallel.context_pieces // 2 or 1
    return max((n for n in rounds_of_context(config) if n <= wanted), default=0)


def even_rounds(config: Config, plan: Plan) -> int:
    """Return the fewest rounds, of those left open by a configuration, by which attention is equal work for all ranks
    of its plan's contexts; where documents hide keys, which only the data know, the most."""
    planner = plan.planner
    if config.parallel.context_pieces or not planner.scheme.zigzag:
        return planner.scheme.rounds
    documents = any(o.operation["begins"] for o in plan.attentions)
    rounds, tokens = (MOST_ROUNDS, LEAST_PIECE) if documents else OF_WINDOW
    most = max(1, min(rounds, config.model.length // (2 * config.parallel.context * tokens)))
    legal, work = [n for n in rounds_of_context(config) if n <= most], dict[int, float]()
    if documents:
        return legal[-1]
    for n in legal:
        work[n] = unevenness(replace(plan, planner=replace(planner, scheme=replace(planner.scheme, rounds=n))))
        if work[n] <= EVEN:
            return n
    return min(work, key=work.__getitem__)
