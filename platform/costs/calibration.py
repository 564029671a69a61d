"""Calibration of a cluster, apart from its workers: who measures with whom, and the text of the hardware's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from math import log
from typing import NamedTuple

from platform.costs.calibrated import Sample, Samples, calibrated, samples_by_kind, solution
from platform.costs.fit import fit
from platform.costs.machine import LINK, Hardware, Link
from platform.costs.price import price_of
from platform.costs.step_work import StepWork
from platform.plan.memory.hardware import accelerator

TIERS = ("node", "network")
Timings = Sequence[tuple[str, Sequence[float], float]]  # of a rank: kind, sizes, seconds


class Round(NamedTuple):
    """Round of measurements: of `kernels`, or of collectives of a tier, by `groups` of as many ranks each, all at the
    same time."""

    tier: str
    groups: Sequence[Sequence[int]]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the ranks of a group, and the number of groups."""
        return len(self.groups[0]), len(self.groups)

    @property
    def seats(self) -> list[int]:
        """Return the ranks in the order of a mesh of that shape: the first of all groups, the second, ..."""
        return [group[i] for i in range(len(self.groups[0])) for group in self.groups]


def calibration_rounds(nodes: Sequence[str]) -> list[Round]:
    """Return the rounds of a calibration by ranks on these `nodes`: inside each node, and between the n-th ranks of all
    nodes, in pairs and altogether. Nodes of more ranks than the smallest have some that wait.

    >>> [(r.tier, r.groups) for r in calibration_rounds(["a", "a"])]
    [('kernels', [[0, 1]]), ('node', [[0, 1]])]
    """
    by_node = [[rank for rank, its in enumerate(nodes) if its == node] for node in dict.fromkeys(nodes)]
    least = min(map(len, by_node))
    inside = [ranks[:least] for ranks in by_node]
    across = [list(ranks) for ranks in zip(*inside, strict=True)]
    found = [Round("kernels", [[*range(len(nodes))]])]
    for tier, groups in zip(TIERS, (inside, across), strict=True):
        if (size := len(groups[0])) > 1:
            pairs = [group[i : i + 2] for group in groups for i in range(0, size - 1, 2)]
            found += [Round(tier, pairs)] + [Round(tier, groups)] * (size > 2)
    return found


class Seen(NamedTuple):
    """Circumstances of a calibration: the `date`, the `precision` of its products, the name of its `device`, the ranks
    of each of the `nodes`, and the name of the hardware (`like`) that gives all that was not measured."""

    date: str
    precision: str
    device: str
    nodes: Mapping[str, int]
    like: str


def hardware_of_rounds(
    first: Hardware, measured: Sequence[tuple[Round, Sequence[Timings]]], seen: Seen, steps: Sequence[StepWork]
) -> tuple[Hardware, set[str]]:
    """Return the hardware that the measurements of all rounds describe, each round with its ranks' timings, and the
    tiers that they say something of. `first`: gives all else; `steps`: the work of `step_configs`. Collectives took as
    long as on the rank that was last."""
    by_tier: dict[str, list[tuple[str, Sequence[float], float]]] = {}
    for one, timings in measured:
        by_tier.setdefault(one.tier, []).extend(timing for its in timings for timing in its)
    links: Mapping[str, Samples] = {tier: samples_by_kind(by_tier[tier], max) for tier in TIERS if tier in by_tier}
    if len(seen.nodes) > 1:
        first = replace(first, ranks=min(seen.nodes.values()))
    kernels = samples_by_kind(by_tier["kernels"])
    found = _with_steps(calibrated(first, kernels, links, seen.precision), kernels["step"], steps)
    return found, {*links}


def _with_steps(hardware: Hardware, samples: Sequence[Sample], steps: Sequence[StepWork]) -> Hardware:
    """Return the hardware with the host's seconds for a kernel, by which steps of tiny microbatches differ, and the
    share of memory's bandwidth with which a usual step takes as long as it was measured: kernels read and write more in
    a step than alone, into memory that they have not just used. `steps`: the work of the `samples`."""
    seconds = [sample.seconds for sample in sorted(samples)]
    kernels = [
        work.plan.microbatches * sum(n * part.kernels for p in (*work.forward, *work.backward) for part, n in p.parts)
        for work in steps
    ]
    launch, _ = solution([kernels[:-1], [1.0] * (len(kernels) - 1)], seconds[:-1])
    hardware = replace(hardware, launch=max(1e-9, launch))

    def errors(constants: Mapping[str, float]) -> list[float]:
        """Return the logarithm of predicted over measured seconds of the usual step."""
        return [log(price_of(steps[-1], hardware.with_constants(constants)).seconds / seconds[-1])]

    reached = fit(errors, {"memory": hardware.reached.memory})
    return hardware.with_constants({"memory": min(1.5, reached["memory"])})


def as_file(h: Hardware, tiers: Set[str], seen: Seen) -> str:
    """Return the text of a hardware's file, each number with how it was found; `tiers`: tiers that were measured."""
    here, there = f"measured {seen.date}", f"not measured: of {seen.like}"
    on_gpu = h.ahead
    peaks = ", ".join(f"{precision}: {rate:.4g}" for precision, rate in h.peaks.items())
    where = ", ".join(f"{node} {count}" for node, count in seen.nodes.items())
    lines = [
        f"# By python -m platform.plan calibrate, {seen.date}; {seen.device}; workers on each node: {where}.",
        f"accelerator: {found.name if (found := accelerator(seen.device)) else repr('')}",
        f"memory: {h.memory:.4g} # {'bytes of the device' if on_gpu else there}",
        f"peaks: {{{peaks}}} # {'data sheet, or ' if on_gpu else ''}{here}: square products, all workers at once",
        f"bandwidth: {h.bandwidth:.4g} # {here}: a copy, read and written, by all workers at once",
        f"processors: {h.processors} # {'of the device' if on_gpu else 'a core'}",
        f"tile: {h.tile:.4g} # {'usual' if on_gpu else here + ': fits products by shape best'}",
        f"fill: {h.fill:.4g} # {here}: products with short sums",
        f"launch: {h.launch:.4g} # {here}: tiny steps of more and of fewer microbatches, by kernel",
        f"ahead: {'true' if h.ahead else 'false'} # {'as GPUs are' if on_gpu else 'a core does one after the other'}",
        f"interference: {h.interference:.3g} # {here if tiers else there}: products beside an all-gather",
    ]
    for tier, link in (("node", h.node), ("network", h.network)):
        lines.append(f"{tier}: # {here + ': messages, and kinds of collectives' if tier in tiers else there}")
        lines += [f"  ranks: {h.ranks}"] if tier == "node" else []
        lines += [f"  {line}" for line in _of_link(link)]
        lines += ["  kinds:"] if link.kinds else []
        lines += [f"    {op}: {{{', '.join(_of_link(kind))}}}" for op, kind in link.kinds.items()]
    lines += [f"storage: {h.storage:.4g} # {there}", "reached:"]
    for name, how in (
        ("products", "products by shape"),
        ("attention", "attention in one kernel"),
        ("memory", "a step of two layers"),
    ):
        lines.append(f"  {name}: {getattr(h.reached, name):.3g} # {here}: {how}, in {seen.precision}")
    for tier in TIERS:
        text = f"{here}: in the bandwidths above" if tier in tiers else there
        lines.append(f"  {tier}: {getattr(h.reached, tier):.3g} # {text}")
    return "\n".join(lines) + "\n"


def _of_link(link: Link) -> list[str]:
    """Return the numbers of a tier's links as they stand in a file."""
    return [f"{key}: {getattr(link, key):.4g}" for key in LINK]
