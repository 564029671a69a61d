"""Search for the plan of a configuration's open keys: every legal contender estimated, the best planned, measured and
priced, one chosen. `choose_plan` fills in the keys, and `format_ranking` shows the plans that were found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import show_phase
from platform.config.fields import Config
from platform.config.validation import violations_of_configuration
from platform.optimizer.optimizers import count_state_numbers
from platform.plan.generators import MOST_PASSES
from platform.plan.layout import find_factorizations, format_count
from platform.plan.plan import Plan
from platform.plan.plan_builder import pause_garbage_collection
from platform.plan.plan_summary import format_seconds
from platform.plan.scheme import TENSOR_EXPERTS
from platform.predict.contenders import Contender, Space, load_shipped_schemes
from platform.predict.estimate import FEW, Circumstances, Columns, Estimator, Mode, Sketch, sketch_model
from platform.predict.hardware import Hardware
from platform.predict.make_plan import CHOICES, compose_config_scheme, plan_quickly
from platform.predict.memory_budget import MemoryForecast, device_kind
from platform.predict.price import StepPrice
from platform.predict.step_price import choose_pricing_hardware, memory_of_worker, read_bucket_size, step_price

MOST, LEAST, LAYERS = 50, 8, 1000  # finalists of a search: of at most so many layers together
ROUGH = 1.25  # of the memory that there is: one whose estimate is beyond it hardly fits;
NEAR, LACKING = 2.0, 4  # up to so much more, a few are planned, to show why they lost
TRUST = 2.0  # of two estimates, one may be so many times too high beside the other
EXPERTS = "experts", "tensor_experts"  # last columns: replicas that share experts; what tensor ranks do, as in WAYS
WAYS = "", *TENSOR_EXPERTS  # numbers 1 and 2, of which the second is a pattern of its own, as an axis of 2 is

MOST_SKETCHES = 500
_SKETCHES: dict[str, Sketch | None] = {}  # by model and scheme: a search after a failure finds the start's sketches


class Rated(NamedTuple):
    """Contender by its estimate: `seconds` of a step, by which they are compared, then by `rank`, and `memory` of a
    worker."""

    seconds: float
    rank: tuple
    choice: Contender
    memory: float


@dataclass(frozen=True)
class Finalist:
    """Contender that was planned: its configuration, its `plan` and its `price`. Its memory is forecast when it is
    asked for, as that takes longest."""

    choice: Contender
    config: Config
    plan: Plan
    price: StepPrice

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

    def fits_memory(self, budget: float) -> bool:
        """Return True if no worker takes more than so many bytes."""
        return not self._memory_forecast.exceeds_memory(budget)


@dataclass(frozen=True)
class Standings:
    """Outcome of a search: its `space`, the finalists that were `tried`, the best first, the number of contenders that
    were `judged`, and the `budget` of memory."""

    space: Space
    workers: int
    tried: Sequence[Finalist]
    judged: int
    budget: float

    @cached_property
    def best_finalist(self) -> Finalist | None:
        """Return the first finalist that fits; those behind it are not measured."""
        return next((f for f in self.tried if f.fits_memory(self.budget)), None)

    @cached_property
    def fitting_finalists(self) -> list[Finalist]:
        """Return the finalists that fit, the best first."""
        return [f for f in self.tried if f.fits_memory(self.budget)]

    @cached_property
    def lacking_finalists(self) -> list[Finalist]:
        """Return the finalists that lack memory, the quickest first."""
        return [f for f in self.tried if not f.fits_memory(self.budget)]


def search_plans(config: Config, workers: int, memory: float, hardware: Hardware) -> Standings:
    """Search all plans that the open keys of a configuration allow, for at most `workers` workers of `memory` bytes: as
    many workers as any plan that fits takes, and of their plans the quickest on a `hardware`."""
    space, judged, nearest = Space(config), 0, None
    with pause_garbage_collection(), show_phase("searching for a plan"):
        for ranks in _numbers_of_workers(space, workers):
            rated, count = Field(space, ranks, memory, hardware).rate_contenders()
            judged += count
            standings = Standings(space, ranks, _pick_finalists(space, rated, memory, hardware), judged, memory)
            nearest = nearest or (standings if standings.tried else None)
            if standings.best_finalist:
                return standings
    return replace(nearest, judged=judged) if nearest else Standings(space, workers, [], judged, memory)


def _numbers_of_workers(space: Space, workers: int) -> Iterator[int]:
    """Yield the numbers of workers for which contenders are looked for, from the largest down."""
    if not space.has_fixed_workers:
        yield from range(workers, 0, -1)
        return
    c = space.config
    yield (
        prod((*space.axis_sizes(c.tensor.scheme).values(), space.branch_workers, c.pipeline.stages, c.parallel.context))
        * space.read_set_size("data")
    )


def _pick_finalists(space: Space, rated: Sequence[Rated], memory: float, hardware: Hardware) -> list[Finalist]:
    """Plan and price contenders, the best by estimate first, as many as may be the quickest that fits;
    return them by price."""
    most = min(MOST, max(LEAST, LAYERS // space.config.model.layers))
    finalists: list[Finalist] = []
    least = inf
    for contender in _iterate_promising(rated, memory):
        if len(finalists) == 3 * most or (len(finalists) >= most and _has_fitting_finalist(finalists, memory)):
            break
        if len(rated) > most and contender.seconds > TRUST * least and _has_fitting_finalist(finalists, memory):
            break  # the estimate is so much above that of the best so far
        if finalist := _plan_finalist(space, contender.choice, hardware):
            finalists.append(finalist)
            first = min(finalists, key=lambda f: f.sort_key) is finalist
            least = contender.seconds if first and contender.memory <= memory else least
    if not _has_fitting_finalist(finalists, memory):  # the one that needs least is shown to the user
        thrifty = sorted(rated, key=lambda one: (one.memory, one.rank))[:LACKING]
        finalists += [
            finalist for contender in thrifty if (finalist := _plan_finalist(space, contender.choice, hardware))
        ]
    return sorted(finalists, key=lambda f: f.sort_key)


def _iterate_promising(rated: Sequence[Rated], memory: float) -> Iterator[Rated]:
    """Yield the contenders that may fit by estimate, and a few that hardly do."""
    beyond = 0
    for contender in rated:
        beyond += contender.memory > ROUGH * memory
        if contender.memory <= NEAR * memory and (contender.memory <= ROUGH * memory or beyond <= LACKING):
            yield contender


def _has_fitting_finalist(finalists: Sequence[Finalist], memory: float) -> bool:
    """Return True if some finalist fits; the quickest are measured first."""
    return any(f.fits_memory(memory) for f in sorted(finalists, key=lambda f: f.sort_key))


def _plan_finalist(space: Space, choice: Contender, hardware: Hardware) -> Finalist | None:
    """Plan and price one contender; None if it is refused."""
    config = space.build_config(choice)
    if violations_of_configuration(config) or (plan := plan_quickly(config)) is None:
        return None
    return Finalist(choice, config, plan, step_price(config, plan, hardware))


@dataclass(frozen=True)
class Field:
    """All contenders of a space for one number of `workers`."""

    space: Space
    workers: int
    memory: float
    hardware: Hardware

    @cached_property
    def search_circumstances(self) -> Circumstances:
        """Return what all contenders share."""
        c = self.space.config
        few, libraries = min(FEW, c.model.layers), device_kind(c) == "cuda"
        return Circumstances(
            self.hardware, c.precision, c.model.layers, few, c.train.global_batch, count_state_numbers(c),
            c.parallel.overlap, libraries, read_bucket_size(c),
        )  # fmt: skip

    def rate_contenders(self) -> tuple[list[Rated], int]:
        """Return the best contenders of every scheme and mode, the best by estimate first, and the number of all."""
        rated, judged = list[Rated](), 0
        for scheme in self.space.scheme_tables:
            names = [*self.space.axis_sizes(scheme), "context", "stage", "data", *EXPERTS]
            grid = self._contender_grid(scheme)
            several = np.delete(grid, [names.index("stage"), names.index("data")], axis=1) > 1
            for pattern in np.unique(several, axis=0):
                rows = grid[(several == pattern).all(axis=1)]
                best, count = self._rate_pattern(scheme, dict(zip(names, rows.T, strict=True)))
                rated, judged = rated + best, judged + count
        return sorted(rated), judged

    def estimate_choices(self, choices: Sequence[Contender]) -> list[Rated | None]:
        """Estimate single contenders, in their order; None for one whose axes do not divide what they split."""
        rated: list[Rated | None] = [None] * len(choices)
        alike: dict[tuple, list[int]] = {}  # by scheme and axes of several ranks
        for i, c in enumerate(choices):
            several = (n > 1 for n in (*c.axes, c.context, c.experts))
            alike.setdefault((c.scheme, *several, c.tensor_experts), []).append(i)
        for (scheme, *_), places in alike.items():
            names = [*self.space.axis_sizes(scheme), "context", "stage", "data", *EXPERTS, "microbatch"]
            some = [choices[i] for i in places]
            ways = {c: WAYS.index(c.tensor_experts) for c in some}
            rows = [(*c.axes, c.context, c.stages, c.data, c.experts, ways[c], c.microbatch) for c in some]
            columns: Columns = dict(zip(names, np.array(rows).T, strict=True))
            axes, sketch = self._find_sketch(scheme, {name: int(column[0] > 1) for name, column in columns.items()})
            if not sketch:
                continue
            columns = {**self._columns_by_axis(axes, columns), "microbatch": columns["microbatch"]}
            legal, estimator = (
                sketch.mask_legal(columns) & sketch.mask_batch(columns),
                Estimator(sketch, self.search_circumstances, axes, columns),
            )
            for row, (i, c) in enumerate(zip(places, some, strict=True)):
                if legal[row]:
                    mode = Mode(c.kind, c.chunks, c.recompute, c.zero)
                    (seconds,), (memory,) = estimator.estimate_contenders(mode, np.array([row]))
                    rated[i] = Rated(float(seconds), c.tie_order, c, float(memory))
        return rated

    def _contender_grid(self, scheme: str) -> NDArray[Any]:
        """Return the contenders of a scheme as rows: sizes of its axes, ranks of a context, stages, replicas, and
        EXPERTS."""
        space = self.space
        parts = ("context", "stages", "data")
        set_sizes = [*space.axis_sizes(scheme).values(), *map(space.read_set_size, parts)]
        free, fixed = (
            [i for i, n in enumerate(set_sizes) if not n],
            prod(n for n in set_sizes if n) * space.branch_workers,
        )
        if self.workers % fixed or (not free and self.workers != fixed):
            return np.zeros((0, len(set_sizes) + len(EXPERTS)), dtype=int)
        sizes = np.array([*find_factorizations(self.workers // fixed, len(free))] if free else [()], dtype=int)
        grid: NDArray[Any] = np.tile(np.array(set_sizes, dtype=int), (len(sizes), 1))
        grid[:, free] = sizes
        grid = grid[grid[:, -2] <= space.config.model.layers]
        if len(space.scheme_tables) > 1:
            grid = grid[~_mask_simpler_elsewhere(scheme, grid)]
        dividing = [i for i, axis in enumerate(space.axis_sizes(scheme)) if axis in space.expert_dividing_axes(scheme)]
        ways = [WAYS.index(way) for way in space.tensor_expert_choices(scheme)]
        combinations = [
            (i, shared, way)
            for i, row in enumerate(grid)
            for way in ways
            if len(ways) == 1 or way < 2 or (row[dividing] > 1).any()
            for shared in space.expert_choices(int(row[-1]))
        ]
        rows, *experts = np.array(combinations, dtype=int).reshape(-1, 3).T
        return np.column_stack([grid[rows], *experts])

    def _rate_pattern(self, scheme: str, columns: Columns) -> tuple[list[Rated], int]:
        """Return the best contenders of a scheme among `columns`, which agree in the axes of several ranks,
        and the number of all."""
        axes, sketch = self._find_sketch(scheme, {name: int(column[0] > 1) for name, column in columns.items()})
        columns = self._select_legal(sketch, self._columns_by_axis(axes, columns)) if sketch else {}
        if not sketch or not len(columns["stage"]):
            return [], 0
        estimator, modes = Estimator(sketch, self.search_circumstances, axes, columns), list(self._iterate_modes())
        parts = []  # by mode: its number, and the rows, seconds and bytes of its best contenders
        judged, taken = 0, dict[tuple, NDArray[Any]]()
        for number, mode in enumerate(modes):
            key = mode.kind, mode.chunks, mode.zero
            if key not in taken:
                taken[key] = np.flatnonzero(self._mask_mode(mode, columns))
            rows = taken[key]
            if not len(rows):
                continue
            judged += len(rows)
            seconds, memory = estimator.estimate_contenders(mode, rows)
            best = self._select_promising(seconds, memory)
            parts.append((np.full(len(best), number), rows[best], seconds[best], memory[best]))
        if not parts:
            return [], 0
        mode_of, rows, seconds, memory = (np.concatenate(column) for column in zip(*parts, strict=True))
        best = self._select_promising(seconds, memory, 4 * MOST)
        chosen = [(i, self._build_contender(scheme, modes[mode_of[i]], columns, int(rows[i]))) for i in best]
        return [Rated(float(seconds[i]), c.tie_order, c, float(memory[i])) for i, c in chosen], judged

    def _select_promising(self, seconds: NDArray[Any], memory: NDArray[Any], most: int = MOST) -> NDArray[np.intp]:
        """Return which contenders are worth a look: the `most` quickest that may fit, some quick ones that lack little
        memory, and the one that takes least."""
        near = memory <= NEAR * self.memory
        fits = near & (memory <= ROUGH * self.memory)
        groups = (fits, most), (near & ~fits, LACKING)
        chosen = [np.flatnonzero(which)[np.argsort(seconds[which], kind="stable")[:n]] for which, n in groups]
        return np.unique(np.concatenate([*chosen, [memory.argmin()]])).astype(np.intp)

    def _select_legal(self, sketch: Sketch, columns: Columns) -> Columns:
        """Return the contenders of `columns` whose axes divide what they split, with each size of a microbatch."""
        legal = sketch.mask_legal(columns)
        columns = {name: column[legal] for name, column in columns.items()}
        sizes = np.array(self.space.microbatch_choices)
        columns = {name: np.repeat(column, len(sizes)) for name, column in columns.items()}
        columns["microbatch"] = np.tile(sizes, len(columns["stage"]) // len(sizes))
        room = np.maximum(sizes[0], self.search_circumstances.batch // columns["replicas"])
        is_kept = (columns["microbatch"] <= room) & sketch.mask_batch(columns)
        return {name: column[is_kept] for name, column in columns.items()}

    def _iterate_modes(self) -> Iterator[Mode]:
        """Yield the modes of contenders: schedules with chunks, recomputation, and ZeRO."""
        space = self.space
        for kind, chunks in dict.fromkeys((*space.single_stage_schedules, *space.schedule_choices)):
            for recompute in space.recompute_choices:
                for zero in space.zero_choices:
                    yield Mode(kind, chunks, recompute, zero)

    def _mask_mode(self, mode: Mode, columns: Columns) -> NDArray[Any]:
        """Return which contenders a mode is for."""
        stages, batch = columns["stage"], self.search_circumstances.batch
        alone = (mode.kind, mode.chunks) in self.space.single_stage_schedules
        several = (mode.kind, mode.chunks) in self.space.schedule_choices
        layers = self.search_circumstances.layers
        even = (layers % (stages * mode.chunks) == 0) | (mode.chunks == self.space.schedule_choices[0][1])
        mask = np.where(stages == 1, alone, several & even & (stages * mode.chunks <= layers))
        microbatches = np.ceil(batch / (columns["microbatch"] * columns["replicas"]))
        mask &= stages * mode.chunks * microbatches <= MOST_PASSES
        return mask & ((columns["replicas"] * columns["contexts"] > 1) | (mode.zero in self.space.zero_choices[:1]))

    def _build_contender(self, scheme: str, mode: Mode, columns: Columns, i: int) -> Contender:
        """Return contender number `i` of `columns` in a mode."""
        sizes = {name: int(column[i]) for name, column in columns.items()}
        axes = tuple(sizes.get(axis, 1) for axis in self.space.axis_sizes(scheme))
        return Contender(
            scheme, axes, stages=sizes["stage"], data=sizes["replicas"], context=sizes["contexts"],
            experts=sizes.get("expert", 1), microbatch=sizes["microbatch"],
            tensor_experts=WAYS[sizes["tensor_experts"]], **mode._asdict(),
        )  # fmt: skip

    def _find_sketch(self, scheme: str, several: dict[str, int]) -> tuple[tuple[str, ...], Sketch | None]:
        """Return the mesh axes and the sketch of the model under a scheme where axes with a 1 in `several` have more
        than one rank."""
        space, c = self.space, self.space.config
        choice = Contender(
            scheme, tuple(1 + several[axis] for axis in space.axis_sizes(scheme)), data=4,
            context=1 + several["context"], experts=1 + several["experts"],
            tensor_experts=WAYS[1 + several["tensor_experts"]],
        )  # fmt: skip
        config = space.build_config(choice)
        kind = CHOICES.get(config.parallel.context_kind, (config.parallel.context_kind,))[0]
        composed_scheme = compose_config_scheme(config, 4, kind)
        axes = tuple(a for a, n in composed_scheme.mesh_axes(4).items() if n > 1)
        if (key := repr((c.model, composed_scheme))) not in _SKETCHES:
            if len(_SKETCHES) >= MOST_SKETCHES:
                _SKETCHES.clear()
            _SKETCHES[key] = sketch_model(c.model, composed_scheme, axes)
        return axes, _SKETCHES[key]

    def _columns_by_axis(self, axes: Sequence[str], columns: Columns) -> Columns:
        """Return the columns of contenders by mesh axis; beside them all `replicas` and ranks of `contexts`."""
        c, data, shared = self.space.config, columns["data"], columns["experts"]
        inside = c.parallel.context_heads if c.parallel.context_kind == "nested" else 1
        exchange = columns["context"] if c.parallel.context_kind == "heads" else np.minimum(inside, columns["context"])
        divided_columns = {
            "data": data // shared, "expert": shared, "exchange": exchange,
            "context": columns["context"] // exchange,
        }  # fmt: skip
        ones = np.ones_like(data)
        branches = {axis: n * ones for axis, n in c.branch.axes.items()}
        mesh_columns = {
            a: divided_columns[a] if a in divided_columns else branches[a] if a in branches else columns[a]
            for a in axes
        }
        others = {"replicas": data, "contexts": columns["context"]}
        return {**mesh_columns, **others, **{name: columns[name] for name in ("stage", "tensor_experts")}}


def _mask_simpler_elsewhere(scheme: str, grid: NDArray[Any]) -> NDArray[Any]:
    """Return which sizes of a scheme's axes, the first columns of `grid`, are a contender of a simpler scheme too."""
    if scheme == "serial":
        return np.zeros(len(grid), dtype=bool)
    axes = len(load_shipped_schemes()[scheme].order)
    alone = scheme in ("3d", "3d_literal") and (grid[:, 0] == 1) & (grid[:, 2] == 1)  # 1d_sp
    return (grid[:, :axes] == 1).all(axis=1) | alone | ((scheme == "2p5d") & (grid[:, 0] == 1))


