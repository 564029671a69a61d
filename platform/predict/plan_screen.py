"""Screen about a plan: what it needs and moves, how long a step takes, what a failure costs, what would gain
(`explain_config`); and two plans side by side, with all that differs (`differing_predictions_by_part`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from platform.boundary.redaction import redact_secrets
from platform.boundary.terminal import align_rows
from platform.config.extensions import flatten_own_settings
from platform.config.fields import Config
from platform.config.groups import AUTO
from platform.config.key import format_duration
from platform.model import build_model
from platform.optimizer.optimizers import (
    count_states_per_element,
    reason_against_early_update,
    reason_against_passes_ahead,
)
from platform.plan.accelerators import nominal_memory
from platform.plan.layout import format_count
from platform.plan.plan import Plan
from platform.plan.plan_summary import format_number, format_seconds, head_lines
from platform.plan.step_collectives import may_compile
from platform.plan.whole_blocks import describe_blocks, reasons_against_whole_blocks
from platform.predict.async_choice import describe_async_products
from platform.predict.hardware import Hardware
from platform.predict.memory_budget import device_kind, predict_footprints
from platform.predict.pair_choice import describe_pairs
from platform.predict.plan_report import (
    explain_plan,
    find_error_bar,
    format_tier_sizes,
    format_time_title,
    memory_rows,
    time_rows,
)
from platform.predict.price import StepPrice
from platform.predict.recorded_passes import reason_against_graphs
from platform.predict.recovery_price import Known, MeasuredCosts, checkpoint_price, failure_price, snapshot_price
from platform.predict.step_price import find_gpu_hardware, read_chosen_hardware, step_price

LINES = 40  # of a screen
MOST_BLOCKS = 3  # lines on compiled blocks
PARTS, WARNINGS = 6, 2  # of a step's time, and of a plan's, that are shown at most
MORE = "all of it: --all; as data: --json; beside another plan: --diff A B"


def format_screen(plan: Plan, explanation: Mapping[str, Any]) -> str:
    """Format what `explain` found of a plan in at most LINES lines."""
    blocks = [
        head_lines(plan, WARNINGS),
        _memory_block(plan, explanation),
        _network_tier_block(explanation["tiers"]) if plan.mesh.world_size > 1 else [],
        _time_block(explanation.get("time")),
    ]
    paragraphs = [*("\n".join(block) for block in blocks if block), *closing_blocks(plan, explanation), MORE]
    lines = "\n\n".join(paragraphs).split("\n")
    return "\n".join(lines if len(lines) <= LINES else filter(None, lines))


def closing_blocks(plan: Plan, explanation: Mapping[str, Any]) -> list[str]:
    """Return the last blocks of a screen: what a failure costs, what limits a plan, what would gain."""
    blocks = _failure_block(plan, explanation), [*_format_limit(plan, explanation), *_format_best_changes(explanation)]
    return ["\n".join(block) for block in blocks if block]


def _memory_block(plan: Plan, explanation: Mapping[str, Any]) -> list[str]:
    """Return the lines on a worker's memory by kind, beside what its device has."""
    memory = explanation["memory"]
    where = f", of stage {memory['stage']}" if plan.num_stages > 1 else ""
    rows = memory_rows(memory)
    if device := explanation.get("device"):
        share = f"{memory['total'] / device['memory']:.0%} of {device['name']}'s {format_number(device['memory'])}B"
        rows = [[*row[:2], f"{row[2]}, {share}"] if row[0] == "total" else row for row in rows]
    return [f"memory of the worker that needs most{where}", *align_rows(rows)]


def _network_tier_block(tiers: Mapping[str, Any]) -> list[str]:
    """Return the lines on bytes by tier."""
    links = [f"busiest link {format_number(r['busiest'])}B one way" if r["busiest"] else "" for r in tiers["rows"]]
    rows = [[r["tier"], f"{format_number(r['bytes'])}B", link] for r, link in zip(tiers["rows"], links, strict=True)]
    return [f"moved in a step, {format_tier_sizes(tiers)}", *align_rows(rows)]


def _time_block(time: Mapping[str, Any] | None) -> list[str]:
    """Return the lines on the seconds of a step; parts beyond PARTS are added up."""
    if not time:
        return []
    parts, others = time["parts"], {}
    if len(time_rows({**time, "hidden": 0.0})) > PARTS + 2:  # with the whole step and the run
        largest = sorted(parts, key=parts.__getitem__, reverse=True)[: PARTS - 1]
        others = {"others": sum(seconds for name, seconds in parts.items() if name not in largest)}
        parts = {name: seconds for name, seconds in parts.items() if name in largest}
    return [format_time_title(time), *align_rows(time_rows({**time, "parts": {**parts, **others}}))]


