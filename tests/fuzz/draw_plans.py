"""Draw plans: layouts first, then sizes that they divide, so that most of what is drawn is legal however odd it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import lcm, prod
from pathlib import Path
from random import Random
from typing import Any

from platform.config.fields import Branch, Config, Parallel, Pipeline, Tensor
from platform.config.layout_rules import expert_axis_sizes, legal_context_rounds
from platform.plan.layout import find_divisors
from platform.plan.scheme import NESTED, ROLES, VECTORS, compose_scheme
from platform.predict.choose_schedule import count_microbatches
from platform.predict.make_plan import context_axis_sizes
from tests.fuzz.draw_data import draw_data
from tests.fuzz.draw_model import draw_model, draw_uneven
from tests.fuzz.draw_training import draw_lessons, draw_optimizer, draw_training
from tests.fuzz.tables import draw_table, spoil
from tests.harness.oracle import read
from tests.harness.schedule_files import to_csv

RANKS = 8
TOGETHER = (1, 2, 2, 3)  # microbatches of a step
EXPERTS = 0.3  # the share of cases that have experts
UNEVEN = 0.3  # the share of cases in which axes may cut dims into blocks that differ

SHIPPED = ("1d", "1d_sp", "2d", "2d_gather", "2p5d", "3d", "3d_literal")
MESH_TF = ("mesh_tf_data", "mesh_tf_model", "mesh_tf_2d", "mesh_tf_3d", "mesh_tf_empty")
BRANCHES = ("dsp", "dsp_slice", "dsp_csub")

# What one axis may split in one region or role: sets of dims that no tensor there has together
SPLITS: dict[str, tuple[str, ...]] = {
    "stream": ("", "", "batch", "length", "d_model", "io", "kv_latent q_latent"),
    "attention": ("", "batch", "length", "heads", "heads", "d_kv", "d_model"),
    "core": ("batch", "length", "heads", "heads", "d_kv", "memory_length"),
    "mlp": ("", "batch", "length", "d_ff hidden", "d_ff hidden", "d_model"),
    "experts": ("", "experts", "experts", "batch", "d_ff", "d_ff", "d_model"),
    "logits": ("", "batch", "length", "vocab", "vocab", "d_model"),
    "in": ("", "d_model io", "heads", "d_ff hidden", "vocab", "heads d_ff hidden vocab", "d_kv", "heads d_ff hidden",
           "d_kv d_ff vocab", "length d_ff hidden", "d_ff hidden", "experts", "experts heads vocab",
           "kv_latent q_latent d_ff"),
    "out": ("", "d_model io", "heads", "d_ff hidden", "heads d_ff hidden", "d_kv", "d_kv d_ff hidden", "experts",
            "experts heads"),
    "vector": ("", "", "d_model", "length", "experts", "kv_latent q_latent"),
}  # fmt: skip
EVERYWHERE = ("", "batch", "length", "heads", "d_kv", "d_ff hidden", "vocab", "d_model", "heads d_ff hidden", "io",
              "heads d_ff vocab hidden", "d_kv d_ff", "memory_length", "memory_length d_ff", "d_ff vocab", "experts",
              "experts heads", "kv_latent q_latent")  # fmt: skip
SIZES: dict[int, Sequence[tuple[int, ...]]] = {  # ranks of the scheme -> sizes of its axes
    1: ((1,),),
    2: ((2,), (2,), (1, 2)),
    3: ((3,),),
    4: ((4,), (2, 2), (2, 2)),
    6: ((2, 3), (3, 2), (6,)),
    8: ((2, 2, 2), (2, 4), (4, 2)),
}
FACTORS: dict[int, Sequence[int]] = {1: (), 2: (2,), 3: (3,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}


def axes_of(r: Random, ranks: int) -> dict[str, int]:
    """Draw axes named a, b, c with this product."""
    sizes = r.choice(SIZES[ranks])
    return dict(zip("abc", sizes, strict=False))


def draw_map(r: Random, axes: Mapping[str, int], splits: Sequence[str]) -> dict[str, list[str]]:
    """Draw what each axis splits; where several split one dim, in any order."""
    layout: dict[str, list[str]] = {}
    for axis in r.sample(list(axes), len(axes)):
        for dim in r.choice(splits).split():
            layout.setdefault(dim, []).append(axis)
    return layout


def draw_scheme(r: Random, family: str, ranks: int) -> tuple[Tensor, Branch]:
    """Draw a tensor scheme and a branch splitting over so many ranks together."""
    tensor, branch = FAMILIES[family](r, ranks)
    tensor.gathered = r.choice(("keep", "keep", "again", "panels"))
    return tensor, branch


def _shipped(r: Random, ranks: int, names: Sequence[str] = (*SHIPPED, *SHIPPED, *MESH_TF)) -> tuple[Tensor, Branch]:
    """Read a shipped scheme and spread the ranks over its axes."""
    tensor = Tensor(**read("tensor", r.choice(names)))
    tensor.axes = dict.fromkeys(tensor.order, 1)
    for factor in FACTORS[ranks] if tensor.order else ():
        tensor.axes[r.choice(tensor.order)] *= factor
    return tensor, Branch()


def _branched(r: Random, ranks: int) -> tuple[Tensor, Branch]:
    """Draw a branch splitting with one axis or two, and a shipped scheme over the other ranks."""
    kind, factors = r.choice(BRANCHES), list(r.choice(SIZES[ranks]))
    own = [factors.pop(0) for _ in range(r.choice((1, 1, 2)) if len(factors) > 1 else 1)]
    axes = dict(zip("gh", own, strict=False))
    branch = Branch(**read("branch", kind), axes=axes, order=r.choice(("inner", "outer")))
    if branch.slices_heads:
        branch.slice_via = r.choice(("all_to_all", "all_gather"))
    tensor, _ = _shipped(r, prod(factors), ("serial", *SHIPPED) if prod(factors) > 1 else ("serial",))
    return tensor, branch


def _one_map(r: Random, ranks: int) -> tuple[Tensor, Branch]:
    """Draw one map for all regions and parameters."""
    axes = axes_of(r, ranks)
    rules = draw_map(r, axes, EVERYWHERE)
    regions = {region: rules for region in ("stream", "attention", "mlp", "logits")}
    return Tensor("layout", axes=axes, regions=regions, parameters={"all": rules}), Branch()


def _map_per_region(r: Random, ranks: int) -> tuple[Tensor, Branch]:
    """Draw a map for the stream and for most regions and roles."""
    axes = axes_of(r, ranks)
    rules = {place: draw_map(r, axes, s) for place, s in SPLITS.items() if place == "stream" or r.random() < 0.8}
    tensor = Tensor("layout", axes=axes)
    tensor.regions = {place: layout for place, layout in rules.items() if place not in ROLES}
    tensor.parameters = {place: layout for place, layout in rules.items() if place in ROLES}
    return tensor, Branch()


FAMILIES = {"shipped": _shipped, "branch": _branched, "layout": _one_map, "regions": _map_per_region}
SCHEMES = tuple(FAMILIES)
SCHEDULES = ("none", "whole", "zb_h1", "table")


def draw_pipeline(r: Random, family: str, room: int) -> Pipeline:
    """Draw a schedule and at most `room` stages; a table is made when the number of microbatches is known."""
    if family == "none":
        return Pipeline("none")
    stages = min(room, r.choice((2, 2, 2, 2, 3, 4)))
    if family == "whole":
        kind = r.choice(("gpipe", "1f1b", "interleaved"))
        chunks = (r.choice((2, 3)) if stages == 2 else 2) if kind == "interleaved" else 1
    else:
        kind = "zb_h1" if family == "zb_h1" else "file"
        stages, chunks = r.choice((1, stages, stages)), r.choice((1, 1, 1, 2))
    return Pipeline(kind, stages, chunks, scatter_gather=r.random() < 0.7)


def draw_plan(r: Random, scheme: str, schedule: str, least_data: int = 1, experts: float = EXPERTS) -> Config:
    """Draw all of a plan but the model and the batch; `experts`: the share of cases that have some."""
    c = Config(precision="fp64")
    if least_data == 1 and r.random() < experts / 2:
        least_data = r.choice((2, 2, 4))
    c.pipeline = draw_pipeline(r, schedule, RANKS // least_data)
    room = RANKS // c.pipeline.stages // least_data
    ranks = r.choice([n for n in (2, 2, 2, 2, 2, 3, 4, 4, 6, 8) if n <= room] or [1])
    c.tensor, c.branch = draw_scheme(r, scheme, ranks)
    most = RANKS // (c.pipeline.stages * ranks)
    c.parallel = Parallel(max(least_data, r.randint(1, most) if r.random() < 0.3 else 1))
    c.parallel.experts = r.choice((1, *find_divisors(c.parallel.data)[1:] * 2))
    if c.parallel.data > 1 and not c.branch.only:
        c.parallel.zero, c.parallel.zero_group = r.choice((0, 1, 2, 3)), r.choice((0, 2 * c.parallel.experts))
    c.recompute = r.choice(("none", "none", "selective", "full"))
    c.recompute_every = r.choice((1, 1, 2))
    draw_context(Random(repr(c)), c, RANKS // (c.pipeline.stages * ranks * c.parallel.data))
    beside = Random(str(c))  # all else is drawn as without it
    c.recompute_offload = c.recompute == "full" and beside.random() < 0.5
    c.train.mlp_chunks = beside.choice((1, 1, 2, 3))
    c.parallel.tensor_experts = beside.choice(("split", "whole"))
    square = c.tensor.axes.get("y", 1) == c.tensor.axes.get("z", 1) > 1 and not c.parallel.zero
    c.tensor.vectors = beside.choice((*VECTORS,)) if square else "even"
    c.tensor.async_products = beside.choice(("auto", "on"))
    c.train.pair_passes = beside.choice(("auto", "on", "on"))
    return c


def draw_context(r: Random, c: Config, room: int) -> None:
    """Draw how many ranks, at most `room`, share each sequence of a plan, and how they attend to all of it."""
    if r.random() < 0.4:
        c.parallel.context = r.choice([n for n in (2, 2, 3, 4, 4) if n <= room] or [1])
        c.parallel.context_kind = r.choice(("auto", "gather", "ring", "heads", *["nested"] * (c.parallel.context == 4)))
        if c.parallel.context_kind == "nested":
            c.parallel.context_heads = 2
            c.parallel.context_kind = Random(str(c)).choice(NESTED)  # all else is drawn as ever


def needed(configs: Sequence[Config]) -> dict[str, int]:
    """Find for every dim what its size must be a multiple of under all these plans: in one replica, or in replicas that
    share the experts."""
    out: dict[str, int] = {}
    for c in configs:
        data, shared = c.parallel.data, c.parallel.experts
        context = context_axis_sizes(c, c.parallel.context_kind)
        kinds = {"context": context, "tensor_experts": c.parallel.tensor_experts}
        scheme = compose_scheme(asdict(c.tensor), asdict(c.branch), data, experts=shared, **kinds)
        sizes = {**dict(scheme.axes), "expert": shared, **context}
        for layout in (*scheme.regions.values(), *scheme.parameters.values()):
            for dim, axes in layout.items():
                inside = [a for a in axes if a in sizes and (a, dim) != ("expert", "batch")]
                out[dim] = lcm(out.get(dim, 1), prod(sizes[a] for a in inside))
    return out


def draw_batch(r: Random, configs: Sequence[Config], focus: str) -> None:
    """Draw the microbatch of every plan and one global batch for all."""
    for c in configs:
        least = needed([c]).get("batch", 1)
        c.train.microbatch = least * (1 if focus == "one token" else r.choice((1, 1, 2, 3)))
        if c.tensor.uneven and least > 1 and focus != "one token":
            c.train.microbatch = Random(repr(c)).randint(least, 2 * least)
    c = configs[0]
    whole = c.train.microbatch * c.parallel.data
    batch = whole * r.choice(TOGETHER)
    odd = focus in ("partial batch", "uneven replicas") or r.random() < 0.3
    if odd and whole > 1:
        batch = max(1, batch - r.randint(1, whole - 1))
    for c in configs:
        c.train.global_batch = batch


def draw_table_of(r: Random, c: Config, folder: Path, name: str, broken: bool = False) -> None:
    """Draw the table of a plan with pipeline=file and write it."""
    p = c.pipeline
    table = draw_table(r, p.stages, p.chunks, count_microbatches(c, c.parallel.data))
    p.file = str(folder / f"{name}.csv")
    to_csv(spoil(r, table) if broken else table, p.file)


def draw_case(
    r: Random, scheme: str, schedule: str, focus: str, folder: Path, experts: float = EXPERTS
) -> list[Config]:
    """Draw the plans that one run goes through, one after the other: two where it resumes, else one. `experts`: the
    share of cases that have some."""
    least = r.choice((2, 3, 3, 5, 7)) if focus == "uneven replicas" else 1
    configs = [draw_plan(r, scheme, schedule, least, experts)]
    if focus == "resume":
        configs.append(draw_plan(r, r.choice(SCHEMES), r.choice(SCHEDULES), experts=experts))
    chunks = max(c.pipeline.stages * c.pipeline.chunks for c in configs)
    model = draw_model(r, needed(configs), chunks, focus == "one token", experts)
    if (other := Random(repr(model))).random() < UNEVEN:
        draw_uneven(other, model, needed(configs))
        for c in configs:
            c.tensor.uneven = True
    draw_batch(r, configs, focus)
    seed, clip, decay = r.randint(0, 3), r.choice((0.0, 0.5, 1e-3)), r.choice((0.0, 0.1))
    for i, c in enumerate(configs):
        c.model, c.seed, c.train.steps = replace(model), seed, 3
        if not model.experts:
            c.parallel.experts, c.parallel.tensor_experts = 1, "split"
        if c.parallel.experts > 1 and not model.capacity_factor and not expert_axis_sizes(c):
            c.parallel.lent_experts = r.randint(0, min(2, model.experts - model.experts // c.parallel.experts))
        c.optimizer.lr, c.optimizer.clip, c.optimizer.weight_decay = 1e-2, clip, decay
        c.optimizer.eps = 1e-6  # the gradient of a key bias is zero but for rounding, which must not become an update
        if c.pipeline.kind == "file":
            draw_table_of(r, c, folder, str(i))
    draw_data(r, configs, folder)
    draw_optimizer(r, configs)
    draw_training(r, configs)
    lessons = Random(repr((configs[0].model, configs[0].train)))  # all else is drawn as without it
    draw_lessons(lessons, configs, needed(configs), str(folder / "pairs.jsonl"))
    for c in configs:
        if rounds := legal_context_rounds(c) if c.parallel.context > 1 else []:
            c.parallel.context_pieces = 2 * Random(repr(c)).choice((0, *rounds))  # all else is drawn as ever
    return configs


def changed(r: Random, configs: list[Config], folder: Path) -> list[Config]:
    """Change one or two values of a legal plan to what may well be illegal, each of a legal type."""
    c = configs[-1]
    for change in r.sample(CHANGES, r.choice((1, 1, 2))):
        change(r, c, folder)
    return [c]


def _model_size(r: Random, c: Config, folder: Path) -> None:
    name = r.choice(
        ("d_model", "heads", "kv_heads", "d_kv", "d_ff", "length", "vocab", "layers", "buckets", "distance")
    )
    setattr(c.model, name, r.randint(0, 9))


def _microbatch(r: Random, c: Config, folder: Path) -> None:
    c.train.microbatch = r.randint(1, 5)


def _same_axis_twice(r: Random, c: Config, folder: Path) -> None:
    rules = r.choice([*c.tensor.regions.values(), *c.tensor.parameters.values(), {}])
    rules[r.choice(("batch", "length", "d_model", "heads", "d_ff", "vocab"))] = list(c.tensor.axes)


def _stages(r: Random, c: Config, folder: Path) -> None:
    c.pipeline.stages, c.pipeline.chunks = r.randint(1, 4), r.randint(1, 3)


def _schedule(r: Random, c: Config, folder: Path) -> None:
    c.pipeline.kind = r.choice(("none", "gpipe", "1f1b", "interleaved", "zb_h1", "file"))


def _table(r: Random, c: Config, folder: Path) -> None:
    if c.pipeline.kind == "file":
        draw_table_of(r, c, folder, "broken", broken=True)


def _zero(r: Random, c: Config, folder: Path) -> None:
    c.parallel.zero = r.choice((1, 2, 3))


def _data(r: Random, c: Config, folder: Path) -> None:
    c.parallel.data = r.randint(0, 4)


def _context(r: Random, c: Config, folder: Path) -> None:
    c.parallel.context, c.parallel.context_heads = r.randint(0, 4), r.choice((0, 0, 2))
    c.parallel.context_pieces = Random(str(c)).randint(0, 6)


def _axis_size(r: Random, c: Config, folder: Path) -> None:
    if c.tensor.axes:
        c.tensor.axes[r.choice(list(c.tensor.axes))] = r.randint(0, 4)


def _branch(r: Random, c: Config, folder: Path) -> None:
    c.branch = Branch(**read("branch", r.choice(BRANCHES)), axes={r.choice("gat"): r.randint(1, 3)})


CHANGES: tuple[Any, ...] = (
    _model_size, _model_size, _microbatch, _same_axis_twice, _stages, _schedule, _table, _zero, _data, _axis_size,
    _branch, _context,
)  # fmt: skip
