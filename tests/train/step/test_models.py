"""Every kind of model of the platform against the same functions in plain PyTorch, and what padding and
encoder memory may cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from platform.optimizer.learning_rate import learning_rate
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import MODELS, STEPS, Tokens, configure, run, trainer_of
from tests.harness.reference_transformer import loss as reference_loss

KINDS = [name for name, model in MODELS.items() if "kind" in model]


@pytest.mark.parametrize("untied", [{}, {"tied": False, "activation": "gelu", "norm": "layernorm"}], ids=["", "other"])
@pytest.mark.parametrize("model", KINDS)
def test_equals_plain_pytorch(model, untied):
    """Loss, gradients and five AdamW steps."""
    c = configure(**MODELS[model] | untied)
    _, (ours,) = run(c)
    weights = {name: w.clone().requires_grad_() for name, w in ours.initial.items()}
    o = c.optimizer
    decayed = {p.name: p.decay for p in make_plan(c).parameters}
    groups = [
        {"params": [w for n, w in weights.items() if decayed[n] == on], "weight_decay": on * o.weight_decay}
        for on in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, o.lr, tuple(o.betas), o.eps)
    for step in range(1, STEPS + 1):
        batch = Tokens(c).batch("train", (step - 1) * c.train.global_batch, step * c.train.global_batch)
        loss = reference_loss(c.model, weights, {name: torch.from_numpy(rows) for name, rows in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            largest = max(g.abs().max() for g in ours.gradients.values())
            for name, w in weights.items():
                error = (ours.gradients[name] - w.grad).abs().max()
                assert error <= 1e-10 * w.grad.abs().max() + 1e-13 * largest, name
        torch.nn.utils.clip_grad_norm_(weights.values(), o.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step, c.train.steps)
        optimizer.step()
        assert ours.losses[step - 1] == pytest.approx(loss.item(), rel=1e-12)
    for name, w in weights.items():
        assert (ours.final[name] - w).abs().max() <= 1e-10 * w.abs().max() + 1e-10 * o.lr, name


class Longer(Tokens):
    """The same samples with more padding behind them."""

    def __init__(self, c, source, target):
        super().__init__(c)
        self.model = replace(c.model, length=target, source_length=source)
        self.to = {"source": c.model.source_length, "tokens": c.model.length, "labels": c.model.length}

    def batch(self, split, start, end):
        rows = super().batch(split, start, end)
        return {k: np.pad(v, ((0, 0), (0, self.to[k] - v.shape[1])), constant_values=-1) for k, v in rows.items()}


@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["fused", "einsums"])
@pytest.mark.parametrize("model", [name for name in KINDS if MODELS[name]["kind"] == "encoder_decoder"])
def test_padding_does_not_influence_the_loss(model, dropout):
    more = {"source_length": 12, "length": 16, "dropout": dropout}
    long = configure(**MODELS[model] | more)
    short = configure(**MODELS[model] | more | {"source_length": 8, "length": 10})
    losses = []
    for c, corpus in ((long, Longer(long, 8, 10)), (short, Tokens(short))):
        plan = make_plan(c)
        losses.append(trainer_of(c, plan, SingleRank(plan.mesh), corpus).compute_gradients(1))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["fused", "einsums"])
def test_padding_of_an_encoder_does_not_influence_the_loss(dropout):
    """Other rows of the embedding in place of padding change nothing; the position table has no padded rows to compare
    lengths by."""
    c = configure(**MODELS["bert"], dropout=dropout)
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    inputs = trainer.passes.load_input_blocks("train", 0)
    with torch.no_grad():
        loss = trainer.passes.model.forward(trainer.ops, inputs)
        read = inputs["tokens"]["lookup", "embedding"]
        inputs["tokens"]["lookup", "embedding"] = torch.where(read < 0, 7, read)
        assert trainer.passes.model.forward(trainer.ops, inputs) == loss
        inputs["tokens"]["lookup", "embedding"] = torch.where(read == read[0, 0], 7, read)
        assert trainer.passes.model.forward(trainer.ops, inputs) != loss


@pytest.mark.parametrize("layers", [2, 3])
def test_memory_is_converted_once(layers):
    """However many layers read it, the encoder's memory is gathered once and its gradient reduced once: by count."""
    c = configure("1d_sp", {"t": 2}, **MODELS["t5"] | {"layers": layers}, microbatch=8)
    _, results = run(c)
    launched = Counter(launch.op for launch in results[0].log)
    # Each way: around attention and feed-forward of the encoder (2) and self-attention, queries of cross-attention and
    # feed-forward of the decoder (3) in every layer; once the two embeddings, the head and the memory.
    assert launched["all_gather"] == launched["reduce_scatter"] == 2 * 5 * layers + 2 + 1 + 1


@pytest.mark.parametrize(("branch", "axes"), [("none", 1), ("dsp", 2)])
def test_memory_is_converted_once_per_axis(branch, axes):
    branch_axes = {"g": 2} if branch == "dsp" else {}
    plan = make_plan(configure("1d_sp", {"t": 2}, branch=branch, branch_axes=branch_axes, **MODELS["t5"]))
    (memory,) = (o for (_, name), o in plan.operations.items() if name.endswith("cross.key") and o.groups)
    (group,) = memory.groups
    assert len(group.einsums) == 2 * 2
    assert len(group.x.forward) == axes and len(group.x.backward) == axes


def test_loss_is_the_mean_over_what_is_predicted():
    """Unequal microbatches and replicas weigh by their labels, not alike."""
    results = []
    for microbatch, data in ((8, 1), (2, 1), (2, 2)):
        _, ranks = run(configure(**MODELS["bert"], microbatch=microbatch, data=data))
        results.append((ranks[0].loss, ranks[0].grad_norm))
    assert results[1] == pytest.approx(results[0], rel=1e-12) and results[2] == pytest.approx(results[0], rel=1e-12)
