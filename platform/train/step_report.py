"""Aggregation of the ranks' step reports by the workers themselves: the driver gets one report of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from statistics import median_low

import torch

from platform.plan.chunks import layer_of_parameter
from platform.plan.operation_plan import collective_label
from platform.plan.plan import Plan
from platform.plan.plan_summary import BUBBLE, COMPUTING, DATA, OPTIMIZER, SNAPSHOT, STAGE, waiting_part_name
from platform.plan.step_collectives import step_collectives
from platform.runtime.communicator import Communicator
from platform.runtime.parallel_ops import is_due
from platform.train.rank_parameters import CollectiveBandwidths, compute_rank_ranges
from platform.train.replies import GAUGES, RankRange, SlowRank, StepReport, Taken
from platform.train.trainer import SECTIONS

PASSES = ("forward", "backward")
OWN_WORK = ("data", *PASSES, "optimizer", "other")  # sections in which a rank does not wait for others


def add_unaccounted_seconds(report: StepReport, seconds: float) -> None:
    """Count what a rank's whole step took beyond the trainer's part of it as `other`, as extensions may work there."""
    remainder = max(0.0, seconds - report.step_seconds)
    report.seconds["other"] += remainder
    report.step_seconds += remainder


class ReportCombiner:
    """Combines every rank's report on a training step into one on rank 0, through `communicator`, so that the driver
    reads a single one. A rank whose own work (without waiting for others) takes more than `slow` times the median of
    its pipeline stage is reported as slow; `slow` = 0 reports none. `layers`: monitor.layers, steps between reports of
    the sizes of gradients and activations by layer. `reach`: axes of collectives -> the widest tier of the cluster that
    their groups span."""

    def __init__(
        self, plan: Plan, communicator: Communicator, slow: float, layers: int = 0, reach: Mapping[str, str] = {}
    ):
        """Prepare to combine ranks' step reports. `slow`: ratio that makes a rank slow; `layers`: monitor.layers;
        `reach`: axes -> tier."""
        self._communicator, self._slow, self._every = communicator, slow, layers
        self._of_stage: list[list[int]] = [[] for _ in range(plan.num_stages)]  # ranks
        for rank in range(plan.mesh.world_size):
            self._of_stage[plan.mesh.rank_coordinates(rank)["stage"]].append(rank)
        # times numbers by rank: by stage
        self._mean = torch.zeros(plan.num_stages, plan.mesh.world_size, dtype=torch.float64)
        for stage, ranks in enumerate(self._of_stage):
            self._mean[stage, ranks] = 1 / len(ranks)
        collectives = [c for p in plan.plans_of_lengths for _, c, _ in step_collectives(p)]
        moved = {collective_label(c.op, plan.mesh.order_axes(c.axes)) for c in collectives}
        self._moved = sorted(moved)
        self._waits = sorted({key.partition("/")[2] for key in moved} - {STAGE})  # messages: in the bubble
        self._layers, self._routed = list_parameter_layers(plan), 2 * plan.sizes.get("experts", 0)
        self._bandwidths = CollectiveBandwidths(plan.mesh, self._moved, self._waits, reach)
        self._gauges: Mapping[str, float] | None = None  # of rank 0, when the ranges were taken last
        self._workers: dict[str, RankRange] = {}

    def combine_reports(self, own_report: StepReport) -> StepReport | Taken:
        """Combine the ranks' reports on a training step, of which `own_report` is this rank's, returned by
        `Trainer.step`; all ranks call it together. Return on rank 0 its own report with `seconds` as means over the
        ranks, `comm_bytes` and `routed` as sums, `peak_memory_bytes` as the maximum, the slow ranks, the parts of the
        step, the spreads of gauges, and sizes by layer if they are due; on other ranks an acknowledgement."""
        seconds, moved = own_report.seconds, own_report.comm_bytes
        assert moved.keys() <= set(self._moved), f"not planned: {moved.keys() - set(self._moved)}"
        numbers = [own_report.peak_memory_bytes, *(seconds[s] for s in SECTIONS)]
        numbers += [own_report.waits.get(axes, 0.0) for axes in self._waits]
        numbers += [moved.get(key, 0) for key in self._moved]
        numbers += [own_report.gauges.get(name, nan) for name in GAUGES]
        numbers += own_report.routed or [0] * self._routed
        if is_due(self._every, own_report.step):
            for squares in (own_report.layer_gradients, own_report.layer_activations):
                numbers += [squares.get(layer, 0.0) for layer in self._layers]
        ranks = self._communicator.collect_numbers(torch.tensor(numbers, dtype=torch.float64))
        if ranks is None:
            return Taken(own_report.step, own_report.timeline)
        sizes = [1, len(SECTIONS), len(self._waits), len(self._moved), len(GAUGES), self._routed]
        parts = ranks.split([*sizes, ranks.shape[1] - sum(sizes)], 1)
        memory, sections, waits, sums, gauges, routed, of_layers = parts
        total = dict(zip(self._moved, map(int, sums.sum(0).tolist()), strict=True))
        of_gradients, of_activations = self._layer_norms(own_report.samples, of_layers.sum(0).tolist())
        if own_report.gauges != self._gauges:  # else there are no new readings
            rates = self._bandwidths.compute_bandwidths(sums, waits, sections.sum(1))
            names = [*GAUGES, *(f"bandwidth/{tier}" for tier in self._bandwidths.tiers)]
            self._gauges, self._workers = own_report.gauges, compute_rank_ranges(names, torch.cat([gauges, rates], 1))
        return replace(
            own_report,
            seconds=dict(zip(SECTIONS, sections.mean(0).tolist(), strict=True)),
            comm_bytes={key: n for key, n in total.items() if n},
            peak_memory_bytes=int(memory.max()),
            slow=self._find_slow_ranks(sections.tolist()) if self._slow else [],
            waits={},
            parts=self._step_parts((self._mean @ ranks[:, 1 : 1 + sizes[1] + sizes[2]]).tolist()),
            layer_gradients=of_gradients,
            layer_activations=of_activations,
            routed=list(map(int, routed.sum(0).tolist())),
            gauges={},
            workers=self._workers,
        )

    def _layer_norms(self, samples: tuple[int, int], squares: list[float]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the norms of gradients and the root mean squares of activations in a training step, each layer ->
        number. `samples`: the step's first sample, and the next step's; `squares`: sums of squares over all ranks,
        gradients then activations, by layer; empty if none are due. Layers whose activations no rank has seen are left
        out."""
        if not squares:
            return {}, {}
        count, sequences = len(self._layers), samples[1] - samples[0]
        norms = {layer: x**0.5 for layer, x in zip(self._layers, squares[:count], strict=True)}
        seen = zip(self._layers, squares[count:], strict=True)
        return norms, {layer: (x / sequences) ** 0.5 for layer, x in seen if x}

    def _step_parts(self, stages: list[list[float]]) -> dict[str, float]:
        """Return the seconds of the parts of a training step, as means over the ranks of the stage that computes
        longest. `stages`: means of seconds of each stage, by section of the clock, then by axes of collectives."""
        computing = [SECTIONS.index(section) for section in PASSES]
        paces = max(stages, key=lambda seconds: sum(seconds[i] for i in computing))
        mean = dict(zip(SECTIONS, paces, strict=False))
        waited = zip(map(waiting_part_name, self._waits), paces[len(SECTIONS) :], strict=True)
        parts = {COMPUTING: sum(mean[section] for section in PASSES), **dict(waited), BUBBLE: mean["bubble"]}
        parts[OPTIMIZER] = mean["optimizer"] + mean["reduce"]
        return parts | {DATA: mean["data"], SNAPSHOT: mean["checkpoint"]}

    def _find_slow_ranks(self, sections: list[list[float]]) -> list[SlowRank]:
        """Return the slow ranks of a training step, by each rank's seconds in the `sections` of the clock, each with
        the section of its own work that it is most behind its stage in."""
        slow_ranks, own_sections = [], [SECTIONS.index(section) for section in OWN_WORK]
        work = [sum(seconds[i] for i in own_sections) for seconds in sections]
        for ranks in self._of_stage:
            usual = max(1e-9, median_low([work[rank] for rank in ranks]))
            for rank in (rank for rank in ranks if work[rank] > self._slow * usual):
                behind = {i: sections[rank][i] - median_low([sections[r][i] for r in ranks]) for i in own_sections}
                most = SECTIONS[max(behind, key=lambda i: behind[i])]
                slow_ranks.append(SlowRank(rank, work[rank] / usual, most))
        return sorted(slow_ranks)


def list_parameter_layers(plan: Plan) -> list[str]:
    """Return the layers of which a worker reports sizes with a step: of a whole plan's parameters, in order."""
    return list(dict.fromkeys(layer_of_parameter(p.name) for p in plan.parameters))