CHOSEN_NEAR = 0.005  # of a step's seconds: finalists so near to the best are equals


def choose_plan(
    config: Config, workers: int, memory: float = 0.0, hardware: Hardware | None = None
) -> Standings | None:
    """Choose the open keys of a configuration, in place, for at most `workers` workers; return the ranking, None if no
    key is open. `memory`: bytes of a worker, where more is known than the configuration says; `hardware`: the one for
    which plans are priced, by default `choose_pricing_hardware`. Raises ConfigError if no plan fits."""
    if not config.plan.search:
        return None
    if workers < 1:
        raise ConfigError(f"plan.search={','.join(config.plan.search)}: there is no worker to plan for")
    hardware = hardware or choose_pricing_hardware(config)
    standings = search_plans(config, workers, memory_of_worker(config, memory, hardware), hardware)
    if not standings.best_finalist:
        raise ConfigError(_violation_of_search(standings))
    for field in fields(Config):
        setattr(config, field.name, getattr(standings.best_finalist.config, field.name))
    return standings


def _violation_of_search(standings: Standings) -> str:
    """Return the line that refuses a search without a plan: the nearest to fitting, or that none is legal."""
    keys = ", ".join(standings.space.config.plan.search)
    worker_count = format_count(standings.workers, "worker")
    if not standings.lacking_finalists:
        return f"plan.search={keys}: no plan for {worker_count} or fewer is legal: leave more keys open"
    least = min(standings.lacking_finalists, key=lambda f: f.peak_memory)
    return (
        f"plan.search={keys}: no plan for {worker_count} fits {standings.budget / 1e9:.4g} "
        "GB; the one that needs least,"
        f" {' '.join(standings.space.format_overrides(least.choice))}, needs {least.peak_memory / 1e9:.4g} GB;"
        f" more workers, or cluster.device_memory={least.peak_memory / 1e9:.4g}, would do"
    )


