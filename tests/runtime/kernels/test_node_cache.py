"""Ranks of a node compile a function once for each of its shapes: the first one does, the others find it in the cache
of torch's inductor, as a later process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from platform.runtime import compilation
from platform.runtime.compilation import TracedFunction, compile_region

RANKS, SHAPES = 3, ((8, 16), (4, 16))
BROKEN = {"": (), "no turns": ("_take_turn_on_node",), "no cache of graphs": ("_use_cache_of_graphs",)}


def region(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * x.sum(-1, keepdim=True)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) + x


def compile_both() -> dict[str, float]:
    """Compile a region and a traced block for two shapes, each twice, as two generations of a process do; return how
    many graphs were compiled, and what they compute."""
    total = 0.0
    for shape in SHAPES:
        x, w = torch.ones(shape), torch.eye(shape[-1])
        traced = TracedFunction(make_fx(block)(x, w), "block")
        for _ in range(2):
            total += float(compile_region(region)(x).sum() + compile_region(traced)(x, w).sum())
    counts = counters["inductor"]
    return {"compiled": counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"], "total": total}


def run_ranks(folder: str, broken: str) -> list[dict[str, float]]:
    """What each of RANKS processes has compiled, which begin at the same time."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", __name__, broken]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen(command, **ends) for _ in range(RANKS)]
    assert all(rank.stdout.readline() == "ready\n" for rank in ranks)
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]


@pytest.mark.full
@pytest.mark.parametrize("broken", BROKEN)
def test_a_node_compiles_each_shape_once(broken, tmp_path):
    """A region and a block of two shapes each. Negative controls: without turns, and without a place of shapes."""
    first = run_ranks(str(tmp_path), broken)
    assert {rank["total"] for rank in first} == {first[0]["total"]}
    compiled, cached = sum(rank["compiled"] for rank in first), len([*tmp_path.glob("fxgraph/*/*")])
    assert compiled == cached > len(SHAPES) if not broken else compiled > cached
    if not broken:
        assert sum(rank["compiled"] for rank in run_ranks(str(tmp_path), "")) == 0


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  our `platform` in an uninstalled checkout

    for name in BROKEN[sys.argv[1]]:
        setattr(compilation, name, lambda *_: nullcontext())
    torch._inductor.config.compile_threads = 1
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(compile_both()))
