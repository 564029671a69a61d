"""Choices of a search for a plan: one value for each key that a configuration may leave open, and which it allows.

The fields of `Contender` are the table of these keys, one row each. The search, the neighbours of a plan and the typed
overrides follow from a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from operator import attrgetter
from typing import Any, NamedTuple

import yaml

from platform.config.composition import CONF
from platform.config.fields import Config, Tensor, choose_quantisation, is_open_key, set_value
from platform.config.layout_rules import forbids_zero, list_tensor_axes
from platform.optimizer.optimizers import count_offloaded_numbers, count_streamed_bytes, list_offloads
from platform.plan.generators import ONE_CHUNK
from platform.plan.layout import find_divisors
from platform.plan.scheme import GATHERED, TENSOR_EXPERTS, axes_of_experts
from platform.predict.choose_schedule import saves_scores
from platform.predict.make_plan import plan_quickly
from platform.predict.memory_budget import device_kind

# Schemes that tensor=auto chooses among, the simplest first. 2d is 2d_gather in more and smaller messages.
SCHEMES = ("serial", "1d", "1d_sp", "2d_gather", "2p5d", "3d", "3d_literal")
# Schedules that pipeline=auto chooses among. gpipe has the bubble of 1f1b, and more memory.
SCHEDULES = ("none", "1f1b", "interleaved", "zb_h1")
MOST_CHUNKS = 16
MOST_SEQUENCES = 64  # of a microbatch on a replica
RECOMPUTE = ("none", "selective", "full")
ZERO = (0, 1, 2, 3)
STRETCHES = (1, 2, 4, 8)  # blocks recomputed at a time
MLP_CHUNKS = 4  # in which feed-forward layers are computed where memory lacks
WHOLE = tuple(word for word in GATHERED if word != "panels")  # ways to gather operands whole
# How a key enters the closed form: as a column of sizes, of which those above 1 need another sketch of the model
# (AXIS) or none (SIZE); with a sketch for each value (SKETCH); as a mode in which all sizes are estimated (MODE), which
# may ignore it: plans are priced exactly in the end; or as one of the pairs of a schedule and its chunks (SCHEDULE).
AXIS, SIZE, SKETCH, MODE, SCHEDULE = "axis", "size", "sketch", "mode", "schedule"


class ChoosableKey(NamedTuple):
    """Row of the table: the `key`, how it `enters` the closed form, the `values` that a space has for a contender (the
    first one goes with any, the others go with parts and axes for which `allows` is true, of one contender or in
    columns), and the values `near` to the contender's own, by default all. Sizes without `values` multiply to the
    workers. A key that `refines` has its first value in all contenders, and the others in the best ones that may lack
    memory."""

    key: str
    enters: str
    values: Callable[[SearchSpace, Contender], Iterable[Any]] | None = None
    allows: Callable[[SearchSpace, Mapping[str, Any]], Any] | None = None
    near: Callable[[SearchSpace, Contender], Iterable[Any]] | None = None
    refines: bool = False

    def list_near(self, space: SearchSpace, contender: Contender) -> Iterable[Any]:
        """Return the values next to a contender's."""
        near = self.near or self.values
        return near(space, contender) if near else ()


def choosable(default: Any, *row: Any, refines: bool = False) -> Any:
    """Make the field of a contender that is a `row` of the table."""
    return field(default=default, metadata={"row": ChoosableKey(*row)._replace(refines=refines)})


