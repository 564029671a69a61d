"""Screen about a plan: what it needs and moves, how long a step takes, what a failure costs, what would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from platform.plan.core.plan import Plan
from platform.plan.language.numbers import count_of
from platform.plan.reports.describe import head_lines, human, shown_seconds
from platform.plan.reports.explain import aligned, memory_rows, tier_sizes, time_rows

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
