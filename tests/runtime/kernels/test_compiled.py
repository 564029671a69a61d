"""Compiled regions: the numbers are those of one eager process, one graph serves all layers, steps and generations, and
what each costs is counted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from platform.model import forget_models
from platform.plan import operation_plan
from platform.predict.make_plan import make_plan
from platform.runtime import chunked_loss, compilation, residual
from platform.runtime.communicator import SingleRank
from platform.runtime.compilation import compile_region, reason_uncompiled
from platform.runtime.residual import Drawing, drop_elements
from tests.harness.oracle import MODELS, configure, prove, serial, trainer_of, validation_loss

LLAMA = MODELS["llama"]


def compiling(**more: Any):
    c = configure(**more)
    c.train.compile = "on"
    return c


@pytest.fixture
def traced(monkeypatch):
    """Graphs without kernels: traced and differentiated as others are, and run as they are, without a compiler. Those
    of whole layers, which torch does not count, are counted too."""
    compile_region.cache_clear()
    torch._dynamo.reset()
    compile_graph = compilation._compile_graph

    def counted(*arguments):
        counters["stats"]["unique_graphs"] += 1
        return compile_graph(*arguments)

    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    monkeypatch.setattr(compilation, "_compile_graph", counted)
    counters.clear()
    yield counters["stats"]
    compile_region.cache_clear()
    torch._dynamo.reset()


def graphs_of(c, steps=(1,), evaluates=False) -> int:
    """Graphs that torch has made when this process has taken the `steps` of a run, or of a generation of it."""
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    for step in steps:
        trainer.step(step)
    if evaluates:
        validation_loss(trainer)
    return counters["stats"]["unique_graphs"]


CASES = [
    pytest.param({"dropout": 0.1}, 5, id="pre-norm", marks=pytest.mark.full),  # the embedding is dropped, a layer,
    # its gradient, the loss's statistics and its gradient
    pytest.param({**LLAMA, "dropout": 0.1}, 6, id="rmsnorm, gated, rope"),  # and the last norm
    # a layer, its gradient, the last norm, the loss's two
    pytest.param({**LLAMA}, 5, id="no dropout", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("more", "expected"), CASES)
def test_one_graph_for_all_layers_steps_and_generations(more, expected, traced):
    c = compiling(layers=6, d_model=16, heads=4, length=8, microbatch=4, global_batch=8, **more)
    assert graphs_of(c) == expected
    assert graphs_of(c, (2, 3)) == expected  # two microbatches each, of which every mask is another
    c.seed, c.train.global_batch = 7, 6  # the last microbatch is partial
    assert graphs_of(c, (4,)) == expected
    assert not counters["graph_break"] and not counters["unimplemented"]


def test_evaluation_needs_graphs_of_its_own_once(traced):
    """Without gradients, and without dropout; the control: another shape needs others."""
    c = compiling(layers=1, d_model=16, heads=4, length=8, dropout=0.1)
    first = graphs_of(c, evaluates=True)
    assert graphs_of(c, (2,), evaluates=True) == first
    c.train.microbatch = 2
    assert graphs_of(c, (3,)) > first


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({**LLAMA, "dropout": 0.1}, id="llama", marks=pytest.mark.full),
        pytest.param({**MODELS["bert"], "dropout": 0.1, "layers": 1}, id="post-norm"),
        pytest.param({"tensor": "1d_sp", "axes": {"t": 2}, "recompute": "full", "dropout": 0.1, **LLAMA},
                     id="1d_sp, full recomputation", marks=pytest.mark.full),
        pytest.param({"pipeline": "zb_h1", "stages": 2, "microbatch": 2, "dropout": 0.1}, id="zb_h1"),
    ],
)  # fmt: skip
def test_equals_one_process(more, traced):
    """What is traced computes the same, with ranks as threads too; the oracle compiles nothing."""
    prove(compiling(**more))
    assert traced["unique_graphs"]


@pytest.mark.parametrize("more", [{"dropout": 0.1}, {"tensor": "1d_sp", "axes": {"t": 2}}], ids=["one", "1d_sp"])
def test_inputs_made_again(more, traced, monkeypatch):
    """By the compiled functions that have made them, where a sum and its norm are one of these, and where not."""
    serial(c := compiling(**{**LLAMA, "layers": 1, **more}))
    forget_models()
    monkeypatch.setattr(operation_plan, "REBUILT_FROM", 0)
    plan, _ = prove(c)
    assert any("made_by" in dict(o.operation.attributes) for o in plan.operations.values())
    forget_models()


@pytest.fixture
def compiler():
    if reason := reason_uncompiled("on", "cpu"):
        pytest.skip(reason)


KERNELS = {
    "gpt": {"dropout": 0.1},
    "llama": {**LLAMA, "dropout": 0.1},
    "t5": {**MODELS["t5"], "dropout": 0.1},
    "1d": {"tensor": "1d", "axes": {"t": 2}, "dropout": 0.1},
    "1d_sp, selective": {"tensor": "1d_sp", "axes": {"t": 2}, "recompute": "selective", "dropout": 0.1},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}, **LLAMA},
    "dsp_csub": {"branch": "dsp_csub", "branch_axes": {"g": 2}, "dropout": 0.1},
    "zero 3": {"data": 2, "zero": 3, "microbatch": 2, "dropout": 0.1},
}


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_one_process(name):
    prove(compiling(**KERNELS[name]))


def launched(function, *arguments) -> tuple[int, float]:
    """Kernels of a compiled function, and the bytes per element of the first argument that they read and write: those
    of arguments and results, as one kernel touches each once."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(function, dynamic=False)
    results, (code,) = run_and_get_code(compiled, *arguments)
    kernels = len(re.findall(r"^        cpp_fused\w*\(", code, re.MULTILINE))
    touched = [t for t in tree_leaves((arguments, results)) if isinstance(t, torch.Tensor)]
    return kernels, sum(t.nbytes for t in touched) / arguments[0].numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("factors", "cap"), [(False, 0.0), (True, 0.0), (True, 5.0)])
