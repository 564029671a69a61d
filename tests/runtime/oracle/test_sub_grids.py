"""D&SP with common layers on sub-grid 0 alone, and with slices by all-gather, against one process in fp64."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from platform.plan.rule import Conversion
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import (
    MODELS,
    compare,
    compute,
    configure,
    examine,
    prove,
    run,
    serial,
    trainer_of,
    validation_loss,
    with_operations,
)
from tests.harness.pairwise import product
from tests.harness.suite import suite
from tests.harness.threads import run_threads

SCHEMES = {
    "serial": ("serial", {}),
    "1d": ("1d", {"t": 2}),
    "1d_sp": ("1d_sp", {"t": 2}),
    "2d": ("2d", {"r": 2, "c": 2}),
    "3d 1,2,2": ("3d", {"x": 1, "y": 2, "z": 2}),
    "3d 2,1,2": ("3d", {"x": 2, "y": 1, "z": 2}),
}
FACTORS = {
    "scheme": list(SCHEMES),
    "axes": [{"g": 2}, {"g": 4}, {"a": 2, "b": 2}],
    "data": [1, 2],
    "model": ["gpt", "gqa_tied", "bert", "t5"],
    "dropout": [0.0, 0.2],  # 0.2: attention by einsums
    "gathered": ["keep", "again"],
    "order": ["inner", "outer"],
}


def legal(case) -> bool:
    if case["scheme"] == "2d" and case["gathered"] == "again":
        return False
    return prod([*SCHEMES[case["scheme"]][1].values(), *case["axes"].values(), case["data"]]) <= 8


CASES = product(FACTORS, legal)


def build(case):
    c = configure(
        *SCHEMES[case["scheme"]],
        branch="dsp_csub",
        branch_axes=case["axes"],
        data=case["data"],
        dropout=case["dropout"],
        **{"layers": 2 if case["model"] == "gpt" else 1, **MODELS[case["model"]]},
    )
    c.branch.order = case["order"]
    if case["scheme"] != "2d":  # whose operands come in panels
        c.tensor.gathered = case["gathered"]
    return c


@suite("oracle of dsp_csub (threads)", CASES)
def test_equals_one_process(case):
    prove(build(case))


ON_GLOO = [
    ("serial", {"g": 4}, 2, "gpt", 0.0, "keep", "inner"),
    ("1d_sp", {"g": 2}, 1, "t5", 0.2, "again", "outer"),
    ("3d 1,2,2", {"g": 2}, 1, "original", 0.0, "keep", "inner"),
]


@pytest.mark.parametrize("values", ON_GLOO, ids=str)
def test_on_processes(values, pool):
    c = build(dict(zip(FACTORS, values, strict=True)))
    plan = make_plan(c)
    examine(c, plan, pool.run(compute, c, plan))


def pure(**more):
    """Sub-grids of one worker: the paper's pure sub-graph parallelism."""
    return configure(branch="dsp_csub", branch_axes={"g": 4}, vocab=64, **more)


def test_two_layers():
    """Their hidden units are shared, and the loss is on sub-grid 0 alone."""
    c = configure(branch="dsp_csub", branch_axes={"g": 2}, kind="two_layer", length=1, io=8, hidden=24, vocab=100)
    prove(c)


def test_negative_control_a_forgotten_reduce():
    """Where the gradient of what was broadcast is dropped instead of summed, the oracle must fail."""
    c = pure()
    plan = make_plan(c)

    def forget(conversion):
        backward = (replace(s, op="drop") if s.op == "reduce" else s for s in conversion.backward)
        return Conversion(conversion.forward, tuple(backward))

    operations = {
        k: replace(o, groups=tuple(replace(g, x=forget(g.x)) for g in o.groups)) for k, o in plan.operations.items()
    }
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, *run(c, with_operations(plan, operations)), serial(c))


