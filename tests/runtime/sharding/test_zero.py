"""parallel.zero=1, 2 and 3: what is sharded over `data`, under every scheme and model, against one process in fp64."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.plan.chunks import SHARD_UNIT
from platform.plan.layout import pad_to_multiple
from platform.plan.step_collectives import communication
from platform.predict.footprint import weight_bytes
from platform.predict.make_plan import make_plan
from platform.runtime import conversion
from platform.runtime.communicator import SingleRank
from tests.harness.held import check_held, check_stages
from tests.harness.oracle import (
    MODELS,
    assemble,
    compare,
    compute,
    configure,
    counted,
    examine,
    prove,
    run,
    serial,
    trainer_of,
)
from tests.harness.pairwise import product
from tests.harness.suite import suite
from tests.harness.threads import run_threads

ROWS_COLS = {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
SCHEMES = {
    "serial": ("serial", {}, None),
    "1d": ("1d", {"t": 2}, None),
    "1d_sp": ("1d_sp", {"t": 2}, None),
    "2d": ("2d", {"r": 2, "c": 2}, None),
    "3d": ("3d", {"x": 2, "y": 1, "z": 2}, None),
    "layout": ("layout", {"rows": 2, "cols": 2}, ROWS_COLS),
}
FACTORS = {
    "scheme": list(SCHEMES),
    "branch": ["none", "dsp", "dsp_slice"],
    "zero": [0, 1, 2, 3],
    "data": [2, 3, 4],
    "microbatches": [1, 2],
    "model": ["gpt", "llama", "t5", "bert"],
    "dropout": [0.0, 0.2],
}
BATCH = 24


def configured(case):
    tensor, axes, rules = SCHEMES[case["scheme"]]
    return configure(
        tensor,
        axes,
        rules=rules,
        branch=case["branch"],
        branch_axes={} if case["branch"] == "none" else {"g": 2},
        data=case["data"],
        zero=case["zero"],
        microbatch=BATCH // (case["data"] * case["microbatches"]),
        global_batch=BATCH,
        dropout=case["dropout"],
        **{"layers": 1, "length": 8, **MODELS[case["model"]]},
    )


@cache
def plannable(scheme: str, branch: str, data: int, microbatches: int) -> bool:
    case = {"scheme": scheme, "branch": branch, "data": data, "microbatches": microbatches}
    c = configured({**case, "zero": 0, "dropout": 0.0, "model": "gpt"})
    if prod([*c.tensor.axes.values(), *c.branch.axes.values(), data]) > 8:
        return False
    try:
        make_plan(c)
    except ConfigError:
        return False
    return True


CASES = product(FACTORS, lambda case: plannable(*(case[k] for k in ("scheme", "branch", "data", "microbatches"))))


@suite("oracle of parallel.zero (threads)", CASES)
def test_equals_one_process(case):
    prove(configured(case))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_uses_that_disagree(zero):
    """The tied embedding's gradient is partial over `rows` where it is looked up, and not where it gives the logits;
    there, it is reduced at its use."""
    c = configure("layout", {"rows": 2, "cols": 2}, rules={}, data=2, zero=zero, layers=1)
    c.tensor.regions = {r: {"length": ["rows"]} for r in ("stream", "mlp")} | {"attention": {}, "logits": {}}
    c.tensor.parameters = {"all": {"d_model": ["cols"]}}
    plan, results = run(c)
    assert "rows" in plan.planner.reduced_at_use["embedding", "lookup", "embedding"]
    examine(c, plan, results)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("data", "group", "taken"), [(4, 2, 2), (6, 4, 3), (3, 2, 1), (2, 4, 2)])
def test_groups_of_replicas(zero, data, group, taken):
    """Each group has the whole state once, all groups alike: gradients are scattered over one axis of two."""
    c = configure("1d_sp", {"t": 2 if data == 4 else 1}, data=data, zero=zero, microbatch=2, global_batch=12, layers=1)
    c.parallel.zero_group = group
    plan, results = prove(c)
    assert {b.shards for b in plan.buckets} == {taken} and plan.num_replicas == data
    assert plan.zero == (zero if taken > 1 else 0)
    axes = {launch.axes for launch in results[0].log if launch.op == "reduce_scatter" and "t" not in launch.axes}
    assert axes == ({("zero",)} if 1 < taken < data else {("data",)} if taken > 1 else set())


# What a rank keeps.


def on_all_ranks(c, work):
    """The plan, and `work(trainer)` of every rank."""
    plan = make_plan(c)
    start = lambda communicator: work(trainer_of(c, plan, communicator))  # noqa: E731
    return plan, [start(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, start)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_clips_where_a_shard_is_padding_alone(zero):
    """Three parameters of one element each, on four ranks."""
    c = configure(data=4, zero=zero, microbatch=1, global_batch=4, kind="two_layer", io=1, hidden=1, length=1)
    c.optimizer.clip = 1e-3
    plan, results = prove(c)
    assert min(sum(w.numel() for w in r.final.values()) for r in results) == 0
    assert results[0].grad_norm > c.optimizer.clip


ELSEWHERE_IN_ORDER = {
    "a tied table between norm and bias of the head": {"head_bias": True, "post_norm": True, "layers": 4},
    "a source's table, and the memory, in the middle of a stage": {"kind": "encoder_decoder"},
    "a position bias that all layers share": {"kind": "encoder_decoder", "positions": "relative", "bias": False},
}


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("model", ELSEWHERE_IN_ORDER)
def test_ranks_hold_what_the_whole_plan_says(model, stages, zero):
    """Where a shared parameter has another place in a stage's order than in the model's, too."""
    shape = {"d_model": 15, "heads": 3, "d_kv": 3, "d_ff": 7, "length": 4, "buckets": 8, "distance": 12}
    c = configure(
        data=2, zero=zero, pipeline="1f1b", stages=stages, microbatch=1, **{**shape, **ELSEWHERE_IN_ORDER[model]}
    )
    plan, _ = on_all_ranks(c, check_held)
    check_stages(plan)


def held(trainer) -> dict[str, int]:
    """Bytes after one step: the optimizer's state without its counters, and the gradients that a microbatch leaves."""
    trainer._run_forward_backward(1)
    for flat in trainer.weights.buckets if trainer.plan.zero >= 2 else ():
        flat.finish_pass_reduction()
    sums = sum(g.nbytes for flat in trainer.weights.buckets for g in (flat.sums, flat.reduced) if g is not None)
    trainer.weights.finish_reductions()
    trainer.step(1)
    kept = [t for flat in trainer.weights.buckets for t in (flat.masters, flat.part, *flat.compute.values())]
    tensors = {w.untyped_storage()._cdata: w.untyped_storage() for w in kept}
    state = [s for of in trainer.optimizer.state.values() for s in of.values() if s.numel() > 1 or s.dim()]
    return {
        "parameters": sum(w.nbytes() for w in tensors.values()),
        "gradients": sums,
        "optimizer": sum(s.nbytes for s in state),
    }


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_what_the_plan_says(zero, precision):
    c = configure("1d", {"t": 2}, data=3, zero=zero, microbatch=2, global_batch=6, layers=1, precision=precision)
    plan, ranks = on_all_ranks(c, held)
    planned = weight_bytes(plan, 2)
    moment = 2 * plan.itemsize["master"]
    padding = 3 * len(plan.buckets)  # at most two elements each, of which no rank keeps moments
    for rank in ranks:
        assert {**rank, "optimizer": 0} == {**planned, "optimizer": 0}
        assert 0 <= planned["optimizer"] - rank["optimizer"] <= padding * moment
    whole = make_plan(configure("1d", {"t": 2}, data=3, microbatch=2, global_batch=6, layers=1)).local_parameter_count
    assert (
        0 <= 3 * plan.count_masters_of_rank(plan.mesh.rank_coordinates(0)) - whole <= 3 * whole * (zero == 0) + padding
    )
    assert 0 <= 3 * plan.local_parameter_count - whole <= 3 * whole * (zero != 3) + 3 * padding


