"""Batches on their way to a GPU, on doubles of its memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from platform.predict.make_plan import make_plan
from platform.train.stage_passes import place, stretches
from tests.harness.oracle import Tokens, configure


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["pin", "to cuda, True"]), ("cpu", ["to cpu, True"])])
def test_a_batch_leaves_from_pinned_memory_without_holding_the_host(device, expected, monkeypatch):
    c = configure(layers=1)
    plan = make_plan(c)
    log: list[str] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: log.append("pin") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, to, non_blocking: log.append(f"to {to}, {non_blocking}") or x)
    rank = SimpleNamespace(device=torch.device(device), coordinates=plan.mesh.rank_coordinates(0))
    rows = {(i, j): Tokens(c).batch("train", i, j) for i, j in stretches(plan.stage_part(0), rank)}  # type: ignore[arg-type]
    placed = place(plan.stage_part(0), rank, rows)  # type: ignore[arg-type]
    blocks = {id(block) for blocks in placed.values() for block in blocks.values()}
    assert log == expected * len(blocks) and blocks
