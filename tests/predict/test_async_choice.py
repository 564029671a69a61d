"""Which products are one with their collectives, and why not others: as data of the plan, checked, priced, and said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.plan.async_products import fuse_products, list_fused_axes
from platform.plan.plan_check import find_unsoundness
from platform.plan.plan_data import decode_plan, encode_plan, plan_digest
from platform.plan.step_collectives import communication
from platform.plan.whole_blocks import reasons_against_whole_blocks
from platform.predict.async_choice import reason_against_async_products
from platform.predict.make_plan import make_plan
from platform.predict.price import collective_seconds, price_work, product_seconds
from platform.predict.replan import replan
from platform.predict.step_price import build_step_work, read_hardware, step_price
from platform.predict.work import Part
from tests.harness.oracle import MODELS, configure
from tests.harness.plan_mutants import with_operations

FUSED = {
    "1d_sp": {"query": "x", "output": "result", "up": "x", "down": "result"},
    "3d": {"output": "result", "up": "x", "down": "x"},  # of Q, K and V each is gathered
    "dsp": {"query": "x", "output": "result", "up": "x", "down": "result"},
    "1d": {},
    "2d": {},
    "2d_gather": {},
}
SCHEMES = {
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 4}},
    "3d": {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "2d_gather": {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}},
}


def planned(**how):
    return make_plan(configure(**{"layers": 1, **how}))


@pytest.mark.parametrize("name", SCHEMES)
def test_products_that_are_one_with_a_collective_over_one_axis(name):
    plan = planned(**SCHEMES[name])
    fused = fuse_products(plan)
    ends = {o.operation.name.split(".")[-1]: g.fuses for o in fused.operations.values() for g in o.groups if g.fuses}
    assert ends == FUSED[name]
    assert communication(fused) == communication(plan)
    assert not find_unsoundness(fused)
    assert (plan_digest(fused) == plan_digest(plan)) == (not FUSED[name])
    assert decode_plan(encode_plan(fused)) == fused and (fused == plan) == (not FUSED[name])


@pytest.mark.parametrize("kind", ["whole", "result of several", "contracted", "uneven", "gathered twice"])
def test_negative_control_marks_that_the_check_refuses(kind):
    """Groups that say that they are one with a collective that they lack, or that cannot come part by part."""
    plan = fuse_products(planned(**SCHEMES["2d_gather" if kind == "contracted" else "1d_sp"]))

    def mark(o, end="x"):
        return replace(o, groups=tuple(replace(g, fuses=end) for g in o.groups))

    def change_step(o, **fields):
        (group,) = o.groups
        steps = tuple(replace(s, **fields) for s in group.x.forward)
        return replace(o, groups=(replace(group, x=replace(group.x, forward=steps)),))

    def convert_twice(o):
        (group,) = o.groups
        return replace(o, groups=(replace(group, x=replace(group.x, forward=group.x.forward * 2)),))

    changes = {
        "whole": ("*mlp.down", mark, "multiplies as part of"),
        "result of several": ("*query", lambda o: mark(o, "result"), "multiplies as part of"),
        "contracted": ("*mlp.up", mark, "of which a product needs more than a part"),
        "uneven": ("*mlp.up", lambda o: change_step(o, zigzag=0), "of which a product needs more than a part"),
        "gathered twice": ("*mlp.up", convert_twice, "multiplies as part of"),
    }
    name, change, said = changes[kind]
    assert not find_unsoundness(plan)
    broken = with_operations(plan, "project", name, change)
    assert any(said in line for line in find_unsoundness(broken)), find_unsoundness(broken)


LLAMA = """+experiment=gpt_quick model=llama_8b model.layers=4 precision=bf16 cluster.gpu=H100 tensor=1d_sp
    tensor.axes.t=8 parallel.data=1 train.microbatch=1 train.global_batch=4""".split()
STAYS = ["elastic.replace=false", "elastic.min_workers=8"]
REASONS = {
    "tensor.async_products=off": STAYS,
    "survivors of a death would not come back": ["elastic.replace=false"],
    "no GPU is asked for": [*STAYS, "cluster.device=cpu"],
    "parallel.overlap=false": [*STAYS, "parallel.overlap=false"],
    "train.graphs=on": [*STAYS, "train.graphs=on"],
    "no step is predicted to be shorter": [*STAYS, "model.length=8", "model.d_model=512", "model.d_ff=512"],
    "its products are in 8 bits": [*STAYS, "precision=fp8"],
    "train.mlp_chunks gathers before": [*STAYS, "train.mlp_chunks=2"],
    "no product with weights": [*STAYS, "tensor=1d"],
}


@cache
def llama(*typed: str):
    config = compose_config([*LLAMA, *typed])
    return config, make_plan(config)


@pytest.mark.parametrize("reason", [*REASONS][:3] + [pytest.param(r, marks=pytest.mark.full) for r in [*REASONS][3:]])
def test_auto_says_why_it_leaves_them_off(reason):
    typed = REASONS[reason] + [t for t in [reason] if t.endswith("=off")]
    config, plan = llama(*typed)
    assert not list_fused_axes(plan) and reason in reason_against_async_products(config, plan)


def test_auto_has_them_where_no_death_has_survivors(capsys):
    _, plan = llama(*STAYS)
    assert list_fused_axes(plan) == ["t"]
    assert main([*LLAMA, *STAYS]) == 0
    assert "products gather and scatter over t as they multiply" in capsys.readouterr().out
    assert main(LLAMA) == 0
    assert "products wait for their collectives, as survivors of a death" in capsys.readouterr().out


def test_on_says_what_a_death_costs():
    _, plan = llama("tensor.async_products=on")
    (warning,) = [w for w in plan.warnings if "async_products" in w]
    assert "if a worker dies, the others of its groups are ended and replaced" in warning
    assert not llama("tensor.async_products=on", *STAYS)[1].warnings


@pytest.mark.parametrize(
    "typed",
    [["tensor=1d"], ["precision=fp8"], ["train.mlp_chunks=2"], ["tensor=serial", "parallel.data=8", "tensor.axes={}"],
     ["tensor.axes.t=16", "model.kv_heads=16"]],
    ids=["1d", "8 bits", "chunks", "serial", "two nodes"],
)  # fmt: skip
def test_on_is_refused_where_it_cannot_be(typed):
    with pytest.raises(ConfigError) as refused:
        make_plan(compose_config([*LLAMA, "tensor.async_products=on", *typed]))
    (line,) = refused.value.violations
    assert line.startswith("tensor.async_products=on: ") and line.endswith("; nearest legal: auto, off")


def test_a_run_that_shrinks_keeps_what_it_can():
    """`on` refuses no mesh of ranks that compute layers alone."""
    c = configure(**{"tensor": "1d_sp", "axes": {"t": 2}, "async_products": "on"})
    plan = make_plan(c)
    shrunk = replan(c, 1)
    assert list_fused_axes(plan) == ["t"] and shrunk and list_fused_axes(shrunk.plan) == []


def test_blocks_are_compiled_whole():
    c = configure(**SCHEMES["1d_sp"], layers=1)
    c.train.compile_collectives = True
    plan = make_plan(c)
    for blocks in (plan, fuse_products(plan)):
        assert set(reasons_against_whole_blocks(blocks, "cuda", 0.0).values()) == {""}


def test_all_but_the_first_part_is_hidden_under_the_product():
    """By hand: seven eighths of each collective, or of its product where that is shorter, are no longer waited for."""
    config, waiting = llama("tensor.async_products=off")
    hardware = replace(read_hardware("h100"), interference=0.0)
    before, after = (build_step_work(config, plan) for plan in (waiting, fuse_products(waiting)))
    parts = [part for p in (*after.forward, *after.backward) for part, n in p.parts for _ in range(n) if part.beside]
    assert len(parts) == 4 * 2 * 4  # of a layer both passes of four products
    expected = 0.0
    for part in parts:
        ((c, products, share),) = part.beside
        assert (c.op, c.axes) in {("all_gather", ("t",)), ("reduce_scatter", ("t",))}
        assert share == 7 / 8 and len(products) % 8 == 0 and all(p in part.products for p in products)
        multiplying = sum(product_seconds(p, hardware, "bf16", 2) for p in products)
        expected += 7 / 8 * min(multiplying, collective_seconds(c, waiting.mesh, hardware, waiting.itemsize))
    quiet, busy = price_work(before, hardware), price_work(after, hardware)
    assert quiet.waiting["t"] - busy.waiting["t"] == pytest.approx(waiting.microbatches * expected, rel=1e-9)
    assert busy.hidden - quiet.hidden == pytest.approx(waiting.microbatches * expected, rel=1e-9)
    passes = ((*work.forward, *work.backward) for work in (before, after))
    same = [sum(flops(part) * n for p in each for part, n in p.parts) for each in passes]
    assert same[0] == pytest.approx(same[1], rel=1e-12)


def test_a_second_gather_is_hidden_under_the_gradient_of_what_it_gathers():
    """By hand: of tensor.gathered=again a rank waits for what is longer than that product, of layers and the head."""
    quiet = replace(read_hardware("h100"), interference=0.0)
    (_, kept), (config, again) = (llama("tensor.async_products=off", f"tensor.gathered={g}") for g in ("keep", "again"))
    of_kept, work = (build_step_work(config, plan) for plan in (kept, again))
    parts = [part for p in work.backward for part, n in p.parts for _ in range(n) if part.beside]
    assert len(parts) == 2 * 4 + 1 and not any(part.beside for p in work.forward for part, _ in p.parts)
    waited = 0.0
    for part in parts:
        ((c, products, share),) = part.beside
        assert (c.op, c.axes, c.phase, share) == ("all_gather", ("t",), "backward", 1.0)
        multiplying = sum(product_seconds(p, quiet, "bf16", 2) for p in products)
        waited += max(0.0, collective_seconds(c, again.mesh, quiet, again.itemsize) - multiplying)
    before, after = price_work(of_kept, quiet), price_work(work, quiet)
    assert after.waiting["t"] - before.waiting["t"] == pytest.approx(again.microbatches * waited, rel=1e-9)


def flops(part: Part) -> float:
    return sum(p.flops for p in part.products)


# torchtitan, benchmarks/*.md (June 2025): seconds of a step, without and with; of 8B those of selective recomputation
PUBLISHED = {
    "70B on 256 GPUs": (
        27.4301, 25.1134, """model.layers=80 model.d_model=8192 model.heads=64 model.d_ff=28672 parallel.data=32
        train.microbatch=16 train.global_batch=512"""
    ),
    "8B on 64 GPUs": (
        2.8068, 2.555, "model.layers=32 parallel.data=8 train.microbatch=12 train.global_batch=96"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["8B on 64 GPUs", pytest.param("70B on 256 GPUs", marks=pytest.mark.full)])
def test_the_gain_is_about_what_is_published(name):
    without, with_them, typed = PUBLISHED[name]
    base = [*LLAMA, "parallel.zero=3", "recompute=full", "model.length=8192", *typed.split()]
    hardware = read_hardware("tests/predict/tables/h100_500w.yaml")
    seconds = []
    for word in ("off", "on"):
        config = compose_config([*base, f"tensor.async_products={word}"])
        seconds.append(step_price(config, make_plan(config), hardware).seconds)
    assert seconds[0] / seconds[1] == pytest.approx(without / with_them, rel=0.03)


def test_the_bytes_of_models_with_shorter_steps_are_marked_too():
    c = configure(**SCHEMES["1d_sp"], layers=1, **MODELS["llama"])
    c.train.length_ramp, c.tensor.async_products = ["0:8", f"10:{c.model.length}"], "on"
    plan = make_plan(c)
    assert {list_fused_axes(p)[0] for p in plan.plans_of_lengths} == {"t"} and len(plan.plans_of_lengths) == 2
    assert prod(plan.mesh.axes.values()) == 4
