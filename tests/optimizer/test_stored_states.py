"""Moments in bf16 and in 8 bits: torchao's update to the bit, and under every plan the updates of one process."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.optimizer import stored_states
from platform.optimizer.optimizers import PIECES, count_states_per_element
from platform.optimizer.stored_states import PiecewiseOptimizer, decode_blocks, encode_blocks
from platform.plan.model_types import SCALE_BLOCK
from platform.predict.footprint import state_bytes, weight_bytes
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import assemble, configure, prove, run, serial, trainer_of
from tests.harness.threads import run_threads

TORCHAO = "0.18.0"  # as in the extra `dev`
WIDE = {
    "d_model": 64,
    "d_kv": 64,
    "d_ff": 512,
    "vocab": 64,
    "layers": 1,
    "bias": False,
}  # whole blocks along every cut below
PLANS = {
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2},
    "zero1": {"data": 2, "zero": 1},
    "zero2": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 2},
    "zero3": {"data": 3, "zero": 3, "microbatch": 1, "global_batch": 6},
    "stages": {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "data": 2, "zero": 1, "layers": 2},
}


@pytest.fixture(scope="module")
def quant_utils():
    """torchao's own quantisation, without the seconds that all of torchao takes to import."""
    spec = importlib.util.find_spec("torchao")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"torchao=={TORCHAO} is not installed, the oracle of moments in 8 bits")
    file = Path(spec.submodule_search_locations[0]) / "optim" / "quant_utils.py"
    loaded = importlib.util.module_from_spec(importlib.util.spec_from_file_location("quant_utils", file))
    loaded.__spec__.loader.exec_module(loaded)
    return loaded


