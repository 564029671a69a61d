"""The doctor's checks as data: what each measures on a worker, and what makes a measurement bad, beside the worker's
peers or by itself.

`groups_by_check` divides workers for measurements of connections: rounds of pairs in which every worker has a partner,
on another node where it can, and all workers of each node.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from math import inf
from typing import NamedTuple

from platform.plan.plan_summary import format_number
from platform.train.replies import Findings


class Bound(NamedTuple):
    """Bound of a check on one kind of device. A measurement is bad if it is worse than `worst`; or if it is `apart`
    times worse than the median of the worker's peers, unless it is `fine` or better."""

    apart: float
    worst: float
    fine: float


@dataclass(frozen=True)
class DoctorCheck:
    """Check of the doctor on a worker: it measures a number in `unit`, of which more is better if `more`. `bounds`:
    bounds by the worker's device, cpu | cuda; without one it is not judged. `remedy`: things to look at if it is bad.
    """

    name: str
    what: str
    unit: str
    more: bool
    bounds: Mapping[str, Bound]
    remedy: str

    def is_better(self, value: float, other: float) -> bool:
        """Return True if a worker's measurement by this check of the doctor's is better than another's, `other`."""
        return value > other if self.more else value < other

    def find_fault(self, value: float, usual: float, device: str) -> str:
        """Return why a worker's measurement by this check of the doctor's is bad, in a phrase, "" if it is not.
        `usual`: the median of the other workers' measurements; `device`: cpu | cuda."""
        if device not in self.bounds:
            return ""
        bound = self.bounds[device]
        bound, shown = self.bounds[device], self.format_measurement(value)
        if bound == EXACT and value:
            return shown
        if self.is_better(bound.worst, value):
            return f"{shown}, where {self.format_measurement(bound.worst)} is the {'least' if self.more else 'most'}"
        if not self.is_better(bound.fine, value):
            return ""
        limit = usual / bound.apart if self.more else usual * bound.apart
        apart = self.is_better(limit, value)
        return f"{shown}, where its peers have {self.format_measurement(usual)}" if apart else ""

    def format_measurement(self, value: float) -> str:
        """Format a measurement by this check of the doctor's with its unit, for people."""
        return f"{format_number(value)}{self.unit}" if self.unit.endswith("/s") else f"{value:.3g} {self.unit}"

    def format_cell(self, value: float | None) -> str:
        """Format a worker's measurement for the doctor's table, in the column of this check; "-" for None."""
        if value is None:
            return "-"
        return self.format_measurement(value) if self.unit.endswith("/s") else f"{value:.3g}"


EXACT = Bound(inf, 0.0, inf)  # of what has one right value
# Seconds are the CPU's on a CPU, the device's on a GPU: neither counts what others do on the machine. What goes
# over the network or to storage takes time by the clock: there, what is fine is left alone, and apart means far apart.
CHECKS = (
    DoctorCheck(
        "gemm", "products of square matrices", "FLOP/s", True,
        {"cpu": Bound(3.0, 1e7, inf), "cuda": Bound(1.4, 5e12, inf)},
        "clocks, power and temperature of the device; another process on it",
    ),
    DoctorCheck(
        "peak", "its products, as a share of what the GPU's data sheet says", "of the peak", True,
        {"cuda": Bound(1.4, 0.2, 0.5)},
        "clocks, power and temperature of the GPU; another process on it",
    ),
    DoctorCheck(
        "wrong", "numbers in these products and copies that are wrong", "wrong numbers", False,
        {"cpu": EXACT, "cuda": EXACT},
        "the device computes or keeps wrong numbers: take it out of service",
    ),
    DoctorCheck(
        "memory", "copies within the device's memory", "B/s", True,
        {"cpu": Bound(6.0, 1e7, inf), "cuda": Bound(1.4, 1e10, inf)},
        "the device's memory and its clocks; another process on it",
    ),
    DoctorCheck(
        "free", "memory of the GPU that is free", "of its memory", True,
        {"cuda": Bound(1.5, 0.5, 0.8)},
        "a process that was left behind on the GPU (nvidia-smi)",
    ),
    DoctorCheck(
        "ecc", "uncorrected errors of the GPU's memory since the machine started", "errors", False, {"cuda": EXACT},
        "a reset of the GPU, or its replacement",
    ),
    DoctorCheck(
        "rows", "rows of the GPU's memory that wait for their replacement, or have none", "kinds of rows", False,
        {"cuda": EXACT},
        "a reset of the GPU (nvidia-smi --gpu-reset); its replacement, if a remapping has failed",
    ),
    DoctorCheck(
        "link", "all-gathers with one other worker at a time; the best of its partners", "B/s", True,
        {"cpu": Bound(10.0, 1e5, 5e7), "cuda": Bound(2.0, 1e8, inf)},
        "cable, switch port and network interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)",
    ),
    DoctorCheck(
        "node", "all-reduces with all other GPUs of its node at once", "B/s", True,
        {"cuda": Bound(2.0, 1e8, inf)},
        "NVLink (nvidia-smi nvlink -s), the fabric manager, and PCIe",
    ),
    DoctorCheck(
        "write", "a file written to the checkpoint storage, and flushed", "B/s", True,
        {device: Bound(20.0, 1e4, 2e7) for device in ("cpu", "cuda")},
        "mount, quota and free space of the storage on that node",
    ),
    DoctorCheck(
        "read", "that file, read back", "B/s", True,
        {device: Bound(20.0, 1e4, 2e7) for device in ("cpu", "cuda")},
        "mount of the storage on that node",
    ),
    DoctorCheck(
        "clock", "how far its clock is, at least, from the driver's", "s", False,
        {device: Bound(inf, 1.0, inf) for device in ("cpu", "cuda")},
        "time synchronisation of that node (chrony, ntpd)",
    ),
)  # fmt: skip
BY_NAME = {check.name: check for check in CHECKS}


