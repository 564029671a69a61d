"""Screen about a plan: what it needs and moves, how long a step takes, what a failure costs, what would gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from platform.boundary.redaction import redact
from platform.config.extensions import shown_settings
from platform.config.fields import Compose, Config
from platform.config.groups import AUTO
from platform.model import build_model
from platform.optimizer.optimizers import kept_numbers
from platform.plan.accelerators import memory_of
from platform.plan.layout import count_of
from platform.plan.plan import Plan
from platform.plan.plan_summary import head_lines, human, shown_seconds
from platform.predict.hardware import Hardware
from platform.predict.memory_budget import device_kind, footprints
from platform.predict.plan_report import aligned, explain, memory_rows, tier_sizes, time_rows
from platform.predict.price import StepPrice
from platform.predict.recovery_price import Known, OwnCosts, failure_price, snapshot_price
from platform.predict.step_price import chosen_hardware, hardware_named, step_price

LINES = 40  # of a screen
PARTS, WARNINGS = 6, 2  # of a step's time, and of a plan's, that are shown at most
MORE = "all of it: --all; as data: --json; beside another plan: --diff A B"


def screen(plan: Plan, found: Mapping[str, Any]) -> str:
    """Format what `explain` found of a plan in at most LINES lines."""
    blocks = [
        head_lines(plan, WARNINGS),
        _memory_block(plan, found),
        _tier_block(found["tiers"]) if plan.mesh.size > 1 else [],
        _time_block(found.get("time")),
    ]
    whole = [*("\n".join(block) for block in blocks if block), *closing(plan, found), MORE]
    lines = "\n\n".join(whole).split("\n")
    return "\n".join(lines if len(lines) <= LINES else filter(None, lines))


def closing(plan: Plan, found: Mapping[str, Any]) -> list[str]:
    """Return the last blocks of a screen: what a failure costs, what limits a plan, what would gain."""
    blocks = _failure_block(plan, found), [*_limit_line(plan, found), *_change_block(found)]
    return ["\n".join(block) for block in blocks if block]


def _memory_block(plan: Plan, found: Mapping[str, Any]) -> list[str]:
    """Return the lines on a worker's memory by kind, beside what its device has."""
    memory = found["memory"]
    where = f", of stage {memory['stage']}" if plan.stages > 1 else ""
    rows = memory_rows(memory)
    if device := found.get("device"):
        share = f"{memory['total'] / device['memory']:.0%} of {device['name']}'s {human(device['memory'])}B"
        rows = [[*row[:2], f"{row[2]}, {share}"] if row[0] == "total" else row for row in rows]
    return [f"memory of the worker that needs most{where}", *aligned(rows)]


def _tier_block(found: Mapping[str, Any]) -> list[str]:
    """Return the lines on bytes by tier."""
    rows = [
        [r["tier"], f"{human(r['bytes'])}B", f"busiest link {human(r['busiest'])}B one way" if r["busiest"] else ""]
        for r in found["rows"]
    ]
    return [f"moved in a step, {tier_sizes(found)}", *aligned(rows)]


def _by_value(pair: tuple[str, int]) -> int:
    """Return the second of a pair, by which it is sorted."""
    return pair[1]


def _time_block(time: Mapping[str, Any] | None) -> list[str]:
    """Return the lines on the seconds of a step; parts beyond PARTS are added up."""
    if not time:
        return []
    parts, rest = time["parts"], {}
    if len(time_rows(time)) > PARTS + 2:  # with the whole step and the run
        largest = sorted(parts, key=parts.__getitem__, reverse=True)[: PARTS - 1]
        rest = {"others": sum(seconds for name, seconds in parts.items() if name not in largest)}
        parts = {name: seconds for name, seconds in parts.items() if name in largest}
    return [f"a step on {time['hardware']}, predicted", *aligned(time_rows({**time, "parts": {**parts, **rest}}))]


def _failure_block(plan: Plan, found: Mapping[str, Any]) -> list[str]:
    """Return the lines on snapshots, and on what the loss of a worker costs."""
    price, failure = found.get("snapshots"), found.get("failures")
    if not price or not failure or plan.mesh.size == 1:
        return []
    every, rows = price["every"], []
    if every and price["bytes"]:
        sent = f"{price['seconds']:.3g} s at cluster.network={price['network']:g} Gbit/s"
        often = "after each step" if every == 1 else f"after {every} steps"
        rows.append(["snapshot", f"{human(price['bytes'])}B", f"of a node {often}, {sent}"])
    groups = f", each in {count_of(failure['communicators'], 'group')}" if failure["communicators"] else ""
    rows.append(["formation", shown_seconds(failure["formation"]), f"of {count_of(plan.mesh.size, 'worker')}{groups}"])
    again = f"and {failure['steps']:g} steps done again" if failure["steps"] else "and all since the last checkpoint"
    if failure["steps"] and (time := found.get("time")):
        again += f" on average, {shown_seconds(failure['steps'] * time['seconds'])}"
    rows.append(["recovery", shown_seconds(failure["recovery"]), again])
    return ["when a worker is lost, estimated", *aligned(rows)]


