"""What autograd saves is what the plan says, element by element of distinct storages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from platform.model import build_model
from platform.plan.step_collectives import resolve_auto_kernels
from platform.predict.footprint import count_saved_elements, run_chunk, weight_bytes
from platform.predict.make_plan import make_plan
from platform.predict.meter import MemoryMeter
from platform.runtime.communicator import SingleRank
from platform.runtime.parallel_ops import PassPosition
from platform.train.trainer import Trainer
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.routing import to_the_first
from tests.harness.threads import run_threads

SCHEMES: list[tuple[str, dict[str, int]]] = [
    ("serial", {}),
    ("1d", {"t": 2}),
    ("1d", {"t": 4}),
    ("1d_sp", {"t": 2}),
    ("1d_sp", {"t": 4}),
    ("2d", {"r": 2, "c": 2}),
    ("2d_gather", {"r": 2, "c": 2}),
    ("3d", {"x": 2, "y": 2, "z": 2}),
    ("3d", {"x": 1, "y": 2, "z": 2}),
    ("3d", {"x": 4, "y": 1, "z": 1}),
]


def measure(trainer: Trainer, seed: int, *, in_bytes: bool = False) -> int:
    """Floating-point elements, or their bytes, of the distinct storages that one forward pass saves, without the
    parameters' own."""
    own = {w.untyped_storage()._cdata for w in trainer.weights.compute.values()}
    tensors: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            tensors[x.untyped_storage()._cdata] = x  # keeps it alive: no other storage gets its address
        return x

    trainer.ops.position = PassPosition(seed, 1, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        (chunk,) = trainer.stage.chunks
        trainer.passes.run_chunk(chunk, {}, "train", 0, trainer.config.train.global_batch)
    sizes = ((x.untyped_storage().nbytes(), x.itemsize) for p, x in tensors.items() if p not in own)
    return sum(n if in_bytes else n // itemsize for n, itemsize in sizes)


def measured(c, **how: bool) -> tuple[Any, list[int]]:
    plan = make_plan(c)
    trainer = lambda communicator: trainer_of(c, plan, communicator)  # noqa: E731
    if plan.mesh.world_size == 1:
        return plan, [measure(trainer(SingleRank(plan.mesh)), c.seed, **how)]
    return plan, run_threads(plan.mesh, lambda communicator: measure(trainer(communicator), c.seed, **how))


def metered_bytes(c, plan) -> int:
    """Bytes of what the meter says that a forward pass saves."""
    meter = MemoryMeter(resolve_auto_kernels(plan, "cpu", 0.0), 0.0, plan.mesh.rank_coordinates(0))
    run_chunk(meter, build_model(c.model), plan.chunks[0], {})
    return sum(s.nbytes for s in meter.tape.distinct_saved_storages() if s.counted)


# not of LayerNorm, whose numbers of rows are in 16 bits on a CPU
@pytest.mark.parametrize("model", ["llama", "t5", "modern", "gpt_oss", "latent"])
@pytest.mark.parametrize(("scheme", "axes"), [SCHEMES[i] for i in (0, 1, 3, 8)], ids=str)
def test_bytes_in_16_bits(scheme, axes, model):
    """Norms keep their inputs in 16 bits, and numbers of rows in 32; gated functions keep their arguments alone."""
    more = {"capacity_factor": 4.0} if model == "gpt_oss" else {}
    c = configure(scheme, axes, precision="bf16", **{**MODELS[model], **more})
    plan, saved = measured(c, in_bytes=True)
    assert set(saved) == {metered_bytes(c, plan)}


@pytest.mark.parametrize("case", [(*scheme, model) for scheme in SCHEMES for model in MODELS], ids=str)
def test_saved_for_backward(case):
    scheme, axes, model = case
    c = configure(scheme, axes, **MODELS[model])
    plan, saved = measured(c)
    assert set(saved) == {count_saved_elements(plan, build_model(c.model)).total_elements}


@pytest.mark.parametrize(("scheme", "axes"), SCHEMES, ids=str)
def test_gathered_again(scheme, axes):
    """Nothing that was gathered for an einsum is kept: only vectors of norms may be."""
    c = configure(scheme, axes)
    c.tensor.gathered = "again"
    plan, saved = measured(c)
    assert set(saved) == {count_saved_elements(plan, build_model(c.model)).total_elements}


@pytest.mark.parametrize("more", [{}, {"capacity_factor": 4.0, "shared_experts": 0}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize(("scheme", "axes"), [SCHEMES[i] for i in (0, 1, 3, 5)], ids=str)
def test_experts_shared_by_replicas(scheme, axes, more):
    c = configure(scheme, axes, data=2, experts_of=2, **{**MODELS["experts"], **more})
    plan, saved = measured(c)
    assert plan.mesh.axes["expert"] == 2 and set(saved) == {
        count_saved_elements(plan, build_model(c.model)).total_elements
    }


@pytest.mark.parametrize(("scheme", "axes"), [SCHEMES[i] for i in (0, 1, 3, 5)], ids=str)
def test_rows_of_experts(scheme, axes, monkeypatch):
    """The worst routing saves what the plan says, at the ranks of the experts that all tokens choose; others less."""
    c = configure(scheme, axes, data=2, experts_of=2, **{**MODELS["experts"], "capacity_factor": 0.0})
    plan, even = measured(c)
    to_the_first(monkeypatch, 4, 2)
    _, worst = measured(c)
    most = count_saved_elements(plan, build_model(c.model)).total_elements
    assert max(worst) == most > max(even) and min(worst) < min(even)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("scheme", ["serial", "1d", "1d_sp"])
def test_beside_branches_and_data_parallel(scheme, data):
    c = configure(scheme, {"t": 2} if scheme != "serial" else {}, branch="dsp", branch_axes={"g": 2}, data=data)
    plan, saved = measured(c)
    assert set(saved) == {count_saved_elements(plan, build_model(c.model)).total_elements}


@pytest.mark.parametrize("model", ["gpt", "llama", "t5"])
@pytest.mark.parametrize(("scheme", "axes"), [SCHEMES[i] for i in (0, 3, 5, 7)], ids=str)
def test_parameters_in_chunks(scheme, axes, model):
    """Nothing that was gathered is kept: it is gathered again, into the same memory."""
    c = configure(scheme, {a: n for a, n in axes.items() if a != "x"}, data=2, zero=3, layers=1, **MODELS[model])
    plan, elements = measured(c)
    saved = count_saved_elements(plan, build_model(c.model))
    assert (
        set(elements)
        == {saved.total_elements}
        == {count_saved_elements(replace(plan, zero=1), build_model(c.model)).total_elements}
    )


@pytest.mark.parametrize("model", ["gpt", "llama", "t5"])
@pytest.mark.parametrize(("scheme", "axes"), [SCHEMES[0], SCHEMES[3], SCHEMES[5], SCHEMES[8]], ids=str)
def test_common_layers_on_sub_grid_zero(scheme, axes, model):
    """Each rank saves what the plan says of it: the other sub-grids have no common activations."""
    c = configure(scheme, axes, branch="dsp_csub", branch_axes={"g": 2}, **MODELS[model])
    plan, saved = measured(c)
    where = [plan.mesh.rank_coordinates(rank) for rank in range(plan.mesh.world_size)]
    assert saved == [count_saved_elements(plan, build_model(c.model), at=at).total_elements for at in where]
    assert (
        len(set(saved)) == 2
        and min(saved)
        == count_saved_elements(plan, build_model(c.model), at=plan.coordinates_off_sub_grid).total_elements
    )


def test_slices_by_all_gather():
    """What attention saves of its operands are views: the gathered tensors stay."""
    c = configure("1d_sp", {"t": 2}, branch="dsp_slice", branch_axes={"g": 2}, **MODELS["t5"])
    few = count_saved_elements(make_plan(c), build_model(c.model)).total_elements
    c.branch.slice_via = "all_gather"
    plan, saved = measured(c)
    more = count_saved_elements(plan, build_model(c.model)).total_elements
    assert set(saved) == {more} and more > few


@pytest.mark.parametrize("model", ["gpt", "llama", "t5"])
@pytest.mark.parametrize(("scheme", "axes"), [SCHEMES[0], SCHEMES[1], SCHEMES[3], SCHEMES[8]], ids=str)
@pytest.mark.parametrize(("recompute", "every"), [("selective", 1), ("full", 1), ("full", 2)])
def test_recomputation(recompute, every, scheme, axes, model):
    """What is kept is what the plan says, and less than without: where t ranks have a block's input alike, each keeps
    1/t of it."""
    more = {"dropout": 0.1, "layers": 4, **MODELS[model]}
    c = configure(scheme, axes, recompute=recompute, every=every, **more)
    plan, saved = measured(c)
    kept = count_saved_elements(plan, build_model(c.model), c.model.dropout).total_elements
    assert set(saved) == {kept}
    assert (
        kept
        < count_saved_elements(
            make_plan(configure(scheme, axes, **more)), build_model(c.model), c.model.dropout
        ).total_elements
    )


@pytest.mark.parametrize("model", ["gpt", "bert", "t5"])
@pytest.mark.parametrize(("scheme", "axes"), [SCHEMES[0], SCHEMES[3], SCHEMES[8]], ids=str)
def test_a_rank_reads_as_many_integers_as_the_plan_says(scheme, axes, model):
    """The source of an encoder-decoder has a length of its own."""
    c = configure(scheme, axes, **MODELS[model])
    plan = make_plan(c)
    planned = {key: o.token_count for key, o in plan.operations.items() if o.operation.reads}

    def read(communicator):
        inputs = trainer_of(c, plan, communicator).passes.load_input_blocks("train", 0)
        return {key: block.numel() for blocks in inputs.values() for key, block in blocks.items()}

    counts = [read(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, read)
    assert counts == [planned] * plan.mesh.world_size and planned


def test_two_layers():
    c = configure(kind="two_layer", length=1, io=8, hidden=24, vocab=100)
    plan, saved = measured(c)
    assert saved == [count_saved_elements(plan, build_model(c.model)).total_elements]


def test_gathered_parameters_are_told_apart():
    c = configure("3d", {"x": 4, "y": 1, "z": 1})
    plan = make_plan(c)
    saved = count_saved_elements(plan, build_model(c.model))
    assert saved.gathered > plan.local_parameter_count
    assert count_saved_elements(make_plan(configure("1d", {"t": 4})), build_model(c.model)).gathered == 0


def test_weight_bytes():
    plan = make_plan(configure("1d", {"t": 2}, precision="bf16"))
    n = plan.local_parameter_count
    assert weight_bytes(plan, 2) == {"parameters": 6 * n, "gradients": 4 * n, "optimizer": 8 * n}
    plan = make_plan(configure("1d", {"t": 2}))
    assert weight_bytes(plan, 2) == {"parameters": 8 * n, "gradients": 8 * n, "optimizer": 16 * n}
    plan = make_plan(configure(branch="dsp_csub", branch_axes={"g": 2}))
    n = plan.count_parameters_of_rank(plan.coordinates_off_sub_grid)
    assert weight_bytes(plan, 2, plan.coordinates_off_sub_grid) == {
        "parameters": 8 * n,
        "gradients": 8 * n,
        "optimizer": 16 * n,
    }
