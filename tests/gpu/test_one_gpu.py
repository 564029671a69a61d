"""Whole training steps on a GPU against one process on the CPU in fp64, eagerly and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from platform.config.fields import Config
from platform.plan.chunks import ADDS_WIDE
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints
from platform.runtime.communicator import SingleRank
from platform.train.rehearsal import rehearse_steps
from tests.harness.oracle import (
    MODELS,
    Result,
    compare,
    compute,
    configure,
    on_host,
    serial,
    trainer_of,
    validation_loss,
)
from tests.harness.wide_sums import errors

pytestmark = pytest.mark.gpu
MORE = {"dropout": {"dropout": 0.2}, "head_width_12": {"d_model": 96}, "all in flight": {"pipeline": "gpipe"}}
LOWER = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}  # of a loss, relative


def on_gpu(c: Config, compiled: str = "off") -> Result:
    c = replace(c, train=replace(c.train, compile=compiled))
    plan = make_plan(c)
    return on_host(compute(c, plan, SingleRank(plan.mesh, "cuda")))


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("model", [*MODELS, *MORE])
def test_a_step_in_fp64_is_that_of_the_cpu(model, compiled):
    c = configure(**MODELS.get(model, MORE.get(model)))
    compare(c, make_plan(c), [on_gpu(c, compiled)], serial(c))


def test_recomputation():
    c = configure(recompute="full", **MODELS["llama"])
    compare(c, make_plan(c), [on_gpu(c)], serial(c))


@pytest.mark.parametrize("model", ["gpt", "llama", "bert", "t5"])
@pytest.mark.parametrize(("precision", "compiled"), [*((p, "on") for p in LOWER), ("bf16", "off"), ("fp16", "off")])
def test_lower_precisions_on_the_kernels_of_the_gpu(precision, compiled, model):
    c = configure(precision=precision, **MODELS[model])
    expected = serial(configure(**MODELS[model]))
    result = on_gpu(c, compiled)
    assert result.losses == pytest.approx(expected.losses, rel=LOWER[precision])
    scale = c.loss_scale.initial if precision == "fp16" else 1.0
    whole = torch.cat([g.double().flatten() for g in result.gradients.values()]) / scale
    wanted = torch.cat([expected.gradients[n].double().flatten() for n in result.gradients])
    assert (whole - wanted).norm() < 10 * LOWER[precision] * wanted.norm()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_error_of_a_weight_s_gradient_does_not_grow_with_its_microbatches(precision, monkeypatch, capsys):
    """Products of 16 bits are added in fp32 as they are computed, and never rounded. Negative controls: a sum in 16
    bits, and products that are rounded before they are added in fp32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, f"allow_{precision}_reduced_precision_reduction", False)
    few, many = errors("cuda", precision, 4), errors("cuda", precision, 256)
    monkeypatch.setitem(ADDS_WIDE, "cuda", False)
    rounded = errors("cuda", precision, 256)
    with capsys.disabled():
        print(f"\n{precision}: after 4 microbatches {few[0]:.1e}, after 256 {many[0]:.1e}; rounded products "
              f"{rounded[0]:.1e}, sum in 16 bits {few[1]:.1e} and {many[1]:.1e}")  # fmt: skip
    assert max(few[0], many[0]) < 5e-6
    assert many[1] > 2 * few[1] and many[1] > rounded[0] > 2 * many[0]


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("model", ["gpt", "llama", "dropout", "all in flight"])
def test_replayed_passes_compute_what_launched_ones_do(model, compiled):
    """By CUDA's own graphs, in fp64, with evaluations between, which take other memory. No GPU has run this yet."""

    def train(graphs: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        c = configure(microbatch=2, **{**MODELS, **MORE}[model])
        c.train.graphs, c.train.compile, c.train.steps = graphs, compiled, 6
        plan = make_plan(c)
        trainer = trainer_of(c, plan, SingleRank(plan.mesh, "cuda"))
        rehearse_steps(trainer, 1)
        assert bool(trainer.passes.recorder) is (graphs == "on")
        losses = []
        for step in range(1, c.train.steps + 1):
            losses.append(trainer.step(step, then=step + 1 if step in (2, 3) else 0).loss)
            losses.append(validation_loss(trainer))
        return losses, {n: w.detach().cpu() for n, w in trainer.weights.master.items()}

    (losses, weights), (wanted, kept) = train("on"), train("off")
    assert losses == pytest.approx(wanted, rel=1e-12)
    for name, w in weights.items():
        torch.testing.assert_close(w, kept[name], rtol=1e-10, atol=1e-12)


def test_a_gradient_that_is_wrong_is_seen():
    c = configure()
    result = on_gpu(c)
    name = max(result.gradients, key=lambda n: result.gradients[n].abs().max())
    result.gradients[name] = result.gradients[name] * (1 + 1e-8)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, make_plan(c), [result], serial(c))


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_plan_needs_what_it_says(compiled, capsys):
    """What torch allocates after the first step is what the plan says but for rounding, and with torch's reserve less
    than the plan's total, which has room for what CUDA and its libraries take."""
    c = configure(precision="bf16", microbatch=8, global_batch=16, layers=6, d_model=1024, heads=16, length=1024,
                  vocab=50257)  # fmt: skip
    c.train.compile, c.cluster.device = compiled, "cuda"
    plan = make_plan(c)
    planned = max(predict_footprints(c, plan), key=lambda footprint: footprint.total_bytes)
    torch.cuda.empty_cache()
    trainer = trainer_of(c, plan, SingleRank(plan.mesh, "cuda"))
    trainer.step(1)
    torch.cuda.reset_peak_memory_stats()
    trainer.step(2)
    validation_loss(trainer)
    peak, tensors = torch.cuda.max_memory_allocated(), planned.total_bytes - planned.reserved
    with capsys.disabled():
        print(f"\n{compiled}: planned {tensors / 1e9:.3f} GB and {planned.reserved / 1e9:.3f}, allocated "
              f"{peak / 1e9:.3f}, reserved {torch.cuda.memory_reserved() / 1e9:.3f}")  # fmt: skip
    assert 0.9 * tensors < peak < 1.04 * tensors
    assert torch.cuda.memory_reserved() < planned.total_bytes