def leaves_stages_even(layers: int, stages: Any, chunks: int) -> Any:
    """Return whether so many chunks on a stage make no stage deeper than one does."""
    return chunks * -(-layers // (stages * chunks)) == -(-layers // stages)


def mask_simpler_elsewhere(scheme: str, grid: Any) -> Any:
    """Return which sizes of a scheme's axes, the columns of `grid`, are a contender of a simpler scheme too."""
    alone = scheme in ("3d", "3d_literal") and (grid[:, 0] == 1) & (grid[:, 2] == 1)  # 1d_sp
    return (grid == 1).all(axis=1) | alone | ((scheme == "2p5d") & (grid[:, 0] == 1))


def _halve_and_double(number: int) -> tuple[int, int]:
    """Return half a number, and twice as much."""
    return number // 2, 2 * number


@dataclass(frozen=True, order=True)
class Contender:
    """Contender of a search: a tensor `scheme` with the sizes of its axes in order, and the value of each choosable
    key, in the order in which they are typed."""

    scheme: str
    axes: tuple[int, ...]
    kind: str = choosable("none", "pipeline.kind", SCHEDULE)
    stages: int = choosable(1, "pipeline.stages", SIZE)
    chunks: int = choosable(1, "pipeline.chunks", SCHEDULE)
    data: int = choosable(1, "parallel.data", SIZE)
    context: int = choosable(1, "parallel.context", AXIS)
    experts: int = choosable(
        1, "parallel.experts", AXIS, lambda space, _: find_divisors(space.config.model.experts or 1),
        lambda _, x: x["data"] % x["experts"] == 0,
        lambda space, c: (
            {*_halve_and_double(c.experts)} & {*find_divisors(gcd(c.data, space.config.model.experts or 1))}
        ),
    )  # fmt: skip
    tensor_experts: str = choosable(
        "split", "parallel.tensor_experts", SKETCH,
        lambda space, _: [*TENSOR_EXPERTS] if space.config.model.experts else ["split"],
        lambda space, x: sum(
            x.get(f"tensor.axes.{axis}", space.config.branch.axes.get(axis, 1)) > 1
            for axis in space.expert_dividing_axes(x["scheme"])
        ) > 0,
    )  # fmt: skip
    zero: int = choosable(
        0, "parallel.zero", MODE, lambda space, _: ZERO[:1] if forbids_zero(space.config) else ZERO,
        lambda _, x: x["data"] * x["context"] > 1,
        lambda space, c: ZERO if c.data * c.context > 1 and not forbids_zero(space.config) else (),
    )  # fmt: skip
    microbatch: int = choosable(
        1, "train.microbatch", SIZE,
        lambda space, _: [n for n in find_divisors(space.config.train.global_batch) if n <= MOST_SEQUENCES],
        lambda space, x: x["microbatch"] <= space.config.train.global_batch // x["data"],
        lambda _, c: [n for n in _halve_and_double(c.microbatch) if 1 <= n <= MOST_SEQUENCES],
    )  # fmt: skip
    recompute: str = choosable("none", "recompute", MODE, lambda space, c: space.list_recomputations(c.scheme))
    recompute_every: int = choosable(
        1, "recompute_every", MODE,
        lambda space, c: [
            n for n in STRETCHES
            if n == 1 or (c.recompute == "full" and n <= space.config.model.layers // (c.stages * c.chunks))
        ], refines=True,
    )  # fmt: skip
    gathered: str = choosable(
        "keep", "tensor.gathered", SKETCH,
        lambda space, c: WHOLE[: 1 + (prod(c.axes) > 1)] if space.gathers_operands(c.scheme) else ["panels"],
        None, lambda _, c: WHOLE[:1], refines=True,
    )  # fmt: skip
    mlp_chunks: int = choosable(
        1, "train.mlp_chunks", MODE, lambda space, _: (1, *(() if choose_quantisation(space.config) else [MLP_CHUNKS])),
        None, lambda *_: (1,), refines=True,
    )  # fmt: skip
    offload: str = choosable(
        "none", "optimizer.offload", MODE,
        lambda space, _: list_offloads(space.config) if device_kind(space.config) == "cuda" else ["none"],
        None, lambda *_: ("none",), refines=True,
    )  # fmt: skip

    @property
    def num_workers(self) -> int:
        """Return the number of workers of a contender's mesh, without branch axes."""
        return prod(self.axes) * prod(getattr(self, part) for part in list_worker_count_factors())

    @property
    def tie_order(self) -> tuple:
        """Return the order of contenders of equal price: fewer axes, then simpler schemes and schedules first."""
        words = (self.scheme, SCHEMES), (self.kind, SCHEDULES), (self.recompute, RECOMPUTE)
        ranks = (names.index(word) if word in names else len(names) for word, names in words)
        sizes = self.axes, self.stages, self.chunks, self.data, self.context, self.experts, self.microbatch, self.zero
        refined = self.recompute_every, self.gathered == WHOLE[1], self.mlp_chunks, self.offload != "none"
        return self.num_split_axes, *ranks, *sizes, *refined, self

    @property
    def common_name(self) -> str:
        """Return what people call the plan, such as FSDP 32 x TP 2; "" if nothing is split."""
        if self.scheme == "3d" and self.axes[2] == 1:
            tensor = [("FSDP", self.axes[0]), ("TP", self.axes[1])]
        elif self.scheme in ("1d", "1d_sp"):
            tensor = [("TP", self.axes[0])]
        else:
            tensor = [(self.scheme.replace("_", " "), prod(self.axes))]
        replicas = ("DP", "ZeRO-1", "ZeRO-2", "FSDP")[self.zero]
        rest = ("PP", self.stages), ("CP", self.context), ("EP", self.experts), (replicas, self.data)
        return " x ".join(f"{name} {ranks}" for name, ranks in (*tensor, *rest) if ranks > 1)

    @property
    def num_split_axes(self) -> int:
        """Return how many mesh axes of a contender have more than one rank, by which ties are broken."""
        return sum(n > 1 for n in (*self.axes, self.stages, self.data, self.context, self.experts))


CHOOSABLE: dict[str, ChoosableKey] = {f.name: f.metadata["row"] for f in fields(Contender) if "row" in f.metadata}


def list_parts(*enters: str) -> list[str]:
    """Return the parts of a contender that enter the closed form in some ways, in the order of the ways."""
    return [part for way in enters for part, row in CHOOSABLE.items() if row.enters == way]


def list_refining_parts() -> list[str]:
    """Return the parts of a contender of which other values than the first refine it."""
    return [part for part, row in CHOOSABLE.items() if row.refines]


def list_worker_count_factors() -> list[str]:
    """Return the parts of a contender, beside its axes, that multiply its workers."""
    return [part for part in list_parts(AXIS, SIZE) if not CHOOSABLE[part].values]


@lru_cache(maxsize=1)
def load_shipped_schemes() -> Mapping[str, Tensor]:
    """Return the tensor schemes among SCHEMES, by name, as their files describe them, without sizes of axes."""
    names = {f.name for f in fields(Tensor)}
    files = {name: yaml.safe_load((CONF / "tensor" / f"{name}.yaml").read_text()) for name in SCHEMES}
    return {name: Tensor(**{k: v for k, v in described.items() if k in names}) for name, described in files.items()}


@dataclass(frozen=True)
class SearchSpace:
    """Values that a configuration allows for each part of a Contender: one of a set key, all of an open one."""

    config: Config
    _recomputations: dict[str, Sequence[str]] = field(default_factory=dict)  # by tensor scheme

    @cached_property
    def scheme_tables(self) -> Mapping[str, Tensor]:
        """Return the tables of the tensor schemes to choose among, by name."""
        table = self.config.tensor
        if not is_open_key(self.config, "tensor"):
            return {table.scheme: table}
        redundant = () if self.read_set_size("data") else ("2p5d",)  # its depth is a number of replicas
        shipped = {n: replace(t, uneven=table.uneven) for n, t in load_shipped_schemes().items() if n not in redundant}
        return {n: table if n == table.scheme else t for n, t in shipped.items()}  # its regions may be the user's

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

    def list_configured_value(self, part: str) -> list[Any]:
        """Return the one value of a part of CHOOSABLE, none if it is left open."""
        key = CHOOSABLE[part].key
        return [] if is_open_key(self.config, key.removesuffix(".kind")) else [attrgetter(key)(self.config)]

    def read_set_size(self, part: str) -> int:
        """Return the number of ranks that a part of CHOOSABLE is, 0 if it is left open."""
        return (self.list_configured_value(part) or [0])[0]

    @property
    def worker_sizes(self) -> dict[str, int]:
        """Return the numbers of ranks that multiply to the workers, beside axes of tensors and branches; 0 if open."""
        return {part: self.read_set_size(part) for part in list_worker_count_factors()}

    @property
    def has_fixed_workers(self) -> bool:
        """Return True if the number of workers is not left open."""
        sizes = [n for scheme in self.scheme_tables for n in self.axis_sizes(scheme).values()]
        return 0 not in (*sizes, *self.worker_sizes.values()) and len(self.scheme_tables) == 1

    def iterate_worker_counts(self, workers: int) -> Iterator[int]:
        """Yield the numbers of workers for which contenders are looked for, from the largest down."""
        if not self.has_fixed_workers:
            yield from range(workers, 0, -1)
            return
        axes = self.axis_sizes(self.config.tensor.scheme).values()
        yield prod((*axes, self.branch_workers, *self.worker_sizes.values()))

    def list_values(self, part: str, contender: Contender) -> Sequence[Any]:
        """Return the values of a part with a row of `values` to choose among; one if its key is set."""
        values = CHOOSABLE[part].values
        return self.list_configured_value(part) or [*(values(self, contender) if values else ())]

    def list_recomputations(self, scheme: str) -> Sequence[str]:
        """Return the kinds of recomputation that save memory under a tensor scheme, as a plan of one layer shows."""
        if self.config.recompute_offload:
            return ("full",)
        if scheme not in self._recomputations:
            c, device = self.config, replace(self.config.cluster, device="auto")  # of which none is refused
            small = SearchSpace(replace(c, model=replace(c.model, layers=1), cluster=device))
            sizes = {**dict.fromkeys(list_parts(AXIS, SIZE), 1), "microbatch": MOST_SEQUENCES}
            # two ranks may divide nothing where others do
            axes = [dict.fromkeys(self.name_axes(scheme), ranks) for ranks in (2, 1) if device_kind(c) == "cuda"]
            selective = Contender(scheme, (), recompute="selective")
            plans = (plan_quickly(small.build_config(small.build_contender(selective, sizes | n))) for n in axes)
            plan = next(filter(None, plans), None)
            saving = RECOMPUTE if not plan or saves_scores(c, plan) else ("none", "full")
            self._recomputations[scheme] = saving
        return self._recomputations[scheme]

    def mask_allowed(self, part: str, x: Mapping[str, Any], start: Contender) -> Any:
        """Return which contenders may have their value of a part, by what they have: the first value, all of them."""
        allows = CHOOSABLE[part].allows
        return allows is None or (x[part] == self.list_values(part, start)[0]) | allows(self, x)

    def cross_values_of_parts(self, contenders: Sequence[Contender], way: str) -> Sequence[Contender]:
        """Return contenders with each combination of values of the parts that enter the closed form in one way."""
        for part in reversed(list_parts(way)):
            most = 1 if CHOOSABLE[part].refines else None
            contenders = [replace(c, **{part: value}) for c in contenders for value in self.list_values(part, c)[:most]]
        return contenders

    def refine_contender(self, contender: Contender) -> Sequence[Contender]:
        """Return a contender with all other combinations of the values of refining parts from its own ones on."""
        refined = [contender]
        for part in list_refining_parts():
            present = getattr(contender, part)
            choices = ((c, self.list_values(part, c)) for c in refined)
            refined = [replace(c, **{part: v}) for c, values in choices for v in values[values.index(present) :]]
        return refined[1:]

    def list_starts(self) -> Sequence[Contender]:
        """Return a contender, yet without sizes, of each tensor scheme and value of what has a sketch of its own."""
        return self.cross_values_of_parts([Contender(scheme, ()) for scheme in self.scheme_tables], SKETCH)

    def list_modes(self, start: Contender) -> Sequence[Contender]:
        """Return a contender, yet without sizes, in each mode."""
        schedules = dict.fromkeys((*self.single_stage_schedules, *self.schedule_choices))
        return self.cross_values_of_parts(
            [replace(start, kind=kind, chunks=chunks) for kind, chunks in schedules], MODE
        )

    def measure_offload(self, word: str) -> tuple[float, float]:
        """Return an element's numbers that a value of optimizer.offload keeps in host memory, and bytes streamed."""
        c = replace(self.config, optimizer=replace(self.config.optimizer, offload=word))
        return count_offloaded_numbers(c) * (device_kind(c) == "cuda"), count_streamed_bytes(c)

    @property
    def most_offloaded_numbers(self) -> float:
        """Return the most numbers of a master's size that an element has in host memory under a plan of the space."""
        return max(self.measure_offload(word)[0] for word in self.list_values("offload", Contender("", ())))

    def gathers_operands(self, scheme: str) -> bool:
        """Return True if operands of a tensor scheme's products are gathered whole, in place of panels."""
        return self.scheme_tables[scheme].gathered in WHOLE

    def expert_dividing_axes(self, scheme: str) -> list[str]:
        """Return the axes of a tensor scheme that may divide whole experts."""
        return axes_of_experts(self.scheme_tables[scheme].regions, asdict(self.config.branch), "whole")

    @cached_property
    def schedule_choices(self) -> list[tuple[str, int]]:
        """Return the (schedule, chunks per stage) to choose among for several stages."""
        most = max(1, min(MOST_CHUNKS, self.config.model.layers))
        kinds = self.list_configured_value("kind") or SCHEDULES[1:]
        pairs = [(kind, n) for kind in kinds for n in self.list_configured_value("chunks") or range(1, most + 1)]
        return [(kind, n) for kind, n in pairs if n == 1 or kind not in ONE_CHUNK if (kind, n) != ("interleaved", 1)]

    @property
    def single_stage_schedules(self) -> list[tuple[str, int]]:
        """Return the (schedule, chunks per stage) to choose among for a single stage."""
        return [("none", 1)] if self.list_configured_value("kind") in ([], ["none"]) else self.schedule_choices

    def name_axes(self, scheme: str) -> list[str]:
        """Return the keys of the sizes of a tensor scheme's axes, in order."""
        return [f"tensor.axes.{axis}" for axis in list_tensor_axes(self.scheme_tables[scheme])]

    def describe_contender(self, contender: Contender) -> dict[str, Any]:
        """Return what a contender has, by part, and by key the sizes of its axes."""
        return {**vars(contender), **dict(zip(self.name_axes(contender.scheme), contender.axes, strict=True))}

    def build_contender(self, start: Contender, x: Mapping[str, Any]) -> Contender:
        """Return a contender with other sizes, by part and by key of an axis."""
        sizes = {part: x[part] for part in list_parts(AXIS, SIZE)}
        return replace(start, axes=tuple(x[name] for name in self.name_axes(start.scheme)), **sizes)

    @cached_property
    def _mode_readers(self) -> Sequence[Callable[[Contender], Any]]:
        """Return the readers of a contender's family and of its mode in the family, see `read_mode`."""
        of_sketch, of_mode = (
            [part for part in list_parts(way) if not CHOOSABLE[part].refines] for way in (SKETCH, MODE)
        )
        return attrgetter("scheme", "kind", *of_sketch), attrgetter(*of_mode)

    def read_mode(self, contender: Contender) -> tuple[tuple, Any]:
        """Return a contender's family and its mode in it, on which errors of estimates depend, most on the first."""
        read_family, read_rest = self._mode_readers
        return (contender.context > 1, *read_family(contender)), read_rest(contender)

    def read_contender(self) -> Contender:
        """Return the contender that the configuration is."""
        tensor = self.config.tensor
        axes = tuple(tensor.axes.get(axis, 1) for axis in list_tensor_axes(tensor))
        values = {part: attrgetter(row.key)(self.config) for part, row in CHOOSABLE.items()}
        return Contender(tensor.scheme, axes, **values)

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
            optimizer=replace(c.optimizer),
        )
        for part, row in CHOOSABLE.items():
            set_value(config, row.key, getattr(choice, part))
        return config

    def key_values(self, choice: Contender) -> dict[str, Any]:
        """Return the values of a contender by configuration key."""
        axes = dict(zip(self.name_axes(choice.scheme), choice.axes, strict=True))
        values = {row.key.removesuffix(".kind"): getattr(choice, part) for part, row in CHOOSABLE.items()}
        return {"tensor": choice.scheme, **axes, **values}

    def format_overrides(self, choice: Contender) -> list[str]:
        """Return the arguments by which a user types the parts of a contender that the configuration leaves open."""
        of_kind = {"none": ("pipeline.stages", "pipeline.chunks"), **dict.fromkeys(ONE_CHUNK, ("pipeline.chunks",))}
        unread = [*of_kind.get(choice.kind, ()), *(() if self.config.model.experts else ["parallel.tensor_experts"])]
        unread += [
            row.key for part in list_refining_parts()
            if getattr(choice, part) == attrgetter((row := CHOOSABLE[part]).key)(self.config)
        ]  # fmt: skip
        open_values = {key: n for key, n in self.key_values(choice).items() if key not in unread}
        return [f"{key}={value}" for key, value in open_values.items() if is_open_key(self.config, key)]
