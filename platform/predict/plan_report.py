"""The long explanation of a plan: groups, every collective with its bytes, traffic by tier, a worker's memory.

All numbers come from the plan that the workers execute; nothing is counted a second time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from platform.boundary.documents import parse_yaml, read_bytes
from platform.boundary.schema import parse_value
from platform.boundary.terminal import align_rows
from platform.config.key import WORKERS
from platform.plan.chunks import RecordableModel
from platform.plan.layout import format_count, move_axes
from platform.plan.operation_plan import collective_label
from platform.plan.plan import Plan
from platform.plan.plan_summary import count_scores_by_rank, describe, format_number, format_seconds
from platform.plan.step_collectives import (
    bucket_collectives,
    communication,
    count_kernels,
    process_groups,
    step_collectives,
)
from platform.predict.footprint import Footprint, count_saved_elements, weight_bytes
from platform.predict.hardware import Hardware
from platform.predict.tier_traffic import NetworkTiers, count_messages, tier_traffic

GROUPS_SHOWN, RANKS_SHOWN = 4, 8
PUBLISHED = Path(__file__).parent / "published.yaml"  # `python -m docs.predictions errors` prints it
_LAYER = re.compile(r".*\blayers\.\d+\.")


def explain_plan(
    plan: Plan,
    model: RecordableModel,
    *,
    moments: int,
    tiers: Mapping[str, int],
    dropout: float = 0.0,
    footprints: Sequence[Footprint] = (),
    snapshots: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    rings: bool = False,
) -> dict[str, Any]:
    """Return the long explanation of a plan, for `python -m platform.plan`, as JSON-able data: groups, collectives with
    their bytes, what a worker holds. `moments`: numbers of optimizer state per parameter; `tiers`: the workers in one
    node, in one rack, and so on, by name, for counting what crosses them; `footprints`: the memory that a worker needs,
    by stage; `snapshots`: price of a snapshot in memory, and how often it is taken; `more`: other parts of the
    explanation, such as the predicted `time` of a step; `rings`: argument of `tier_traffic`. Raises ValueError for
    tiers that do not nest."""
    places = NetworkTiers.build_tiers(tiers, plan.mesh.world_size)

    def worker_holdings(at: Mapping[str, int]) -> dict[str, Any]:
        """Return what the worker at mesh coordinates `at` holds: counts of parameters, bytes, saved elements."""
        saved = count_saved_elements(plan, model, dropout, at)
        return {
            "parameters_per_worker": plan.count_parameters_of_rank(at),
            "bytes_per_worker": weight_bytes(plan, moments, at),
            "saved_elements_per_worker": {"activations": saved.activations, "gathered_parameters": saved.gathered},
        }

    explanation: dict[str, Any] = {
        "mesh": plan.mesh.axes,
        "groups": {"+".join(axes): plan.mesh.list_groups(axes) for axes in _list_group_axes(plan)},
        "collectives": list_collectives(plan),
        "communication": communication(plan),
        "attention_kernels": count_kernels(plan),
        "bytes_per_layer": bytes_per_layer(plan),
        "tiers": {"sizes": dict(tiers), "rows": [asdict(row) for row in tier_traffic(plan, places, rings)]},
        **worker_holdings(plan.mesh.rank_coordinates(0)),
        "attention_work": count_scores_by_rank(plan),
        "warnings": list(plan.warnings),
        **({"snapshots": dict(snapshots)} if snapshots else {}),
        **{key: value for key, value in (more or {}).items() if value},
    }
    if footprints:
        stage, most = max(enumerate(footprints), key=lambda pair: pair[1].total_bytes)
        explanation["memory"] = {"stage": stage, **asdict(most), "total": most.total_bytes}
    if plan.coordinates_off_sub_grid:  # common layers are on sub-grid 0 alone, so other workers hold less
        explanation["elsewhere"] = worker_holdings(plan.coordinates_off_sub_grid)
    if branches := plan.mesh.order_axes(plan.scheme.branches):
        meshes = {order: move_axes(plan.mesh, branches, outer=order == "outer") for order in ("inner", "outer")}
        rooted = bool(plan.coordinates_off_sub_grid)
        messages_by_order = {o: count_messages(mesh, branches, places, from_zero=rooted) for o, mesh in meshes.items()}
        explanation["branch_messages"] = {
            "order": "outer" if plan.scheme.branches_outer else "inner",
            **{
                order: dict(zip(places.distance_labels, counts, strict=True))
                for order, counts in messages_by_order.items()
            },
        }
    return explanation


def _list_group_axes(plan: Plan) -> list[tuple[str, ...]]:
    """Return the axes of the groups that the long explanation lists: each mesh axis, then the joint axes of the run."""
    single = [(a,) for a, n in plan.mesh.shape if n > 1]
    return [*single, *(axes for axes in process_groups(plan) if axes not in single)]


def list_collectives(plan: Plan) -> list[dict[str, Any]]:
    """List the collectives of a training step for the long explanation of a plan, one row per distinct collective,
    layers folded: it occurs `times` times in the model and is launched `launches` times per rank and step, which moves
    `bytes` over all workers. The bytes by op and axes add up to `communication(plan)`. `at_most`: it moves rows of
    experts, as many as the routing says, and these are the most."""
    rows: dict[tuple, dict[str, Any]] = {}
    for where, c, launches in step_collectives(plan):
        axes = "+".join(plan.mesh.order_axes(c.axes))
        folded = re.sub(r"\.\d+\.", ".*.", re.sub(r"^stage \d+ to \d+ ", "stage * to * ", where))
        key = (folded, c.op, axes, c.elements, c.dtype, c.phase, bool(c.rows))
        names = ("operation", "op", "axes", "elements", "dtype", "phase", "at_most")
        row = rows.setdefault(key, {**dict(zip(names, key, strict=True)), "times": 0, "launches": 0, "bytes": 0})
        row["times"] += 1
        row["launches"] += launches
        row["bytes"] += launches * plan.traffic_bytes(c)
    return list(rows.values())


def bytes_per_layer(plan: Plan) -> float:
    """Predict the bytes that all workers of a plan move per step for one layer of the model, on average over the
    layers: its collectives in every microbatch, gathers of activations kept for its recomputation, and its share of
    gradient reductions and parameter gathers, of which the padding of a buffer is shared like the buffer."""
    layers = {match[0] for p in plan.parameters if (match := _LAYER.match(p.name))}
    of_layers = (
        (c, n) for where, c, n in step_collectives(plan) if where.startswith("kept ") or _LAYER.match(where.split()[-1])
    )
    moved = Fraction(sum(n * plan.traffic_bytes(c) for c, n in of_layers))
    for stage in range(plan.num_stages):
        for reduction in bucket_collectives(plan.stage_part(stage)):
            ranges = {p.name: reduction.bucket.parameter_ranges[p.name] for p in reduction.parameters}
            sizes = {name: stop - start for name, (start, stop) in ranges.items()}
            if layer_size := sum(size for name, size in sizes.items() if _LAYER.match(name)):
                reduced = reduction.launches * plan.traffic_bytes(reduction.collective)
                moved += Fraction(reduced * layer_size, sum(sizes.values()))
    return float(moved / len(layers)) if layers else 0.0


def render_explanation(plan: Plan, explanation: dict[str, Any]) -> str:
    """Format the explanation `explanation`, which `explain_plan` made of the plan, as aligned text."""
    groups = [[axes, str(len(g[0])), _format_groups(g)] for axes, g in explanation["groups"].items()]
    worker = "per worker" + (" of sub-grid 0" if "elsewhere" in explanation else "")
    blocks = [
        describe(plan).splitlines(),
        ["groups (ranks)", *align_rows(groups)],
        _format_collectives(explanation["collectives"]),
        ["bytes per step, all workers", *align_rows(_traffic_rows(explanation))],
        _format_tiers(explanation["tiers"]) if plan.mesh.world_size > 1 else [],
        [worker, *align_rows(_holding_rows(explanation))],
    ]
    if memory := explanation.get("memory"):
        where = f", of stage {memory['stage']}" if plan.num_stages > 1 else ""
        blocks.append([f"memory of the worker that needs most{where}", *align_rows(memory_rows(memory))])
    if (price := explanation.get("snapshots")) and price["every"] and price["bytes"]:
        title = "snapshots, of the node that sends most to the memory of others"
        blocks.append([title, *align_rows(_snapshot_rows(price))])
    if time := explanation.get("time"):
        blocks.append([format_time_title(time), *align_rows(time_rows(time))])
    if elsewhere := explanation.get("elsewhere"):
        blocks.append(["per worker of another sub-grid", *align_rows(_holding_rows(elsewhere))])
    if m := explanation.get("branch_messages"):
        title = f"messages of a split or join (branch.order={m['order']})"
        rows = [[order, *(f"{count:,}" for count in m[order].values())] for order in ("inner", "outer")]
        blocks.append([title, *align_rows([["branch axis", *m["inner"]], *rows])])
    if settings := explanation.get("settings"):
        rows = [[key, str(value)] for key, value in settings.items()]
        blocks.append(["settings of your own code", *align_rows(rows)])
    return "\n\n".join("\n".join(block) for block in blocks if len(block) > 1)


def _format_groups(groups: Sequence[Sequence[int]]) -> str:
    """Format the first GROUPS_SHOWN groups of the long explanation as "[0 1] [0 8 16 .. 120]", and how many follow."""
    more = f" and {len(groups) - GROUPS_SHOWN} more" if len(groups) > GROUPS_SHOWN else ""
    shown = [[*g[:3], "..", g[-1]] if len(g) > RANKS_SHOWN else g for g in groups[:GROUPS_SHOWN]]
    return " ".join("[" + " ".join(map(str, g)) + "]" for g in shown) + more


def _format_collectives(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the explanation's rows of collectives as lines of a table under a heading."""
    head = ["operation", "collective", "elements", "times", "launches", "bytes per step", "phase"]
    cells = [
        [r["operation"], f"{r['op']}/{r['axes']}", f"{r['elements']:,}", f"x{r['times']}"]
        + [f"{r['launches']:,}", f"{r['bytes']:,}", r["phase"] + (", at most" if r["at_most"] else "")]
        for r in rows
    ]
    return ["collectives", *(align_rows([head, *cells]) if rows else [])]


