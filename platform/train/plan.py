"""From the configuration to the plan, with every violation at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from platform.config import Config, ConfigError
from platform.model import build as build_model
from platform.plan.ops import Recompute
from platform.plan.plan import IllegalPlan, Plan, build
from platform.plan.scheme import compose
from platform.train.pipeline import schedule_of


def make_plan(config: Config, workers: int | None = None, stage_of: Sequence[int] | None = None) -> Plan:
    """The plan of a run. `workers`: how many there are, where parallel.data is -1. `stage_of`: the stage of every model
    chunk, from the schedule if None.

    Raises ConfigError with one line per violation.
    """
    tensor, branch = asdict(config.tensor), asdict(config.branch)
    inner = 1
    for _, n in compose(tensor, branch, 1).axes:
        inner *= n
    inner *= config.pipeline.stages
    data, train = config.parallel.data, config.train
    if data == -1:
        data = (workers or inner) // inner
        if data < 1 or (workers or inner) % inner:
            raise ConfigError(
                f"parallel.data=-1: {workers} workers are not a multiple of {inner}, the other axes' product"
            )
    together = train.microbatch * data
    if train.global_batch % together:
        low = train.global_batch // together * together
        nearest = " or ".join(str(b) for b in (low, low + together) if b)
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not a multiple of train.microbatch x parallel.data ="
            f" {train.microbatch} x {data}; nearest legal: {nearest}"
        )
    microbatches = train.global_batch // together
    try:
        return build(
            build_model(config.model),
            compose(tensor, branch, data),
            data=data,
            microbatch=train.microbatch,
            microbatches=microbatches,
            stage_of=schedule_of(config, data).placement if stage_of is None else stage_of,
            recompute=Recompute(config.recompute, config.recompute_every),
            scatter_gather=config.pipeline.scatter_gather,
            precision=config.precision,
            zero=config.parallel.zero,
            dropout=config.model.dropout,
        )
    except IllegalPlan as error:
        raise ConfigError(error.violations) from None