@pytest.mark.parametrize("case", [("serial", {}, 4), ("1d", {"t": 2}, 3), ("3d", {"x": 2, "y": 1, "z": 2}, 2)], ids=str)
@pytest.mark.parametrize("zero", [1, 3])
def test_shards_tile_every_block_exactly_once(case, zero):
    tensor, axes, data = case
    plan = make_plan(configure(tensor, axes, data=data, zero=zero, global_batch=4 * data, vocab=61))
    for p in plan.parameters:
        ranges = [plan.shard_range(p, {**plan.mesh.rank_coordinates(0), "data": i}) for i in range(data)]
        assert ranges[0][0] == 0 and ranges[-1][1] == prod(plan.local_shape(p))
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
    for i in range(data):
        coordinates = {**plan.mesh.rank_coordinates(0), "data": i}
        mine = sum(stop - start for start, stop in (plan.shard_range(p, coordinates) for p in plan.parameters))
        assert 0 <= plan.count_masters_of_rank(coordinates) - mine < data * len(plan.buckets)


def test_what_a_bucket_holds():
    """ZeRO-3 has a bucket per block, one for what lies before and after them each, one for a table that both use."""
    plan = make_plan(configure(data=2, zero=3, layers=2))
    names = [[p.name for p in b.parameters] for b in plan.buckets]
    assert names[0] == ["embedding"] and names[1] == ["position"] and set(names[-1]) == {"norm.gain", "norm.bias"}
    assert all(n.startswith(f"layers.{i}.") for i in (0, 1) for n in names[2 + i]) and len(names) == 5
    (one, table) = sorted(
        make_plan(configure(data=2, zero=1, layers=2)).buckets, key=lambda b: len(b.parameter_ranges)
    )[::-1]
    assert [p.name for p in table.parameters] == ["embedding"] and len(one.parameter_ranges) == len(plan.parameters) - 1


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("data", [5, 6, 7, 8])
def test_large_shards_begin_where_whole_vectors_do(data, zero):
    """Also after a re-form to an odd number of replicas: each begins at a multiple of 256 bytes in 16 bits. At most
    one element in a hundred is padding."""
    c = compose_config(
        ["+experiment=one_gpu", f"parallel.data={data}", f"parallel.zero={zero}", "train.global_batch=840"]
    )
    plan = make_plan(c)
    large = [b for b in plan.buckets if b.elements // data >= SHARD_UNIT**2]
    assert sum(b.elements for b in large) > 0.99 * plan.parameter_count
    for bucket in large:
        assert bucket.elements % (data * SHARD_UNIT) == 0
        assert bucket.elements - sum(bucket.sizes) < bucket.elements / 100


@pytest.mark.parametrize("shape", [(1,), (2, 3), (7,), (4, 2)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_block_comes_back_from_its_chunks(shape, parts):
    block = torch.randn(shape)
    flat = conversion.flatten_padded(block, pad_to_multiple(block.numel(), parts))
    assert flat.numel() % parts == 0 and flat.numel() - block.numel() < parts
    assert torch.equal(conversion.unflatten_padded(flat, shape), block)


def test_one_replica_has_nothing_to_share():
    c = configure("1d", {"t": 2}, zero=0)
    plans = []
    for zero in (0, 1, 2, 3):
        c.parallel.zero = zero
        plans.append(make_plan(c))
    assert plans[0] == plans[1] == plans[2] == plans[3]


def test_bytes_of_a_step():
    """Rajbhandari et al. 2020: sharding optimizer state and gradients moves what data parallelism moves; sharding the
    parameters gathers the blocks' twice per microbatch. In bf16 a parameter is half as large as a sum of gradients."""
    dims = {"d_model": 32, "length": 16, "vocab": 64, "tied": False, "layers": 2}  # no padding
    moved = {}
    for precision in ("fp64", "bf16"):
        for zero in (0, 1, 2, 3):
            plan = make_plan(configure(data=2, zero=zero, microbatch=2, global_batch=8, precision=precision, **dims))
            moved[precision, zero] = communication(plan)
    metrics = {"all_reduce/data": 2 * 2 * 8}
    n = plan.parameter_count
    assert moved["fp64", 0] == {"all_reduce/data": 2 * 8 * n + 32}
    assert moved["fp64", 1] == {"all_gather/data": 8 * n, "reduce_scatter/data": 8 * n, **metrics}
    assert moved["fp64", 2] == {"all_gather/data": 8 * n, "reduce_scatter/data": 2 * 8 * n, **metrics}
    assert moved["bf16", 1] == {"all_gather/data": 2 * n, "reduce_scatter/data": 4 * n, **metrics}
    assert moved["bf16", 2] == {"all_gather/data": 2 * n, "reduce_scatter/data": 2 * 2 * n, **metrics}
    after = [p for p in plan.parameters if p.name in ("head", "norm.gain", "norm.bias")]  # stays until the pass is back
    twice = 2 * n - sum(prod(plan.global_shape(p)) for p in after)
    assert moved["fp64", 3] == {"all_gather/data": 2 * 8 * twice, "reduce_scatter/data": 2 * 8 * n, **metrics}
    assert moved["bf16", 3] == {"all_gather/data": 2 * 2 * twice, "reduce_scatter/data": 2 * 2 * n, **metrics}


def test_launches_of_a_step():
    """Of ZeRO-3, per microbatch: a gather per span and direction, a reduce-scatter per span; what the last span has
    gathered stays."""
    c = configure(data=2, zero=3, microbatch=2, global_batch=8, tied=False, layers=3)
    plan, results = run(c)
    assert len(plan.buckets) == 5
    launched = Counter(launch.op for launch in results[0].log if launch.axes == ("data",))
    assert launched == {"all_gather": 2 * (5 + 4), "reduce_scatter": 2 * 5, "all_reduce": 1}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_reductions_start_while_backward_passes_run(zero, overlap):
    """With overlap, reductions over replicas stand before the last collective of a backward pass, else after it."""
    c = configure("1d", {"t": 2}, data=2, zero=zero, layers=3, bucket_mib=0)
    c.parallel.overlap = overlap
    plan, results = run(c)
    examine(c, plan, results)
    log = [(launch.op, launch.axes) for launch in results[0].log]
    over_data = [i for i, (op, axes) in enumerate(log) if axes == ("data",) and op in ("all_reduce", "reduce_scatter")]
    last_backward = max(i for i, (op, axes) in enumerate(log) if axes == ("t",))
    early = sum(i < last_backward for i in over_data)
    assert (early >= 3) == overlap and (overlap or early == 0)


@pytest.mark.parametrize("zero", [0, 1])
def test_buckets(zero):
    """Many small ones move the same bytes to the same gradients."""
    c = configure("1d_sp", {"t": 2}, data=2, zero=zero, layers=1)
    plan, (one, *_) = run(c)
    c.parallel.bucket_mib = 0
    plan, many = run(c)
    compare(c, plan, many, serial(c))
    assert counted(many) == communication(plan)
    assert len(many[0].log) > len(one.log)


# Lower precisions, real processes, and what must fail.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharding_the_optimizer_changes_no_bit_of_a_gradient(precision):
    """With two replicas a sum has one order. The norm, and so clipping, is rounded in another."""
    shared = {"data": 2, "precision": precision, "layers": 1, **MODELS["llama"]}
    plain, sharded = (run(configure("1d", {"t": 2}, zero=zero, **shared)) for zero in (0, 1))
    for pick in (lambda r: r.initial, lambda r: r.gradients):
        expected, actual = assemble(*plain, pick), assemble(*sharded, pick)
        assert all(torch.equal(actual[n], expected[n]) for n in expected)
    assert sharded[1][0].losses == pytest.approx(plain[1][0].losses, rel=1e-6 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_sharded_parameters_train_alike_in_a_lower_precision(precision, tolerance):
    plan, results = run(configure("1d_sp", {"t": 2}, data=2, zero=3, precision=precision))
    assert results[0].losses == pytest.approx(serial(configure()).losses, rel=tolerance)
    assert counted(results) == communication(plan)


@pytest.mark.parametrize(
    "case",
    [("1d_sp", {"t": 2}, 2, 1), ("3d", {"x": 1, "y": 1, "z": 2}, 2, 3), ("serial", {}, 3, 2)],
    ids=str,
)
def test_on_gloo(case, pool):
    tensor, axes, data, zero = case
    c = configure(tensor, axes, data=data, zero=zero, microbatch=4, global_batch=4 * data, layers=1, dropout=0.1)
    plan = make_plan(c)
    results = pool.run(compute, c, plan)
    examine(c, plan, results)


@pytest.mark.parametrize("zero", [1, 3])
def test_negative_controls(zero):
    """The oracle sees a shard that is scaled, and one that lies elsewhere."""
    c = configure(data=2, zero=zero, layers=1, tied=False, vocab=62)
    plan, results = run(c)
    compare(c, plan, results, serial(c))
    name = "head" if zero == 3 else next(p.name for p in plan.parameters if _halved(plan, p))
    ranges = [plan.shard_range(p, r) for p in plan.parameters if p.name == name for r in ({"stage": 0, "data": 0},)]
    assert ranges[0][1] > 0
    good = [r.gradients[name] for r in results]
    for rank, wrong in ((0, good[0] / 2), (0, good[0].roll(1))):
        results[rank].gradients = {**results[rank].gradients, name: wrong}
        with pytest.raises(AssertionError, match="gradient of"):
            compare(c, plan, results, serial(c))
        results[rank].gradients = {**results[rank].gradients, name: good[rank]}
    compare(c, plan, results, serial(c))


def _halved(plan, p) -> bool:
    """Return True if both ranks have a part of the parameter."""
    return all(a < b for a, b in (plan.shard_range(p, {"stage": 0, "data": i}) for i in (0, 1)))


def test_negative_control_forgotten_reduction():
    """The chunks of norm vectors are partial over the sequence axis, too."""
    c = configure("1d_sp", {"t": 2}, data=2, zero=1)
    plan = make_plan(c)
    broken = replace(plan, reductions={n: ("data",) for n in plan.reductions})
    with pytest.raises(AssertionError, match="gradient of|replicas of"):
        compare(c, *run(c, broken), serial(c))
