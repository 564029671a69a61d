"""Random plans compute what one process computes: fixed seeds, and thousands in the long test."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from platform.config.fields import Config, training_objective_name
from platform.optimizer.optimizers import OPTIMIZERS
from platform.runtime.flat_buffers import FlatBucket
from platform.train import trainer
from platform.train.rank_parameters import RankWeights
from platform.train.training_state import RankTrainingState
from tests.fuzz import expert_plans, plans
from tests.fuzz.draw_data import SOURCES, TEXTUAL
from tests.fuzz.draw_training import OWN_LOSSES, SCALES, SETTINGS
from tests.fuzz.runner import run
from tests.harness import suite

SEED, COUNT, HALF, FEW = 0, 130, 13, 6
HERE = (HALF, FEW) if suite.full else (5, 3)  # without and with experts; `make test` runs the first of them
MENDED = (40011, 40036, 50056, 50213, 50252, 50255, 50261, 50302, 51318)  # seeds of plans that were not equal
PARTS, EACH = 20, 250  # one part stays within the time limit of a test


def features(c: Config) -> set[str]:
    """What of data and training a configuration has."""
    data, train, o, m = c.data, c.train, c.optimizer, c.model
    places = (*c.tensor.regions.values(), *c.tensor.parameters.values())
    has = {
        "experts": m.experts,
        "experts that replicas share": c.parallel.experts > 1,
        "experts over axes of a scheme": m.experts and any("experts" in place for place in places),
        "groups of experts": m.router_groups > 1,
        "layers without experts": m.dense_layers,
        "latents": m.kv_latent,
        "document mask": data.document_mask,
        "packing": data.packing == "best_fit",
        "stream": data.streaming,
        "stream in a mixture": any(source.get("streaming") for source in data.sources.values()),
        "ema": train.ema,
        "ramp": train.ramp_from,
        "length ramp": len(train.length_ramp) > 1,
        "freeze": train.freeze,
        "adapters": c.tune.kind == "lora",
        "adapters in 4 bits": c.tune.kind == "qlora",
        "dropout of adapters": c.tune.kind != "none" and c.tune.dropout,
        "preferences": data.kind == "preferences",
        "a teacher": train.loss == "distill",
        "moments in 16 bits": o.moments == "bf16",
        "states in host memory": o.offload == "states",
        "soft caps": m.attention_cap or m.logit_cap,
        "delta rules": m.linear_layers,
        "longrope": m.rope_scaling == "longrope",
        "a share of a head's pairs": m.rope_scaling == "proportional",
        "layers with other heads": m.global_d_kv or m.global_kv_heads,
        "values that are keys": m.values_are_keys,
        "norms of values": m.value_norm,
        "stored factors": m.stored_scale,
        "norms of experts": m.expert_norms,
        "factors of experts": m.expert_factors,
        "groups": o.groups,
        "sgd without momentum": o.kind == "sgd" and not o.momentum,
        "dropout": c.model.dropout,
        "window": c.model.window,
    }
    named = {
        f"data={data.kind}",
        f"model={c.model.kind}",
        f"objective={training_objective_name(c)}",
        f"loss={train.loss}",
    }
    named |= {f"scale={c.quantise.scale}"}
    return named | {f"optimizer={o.kind}"} | {name for name, has_it in has.items() if has_it}


def test_draws_all_features_of_data_and_training(tmp_path):
    drawn: Counter[str] = Counter()
    with plans.opened():
        for seed in range(300):
            r = Random(seed)
            for c in plans.draw(r, r.choice(plans.CLASSES[:-1]), tmp_path)[:1]:
                drawn.update(features(c))
    wanted = {f"optimizer={kind}" for kind in (*OPTIMIZERS, *SETTINGS)} | {f"loss={name}" for name in OWN_LOSSES}
    wanted |= {f"data={name}" for name in (*SOURCES, *TEXTUAL) if name not in ("invented", "stream")}
    wanted |= {f"model={kind}" for kind in ("decoder", "encoder", "encoder_decoder", "two_layer")}
    wanted |= {f"objective={name}" for name in ("causal", "masked", "span_denoising", "pairs", plans.WEIGHED)}
    wanted |= {"document mask", "packing", "stream", "stream in a mixture", "ema", "ramp", "length ramp"}
    wanted |= {"freeze", "groups", "adapters", "adapters in 4 bits", "dropout of adapters", "a teacher"}
    wanted |= {"states in host memory", *(f"scale={scale}" for scale in SCALES)}
    wanted |= {"moments in 16 bits", "soft caps", "delta rules", "longrope", "a share of a head's pairs"}
    wanted |= {"layers with other heads", "values that are keys", "norms of values", "stored factors"}
    wanted |= {"norms of experts", "factors of experts"}
    wanted |= {"sgd without momentum", "dropout", "window", "experts", "experts that replicas share", "latents"}
    wanted |= {"experts over axes of a scheme", "groups of experts", "layers without experts"}
    rare = {name: drawn[name] for name in wanted if drawn[name] < 3}
    assert not rare, f"cases of 300 that have it: {rare}"


@pytest.mark.parametrize("seed", [SEED, *(pytest.param(s, marks=pytest.mark.full) for s in range(HALF, COUNT, HALF))])
def test_plans_of_a_fixed_seed(seed, record_count):
    outcome = run(plans, seed, HERE[0])
    name = f"random plans of seeds {seed} to {seed + HALF - 1} (threads)"
    record_count(name, sum(outcome.counts.values()), HALF, f"`make test-all` runs {PARTS * EACH:,} more")


@pytest.mark.full
@pytest.mark.parametrize("seed", MENDED)
def test_plans_that_failed_once(seed):
    run(plans, seed, 1)


def test_plans_with_experts(record_count):
    outcome = run(expert_plans, SEED, HERE[1])
    name = f"random plans with experts of seeds {SEED} to {SEED + FEW - 1} (threads)"
    record_count(name, sum(outcome.counts.values()), FEW, f"`make test-all` runs {PARTS * EACH:,} more")


def test_negative_control_forgotten_microbatches(monkeypatch):
    """Where a gradient takes the place of the sum of those before, the last microbatch is all that counts."""
    sum_of = FlatBucket.gradient_memory
    monkeypatch.setattr(FlatBucket, "gradient_memory", lambda self, *names: (sum_of(self, *names)[0], True))
    with pytest.raises(AssertionError, match="gradient of"):
        run(plans, SEED, COUNT)


def test_negative_control_averages_of_another_decay(monkeypatch):
    average = RankWeights.update_averages
    wrong = lambda self, decay, *of: average(self, decay / (1 + (self._plan.mesh.world_size > 1)), *of)  # noqa: E731
    monkeypatch.setattr(RankWeights, "update_averages", wrong)
    with pytest.raises(AssertionError, match="average of"):
        run(plans, SEED, COUNT)


def test_negative_control_experts_that_survivors_forget(monkeypatch, tmp_path):
    recover = RankTrainingState.recover_state

    def forgetful(self, survived, node):
        recover(self, survived, node)
        for name, weight in self._trainer.weights.master.items():
            if ".experts." in name:
                weight.data.zero_()

    monkeypatch.setattr(RankTrainingState, "recover_state", forgetful)
    with plans.opened(), pytest.raises(AssertionError, match="initial of .*experts"):
        for r in map(Random, range(HALF)):
            configs = plans.draw(r, "resume", tmp_path, experts=1.0)
            if planned := plans.planned(configs):
                plans.check(r, configs, planned)


@pytest.mark.full
def test_negative_control_the_last_size_of_a_growing_batch(monkeypatch):
    """Where the mean is over the labels of a whole batch while it is smaller."""
    summed = trainer.Trainer._sum_shares

    def wrong(self, count, first, end, *how):
        return summed(self, count, first, end if self.plan.mesh.world_size == 1 else first + self.plan.sequences, *how)

    monkeypatch.setattr(trainer.Trainer, "_sum_shares", wrong)
    with pytest.raises(AssertionError, match=r"train.ramp_from=.*gradient of|gradient of.*train.ramp_from="):
        run(plans, SEED, COUNT)


@pytest.mark.full
@pytest.mark.parametrize("fuzzer", [plans, expert_plans], ids=["any", "with experts"])
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_plans(part, fuzzer):
    run(fuzzer, SEED + COUNT + part * EACH, EACH)
