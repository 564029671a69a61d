"""Calibration of a hardware by measurements: who measures with whom, and the text of the hardware's file.

- `calibrate_hardware`: the constants that the formulas of `platform.predict.price` need, by least squares.
- `fit_constants`: the few constants that no data sheet gives, fitted to measured times.
- `fit_slowdowns`: a refit to the measured parts of a run's steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from math import exp, log, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

from platform.plan.accelerators import find_accelerator
from platform.plan.plan_summary import fold_into_measured_parts
from platform.predict.hardware import LINK, Hardware, Link
from platform.predict.price import group_seconds, host_seconds, price_work, tiling_share
from platform.predict.work import FUSED_BACKWARD, StepWork

TILES = (8, 16, 32, 64, 128, 256)  # longer edges of the largest tile, of which the best is taken
LEAST = 1e-9  # seconds: of what is too short to be seen in its measurements
Key = tuple[str, tuple[float, ...]]  # what was measured, and its sizes


class Sample(NamedTuple):
    """Measurement of one kind: its sizes, and its seconds on the usual rank."""

    sizes: tuple[float, ...]
    seconds: float


Samples = Mapping[str, Sequence[Sample]]  # kind -> its measurements


def group_samples_by_kind(timings: Iterable[tuple[str, Sequence[float], float]], usual: Callable = median) -> Samples:
    """Return the measurements of all ranks by kind; of ranks that measured the same, the `usual` one counts."""
    by_key: dict[Key, list[float]] = defaultdict(list)
    for kind, sizes, seconds in timings:
        by_key[kind, tuple(sizes)].append(seconds)
    samples: dict[str, list[Sample]] = defaultdict(list)
    for (kind, key_sizes), all_seconds in by_key.items():
        samples[kind].append(Sample(key_sizes, usual(all_seconds)))
    return samples


def calibrate_hardware(
    base_hardware: Hardware, kernels: Samples, links: Mapping[str, Samples], precision: str
) -> Hardware:
    """Return the hardware that explains measurements best. `base_hardware`: hardware that gives all else; `kernels`:
    samples of ranks that compute; `links`: samples of groups, by tier, node or network; `precision`: type of the
    products."""
    [copy] = kernels["copy"]
    hardware = replace(base_hardware, bandwidth=copy.sizes[0] / copy.seconds)
    hardware = _calibrate_products(hardware, kernels, precision)
    for tier, samples in links.items():
        reached = replace(hardware.reached, **{tier: 1.0})
        link = _fit_tier_links(hardware, tier, samples)
        hardware = replace(hardware, **{tier: link}, reached=reached)  # type: ignore[arg-type]
        for (apart, moving), together in samples.get("beside", ()):
            slowed = (together - max(apart, moving)) / min(apart, moving)
            hardware = replace(hardware, interference=min(1.0, max(1e-3, slowed)))
    return hardware


def fit_nonnegative_factors(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factors, none negative, of the `columns` whose sums are nearest to measured seconds, by the squares of
    errors over the seconds: short measurements count, and long ones more."""
    weight = np.array(seconds) ** -0.5
    a, weighted_seconds = np.array(columns, dtype=float).T * weight[:, None], np.array(seconds) * weight
    used = list(range(a.shape[1]))
    while True:
        factors = np.linalg.lstsq(a[:, used], weighted_seconds, rcond=None)[0]
        if len(used) == 1 or factors.min() >= 0:
            break
        used.pop(int(factors.argmin()))
    all_factors = np.zeros(a.shape[1])
    all_factors[used] = factors
    return [float(x) for x in all_factors]


