"""The plain loop beside which a step is timed computes what ours does, in the types in which others train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.peers.gpt import Gpt, initial_weights
from benchmarks.step_time import GPU_SIZES, PlainLoop, build_ours, check_losses, configured
from platform.config.fields import Config, Model
from tests.harness.reference_model import ReferenceModel

GPT = Model(layers=2, d_model=32, heads=4, length=16, vocab=2001)  # padded to 2048
LLAMA = replace(GPT, kv_heads=2, d_ff=48, norm="rmsnorm", activation="swiglu", positions="rope", bias=False)
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}


class Operations(TorchDispatchMode):
    """Notes the operations that run inside of it, and the types of tensors that matrix products read."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.products: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition(".")[0]
        self.names.add(name)
        if name in PRODUCTS:
            self.products |= {x.dtype for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def tiny(model: Model, precision: str = "fp32") -> Config:
    c = configured(model, 2, "cpu", compiles=False)
    c.precision, c.optimizer.lr = precision, 5e-3
    return c


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(("precision", "apart"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_both_sides_train_alike(model, precision, apart):
    c = tiny(model, precision)
    ours = build_ours(c, "cpu")
    plain = PlainLoop(c, "cpu", ours.weights.master)
    losses = [(ours.step(k).loss, float(plain.step(k))) for k in range(1, 13)]
    assert max(abs(a - b) / a for a, b in losses) < apart
    assert losses[-1][0] < 0.9 * losses[0][0]  # something is learnt, so that a difference can show
    assert len(plain.model.embedding.weight) == len(ours.weights.master["embedding"]) == 2048


def test_sides_that_differ_are_not_timed():
    c = tiny(GPT)
    ours = build_ours(c, "cpu")
    plain = PlainLoop(tiny(replace(GPT, vocab=1999)), "cpu", ours.weights.master)
    losses = [ours.step(1).loss], [float(plain.step(1))]
    check_losses(losses[0], losses[0], "cpu")
    with pytest.raises(AssertionError, match="losses"):
        check_losses(*losses, "cpu")


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_plain_step_reads_nothing_and_multiplies_in_bf16(model):
    c = tiny(model, "bf16")
    plain = PlainLoop(c, "cpu", initial_weights(c))
    plain.step(1)
    with Operations() as seen:
        loss = plain.step(2)
    assert seen.products == {torch.bfloat16} and not seen.names & READS
    assert {p.dtype for p in plain.copies} == {torch.bfloat16}
    states = [x for state in plain.optimizer.state.values() for x in state.values()]
    assert {x.dtype for x in (*plain.masters, *states)} == {torch.float32}
    with Operations() as seen:
        loss.item()
    assert seen.names & READS  # negative control


def test_angles_are_made_where_the_model_computes():
    """On the meta device, which refuses to compute with tensors of the host as a GPU does."""
    c = tiny(LLAMA)
    weights = initial_weights(c)
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    with torch.device("meta"):
        plain, reference = Gpt(c.model, weights), ReferenceModel(c.model)
    assert plain(tokens).device.type == reference(tokens, tokens).device.type == "meta"
    plain.blocks[0].cos = plain.blocks[0].cos.new_ones(16, 4, device="cpu")
    with pytest.raises(RuntimeError):
        plain(tokens)


def test_models_of_gpus_are_what_their_names_say():
    millions = {"gpt2_124m": 124, "gpt2_124m_64": 124, "gpt2_350m": 355, "gpt3_1_3b": 1316, "llama_1b": 1236,
                "llama_8b_8": 2796}  # fmt: skip
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in ReferenceModel(m).parameters()) for name, (m, _) in GPU_SIZES.items()}
    assert {name: round(count / 1e6) for name, count in counts.items()} == millions