def test_negative_control_a_block_too_many():
    """The oracle sees one where the plan has none."""
    c = pure()
    plan, results = run(c)
    results[1].gradients["norm.gain"] = results[0].gradients["norm.gain"]
    with pytest.raises(AssertionError, match="rank 1 has a block of norm.gain"):
        compare(c, plan, results, serial(c))


def test_every_parameter_lives_once():
    """Beside data and tensor parallelism of one, no two workers have the same number: nothing is replicated."""
    plan = make_plan(pure())
    held = [plan.count_parameters_of_rank(plan.mesh.rank_coordinates(rank)) for rank in range(4)]
    assert sum(held) == plan.parameter_count and held[0] == plan.local_parameter_count
    assert held[1] == held[2] == held[3] == plan.count_parameters_of_rank(plan.coordinates_off_sub_grid) < held[0]
    common = {p.name for p in plan.parameters if not plan.has_block(p, plan.coordinates_off_sub_grid)}
    assert {"position", "norm.gain", "layers.0.attention.query", "layers.1.mlp.down_bias"} <= common
    assert not {"embedding", "layers.0.mlp.up", "layers.0.mlp.up_bias", "layers.1.mlp.down"} & common


def test_a_worker_holds_and_updates_what_it_has():
    c = pure(data=2)
    plan = make_plan(c)

    def held(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.step(1)
        trainer.compute_gradients(2)
        updated = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
        state = sum(s["exp_avg"].numel() for s in trainer.optimizer.state.values())
        return sum(w.numel() for w in trainer.weights.master.values()), updated, state, len(trainer.weights.gradients)

    for rank, (weights, updated, state, gradients) in enumerate(run_threads(plan.mesh, held)):
        coordinates = plan.mesh.rank_coordinates(rank)
        assert weights == updated == state == plan.count_parameters_of_rank(coordinates)
        assert gradients == sum(plan.has_block(p, coordinates) for p in plan.parameters)


def test_only_owners_reduce_gradients_over_data():
    plan = make_plan(pure(data=2))
    item = plan.itemsize["master"]
    # every parameter is reduced once between two replicas, and so are loss and norm, in one launch of all workers
    assert communication(plan)["all_reduce/data"] == 2 * plan.parameter_count * item


def test_it_evaluates():
    def outcome(c, plan, communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.step(1)
        return validation_loss(trainer)

    one = configure(vocab=64, microbatch=8)
    expected = outcome(one, plan := make_plan(one), SingleRank(plan.mesh))
    c = pure()
    plan = make_plan(c)
    for val_loss in run_threads(plan.mesh, lambda communicator: outcome(c, plan, communicator)):
        assert val_loss == pytest.approx(expected, rel=1e-12)


def test_16_bit_copies():
    c = pure(precision="bf16")
    _, results = run(c)
    assert results[0].losses == pytest.approx(serial(pure()).losses, rel=2e-2)
    assert len({tuple(r.losses) for r in results}) == 1


# branch.slice_via


def sliced(via, *scheme, **more):
    c = configure(*scheme, branch="dsp_slice", **{"branch_axes": {"g": 2}, **more})
    c.branch.slice_via = via
    return c


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        (("serial", {}), {"branch_axes": {"g": 4}}),
        (("1d_sp", {"t": 2}), {"data": 2, **MODELS["gqa_tied"]}),
        (("3d", {"x": 1, "y": 2, "z": 2}), {**MODELS["t5"], "layers": 1}),
        (("serial", {}), {"branch_axes": {"a": 2, "b": 2}, **MODELS["original"]}),
    ],
)  # fmt: skip
def test_slices_by_all_gather(scheme, more):
    c = sliced("all_gather", *scheme, **more)
    plan, _ = prove(c)
    assert not any(key.startswith("all_to_all") for key in communication(plan))
    assert any(key.startswith("all_to_all") for key in communication(make_plan(sliced("all_to_all", *scheme, **more))))
