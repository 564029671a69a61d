"""Search for the plan of a configuration's open keys: every legal contender estimated, the best planned, measured and
priced, one chosen. `choose_plan` fills in the keys, and `format_ranking` shows the plans that were found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import ceil, inf, prod

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import show_phase
from platform.config.fields import ALL, Config
from platform.config.validation import violations_of_configuration
from platform.optimizer.optimizers import count_states_per_element
from platform.plan.layout import find_divisors, format_count
from platform.plan.plan import Plan
from platform.plan.plan_builder import pause_garbage_collection
from platform.plan.plan_summary import format_seconds
from platform.predict.contender_grid import ERRORS, ContenderGrid, Rated
from platform.predict.contenders import (
    Contender,
    SearchSpace,
)
from platform.predict.footprint import state_bytes
from platform.predict.hardware import Hardware
from platform.predict.make_plan import plan_quickly
from platform.predict.memory_budget import MemoryForecast
from platform.predict.price import StepPrice
from platform.predict.step_price import choose_pricing_hardware, memory_of_worker, step_price

MOST, LEAST, LAYERS = 16, 8, 1000  # finalists that are planned though none can win: of so many layers together
PATIENCE = 3  # times as many are planned at most without a better one that fits, and twice as many without any
DOUBT = 0.1  # of its seconds: so much later is planned what is expected to lack memory, unless its mode errs
LACKING = 4  # finalists that are planned where none is expected to fit; misfits that are shown
WITHIN = 0.98, 0.9  # how far such quotients go below the least that was seen of the mode
AKIN = 0.97  # how far the quotient of seconds of a mode of which none was planned goes below the least of its family


@dataclass(frozen=True)
class Finalist:
    """Contender that was planned: its configuration, its `plan` and its `price`. Its memory is forecast when it is
    asked for, as that takes longest."""

    choice: Contender
    config: Config
    plan: Plan
    price: StepPrice
    hardware: Hardware

    @property
    def sort_key(self) -> tuple:
        """Return what finalists are compared by: seconds, to four digits, then the rank of their choice."""
        return float(f"{self.price.seconds:.4g}"), self.choice.tie_order

    @cached_property
    def _memory_forecast(self) -> MemoryForecast:
        """Return the forecast of the memory of each stage's workers."""
        return MemoryForecast(self.config, self.plan)

    @property
    def peak_memory(self) -> int:
        """Return the bytes that the neediest worker takes."""
        return self._memory_forecast.peak_bytes

    @property
    def known_memory(self) -> int:
        """Return the bytes that the neediest worker takes of the stages that were forecast."""
        return self._memory_forecast.known_peak_bytes

    def fits_memory(self, budget: float) -> bool:
        """Return True if no worker takes more than so many bytes."""
        return not self._memory_forecast.exceeds_memory(budget)

    def settle(self, budget: float) -> Finalist:
        """Return this finalist as it would run in so many bytes: with contexts of a kind that fits, if any does."""
        if self.config.parallel.context == 1 or self.fits_memory(budget):
            return self
        plan = plan_quickly(self.config)
        assert plan, "it has been planned"
        return replace(self, plan=plan, price=step_price(self.config, plan, self.hardware))


@dataclass(frozen=True)
class SearchOutcome:
    """Outcome of a search: its `space`, the finalists that were `tried`, the best first, the number of contenders that
    were `judged`, and the `budget` of memory."""

    space: SearchSpace
    workers: int
    tried: Sequence[Finalist]
    judged: int
    budget: float

    @cached_property
    def least_state_bytes(self) -> int:
        """Return the bytes of parameters and optimizer state of all workers under any plan: each number once."""
        plan = self.tried[0].plan
        parameters = sum(prod(plan.global_shape(p)) for p in plan.parameters)
        half = 2 if plan.stored.masters == "split" else 0
        stored = parameters * (plan.itemsize["master"] - half) + state_bytes(
            plan, count_states_per_element(self.space.config)
        )
        away = self.space.most_offloaded_numbers
        return max(plan.itemsize["compute"] * parameters, stored - round(away * parameters * plan.itemsize["master"]))

    @cached_property
    def quickest_fitting_finalist(self) -> Finalist | None:
        """Return the first finalist that fits; those behind it are not measured."""
        return next((f for f in self.tried if f.fits_memory(self.budget)), None)

    @cached_property
    def _settled(self) -> list[Finalist]:
        """Return all finalists as they would run, the best first."""
        return sorted((f.settle(self.budget) for f in self.tried), key=lambda f: f.sort_key)

    @cached_property
    def fitting_finalists(self) -> list[Finalist]:
        """Return the finalists that fit, the best first."""
        return [f for f in self._settled if f.fits_memory(self.budget)]

    @cached_property
    def lacking_finalists(self) -> list[Finalist]:
        """Return the finalists that lack memory, the quickest first."""
        return [f for f in self._settled if not f.fits_memory(self.budget)]


