"""A step done again is equal in every bit, however late messages come; what has no fixed order is found."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic as settings
from torch.utils._python_dispatch import TorchDispatchMode

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.launch import compose_config
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator
from platform.runtime.compilation import use_deterministic_kernels
from platform.runtime.process_groups import GlooMessages
from platform.train.worker import Worker
from tests.harness.card import alone
from tests.harness.one_attention import OneAttention
from tests.harness.oracle import MODELS, Result, compute, configure, run, validation_loss

COMMON: dict[str, Any] = {"precision": "fp32", "dropout": 0.1, "layers": 3, "global_batch": 8, "microbatch": 1}
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "data 4": {"data": 4},
    "data 4, zero 3, bf16": {"data": 4, "zero": 3, "precision": "bf16"},
    "1d of 4, masks in the kernel": {"tensor": "1d", "axes": {"t": 4}, "fused_dropout": True, "layers": 1},
    "interleaved, data 2, zero 1": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "data": 2, "zero": 1},
}


def configured(name: str) -> Config:
    c = configure(**{**COMMON, **PLANS[name]})
    c.train.deterministic = True
    return c


def late(config: Config, plan: Plan, communicator: Communicator) -> Result:
    """Three steps of a rank whose messages begin and end late, each by a time that no other run will draw."""
    draw = random.SystemRandom()

    def delayed(method: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
        def begin(*arguments: Any) -> Callable[[], Any]:
            time.sleep(draw.random() * 1e-3)
            wait = method(*arguments)

            def end() -> Any:
                time.sleep(draw.random() * 1e-3)
                return wait()

            return end

        return begin

    for name in ("_start_collective", "_start_send", "_start_receive"):
        setattr(communicator, name, delayed(getattr(communicator, name)))
    with use_deterministic_kernels(compiles=False):
        return compute(config, plan, communicator)


def as_they_come(config: Config, plan: Plan, communicator: Communicator) -> Result:
    """Three steps of a rank that adds up the parts of a reduce-scatter in whatever order they come."""

    def reduce_scatter(self: GlooMessages, input_buffer: Tensor, out: Tensor) -> Callable[[], None]:
        parts = [input_buffer[i] if i == self._me else torch.empty_like(out) for i in range(self._size)]
        works = self._exchange_tensors(lambda peer: input_buffer[peer], lambda peer: parts[peer])

        def wait() -> None:
            self._wait_for_works(works)
            random.SystemRandom().shuffle(parts)
            out.copy_(sum(parts))

        return wait

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooMessages, "reduce_scatter", reduce_scatter)
        return compute(config, plan, communicator)


def bits(results: list[Result]) -> list[tuple[Any, ...]]:
    """All numbers of three steps, by rank."""

    def raw(tensors: dict[str, Tensor]) -> dict[str, bytes]:
        return {n: t.detach().contiguous().view(torch.uint8).numpy().tobytes() for n, t in tensors.items() if t.numel()}

    return [(r.losses, r.grad_norm, raw(r.gradients), raw(r.final)) for r in results]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n == "data 4" else n for n in PLANS])
def test_what_comes_late_changes_no_bit(name, pool):
    c = configured(name)
    plan = make_plan(c)
    first, again = (bits(pool.run(late, c, plan)) for _ in range(2))
    assert first == again


def test_negative_control_a_sum_in_the_order_of_arrival_shows(pool):
    c = configured("data 4, zero 3, bf16")
    c.precision = "fp32"
    plan = make_plan(c)
    first, again = (bits(pool.run(as_they_come, c, plan)) for _ in range(2))
    assert first != again


def test_nothing_is_read_before_it_is_written():
    """Torch fills all new memory with NaN; the numbers stay as they are without that."""
    for more in ({}, {"data": 2, "zero": 3}, {"tensor": "1d", "axes": {"t": 2}, **MODELS["t5"], "kind": "encoder"}):
        c = configure(**{**COMMON, "layers": 1, "microbatch": 2, **more})
        plain = bits(run(c)[1])
        with use_deterministic_kernels(compiles=False):
            settings.fill_uninitialized_memory = True
            assert torch.empty(1).isnan()
            assert bits(run(c)[1]) == plain


# what torch has no fixed order for

# documented in torch.use_deterministic_algorithms: what raises on a GPU -> the operations of a pass that it concerns
RAISES = {
    "nn.AvgPool3d": ["avg_pool3d_backward"],
    "nn.AdaptiveAvgPool2d": ["_adaptive_avg_pool2d_backward"],
    "nn.AdaptiveAvgPool3d": ["_adaptive_avg_pool3d_backward"],
    "nn.AdaptiveMaxPool2d": ["adaptive_max_pool2d_backward"],
    "nn.FractionalMaxPool2d": ["fractional_max_pool2d_backward"],
    "nn.FractionalMaxPool3d": ["fractional_max_pool3d_backward"],
    "nn.MaxUnpool1d": ["max_unpool2d"],
    "nn.MaxUnpool2d": ["max_unpool2d"],
    "nn.MaxUnpool3d": ["max_unpool3d"],
    "nn.functional.interpolate": [
        f"upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    ],
    "nn.ReflectionPad1d": ["reflection_pad1d_backward"],
    "nn.ReflectionPad2d": ["reflection_pad2d_backward"],
    "nn.ReflectionPad3d": ["reflection_pad3d_backward"],
    "nn.NLLLoss": ["nll_loss2d_forward"],
    "nn.CTCLoss": ["_ctc_loss_backward", "_cudnn_ctc_loss"],
    "nn.EmbeddingBag": ["_embedding_bag_dense_backward", "_embedding_bag_backward"],
    "Tensor.put_": ["put", "put_"],
    "histc": ["histc"],
    "bincount": ["bincount"],
    "median": ["median", "nanmedian"],
    "nn.functional.grid_sample": ["grid_sampler_2d_backward", "grid_sampler_3d_backward"],
    "cumsum": ["cumsum", "cumsum_"],
    "Tensor.scatter_reduce": ["scatter_reduce", "scatter_reduce_"],
    "Tensor.resize_": [],  # of quantized tensors
}
WITHOUT_ORDER = {name for names in RAISES.values() for name in names}
# What adds to places that an index names, and has a fixed order: documented there, or by its source, which sorts first.
BY_INDEX = re.compile(r"_?(index|scatter|gather|embedding|masked_scatter|repeat_interleave|put|unique|segment)")
ORDERED = {"gather", "scatter_", "scatter_add", "index_add", "index_add_", "index_select", "index_put", "index_put_"}
ORDERED |= {"embedding", "embedding_dense_backward", "_index_put_impl_", "repeat_interleave", "index", "scatter_add_"}
# Sums of a bag are one thread's, and products of a row with its gradient one warp's; of these the gradient of the rows
# is in `WITHOUT_ORDER`.
ORDERED |= {"_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_per_sample_weights_backward"}
ORDERED_OF_INTEGERS = {"cumsum", "cumsum_"}  # documented there
NAMESPACES = {"aten", "prims", "c10d", "_c10d_functional", "profiler", "budget"}  # the last: tests.harness.card


class Walk(TorchDispatchMode):
    """Notes the operations of a step that have no fixed order on a GPU, or of which torch's list says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.wrong: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "prim":  # a fake tensor is asked for its device
            return function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        seeded = torch.Tag.nondeterministic_seeded in function.tags
        unknown = function.namespace not in NAMESPACES or (BY_INDEX.match(name) and name not in ORDERED)
        without = name in WITHOUT_ORDER and (name not in ORDERED_OF_INTEGERS or args[0].dtype.is_floating_point)
        if without or seeded or unknown:
            self.wrong.add(f"{function.namespace}::{name}")
        self.count += 1
        return function(*args, **(kwargs or {}))


