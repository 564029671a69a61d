"""The compiled regions of the shipped experiments: which functions they call, with which tensors, seen on a card that
is not there."""

from __future__ import annotations

from functools import cache

import pytest

from platform.config.fields import choose_quantisation
from platform.launch import CONF, compose_config
from platform.runtime import compiled_blocks, eight_bits, parallel_ops
from platform.runtime.compilation import TracedFunction
from tests.harness.ahead import TARGETS, Call, Traced, call_of
from tests.harness.card import alone, ranks, shrunk
from tests.harness.one_attention import OneAttention
from tests.harness.oracle import validation_loss

T5 = ["+experiment=one_gpu", "model=t5_tiny", "tensor=1d", "tensor.axes={t: 2}"]  # whose blocks are no one function
LLAMA = ["+experiment=one_gpu", "model=llama_8b", "model.query_key_norm=true", "train.microbatch=1"]
USUAL = [*LLAMA, "model.query_key_norm=false"]
# name -> command line: all shipped experiments, and models whose regions are in none of these
RUNS = {path.stem: [f"+experiment={path.stem}"] for path in sorted((CONF / "experiment").glob("*.yaml"))} | {
    "llama_8b": LLAMA,
    "llama_8b_usual": USUAL,
    "llama_8b_in_mx": [*USUAL, "precision=mxfp8"],
    "llama_8b_in_rows": [*USUAL, "quantise.scale=row"],  # whose products are torch's own
    "one_gpu_apart": [
        "+experiment=one_gpu", "pipeline=zb_h1", "pipeline.stages=2", "train.microbatch=8", "train.global_batch=64",
    ],
    "llama_8b_split": [*LLAMA, "tensor=1d", "tensor.axes={t: 2}"],
    "qlora": ["+experiment=lora", "tune=qlora", "model=gpt_tiny"],
    "t5_geglu": T5,
    "t5_geglu_tanh": [*T5, "model.activation=geglu_tanh"],
    "t5_reglu": [*T5, "model.activation=reglu"],
}  # fmt: skip


def calls_of(run: str, target: int = min(TARGETS)) -> tuple[Call, ...]:
    """The calls of regions, each once, of a step and an evaluation of one of RUNS on a GPU of a compute capability,
    which decides how products in 8 bits are computed."""
    has_eight_bits = choose_quantisation(compose_config(RUNS[run])) is not None
    return _calls_on(run, target if has_eight_bits else min(TARGETS))


@cache
def _calls_on(run: str, target: int) -> tuple[Call, ...]:
    calls: dict[Call, None] = {}

    def region(function):
        as_on_gpus = traced(function) if isinstance(function, TracedFunction) else function

        def called(*arguments):
            calls.setdefault(call_of(as_on_gpus, arguments))
            return function(*arguments)

        return called

    c = shrunk(compose_config(RUNS[run]))
    c.train.compile, c.optimizer.offload = "on", "none"  # what goes to host memory is no region
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_ops, "compile_region", region)
        patch.setattr(eight_bits, "find_capability", lambda device: divmod(target, 10))
        patch.setattr(eight_bits, "find_cuda_version", lambda: (13, 0))
        compiled_blocks._split_graph.cache_clear()
        compiled_blocks._partition_graph.cache_clear()
        for rank in ranks(c):
            with alone(c, rank, []) as trainer, OneAttention():
                trainer.step(1)
                validation_loss(trainer)
        compiled_blocks._split_graph.cache_clear()
        compiled_blocks._partition_graph.cache_clear()
    return tuple(calls)


def traced(function: TracedFunction) -> Traced:
    """What a pass of a whole block computes."""
    return Traced(function.graph.graph.python_code("self").src, function.__name__)