def search_plans(config: Config, workers: int, memory: float, hardware: Hardware) -> SearchOutcome:
    """Search all plans that the open keys of a configuration allow, for at most `workers` workers of `memory` bytes;
    return the quickest on a `hardware`. If none fits, fewer workers are tried where they divide what more do not."""
    space, judged, nearest = SearchSpace(config), 0, None
    with pause_garbage_collection(), show_phase("searching for a plan"):
        most_divisors = most_twos = 0
        for ranks in space.iterate_worker_counts(workers):
            if nearest and ranks * memory < nearest.least_state_bytes:
                break
            divisors, twos = len(find_divisors(ranks)), ranks & -ranks
            if nearest and divisors <= most_divisors and twos <= most_twos:
                continue  # of fewer workers each needs more, but where they divide what more of them do not
            rated, count = ContenderGrid(space, ranks, memory, hardware).rate_contenders()
            judged += count
            standings = SearchOutcome(space, ranks, _pick_finalists(space, rated, memory, hardware), judged, memory)
            if standings.tried:
                most_divisors, most_twos = max(most_divisors, divisors), max(most_twos, twos)
                nearest = nearest or standings
            if standings.quickest_fitting_finalist:
                return standings
    return replace(nearest, judged=judged) if nearest else SearchOutcome(space, workers, [], judged, memory)