def test_the_gradient_in_one_function_is_the_one_in_steps(dtype, factors, cap):
    """What a compiled run computes with all rows, an eager one with a chunk of them in place."""
    wide = torch.promote_types(dtype, torch.float32)
    logits, column = torch.randn(6, 11, dtype=dtype), torch.randint(11, (6, 1))
    shift, share, whole, every = torch.randn(4, 6, 1, dtype=wide)
    more = (whole, every) if factors else (None, None)
    once, stepwise = logits.clone(), logits.clone()
    chunked_loss._differentiate_compiled(once, shift, column, share, *more, cap)
    chunked_loss._overwrite_logits_with_gradient(stepwise, shift, column, share, *more, cap)
    torch.testing.assert_close(once, stepwise, rtol=1e-6 if dtype != torch.bfloat16 else 1e-2, atol=1e-6)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("function", "most"),
    [("dropped", 4.5), ("sum", 6.5), ("sum and norm", 8.5), ("loss", 2.5), ("its gradient", 2.5)],
)
def test_bytes_per_element_in_bf16(function, most):
    """One kernel each, in which a mask costs nothing that is read or written: drawn as a whole it costs 280 bytes. The
    loss reads a logit twice, and its gradient is written in the logit's place: 6 bytes in all."""
    block = [(0, 64), (0, 8), (0, 256)]
    drawing = Drawing(
        residual.random_counters([torch.arange(i, i + n) for i, n in block], (256, 64 * 256, 1)),
        residual.random_start(1, 0, "cpu"),
        0.1,
    )
    x, y = torch.randn(2, 64, 8, 256, dtype=torch.bfloat16)
    gain = torch.ones(256, dtype=torch.bfloat16)
    logits, column, shift = x.view(512, 256), torch.zeros(512, 1, dtype=torch.int64), torch.zeros(512, 1)
    work = {
        "dropped": (drop_elements, x, *drawing),
        "sum": (residual._add_residual, x, y, drawing),
        "sum and norm": (residual._sum_and_norm, x, y, gain, gain, drawing, True, 1e-5),
        "loss": (chunked_loss._row_statistics, logits, column, False),
        "its gradient": (chunked_loss._differentiate_compiled, logits, shift, column, shift, None, None, 0.0),
    }
    kernels, nbytes = launched(*work[function])
    assert kernels == 1 and nbytes <= most


def test_without_a_compiler(monkeypatch):
    """`auto` says nothing on CPU, where it compiles nothing, and imports no compiler to find that out."""
    compilation._explain_why_compiler_fails.cache_clear()
    monkeypatch.setattr(compilation, "which", lambda name: None)
    monkeypatch.setattr(compilation, "find_spec", lambda name: None)
    assert reason_uncompiled("on", "cpu") == "there is no C++ compiler"
    assert reason_uncompiled("auto", "cuda") == reason_uncompiled("on", "cuda") == "triton is not installed"
    assert (
        reason_uncompiled("auto", "cpu") == "train.compile=auto"
        and reason_uncompiled("off", "cuda") == "train.compile=off"
    )
    compilation._explain_why_compiler_fails.cache_clear()


def test_a_compiler_that_fails_is_found_by_trying(monkeypatch):
    compilation._explain_why_compiler_fails.cache_clear()
    monkeypatch.setattr(compilation, "which", lambda name: "/bin/true")
    monkeypatch.setattr(compilation.torch, "compile", lambda *a, **k: lambda x: 1 / 0)
    assert reason_uncompiled("on", "cpu") == "ZeroDivisionError: division by zero"
    compilation._explain_why_compiler_fails.cache_clear()
