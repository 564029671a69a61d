"""Conversion of a step's report into a row of metrics.jsonl (docs/run-directory.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

from platform.cluster.control.forming.context import Generation
from platform.config.fields import Config
from platform.config.ramps.length_ramp import length_at
from platform.costs.parts import REST
from platform.monitor import MetricsRow
from platform.train.protocol.replies import RankRange, StepReport


def metrics_row(
    report: StepReport,
    generation: Generation,
    wall_seconds: float,
    *,
    config: Config,
    stalled: float,
    bubble: dict[str, float] | None,
    val_losses: dict[str, float] | None,
    task_scores: dict[str, float] | None,
    recovery_seconds: float | None,
) -> MetricsRow:
    """Convert rank 0's report on a committed training step, which covers all ranks (see
    `platform.train.step.step_report`), into its row of metrics.jsonl.

    `step_seconds` is `wall_seconds`, the driver's time from sending the step out to the last rank's answer, so that
    dispatch counts; `seconds` are means over the ranks, `comm_bytes` sums, `peak_memory_bytes` maxima. Throughput
    counts this step's tokens; `parts` add up to its seconds; `mfu` is relative to the peak of a worker, None if that is
    unknown. `config`: the run's. `stalled`: seconds for which saving has held up the run since the step before;
    `bubble`: planned and measured pipeline bubble, None without timeline or pipeline; `val_losses`: losses by source of
    the data, "" being all of them, None if no evaluation followed the step; `task_scores`: likewise, by TASK/METRIC;
    `recovery_seconds`: time since the first failure since the step before, None if there was none.
    """
    first, end = report.samples
    tokens_per_second = (end - first) * config.model.length / wall_seconds
    plan = generation.plan.of_length(length_at(config, report.step))
    flops_per_worker = tokens_per_second * plan.flops_per_token / report.world_size
    seconds = report.seconds
    return MetricsRow(
        step=report.step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=report.lr,
        tokens=report.tokens,
        samples=[first, end],
        seconds=seconds | {"checkpoint": seconds["checkpoint"] + stalled} if stalled else seconds,
        peak_memory_bytes=report.peak_memory_bytes,
        world_size=report.world_size,
        step_seconds=wall_seconds,
        tokens_per_second=tokens_per_second,
        tflops_per_worker=flops_per_worker / 1e12,
        mfu=flops_per_worker / generation.peak_flops if generation.peak_flops else None,
        comm_bytes=dict(sorted(report.comm_bytes.items())),
        generation=generation.number,
        **_spreads(report.workers),
        skipped=report.skipped or None,
        loss_scale=report.loss_scale,
        length=plan.sizes["length"] if config.train.length_ramp else None,
        **_parts_of_step(report, generation, wall_seconds, config),
        bubble=bubble,
        val_loss=None if val_losses is None else val_losses[""],
        val_losses={name: loss for name, loss in (val_losses or {}).items() if name} or None,
        task_scores=task_scores,
        recovery_seconds=recovery_seconds,
        layer_grad_norms=report.layer_gradients or None,
        layer_rms=report.layer_activations or None,
        experts=_load(report.routed) if any(report.routed) else None,
        expert_load=report.routed[: len(report.routed) // 2] if any(report.routed) else None,
    )


def _parts_of_step(report: StepReport, generation: Generation, wall_seconds: float, config: Config) -> dict[str, Any]:
    """Return what a row says of the parts of a step, if they were measured: their seconds, which add up to
    `wall_seconds`, and the seconds predicted of a full step, if it is one."""
    if not report.parts:
        return {}
    first, end = report.samples
    full = end - first == config.train.global_batch and length_at(config, report.step) == config.model.length
    rest = wall_seconds - sum(report.parts.values())
    return {
        "parts": {**report.parts, REST: rest},
        "predicted_seconds": generation.predicted_seconds if full else None,
    }


def _spreads(workers: Mapping[str, RankRange]) -> dict[str, Any]:
    """Return what a row says of the spreads over the workers of a step: their numbers, and the ranks at the ends."""
    if not workers:
        return {}
    numbers: dict[str, float] = {}
    ranks: dict[str, int] = {}
    for name, spread in workers.items():
        numbers |= {f"{name}/min": spread.least, f"{name}/median": spread.median, f"{name}/max": spread.most}
        ranks |= {f"{name}/min": spread.least_rank, f"{name}/max": spread.most_rank}
    return {"workers": numbers, "worker_ranks": ranks}


def _load(routed: Sequence[int]) -> dict[str, float]:
    """Return how even the load of experts was in a step, and how much of it was dropped, from `StepReport.routed`."""
    experts = len(routed) // 2
    chosen, taken = sum(routed[:experts]), sum(routed[experts:])
    shares = [n / chosen for n in routed[:experts]]
    entropy = -sum(share * log(share) for share in shares if share)
    evenness = entropy / log(experts) if experts > 1 else 1.0
    return {"dropped": 1 - taken / chosen, "entropy": evenness, "largest": max(shares) * experts}