def _pick_finalists(space: SearchSpace, rated: Sequence[Rated], memory: float, hardware: Hardware) -> list[Finalist]:
    """Plan and price contenders, the one that is expected to be quickest first, until no other can be quicker than the
    best that fits by the errors that estimates of its mode were seen to have; return them by price."""
    if not rated:
        return []
    keys = [space.read_mode(one.choice) for one in rated]
    modes = {mode: i for i, mode in enumerate(dict.fromkeys(keys))}
    family_numbers = {family: i for i, family in enumerate(dict.fromkeys(family for family, _ in modes))}
    mode_of = np.array([modes[key] for key in keys])
    families = np.array([family_numbers[family] for family, _ in modes])
    estimates = np.array([(one.seconds, one.memory) for one in rated]).T
    least = np.full((2, len(modes)), inf)  # quotient seen of a mode, of seconds and of memory
    finalists: list[Finalist] = []
    places = {one.choice: i for i, one in enumerate(rated)}
    unplanned, best, since_better = np.ones(len(rated), dtype=bool), inf, 0

    def note_quotient(what: int, i: int, value: float) -> None:
        """Take note of what a contender's plan has, by its estimate."""
        least[what, mode_of[i]] = min(least[what, mode_of[i]], value / estimates[what, i])

    shown = min(MOST, max(LEAST, LAYERS // space.config.model.layers))
    while since_better < PATIENCE * shown * (1 if best < inf else 2):
        seconds, needed = estimates * _expect_quotients(least, families)[:, mode_of]
        seconds[~unplanned | (needed > memory)] = inf
        if (least_seconds := seconds.min()) == inf or (least_seconds >= best and len(finalists) >= shown):
            break
        later = np.where(seconds > max(best, least_seconds), inf, 1 + DOUBT * (needed > WITHIN[1] * memory))
        i = int((seconds * later).argmin())
        unplanned[i], since_better = False, since_better + 1
        if finalist := plan_finalist(space, rated[i].choice, hardware, weighs=False):
            if finalist.price.seconds < best:
                finalist = finalist.settle(memory)
            finalists.append(finalist)
            note_quotient(0, i, finalist.price.seconds)
            if finalist.price.seconds < best:
                if finalist.fits_memory(memory):
                    best, since_better = finalist.price.seconds, 0
                    refined = space.refine_contender(rated[i].choice)  # which is only slower
                    unplanned[[places[c] for c in refined if c in places]] = False
                note_quotient(1, i, finalist.known_memory)
    if best == inf:  # the ones that need least are shown to the user
        needed = (estimates * _expect_quotients(least, families)[:, mode_of])[1][unplanned]
        thrifty = np.flatnonzero(unplanned)[np.argsort(needed, kind="stable")][:LACKING]
        finalists += filter(None, (plan_finalist(space, rated[i].choice, hardware) for i in thrifty))
    return sorted(finalists, key=lambda f: f.sort_key)


def _expect_quotients(least: NDArray[np.float64], families: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the factors by which the estimates of each mode are to be multiplied at least, [seconds and memory,
    modes]: from the `least` quotient seen of the mode, of seconds else of its family, else from ERRORS. `families`:
    the number of each mode's family."""
    of_family = np.full(len(families), inf)
    np.minimum.at(of_family, families, least[0])
    akin = np.where(np.isinf(of_family), ERRORS[0], AKIN * of_family)[families]
    unseen = np.stack([akin, np.full(len(families), ERRORS[1])])
    return np.where(np.isinf(least), unseen, np.array(WITHIN)[:, None] * least)


def plan_finalist(space: SearchSpace, choice: Contender, hardware: Hardware, weighs: bool = True) -> Finalist | None:
    """Plan and price one contender; None if it is refused. `weighs`: True to settle its kind of contexts by memory."""
    config = space.build_config(choice)
    if violations_of_configuration(config) or (plan := plan_quickly(config, weighs)) is None:
        return None
    return Finalist(choice, config, plan, step_price(config, plan, hardware), hardware)


CHOSEN_NEAR = 0.005  # of a step's seconds: finalists so near to the best are equals


def choose_plan(
    config: Config, workers: int, memory: float = 0.0, hardware: Hardware | None = None
) -> SearchOutcome | None:
    """Choose the open keys of a configuration, in place, for at most `workers` workers; return the ranking, None if no
    key is open. `memory`: bytes of a worker, where more is known than the configuration says; `hardware`: the one for
    which plans are priced, by default `choose_pricing_hardware`. Raises ConfigError if no plan fits."""
    if not config.plan.search:
        return None
    if workers < 1:
        raise ConfigError(f"plan.search={','.join(config.plan.search)}: there is no worker to plan for")
    hardware = hardware or choose_pricing_hardware(config)
    asked = replace(config)  # as it is typed, for what is told of the choice
    standings = search_plans(asked, workers, memory_of_worker(config, memory, hardware), hardware)
    if not standings.quickest_fitting_finalist:
        raise ConfigError(_violation_of_search(standings, hardware))
    for f in fields(Config):
        setattr(config, f.name, getattr(standings.quickest_fitting_finalist.config, f.name))
    return standings


def _violation_of_search(standings: SearchOutcome, hardware: Hardware) -> str:
    """Return the line that refuses a search without a plan: the nearest to fitting, or that none is legal."""
    opened = standings.space.config.plan.search
    refusal = f"plan.search={', '.join(opened)}: no plan for {format_count(standings.workers, 'worker')}"
    if not standings.lacking_finalists:
        remedy = ": it needs more workers, or other sizes" if ALL in opened else f"; nearest legal: plan.search=[{ALL}]"
        return f"{refusal} or fewer is legal{remedy}"
    least = min(standings.lacking_finalists, key=lambda f: f.peak_memory)
    typed, needed = " ".join(standings.space.format_overrides(least.choice)), f"{least.peak_memory / 1e9:.4g}"
    remedy = _find_remedy(standings, hardware)
    larger = f"GPUs of {needed} GB" if standings.space.config.cluster.gpu else f"cluster.device_memory={needed}"
    return f"{refusal} fits {standings.budget / 1e9:.4g} GB; the one that needs least, {typed}, needs {needed} GB; " + (
        remedy or f"more workers, or {larger}, would do"
    )


OFFLOAD = "optimizer.offload=auto"  # helps where states alone are too much
HELPFUL = (
    "recompute=auto", "train.microbatch=-1", "train.mlp_chunks=-1", "parallel.zero=-1", "parallel.context=-1", OFFLOAD,
    f"plan.search=[{ALL}]",
)  # fmt: skip


def _find_remedy(standings: SearchOutcome, hardware: Hardware) -> str:
    """Return what would help a search without a plan that fits: the least workers that hold the state, or the first key
    by which, open too, it would find one; "" if none does."""
    config, helpful = standings.space.config, dict[str, Config]()
    needed = ceil(standings.least_state_bytes / standings.budget)
    for typed in HELPFUL if needed <= standings.workers else [OFFLOAD]:
        key, _, value = typed.partition("=")
        opened = deepcopy(config)
        opened.plan.search.append(ALL if value == f"[{ALL}]" else key)
        if {ALL, opened.plan.search[-1]}.isdisjoint(config.plan.search):
            helpful[typed] = opened
    for typed, opened in helpful.items():
        grid = ContenderGrid(SearchSpace(opened), standings.workers, standings.budget, hardware)
        with pause_garbage_collection():
            picked = _pick_finalists(grid.space, grid.rate_contenders()[0], standings.budget, hardware)
        if best := replace(standings, space=grid.space, tried=picked).quickest_fitting_finalist:
            return f"with {typed} one fits: {' '.join(grid.space.format_overrides(best.choice))}"
    if needed > standings.workers:
        return f"parameters and optimizer state alone take {format_count(needed, 'such worker')}"
    return ""


def format_choice(standings: SearchOutcome) -> str:
    """Return the line with the choice of a search for the user."""
    best = standings.quickest_fitting_finalist
    assert best, "the search has chosen"
    plans = f"{standings.judged:,} plans for {format_count(standings.workers, 'worker')}"
    named = _format_named_choice(standings.space, best.choice)
    return f"chosen of {plans}: {named} ({format_seconds(best.price.seconds)} a step)"


def _format_named_choice(space: SearchSpace, choice: Contender) -> str:
    """Return what a user types for a choice, and what people call it."""
    return " ".join([*space.format_overrides(choice), *([f"({choice.common_name})"] if choice.common_name else [])])


def format_ranking(standings: SearchOutcome, top: int) -> Iterator[str]:
    """Yield the lines of the table of the best plans of a search, with the reason why each but the first lost."""
    yield f"{standings.judged:,} plans for {format_count(standings.workers, 'worker')}; the best, and why others lost:"
    best = standings.quickest_fitting_finalist
    assert best, "the search has chosen"
    quicker = [f for f in standings.lacking_finalists if f.price.seconds < best.price.seconds]
    shown = sorted([*standings.fitting_finalists[:top], *quicker[:LACKING]], key=lambda f: f.sort_key)
    yield f"{'':>4}  {'step':>9}  {'memory':>8}  plan, and why it lost"
    number = 0
    for finalist in shown:
        fits = finalist.fits_memory(standings.budget)
        number += fits
        reason = "" if finalist is best else f": {explain_loss(finalist, best, standings.budget)}"
        typed = _format_named_choice(standings.space, finalist.choice)
        place, seconds = f"{number:>3}." if fits else "   -", format_seconds(finalist.price.seconds)
        yield f"{place}  {seconds:>9}  {finalist.peak_memory / 1e9:>5.3g} GB  {typed}{reason}"


def explain_loss(finalist: Finalist, best: Finalist, budget: float) -> str:
    """Return why a finalist lost to the best: the memory that it lacks, or the part of a step that is longest beyond
    the best's."""
    if not finalist.fits_memory(budget):
        return f"lacks {(finalist.peak_memory - budget) / 1e9:.3g} GB"
    behind = finalist.price.seconds - best.price.seconds
    if behind <= CHOSEN_NEAR * best.price.seconds:
        splits_more = finalist.choice.num_split_axes > best.choice.num_split_axes
        return "as quick" + (", splits more axes" if splits_more else "")
    ours, theirs = finalist.price.seconds_by_part, best.price.seconds_by_part
    more = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in dict.fromkeys((*ours, *theirs))}
    name = max(more, key=lambda name: more[name])
    return f"{format_seconds(more[name])} more {name}, {behind / best.price.seconds:.1%} slower"
