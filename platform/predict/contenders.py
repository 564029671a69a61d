"""Choices of a search for a plan: one value for each key that a configuration may leave open, and which it allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import yaml

from platform.config.composition import CONF
from platform.config.fields import Config, Tensor
from platform.config.layout_rules import is_open_key, list_tensor_axes
from platform.plan.generators import ONE_CHUNK
from platform.plan.layout import find_divisors
from platform.plan.scheme import TENSOR_EXPERTS, axes_of_experts

# Schemes that tensor=auto chooses among, the simplest first. 2d is 2d_gather in more and smaller messages.
SCHEMES = ("serial", "1d", "1d_sp", "2d_gather", "2p5d", "3d", "3d_literal")
# Schedules that pipeline=auto chooses among. gpipe has the bubble of 1f1b, and more memory.
SCHEDULES = ("none", "1f1b", "interleaved", "zb_h1")
MOST_CHUNKS = 16
MOST_SEQUENCES = 64  # of a microbatch on a replica
RECOMPUTE = ("none", "selective", "full")
ZERO = (0, 1, 2, 3)


class Contender(NamedTuple):
    """Contender of a search: a tensor `scheme` with the sizes of its axes in order, a pipeline schedule `kind`, and
    the values of other keys."""

    scheme: str
    axes: tuple[int, ...]
    kind: str
    stages: int
    chunks: int
    data: int
    context: int
    experts: int
    microbatch: int
    recompute: str
    zero: int
    tensor_experts: str = "split"

    @property
    def num_workers(self) -> int:
        """Return the number of workers of a contender's mesh, without branch axes."""
        return prod(self.axes) * self.stages * self.data * self.context

    @property
    def tie_order(self) -> tuple:
        """Return the order of contenders of equal price: fewer axes, then simpler schemes and schedules first."""
        words = (self.scheme, SCHEMES), (self.kind, SCHEDULES), (self.recompute, RECOMPUTE)
        return self.num_split_axes, *(names.index(word) if word in names else len(names) for word, names in words), self

    @property
    def num_split_axes(self) -> int:
        """Return how many mesh axes of a contender have more than one rank, by which ties are broken."""
        return sum(n > 1 for n in (*self.axes, self.stages, self.data, self.context, self.experts))


@lru_cache(maxsize=1)
def load_shipped_schemes() -> Mapping[str, Tensor]:
    """Return the tensor schemes among SCHEMES, by name, as their files describe them, without sizes of axes."""
    names = {f.name for f in fields(Tensor)}
    files = {name: yaml.safe_load((CONF / "tensor" / f"{name}.yaml").read_text()) for name in SCHEMES}
    return {name: Tensor(**{k: v for k, v in described.items() if k in names}) for name, described in files.items()}


