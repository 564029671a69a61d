"""What a layer copies: nothing that it owns, and no keys and values for a kernel that takes them as they are."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from platform.predict.make_plan import make_plan
from platform.runtime import einsum
from platform.runtime.parallel_ops import PassPosition
from tests.harness.live import Live
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.threads import run_threads

aten = torch.ops.aten


class Copies(TorchDispatchMode):
    """Counts the calls of operators that this thread makes, but those of the threads' transport; of clones those of
    tensors that are contiguous, as the others only change the order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.live = Live()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reorders = function is aten.clone.default and not args[0].is_contiguous()
        if not self.live._hidden and not reorders:
            self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def calls(**more) -> Counter[str]:
    """Of one forward and backward pass on rank 0."""
    c = configure("1d", {"t": 2}, **more)
    plan = make_plan(c)

    def work(communicator):
        torch.set_num_threads(1)
        trainer = trainer_of(c, plan, communicator)
        trainer.ops.position = PassPosition(c.seed, 1, 0)
        inputs = trainer.passes.load_input_blocks("train", 0)
        with Copies() as copies:
            copies.live.without_transport(communicator)
            trainer.passes.model.forward(trainer.ops, inputs).backward()
        return copies.calls

    return run_threads(plan.mesh, work)[0]


def of_a_layer(name: str, **more) -> int:
    return calls(layers=2, **more)[name] - calls(layers=1, **more)[name]


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_layer_of_megatron_clones_nothing(model):
    assert of_a_layer("clone", **MODELS[model]) == 0


def test_a_clone_is_seen(monkeypatch):
    """Negative control: what is not said to be owned is cloned before its all-reduce."""
    convert = einsum.convert
    monkeypatch.setattr(einsum, "convert", lambda *arguments, owned=False: convert(*arguments))
    assert of_a_layer("clone") == 4


def test_keys_and_values_are_not_repeated():
    """Where as many KV heads as heads or whole groups are local, no index and no repeat, in either pass."""
    for model in ({}, {**MODELS["llama"], "kv_heads": 4}):
        counts = calls(layers=1, **model)
        assert not counts["repeat_interleave"] and not counts["index_select"] and not counts["index_add"]
    assert calls(layers=1, **{**MODELS["llama"], "kv_heads": 1})["index_select"]
