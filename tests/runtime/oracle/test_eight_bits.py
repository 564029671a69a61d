"""Products in 8 bits under every plan: equal to one process that quantises the same numbers, in fp64; what a layout
would make another number is refused; and the negative controls of scales and maxima."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.plan.plan_check import find_unsoundness
from platform.plan.plan_data import decode_plan, encode_plan
from platform.predict import make_plan as planning
from platform.predict.make_plan import make_plan
from platform.runtime import eight_bits, scaled_einsums, statistics
from tests.harness.oracle import MODELS, assemble, check_bytes, compare, configure, count_flips, run
from tests.harness.replay import replay

full = pytest.mark.full
BLOCK = 8
ONE_STEP = {"layers": 1}
PLANS: dict[str, dict[str, Any]] = {
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "microbatch": 2, "zero": 2},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "2d_gather": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}},
    "2p5d": {"tensor": "2p5d", "axes": {"d": 2, "r": 2, "c": 2}},
    "3d_literal": {"tensor": "3d_literal", "axes": {"x": 2, "y": 2, "z": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "zero 3": {"data": 2, "microbatch": 2, "zero": 3},
    "3d, zero 3": {"tensor": "3d", "axes": {"x": 2, "z": 2}, "data": 2, "microbatch": 2, "zero": 3},
    "contexts": {"context": 2, "data": 2, "microbatch": 2, "zero": 3, "length": 32},
    "ring": {"context": 2, "context_kind": "ring", "length": 32},
    "stages": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2, "layers": 2},
    "interleaved": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "microbatch": 2, "layers": 4},
    "recomputed": {"tensor": "1d_sp", "axes": {"t": 2}, "recompute": "full"},
    "gathered again": {"tensor": "3d", "axes": {"y": 2, "z": 2}, "gathered": "again"},
    "sub-grids": {"branch": "dsp", "branch_axes": {"g": 2}, "tensor": "1d", "axes": {"t": 2}},
}
SUMMA = ("2d", "2p5d")  # whose panels have no maximum of a row or a tensor
FEW = {("1d_sp", "block"), ("3d", "block"), ("stages", "row"), ("2d", "block"), ("1d", "tensor"), ("ring", "mx")}
SCALES = ("block", "mx", "row", "tensor")


def configured(scale: str, model: str = "llama", block: int = BLOCK, **how: Any):
    """A small model of whole blocks, whose products are in 8 bits."""
    c = configure(**{"layers": 1, "d_model": 64, **MODELS[model], "d_ff": 128, **how})
    c.quantise.scale, c.quantise.block = scale, block
    if model == "experts":
        c.model.expert_d_ff = 64
    return c


def one_process(c):
    """The same microbatches in one process."""
    alone = configure(global_batch=c.train.global_batch, microbatch=c.train.microbatch * c.parallel.data)
    alone.model, alone.optimizer, alone.seed, alone.quantise, alone.tune = (
        c.model, c.optimizer, c.seed, c.quantise, c.tune,
    )  # fmt: skip
    return run(alone)[1][0]


@pytest.fixture(autouse=True)
def small_mx(monkeypatch):
    """MX in blocks as small as the model is."""
    from platform.config import fields

    monkeypatch.setattr(fields, "MX_BLOCK", BLOCK)


def scaled_products(plan) -> list[Any]:
    return [e.scaled for o in plan.operations.values() for g in o.groups for e in g.einsums if e.scaled]


CASES = [(p, s) for p in PLANS for s in SCALES if p not in SUMMA or s in ("block", "mx")]


@pytest.mark.parametrize(
    ("name", "scale"), [case if case in FEW else pytest.param(*case, marks=full) for case in CASES]
)
def test_equal_to_one_process(name, scale):
    """Loss, gradients, two updates, counted bytes: 1e-10; and no number flips."""
    c = configured(scale, **PLANS[name])
    plan, ranks = run(c)
    compare(c, plan, ranks, expected := one_process(c))
    check_bytes(plan, ranks)
    assert replay([r.log for r in ranks]) is None
    assert not find_unsoundness(plan)
    assert count_flips(c, plan, ranks, expected) == 0
    assert decode_plan(encode_plan(plan)) == plan
    assert any(x.maxima for x in scaled_products(plan)) == (
        scale in ("row", "tensor") and plan.mesh.world_size > plan.num_stages
    )


EXPERTS = {"model": "experts", "layers": 1}
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "slots of experts": ("block", {**EXPERTS, "data": 2, "experts_of": 2, "microbatch": 2, "capacity_factor": 2.0}),
    "experts, 1d": ("row", {**EXPERTS, "tensor": "1d", "axes": {"t": 2}, "capacity_factor": 2.0}),
    "rows of experts": ("block", {**EXPERTS, "data": 2, "experts_of": 2, "microbatch": 2, "capacity_factor": 0.0}),
    "rows, tensor": ("tensor", {**EXPERTS, "data": 2, "experts_of": 2, "microbatch": 2, "capacity_factor": 0.0}),
    "gpt": ("block", {"model": "gpt", "tensor": "1d_sp", "axes": {"t": 2}}),
    "latent": ("row", {"model": "latent", "tensor": "1d", "axes": {"t": 2}}),
}


@pytest.mark.parametrize("name", [n if n == "rows of experts" else pytest.param(n, marks=full) for n in SPECIAL])
def test_special_ones_too(name):
    scale, how = SPECIAL[name]
    c = configured(scale, **how)
    plan, ranks = run(c)
    compare(c, plan, ranks, one_process(c))
    check_bytes(plan, ranks)
    assert not find_unsoundness(plan)


CORES: dict[str, dict[str, Any]] = {
    "keys": {"memory_length": ["a"]},
    "features": {"d_kv": ["a"]},
    "queries": {"length": ["a"]},
}
PADDED = {"bert": {}, "original": {}, "t5": {}, "whole_t5": {}, "gqa": {"kind": "encoder", "kv_heads": 2}}
PADDED_CASES = [(m, core) for m in PADDED for core in (*CORES, "ring", "capped")]
PADDED_FEW = {("bert", "keys"), ("whole_t5", "features"), ("t5", "capped")}


def padded(model: str, core: str):
    """A model whose last microbatch has a sequence of padding alone, with attention computed in another way than in one
    process, or with capped scores in both."""
    how = {"context": 2, "context_kind": "ring"} if core == "ring" else {}
    if core in CORES:
        how = {"tensor": "layout", "axes": {"a": 2}, "rules": {}}
    if core == "capped":
        how = {"tensor": "1d", "axes": {"t": 2}, "attention_cap": 0.5}
    of_model = {**MODELS.get(model, {}), **PADDED[model]}
    c = configure(**{"d_model": 64, **of_model, "layers": 1, "d_ff": 128, "global_batch": 7, **how})
    c.quantise.scale = "row"
    if core in CORES:
        c.tensor.regions = {"stream": {}, "core": CORES[core]}
    return c


@pytest.mark.parametrize(
    ("model", "core"), [case if case in PADDED_FEW else pytest.param(*case, marks=full) for case in PADDED_CASES]
)
def test_padding_has_the_same_numbers_in_every_kernel(model, core):
    """Weights see what attention makes of padding: gradients have one scale with those of tokens."""
    c = padded(model, core)
    plan, ranks = run(c)
    compare(c, plan, ranks, one_process(c))


def test_negative_control_an_average_over_padding(monkeypatch):
    c, of_rows = padded("bert", "keys"), statistics.softmax
    least = torch.finfo(torch.float64).min
    monkeypatch.setattr(statistics, "softmax", lambda x, *how, **blank: of_rows(x.clamp(min=least), *how, **blank))
    plan, ranks = run(c)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, plan, ranks, one_process(c))


def test_what_stays_as_it_is():
    """Embedding, head, router; gradients of weights of rows of experts, which begin no block with each expert."""
    c = configured("block", model="experts", capacity_factor=0.0)
    plan = make_plan(c)
    products = [o for o in plan.operations.values() if o.groups]
    scaled = {o.operation.name: [e.scaled for g in o.groups for e in g.einsums] for o in products}
    in_bits = {name.partition(".")[2].partition(".")[2] for name, each in scaled.items() if all(each)}
    assert "router" in str([*scaled]) and "router" not in str(in_bits) and "head" not in str(in_bits)
    assert {"query", "output"} <= {name.rpartition(".")[2] for name in in_bits}
    rows = [s for name, each in scaled.items() if "experts" in name for s in each]
    assert rows and all(s.products == ("forward", "input") for s in rows)
    queries = [s for name, each in scaled.items() if "attention.q" in name for s in each]
    assert queries and all(s.products == ("forward", "input", "weight") for s in queries)
    c.quantise.skip = ["*.attention.*"]
    skipped = {n for n, o in make_plan(c).operations.items() if any(e.scaled for g in o.groups for e in g.einsums)}
    assert skipped and not any("attention" in name for _, name in skipped)


CUT: dict[str, tuple[dict[str, Any], str]] = {
    "features": ({"tensor": "1d", "axes": {"t": 2}, "d_ff": 72}, "d_ff=72 is cut by t inside a block of 8"),
    "heads": ({"tensor": "1d", "axes": {"t": 4}, "d_model": 48}, "heads=8 is cut by t inside a block of 8"),
    "tokens": ({"context": 2}, "length=16 is cut by context inside a block of 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_a_block_is_never_cut(name):
    """Such a plan is refused, found unsound, and would be another model: a negative control."""
    how, words = CUT[name]
    c = configured("block", model="gpt", **how)
    c.model.d_ff = how.get("d_ff", 128)
    with pytest.raises(ConfigError) as refused:
        make_plan(c)
    assert words in str(refused.value) and "nearest legal: row" in str(refused.value)


@pytest.mark.parametrize("name", ["features"])
def test_a_cut_block_is_another_model(name, monkeypatch):
    monkeypatch.setattr(planning, "describe_other_scales", lambda *_: "")
    c = configured("block", model="gpt", **CUT[name][0])
    c.model.d_ff, c.quantise.powers = 72, "off"  # a power of two changes but the smallest numbers
    plan, ranks = run(c)
    assert "inside a block of 8" in str(find_unsoundness(plan))
    with pytest.raises(AssertionError, match="gradient"):
        compare(c, plan, ranks, one_process(c))


def test_a_neighbours_scale_is_found(monkeypatch):
    """The negative control: on one rank, of one product, the scales of other blocks."""
    c = configured("block", **PLANS["1d"])
    expected, real = one_process(c), scaled_einsums.quantise_matrices

    def exchange(x, tile, form, powers, maxima=None):
        scaled = real(x, tile, form, powers, maxima)
        if tile == (BLOCK, BLOCK) and x.shape[-2:] == (64, 64):
            return scaled._replace(scales=scaled.scales.roll(1, -1))
        return scaled

    monkeypatch.setattr(scaled_einsums, "quantise_matrices", exchange)
    plan, ranks = run(c)
    with pytest.raises(AssertionError, match="gradient"):
        compare(c, plan, ranks, expected)


@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_the_maximum_of_one_rank_is_found(scale, monkeypatch):
    """The negative control: each rank scales by its own maxima."""
    c = configured(scale, **PLANS["1d"])
    expected = one_process(c)
    monkeypatch.setattr(scaled_einsums, "max_over_ranks", lambda communicator, x, over: x)
    plan, ranks = run(c)
    with pytest.raises(AssertionError, match=r"gradient|replicas"):
        compare(c, plan, ranks, expected)
    with pytest.raises(AssertionError, match="bytes moved"):
        check_bytes(plan, ranks)


def test_a_maximum_that_is_not_planned_is_unsound():
    plan = make_plan(configured("row", **PLANS["1d"]))

    def without_maxima(o):
        groups = [
            replace(g, einsums=tuple(replace(e, scaled=e.scaled and replace(e.scaled, maxima=())) for e in g.einsums))
            for g in o.groups
        ]
        return replace(o, groups=tuple(groups))

    chunks = [replace(c, operations={k: without_maxima(o) for k, o in c.operations.items()}) for c in plan.chunks]
    assert "has one scale over t" in str(find_unsoundness(replace(plan, chunks=tuple(chunks))))


def test_another_number_is_another_model():
    """8 bits are seen: the loss is not that of 64, nor is one scale's another's."""
    losses = {}
    for scale in ("none", *SCALES):
        c = configured(scale, **ONE_STEP)
        c.quantise.powers = "auto" if scale == "mx" else "off"
        losses[scale] = one_process(c).loss
    assert len(set(losses.values())) == len(losses)
    assert all(abs(loss - losses["none"]) < 0.01 * losses["none"] for loss in losses.values())


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_the_words_of_precision(precision):
    """bf16, with blocks or MX; and equal numbers in all that is not in 8 bits."""
    c = configured("auto", precision=precision)
    plan = make_plan(c)
    (how,) = {s.how for s in scaled_products(plan)}
    assert plan.precision == "bf16" and how.powers
    assert (how.scale, how.block) == (("block", BLOCK) if precision == "fp8" else ("mx", BLOCK))
    c.precision, c.quantise.scale = "bf16", how.scale
    assert make_plan(c) == plan
    c.quantise.scale = "none"
    assert not scaled_products(make_plan(c))


def find_gap(scale: str, name: str) -> tuple[float, float]:
    """In bf16: how far the first gradients of a plan are from those of one process, and these from those in fp64."""
    c = configured(scale, **PLANS[name], precision="bf16")
    alone, wide = configured(scale, precision="bf16"), configured("none")
    for one in (alone, wide):
        one.train.microbatch, one.train.global_batch = c.train.microbatch * c.parallel.data, c.train.global_batch
    plan, ranks = run(c)
    gradients = assemble(plan, ranks, lambda r: r.gradients)
    one, exact = (run(x)[1][0].gradients for x in (alone, wide))
    pairs = [
        (x - one[n][tuple(map(slice, x.shape))].double(), one[n].double() - exact[n]) for n, x in gradients.items()
    ]
    gap, error = (float(sum(x.square().sum() for x in each)) ** 0.5 for each in zip(*pairs, strict=True))
    return gap, error


@full
@pytest.mark.parametrize("name", ["1d", "1d_sp", "3d", "2d", "recomputed", "zero 3"])
def test_bf16_runs_differ_little_more_than_without(name):
    """Sums round by layout. Of numbers that differ by one rounding in bf16, one in 16 crosses a border of e4m3, and
    moves 16 times as far: the same on average, 4 times in root mean square, and less than 8 bits themselves do."""
    (bare, _), *gaps = (find_gap(scale, name) for scale in ("none", "block", "row") if (name, scale) != ("2d", "row"))
    assert all(gap <= min(4 * bare, 0.75 * error) for gap, error in gaps), (bare, gaps)


def round_to(bits: int, x: torch.Tensor) -> torch.Tensor:
    """Numbers in fp32 rounded to so many bits behind the point, to even."""
    dropped = 23 - bits
    codes = x.float().contiguous().view(torch.int32)
    codes = codes + (1 << dropped - 1) - 1 + ((codes >> dropped) & 1)
    return ((codes >> dropped) << dropped).view(torch.float32)


@full
@pytest.mark.parametrize(("bits", "least"), [(7, 0.9), (5, 1.2), (3, 2.5)])
def test_numbers_that_flip_are_why(bits, least, monkeypatch):
    """A number in fewer bits flips more seldom, and further: as the root of how much coarser it is than bf16, at most.
    With as many bits as bf16 has, 7, the gap is that without 8 bits; 3 are those of e4m3."""
    bare, _ = find_gap("none", "1d")
    monkeypatch.setattr(eight_bits, "choose_factors", lambda maxima, largest, powers: torch.ones_like(maxima))
    monkeypatch.setattr(eight_bits, "round_tiles", lambda x, tile, factors, dtype: round_to(bits, x))
    gap, _ = find_gap("block", "1d")
    assert least * bare <= gap <= 1.1 * 2 ** ((7 - bits) / 2) * bare, (gap, bare)


@full
def test_negative_control_maxima_of_each_rank_differ_more(monkeypatch):
    (bare, _) = find_gap("none", "1d")
    monkeypatch.setattr(scaled_einsums, "max_over_ranks", lambda communicator, x, over: x)
    gap, error = find_gap("row", "1d")
    assert gap > 4 * bare, (gap, bare, error)