def _failure_block(plan: Plan, explanation: Mapping[str, Any]) -> list[str]:
    """Return the lines on snapshots, and on what the loss of a worker costs."""
    price, failure = explanation.get("snapshots"), explanation.get("failures")
    if not price or not failure or plan.mesh.world_size == 1:
        return []
    every, rows = price["every"], []
    if every and price["bytes"]:
        sent = f"{price['seconds']:.3g} s at cluster.network={price['network']:g} Gbit/s"
        often = "after each step" if every == 1 else f"after {every} steps"
        rows.append(["snapshot", f"{format_number(price['bytes'])}B", f"of a node {often}, {sent}"])
    groups = f", each in {format_count(failure['communicators'], 'group')}" if failure["communicators"] else ""
    of_workers = f"of {format_count(plan.mesh.world_size, 'worker')}{groups}"
    rows.append(["formation", format_seconds(failure["formation"]), of_workers])
    if saved := explanation.get("checkpoint"):
        rows.append(["checkpoint", f"{format_number(saved['bytes'])}B", _describe_checkpoint(saved)])
    again = f"and {failure['steps']:g} steps done again" if failure["steps"] else "and all since the last checkpoint"
    if failure["steps"] and (time := explanation.get("time")):
        again += f" on average, {format_seconds(failure['steps'] * time['seconds'])}"
    rows.append(["recovery", format_seconds(failure["recovery"]), again])
    return ["when a worker is lost, estimated", *align_rows(rows)]


def _describe_checkpoint(saved: Mapping[str, Any]) -> str:
    """Return the words on a checkpoint's files, the seconds that it takes, and how often `auto` makes one."""
    files = f"in {format_count(saved['files'], 'file')} of at most {format_number(saved['largest'])}B"
    if not saved["saving"]:
        return files
    took = f"written in {format_seconds(saved['saving'])}, a step stands {format_seconds(saved['stall'])}"
    return f"{files}, {took}, read in {format_seconds(saved['reading'])}; auto: every {format_duration(saved['every'])}"


def _format_limit(plan: Plan, explanation: Mapping[str, Any]) -> list[str]:
    """Return the line on what limits a plan: memory that is not there, or the longest part of a step."""
    memory, device, time = explanation["memory"], explanation.get("device"), explanation.get("time")
    blocks = [f"blocks {line}" for line in describe_blocks(explanation.get("blocks", {}))[:MOST_BLOCKS]]
    if device and memory["total"] > device["memory"]:
        lacking = memory["total"] - device["memory"]
        return [f"limited by memory: it does not fit, {format_number(lacking)}B are lacking"]
    if not time:
        return []
    name, seconds = max(time["parts"].items(), key=lambda pair: pair[1])
    waits = {"late": "each update waits for its loss to be read", "behind": "each step waits for the report before it"}
    late = [f"{said}: {time[key]}" for key, said in waits.items() if time.get(key)][:1]
    if why := time.get("unrecorded"):
        *others, last = blocks or ["passes are launched kernel by kernel"]
        blocks = [*others, f"{last}; no graphs: {why}"]
    products = [time[key] for key in ("products", "pairs") if time.get(key)]
    limit = f"limited by {_describe_limit(plan, name)}: {seconds / time['seconds']:.1%} of a step"
    return [limit, *late, *products, *blocks]


def _describe_limit(plan: Plan, name: str) -> str:
    """Return the words on the part of a step that limits it."""
    again = plan.recompute.kind
    words = {
        "computing": "computing" + (f", recompute={again} included" if again != "none" else ""),
        "bubble": f"the bubble of {plan.num_stages} stages and {format_count(plan.microbatches, 'microbatch')}",
        "host": "the host, which launches kernels more slowly than they run",
        "optimizer": "the update, of few tokens",
        "streaming": "the link to host memory, over which states come and go at the update (optimizer.offload)",
    }
    return words.get(name, name)