def merge_findings(first: Findings, again: Findings) -> Findings:
    """Combine two results of the doctor's checks on one worker into one: keep the better measurement of each check, as
    other load on a machine only makes it worse, but the worse one where one value alone is right; keep an error only if
    it came twice."""
    readings = dict(first.readings)
    for name, value in again.readings.items():
        check = BY_NAME[name]
        keep_better = EXACT not in check.bounds.values()
        if name not in readings or check.is_better(value, readings[name]) == keep_better:
            readings[name] = value
    errors = {name: why for name, why in again.errors.items() if name in first.errors}
    return Findings(readings, errors, {**first.facts, **again.facts})


def judge_workers(
    findings_by_number: Mapping[int, Findings], device: str
) -> tuple[dict[int, dict[str, str]], dict[str, str]]:
    """Judge workers by the doctor's checks, each beside the others. Return two results: the bad checks of each worker,
    as number -> {check: why}, {} for a sound one; and the checks that are bad on more than half of them, as check ->
    why, which point to a common cause and count against none. `findings_by_number`: measurements by worker's number;
    `device`: cpu | cuda."""
    examined = findings_by_number.values()
    readings = {name: sorted(f.readings[name] for f in examined if name in f.readings) for name in BY_NAME}
    names = {name for f in examined for name in f.facts}
    facts = {name: Counter(f.facts.get(name, "none") for f in examined).most_common(1)[0] for name in names}
    usual = {name: fact for name, (fact, times) in facts.items() if 2 * times > len(examined)}
    faults_by_number = {n: dict(_find_faults(f, readings, usual, device)) for n, f in findings_by_number.items()}
    fault_counts = Counter(name for bad in faults_by_number.values() for name in bad)
    shared = {name for name, times in fault_counts.items() if 2 * times > len(examined)}
    own_faults = {n: {name: bad[name] for name in bad if name not in shared} for n, bad in faults_by_number.items()}
    common = {name: next(bad[name] for bad in faults_by_number.values() if name in bad) for name in sorted(shared)}
    return own_faults, common


def _find_faults(
    findings: Findings, readings: Mapping[str, list[float]], usual: Mapping[str, str], device: str
) -> Iterator[tuple[str, str]]:
    """Yield (check, why) for each of the doctor's checks that one worker fails: each error, bad measurement and unusual
    fact. `findings`: its findings; `readings`: sorted measurements of all workers, its own included, by check; `usual`:
    the facts that more than half of them share; `device`: cpu | cuda."""
    yield from findings.errors.items()
    for name, x in findings.readings.items():
        if name in BY_NAME and (why := BY_NAME[name].find_fault(x, _median_of_others(x, readings[name]), device)):
            yield name, why
    for name, fact in usual.items():
        if (its := findings.facts.get(name, "none")) != fact:
            yield name, f"{its}, where most have {fact}"


def _median_of_others(value: float, ordered: list[float]) -> float:
    """Return the median of other workers' measurements by a check: `ordered` without one `value`, or `value` alone."""
    others, position = len(ordered) - 1, bisect_left(ordered, value)
    if not others:
        return value
    low, high = (ordered[i + (i >= position)] for i in ((others - 1) // 2, others // 2))
    return (low + high) / 2


def groups_by_check(nodes: Sequence[str], partners: int, gpus: bool) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Return the groups of ranks that a check of the doctor's measures at once, as (check, groups) for every round."""
    pairs: list[tuple[str, list[tuple[int, ...]]]] = [("link", [*each]) for each in pair_rounds(nodes, partners)]
    by_node = [tuple(rank for rank, its in enumerate(nodes) if its == node) for node in dict.fromkeys(nodes)]
    node_groups = [ranks for ranks in by_node if len(ranks) > 1]
    return [*pairs, *([("node", node_groups)] if gpus and node_groups else [])]


def pair_rounds(nodes: Sequence[str], most: int) -> list[list[tuple[int, int]]]:
    """Return up to `most` rounds of pairs of ranks, for the doctor's check of the links between workers: in each round
    a rank is in one pair at most, and no pair comes twice. `nodes`: each rank's node. The n-th workers of all nodes are
    partners of each other; workers without such a partner, as on a single node, are partners of each other. So a rank
    has several partners, and a slow one does not make all of them look slow.

    >>> pair_rounds(["a", "a", "b", "b"], 3)
    [[(0, 2), (1, 3)]]
    >>> pair_rounds(["a", "a", "a"], 2)
    [[(1, 2)], [(0, 2)]]
    """
    slots: list[list[int]] = []
    for rank, node in enumerate(nodes):
        slot = nodes[:rank].count(node)
        slots += [[] for _ in range(slot + 1 - len(slots))]
        slots[slot].append(rank)
    groups = [*slots, [rank for slot in slots if len(slot) == 1 for rank in slot]]
    together = zip_longest(*(_pair_all(group) for group in groups if len(group) > 1), fillvalue=())
    return [[pair for pairs in each for pair in pairs] for each in islice(together, most)]


def _pair_all(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the rounds of pairs in which each of `ranks` meets every other once, for the doctor's check of the link
    between them (the circle method); of an odd number of ranks, one has no partner in each round."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    pairings = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairings.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return pairings
