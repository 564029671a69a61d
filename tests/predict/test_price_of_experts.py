"""What experts cost beside their products: copies of rows, messages of an exchange, and waits of the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from platform.launch import compose_config
from platform.plan.operations.registry import OPERATIONS
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.price import group_seconds
from platform.predict.step_price import read_hardware
from platform.runtime import expert_rows
from platform.runtime.expert_rows import ExpertSeats

MODEL = [
    "+experiment=gpt_quick", "model.experts=8", "model.capacity_factor=0", "model.layers=2", "model.d_model=256",
    "train.microbatch=4", "train.global_batch=16", "cluster.device=cuda",
]  # fmt: skip


class WideAccesses(TorchDispatchMode):
    """Counts the elements of tensors of rows, `width` wide, that operations read and write."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.count = width, 0.0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        results = result if isinstance(result, tuple) else (result,)
        if "view" in str(function) or "reshape" in str(function) or "detach" in str(function):
            return result
        wide = [t for t in results if self._is_wide(t)]
        read = [t for t in arguments if self._is_wide(t)]
        written = sum(t.numel() for t in wide)
        self.count += written + (written if "index_select" in str(function) else sum(t.numel() for t in read))
        return result

    def _is_wide(self, t) -> bool:
        return isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 1 and t.shape[-1] == self.width


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_accesses_of_rows_are_those_of_the_runtime(chosen):
    """In fp32, where a sum of rows is one operation: what is copied to experts, summed behind them, and back."""
    tokens, width, experts = 32, 48, 8
    weights = torch.zeros(tokens, 1, experts)
    weights.flatten(0, 1).scatter_(1, torch.rand(tokens, experts).topk(chosen).indices, 0.5)
    x = torch.rand(tokens, 1, width, requires_grad=True)
    communicator = SimpleNamespace(read_numbers=lambda numbers: numbers.tolist())
    counts = expert_rows.count_rows(communicator, weights, ExpertSeats((), (0,), experts), chosen)
    weights.requires_grad_()
    with WideAccesses(width) as forward:
        rows = expert_rows.dispatch_rows(communicator, x, counts)
        total = expert_rows.combine_rows(communicator, rows, weights, counts)
    gradient = torch.ones_like(total)
    with WideAccesses(width) as backward:
        total.backward(gradient)
    config = compose_config([*MODEL, f"model.experts_per_token={chosen}", "parallel.data=1"])
    plan = make_plan(config)
    planned = [o.operation for (kind, _), o in plan.operations.items() if kind in ("dispatch_rows", "combine_rows")]
    priced = [OPERATIONS[o.kind].accesses_of_both_passes(o, plan.operations) for o in planned[:2]]
    elements = tokens * chosen * width
    for measured, accesses in zip((forward, backward), zip(*priced, strict=True), strict=True):
        assert measured.count == pytest.approx(elements * sum(accesses))


def test_rows_in_the_order_of_their_experts_are_copied_once_more():
    """Where ranks exchange them, in both passes, to the experts and back; not where the exchange itself does it."""
    alone, apart = (make_plan(compose_config([*MODEL, "parallel.data=4", f"parallel.experts={n}"])) for n in (1, 4))
    for kind in ("dispatch_rows", "combine_rows"):
        [one, other] = (next(o for (k, _), o in plan.operations.items() if k == kind) for plan in (alone, apart))
        accesses = [
            OPERATIONS[kind].accesses_of_both_passes(o.operation, plan.operations)
            for o, plan in ((one, alone), (other, apart))
        ]
        assert [more - few for few, more in zip(*accesses, strict=True)] == [2, 2]


def test_messages_of_an_exchange_cross_nodes_at_the_hops_between_nodes():
    """Of no bytes: each rank sends to each other, in its node and in others."""
    h100: Hardware = read_hardware("h100")
    seconds = float(group_seconds("all_to_all", 0, 32, 8, h100))
    assert seconds == pytest.approx(h100.network.latency + 7 * h100.node.hop + 24 * h100.network.hop)
    assert float(group_seconds("all_to_all", 0, 8, 8, h100)) == pytest.approx(h100.node.latency + 7 * h100.node.hop)
