"""Systems that run a plan: ours, and others, whose differences `conf/system/` describes, and the words by which these
say what they compute again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from platform.boundary.schema import Span
from platform.config.fields import KEYS
from platform.plan.plan import Plan


@dataclass(frozen=True)
class System:
    """Differences of a system that runs a plan from ours; `conf/system/` has a file for each. `head_kernels`: kernels
    of each head of attention in either pass, 0 if one kernel computes all heads; `gradient_bytes`: per element that
    ranks sum, 0 as the plan says; `kept_whole`: True if each rank keeps all of the inputs that it recomputes from;
    `repeats_all`: True if it computes a recomputed layer's last product again, whose result no gradient needs;
    `by_weight`: True if under ZeRO-3 it waits for a gather of each weight, in recomputation too, copies what each rank
    sent by a kernel of its own, and sums whole gradients; `stands_by`: True if a stage computes nothing while it sends
    and receives; `sends_ahead`: True if messages between interleaved stages go beside their passes; `tensor_exposed`:
    share of a pass's waits along tensor axes that products beside them leave; `rows_by_node`: True if a token goes once
    to each node that has experts of it, and there once to each rank; `rows_by_pair`: True if it goes to each of its
    experts, and not once to each of their ranks; `overlaps_experts`: True if tokens go to experts
    and back beside computing of another microbatch; `read_wait`: seconds for which a device waits for its host, which
    has to read how many tokens experts get, per layer of experts and pass; `sink_accesses`: number of times more that
    attention with sinks reads and writes its queries; `adapters`: most adapters of a node that one group uses at once,
    0 as the hardware says; `counts_calls`: True if its host's time is its Python calls' too, not only its launches';
    `constants`: shares that its kernels reach, and other fields of a hardware, by the hardware's name, in place of what
    the hardware's file has."""

    head_kernels: Annotated[int, Span(0, 100)] = 0
    gradient_bytes: Annotated[int, Span(0, 8)] = 0
    kept_whole: bool = False
    repeats_all: bool = False
    by_weight: bool = False
    stands_by: bool = False
    sends_ahead: bool = False
    tensor_exposed: Annotated[float, Span(0, 1)] = 1.0
    rows_by_node: bool = False
    rows_by_pair: bool = False
    overlaps_experts: bool = False
    read_wait: Annotated[float, Span(0, 1)] = 0.0
    sink_accesses: Annotated[float, Span(0, 1000)] = 0.0
    adapters: Annotated[float, Span(0, 64)] = 0.0
    counts_calls: bool = True
    constants: dict[str, dict[str, float]] = field(default_factory=dict, hash=False)


# word of Megatron's recompute_modules -> operations, by kind and name, that are computed again; a function of elements
# has the name of the operation before it
REDONE = {
    "core_attn": r"\w+_attention ",
    "layernorm": r"norm .*\.norm\.",
    "mla_up_proj": r"(project .*\.(query|key)_up|norm .*_latent_norm|(rotate|concatenate) )",
    "mlp": r"\w+ .*\.mlp\.up|(project|shift) .*\.mlp\.down",
    "moe": r"pointwise .*\.(experts|shared)\.up|(?!pointwise)\w+ .*\.mlp(\.router|\.experts|\.shared|$)",
    "moe_act": r"pointwise .*\.experts\.up",
    "shared_experts": r"\w+ .*\.shared\.up|(project|shift) .*\.shared\.down",
}


def split_foreign_recompute_words(recompute: str) -> frozenset[str]:
    """Return the words of a measured run's cell of recompute, legal or not; none if it has a value of the key."""
    of_key = recompute.strip("'\"") in ("", "auto", *KEYS["recompute"].choices)
    return frozenset(() if of_key else recompute.split())


def find_redone_words(plan: Plan) -> set[str]:
    """Return the words of REDONE, of a measured run's table, that name operations of a plan."""
    names = [f"{word} {name}" for kind, name in plan.operations for word in (kind, "pointwise")]
    words = {word for word in REDONE if any(redoes([word], name) for name in names)}
    return words if any(name.endswith(".query_up") for name in names) else words - {"mla_up_proj"}


def redoes(words: Iterable[str], name: str) -> bool:
    """Return True if one of a measured run's words of REDONE says that it computes an operation, `name`, again."""
    return any(re.match(REDONE[word], name) for word in words)