WALKED = {
    **{name: {**model, "dropout": 0.1} for name, model in MODELS.items()},
    "two_layer": {"kind": "two_layer"},
    "no dropout, recomputed": {"recompute": "full"},
    "vocab in parts": {"tensor": "1d", "axes": {"t": 2}, "label_smoothing": 0.1},
    "sequence in parts": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}, **MODELS["llama"]},
    "branches, zero 3": {"branch": "dsp", "branch_axes": {"g": 2}, "data": 2, "zero": 3},
    "stages": {"pipeline": "zb_h1", "stages": 2, "precision": "fp16"},
}


@pytest.mark.parametrize("name", WALKED)
def test_every_operation_of_a_step_has_a_fixed_order(name):
    """As on a GPU: on tensors without memory, attention as one kernel."""
    with alone(configure(**WALKED[name]), 0, []) as trainer, Walk() as walk, OneAttention():
        trainer.step(1)
        validation_loss(trainer)
    assert walk.count > 100 and walk.wrong == set()


def test_the_walk_sees_what_has_none():
    x, at = torch.zeros(4, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    with Walk() as walk:
        at.cumsum(0)
        assert not walk.wrong
        x.cumsum(0)
        x.put_(at, x)
        x.bernoulli_()
        x.scatter_reduce(0, at, x, "amax")
        x.index_reduce(0, at, x, "amax")
    names = ("cumsum", "put_", "bernoulli_", "scatter_reduce", "index_reduce")
    assert walk.wrong == {f"aten::{name}" for name in names}


def test_the_list_is_torch_s():
    text = torch.use_deterministic_algorithms.__doc__
    raising = text.partition("operations will throw a")[2].partition("In addition")[0]
    documented = set(re.findall(r"\* :(?:class|func|meth):`torch\.([\w.]+)`", raising))
    assert len(documented) > 15 and documented <= RAISES.keys()


# what a worker and its environment are told


def test_a_worker_tells_torch_as_long_as_it_lives(tmp_path):
    c = Config()
    c.train.deterministic = True
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    worker = Worker(c, 0, device="cpu", run_dir=str(tmp_path), threads=1)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark and not settings.fill_uninitialized_memory
    with pytest.raises(RuntimeError, match="put_"):
        torch.zeros(4).put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))
    worker.close()
    assert (torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory) == before


def test_a_refused_kernel_is_named():
    wrong = ["train.deterministic=true", "train.attention_kernel=cudnn", "cluster.device=cuda", "precision=bf16"]
    with pytest.raises(
        ConfigError,
        match=r"cudnn: on a GPU it adds gradients in no fixed order.*flash, efficient, flash3, flash4, math",
    ):
        make_plan(compose_config(["+experiment=gpt_quick", *wrong]))