@dataclass(frozen=True)
class Space:
    """Values that a configuration allows for each part of a Contender: one of a set key, all of an open one."""

    config: Config

    @cached_property
    def scheme_tables(self) -> Mapping[str, Tensor]:
        """Return the tables of the tensor schemes to choose among, by name."""
        table = self.config.tensor
        if not is_open_key(self.config, "tensor"):
            return {table.scheme: table}
        redundant = () if self.num_replicas else ("2p5d",)  # its depth is a number of replicas
        return {n: replace(t, uneven=table.uneven) for n, t in load_shipped_schemes().items() if n not in redundant}

    def axis_sizes(self, scheme: str) -> dict[str, int]:
        """Return the axes of a tensor scheme, in order, with their sizes; 0 for a size that is left open."""
        table, is_scheme_open = self.scheme_tables[scheme], is_open_key(self.config, "tensor")
        return {
            axis: 0 if is_scheme_open or is_open_key(self.config, f"tensor.axes.{axis}") else table.axes.get(axis, 1)
            for axis in list_tensor_axes(table)
        }

    @property
    def branch_workers(self) -> int:
        """Return the number of workers along the branch axes, which are never left open."""
        return prod(self.config.branch.axes.values())

    @property
    def num_stages(self) -> int:
        """Return the number of stages, 0 if it is left open."""
        return 0 if is_open_key(self.config, "pipeline.stages") else self.config.pipeline.stages

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas, 0 if it is left open."""
        return 0 if is_open_key(self.config, "parallel.data") else self.config.parallel.data

    @property
    def context_ranks(self) -> int:
        """Return the number of ranks of a context, 0 if it is left open."""
        return 0 if is_open_key(self.config, "parallel.context") else self.config.parallel.context

    @property
    def has_fixed_workers(self) -> bool:
        """Return True if the number of workers is not left open."""
        sizes = [n for scheme in self.scheme_tables for n in self.axis_sizes(scheme).values()]
        return (
            0 not in (*sizes, self.num_stages, self.num_replicas, self.context_ranks) and len(self.scheme_tables) == 1
        )

    def expert_choices(self, data: int) -> list[int]:
        """Return the numbers of `data` replicas that may share the experts."""
        if not is_open_key(self.config, "parallel.experts"):
            return [self.config.parallel.experts]
        return find_divisors(gcd(data, self.config.model.experts)) if self.config.model.experts else [1]

    def tensor_expert_choices(self, scheme: str) -> Sequence[str]:
        """Return what ranks of a tensor scheme may do with experts, to choose among."""
        if not is_open_key(self.config, "parallel.tensor_experts"):
            return [self.config.parallel.tensor_experts]
        return [*TENSOR_EXPERTS] if self.config.model.experts and self.expert_dividing_axes(scheme) else ["split"]

    def expert_dividing_axes(self, scheme: str) -> list[str]:
        """Return the axes of a tensor scheme that may divide whole experts."""
        return axes_of_experts(self.scheme_tables[scheme].regions, asdict(self.config.branch), "whole")

    @cached_property
    def schedule_choices(self) -> list[tuple[str, int]]:
        """Return the (schedule, chunks per stage) to choose among for several stages."""
        p, most = self.config.pipeline, max(1, min(MOST_CHUNKS, self.config.model.layers))
        kinds: Sequence[str] = SCHEDULES[1:] if is_open_key(self.config, "pipeline") else [p.kind]
        every = range(1, most + 1) if is_open_key(self.config, "pipeline.chunks") else [p.chunks]
        pairs = [(kind, n) for kind in kinds for n in every]
        return [(kind, n) for kind, n in pairs if n == 1 or kind not in ONE_CHUNK if (kind, n) != ("interleaved", 1)]

    @property
    def single_stage_schedules(self) -> list[tuple[str, int]]:
        """Return the (schedule, chunks per stage) to choose among for a single stage."""
        if is_open_key(self.config, "pipeline") or self.config.pipeline.kind == "none":
            return [("none", 1)]
        return self.schedule_choices

    @cached_property
    def microbatch_choices(self) -> list[int]:
        """Return the sequences of a microbatch on a replica to choose among."""
        if not is_open_key(self.config, "train.microbatch"):
            return [self.config.train.microbatch]
        batch = self.config.train.global_batch
        return sorted({n for n in find_divisors(batch) if n <= MOST_SEQUENCES} | {1})

    @property
    def recompute_choices(self) -> Sequence[str]:
        """Return what may be recomputed, to choose among."""
        return RECOMPUTE if is_open_key(self.config, "recompute") else [self.config.recompute]

    @property
    def zero_choices(self) -> Sequence[int]:
        """Return the stages of ZeRO to choose among: none beside branches that only some ranks have."""
        if not is_open_key(self.config, "parallel.zero"):
            return [self.config.parallel.zero]
        return ZERO[:1] if self.config.branch.only else ZERO

    def build_config(self, choice: Contender) -> Config:
        """Return the configuration of a contender."""
        c, tensor = self.config, self.scheme_tables[choice.scheme]
        kind, inner = c.parallel.context_kind, c.parallel.context_heads
        if kind == "nested" and (inner >= choice.context or choice.context % inner):
            kind, inner = "auto", 0
        parallel = replace(
            c.parallel, data=choice.data, context=choice.context, context_kind=kind, context_heads=inner,
            experts=choice.experts, zero=choice.zero, tensor_experts=choice.tensor_experts,
        )  # fmt: skip
        file = c.pipeline.file if choice.kind == "file" else ""
        return replace(
            c,
            recompute=choice.recompute,
            tensor=replace(tensor, axes=dict(zip(list_tensor_axes(tensor), choice.axes, strict=True))),
            parallel=parallel,
            pipeline=replace(c.pipeline, kind=choice.kind, stages=choice.stages, chunks=choice.chunks, file=file),
            train=replace(c.train, microbatch=choice.microbatch),
        )

    def key_values(self, choice: Contender) -> dict[str, Any]:
        """Return the values of a contender by configuration key."""
        names = list_tensor_axes(self.scheme_tables[choice.scheme])
        return {
            "tensor": choice.scheme, **{f"tensor.axes.{a}": n for a, n in zip(names, choice.axes, strict=True)},
            "pipeline": choice.kind, "pipeline.stages": choice.stages, "pipeline.chunks": choice.chunks,
            "parallel.data": choice.data, "parallel.context": choice.context, "parallel.experts": choice.experts,
            "parallel.tensor_experts": choice.tensor_experts, "parallel.zero": choice.zero,
            "train.microbatch": choice.microbatch, "recompute": choice.recompute,
        }  # fmt: skip

    def format_overrides(self, choice: Contender) -> list[str]:
        """Return the arguments by which a user types the parts of a contender that the configuration leaves open."""
        of_kind = {"none": ("pipeline.stages", "pipeline.chunks"), **dict.fromkeys(ONE_CHUNK, ("pipeline.chunks",))}
        unread = [*of_kind.get(choice.kind, ()), *(() if self.config.model.experts else ["parallel.tensor_experts"])]
        open_values = {key: n for key, n in self.key_values(choice).items() if key not in unread}
        return [f"{key}={value}" for key, value in open_values.items() if is_open_key(self.config, key)]
