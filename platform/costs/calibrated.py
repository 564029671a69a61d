"""Description of a hardware from measurements: what the formulas of `seconds` need, by their least squares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from platform.costs.machine import Hardware, Link
from platform.costs.seconds import group_seconds, tiling
from platform.costs.work import FUSED_BACKWARD

TILES = (8, 16, 32, 64, 128, 256)  # longer edges of the largest tile, of which the best is taken
LEAST = 1e-9  # seconds: of what is too short to be seen in its measurements
Key = tuple[str, tuple[float, ...]]  # what was measured, and its sizes


class Sample(NamedTuple):
    """Measurement of one kind: its sizes, and its seconds on the usual rank."""

    sizes: tuple[float, ...]
    seconds: float


Samples = Mapping[str, Sequence[Sample]]  # kind -> its measurements


def samples_by_kind(timings: Iterable[tuple[str, Sequence[float], float]], usual: Callable = median) -> Samples:
    """Return the measurements of all ranks by kind; of ranks that measured the same, the `usual` one counts."""
    by_key: dict[Key, list[float]] = defaultdict(list)
    for kind, sizes, seconds in timings:
        by_key[kind, tuple(sizes)].append(seconds)
    found: dict[str, list[Sample]] = defaultdict(list)
    for (kind, of), all_seconds in by_key.items():
        found[kind].append(Sample(of, usual(all_seconds)))
    return found


def calibrated(first: Hardware, kernels: Samples, links: Mapping[str, Samples], precision: str) -> Hardware:
    """Return the hardware that explains measurements best. `first`: hardware that gives all else; `kernels`: samples of
    ranks that compute; `links`: samples of groups, by tier, node or network; `precision`: type of the products."""
    [copy] = kernels["copy"]
    found = replace(first, bandwidth=copy.sizes[0] / copy.seconds)
    found = _with_products(found, kernels, precision)
    for tier, samples in links.items():
        reached = replace(found.reached, **{tier: 1.0})
        made = _measured_links(found, tier, samples)
        found = replace(found, **{tier: made}, reached=reached)  # type: ignore[arg-type]
        for (apart, moving), together in samples.get("beside", ()):
            slowed = (together - max(apart, moving)) / min(apart, moving)
            found = replace(found, interference=min(1.0, max(1e-3, slowed)))
    return found


def solution(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factors, none negative, of the `columns` whose sums are nearest to measured seconds, by the squares of
    errors over the seconds: short measurements count, and long ones more."""
    weight = np.array(seconds) ** -0.5
    a, wanted = np.array(columns, dtype=float).T * weight[:, None], np.array(seconds) * weight
    used = list(range(a.shape[1]))
    while True:
        factors = np.linalg.lstsq(a[:, used], wanted, rcond=None)[0]
        if len(used) == 1 or factors.min() >= 0:
            break
        used.pop(int(factors.argmin()))
    found = np.zeros(a.shape[1])
    found[used] = factors
    return [float(x) for x in found]


def _with_products(hardware: Hardware, kernels: Samples, precision: str) -> Hardware:
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
            left = seconds - (0.0 if hardware.ahead else reading)
            if left > seconds / 4 and (not hardware.ahead or reading < seconds / 2):
                shares = [
                    tiling(int(a), int(b), 1, hardware.processors, tile) for a, b in ((m, n), (m, k), (n, k))
                ]  # of the product, and of both gradients
                flops = 2 * m * n * k
                sums = sum(flops / share / inner for share, inner in zip(shares, (k, n, m), strict=True))
                rows.append((sum(flops / share for share in shares), sums, 1.0, left))
        *columns, seconds_left = zip(*rows, strict=True)
        factors = solution(columns, seconds_left)
        said = np.array(columns).T @ factors
        fits.append((float(np.mean((said / seconds_left - 1) ** 2)), -tile, factors))
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


def _measured_links(hardware: Hardware, tier: str, samples: Samples) -> Link:
    """Return the links of a tier, node or network, as messages find them, and as each kind of collective does."""
    kinds = {
        op: _links_of_kind(hardware, tier, op, found) for op, found in samples.items() if op not in ("send", "beside")
    }
    sent = samples["send"]
    latency, per_byte = solution([[1.0] * len(sent), [s.sizes[1] for s in sent]], [s.seconds for s in sent])
    message = Link(1 / max(per_byte, 1e-15), max(LEAST, latency), max(LEAST, latency))
    return replace(message, kinds=kinds)


def _links_of_kind(hardware: Hardware, tier: str, op: str, samples: Sequence[Sample]) -> Link:
    """Return the links of a tier as one kind of collective finds them: with the columns that the formula gives for a
    byte, a latency and a hop alone. Of groups of one size the latency is all that is not bytes."""
    none = Link(1e30, LEAST**2, LEAST**2)
    alone = [replace(none, bandwidth=1.0), replace(none, latency=1.0), replace(none, hop=1.0)]
    reached = replace(hardware.reached, node=1.0, network=1.0)
    columns = []
    for link in alone:
        made = replace(hardware, node=link, network=link, reached=reached)
        seated = [(s.sizes[1], s.sizes[0], s.sizes[0] if tier == "node" else 1) for s in samples]
        columns.append([float(group_seconds(op, size, n, here, made)) for size, n, here in seated])
    seconds = [s.seconds for s in samples]
    if len({s.sizes[0] for s in samples}) > 1:
        per_byte, latency, hop = solution(columns, seconds)
    else:
        per_byte, latency = solution(columns[:2], seconds)
        hop = 0.0
    return Link(1 / max(per_byte, 1e-15), max(LEAST, latency), max(LEAST, hop))
