"""The search against plans that people type, and against itself with fewer keys open: its choice costs no more, on
models and clusters drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from random import Random

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.launch import compose_config
from platform.plan.layout import find_divisors
from platform.predict import search
from platform.predict.make_plan import plan_quickly
from platform.predict.memory_budget import MemoryForecast
from platform.predict.search import SearchOutcome, search_plans
from platform.predict.step_price import memory_of_worker, read_hardware, step_price

LLAMA_70B = "model=llama_8b model.layers=80 model.d_model=8192 model.heads=64 model.d_ff=28672 precision=bf16"
LARGE = {
    "model=llama_8b precision=bf16": (8, 64),
    LLAMA_70B: (64, 256),
    "model=gpt3_13b precision=bf16": (8, 64),
    "model=gpt_39_1b precision=bf16": (32, 128),
    "model=gpt_175b precision=bf16": (128, 1024),
    "model=olmoe_7b precision=bf16": (8, 64),
    "+experiment=gpt_oss_20b": (8, 64),
    "+experiment=gpt_oss_120b": (64, 256),
    "+experiment=mixtral_8x7b": (32, 128),
    "+experiment=qwen3_235b_a22b": (256, 512),
    "+experiment=deepseek_v3": (1024, 2048),
    "model=t5_large_mod branch=none precision=bf16": (8, 32),
}
SMALL = {
    "model=llama_8b model.layers=6 precision=bf16": (4, 16),
    "model=gpt3_13b model.layers=9 precision=bf16": (4, 16),
    "model=olmoe_7b model.layers=4 precision=bf16": (4, 16),
    "model=t5_large_mod model.layers=4 branch=none precision=bf16": (2, 8),
}
GPUS = {"A100-80GB": "a100_80g", "H100-80GB": "h100", "H200-141GB": "h200", "B200-192GB": "b200"}
SOME_KEYS = ["parallel.data", "parallel.zero", "recompute", "train.microbatch"]
MORE_KEYS = [*SOME_KEYS, "tensor", "tensor.axes", "pipeline", "pipeline.stages", "pipeline.chunks"]
QUICK, ALL = 4, 40
NEAR = 1.0005  # prices are compared to four digits


@dataclass(frozen=True)
class Situation:
    """Model, as it is typed, GPUs and how many, and sequences of a step."""

    model: str
    gpu: str
    workers: int
    batch: int

    def compose(self, *typed: str) -> Config:
        return compose_config(
            [*self.model.split(), f"cluster.gpu={self.gpu}", f"train.global_batch={self.batch}", *typed]
        )

    def search(self, *keys: str) -> SearchOutcome:
        config = self.compose(*TENSOR_ALONE, f"plan.search=[{','.join(keys)}]")
        return search_plans(config, self.workers, memory_of_worker(config, 0.0, self.hardware), self.hardware)

    @property
    def hardware(self):
        return read_hardware(GPUS[self.gpu])

    def price(self, config: Config) -> float | None:
        """Seconds of a step; None of a plan that is refused or does not fit."""
        if not (plan := plan_quickly(config)) or plan.mesh.world_size != self.workers:
            return None
        if MemoryForecast(config, plan).exceeds_memory(memory_of_worker(config, 0.0, self.hardware)):
            return None
        return step_price(config, plan, self.hardware).seconds


TENSOR_ALONE = "tensor=serial", "pipeline=none"  # what an experiment's file says of them is a reference


def draw_situation(seed: int, models: dict[str, tuple[int, int]]) -> Situation:
    rng = Random(seed)
    model, (least, most) = rng.choice([*models.items()])
    workers = least * 2 ** rng.randrange((most // least).bit_length())
    return Situation(model, rng.choice([*GPUS]), workers, workers * rng.choice((1, 2, 4)))


def typed_plans(situation: Situation) -> Iterator[tuple[str, ...]]:
    """What people type: ZeRO-3, and tensors in a node beside stages and replicas, with recomputation or without."""
    for again in ("none", "full"):
        for microbatch in (1, 2, 4):
            usual = f"recompute={again}", f"train.microbatch={microbatch}", "parallel.experts=1", "parallel.context=1"
            for zero in (1, 3):
                replicas = f"parallel.data={situation.workers}", f"parallel.zero={zero}"
                yield "tensor=serial", "pipeline=none", "pipeline.stages=1", *replicas, *usual
            for t in (2, 4, 8):
                for stages in (1, 4, 8):
                    data, rest = divmod(situation.workers, t * stages)
                    kind = "1f1b" if stages > 1 else "none"
                    split = f"tensor.axes.t={t}", f"pipeline={kind}", f"pipeline.stages={stages}", "pipeline.chunks=1"
                    if not rest and data:
                        yield "tensor=1d_sp", *split, f"parallel.data={data}", "parallel.zero=1", *usual


def typed_prices(situation: Situation) -> dict[tuple[str, ...], float]:
    """The typed plans that fit, and the experiment as it is shipped, with their seconds."""
    prices = {}
    for typed in typed_plans(situation):
        try:
            prices[typed] = situation.price(situation.compose(*typed))
        except ConfigError:
            continue
    if "+experiment" in situation.model:
        config = situation.compose()
        fixed = prod(config.tensor.axes.values()) * config.pipeline.stages * config.parallel.context
        for experts in find_divisors(config.parallel.experts):
            config.parallel.data, config.parallel.experts = situation.workers // fixed, experts
            prices["as shipped", str(experts)] = situation.price(config)
    return {typed: seconds for typed, seconds in prices.items() if seconds}


def assert_never_slower(situation: Situation) -> None:
    prices, whole = typed_prices(situation), situation.search("all")
    for keys in (SOME_KEYS, MORE_KEYS):
        fewer = situation.search(*keys).quickest_fitting_finalist
        prices |= (
            {("searched", *keys): fewer.price.seconds} if fewer and whole.workers == fewer.plan.mesh.world_size else {}
        )
    best = whole.quickest_fitting_finalist
    assert best or not prices, f"{situation}: no plan, but {prices} fit"
    quicker = {typed: seconds for typed, seconds in prices.items() if best and seconds * NEAR < best.price.seconds}
    chosen = best and " ".join(whole.space.format_overrides(best.choice))
    assert not quicker, f"{situation}: chosen {chosen}, {best.price.seconds:.4g} s; {quicker}"
    print(situation, len(whole.tried), "planned;", chosen)


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_small_search_is_never_slower(seed):
    assert_never_slower(draw_situation(seed, SMALL))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(ALL))
def test_a_search_is_never_slower(seed):
    assert_never_slower(draw_situation(seed, LARGE))


def test_negative_control_the_thriftiest_plan(monkeypatch):
    """If nothing is planned but what needs least, typed plans are quicker."""
    monkeypatch.setattr(search, "PATIENCE", 0)
    with pytest.raises(AssertionError, match="chosen .*recompute=full"):
        assert_never_slower(draw_situation(0, SMALL))