def _traffic_rows(explanation: dict[str, Any]) -> list[list[str]]:
    """Return the rows (collective and mesh axes, bytes per step) of the table of communication in an explanation."""
    most = {collective_label(r["op"], r["axes"].split("+")) for r in explanation["collectives"] if r["at_most"]}
    rows = [[k + (", at most" if k in most else ""), f"{v:,}"] for k, v in explanation["communication"].items()]
    return [*rows, ["of which per layer", f"{round(explanation['bytes_per_layer']):,}"]] if rows else []


def _format_tiers(tiers: Mapping[str, Any]) -> list[str]:
    """Format the explanation's traffic by tier as lines of a table under a heading."""
    cells = [[r["tier"], f"{r['messages']:,}", f"{r['bytes']:,}", "" if r["busiest"] is None else f"{r['busiest']:,}"]
             for r in tiers["rows"]]  # fmt: skip
    head = ["", "messages", "bytes", "busiest link, one way"]
    return [f"per step by tier, {format_tier_sizes(tiers)}", *align_rows([head, *cells])]


def format_tier_sizes(tiers: Mapping[str, Any]) -> str:
    """Format the numbers of workers in one of each tier."""
    sizes = sorted(tiers["sizes"].items(), key=lambda pair: pair[1])
    counts = ((name, format_count(n, "worker") if n < WORKERS else "all workers") for name, n in sizes)
    return ", ".join(f"{count} in a {name}" for name, count in counts)


