"""Weights that ZeRO-3 gathers in 8 bits: the numbers that whole ones are rounded to, so that no step changes by a bit;
bytes as planned; and the negative controls of scales."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from platform.launch import compose_config
from platform.plan.plan_summary import describe
from platform.plan.quantisation import WeightTiles
from platform.plan.step_collectives import communication, list_decodings
from platform.predict.make_plan import make_plan
from platform.predict.step_price import read_hardware, step_price
from platform.runtime.communicator import ArrivedCollective, Communicator
from platform.runtime.eight_bits import quantise_matrices
from platform.runtime.tiled_gathers import TiledBucket
from platform.train.generator import TextGenerator
from platform.train.rank_parameters import RankWeights
from platform.train.replies import AskedTexts
from tests.harness.oracle import assemble, check_bytes, run, trainer_of
from tests.harness.threads import run_threads
from tests.runtime.oracle.test_eight_bits import EXPERTS, configured

full = pytest.mark.full
ZERO: dict[str, Any] = {"data": 2, "microbatch": 2, "zero": 3}
PLANS: dict[str, dict[str, Any]] = {
    "zero 3": ZERO,
    "shards that cut blocks": {"data": 3, "microbatch": 2, "global_batch": 6, "zero": 3},
    "in bf16": {**ZERO, "precision": "bf16"},
    "in bf16, of three": {"data": 3, "microbatch": 2, "global_batch": 6, "zero": 3, "precision": "bf16"},
    "3d": {"tensor": "3d", "axes": {"x": 2, "z": 2}, **ZERO},
    "1d": {"tensor": "1d", "axes": {"t": 2}, **ZERO},
    "contexts": {"context": 2, "length": 32, **ZERO},
    "blocks together, recomputed": {**ZERO, "layers": 3, "bucket_mib": 1, "recompute": "full"},
    "stages": {**ZERO, "pipeline": "interleaved", "stages": 2, "chunks": 2, "microbatch": 1, "layers": 4},
    "slots of experts": {**EXPERTS, **ZERO, "capacity_factor": 2.0},
    "rows of experts": {**EXPERTS, **ZERO, "experts_of": 2, "capacity_factor": 0.0},
    "adapters": {**ZERO, "layers": 2},
}
SCALED = {"zero 3, tensor": "tensor", "contexts, tensor": "tensor", "slots of experts, tensor": "tensor"}
PLANS |= {name: PLANS[name.removesuffix(f", {scale}")] for name, scale in SCALED.items()}
FEW = "shards that cut blocks", "in bf16, of three", "zero 3, tensor"
RECIPE = ("+experiment=llama_8b_fp8", "model.layers=2", "train.global_batch=128", "cluster.gpu=H100")


def planned(name: str, gather: str):
    """A configuration of PLANS whose weights are gathered in 8 bits, or not."""
    c = configured(SCALED.get(name, "block"), **PLANS[name])
    c.quantise.gather, c.quantise.powers, c.optimizer.clip = gather, "on", 0.0
    if name == "adapters":
        c.tune.kind, c.tune.rank = "lora", 4
    return c


def count_tiled(plan) -> int:
    """Weights that a plan gathers in 8 bits."""
    return sum(len(b.tiles) for b in plan.buckets)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=full) for n in PLANS])
def test_no_bit_of_a_step_changes(name):
    """Losses, gradients, two updates; and fewer bytes move, as planned."""
    (wide_plan, wide), (plan, ranks) = (run(planned(name, gather)) for gather in ("off", "auto"))
    assert count_tiled(plan) and not count_tiled(wide_plan)
    check_bytes(plan, ranks)
    for a, b in zip(wide, ranks, strict=True):
        assert a.loss == b.loss
    for pick, trained in ((lambda r: r.gradients, True), (lambda r: r.final, False)):
        whole, also = assemble(wide_plan, wide, pick, trained), assemble(plan, ranks, pick, trained)
        assert all(torch.equal(whole[n], also[n]) for n in whole)
    moved, before = (sum(communication(p).values()) for p in (plan, wide_plan))
    assert moved < before


def test_the_maxima_of_one_rank_are_found(monkeypatch):
    """The negative control: a shard has its own scale where it ends in a block."""
    c = planned("shards that cut blocks", "auto")
    _, expected = run(planned("shards that cut blocks", "off"))

    def take_own(self) -> None:
        launch = self._communicator.launch
        with monkeypatch.context() as patch:
            patch.setattr(self._communicator, "launch", lambda op, x, *_, **__: ArrivedCollective(x))
            start_maxima(self)
        assert self._communicator.launch == launch

    start_maxima = TiledBucket.start_maxima
    monkeypatch.setattr(TiledBucket, "start_maxima", take_own)
    plan, ranks = run(c)
    assert ranks[0].loss != expected[0].loss
    with pytest.raises(AssertionError, match="bytes moved"):
        check_bytes(plan, ranks)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=full) for n in range(4, 40))])
def test_what_arrives_is_the_whole_weight_rounded(seed):
    """By random sizes, blocks, shards and numbers of very different sizes, some of them no numbers."""
    r = Random(seed)
    sizes = {"d_model": 8 * r.randint(1, 12), "d_ff": r.randint(1, 300), "heads": r.choice((1, 2, 4, 8)), "layers": 2}
    ranks, precision = r.choice((2, 3, 4, 5)), r.choice(("fp64", "fp32", "bf16"))
    how = {"data": ranks, "microbatch": 1, "global_batch": ranks, "zero": 3, "precision": precision}
    c = configured("block", model=r.choice(("gpt", "llama")), block=r.choice((2, 8, 16, 128)), **how)
    for name, size in sizes.items():
        setattr(c.model, name, size)
    c.optimizer.masters = r.choice(("split", "fp32")) if precision == "bf16" else "fp32"
    c.model.kv_heads, plan = min(c.model.kv_heads, c.model.heads), make_plan(c)
    assert count_tiled(plan) == len(
        [p for p in plan.parameters if len(p.dims) > 1 and "layers" in p.name and "bias" not in p.name]
    )
    draw = torch.Generator().manual_seed(seed)
    numbers = {}
    for p in plan.parameters:
        shape = plan.local_shape(p)
        scale = 10.0 ** torch.randint(-7, 3, shape, generator=draw) * (torch.rand(shape, generator=draw) > 0.2)
        numbers[p.name] = torch.randn(shape, generator=draw) * scale
        numbers[p.name].view(-1)[r.randrange(scale.numel())] = r.choice((1.0, torch.inf, torch.nan))

    def on_rank(communicator: Communicator) -> None:
        weights = RankWeights(plan, communicator, None)
        for flat in weights.buckets:
            for name in flat.compute:
                flat.fill_parameter(name, numbers[name].to(torch.float64 if precision == "fp64" else torch.float32))
        weights.refresh_copies()
        for flat in (f for f in weights.buckets if isinstance(f, TiledBucket)):
            for as_they_are in (False, True):
                flat.gather_parameters(as_they_are)
                for name, tiles in zip(flat.bucket.parameter_ranges, flat.bucket.tiles, strict=True):
                    w = numbers[name].to(flat.compute[name].dtype).view(tiles.matrices, tiles.rows, tiles.columns)
                    rounded = quantise_matrices(w, (tiles.block, tiles.block), "e4m3", True).decode(w.dtype)
                    arrived = flat.compute[name].detach().view(w.shape)
                    assert torch.equal(arrived.nan_to_num(), (w if as_they_are else rounded).nan_to_num()), name
                    again = quantise_matrices(rounded, (tiles.block, tiles.block), "e4m3", True).decode(w.dtype)
                    assert torch.equal(again.nan_to_num(), rounded.nan_to_num()), "rounded to itself"
                flat.release_parameters()

    run_threads(plan.mesh, on_rank)


def test_half_of_the_bytes():
    """Of each weight a byte travels in both passes, and once a step the maxima; the rest as it did."""
    plan, wide = (make_plan(planned("in bf16", gather)) for gather in ("auto", "off"))
    moved, before = communication(plan), communication(wide)
    tiled = [b for b in plan.buckets if b.tiles]
    assert sum(b.elements for b in tiled) > 0.7 * plan.parameter_count
    fewer = before["all_gather/data"] - moved["all_gather/data"]
    passes = fewer // sum(b.elements for b in tiled)
    assert passes == 2 * plan.microbatches == 4 and fewer < 1.01 * passes * sum(b.elements for b in tiled)
    maxima = sum(2 * 4 * b.tile_count for b in tiled)
    assert moved["all_reduce/data"] - before["all_reduce/data"] == maxima


@pytest.mark.parametrize(("ranks", "length", "gathers_tiles"), [(8, 8192, False), (128, 512, True)])
def test_a_step_is_never_slower(ranks, length, gathers_tiles):
    """Making numbers takes time: more than the gather saves where products hide it, less where they wait for it."""
    c = compose_config([*RECIPE, f"parallel.data={ranks}", f"model.length={length}"])
    plan = make_plan(c)
    seconds = {}
    for gathers in (False, True):
        other = replace(plan, gathers_tiles=gathers)
        parts = list(list_decodings(other, plan.chunks[0], True))
        assert {phase for phase, *_ in parts} == ({"forward", "backward"} if gathers else set())
        seconds[gathers] = step_price(c, other, read_hardware("h100")).seconds
    assert seconds[plan.gathers_tiles] == min(seconds.values())
    assert plan.gathers_tiles == gathers_tiles


@pytest.mark.parametrize("name", ["zero 3", pytest.param("3d", marks=full)])
def test_texts_are_scored_without_8_bits(name):
    """Passes of generation read the weights as they are."""
    texts = AskedTexts([[1, 2, 3, 4, 5], [7, 6, 5]], [])

    def score(gather: str) -> list[float]:
        c = planned(name, gather)
        plan = make_plan(c)

        def on_rank(communicator: Communicator) -> list[float]:
            trainer = trainer_of(c, plan, communicator)
            trainer.step(1)
            scores = TextGenerator(c, plan, communicator, trainer.weights).score_texts(texts, [1, 1])
            return [s.log_probability for s in scores]

        return run_threads(plan.mesh, on_rank)[0]

    assert score("auto") == score("off")


def test_a_plan_says_what_is_not_gathered_so():
    c = planned("zero 3", "auto")
    c.quantise.scale = "row"
    plan = make_plan(c)
    assert not count_tiled(plan) and "layers.0 gathered as they are: each pass rounds" in describe(plan)
    parts = configured("tensor", tensor="1d", axes={"t": 2}, **ZERO)
    parts.quantise.powers = "on"
    assert "is cut by t inside a tile of" in describe(make_plan(parts)), "of which no rank has all"
    assert "7 weights gathered in 8 bits" in describe(make_plan(planned("zero 3", "auto")))
    assert "7 weights gathered as they are: quantise.gather" in describe(make_plan(planned("zero 3", "off")))


def test_tiles_of_a_weight():
    assert WeightTiles(128, 2, 200, 128).shape == (2, 2, 1)
    bucket = next(b for b in make_plan(planned("zero 3", "auto")).buckets if b.tiles)
    assert replace(bucket, tiles=()).tile_count == 0 < bucket.tile_count
    assert bucket.narrow_shard_bytes == bucket.shard_elements