def _format_best_changes(explanation: Mapping[str, Any]) -> list[str]:
    """Return the lines on the changes that would gain most, each as it is typed."""
    changes, time, device = explanation.get("changes"), explanation.get("time"), explanation.get("device")
    if changes is None or not time:
        return []
    fits = not device or explanation["memory"]["total"] <= device["memory"]
    if not changes:
        return ["no change of one key is known to gain" if fits else "no change of one key makes it fit"]
    if device and not fits and (lacking := (changes[0]["memory"] or 0) - device["memory"]) > 0:
        least = f"{' '.join(changes[0]['typed']) or 'the plan as it is'} lacks least, {format_number(lacking)}B"
        return [f"neither another microbatch nor recomputing nor ZeRO makes it fit: {least}"]
    rows = [[" ".join(c["typed"]), *_format_gain(c, time["seconds"])] for c in changes]
    return ["what would gain most" if fits else "what would make it fit", *align_rows(rows)]


def find_fitting_change(explanation: Mapping[str, Any]) -> list[str]:
    """Return the arguments of the best change that makes a plan fit; [] if it fits already, or none is known."""
    memory = (explanation.get("device") or {"memory": inf})["memory"]
    changes = explanation.get("changes") if explanation["memory"]["total"] > memory else []
    return next((list(c["typed"]) for c in changes or [] if (c["memory"] or 0) <= memory), [])


def _format_gain(change: Mapping[str, Any], seconds: float) -> Sequence[str]:
    """Return the cells on what a change gains, beside the `seconds` of a step without it."""
    way = "faster" if change["seconds"] <= seconds else "slower"
    needs = f", {format_number(change['memory'])}B" if change["memory"] else ""
    return f"{abs(1 - change['seconds'] / seconds):.1%} {way}", f"{format_seconds(change['seconds'])} a step{needs}"


Lines = Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]  # explanation -> name and value of each line
Sides = dict[str, tuple[float, float]]  # name of a line -> its value in one plan and in the other
KINDS = ("parameters", "optimizer", "gradients", "activations", "working", "recorded", "reserved", "host", "total")
SECONDS = ("a step", "failures")  # parts whose values are seconds


class NoExplanation(ValueError):
    """Data that `python -m platform.plan --json` has not written."""


def differing_predictions_by_part(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Sides]:
    """Return by part the lines that differ in two explanations, or raise NoExplanation if one of them is none."""
    differences = {}
    for name, values in DIFFERENCE_PARTS.items():
        one_lines, other_lines = _read_part_lines(values, one), _read_part_lines(values, other)
        both = {key: (one_lines.get(key, 0.0), other_lines.get(key, 0.0)) for key in one_lines | other_lines}
        differences[name] = {key: sides for key, sides in both.items() if sides[0] != sides[1]}
    return differences


def format_differences(differences: Mapping[str, Sides]) -> list[str]:
    """Format the lines that differ between plans A and B as one table, with their ratio."""
    rows: list[Sequence[str]] = [["", "A", "B", "B / A"]]
    for part, sides in differences.items():
        shown = format_seconds if part in SECONDS else lambda n: f"{format_number(n)}B"
        rows.append([part if sides else f"{part}: alike", "", "", ""])
        rows += [[f"  {name}", shown(a), shown(b), f"{b / a:.3g}" if a else "-"] for name, (a, b) in sides.items()]
    return align_rows(rows)