def _calibrate_products(hardware: Hardware, kernels: Samples, precision: str) -> Hardware:
    """Return the hardware with the peaks that products reach, the tile and depth by which other shapes reach less, and
    the share of attention in one kernel. A data sheet's peak stays."""
    measured = {kind.partition(" ")[2]: s[0].sizes[0] / s[0].seconds for kind, s in kernels.items() if "peak " in kind}
    peaks = {p: max(rate, hardware.peaks.get(p, 0.0) if hardware.ahead else 0.0) for p, rate in measured.items()}
    hardware = replace(hardware, peaks={**hardware.peaks, **peaks} if hardware.ahead else peaks)
    itemsize = {"fp64": 8, "fp32": 4}.get(precision, 2)
    fits = []
    for tile in TILES[-1:] if hardware.ahead else TILES:
        rows = []
        for (m, n, k), seconds in kernels["product"]:
            reading = 3 * (m * k + k * n + m * n) * itemsize / hardware.bandwidth
            computing = seconds - (0.0 if hardware.ahead else reading)
            if computing > seconds / 4 and (not hardware.ahead or reading < seconds / 2):
                shares = [
                    tiling_share(int(a), int(b), 1, hardware.processors, tile) for a, b in ((m, n), (m, k), (n, k))
                ]  # of the product, and of both gradients
                flops = 2 * m * n * k
                sums = sum(flops / share / inner for share, inner in zip(shares, (k, n, m), strict=True))
                rows.append((sum(flops / share for share in shares), sums, 1.0, computing))
        *columns, seconds_left = zip(*rows, strict=True)
        factors = fit_nonnegative_factors(columns, seconds_left)
        predicted = np.array(columns).T @ factors
        fits.append((float(np.mean((predicted / seconds_left - 1) ** 2)), -tile, factors))
    _, tile, (per_flop, per_sum, _) = min(fits)
    per_flop = max(per_flop, 1 / (1.5 * hardware.peaks[precision]))  # none, of products too small to show it
    products = 1 / (per_flop * hardware.peaks[precision])
    rates = []
    for (batch, heads, length, width), seconds in kernels["attention"]:
        flops = 2.0 * batch * heads * length * length * width * (1 + FUSED_BACKWARD)
        rates.append(flops * per_flop / max(LEAST, seconds))
    return replace(
        hardware,
        reached=replace(hardware.reached, products=products, attention=min(1.5, products * median(rates))),
        fill=max(1e-3, per_sum / per_flop),
        tile=float(-tile),
    )


def _fit_tier_links(hardware: Hardware, tier: str, samples: Samples) -> Link:
    """Return the links of a tier, node or network, as messages find them, and as each kind of collective does."""
    kinds = {op: _fit_kind_links(hardware, tier, op, s) for op, s in samples.items() if op not in ("send", "beside")}
    sent = samples["send"]
    columns = [[1.0] * len(sent), [s.sizes[1] for s in sent]]
    latency, per_byte = fit_nonnegative_factors(columns, [s.seconds for s in sent])
    message = Link(1 / max(per_byte, 1e-15), max(LEAST, latency), max(LEAST, latency))
    return replace(message, kinds=kinds)


def _fit_kind_links(hardware: Hardware, tier: str, op: str, samples: Sequence[Sample]) -> Link:
    """Return the links of a tier as one kind of collective finds them: with the columns that the formula gives for a
    byte, a latency and a hop alone. Of groups of one size the latency is all that is not bytes."""
    none = Link(1e30, LEAST**2, LEAST**2)
    alone = [replace(none, bandwidth=1.0), replace(none, latency=1.0), replace(none, hop=1.0)]
    reached = replace(hardware.reached, node=1.0, network=1.0)
    columns = []
    for link in alone:
        trial = replace(hardware, node=link, network=link, reached=reached)
        seated = [(s.sizes[1], s.sizes[0], s.sizes[0] if tier == "node" else 1) for s in samples]
        columns.append([float(group_seconds(op, size, n, node_ranks, trial)) for size, n, node_ranks in seated])
    seconds = [s.seconds for s in samples]
    if len({s.sizes[0] for s in samples}) > 1:
        per_byte, latency, hop = fit_nonnegative_factors(columns, seconds)
    else:
        per_byte, latency = fit_nonnegative_factors(columns[:2], seconds)
        hop = 0.0
    return Link(1 / max(per_byte, 1e-15), max(LEAST, latency), max(LEAST, hop))


