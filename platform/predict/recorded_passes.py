"""Passes of microbatches that a rank records as graphs of its device and replays (train.graphs): which of them it can,
and why not the others. Planner, memory forecast and runtime ask here, and the plan's screen prints the reason.

Passes beside which collectives run are computed as ever: the first of a step where ZeRO's gathers run under it, and the
last under which gradients are reduced. Collectives inside of a pass are recorded too: along axes of a tensor scheme,
and reductions of each microbatch's gradients (ZeRO-2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from platform.boundary.refusals import format_violation
from platform.config.fields import Config, training_loss_name
from platform.plan.async_products import list_fused_axes
from platform.plan.generators import SHIPPED
from platform.plan.model_types import CROSS_ENTROPY
from platform.plan.operations.registry import OPERATIONS
from platform.plan.plan import Plan
from platform.plan.schedule import Action, Kind, count_in_flight, is_in_order
from platform.plan.simulate import lower_schedule
from platform.plan.whole_blocks import counts_in_passes
from platform.predict.choose_schedule import build_short_schedule

RECORDING = {"cuda"}  # kinds of devices that record what is launched on them
MOST_SLOTS = 64  # microbatches of a chunk in flight: a driver keeps some kilobytes for each kernel of each graph
_READ = {"tokens", "labels", "positions", "source", "segments"}  # data that the device alone reads


def list_recorded_microbatches(plan: Plan, overlap: bool, microbatches: int) -> range:
    """Return the microbatches of a step whose passes can be recorded; with `overlap` collectives run beside others."""
    trained = [bucket for bucket in plan.buckets if not bucket.frozen]
    gathers = overlap and any(bucket.sharded for bucket in trained)
    steps = map(plan.reduction_steps, trained)
    reduces = overlap and any(last and not in_each_pass for in_each_pass, last in steps)
    return range(gathers, microbatches - reduces)


def _draws_in_kernels(config: Config, plan: Plan) -> bool:
    """Return True if kernels of attention draw dropout masks, by a key of the host."""
    kinds = {o.operation.kind for o in plan.operations.values()}
    return bool(config.model.dropout) and any(OPERATIONS[kind].chooses_kernel for kind in kinds)


def _list_unbounded_rows(config: Config, plan: Plan) -> Sequence[Sequence[Action]]:
    """Return the rows of a schedule that may keep as many microbatches in flight as there are, () of another one."""
    if config.pipeline.kind in ("none", *SHIPPED) and config.pipeline.kind != "gpipe":
        return ()
    return lower_schedule(build_short_schedule(config, config.parallel.data, plan.microbatches))


def _reduces_split_gradients(config: Config, plan: Plan) -> bool:
    """Return True if gradients are reduced in each pass, and weight gradients have passes of their own."""
    rows = (
        lower_schedule(build_short_schedule(config, config.parallel.data, plan.microbatches)) if plan.zero > 1 else ()
    )
    return any(a.kind is Kind.WEIGHT for row in rows for a in row)


# why no passes are recorded, and of which run that holds; the first is told
_REASONS: tuple[tuple[str, Callable[[Config, Plan], object]], ...] = (
    ("train.graphs=off", lambda c, p: c.train.graphs == "off"),
    (
        "its schedule does not take microbatches in their order",
        lambda c, p: not all(map(is_in_order, _list_unbounded_rows(c, p))),
    ),
    (
        f"more than {MOST_SLOTS} microbatches are in flight, each with graphs of its own",
        lambda c, p: any(max(count_in_flight(row).values()) > MOST_SLOTS for row in _list_unbounded_rows(c, p)),
    ),
    ("each microbatch gathers weights (parallel.zero=3)", lambda c, p: p.zero > 2),
    ("weight gradients that are reduced have passes of their own (parallel.zero=2)", _reduces_split_gradients),
    ("ranks make weights of 4 bits in its passes (tune=qlora)", lambda c, p: p.frees_weights),
    ("the host counts its experts' rows, or its attention's pairs", lambda c, p: counts_in_passes(p, "cuda")),
    ("the host reads where documents begin", lambda c, p: "begins" in p.reader_layouts),
    ("the host has the factors of further losses (model.predict_ahead)", lambda c, p: c.model.predict_ahead),
    ("what it reads beside tokens and labels is of the host", lambda c, p: not _READ.issuperset(p.reader_layouts)),
    ("its attention's kernels draw dropout masks by keys of the host", _draws_in_kernels),
    (
        "its products move what they multiply (tensor.async_products)",
        lambda c, p: c.tensor.async_products == "on" or list_fused_axes(p),
    ),
    ("its passes run in pairs (train.pair_passes)", lambda c, p: p.pairs_passes),
    ("train.loss may be a function that reads numbers", lambda c, p: training_loss_name(c) != CROSS_ENTROPY),
    ("activations go to host memory (recompute_offload)", lambda c, p: p.recompute.offload),
    ("monitor.timeline times what is in a pass", lambda c, p: c.monitor.timeline),
    (
        "collectives run beside all passes of a step (parallel.overlap)",
        lambda c, p: not list_recorded_microbatches(p, c.parallel.overlap, p.microbatches),
    ),
)


def reason_against_graphs(config: Config, plan: Plan, device: str) -> str:
    """Return why no passes of a run are recorded on a kind of `device`, for the user; "" if some are."""
    if device not in RECORDING:
        return f"a {device} records no graphs"
    return next((reason for reason, holds in _REASONS if holds(config, plan)), "")


def violations_of_graphs(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if train.graphs=on asks for graphs that the run cannot have."""
    device = "cuda" if config.cluster.device == "auto" else config.cluster.device
    if config.train.graphs == "on" and (reason := reason_against_graphs(config, plan, device)):
        yield format_violation("train.graphs", "on", reason, ["auto", "off"])