def _read_part_lines(values: Lines, explanation: Mapping[str, Any]) -> dict[str, float]:
    """Return the lines of one part of an explanation. Raises NoExplanation for one that is not of this kind."""
    try:
        return {name: float(value) for name, value in values(explanation)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoExplanation(f"lacks {error}" if isinstance(error, KeyError) else f"{error}") from None


def _memory_bytes(explanation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of the worker that needs most, by kind."""
    yield from ((kind, explanation["memory"][kind]) for kind in KINDS)


def _tier_bytes(explanation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a step by tier."""
    yield from ((row["tier"], row["bytes"]) for row in explanation["tiers"]["rows"])


def _collective_bytes(explanation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a step by collective and axes."""
    yield from explanation["communication"].items()


def _step_seconds(explanation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the seconds of a step by part."""
    yield from explanation["time"]["parts"].items()
    yield "altogether", explanation["time"]["seconds"]


def _failure_seconds(explanation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the seconds that a failure costs."""
    yield from ((name, explanation["failures"][name]) for name in ("formation", "recovery"))


DIFFERENCE_PARTS: Mapping[str, Lines] = {
    "memory of the worker that needs most": _memory_bytes,
    "moved in a step, by tier": _tier_bytes,
    "moved in a step, by collective": _collective_bytes,
    "a step": _step_seconds,
    "failures": _failure_seconds,
}


def explain_config(
    config: Config,
    plan: Plan,
    tiers: Mapping[str, int],
    hardware: Hardware,
    named: bool = False,
    tokens: float | None = None,
    seeks_changes: bool = False,
) -> dict[str, Any]:
    """Return what there is to say of a configuration's plan, as JSON-able data. `tiers`: workers in one of each, as of
    `explain`; `hardware`: the one for which steps are priced, `named` by the user; `tokens`: the number of a run's, by
    default as its steps have; `seeks_changes`: True if the changes that would gain most are to be found."""
    needed, step = predict_footprints(config, plan), step_price(config, plan, hardware)
    stated = named or bool(read_chosen_hardware(config))
    device = _find_stated_device(config, hardware if stated else None)
    sure = stated or find_gpu_hardware(config.cluster.gpu)
    known = Known(device_kind(config), hardware if sure else None, MeasuredCosts(step=step.seconds))
    snapshot, every = snapshot_price(config, plan, min(tiers.values()), known), config.elastic.snapshot_every
    every = snapshot.interval_steps if every == AUTO else every
    saved = checkpoint_price(config, plan, known)
    more: dict[str, Any] = {
        "time": _explain_step_time(config, plan, hardware, step, tokens),
        "device": device,
        "failures": failure_price(config, plan, snapshot, int(every))._asdict(),
        "checkpoint": {**saved._asdict(), "files": plan.mesh.world_size, "every": saved.interval_seconds},
        "blocks": _find_compiled_blocks(config, plan),
        "settings": dict(redact_secrets(flatten_own_settings(config))),
    }
    explanation = explain_plan(
        plan,
        build_model(config.model),
        moments=count_states_per_element(config),
        tiers=tiers,
        dropout=config.model.dropout,
        footprints=needed,
        snapshots={**snapshot._asdict(), "every": every, "network": config.cluster.network},
        more=more,
        rings=device_kind(config) == "cuda",
    )
    if seeks_changes and not config.plan.search:
        from platform.predict.remedies import find_best_changes

        most, memory = max(f.total_bytes for f in needed), device["memory"] if device else inf
        changes = find_best_changes(config, step.seconds, most, memory, hardware)
        explanation["changes"] = [asdict(change) for change in changes]
    return explanation


def _find_compiled_blocks(config: Config, plan: Plan) -> dict[str, str]:
    """Return what `reasons_against_whole_blocks` says of the blocks of a configuration's plan; {} if none compiles."""
    device = device_kind(config)
    if not may_compile(config.train.compile, device):
        return {}
    return reasons_against_whole_blocks(plan, device, config.model.dropout)


def _find_stated_device(config: Config, hardware: Hardware | None) -> dict[str, Any] | None:
    """Return the name and the bytes of a worker's device, as far as the configuration or the `hardware` says."""
    c = config.cluster
    if c.device_memory:
        return {"name": "cluster.device_memory", "memory": c.device_memory * 1e9}
    if memory := nominal_memory(c.gpu):
        return {"name": c.gpu, "memory": memory}
    return {"name": hardware.name, "memory": hardware.memory} if hardware else None


def _explain_step_time(
    config: Config, plan: Plan, hardware: Hardware, step: StepPrice, tokens: float | None
) -> dict[str, Any]:
    """Return what `explain` says of the seconds of a step on a hardware, and of a run on so many `tokens`."""
    tokens = tokens or config.train.steps * plan.tokens_per_step
    return {
        "hardware": hardware.name,
        "published": find_error_bar(plan, hardware),
        **asdict(step),
        "parts": step.seconds_by_part,
        "mfu": step.mfu,
        "speed": step.device_flops,
        "late": reason_against_early_update(config) if device_kind(config) == "cuda" else "",
        "unrecorded": reason_against_graphs(config, plan, "cuda") if device_kind(config) == "cuda" else "",
        "behind": reason_against_passes_ahead(config, plan) if device_kind(config) == "cuda" else "",
        "pairs": describe_pairs(config, plan) if device_kind(config) == "cuda" or plan.pairs_passes else "",
        "products": describe_async_products(config, plan) if device_kind(config) == "cuda" else "",
        "days": {"tokens": tokens, "days": step.training_days(tokens)},
    }
