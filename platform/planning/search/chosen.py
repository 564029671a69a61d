"""Choice of a configuration's open keys by a search, and the table of the plans that it found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.costs.machine import Hardware
from platform.plan.language.numbers import count_of
from platform.plan.reports.describe import shown_seconds
from platform.planning.search.best import Finalist, Standings, search
from platform.planning.step_price import memory_of_worker, usual_hardware

NEAR = 0.005  # of a step's seconds: finalists so near to the best are equals


def choose_plan(
    config: Config, workers: int, memory: float = 0.0, hardware: Hardware | None = None
) -> Standings | None:
    """Choose the open keys of a configuration, in place, for at most `workers` workers; return the ranking, None if no
    key is open. `memory`: bytes of a worker, where more is known than the configuration says; `hardware`: the one for
    which plans are priced, by default `usual_hardware`. Raises ConfigError if no plan fits."""
    if not config.plan.search:
        return None
    if workers < 1:
        raise ConfigError(f"plan.search={','.join(config.plan.search)}: there is no worker to plan for")
    hardware = hardware or usual_hardware(config)
    found = search(config, workers, memory_of_worker(config, memory, hardware), hardware)
    if not found.best:
        raise ConfigError(_none_fits(found))
    for field in fields(Config):
        setattr(config, field.name, getattr(found.best.config, field.name))
    return found


def _none_fits(found: Standings) -> str:
    """Return the line that refuses a search without a plan: the nearest to fitting, or that none is legal."""
    keys = ", ".join(found.space.config.plan.search)
    there = count_of(found.workers, "worker")
    if not found.lacking:
        return f"plan.search={keys}: no plan for {there} or fewer is legal: leave more keys open"
    least = min(found.lacking, key=lambda f: f.memory)
    return (
        f"plan.search={keys}: no plan for {there} fits {found.budget / 1e9:.4g} GB; the one that needs least,"
        f" {' '.join(found.space.typed(least.choice))}, needs {least.memory / 1e9:.4g} GB;"
        f" more workers, or cluster.device_memory={least.memory / 1e9:.4g}, would do"
    )


def choice_line(found: Standings) -> str:
    """Return the line with the choice of a search for the user."""
    best = found.best
    assert best, "the search has chosen"
    typed = " ".join(found.space.typed(best.choice))
    seconds = shown_seconds(best.price.seconds)
    return f"chosen of {found.judged:,} plans for {count_of(found.workers, 'worker')}: {typed} ({seconds} a step)"


def ranked_table(found: Standings, top: int) -> Iterator[str]:
    """Yield the lines of the table of the best plans of a search, with the reason why each but the first lost."""
    yield f"{found.judged:,} plans for {count_of(found.workers, 'worker')}; the best, and why others lost:"
    best = found.best
    assert best, "the search has chosen"
    quicker = [f for f in found.lacking if f.price.seconds < best.price.seconds]
    shown = sorted([*found.fitting[:top], *quicker[:top]], key=lambda f: f.order)[:top]
    if best not in shown:
        shown[-1] = best
    yield f"{'':>4}  {'step':>9}  {'memory':>8}  plan, and why it lost"
    number = 0
    for one in shown:
        fits = one.fits(found.budget)
        number += fits
        reason = "" if one is best else f": {lost_by(one, best, found.budget)}"
        typed = " ".join(found.space.typed(one.choice))
        place = f"{number:>3}." if fits else "   -"
        yield f"{place}  {shown_seconds(one.price.seconds):>9}  {one.memory / 1e9:>5.3g} GB  {typed}{reason}"


def lost_by(one: Finalist, best: Finalist, budget: float) -> str:
    """Return why a finalist lost to the best: the memory that it lacks, or the part of a step that is longest beyond
    the best's."""
    if not one.fits(budget):
        return f"lacks {(one.memory - budget) / 1e9:.3g} GB"
    behind = one.price.seconds - best.price.seconds
    if behind <= NEAR * best.price.seconds:
        return "as quick" + (", splits more axes" if one.choice.split > best.choice.split else "")
    ours, theirs = one.price.parts, best.price.parts
    more = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in dict.fromkeys((*ours, *theirs))}
    name = max(more, key=lambda name: more[name])
    return f"{shown_seconds(more[name])} more {name}, {behind / best.price.seconds:.1%} slower"
