"""Choices of a search for a plan: one value for each key that a configuration may leave open, and which it allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from operator import attrgetter
from typing import Any, NamedTuple

import yaml

from platform.config.composition import CONF
from platform.config.fields import Config, Tensor, set_value
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
# part of a Contender -> the key whose value it is, as it is typed after the tensor scheme and the sizes of its axes
CHOOSABLE = {
    "kind": "pipeline.kind", "stages": "pipeline.stages", "chunks": "pipeline.chunks", "data": "parallel.data",
    "context": "parallel.context", "experts": "parallel.experts", "tensor_experts": "parallel.tensor_experts",
    "zero": "parallel.zero", "microbatch": "train.microbatch", "recompute": "recompute",
}  # fmt: skip


class Contender(NamedTuple):
    """Contender of a search: a tensor `scheme` with the sizes of its axes in order, a pipeline schedule `kind`, and
    the values of the other keys of CHOOSABLE."""

    scheme: str
    axes: tuple[int, ...]
    kind: str = "none"
    stages: int = 1
    chunks: int = 1
    data: int = 1
    context: int = 1
    experts: int = 1
    microbatch: int = 1
    recompute: str = "none"
    zero: int = 0
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
        redundant = () if self.read_set_size("data") else ("2p5d",)  # its depth is a number of replicas
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

    def list_set_values(self, part: str) -> list[Any]:
        """Return the one value of a part of CHOOSABLE, none if it is left open."""
        key = CHOOSABLE[part]
        return [] if is_open_key(self.config, key.removesuffix(".kind")) else [attrgetter(key)(self.config)]

    def read_set_size(self, part: str) -> int:
        """Return the number of ranks that a part of CHOOSABLE is, 0 if it is left open."""
        return (self.list_set_values(part) or [0])[0]

    @property
    def has_fixed_workers(self) -> bool:
        """Return True if the number of workers is not left open."""
        sizes = [n for scheme in self.scheme_tables for n in self.axis_sizes(scheme).values()]
        sizes += [self.read_set_size(part) for part in ("stages", "data", "context")]
        return 0 not in sizes and len(self.scheme_tables) == 1

    def expert_choices(self, data: int) -> list[int]:
        """Return the numbers of `data` replicas that may share the experts."""
        experts = self.config.model.experts
        return self.list_set_values("experts") or (find_divisors(gcd(data, experts)) if experts else [1])

    def tensor_expert_choices(self, scheme: str) -> Sequence[str]:
        """Return what ranks of a tensor scheme may do with experts, to choose among."""
        is_choosable = self.config.model.experts and self.expert_dividing_axes(scheme)
        return self.list_set_values("tensor_experts") or ([*TENSOR_EXPERTS] if is_choosable else ["split"])

    def expert_dividing_axes(self, scheme: str) -> list[str]:
        """Return the axes of a tensor scheme that may divide whole experts."""
        return axes_of_experts(self.scheme_tables[scheme].regions, asdict(self.config.branch), "whole")

    @cached_property
    def schedule_choices(self) -> list[tuple[str, int]]:
        """Return the (schedule, chunks per stage) to choose among for several stages."""
        most = max(1, min(MOST_CHUNKS, self.config.model.layers))
        kinds = self.list_set_values("kind") or SCHEDULES[1:]
        pairs = [(kind, n) for kind in kinds for n in self.list_set_values("chunks") or range(1, most + 1)]
        return [(kind, n) for kind, n in pairs if n == 1 or kind not in ONE_CHUNK if (kind, n) != ("interleaved", 1)]

    @property
    def single_stage_schedules(self) -> list[tuple[str, int]]:
        """Return the (schedule, chunks per stage) to choose among for a single stage."""
        return [("none", 1)] if self.list_set_values("kind") in ([], ["none"]) else self.schedule_choices

    @cached_property
    def microbatch_choices(self) -> list[int]:
        """Return the sequences of a microbatch on a replica to choose among."""
        sizes = find_divisors(self.config.train.global_batch)
        return self.list_set_values("microbatch") or sorted({n for n in sizes if n <= MOST_SEQUENCES} | {1})

    @property
    def recompute_choices(self) -> Sequence[str]:
        """Return what may be recomputed, to choose among."""
        return self.list_set_values("recompute") or RECOMPUTE

    @property
    def zero_choices(self) -> Sequence[int]:
        """Return the stages of ZeRO to choose among: none beside branches that only some ranks have."""
        return self.list_set_values("zero") or (ZERO[:1] if self.config.branch.only else ZERO)

    def build_config(self, choice: Contender) -> Config:
        """Return the configuration of a contender."""
        c, tensor = self.config, self.scheme_tables[choice.scheme]
        kind, inner = c.parallel.context_kind, c.parallel.context_heads
        if kind == "nested" and (inner >= choice.context or choice.context % inner):
            kind, inner = "auto", 0
        axes = dict(zip(list_tensor_axes(tensor), choice.axes, strict=True))
        config = replace(
            c,
            tensor=replace(tensor, axes=axes),
            parallel=replace(c.parallel, context_kind=kind, context_heads=inner),
            pipeline=replace(c.pipeline, file=c.pipeline.file if choice.kind == "file" else ""),
            train=replace(c.train),
        )
        for part, key in CHOOSABLE.items():
            set_value(config, key, getattr(choice, part))
        return config

    def key_values(self, choice: Contender) -> dict[str, Any]:
        """Return the values of a contender by configuration key."""
        names = list_tensor_axes(self.scheme_tables[choice.scheme])
        return {
            "tensor": choice.scheme,
            **{f"tensor.axes.{axis}": n for axis, n in zip(names, choice.axes, strict=True)},
            **{key.removesuffix(".kind"): getattr(choice, part) for part, key in CHOOSABLE.items()},
        }

    def format_overrides(self, choice: Contender) -> list[str]:
        """Return the arguments by which a user types the parts of a contender that the configuration leaves open."""
        of_kind = {"none": ("pipeline.stages", "pipeline.chunks"), **dict.fromkeys(ONE_CHUNK, ("pipeline.chunks",))}
        unread = [*of_kind.get(choice.kind, ()), *(() if self.config.model.experts else ["parallel.tensor_experts"])]
        open_values = {key: n for key, n in self.key_values(choice).items() if key not in unread}
        return [f"{key}={value}" for key, value in open_values.items() if is_open_key(self.config, key)]
