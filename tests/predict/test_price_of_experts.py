"""What experts cost beside their products: copies of rows, messages of an exchange, and waits of the host."""

from __future__ import annotations

from contextlib import nullcontext
from math import comb
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from platform.launch import compose_config
from platform.plan.operations.registry import OPERATIONS
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.price import group_seconds
from platform.predict.step_price import build_step_work, read_hardware
from platform.predict.systems import System
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


LOOPBACK = SimpleNamespace(  # other ranks send to this one what it sends to them
    keep_turn=nullcontext,
    read_numbers=lambda numbers: numbers.tolist(),
    launch=lambda op, x, axes, name: SimpleNamespace(wait=lambda: x),
    launch_all_to_allv=lambda rows, sent, received, axes, name: SimpleNamespace(wait=lambda: rows),
)


@pytest.mark.parametrize(("chosen", "ranks"), [(1, 1), (2, 1), (4, 1), (2, 4), (4, 2)])
def test_accesses_of_rows_are_those_of_the_runtime(chosen, ranks):
    """In fp32, where a sum of rows is one operation: what is copied to experts, summed behind them, and back."""
    tokens, width, experts, draw = 4096, 48, 8, torch.Generator().manual_seed(chosen)
    weights = torch.zeros(tokens, 1, experts)
    weights.flatten(0, 1).scatter_(1, torch.rand(tokens, experts, generator=draw).topk(chosen).indices, 0.5)
    x = torch.rand(tokens, 1, width, requires_grad=True)
    each = experts // ranks
    seats = ExpertSeats(("expert",) if ranks > 1 else (), tuple(range(0, experts, each)), each)
    communicator, counts = LOOPBACK, expert_rows.count_rows(LOOPBACK, weights, seats, chosen)  # type: ignore[arg-type]
    weights.requires_grad_()
    with WideAccesses(width) as forward:
        rows = expert_rows.dispatch_rows(communicator, x, counts)
        total = expert_rows.combine_rows(communicator, rows, weights, counts)
    gradient = torch.ones_like(total)
    with WideAccesses(width) as backward:
        total.backward(gradient)
    over = [f"parallel.data={ranks}", f"parallel.experts={ranks}"]
    config = compose_config([*MODEL, f"model.experts_per_token={chosen}", *over])
    plan = make_plan(config)
    planned = [o.operation for (kind, _), o in plan.operations.items() if kind in ("dispatch_rows", "combine_rows")]
    priced = [OPERATIONS[o.kind].accesses_of_both_passes(o, plan.operations) for o in planned[:2]]
    elements = tokens * chosen * width
    for measured, accesses in zip((forward, backward), zip(*priced, strict=True), strict=True):
        assert measured.count == pytest.approx(elements * sum(accesses), rel=0.01 if ranks > 1 else 1e-6)


def test_rows_in_the_order_of_their_experts_are_copied_once_more():
    """Where ranks exchange them, in both passes, to the experts and back; not where the exchange itself does it."""
    one_each = [*MODEL, "model.experts=4", "parallel.data=4"]
    alone, apart = (make_plan(compose_config([*one_each, f"parallel.experts={n}"])) for n in (1, 4))
    for kind in ("dispatch_rows", "combine_rows"):
        [one, other] = (next(o for (k, _), o in plan.operations.items() if k == kind) for plan in (alone, apart))
        accesses = [
            OPERATIONS[kind].accesses_of_both_passes(o.operation, plan.operations)
            for o, plan in ((one, alone), (other, apart))
        ]
        assert [more - few for few, more in zip(*accesses, strict=True)] == [2, 2]


def test_our_tokens_go_once_to_each_rank():
    """Those of other systems to each expert, without a message of weights."""
    config = compose_config([*MODEL, "model.experts_per_token=4", "parallel.data=4", "parallel.experts=4"])
    work = [build_step_work(config, make_plan(config), system=System(rows_by_pair=pairs)) for pairs in (False, True)]
    moved = [
        [
            c
            for passes in (*w.forward, *w.backward)
            for part, _ in passes.parts
            for c in part.collectives
            if c.op == "all_to_allv"
        ]
        for w in work
    ]
    ours, theirs = ([c for c in of_system if c.dtype == "compute"] for of_system in moved)
    places = 4 * (1 - comb(6, 4) / comb(8, 4))
    for few, many in zip(ours, theirs, strict=True):
        assert few.elements == pytest.approx(many.elements * places / 4, rel=1e-3)
    weights = [c for c in moved[0] if c.dtype != "compute"]
    assert len(weights) * 2 == len(ours) and theirs == moved[1]


def test_messages_of_an_exchange_cross_nodes_at_the_hops_between_nodes():
    """Of no bytes: each rank sends to each other, in its node and in others."""
    h100: Hardware = read_hardware("h100")
    seconds = float(group_seconds("all_to_all", 0, 32, 8, h100))
    assert seconds == pytest.approx(h100.network.latency + 7 * h100.node.hop + 24 * h100.network.hop)
    assert float(group_seconds("all_to_all", 0, 8, 8, h100)) == pytest.approx(h100.node.latency + 7 * h100.node.hop)
