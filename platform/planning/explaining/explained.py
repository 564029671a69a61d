"""All that is said of a plan before it runs: memory, bytes, seconds, what a failure costs, and which changes gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from typing import Any

from platform.boundary.redaction import redact
from platform.config.extending.own_settings import shown_settings
from platform.config.fields import Compose, Config
from platform.config.groups.execution_group import AUTO
from platform.costs.machine import Hardware
from platform.costs.price import StepPrice
from platform.model import build_model
from platform.optimizer.optimizers import kept_numbers
from platform.plan.core.plan import Plan
from platform.plan.memory.hardware import memory_of
from platform.plan.reports.explain import explain
from platform.planning.explaining.failure_price import failure_price
from platform.planning.memory_budget import device_kind, footprints
from platform.planning.snapshot_price import Known, OwnCosts, snapshot_price
from platform.planning.step_price import chosen_hardware, hardware_named, step_price


def explained(
    config: Config,
    plan: Plan,
    tiers: Mapping[str, int],
    hardware: Hardware,
    named: bool = False,
    tokens: float | None = None,
    composed: Compose | None = None,
) -> dict[str, Any]:
    """Return what there is to say of a configuration's plan, as JSON-able data. `tiers`: workers in one of each, as of
    `explain`; `hardware`: the one for which steps are priced, `named` by the user; `tokens`: the number of a run's, by
    default as its steps have; `composed`: the function that gives the configuration with a change, for the changes that
    would gain most."""
    needed, step = footprints(config, plan), step_price(config, plan, hardware)
    stated = named or bool(chosen_hardware(config))
    device = _stated_device(config, hardware if stated else None)
    sure = stated or hardware_named(config.cluster.gpu)
    known = Known(device_kind(config), hardware if sure else None, OwnCosts(step=step.seconds))
    snapshot, every = snapshot_price(config, plan, min(tiers.values()), known), config.elastic.snapshot_every
    every = snapshot.interval if every == AUTO else every
    more: dict[str, Any] = {
        "time": _time_data(config, plan, hardware, step, tokens),
        "device": device,
        "failures": failure_price(config, plan, snapshot, int(every))._asdict(),
        "settings": dict(redact(shown_settings(config))),
    }
    found = explain(
        plan,
        build_model(config.model),
        moments=kept_numbers(config),
        tiers=tiers,
        dropout=config.model.dropout,
        footprints=needed,
        snapshots={**snapshot._asdict(), "every": every, "network": config.cluster.network},
        more=more,
    )
    if composed and not config.plan.search:
        from platform.planning.search.nearby import best_changes

        most, memory = max(f.total for f in needed), device["memory"] if device else inf
        changes = best_changes(config, composed, step.seconds, most, memory, hardware)
        found["changes"] = [asdict(change) for change in changes]
    return found


def _stated_device(config: Config, hardware: Hardware | None) -> dict[str, Any] | None:
    """Return the name and the bytes of a worker's device, as far as the configuration or the `hardware` says."""
    c = config.cluster
    if c.device_memory:
        return {"name": "cluster.device_memory", "memory": c.device_memory * 1e9}
    if memory := memory_of(c.gpu):
        return {"name": c.gpu, "memory": memory}
    return {"name": hardware.name, "memory": hardware.memory} if hardware else None


def _time_data(config: Config, plan: Plan, hardware: Hardware, step: StepPrice, tokens: float | None) -> dict[str, Any]:
    """Return what `explain` says of the seconds of a step on a hardware, and of a run on so many `tokens`."""
    tokens = tokens or config.train.steps * plan.tokens_per_step
    return {
        "hardware": hardware.name,
        **asdict(step),
        "parts": step.parts,
        "mfu": step.mfu,
        "speed": step.speed,
        "days": {"tokens": tokens, "days": step.days(tokens)},
    }
