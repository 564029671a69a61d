"""One process of the platform against the same model in plain PyTorch: loss, gradients, five AdamW steps."""

from __future__ import annotations

import pytest
import torch

from platform.optimizer.learning_rate import learning_rate
from tests.harness.oracle import MODELS, STEPS, Tokens, configure, run
from tests.harness.reference_model import ReferenceModel, parameter_groups

OTHERS = {"kind", "within_documents", "experts", "kv_latent"}  # what the reference lacks
KNOWN = [name for name, model in MODELS.items() if not OTHERS & model.keys()]


@pytest.mark.parametrize("model", KNOWN)
def test_equals_plain_pytorch(model):
    c = configure(**MODELS[model])
    _, (ours,) = run(c)
    theirs = ReferenceModel(c.model).double()
    theirs.load(ours.initial)
    o = c.optimizer
    optimizer = torch.optim.AdamW(parameter_groups(theirs, o.weight_decay), o.lr, tuple(o.betas), o.eps)
    tokens = Tokens(c)
    for step in range(1, STEPS + 1):
        rows = tokens.batch("train", (step - 1) * c.train.global_batch, step * c.train.global_batch)
        loss = theirs(torch.from_numpy(rows["tokens"]), torch.from_numpy(rows["labels"]))
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            largest = max(g.abs().max() for g in ours.gradients.values())
            for name, g in theirs.gradients().items():
                error = (ours.gradients[name].reshape(g.shape) - g).abs().max()
                assert error <= 1e-10 * g.abs().max() + 1e-13 * largest, name
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), o.clip)
        if step == 1:
            assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step, c.train.steps)
        optimizer.step()
        assert ours.losses[step - 1] == pytest.approx(loss.item(), rel=1e-12)
    for name, p in theirs.names().items():
        error = (ours.final[name].reshape(p.shape) - p).abs().max()
        assert error <= 1e-10 * p.abs().max() + 1e-10 * o.lr, name
