"""Branches in general, shared over an axis, against one process in fp64."""

from __future__ import annotations

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.model import build_model
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from tests.harness import branch_models
from tests.harness.oracle import STEPS, Tokens, configure, prove, run
from tests.runtime.test_memory import measured

BRANCHES = [name for name in branch_models.MODELS if name != "plain"]
CASES = {
    "none": {},
    "dsp g1": {"branch": "dsp", "branch_axes": {"g": 1}},
    "dsp g2": {"branch": "dsp", "branch_axes": {"g": 2}},
    "dsp g4": {"branch": "dsp", "branch_axes": {"g": 4}},
    "dsp_slice g2": {"branch": "dsp_slice", "branch_axes": {"g": 2}},
    "dsp 2x2": {"branch": "dsp", "branch_axes": {"a": 2, "b": 2}},
    "dsp g2 x data": {"branch": "dsp", "branch_axes": {"g": 2}, "data": 2},
    "dsp g2 x 1d": {"branch": "dsp", "branch_axes": {"g": 2}, "tensor": "1d", "axes": {"t": 2}},
    "dsp g2 x 1d_sp": {"branch": "dsp", "branch_axes": {"g": 2}, "tensor": "1d_sp", "axes": {"t": 2}},
    "dsp_csub g2": {"branch": "dsp_csub", "branch_axes": {"g": 2}},
    "dsp_csub g2 x 1d_sp": {"branch": "dsp_csub", "branch_axes": {"g": 2}, "tensor": "1d_sp", "axes": {"t": 2}},
    "dsp g2 x 2d": {"branch": "dsp", "branch_axes": {"g": 2}, "tensor": "2d", "axes": {"r": 2, "c": 2}},
    "layout": {"tensor": "layout", "axes": {"a": 4}, "rules": {"branch": ["a"], "heads": ["a"], "vocab": ["a"]}},
    "layout inside": {
        "tensor": "layout",
        "axes": {"a": 2, "b": 2},
        "rules": {"branch": ["a"], "d_branch": ["b"], "heads": ["a"]},
    },
    "layout d_model": {"tensor": "layout", "axes": {"a": 2, "b": 2}, "rules": {"branch": ["a"], "d_model": ["b"]}},
}


def small(kind: str, **more):
    sizes = {"kind": kind, "heads": 4, "d_model": 16, "d_kv": 4, "length": 8, "bias": False, "layers": 1}
    return configure(**{**sizes, "label_smoothing": 0.0, **more})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", BRANCHES)
def test_equals_one_process(kind, case):
    c = small(kind, **CASES[case])
    prove(c)


def loss_of(c, forward):
    """The mean loss of the first batch of a model written in plain PyTorch: forward(x [length, batch, d_model])."""
    batch = {n: torch.from_numpy(v).t() for n, v in Tokens(c).batch("train", 0, c.train.global_batch).items()}
    _, (result,) = run(c)
    w = {n: p.clone().requires_grad_() for n, p in result.initial.items()}
    x = w["embedding"][batch["tokens"].clamp_min(0)] + w["position"].unsqueeze(1)
    logits = forward(x, w) @ w["embedding"].t()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)
    loss.backward()
    return result, loss.item(), {n: p.grad for n, p in w.items()}


def _resnext(x, w):
    up, out = w["block.input"], w["block.output"]
    return x + sum(torch.relu(x @ up[i].t()) @ out[:, i].t() for i in range(len(up)))


def _mixed(x, w):
    up, out = w["block.input"], w["block.output"]
    functions = [torch.nn.functional.gelu, torch.relu, torch.nn.functional.silu, torch.tanh]
    return x + sum(f(x @ up[i].t()) @ out[:, i].t() for i, f in enumerate(functions))


def _grouped(x, w):
    parts = zip(x.chunk(4, -1), w["block.input"], strict=True)
    return x + torch.cat([torch.relu(part @ weight.t()) for part, weight in parts], -1)


def _summed(x, w):
    """The unsplit linear layer."""
    return x @ w["block.output"].flatten(1).t()


@pytest.mark.parametrize("forward", [_resnext, _mixed, _grouped, _summed], ids=lambda f: f.__name__[1:])
def test_equals_plain_pytorch(forward):
    result, loss, gradients = loss_of(small(forward.__name__[1:]), forward)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    for name, g in gradients.items():
        assert torch.allclose(result.gradients[name], g, rtol=1e-10, atol=1e-15), name


@pytest.mark.parametrize("case", ["none", "dsp g2"])
def test_heads_are_branches(case):
    """The same numbers, parameters and bytes as the attention block."""
    (_, (as_branches, *_)), (_, (as_block, *_)) = (
        (p, r) for p, r in (run(small(k, **CASES[case])) for k in ("heads", "plain"))
    )
    assert as_branches.losses == as_block.losses and len(as_block.losses) == STEPS
    assert as_branches.moved == as_block.moved
    for name, g in as_block.gradients.items():
        assert torch.equal(as_branches.gradients[name], g)


def test_a_rank_computes_its_own_branches_only():
    plan = make_plan(small("mixed", **CASES["dsp g4"]))
    assert plan.local_shape(branch_models.INNER) == (8, 4, 1, 4)
    weight = next(p for p in plan.parameters if p.name == "block.input")
    assert plan.local_shape(weight) == (1, 4, 16) and plan.reductions["block.input"] == ()


def test_joins_by_sum_scatter_the_batch():
    """Around the branches: one gather of the batch, and one reduce-scatter of the branches' sum."""
    plan = make_plan(small("resnext", **CASES["dsp g2"]))
    collectives = {
        name: [(c.op, c.phase) for c in plan.operations["project", name].collectives]
        for name in ("block.input", "block.output")
    }
    assert collectives == {
        "block.input": [("all_gather", "forward"), ("reduce_scatter", "backward")],
        "block.output": [("reduce_scatter", "forward"), ("all_gather", "backward")],
    }


def test_slices_move_once():
    """From batch to branch and back again: one all-to-all each way, forward and backward."""
    plan = make_plan(small("grouped", **CASES["dsp g2"]))
    for name in ("block.slices", "block.join"):
        assert [c.op for c in plan.operations["reshape", name].collectives] == ["all_to_all", "all_to_all"]


@pytest.mark.parametrize("case", ["none", "dsp g2", "layout inside"])
@pytest.mark.parametrize("kind", ["resnext", "mixed", "summed"])
def test_saved_for_backward(kind, case):
    c = small(kind, **CASES[case])
    plan, saved = measured(c)
    assert max(saved) == count_saved_elements(plan, build_model(c.model)).total_elements


def test_branches_that_an_axis_does_not_divide(capsys):
    # not 4, which does not divide the microbatch
    with pytest.raises(ConfigError, match=r"branch=4 is not divisible by branch.axes.g=3 .*branch.axes.g=2$"):
        make_plan(small("resnext", branch="dsp", branch_axes={"g": 3}, microbatch=6, global_batch=6))
