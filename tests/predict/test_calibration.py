"""Calibration from timings that a known hardware would give: it finds that hardware again, and writes it down."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from platform.cluster.calibration_run import TINY
from platform.launch import compose_config
from platform.predict.calibration import (
    Sample,
    Seen,
    _calibrate_steps,
    fit_nonnegative_factors,
    format_hardware_file,
    group_samples_by_kind,
    hardware_of_rounds,
    plan_calibration_rounds,
)
from platform.predict.hardware import HardwareMistake, Link, parse_hardware
from platform.predict.make_plan import make_plan
from platform.predict.price import group_seconds, message_seconds, price_work, product_seconds
from platform.predict.step_price import build_step_work, read_hardware, step_configs
from platform.predict.work import FUSED_BACKWARD, MatrixProduct

CPU = read_hardware("cpu")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "rotate")
NODES = ("a", "a", "a", "a", "b", "b", "b", "b")
TRUE = replace(
    CPU,
    peaks={"fp64": 40e9, "fp32": 90e9, "bf16": 300e9, "fp16": 200e9},
    bandwidth=12e9,
    launch=70e-6,
    tile=32.0,
    fill=9.0,
    ranks=4,
    node=Link(2e9, 3e-4, 3e-4, {op: Link(1e9 + 1e8 * i, 2e-4, 1e-4) for i, op in enumerate(KINDS)}),
    network=Link(12e6, 5e-4, 5e-4, {op: Link(10e6 + 1e6 * i, 9e-4, 4e-4) for i, op in enumerate(KINDS)}),
    interference=0.5,
    reached=replace(CPU.reached, products=0.8, attention=0.32, memory=0.6, node=1.0, network=1.0),
)
SEEN = Seen("2026-11-27", "fp32", "cpu", {"a": 4, "b": 4}, "cpu")


def steps():
    return [build_step_work(c, make_plan(c)) for c in step_configs(compose_config([*TINY]), on_gpu=False, tiny=False)]


def kernels(h):
    """What a rank of this hardware measures alone."""
    yield from ((f"peak {p}", [2e9], 2e9 / rate) for p, rate in h.peaks.items())
    yield "copy", [1e8], 1e8 / h.bandwidth
    bare = replace(h, reached=replace(h.reached, memory=1.0))  # reads what it has just used
    for m, n, k in [(512, 768, 256), (512, 256, 1024), (2048, 256, 256), (512, 256, 16), (512, 16, 256), (33, 70, 90)]:
        three = (MatrixProduct(m, n, k), MatrixProduct(m, k, n), MatrixProduct(n, k, m))
        yield "product", [m, n, k], sum(product_seconds(p, bare, "fp32", 4) for p in three)
    for shape in ((4, 4, 256, 64), (1, 4, 1024, 64)):
        b, heads, length, width = shape
        flops = 2.0 * b * heads * length**2 * width * (1 + FUSED_BACKWARD)
        yield "attention", shape, flops / (h.peaks["fp32"] * h.reached.attention)
    for number, work in enumerate(steps()):
        yield "step", [number], price_work(work, h).seconds


def links(h, one, slower=()):
    """What a rank of one group measures of its links; collectives of the kinds `slower` take twice as long."""
    n, groups = one.ranks_and_groups
    per_node = n if one.tier == "node" else 1
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        for op in KINDS:
            yield op, [n, size], float(group_seconds(op, size, n, per_node, h)) * (2 if op in slower else 1)
        yield "send", [n, size], float(message_seconds(size, one.tier == "node", h))
    yield "beside", [0.03, 0.02], 0.03 + h.interference * 0.02


def fit_hardware(h, slower=()):
    measured = [
        (one, [list(kernels(h) if one.tier == "kernels" else links(h, one, slower))] * 2)
        for one in plan_calibration_rounds(NODES)
    ]
    return hardware_of_rounds(CPU, measured, SEEN, steps())


def test_it_finds_the_hardware_that_was_measured():
    fitted, tiers = fit_hardware(TRUE)
    assert tiers == {"node", "network"} and fitted.ranks == 4
    assert fitted.peaks == pytest.approx(TRUE.peaks) and fitted.bandwidth == pytest.approx(TRUE.bandwidth)
    assert (fitted.tile, fitted.ahead) == (32, False)
    for name, rel in (("fill", 0.02), ("launch", 0.05), ("interference", 1e-6)):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=rel), name
    assert fitted.reached.products == pytest.approx(0.8, rel=0.02)
    assert fitted.reached.attention == pytest.approx(0.32, rel=0.02)
    assert fitted.reached.memory == pytest.approx(0.6, rel=0.05)
    for tier in ("node", "network"):
        true, link = getattr(TRUE, tier), getattr(fitted, tier)
        assert link.bandwidth == pytest.approx(true.bandwidth) and link.latency == pytest.approx(true.latency)
        for op in KINDS:
            for n in (2, 4):
                seconds = [float(group_seconds(op, 300_000, n, n if tier == "node" else 1, h)) for h in (TRUE, fitted)]
                assert seconds[1] == pytest.approx(seconds[0], rel=0.05), (tier, op, n)  # small ones go down a tree


def test_one_slower_kind_changes_that_kind_alone():
    usual, slow = fit_hardware(TRUE)[0], fit_hardware(TRUE, slower=["reduce_scatter"])[0]
    changed = [op for op in KINDS if slow.network.kind_link(op) != usual.network.kind_link(op)]
    assert changed == ["reduce_scatter"]
    assert slow.network.kind_link("reduce_scatter").bandwidth == pytest.approx(
        usual.network.kind_link("reduce_scatter").bandwidth / 2, rel=0.02
    )


def test_the_file_says_what_was_measured_and_is_read_again():
    fitted, tiers = fit_hardware(TRUE)
    text = format_hardware_file(fitted, tiers, SEEN)
    again = parse_hardware("mine", yaml.safe_load(text))
    assert again.node.kind_link("all_gather").bandwidth == pytest.approx(
        fitted.node.kind_link("all_gather").bandwidth, rel=1e-3
    )
    assert again.ahead is False and again.reached.memory == pytest.approx(fitted.reached.memory, rel=1e-2)
    numbers = [line for line in text.splitlines()[1:] if not line.startswith((" ", "accelerator"))]
    assert all("#" in line for line in numbers if not line.startswith("reached"))
    alone = format_hardware_file(
        *hardware_of_rounds(CPU, [(plan_calibration_rounds(["a"])[0], [list(kernels(TRUE))])], SEEN, steps()), SEEN
    )
    assert "network: # not measured: of cpu" in alone and "node: # not measured: of cpu" in alone


def test_one_gpu_writes_its_products_attention_and_memory(tmp_path):
    """Without a link to measure: the file of one H100 that is slower than usual prices a step as that GPU."""
    h100 = read_hardware("h100")
    reached = replace(h100.reached, products=0.6, attention=0.3, memory=0.45)
    gpu = replace(h100, bandwidth=3e12, launch=9e-6, fill=90.0, reached=reached)
    config = compose_config([*TINY, "precision=bf16", "cluster.device=cuda"])
    works = [build_step_work(c, make_plan(c)) for c in step_configs(config, on_gpu=True, tiny=False)]
    bare = replace(gpu, reached=replace(reached, memory=1.0))
    timings = [("peak bf16", [1e12], 1e12 / h100.peaks["bf16"]), ("copy", [1e9], 1e9 / gpu.bandwidth)]
    for m, n, k in [(8192, 8192, 8192), (8192, 4096, 4096), (4096, 14336, 4096), (8192, 4096, 512)]:
        three = (MatrixProduct(m, n, k), MatrixProduct(m, k, n), MatrixProduct(n, k, m))
        timings.append(("product", [m, n, k], sum(product_seconds(p, bare, "bf16", 2) for p in three)))
    flops = 2.0 * 4 * 32 * 4096**2 * 128 * (1 + FUSED_BACKWARD)
    timings.append(("attention", [4, 32, 4096, 128], flops / (gpu.peaks["bf16"] * reached.attention)))
    timings += [("step", [number], price_work(work, gpu).seconds) for number, work in enumerate(works)]
    [alone], seen = plan_calibration_rounds(["a"]), Seen("2026-11-29", "bf16", "NVIDIA H100", {"a": 1}, "h100")
    (tmp_path / "mine.yaml").write_text(
        format_hardware_file(*hardware_of_rounds(h100, [(alone, [timings])], seen, works), seen)
    )
    mine = read_hardware(str(tmp_path / "mine.yaml"))
    for share in ("products", "attention", "memory"):
        assert getattr(mine.reached, share) == pytest.approx(getattr(reached, share), rel=0.05), share
    assert mine.launch == pytest.approx(gpu.launch, rel=0.05) and mine.ahead
    assert mine.node == h100.node and mine.memory == h100.memory
    assert price_work(works[-1], mine).seconds == pytest.approx(price_work(works[-1], gpu).seconds, rel=0.03)


def test_who_measures_with_whom():
    assert [(r.tier, r.groups) for r in plan_calibration_rounds(["a"])] == [("kernels", [[0]])]
    four = [(r.tier, r.groups) for r in plan_calibration_rounds(["a", "a", "b", "b"])[1:]]
    assert four == [("node", [[0, 1], [2, 3]]), ("network", [[0, 2], [1, 3]])]
    by_size = [(r.tier, r.ranks_and_groups) for r in plan_calibration_rounds(NODES)[1:]]
    assert by_size == [("node", (2, 4)), ("node", (4, 2)), ("network", (2, 4))]
    assert plan_calibration_rounds(["a", "a", "b", "b"])[1].mesh_ranks == [0, 2, 1, 3]
    assert [r.groups for r in plan_calibration_rounds(["a", "a", "b"])[1:]] == [[[0, 2]]], "the second of node a waits"


def test_no_factor_is_negative():
    assert fit_nonnegative_factors([[1, 1, 1], [1, 2, 3]], [2, 1.5, 1]) == pytest.approx([1.384615, 0], rel=0.1)
    assert fit_nonnegative_factors([[1, 1, 1], [1, 2, 3]], [3, 5, 7]) == pytest.approx([1, 2])
    assert group_samples_by_kind([("x", [1], 2.0), ("x", [1], 6.0), ("x", [1], 3.0)])["x"][0].seconds == 3.0


def test_nothing_is_hidden_where_one_core_does_it_all():
    large, wide = MatrixProduct(256, 256, 256), MatrixProduct(1, 4096, 4096)
    for p in (large, wide):
        hidden, added = (product_seconds(p, replace(CPU, ahead=ahead), "fp32", 4) for ahead in (True, False))
        assert hidden < added <= 2 * hidden


def test_mistakes_of_kinds_are_named():
    data = yaml.safe_load(format_hardware_file(*fit_hardware(TRUE), SEEN))
    data["node"]["kinds"]["all_sum"] = {}
    data["network"]["kinds"]["reduce"]["hop"] = 0
    data["ahead"] = "maybe"
    with pytest.raises(HardwareMistake) as error:
        parse_hardware("mine", data)
    assert error.value.mistakes == [
        "node.kinds.all_sum: unknown key",
        "network.kinds.reduce.hop=0: must be a number > 0",
        "ahead=maybe: must be true or false",
    ]


def test_python_calls_are_no_launches():
    """A GPU's launch is what is left of a tiny step's host time without its calls of Python."""
    gpu, works = replace(read_hardware("h200"), launch=40e-6), steps()
    samples = [Sample((number,), price_work(work, gpu).seconds) for number, work in enumerate(works)]
    fitted = _calibrate_steps(replace(gpu, launch=5e-6), samples, works)
    assert fitted.launch == pytest.approx(gpu.launch, rel=0.01)
    assert sum(p.calls for p in works[0].forward) > 0, "control: there is something to leave out"
