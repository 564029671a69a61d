"""Grid of all contenders of a search: estimated by scheme and mode in closed form, and the promising ones, the best
first (`Rated`), to be planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from math import ceil, inf, log, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.config.fields import Config, choose_quantisation, choose_quantised_products
from platform.model import build_model
from platform.optimizer.optimizers import count_stored_numbers, list_offloads
from platform.plan.chunks import measure_units
from platform.plan.generators import MOST_PASSES
from platform.plan.layout import find_factorizations
from platform.plan.model_types import NF4_UNITS
from platform.plan.operations.recorder import Recorder
from platform.plan.plan import base_precision
from platform.plan.scheme import Scheme
from platform.plan.step_collectives import may_compile, resolve_auto_kernels
from platform.predict.async_choice import read_async_products
from platform.predict.contenders import (
    AXIS,
    CHOOSABLE,
    MODE,
    SIZE,
    SKETCH,
    Contender,
    SearchSpace,
    leaves_stages_even,
    list_parts,
    mask_simpler_elsewhere,
)
from platform.predict.estimate import FEW, USUAL, Circumstances, Estimator, Offload, PassBytes
from platform.predict.footprint import Passes, measure_passes
from platform.predict.hardware import Hardware
from platform.predict.make_plan import CHOICES, compose_config_scheme, plan_quickly
from platform.predict.memory_budget import device_kind, list_compiled
from platform.predict.meter import MemoryMeter
from platform.predict.sketch import BASE, SEQUENCES, Columns, Sketch, sketch_model
from platform.predict.step_price import read_bucket_size, read_narrow_gathers

# A mode's contenders are kept by bands of memory: a contender stays if all quicker ones but a few need more. So
# whatever factor the estimates of a mode are wrong by, its best contender that fits is kept.
NEAR, BAND, IN_BAND = 2.0, 1.1, 4
REFINED, STEP, MOST_REFINED = 96, 1.25, 2.0  # contenders, a step of memory apart, up to so many times what there is
SURE = 0.75  # of the memory: a contender that is estimated to need less fits
THINNEST = 1 / 16  # of the memory that there is: less makes no difference
TRUST = 1.5  # times the estimate of one that takes half of the memory: slower ones are dropped
ERRORS = 0.95, 0.8  # price by estimate of seconds, and of memory, that a mode of which none was planned may have

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
class ContenderGrid:
    """All contenders of a space for one number of `workers`. Their sizes are columns, by part and by key of an axis."""

    space: SearchSpace
    workers: int
    memory: float
    hardware: Hardware
    _quotients: dict[tuple, PassBytes] = field(default_factory=dict)

    @cached_property
    def search_circumstances(self) -> Circumstances:
        """Return what all contenders share."""
        c = self.space.config
        costs = tuple((cost, self._number_of_layer(name) >= 0) for name, (cost, _) in self._measured_units.items())
        return Circumstances(
            self.hardware, base_precision(c.precision), c.model.layers, costs or ((1.0, False),), c.train.global_batch,
            count_stored_numbers(c) - (c.optimizer.masters == "split") / 2,
            {word: Offload(*self.space.measure_offload(word)) for word in {*list_offloads(c), c.optimizer.offload}},
            c.parallel.overlap, may_compile(c.train.compile, "cuda"),
            device_kind(c) == "cuda", read_bucket_size(c), [*NF4_UNITS][c.tune.double],
            read_narrow_gathers(c),
            self.hardware.choose_narrow(how, base_precision(c.precision)) if (how := choose_quantisation(c)) else "",
            read_async_products(c, self.workers),
        )  # fmt: skip

    @cached_property
    def _measured_units(self) -> Mapping[str, tuple[float, tuple]]:
        """Return the costs of the model's units, each with a key that alike units share."""
        start, model = self.space.list_starts()[0], build_model(self.space.config.model)
        ones = dict.fromkeys([*self._list_sketched(start.scheme), *list_parts(SIZE)], 1)
        scheme = compose_config_scheme(self.space.build_config(self.space.build_contender(start, ones)), 1, "gather")
        sizes = {"memory_length": model.sizes["length"], **model.sizes, "batch": 1}
        costs = measure_units(model, partial(Recorder, scheme, sizes=sizes), sizes)
        return dict(zip(getattr(model, "units", ()), costs, strict=True))

    def _number_of_layer(self, unit: str) -> int:
        """Return the number of the layer that a unit of the searched model is; -1 for what lies around its layers."""
        number = unit.rpartition(".")[2]
        return int(number) if number.isdigit() and int(number) < self.space.config.model.layers else -1

    @cached_property
    def _alike_layers(self) -> Mapping[int, int]:
        """Return how many of the layers behind the first one are as the first of them that they are alike."""
        kinds: dict[int, list[tuple]] = {}
        for name, (_, key) in self._measured_units.items():
            if (number := self._number_of_layer(name)) >= 0:
                kinds.setdefault(number, []).append(key)
        first: dict[frozenset, int] = {}
        layers = [frozenset(key for keys in kinds[number] for key in keys) for number in sorted(kinds)]
        numbers = [first.setdefault(keys, number) for number, keys in enumerate(layers[1:-1], 1)]
        if len(layers) > 2:  # what is behind all layers may be a part of the last one
            numbers.append(first[max(first, key=lambda keys: len(keys & layers[-1]))])
        return Counter(numbers)

    def rate_contenders(self) -> tuple[list[Rated], int]:
        """Return the best contenders of every scheme and mode, the best by estimate first, and the number of all."""
        rated, judged = list[Rated](), 0
        for start in self.space.list_starts():
            if not (columns := self._allowed_size_columns(start)):
                continue
            modes = self.space.list_modes(start)
            several = [columns[name] > 1 for name in self._list_sketched(start.scheme)]
            patterns = sum(more.astype(int) << i for i, more in enumerate(reversed(several)))
            for pattern in np.unique(patterns):
                best, count = self._rate_pattern(start, _select_rows(columns, patterns == pattern), modes)
                rated, judged = rated + best, judged + count
        return sorted([*rated, *self._refine_contenders(sorted(rated))]), judged

    def _refine_contenders(self, rated: Sequence[Rated]) -> list[Rated]:
        """Return the quickest of each mode and STEP of memory of the contenders `rated`, in order, that may lack it,
        with the other values of what refines them, where these need less memory than quicker ones; none that is surely
        slower than one that fits."""
        groups, alike = list[tuple[Rated, Sequence[Contender]]](), set[tuple]()
        roomy = next((one.seconds for one in rated if one.memory < SURE * self.memory), inf)
        for one in (one for one in rated if one.memory >= SURE * self.memory):
            if one.seconds > roomy / ERRORS[0] or len(alike) == REFINED:
                break
            key = self.space.read_mode(one.choice), ceil(log(one.memory / self.memory, STEP))
            if key not in alike and one.memory < MOST_REFINED * self.memory:
                if more := self.space.refine_contender(one.choice):
                    alike.add(key)
                    groups.append((one, more))
        estimates = iter(self.estimate_choices([choice for _, more in groups for choice in more]))
        refined = list[Rated]()
        for plain, more in groups:
            least = plain.memory
            for one in sorted(filter(None, islice(estimates, len(more)))):
                if one.memory < min(least, NEAR * self.memory):
                    least = one.memory
                    refined.append(one)
        return refined

    def estimate_choices(self, choices: Sequence[Contender]) -> list[Rated | None]:
        """Estimate single contenders, in their order; None for one whose axes do not divide what they split."""
        rated: list[Rated | None] = [None] * len(choices)
        alike: dict[tuple, list[int]] = {}  # by scheme, what has a sketch of its own, and axes of several ranks
        described = [self.space.describe_contender(c) for c in choices]
        for i, x in enumerate(described):
            several = (x[name] > 1 for name in self._list_sketched(x["scheme"]))
            alike.setdefault((x["scheme"], *several, *(x[part] for part in list_parts(SKETCH))), []).append(i)
        for places in alike.values():
            first = described[places[0]]
            start = Contender(first["scheme"], (), **{part: first[part] for part in list_parts(SKETCH)})
            names = [*self.space.name_axes(start.scheme), *list_parts(AXIS, SIZE)]
            columns = {name: np.array([described[i][name] for i in places]) for name in names}
            estimator, legal = self._build_estimator(start, columns)
            for row, i in enumerate(np.array(places)[legal]):
                assert estimator, "some are legal"
                (seconds,), (memory,) = estimator.estimate_contenders(choices[i], np.array([row]))
                rated[i] = Rated(float(seconds), choices[i].tie_order, choices[i], float(memory))
        return rated

    def _list_sketched(self, scheme: str) -> list[str]:
        """Return the names of the columns of which those above 1 need another sketch."""
        return [*self.space.name_axes(scheme), *list_parts(AXIS)]

    def _allowed_size_columns(self, start: Contender) -> Columns:
        """Return the sizes of the contenders that share a `start`; nothing if none multiply to the workers."""
        space, layers = self.space, self.space.config.model.layers
        axes = dict(zip(space.name_axes(start.scheme), space.axis_sizes(start.scheme).values(), strict=True))
        sizes = {**axes, **space.worker_sizes}
        free, fixed = [name for name, n in sizes.items() if not n], prod(n for n in sizes.values() if n)
        rest, excess = divmod(self.workers, fixed * space.branch_workers)
        splits = [] if excess else [*find_factorizations(rest, len(free))] if free else [()][: rest == 1]
        if not splits:
            return {}
        split_columns = dict(zip(free, np.array(splits, dtype=int).reshape(len(splits), len(free)).T, strict=True))
        columns: Columns = {name: split_columns.get(name, np.full(len(splits), n)) for name, n in sizes.items()}
        kept = columns["stages"] <= layers
        if axes and len(space.scheme_tables) > 1:
            kept &= ~mask_simpler_elsewhere(start.scheme, np.column_stack([columns[name] for name in axes]))
        for part in list_parts(SKETCH):
            kept &= space.mask_allowed(part, {**vars(start), **columns}, start)
        columns = _select_rows(columns, kept)
        for part in (part for part in list_parts(AXIS, SIZE) if part not in sizes):
            values = np.array(space.list_values(part, start))
            columns = {name: np.repeat(column, len(values)) for name, column in columns.items()}
            columns[part] = np.tile(values, len(columns["stages"]) // len(values))
            columns = _select_rows(columns, space.mask_allowed(part, columns, start))
        return columns

    def _rate_pattern(self, start: Contender, columns: Columns, modes: Sequence[Contender]) -> tuple[list[Rated], int]:
        """Return the best contenders of a `start` among `columns`, which agree in the axes of several ranks,
        and the number of all."""
        estimator, legal = self._build_estimator(start, columns)
        if not estimator:
            return [], 0
        columns = _select_rows(columns, legal)
        # by mode, whatever its chunks: of each of these its number, and the rows, seconds and bytes of its contenders
        parts: dict[Contender, list[tuple[NDArray[Any], ...]]] = {}
        judged, taken = 0, dict[tuple, NDArray[Any]]()
        limited = [part for part in list_parts(MODE) if CHOOSABLE[part].allows]
        for number, mode in enumerate(modes):
            key = mode.kind, mode.chunks, *(getattr(mode, part) for part in limited)
            if key not in taken:
                taken[key] = np.flatnonzero(self._mask_mode(mode, columns, limited))
            rows = taken[key]
            if not len(rows):
                continue
            judged += len(rows)
            alike = parts.setdefault(replace(mode, chunks=1), [])
            alike.append((np.full(len(rows), number), rows, *estimator.estimate_contenders(mode, rows)))
        rated = []
        groups = [[np.concatenate(column) for column in zip(*alike, strict=True)] for alike in parts.values()]
        roomy = [seconds[memory <= self.memory / 2].min(initial=inf) for _, _, seconds, memory in groups]
        for mode_of, rows, seconds, memory in groups:
            for i in self._select_promising(seconds, memory):
                if seconds[i] > TRUST * min(roomy):
                    continue
                sizes = {name: int(column[rows[i]]) for name, column in columns.items()}
                c = self.space.build_contender(modes[mode_of[i]], sizes)
                rated.append(Rated(float(seconds[i]), c.tie_order, c, float(memory[i])))
        return rated, judged

    def _select_promising(self, seconds: NDArray[Any], memory: NDArray[Any]) -> NDArray[np.intp]:
        """Return which contenders of a mode are worth a look: each needs less memory, by bands, than all quicker ones
        but a few; and the thriftiest."""
        rows = np.flatnonzero(memory <= NEAR * self.memory)
        rows = rows[np.argsort(seconds[rows], kind="stable")]
        bands = np.ceil(np.log(np.maximum(memory[rows] / self.memory, THINNEST)) / log(BAND))
        chosen = [np.array([memory.argmin()])]
        for _ in range(IN_BAND):
            thinner = bands < np.minimum.accumulate(np.concatenate([[inf], bands]))[:-1]
            chosen.append(rows[thinner])
            rows, bands = rows[~thinner], bands[~thinner]
        return np.unique(np.concatenate(chosen)).astype(np.intp)

    def _mask_mode(self, mode: Contender, columns: Columns, limited: Sequence[str]) -> NDArray[Any]:
        """Return which contenders have a mode; its `limited` parts do not go with all."""
        stages, shared, space = columns["stages"], self.search_circumstances, self.space
        alone = (mode.kind, mode.chunks) in space.single_stage_schedules
        several = (mode.kind, mode.chunks) in space.schedule_choices
        even = leaves_stages_even(shared.layers, stages, mode.chunks) | (mode.chunks == space.schedule_choices[0][1])
        mask = np.where(stages == 1, alone, several & even & (stages * mode.chunks <= shared.layers))
        mask &= stages * mode.chunks * np.ceil(shared.batch / (columns["microbatch"] * columns["data"])) <= MOST_PASSES
        for part in limited:
            mask &= space.mask_allowed(part, {**vars(mode), **columns}, mode)
        return mask

    def _build_estimator(self, start: Contender, columns: Columns) -> tuple[Estimator | None, NDArray[np.intp]]:
        """Return the estimator of those contenders of `columns`, which agree in the axes of several ranks, whose axes
        divide what they split, None if there are none, and which they are."""
        space, c = self.space, self.space.config
        several = {name: 1 + int(column[0] > 1) for name, column in columns.items()}
        config = space.build_config(space.build_contender(start, {**several, "data": 4}))
        kind = CHOICES.get(config.parallel.context_kind, (config.parallel.context_kind,))[0]
        composed_scheme = compose_config_scheme(config, 4, kind)
        axes = tuple(a for a, n in composed_scheme.mesh_axes(4).items() if n > 1)
        how = choose_quantised_products(c)
        may_fuse = how is None and self.search_circumstances.async_products != "off"
        sketch, fused = (
            self._sketch_once(composed_scheme, axes, how, fuses) if fuses <= may_fuse else None
            for fuses in (False, True)
        )
        by_axis = self._columns_by_axis(axes, columns)
        legal = np.flatnonzero(sketch.mask_legal(by_axis) & sketch.mask_batch(by_axis)) if sketch else np.array([], int)
        if not sketch or not len(legal):
            return None, legal
        compare = partial(self._compare_with_meter, start, sketch, axes, several)
        return Estimator(sketch, self.search_circumstances, axes, _select_rows(by_axis, legal), compare, fused), legal

    def _sketch_once(self, scheme: Scheme, axes: tuple[str, ...], how: tuple | None, fuses: bool) -> Sketch | None:
        """Return the sketch of the searched model; arguments as of `sketch_model`, which makes each of them once."""
        c = self.space.config
        if (key := repr((c.model, c.tune, how, scheme, fuses))) not in _SKETCHES:
            if len(_SKETCHES) >= MOST_SKETCHES:
                _SKETCHES.clear()
            _SKETCHES[key] = sketch_model(c.model, scheme, axes, self._alike_layers, how, c.tune, fuses)
        return _SKETCHES[key]

    def _compare_with_meter(
        self, start: Contender, sketch: Sketch, axes: tuple[str, ...], several: Mapping[str, int], recompute: str,
        mlp_chunks: int,
    ) -> PassBytes:  # fmt: skip
        """Return what the memory meter says of passes by what the `sketch` of a `start` says, with one kind of
        recomputation and feed-forward layers in `mlp_chunks`, at two ranks along its axes; compared once for alike
        ones."""
        sizes = {**several, "data": 2 * several["experts"], "microbatch": BASE, "stages": 1}
        probe = self._columns_by_axis(axes, {name: np.array([n]) for name, n in sizes.items()})
        estimator = Estimator(sketch, self.search_circumstances, axes, probe)
        key = start, several["experts"] > 1, estimator.compiles, recompute, mlp_chunks
        if key not in self._quotients:
            start = replace(start, mlp_chunks=mlp_chunks)
            config = self.space.build_config(self.space.build_contender(start, sizes))
            config.train.global_batch = BASE * sizes["data"]
            metered, by_sketch = meter_passes(config, recompute), estimator.sketch_passes(recompute)
            pairs = (zip(*pair, strict=True) for pair in zip(metered or (), by_sketch if metered else (), strict=True))
            quotients = (tuple(float(count / max(1.0, size[0])) for count, size in pair) for pair in pairs)
            self._quotients[key] = PassBytes(*quotients) if metered else USUAL  # type: ignore[arg-type]
        return self._quotients[key]

    def _columns_by_axis(self, axes: Sequence[str], columns: Columns) -> Columns:
        """Return the columns of contenders by mesh axis, and their microbatches."""
        c, data, context = self.space.config, columns["data"], columns["context"]
        shared = np.gcd(data, columns["experts"])  # of fewer replicas than are to share experts, all do
        inside = c.parallel.context_heads if c.parallel.context_kind == "nested" else 1
        exchange = context if c.parallel.context_kind == "heads" else np.minimum(inside, context)
        divided = {"data": data // shared, "expert": shared, "exchange": exchange, "context": context // exchange}
        branches = {axis: np.full_like(data, n) for axis, n in c.branch.axes.items()}
        schemes = {name.rpartition(".")[2]: column for name, column in columns.items()}
        by_axis = {**schemes, **branches, **divided}
        return {**{axis: by_axis[axis] for axis in axes}, "stage": columns["stages"], SEQUENCES: columns["microbatch"]}


def meter_passes(config: Config, recompute: str) -> PassBytes | None:
    """Count the bytes of the passes of a model of as few layers as its sketch has, all on one stage under the sizes of
    a configuration, with one kind of recomputation; None if its plan is refused."""
    few, by_depth = min(FEW, config.model.layers), list[list[Passes]]()
    for layers in (few, max(1, few - 1)):
        c = replace(config, model=replace(config.model, layers=layers), recompute=recompute)
        if not (plan := plan_quickly(c, weighs=False)):
            return None
        device, dropout, model = device_kind(c), c.model.dropout, build_model(c.model)
        plan = resolve_auto_kernels(plan, device, dropout)
        at, compiles = plan.mesh.rank_coordinates(0), list_compiled(c)[0]
        meters = [MemoryMeter(plan, dropout, at, device, compiles=compiles) for _ in range(2)]
        chunk, splits = plan.chunks[0], (False, True)
        by_depth.append([
            measure_passes(meter, model, chunk, splits_weight_gradients=split)
            for meter, split in zip(meters, splits, strict=True)
        ])  # fmt: skip
    (joint, split), (fewer, fewer_split) = by_depth
    kept, pending = joint.kept - fewer.kept, split.pending - fewer_split.pending
    work = tuple(max(p.forward - p.kept, p.backward - p.pending - sum(p.gradients.values())) for p in by_depth[0])
    return PassBytes((kept, joint.kept - few * kept), (pending, split.pending - few * pending), work)  # type: ignore[arg-type]


def _select_rows(columns: Columns, kept: NDArray[Any]) -> Columns:
    """Return the columns of those contenders that are `kept`."""
    return {name: column[kept] for name, column in columns.items()}