EXPECTED = 0.03  # usual error of a prediction, as a logarithm
TRUSTED = 0.5  # by how much a constant's logarithm may leave its first value at the price of such an error
TURNS, SETTLED, STEP = 12, 1e-5, 1e-3

Errors = Callable[[Mapping[str, float]], list[float]]  # constants -> logarithm of predicted / measured, per run


def fit_constants(errors: Errors, first: Mapping[str, float]) -> dict[str, float]:
    """Return the constants, near their `first` values, with which the squares of the errors add up to least, by
    Gauss and Newton's method on the logarithms; runs that do not depend on a constant leave it as it is."""
    names = list(first)
    point = [0.0] * len(names)

    def evaluate_point(x: Sequence[float]) -> list[float]:
        """Return the errors at logarithms `x` of the constants over their first values, and how far these are."""
        constants = {name: first[name] * exp(step) for name, step in zip(names, x, strict=True)}
        return [*errors(constants), *(step * EXPECTED / TRUSTED for step in x)]

    now = evaluate_point(point)
    for _ in range(TURNS):
        shifted = [evaluate_point(_step_coordinate(point, i)) for i in range(len(names))]
        slopes = np.array([np.subtract(e, now) / STEP for e in shifted])
        step = np.clip(np.linalg.solve(slopes @ slopes.T, -slopes @ now), -0.5, 0.5).tolist()
        scale = 1.0
        while True:
            tried = [x + scale * s for x, s in zip(point, step, strict=True)]
            then = evaluate_point(tried)
            if sum(e * e for e in then) <= sum(e * e for e in now) or scale < 1e-3:
                break
            scale /= 2
        point, now = tried, then
        if max(abs(s) * scale for s in step) < SETTLED:
            break
    return {name: first[name] * exp(x) for name, x in zip(names, point, strict=True)}


def _step_coordinate(point: Sequence[float], i: int) -> list[float]:
    """Return the point a small step along coordinate i, one of the constants to fit."""
    return [x + STEP * (j == i) for j, x in enumerate(point)]


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau-b of two rankings of the same runs: 1 if they agree on every pair, -1 if on none."""
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(_sign(one[i] - one[j]), _sign(other[i] - other[j])) for i, j in pairs]
    untied = [sum(a != 0 for a, _ in signs), sum(b != 0 for _, b in signs)]
    return sum(a * b for a, b in signs) / (untied[0] * untied[1]) ** 0.5 if all(untied) else 0.0


def _sign(x: float) -> int:
    """Return 1, 0 or -1 as the difference of two runs in a ranking is positive, zero or negative."""
    return (x > 0) - (x < 0)


TIERS = ("node", "network")
Timings = Sequence[tuple[str, Sequence[float], float]]  # of a rank: kind, sizes, seconds


class Round(NamedTuple):
    """Round of measurements: of `kernels`, or of collectives of a tier, by `groups` of as many ranks each, all at the
    same time."""

    tier: str
    groups: Sequence[Sequence[int]]

    @property
    def ranks_and_groups(self) -> tuple[int, int]:
        """Return, for a calibration's measurements, the ranks of a group and the number of groups."""
        return len(self.groups[0]), len(self.groups)

    @property
    def mesh_ranks(self) -> list[int]:
        """Return the ranks that a calibration measures, in the order of a mesh: the first of all groups, ..."""
        return [group[i] for i in range(len(self.groups[0])) for group in self.groups]