def _holding_rows(holdings: dict[str, Any]) -> list[list[str]]:
    """Return the rows (name, elements, bytes) of the explanation's table of what a worker holds."""
    saved, size = holdings["saved_elements_per_worker"], holdings["bytes_per_worker"]
    return [
        ["parameters", f"{holdings['parameters_per_worker']:,}", f"{format_number(size['parameters'])}B"],
        ["gradients", "", f"{format_number(size['gradients'])}B"],
        ["optimizer state", "", f"{format_number(size['optimizer'])}B"],
        ["saved activations", f"{saved['activations']:,}", "elements per microbatch"],
        ["gathered parameters", f"{saved['gathered_parameters']:,}", "elements, kept until the backward pass"],
    ]


def memory_rows(memory: Mapping[str, int]) -> list[list[str]]:
    """Return the rows (part, bytes, remark) of the explanation's table of a worker's peak memory, from the fields of a
    Footprint."""
    more = {
        "parameters": "and their master copies",
        "optimizer": "",
        "gradients": "summed over the microbatches",
        "activations": f"of {memory['in_flight']} forward passes in flight",
        "working": "operations, collectives, what is sent and received",
        **({"recorded": "other work beside recorded passes"} if memory["recorded"] else {}),
        **({"reserved": "for CUDA, NCCL and rounding"} if memory["reserved"] else {}),
        "total": "at once",
        **({"host": "of host memory, which activations or states are in"} if memory["host"] else {}),
    }
    return [[name, f"{format_number(memory[name])}B", remark] for name, remark in more.items()]