def drawn(n: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes, with blocks of zeros and of one large number."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=draw) * 10 ** (8 * torch.rand(n, generator=draw) - 6)
    x[: SCALE_BLOCK // 2] = 0
    x[SCALE_BLOCK : 2 * SCALE_BLOCK] = 0
    x[2 * SCALE_BLOCK : 2 * SCALE_BLOCK + 1] = 1e6
    return x


@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_scales_are_torchao_s(quant_utils, signed):
    x = drawn(64 * SCALE_BLOCK)
    x = x if signed else x.square()
    table = torch.tensor(quant_utils.create_dynamic_map(signed))
    scaled, scales = quant_utils.scale_tensor(x, SCALE_BLOCK)
    codes = quant_utils.quantize_8bit_with_qmap(scaled, table)
    ours = encode_blocks(x, signed)
    assert torch.equal(ours[0], codes) and torch.equal(ours[1], scales)
    wanted = quant_utils.dequant_with_qmap(codes, table, scales)
    assert torch.equal(decode_blocks(*ours, signed), wanted)
    assert not torch.equal(decode_blocks(codes, scales.roll(1), signed), wanted), "a scale of another block"


def optimizer_of(w: torch.Tensor, moments: str, **more) -> PiecewiseOptimizer:
    c = Config()
    c.optimizer = replace(c.optimizer, moments=moments, **more)
    scaled = moments == "int8" and w.numel() >= 4096
    group = {"params": [w], "names": ["w"], "lr": 1e-2, "weight_decay": 0.1, "scaled": scaled}
    return PiecewiseOptimizer([group], c.optimizer, {})


def test_pieces_are_updated_as_the_whole(monkeypatch):
    """A piece ends where a block does, so that its size says nothing of the numbers."""
    for moments, kind in (("int8", "adamw"), ("bf16", "adamw"), ("int8", "lion"), ("bf16", "sgd")):
        updated = []
        for piece in (1 << 30, 1024):
            monkeypatch.setitem(PIECES, "cpu", piece)
            w = drawn(5 * 1024 + 256, 1).requires_grad_()
            optimizer = optimizer_of(w, moments, kind=kind)
            for step in range(3):
                w.grad = drawn(w.numel(), 2 + step)
                optimizer.step()
            updated.append([w.detach(), *(x for x in optimizer.state[w].values())])
        assert all(map(torch.equal, *updated)), (moments, kind)


@pytest.mark.full
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_updates_are_torchao_s(moments, monkeypatch):
    """Weights, moments, codes and scales after each of several updates."""
    try:
        assert version("torchao") == TORCHAO
    except PackageNotFoundError:
        pytest.skip(f"torchao=={TORCHAO} is not installed, the oracle of moments in few bits")
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    o = Config().optimizer
    for n in (4096, 300):
        w, theirs = drawn(n, 1).requires_grad_(), drawn(n, 1)
        optimizer, scaled = optimizer_of(w, moments), moments == "int8" and n == 4096
        mean, square = (
            OptimState8bit.zeros((n,), signed, SCALE_BLOCK) if scaled
            else torch.zeros(n, dtype=torch.bfloat16 if moments == "bf16" else torch.float32)
            for signed in (True, False)
        )  # fmt: skip
        for step in range(1, 6):
            w.grad = gradient = drawn(n, 1 + step)
            optimizer.step()
            lr, count = torch.tensor(1e-2), torch.tensor(float(step))
            how = lr, *o.betas, 0.1, o.eps, True, False
            single_param_adam(theirs, gradient, count, mean, square, None, *how)
            assert torch.equal(w, theirs), (n, step)
            for name, moment in (("exp_avg", mean), ("exp_avg_sq", square)):
                ours = optimizer.state[w]
                pairs = [(ours[name], moment.codes), (ours[name + "_scale"], moment.scale)] if scaled else [
                    (ours[name], moment)
                ]  # fmt: skip
                assert all(torch.equal(*pair) for pair in pairs), (n, step, name)


def configured(moments: str, kind: str = "adamw", **more) -> Config:
    c = configure(**{**WIDE, **more})
    c.optimizer.moments, c.optimizer.kind = moments, kind
    return c


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("moments, kind", [("bf16", "adamw"), ("int8", "adamw"), ("int8", "lion")])
def test_every_plan_updates_as_one_process_does(moments, kind, plan):
    prove(configured(moments, kind, **PLANS[plan]))


def test_a_scale_of_another_block_is_seen(monkeypatch):
    """By the comparison with one process, under a plan whose shards begin at another block."""
    c = configured("int8", **PLANS["zero1"])
    serial(c)
    monkeypatch.setattr(stored_states, "decode_blocks", lambda codes, scales, *more: decode_blocks(
        codes, scales.roll(1), *more
    ))  # fmt: skip
    with pytest.raises(AssertionError, match="final of"):
        prove(c)


def stored_bytes(c: Config):
    """Per rank: bytes of optimizer state that its blocks have, and those planned."""
    plan = make_plan(c)

    def on_rank(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.step(1)
        state = RankTrainingState(trainer)
        kept = [(b.name, b.tensor.nbytes) for b in state.live_blocks() if not b.name.startswith("model.")]
        planned = weight_bytes(trainer.stage, count_states_per_element(c), communicator.coordinates)["optimizer"]
        held = sum(box.num_elements * h.itemsize for h in state.held if h.name in dict(kept) for box in h.holders)
        return sum(n for _, n in kept), planned, held

    alone = plan.mesh.world_size == 1
    return plan, [on_rank(SingleRank(plan.mesh))] if alone else run_threads(plan.mesh, on_rank)


@pytest.mark.parametrize("layout", ["serial", "1d", "zero3"])
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_planned_bytes_are_those_kept(moments, layout):
    c = configured(moments, precision="fp32", **PLANS.get(layout, {}))
    plan, ranks = stored_bytes(c)
    padding = sum(b.elements - sum(b.sizes) for b in plan.buckets) * 8
    for kept, planned, _ in ranks:
        assert planned - padding <= kept <= planned
    if layout != "zero3":
        assert ranks[0][0] == ranks[0][1]
    if layout == "serial":
        assert ranks[0][0] == ranks[0][2] == state_bytes(plan, 2)
    wide = weight_bytes(make_plan(configured("fp32", precision="fp32", **PLANS.get(layout, {}))), 2)["optimizer"]
    assert ranks[0][1] < (0.51 if moments == "bf16" else 0.28) * wide


@pytest.mark.parametrize(
    "more, line",
    [
        ({"kind": "muon"}, "muon keeps all its state as it is; nearest legal: fp32, optimizer=adamw"),
        ({"kind": "adafactor"}, "adafactor keeps all its state as it is"),
        ({"kind": "sgd", "momentum": 0.0}, "sgd keeps no moments"),
    ],
    ids=str,
)  # fmt: skip
def test_optimizers_without_moments_to_store_are_refused(more, line):
    for moments in ("bf16", "int8"):
        c = configured(moments)
        c.optimizer = replace(c.optimizer, **more)
        with pytest.raises(ConfigError, match=line):
            make_plan(c)


def test_a_cut_inside_a_block_is_refused():
    c = configured("int8", **PLANS["1d"], d_ff=256)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down is cut by t inside a block of 256 .* bf16, fp32"):
        make_plan(c)
    make_plan(configured("bf16", **PLANS["1d"], d_ff=256))


def test_names_of_the_run_that_is_compared():
    """Whole tensors are compared, and some of them have scales while others are too small."""
    plan, results = run(configured("int8", **PLANS["zero1"]))
    names = {*assemble(plan, results, lambda r: r.final)}
    assert plan.scaled and plan.scaled < names
