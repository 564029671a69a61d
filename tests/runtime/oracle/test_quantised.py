"""Weights in 4 bits under adapters (tune=qlora), under every plan: equal to one process, and bytes as planned."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.model import build_model
from platform.plan import adapters
from platform.plan.model_types import NF4_BLOCK, NF4_BYTES
from platform.plan.plan_check import find_unsoundness
from platform.plan.step_collectives import communication, list_decodings, step_collectives
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.predict.step_price import read_hardware, step_price
from platform.runtime import normal_floats
from platform.runtime.communicator import SingleRank
from platform.train import rank_parameters
from platform.train.generator import TextGenerator
from platform.train.replies import AskedTexts
from tests.harness.held import check_kept_parameters, check_stages
from tests.harness.oracle import compare, prove, run, serial, trainer_of
from tests.harness.threads import run_threads
from tests.runtime.oracle import test_adapters
from tests.runtime.oracle.test_adapters import started  # noqa: F401  adapters that are not 0 at first
from tests.runtime.test_memory import measured

full = pytest.mark.full
TUNE = {"kind": "qlora", "rank": 4, "alpha": 8.0}
WIDE = {"d_model": 256, "d_ff": 256, "layers": 2}  # blocks of 64 elements, cut by two axes
PLANS: dict[str, dict[str, Any]] = {
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 1},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 2},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "2p5d": {"tensor": "2p5d", "axes": {"d": 2, "r": 2, "c": 2}},
    "3d_literal": {"tensor": "3d_literal", "axes": {"x": 2, "y": 2, "z": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "zero 3": {"data": 2, "zero": 3},
    "3d, zero 3": {"tensor": "3d", "axes": {"x": 2, "z": 2}, "data": 2, "zero": 3},
    "contexts": {"context": 2, "data": 2, "zero": 3},
    "stages": {"pipeline": "zb_h1", "stages": 2, "microbatch": 2},
    "stages, zero 3": {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "data": 2, "zero": 3},
    "interleaved": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "microbatch": 2, "layers": 4},
    "recomputed": {"tensor": "1d_sp", "axes": {"t": 2}, "recompute": "full", "mlp_chunks": 2},
    "gathered again": {"tensor": "3d", "axes": {"y": 2, "z": 2}, "gathered": "again"},
}
FEW = ("1d_sp", "3d, zero 3", "stages")


def tuned(model: str = "llama", tune: dict[str, Any] = TUNE, **how: Any):
    return test_adapters.tuned(model, tune, **{**WIDE, **how})


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=full), pytest.param("t5", marks=full)])
@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=full) for name in PLANS])
def test_equal_to_one_process(name, model):
    if model == "t5" and "context" in PLANS[name]:
        pytest.skip("no contexts of encoders")
    plan, results = prove(tuned(model, **PLANS[name]))
    assert not find_unsoundness(plan)
    check_stages(plan)
    assert plan.quantised and {*plan.quantised} < plan.frozen
    assert all(g.any() for r in results for n, g in r.gradients.items() if g.numel())


EXPERTS = {"experts": 4, "expert_d_ff": 128, "shared_experts": 1, "capacity_factor": 4.0, "balance_loss": 0.3}
EVERYWHERE = {**TUNE, "targets": ["*"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "few are adapted": {"tensor": "1d", "axes": {"t": 2}, "tune": {**TUNE, "targets": ["attention.query"]}},
    "head and embedding": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 3, "tune": EVERYWHERE},
    "experts": {"data": 2, "experts_of": 2, "zero": 1, "tune": EVERYWHERE, **EXPERTS},
    "experts, 1d, zero 3": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "experts_of": 2, "zero": 3,
                            "tune": EVERYWHERE, **EXPERTS},
    "rows of experts": {"data": 2, "experts_of": 2, "tune": EVERYWHERE, **EXPERTS, "capacity_factor": 0.0},
    "uneven, zero 3": {"tensor": "1d", "axes": {"t": 3}, "uneven": True, "data": 2, "zero": 3, "heads": 4,
                       "kv_heads": 4, "d_ff": 192},
    "muon": {"tensor": "1d", "axes": {"t": 2}, "optimizer": "muon"},
    "branches": {"branch": "dsp", "branch_axes": {"g": 2}, "tensor": "1d", "axes": {"t": 2}},
}  # fmt: skip


@pytest.mark.parametrize("name", [n if n.startswith("experts,") else pytest.param(n, marks=full) for n in SPECIAL])
def test_special_ones_too(name):
    how = {**SPECIAL[name]}
    tune, uneven, optimizer = how.pop("tune", TUNE), how.pop("uneven", False), how.pop("optimizer", "adamw")
    c = tuned("llama", tune, **how)
    c.tensor.uneven, c.optimizer.kind = uneven, optimizer
    plan, results = prove(c)
    assert not find_unsoundness(plan)
    assert all(g.any() for r in results for n, g in r.gradients.items() if g.numel() and "expert" not in n)
    kinds = {name.partition(".")[2].partition(".")[2] for name in plan.quantised}
    assert ("experts.down" in str(kinds)) == ("experts" in how) and "router" not in str(kinds)
    assert not {"embedding", "head"} & {*plan.quantised}


def nearest(weights: torch.Tensor) -> torch.Tensor:
    """Weights in 4 bits by their definition, and numbers again."""
    blocks = weights.float().reshape(-1, NF4_BLOCK)
    scales, values = blocks.abs().amax(1, keepdim=True), torch.tensor(normal_floats.NORMAL_FLOATS)
    return (values[(blocks / scales).unsqueeze(-1).sub(values).abs().argmin(-1)] * scales).view(weights.shape)


def test_the_model_is_the_one_with_these_numbers(monkeypatch):
    """One process with tune=lora, and in the place of its base what that is in 4 bits: the same to the last digits."""
    c = tuned()
    quantised, expected, real = frozenset(make_plan(c).quantised), run(c)[1][0], rank_parameters.initialise

    def put_nearest(plan, communicator, p, seed, block):
        real(plan, communicator, p, seed, block)
        if p.name in quantised:
            block.copy_(nearest(block))

    monkeypatch.setattr(rank_parameters, "initialise", put_nearest)
    plain = tuned(tune={**TUNE, "kind": "lora"})
    plan, results = run(plain)
    compare(plain, plan, results, expected)


@pytest.mark.parametrize("name", ["zero 3", pytest.param("1d", marks=full)])
def test_a_neighbours_scale_is_found(name, monkeypatch):
    """The negative control: of one block the scale of the next, on one rank."""
    c = tuned(**PLANS[name])
    plan, real = make_plan(c), normal_floats.QuantisedBucket.store_weights

    def exchange(self, weight, numbers):
        real(self, weight, numbers)
        if weight == "layers.1.mlp.up" and not self._index and not self._communicator.coordinates.get("t", 0):
            self.master[weight][0, :4] = self.master[weight][1, :4].clone()

    serial(c)
    monkeypatch.setattr(normal_floats.QuantisedBucket, "store_weights", exchange)
    _, results = run(c, plan)
    with pytest.raises(AssertionError, match=r"initial of layers.1.mlp.up"):
        compare(c, plan, results, serial(c))
    assert abs(results[0].loss - serial(c).loss) > 1e-9 * serial(c).loss, "and it is another model"


@pytest.mark.parametrize("name", [n if n in ("zero 3", "1d_sp") else pytest.param(n, marks=full) for n in PLANS])
def test_ranks_hold_what_is_planned(name):
    """Bytes between uses exactly, of the parameters in 4 bits half of one each and their scales."""
    c = tuned(**PLANS[name], precision="bf16")
    plan = make_plan(c)

    def kept(communicator) -> None:
        check_kept_parameters(trainer_of(c, plan, communicator), NF4_BLOCK)

    world = plan.mesh.world_size
    run_threads(plan.mesh, kept) if world > 1 else kept(SingleRank(plan.mesh))


@pytest.mark.parametrize("scheme", [("serial", {}), pytest.param(("3d", {"x": 2, "z": 2}), marks=full)], ids=str)
def test_what_is_kept_is_what_is_planned(scheme):
    c = tuned(tensor=scheme[0], axes=scheme[1])
    plan, saved = measured(c)
    assert set(saved) == {count_saved_elements(plan, build_model(c.model)).total_elements}


CUT: dict[str, tuple[dict[str, Any], str]] = {
    "by an axis": ({"tensor": "1d", "axes": {"t": 8}, "d_model": 128, "d_ff": 256},
                   "layers.0.attention.output and 3 more is cut by t inside a block of 64"),
    "no whole blocks": ({"d_model": 24, "d_ff": 36, "heads": 4},
                        "layers.0.attention.key and 9 more is not of whole blocks"),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_a_block_is_never_cut(name):
    how, words = CUT[name]
    with pytest.raises(ConfigError) as refused:
        make_plan(tuned(**how))
    assert words in str(refused.value) and "tune.kind=qlora" in str(refused.value)
    assert make_plan(tuned(tune={**TUNE, "kind": "lora"}, **how))


@pytest.mark.parametrize("name", [n if n == "zero 3" else pytest.param(n, marks=full) for n in PLANS])
def test_texts_are_scored_as_by_one_process(name):
    """Answers of the model that is trained (eval.tasks, eval.prompts), of weights in 4 bits."""
    texts = AskedTexts([[1, 2, 3, 4, 5], [7, 6, 5]], [])

    def scored(c) -> list[tuple[float, bool]]:
        plan = make_plan(c)

        def on_rank(communicator):
            trainer = trainer_of(c, plan, communicator)
            with torch.no_grad():
                scores = TextGenerator(c, plan, communicator, trainer.weights).score_texts(texts, [1, 1])
            return [(s.log_probability, s.greedy) for s in scores]

        ranks = run_threads(plan.mesh, on_rank) if plan.mesh.world_size > 1 else [on_rank(SingleRank(plan.mesh))]
        assert all(scores == ranks[0] for scores in ranks)
        return ranks[0]

    one, scores = (scored(tuned(**how)) for how in ({}, PLANS[name]))
    if "layers" not in PLANS[name]:
        assert [g for _, g in scores] == [g for _, g in one]
        assert [s for s, _ in scores] == pytest.approx([s for s, _ in one], rel=1e-10)
    assert one != scored(tuned(tune={**TUNE, "kind": "lora"}))


def test_the_gathers_move_4_bits():
    """Bytes of the base in both passes under ZeRO-3: to each rank what the other one keeps, 4.5 bits an element."""
    c = tuned(data=2, zero=3, precision="bf16")
    plain = tuned(data=2, zero=3, precision="bf16", tune={**TUNE, "kind": "lora"})
    moved = [communication(make_plan(some))["all_gather/data"] for some in (c, plain)]
    plan = make_plan(c)
    elements = sum(b.elements for b in plan.buckets if b.quantised)
    launches = [(n, x) for _, x, n in step_collectives(plan) if x.dtype == "bytes"]
    assert sum(n * x.elements * 2 for n, x in launches) % (elements * NF4_BYTES // NF4_BLOCK) == 0
    passes = sum(n * x.elements for n, x in launches) * 2 / (elements * NF4_BYTES / NF4_BLOCK)
    assert moved[1] - moved[0] == passes * elements * (2 - NF4_BYTES / NF4_BLOCK)


@pytest.mark.parametrize("width", [96, pytest.param(256, marks=full)])
@pytest.mark.parametrize("name", [*PLANS, "uneven"])
def test_what_cuts_a_block_is_known(name, width):
    """Of every weight, on every rank, against the places of the elements themselves."""
    how = PLANS.get(name, {"tensor": "1d", "axes": {"t": 3}})
    c = tuned(tune={**TUNE, "kind": "lora"}, **{**how, "d_model": width, "d_ff": 160})
    c.tensor.uneven = name == "uneven"
    plan, ranks = make_plan(c), range(make_plan(c).mesh.world_size)
    answers = set()
    for p in (p for p in plan.parameters if adapters.can_quantise(p)):
        places = np.arange(prod(plan.global_shape(p))).reshape(plan.global_shape(p))
        is_cut = False
        for at in (plan.mesh.rank_coordinates(rank) for rank in ranks):
            if plan.has_block(p, at):
                mine = places[tuple(slice(a, a + n) for a, n in plan.locate_block(p, at))].ravel()
                whole = mine.size % NF4_BLOCK == 0 and (mine[::NF4_BLOCK] % NF4_BLOCK == 0).all()
                is_cut |= not (whole and (np.diff(mine.reshape(-1, NF4_BLOCK)) == 1).all())
        assert plan.cuts_blocks(p, NF4_BLOCK) == is_cut, p.name
        answers.add(is_cut)
    assert answers


def test_all_mistakes_are_told_at_once():
    c = tuned(**CUT["by an axis"][0], precision="bf16")
    c.optimizer.masters = "split"
    with pytest.raises(ConfigError) as refused:
        make_plan(c)
    assert {line.partition("=")[0] for line in refused.value.violations} == {"tune.kind", "optimizer.masters"}


def test_making_numbers_takes_time():
    """As much as its bytes take, in each pass, and it is part of what a step is predicted to take."""
    parts, seconds = {}, {}
    for kind in ("lora", "qlora"):
        c = tuned(tune={**TUNE, "kind": kind}, precision="bf16")
        plan = make_plan(c)
        parts[kind] = list(list_decodings(plan, plan.chunks[0], False))
        seconds[kind] = step_price(c, plan, read_hardware("h100")).seconds
    elements = sum(b.elements for b in plan.buckets if b.quantised)
    assert not parts["lora"] and {phase for phase, *_ in parts["qlora"]} == {"forward", "backward"}
    assert sum(moved for _, moved, _ in parts["qlora"]) == 2 * elements * (12.5 + 12 / NF4_BLOCK + 2)
    assert seconds["lora"] < seconds["qlora"]