def _limit_line(plan: Plan, found: Mapping[str, Any]) -> list[str]:
    """Return the line on what limits a plan: memory that is not there, or the longest part of a step."""
    memory, device, time = found["memory"], found.get("device"), found.get("time")
    if device and memory["total"] > device["memory"]:
        lacking = memory["total"] - device["memory"]
        return [f"limited by memory: it does not fit, {human(lacking)}B are lacking"]
    if not time:
        return []
    name, seconds = max(time["parts"].items(), key=_by_value)
    return [f"limited by {_limit_words(plan, name)}: {seconds / time['seconds']:.1%} of a step"]


def _limit_words(plan: Plan, name: str) -> str:
    """Return the words on the part of a step that limits it."""
    again = plan.recompute.kind
    words = {
        "computing": "computing" + (f", recompute={again} included" if again != "none" else ""),
        "bubble": f"the bubble of {plan.stages} stages and {count_of(plan.microbatches, 'microbatch')}",
        "host": "the host, which launches kernels more slowly than they run",
        "optimizer": "the update, of few tokens",
    }
    return words.get(name, name)


def _change_block(found: Mapping[str, Any]) -> list[str]:
    """Return the lines on the changes that would gain most, each as it is typed."""
    changes, time, device = found.get("changes"), found.get("time"), found.get("device")
    if changes is None or not time:
        return []
    fits = not device or found["memory"]["total"] <= device["memory"]
    if not changes:
        return ["no change of one key is known to gain" if fits else "no change of one key makes it fit"]
    rows = [[" ".join(c["typed"]), *_gained(c, time["seconds"])] for c in changes]
    return ["what would gain most" if fits else "what would make it fit", *aligned(rows)]


def _gained(change: Mapping[str, Any], seconds: float) -> Sequence[str]:
    """Return the cells on what a change gains, beside the `seconds` of a step without it."""
    way = "faster" if change["seconds"] <= seconds else "slower"
    needs = f", {human(change['memory'])}B" if change["memory"] else ""
    return f"{abs(1 - change['seconds'] / seconds):.1%} {way}", f"{shown_seconds(change['seconds'])} a step{needs}"


# Two plans side by side: what of their memory, their bytes, their seconds and their failures differs.

Lines = Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]  # explanation -> name and value of each line
Sides = dict[str, tuple[float, float]]  # name of a line -> its value in one plan and in the other
KINDS = ("parameters", "optimizer", "gradients", "activations", "working", "reserved", "host", "total")
SECONDS = ("a step", "failures")  # parts whose values are seconds


class NoExplanation(ValueError):
    """Data that `python -m platform.plan --json` has not written."""


def plan_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Sides]:
    """Return by part the lines that differ in two explanations, or raise NoExplanation if one of them is none."""
    found = {}
    for name, values in DIFFERENCE_PARTS.items():
        here, there = _lines_of(values, one), _lines_of(values, other)
        both = {key: (here.get(key, 0.0), there.get(key, 0.0)) for key in dict.fromkeys((*here, *there))}
        found[name] = {key: sides for key, sides in both.items() if sides[0] != sides[1]}
    return found


def difference_lines(found: Mapping[str, Sides]) -> list[str]:
    """Format the lines that differ between plans A and B as one table, with their ratio."""
    rows: list[Sequence[str]] = [["", "A", "B", "B / A"]]
    for part, sides in found.items():
        shown = shown_seconds if part in SECONDS else lambda n: f"{human(n)}B"
        rows.append([part if sides else f"{part}: alike", "", "", ""])
        rows += [[f"  {name}", shown(a), shown(b), f"{b / a:.3g}" if a else "-"] for name, (a, b) in sides.items()]
    return aligned(rows)


def _lines_of(values: Lines, found: Mapping[str, Any]) -> dict[str, float]:
    """Return the lines of one part of an explanation. Raises NoExplanation for one that is not of this kind."""
    try:
        return {name: float(value) for name, value in values(found)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoExplanation(f"lacks {error}" if isinstance(error, KeyError) else f"{error}") from None


def _memory_bytes(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of the worker that needs most, by kind."""
    yield from ((kind, found["memory"][kind]) for kind in KINDS)


def _tier_bytes(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a step by tier."""
    yield from ((row["tier"], row["bytes"]) for row in found["tiers"]["rows"])


def _collective_bytes(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a step by collective and axes."""
    yield from found["communication"].items()


def _step_seconds(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the seconds of a step by part."""
    yield from found["time"]["parts"].items()
    yield "altogether", found["time"]["seconds"]


def _failure_seconds(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the seconds that a failure costs."""
    yield from ((name, found["failures"][name]) for name in ("formation", "recovery"))


DIFFERENCE_PARTS: Mapping[str, Lines] = {
    "memory of the worker that needs most": _memory_bytes,
    "moved in a step, by tier": _tier_bytes,
    "moved in a step, by collective": _collective_bytes,
    "a step": _step_seconds,
    "failures": _failure_seconds,
}


# All that is said of a plan before it runs: memory, bytes, seconds, what a failure costs, and which changes gain.


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
        from platform.predict.remedies import best_changes

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