def plan_calibration_rounds(nodes: Sequence[str]) -> list[Round]:
    """Return the rounds of measurements from which a hardware is calibrated, by ranks on these `nodes`: inside each
    node, and between the n-th ranks of all nodes, in pairs and altogether. Nodes of more ranks than the smallest have
    some that wait.

    >>> [(r.tier, r.groups) for r in plan_calibration_rounds(["a", "a"])]
    [('kernels', [[0, 1]]), ('node', [[0, 1]])]
    """
    by_node = [[rank for rank, rank_node in enumerate(nodes) if rank_node == node] for node in dict.fromkeys(nodes)]
    least = min(map(len, by_node))
    inside = [ranks[:least] for ranks in by_node]
    across = [list(ranks) for ranks in zip(*inside, strict=True)]
    rounds = [Round("kernels", [[*range(len(nodes))]])]
    for tier, groups in zip(TIERS, (inside, across), strict=True):
        if (size := len(groups[0])) > 1:
            pairs = [group[i : i + 2] for group in groups for i in range(0, size - 1, 2)]
            rounds += [Round(tier, pairs)] + [Round(tier, groups)] * (size > 2)
    return rounds


class Seen(NamedTuple):
    """Circumstances of a calibration: the `date`, the `precision` of its products, the name of its `device`, the ranks
    of each of the `nodes`, and the name of the hardware (`like`) that gives all that was not measured."""

    date: str
    precision: str
    device: str
    nodes: Mapping[str, int]
    like: str


def hardware_of_rounds(
    base_hardware: Hardware, measured: Sequence[tuple[Round, Sequence[Timings]]], seen: Seen, steps: Sequence[StepWork]
) -> tuple[Hardware, set[str]]:
    """Return the hardware that the measurements of all rounds describe, each round with its ranks' timings, and the
    tiers that they say something of. `base_hardware`: gives all else; `steps`: the work of `step_configs`. Collectives
    took as long as on the rank that was last."""
    by_tier: dict[str, list[tuple[str, Sequence[float], float]]] = {}
    for measured_round, timings in measured:
        by_tier.setdefault(measured_round.tier, []).extend(timing for of_rank in timings for timing in of_rank)
    links = {tier: group_samples_by_kind(by_tier[tier], max) for tier in TIERS if tier in by_tier}
    if len(seen.nodes) > 1:
        base_hardware = replace(base_hardware, ranks=min(seen.nodes.values()))
    kernels = group_samples_by_kind(by_tier["kernels"])
    hardware = _calibrate_steps(
        calibrate_hardware(base_hardware, kernels, links, seen.precision), kernels["step"], steps
    )
    return hardware, {*links}


def _calibrate_steps(hardware: Hardware, samples: Sequence[Sample], steps: Sequence[StepWork]) -> Hardware:
    """Return the hardware with the host's seconds for a kernel, by which steps of tiny microbatches differ, and the
    share of memory's bandwidth with which a usual step takes as long as it was measured: kernels read and write more in
    a step than alone, into memory that they have not just used. `steps`: the work of the `samples`."""
    seconds = [sample.seconds for sample in sorted(samples)]
    passes = [(work.plan.microbatches, (*work.forward, *work.backward)) for work in steps]
    calls = [count * host_seconds(0, sum(p.calls for p in both), hardware) for count, both in passes]
    kernels = [count * sum(n * part.kernels for p in both for part, n in p.parts) for count, both in passes]
    launching = [whole - beside for whole, beside in zip(seconds[:-1], calls, strict=False)]
    launch, _ = fit_nonnegative_factors([kernels[:-1], [1.0] * (len(kernels) - 1)], launching)
    hardware = replace(hardware, launch=max(1e-9, launch))

    def log_errors(constants: Mapping[str, float]) -> list[float]:
        """Return the logarithm of predicted over measured seconds of the usual step."""
        return [log(price_work(steps[-1], hardware.replace_constants(constants)).seconds / seconds[-1])]

    reached = fit_constants(log_errors, {"memory": hardware.reached.memory})
    return hardware.replace_constants({"memory": min(1.5, reached["memory"])})


