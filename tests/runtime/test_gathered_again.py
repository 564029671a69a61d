"""The second gather of what a product reads, for the gradients of its weights alone: it is launched before the
gradient of what the product has read is computed, and waited for behind it, in blocks that are compiled whole too."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from platform.predict.make_plan import make_plan
from platform.runtime import chunked_loss, einsum
from platform.runtime.communicator import ArrivedCollective, CollectiveHandle
from tests.harness.oracle import MODELS, trainer_of
from tests.runtime.test_whole_tensor_blocks import Alone, compiling, fast, traced_blocks

__all__ = ["fast", "traced_blocks"]

LLAMA = {"tensor": "1d_sp", "axes": {"t": 2}, "layers": 1, "gathered": "again", **MODELS["llama"]}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Order(TorchDispatchMode):
    """Products between the launch of each all_gather and the wait for it, by its number."""

    def __init__(self):
        super().__init__()
        self.products, self.at_launch, self.hides = 0, {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function in PRODUCTS
        return function(*args, **(kwargs or {}))


def products_under_gathers(c, monkeypatch) -> list[int]:
    """How many products each all_gather of a step hides."""
    order, init, wait = Order(), CollectiveHandle.__init__, CollectiveHandle.wait

    def note_launch(self, *arguments, **how):
        init(self, *arguments, **how)
        if self._what.op == "all_gather":
            order.at_launch[self._what.number] = order.products

    def note_wait(self):
        if self._what.op == "all_gather":
            order.hides[self._what.number] = order.products - order.at_launch[self._what.number]
        return wait(self)

    trainer = trainer_of(c, plan := make_plan(c), Alone(plan.mesh, 0))
    monkeypatch.setattr(CollectiveHandle, "__init__", note_launch)
    monkeypatch.setattr(CollectiveHandle, "wait", note_wait)
    with order:
        trainer.step(1)
    return [order.hides[number] for number in sorted(order.hides)]


def of_function_by_function(monkeypatch, **how) -> int:
    c = compiling(**{**LLAMA, **how})
    c.train.compile, c.train.global_batch = "off", 4
    return sum(count > 0 for count in products_under_gathers(c, monkeypatch))


def test_a_gather_of_weight_gradients_is_hidden_by_the_input_gradient(monkeypatch):
    """Both of a layer, and the head's."""
    assert of_function_by_function(monkeypatch, gathered="keep") == 0
    assert of_function_by_function(monkeypatch) == 3


@pytest.mark.parametrize(("module", "hidden"), [(einsum, 1), (chunked_loss, 2)])
def test_negative_control_a_gather_that_is_waited_for_at_once(module, hidden, monkeypatch):
    """Of the layer, or of the head."""
    convert = module.convert
    monkeypatch.setattr(
        module, "convert", lambda *arguments, **how: ArrivedCollective(convert(*arguments, **how).wait())
    )
    assert of_function_by_function(monkeypatch) == hidden


def test_in_a_block_that_is_compiled_whole(traced_blocks):
    c = compiling(**LLAMA, microbatch=4, global_batch=4)
    trainer_of(c, plan := make_plan(c), Alone(plan.mesh, 0)).step(1)
    hidden, begun, products = [], {}, 0
    for node in traced_blocks[-1].functions.backward.graph.graph.nodes:
        products += node.target in PRODUCTS
        if node.target is torch.ops.platform.launch.default and "all_gather" in node.args[3]:
            begun[node.args[2]] = products
        elif node.target is torch.ops.platform.wait.default and node.args[2] in begun:
            hidden.append(products - begun[node.args[2]])
    assert len(hidden) == 4 and sum(count > 0 for count in hidden) == 2