def _snapshot_rows(price: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows (what, bytes, seconds) of the table of bytes that snapshots send to other nodes."""
    every, speed = price["every"], f"{price['seconds']:.3g} s at cluster.network={price['network']:g} Gbit/s"
    beside = f", beside {format_count(every, 'step')} of {price['step']:.3g} s" if price["step"] else ""
    step = ["a step", f"{format_number(price['bytes'] / every)}B", f"with elastic.snapshot_every={every}"]
    return [["a snapshot", f"{format_number(price['bytes'])}B", speed + beside], step]


@cache
def _read_error_bars() -> dict[str, dict[str, Any]]:
    """Return by hardware and kind of model how many published rows there are, and the mean error of predictions."""
    return parse_value(dict[str, dict[str, Any]], parse_yaml(read_bytes(PUBLISHED)))


def find_error_bar(plan: Plan, hardware: Hardware) -> dict[str, Any] | None:
    """Return the mean `error` of predictions of published `rows` on a hardware, of models with experts as the plan's or
    without; None if there are no such rows."""
    return _read_error_bars().get(hardware.name, {}).get("experts" if plan.sizes.get("experts") else "dense")


def format_time_title(time: Mapping[str, Any]) -> str:
    """Format the line above a step's predicted time, with how far published steps of such plans were from theirs."""
    bar = time["published"]
    error = f": +-{bar['error']:.1%} ({bar['rows']} published rows of such plans)" if bar else ""
    return f"a step on {time['hardware']}, predicted{error}"


def time_rows(time: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows (part, seconds, share) of the table of a step's predicted time."""
    parts = [(name, s, s / time["seconds"]) for name, s in time["parts"].items()]
    shown = [[name, format_seconds(s), f"{share:.1%}"] for name, s, share in parts if share >= 5e-4]
    speed = f"{time['tokens'] / time['seconds']:,.0f} tokens/s, {format_number(time['speed'])}FLOP/s of a device"
    days, hidden = time["days"], time["hidden"]
    if hidden >= 5e-4 * time["seconds"]:
        busy = f"{hidden / time['computing']:.0%} of it"
        shown.append(["hidden", format_seconds(hidden), f"of collectives beside computing: links are busy for {busy}"])
    shown.append(["altogether", format_seconds(time["seconds"]), f"{speed}, MFU {time['mfu']:.1%}"])
    shown.append(["a run", format_days(days["days"]), f"of {format_number(days['tokens'])}tokens"])
    return shown


def format_days(days: float) -> str:
    """Format a time, given in days, in the largest unit of which there is one."""
    for unit, size in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * size >= 1:
            return f"{days * size:.3g} {unit}"
    return f"{days * 86400:.3g} seconds"