def format_choice(standings: Standings) -> str:
    """Return the line with the choice of a search for the user."""
    best = standings.best_finalist
    assert best, "the search has chosen"
    typed = " ".join(standings.space.format_overrides(best.choice))
    seconds = format_seconds(best.price.seconds)
    return (
        f"chosen of {standings.judged:,} plans for {format_count(standings.workers, 'worker')}: "
        f"{typed} ({seconds} a step)"
    )


def format_ranking(standings: Standings, top: int) -> Iterator[str]:
    """Yield the lines of the table of the best plans of a search, with the reason why each but the first lost."""
    yield f"{standings.judged:,} plans for {format_count(standings.workers, 'worker')}; the best, and why others lost:"
    best = standings.best_finalist
    assert best, "the search has chosen"
    quicker = [f for f in standings.lacking_finalists if f.price.seconds < best.price.seconds]
    shown = sorted([*standings.fitting_finalists[:top], *quicker[:top]], key=lambda f: f.sort_key)[:top]
    if best not in shown:
        shown[-1] = best
    yield f"{'':>4}  {'step':>9}  {'memory':>8}  plan, and why it lost"
    number = 0
    for finalist in shown:
        fits = finalist.fits_memory(standings.budget)
        number += fits
        reason = "" if finalist is best else f": {explain_loss(finalist, best, standings.budget)}"
        typed = " ".join(standings.space.format_overrides(finalist.choice))
        place = f"{number:>3}." if fits else "   -"
        yield (
            f"{place}  {format_seconds(finalist.price.seconds):>9}  "
            f"{finalist.peak_memory / 1e9:>5.3g} GB  {typed}{reason}"
        )


def explain_loss(finalist: Finalist, best: Finalist, budget: float) -> str:
    """Return why a finalist lost to the best: the memory that it lacks, or the part of a step that is longest beyond
    the best's."""
    if not finalist.fits_memory(budget):
        return f"lacks {(finalist.peak_memory - budget) / 1e9:.3g} GB"
    behind = finalist.price.seconds - best.price.seconds
    if behind <= CHOSEN_NEAR * best.price.seconds:
        return "as quick" + (
            ", splits more axes" if finalist.choice.num_split_axes > best.choice.num_split_axes else ""
        )
    ours, theirs = finalist.price.seconds_by_part, best.price.seconds_by_part
    more = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in dict.fromkeys((*ours, *theirs))}
    name = max(more, key=lambda name: more[name])
    return f"{format_seconds(more[name])} more {name}, {behind / best.price.seconds:.1%} slower"
