"""Choice of passes in pairs (train.pair_passes): whether ranks wait for exchanges of experts under the computation of
another microbatch (`platform.runtime.turns`), and why not.

A forward pass runs with the backward pass of an earlier microbatch, so that under 1f1b stages have twice as many
microbatches in flight: `auto` is on where that fits, and a step is predicted to be shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from platform.boundary.refusals import format_violation
from platform.config.fields import Config
from platform.plan.generators import IN_PAIRS, build_paired_table
from platform.plan.operations.registry import OPERATIONS
from platform.plan.plan import Plan
from platform.plan.rule import EXCHANGES
from platform.plan.schedule import has_pairs
from platform.predict.memory_budget import MemoryForecast, device_kind

KEY = "train.pair_passes"
_Reasons = tuple[tuple[str, Callable[[Config, Plan], object]], ...]


def exchanges_tokens(plan: Plan) -> bool:
    """Return True if experts of a plan exchange tokens over ranks."""
    collectives = (c for o in plan.operations.values() for c in o.collectives)
    return any(c.op in EXCHANGES and "expert" in c.axes for c in collectives)


def pair_passes(plan: Plan) -> Plan:
    """Return a plan with its passes in pairs."""
    shorter = {length: pair_passes(short) for length, short in plan.shorter.items()}
    return replace(plan, pairs_passes=True, turns=False, shorter=shorter)


def _draws_in_kernels(config: Config, plan: Plan) -> bool:
    """Return True if kernels of attention draw dropout masks, from a generator that passes share."""
    return bool(config.model.dropout) and any(OPERATIONS[kind].chooses_kernel for kind, _ in plan.operations)


def _has_too_few(config: Config, plan: Plan) -> bool:
    """Return True if no stage has more microbatches in a step than its warm-up takes."""
    stages = plan.num_stages
    rows = build_paired_table(stages, len(plan.chunks) // stages, plan.microbatches)
    return not any(map(has_pairs, rows))


def _lacks_memory(config: Config, plan: Plan) -> bool:
    """Return True if a worker with passes in pairs needs more memory than its device has."""
    from platform.predict.step_price import choose_pricing_hardware, memory_of_worker  # with numpy

    memory = memory_of_worker(config, 0.0, choose_pricing_hardware(config))
    settled = replace(config, parallel=replace(config.parallel, data=plan.num_replicas))
    return MemoryForecast(settled, pair_passes(plan)).exceeds_memory(memory)


def _gains_nothing(config: Config, plan: Plan) -> bool:
    """Return True if no step is predicted to take less with passes in pairs, on the hardware that is named."""
    from platform.predict.step_price import choose_pricing_hardware, step_price  # with numpy

    hardware = choose_pricing_hardware(config)
    paired, alone = (step_price(config, p, hardware).seconds for p in (pair_passes(plan), plan))
    return paired >= alone


# why no run can have its passes in pairs; then why `auto` leaves them alone: the first that holds is told
_AGAINST: _Reasons = (
    ("no experts exchange tokens over ranks (model.experts, parallel.experts)", lambda c, p: c.parallel.experts == 1),
    ("its schedule has no pairs: of pipeline none, 1f1b and interleaved", lambda c, p: c.pipeline.kind not in IN_PAIRS),
    ("ZeRO-3 gathers weights in the order of one pass (parallel.zero)", lambda c, p: p.zero == 3),
    ("ranks of a sub-grid alone compute parts of it (branch)", lambda c, p: c.branch.kind != "none"),
    ("activations go to host memory in the order of one pass (recompute_offload)", lambda c, p: p.recompute.offload),
    ("ranks make weights of 4 bits in the order of one pass (tune=qlora)", lambda c, p: p.frees_weights),
    ("its attention's kernels draw dropout masks from one generator", _draws_in_kernels),
    ("train.graphs=on records each pass by itself", lambda c, p: c.train.graphs == "on"),
)
# of one mesh of a run, which may shrink
_NOT_HERE: _Reasons = (
    ("no experts exchange tokens over ranks (model.experts, parallel.experts)", lambda c, p: not exchanges_tokens(p)),
    ("a step has no more microbatches than its first forward passes take (train.microbatch)", _has_too_few),
)
_LEFT_OFF: _Reasons = (
    (f"{KEY}=off", lambda c, p: c.train.pair_passes == "off"),
    ("no GPU is asked for (cluster.gpu, cluster.device)", lambda c, p: device_kind(c) == "cpu"),
)
# by the file of the hardware
_NO_GAIN: _Reasons = (
    ("no step is predicted to be shorter with them", _gains_nothing),
    ("memory has no room for more microbatches in flight", _lacks_memory),
)


def _find_reason(reasons: _Reasons, config: Config, plan: Plan) -> str:
    """Return the first of `reasons` that holds of a configuration and its plan, without pairs; "" if none does."""
    return next((reason for reason, holds in reasons if holds(config, plan)), "")


def reason_against_pairs(config: Config, plan: Plan) -> str:
    """Return why passes of a run are not in pairs, by its `plan` without them; "" if they are."""
    chosen = config.train.pair_passes == "on"
    return _find_reason(_AGAINST + _NOT_HERE + (() if chosen else _LEFT_OFF + _NO_GAIN), config, plan)


def choose_pairs(config: Config, plan: Plan) -> Plan:
    """Return a configuration's plan with its passes in pairs, as train.pair_passes says; itself without them."""
    return plan if reason_against_pairs(config, plan) else pair_passes(plan)


def settle_pairs(config: Config, plan: Plan) -> None:
    """Settle train.pair_passes=auto in place as a `plan` has it, where the file of the hardware decided that."""
    if config.train.pair_passes == "auto" and not _find_reason(_AGAINST + _NOT_HERE + _LEFT_OFF, config, plan):
        config.train.pair_passes = "on" if plan.pairs_passes else "off"


def describe_pairs(config: Config, plan: Plan) -> str:
    """Return the line of a plan's screen on passes that exchange tokens of experts; "" where none do."""
    if plan.pairs_passes:
        return "passes wait for their exchanges in pairs, each under the other's computation"
    if not exchanges_tokens(plan):
        return ""
    return f"passes wait for their exchanges one after the other, as {reason_against_pairs(config, plan)}"


def violations_of_pairs(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if train.pair_passes=on asks for pairs that the run cannot have."""
    reasons = _AGAINST + (_NOT_HERE if plan.num_replicas >= config.parallel.experts else ())  # it has not shrunk
    if config.train.pair_passes == "on" and (reason := _find_reason(reasons, config, plan)):
        yield format_violation(KEY, "on", reason, ["auto", "off"])