def format_hardware_file(h: Hardware, tiers: Set[str], seen: Seen) -> str:
    """Return the text of a hardware's file, each number with how it was found; `tiers`: tiers that were measured."""
    measured, unmeasured = f"measured {seen.date}", f"not measured: of {seen.like}"
    on_gpu = h.ahead
    peaks = ", ".join(f"{precision}: {rate:.4g}" for precision, rate in h.peaks.items())
    workers_by_node = ", ".join(f"{node} {count}" for node, count in seen.nodes.items())
    lines = [
        f"# By python -m platform.plan calibrate, {seen.date}; {seen.device}; workers on each node: {workers_by_node}.",
        f"accelerator: {known_accelerator.name if (known_accelerator := find_accelerator(seen.device)) else repr('')}",
        f"memory: {h.memory:.4g} # {'bytes of the device' if on_gpu else unmeasured}",
        f"peaks: {{{peaks}}} # {'data sheet, or ' if on_gpu else ''}{measured}: square products, all workers at once",
        f"bandwidth: {h.bandwidth:.4g} # {measured}: a copy, read and written, by all workers at once",
        f"processors: {h.processors} # {'of the device' if on_gpu else 'a core'}",
        f"tile: {h.tile:.4g} # {'usual' if on_gpu else measured + ': fits products by shape best'}",
        f"fill: {h.fill:.4g} # {measured}: products with short sums",
        f"launch: {h.launch:.4g} # {measured}: tiny steps of more and of fewer microbatches, by kernel",
        f"ahead: {'true' if h.ahead else 'false'} # {'as GPUs are' if on_gpu else 'a core does one after the other'}",
        f"interference: {h.interference:.3g} # {measured if tiers else unmeasured}: products beside an all-gather",
    ]
    for tier, link in (("node", h.node), ("network", h.network)):
        lines.append(f"{tier}: # {measured + ': messages, and kinds of collectives' if tier in tiers else unmeasured}")
        lines += [f"  ranks: {h.ranks}"] if tier == "node" else []
        lines += [f"  {line}" for line in _format_link(link)]
        lines += ["  kinds:"] if link.kinds else []
        lines += [f"    {op}: {{{', '.join(_format_link(kind))}}}" for op, kind in link.kinds.items()]
    lines += [f"storage: {{read: {h.storage.read:.4g}, write: {h.storage.write:.4g}}} # {unmeasured}", "reached:"]
    reached = {
        "products": "products by shape",
        "attention": "attention in one kernel",
        "memory": "a step of two layers",
    }
    for name, how in reached.items():
        lines.append(f"  {name}: {getattr(h.reached, name):.3g} # {measured}: {how}, in {seen.precision}")
    for tier in TIERS:
        text = f"{measured}: in the bandwidths above" if tier in tiers else unmeasured
        lines.append(f"  {tier}: {getattr(h.reached, tier):.3g} # {text}")
    return "\n".join(lines) + "\n"


def _format_link(link: Link) -> list[str]:
    """Return the numbers of a tier's links as they stand in a file."""
    return [f"{key}: {getattr(link, key):.4g}" for key in LINK]


REFIT_LEAST = 0.01  # of a step: parts and differences below it are noise


def fit_slowdowns(work: StepWork, hardware: Hardware, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the factors by which a `device`, links inside a `node` and links of the `network` take longer than
    described, with which the predicted parts of a step are nearest to `measured` ones, each counted by its share. Parts
    of one plan settle no more numbers; a factor on which none of them depends stays 1."""
    least = REFIT_LEAST * sum(measured.values())

    def log_errors(times: Mapping[str, float]) -> list[float]:
        """Return the logarithms of predicted over measured parts, weighted."""
        predicted = fold_into_measured_parts(price_work(work, hardware.slow_down(times)).seconds_by_part)
        pairs = [(predicted.get(name, 0.0), seconds) for name, seconds in measured.items()]
        return [sqrt(after * REFIT_LEAST / least) * log((before + least) / (after + least)) for before, after in pairs]

    return fit_constants(log_errors, dict.fromkeys(("device", "node", "network"), 1.0))
