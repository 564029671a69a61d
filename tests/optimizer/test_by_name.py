"""Optimizers by name: under every plan the updates of one process, and there those of plain references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.config.validation import violations_of_configuration
from platform.optimizer.optimizers import count_states_per_element, find_muon_matrices
from platform.plan.step_collectives import communication, matrix_sides
from platform.predict.footprint import weight_bytes
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.flat_buffers import FlatBucket
from platform.runtime.matrices import AdafactorSums, MuonMatrices
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import compare, configure, counted, prove, run, serial, trainer_of
from tests.harness.threads import run_threads

KINDS = {
    "sgd": {"kind": "sgd", "nesterov": True},
    "plain": {"kind": "sgd", "momentum": 0.0},
    "lion": {"kind": "lion", "betas": [0.9, 0.99]},
    "muon": {"kind": "muon", "momentum": 0.95, "nesterov": True},
    "muon_original": {"kind": "muon", "matrix_lr": "original", "matrices": r"layers\..*|embedding", "newton_schulz": 3},
    "adafactor": {"kind": "adafactor", "eps": 1e-12},
    "adafactor_relative": {"kind": "adafactor", "relative_step": True, "update_clip": 1.5, "scale_by_weight": False},
    "groups": {
        "groups": [{"match": r".*\.(query|up)", "lr": 0.3, "weight_decay": 0.5}, {"match": "embedding", "lr": 0}]
    },
}
PLANS = {
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}},
    "summa": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "zero1": {"data": 2, "zero": 1},
    "zero2": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 2},
    "zero3": {"data": 3, "zero": 3, "microbatch": 1, "global_batch": 6},
    "stages": {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "data": 2, "zero": 1},
    "branches": {"branch": "dsp_csub", "branch_axes": {"g": 2}, "data": 2, "zero": 2},
}


ROUTED = {"experts": 4, "expert_d_ff": 16, "bias": False}
EXPERTS = {  # whole matrices come from shards, from blocks of each expert, or from neither
    "experts": {"data": 2, "experts_of": 2},
    "zero 1": {"data": 2, "experts_of": 2, "zero": 1},
    "2 of 4, zero 3": {"data": 4, "experts_of": 2, "zero": 3, "microbatch": 1},
    "1d, zero 2": {"tensor": "1d", "axes": {"t": 2}, "data": 4, "experts_of": 2, "zero": 2, "microbatch": 1},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}, "data": 2, "experts_of": 2},
    "stages": {"pipeline": "1f1b", "stages": 2, "data": 2, "experts_of": 2, "zero": 1, "microbatch": 2},
}


def configured(kind: str, /, **more) -> Config:
    """Without biases: the gradient of a key's is rounding alone, which a sign or a norm makes an update of."""
    c = configure(**{"bias": False, "vocab": 61, **more})
    for name, value in KINDS[kind].items():
        setattr(c.optimizer, name, value)
    return c


@pytest.mark.parametrize("case", [(kind, plan) for kind in KINDS for plan in PLANS], ids=" ".join)
def test_every_plan_updates_as_one_process_does(case):
    kind, plan = case
    prove(configured(kind, **PLANS[plan]))


@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_experts_are_matrices_of_their_own(kind, layout):
    """The update of each is made of its own alone, wherever its parts lie."""
    plan, _ = prove(configured(kind, **ROUTED, **EXPERTS[layout]))
    of_experts = {p.name for p in plan.parameters if ".experts." in p.name}
    assert of_experts and of_experts <= {*plan.matrices, *plan.factored}
    assert "layers.0.mlp.router" in {*plan.matrices, *plan.factored}  # [experts, d_model] of one layer
    [router] = (p for p in plan.parameters if p.name == "layers.0.mlp.router")
    assert router.shape_as_matrices((4, 8)) == (1, 4, 8)
    plan = make_plan(configured(kind, **ROUTED, **EXPERTS[layout], expert_bias=True))
    vectors = {p.name for p in plan.parameters if p.name.endswith(("_bias", "gain"))}
    assert vectors and not vectors & {*plan.matrices, *plan.factored}


def test_a_router_can_be_the_only_matrix():
    """By its name, which no matrix had to the planner once."""
    config = configured("muon", **ROUTED)
    config.optimizer.matrices = r".*\.router"
    assert make_plan(config).matrices == ("layers.0.mlp.router", "layers.1.mlp.router")[: config.model.layers]


@pytest.mark.parametrize(
    "model", [{"kind": "encoder_decoder", "layers": 1}, {"kv_heads": 2, "norm": "rmsnorm"}], ids=str
)
def test_other_models_of_muon(model):
    prove(configured("muon", tensor="1d", axes={"t": 2}, data=2, zero=3, **model))


def test_what_is_gathered_is_what_the_plan_says():
    """Under 1d and ZeRO-1 matrices of a bucket come from its shards, then each from its blocks."""
    plans = {kind: make_plan(configured(kind, **PLANS["zero2"])) for kind in ("lion", "muon")}
    moved = {kind: communication(plan) for kind, plan in plans.items()}
    more = {key: n - moved["lion"].get(key, 0) for key, n in moved["muon"].items() if n != moved["lion"].get(key)}
    plan, itemsize = plans["muon"], 8
    blocks = sum(plan.planner.mesh.world_size * torch.Size(plan.local_shape(p)).numel() * itemsize
                 for p in plan.parameters if p.name in plan.matrices)  # fmt: skip
    shards = sum(b.elements for b in plan.buckets if {p.name for p in b.parameters} & {*plan.matrices}) * itemsize * 2
    assert more == {"all_gather/t": blocks, "all_gather/data": shards}


def gradients_and_weights(c: Config):
    """The clipped gradients of three steps of one process, and the weights before and after."""
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    before = {n: w.detach().clone() for n, w in trainer.weights.master.items()}
    taken, step = [], trainer.optimizer.step

    def recorded():
        lrs = {n: g["lr"] for g in trainer.optimizer.param_groups for n in g["names"]}
        taken.append((lrs, {n: g.clone() for n, g in trainer.weights.gradients.items()}))
        step()

    trainer.optimizer.step = recorded
    for k in range(1, 4):
        trainer.step(k)
    return plan, before, taken, {n: w.detach() for n, w in trainer.weights.master.items()}


def muon(weights, plan, o, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())  # the reference iterates in bf16
    matrices = [w for n, w in weights.items() if n in plan.matrices]
    rest = torch.optim.AdamW([{"params": [w for n, w in weights.items() if n not in plan.matrices and w.ndim > 1]},
                              {"params": [w for n, w in weights.items() if w.ndim == 1], "weight_decay": 0.0}],
                             o.lr, tuple(o.betas), o.eps, o.weight_decay)  # fmt: skip
    return [torch.optim.Muon(matrices, o.lr, o.weight_decay, o.momentum, o.nesterov, adjust_lr_fn=o.matrix_lr), rest]


def adafactor(weights, plan, o, monkeypatch):
    """Theirs factors the last two dims, and takes the smaller of the rate and 1 / sqrt(step)."""
    return [
        torch.optim.Adafactor(
            [w], o.lr, o.beta2_decay, (o.eps, o.least_scale), o.update_clip, o.weight_decay if w.ndim > 1 else 0.0
        )
        for w in weights.values()
    ]


def sgd(weights, plan, o, monkeypatch):
    groups = [
        {
            "params": [w for w in weights.values() if (w.ndim > 1) == on],
            "weight_decay": on * o.weight_decay,
        }
        for on in (True, False)
    ]
    return [torch.optim.SGD(groups, o.lr, o.momentum, nesterov=o.nesterov)]


def test_one_process_updates_experts_as_torch_does_each(monkeypatch):
    """Muon of each expert's matrix by itself, and Adafactor, whose last two dims are factored, of the stack."""
    for reference in (muon, adafactor):
        c = configured(reference.__name__, d_ff=48, **ROUTED)
        plan, before, taken, after = gradients_and_weights(c)
        names = [p.name for p in plan.parameters if ".experts." in p.name]
        each = {(n, i): x for n in names for i, x in enumerate(before[n] if reference is muon else [before[n]])}
        weights = {key: x.clone().requires_grad_() for key, x in each.items()}
        plan = replace(plan, matrices=(*weights,))
        theirs = reference(weights, plan, c.optimizer, monkeypatch)
        for lrs, gradients in taken:
            for (n, i), w in weights.items():
                w.grad = gradients[n][i].clone() if reference is muon else gradients[n].clone()
            for optimizer in theirs:
                for group in optimizer.param_groups:
                    group["lr"] = lrs["embedding"]
                optimizer.step() if optimizer.param_groups[0]["params"] else None
        for (n, i), w in weights.items():
            torch.testing.assert_close(
                w.detach(), after[n][i] if reference is muon else after[n], rtol=1e-10, atol=1e-13
            )


@pytest.mark.parametrize("matrix_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("reference", [sgd, muon, adafactor])
def test_one_process_updates_as_torch_does(reference, matrix_lr, monkeypatch):
    c = configured(reference.__name__, d_ff=48)
    c.optimizer.matrix_lr = matrix_lr
    plan, before, taken, after = gradients_and_weights(c)
    shapes = {"query": (32, 32), "key": (32, 32), "value": (32, 32), "output": (32, 32)}
    weights = {n: w.reshape(shapes.get(n.split(".")[-1], w.shape)).requires_grad_() for n, w in before.items()}
    theirs = reference(weights, plan, c.optimizer, monkeypatch)
    for lrs, gradients in taken:
        for name, w in weights.items():
            w.grad = gradients[name].reshape(w.shape)
        for optimizer in theirs:
            for group in optimizer.param_groups:
                group["lr"] = lrs["embedding"]
            optimizer.step()
    for name, w in weights.items():
        torch.testing.assert_close(w.detach(), after[name].reshape(w.shape), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "keys",
    [
        {"lr": 0.9, "relative_step": True},
        {"update_clip": 5.0, "beta2_decay": -0.5, "least_scale": 0.1},
        {"eps": 1e-3, "weight_decay": 0.0},
    ],
    ids=str,
)
def test_each_choice_of_adafactor_is_torch_s(keys, monkeypatch):
    c = configured("adafactor", d_ff=48, vocab=64)
    c.optimizer.schedule, c.optimizer.warmup_steps = "constant", 0
    for name, value in keys.items():
        setattr(c.optimizer, name, value)
    plan, before, taken, after = gradients_and_weights(c)
    shapes = {"query": (32, 32), "key": (32, 32), "value": (32, 32), "output": (32, 32)}
    weights = {n: w.reshape(shapes.get(n.split(".")[-1], w.shape)).requires_grad_() for n, w in before.items()}
    theirs = adafactor(weights, plan, c.optimizer, monkeypatch)
    for lrs, gradients in taken:
        for (name, w), optimizer in zip(weights.items(), theirs, strict=True):
            w.grad, optimizer.param_groups[0]["lr"] = gradients[name].reshape(w.shape), lrs[name]
            optimizer.step()
    for name, w in weights.items():
        torch.testing.assert_close(w.detach(), after[name].reshape(w.shape), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "key", [("update_clip", 5.0), ("least_scale", 1.0), ("beta2_decay", -0.5), ("eps", 0.1), ("relative_step", True),
            ("scale_by_weight", False)], ids=str
)  # fmt: skip
def test_each_choice_of_adafactor_counts(key):
    c = configured("adafactor", layers=1)
    c.optimizer.lr = 2.0
    *_, plain = gradients_and_weights(c)
    setattr(c.optimizer, *key)
    *_, other = gradients_and_weights(c)
    assert not torch.allclose(plain["embedding"], other["embedding"], rtol=1e-6)


def test_what_is_summed_is_what_the_plan_says():
    """A number per row and per column of each matrix, one per weight, and one per update: not the matrices."""
    plans = {kind: make_plan(configured(kind, **PLANS["zero2"])) for kind in ("lion", "adafactor")}
    moved = {kind: communication(plan) for kind, plan in plans.items()}
    more = {key: n - moved["lion"].get(key, 0) for key, n in moved["adafactor"].items()}
    plan = plans["adafactor"]
    summed = sum(sum(matrix_sides(plan, p)) for p in plan.parameters if p.name in plan.factored)
    numbers, ranks = summed + 2 * len(plan.parameters), plan.mesh.world_size
    assert {key: n for key, n in more.items() if n} == {"all_reduce/data+t": 2 * (ranks - 1) * numbers * 8}


@pytest.mark.parametrize("layout", ["1d", "zero1", "branches"])
def test_negative_control_statistics_of_a_part_alone(layout, monkeypatch):
    """Each rank takes the sums of its own part for those of the whole."""
    c = configured("adafactor", **PLANS[layout])
    expected = serial(c)
    monkeypatch.setattr(AdafactorSums, "_axes", property(lambda self: (), lambda self, axes: None), raising=False)
    plan, results = run(c)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="final of|replicas of"):
        compare(c, plan, results, expected)


def test_adafactor_factors_matrices_and_tables():
    plan = make_plan(configured("adafactor", bias=True))
    assert {p.name for p in plan.parameters} - {*plan.factored} == {p.name for p in plan.parameters if not p.decay}
    assert {"embedding", "layers.0.attention.query", "layers.0.mlp.up"} < {*plan.factored}
    c = configured("adafactor")
    c.train.freeze = ["embedding"]
    assert "embedding" not in make_plan(c).factored


def test_lion_is_its_paper_s_formula():
    c = configured("lion")
    o, (_, before, taken, after) = c.optimizer, gradients_and_weights(c)
    momentum = {n: torch.zeros_like(w) for n, w in before.items()}
    for lrs, gradients in taken:
        for n, w in before.items():
            update = (o.betas[0] * momentum[n] + (1 - o.betas[0]) * gradients[n]).sign()
            before[n] = w - lrs[n] * (update + (o.weight_decay * w if w.ndim > 1 else 0))
            momentum[n] = o.betas[1] * momentum[n] + (1 - o.betas[1]) * gradients[n]
    for name, w in before.items():
        torch.testing.assert_close(w, after[name], rtol=1e-10, atol=1e-13)


def test_groups_scale_what_they_match_and_the_first_counts():
    c = configured("groups")
    c.optimizer.schedule = "constant"
    c.optimizer.groups.append({"match": ".*", "lr": 0.5})
    _, before, taken, after = gradients_and_weights(c)
    lrs = taken[-1][0]
    assert torch.equal(before["embedding"], after["embedding"]) and lrs["layers.0.attention.query"] == 0.3e-2
    assert lrs["layers.0.attention.key"] == 0.5e-2


def test_muon_takes_the_weights_of_hidden_layers():
    of = {kind: make_plan(configured("muon", kind=kind, tied=False, positions=positions)) for kind, positions in (
        ("decoder", "learned"), ("encoder_decoder", "relative"))}  # fmt: skip
    assert {n.rpartition(".")[2] for plan in of.values() for n in plan.matrices} == {
        "query", "key", "value", "output", "up", "down"
    }  # fmt: skip
    c = configured("muon")
    c.train.freeze = ["layers.0.*"]
    assert all(name.startswith("layers.1.") for name in make_plan(c).matrices)
    assert len(find_muon_matrices(c.optimizer, make_plan(c))) == 2 * len(make_plan(c).matrices)


@pytest.mark.parametrize("layout", ["1d", "zero1"])
def test_negative_control_parts_are_no_whole_matrix(layout, monkeypatch):
    """Each rank makes its own part orthogonal."""
    monkeypatch.setattr(MuonMatrices, "map_matrices", lambda self, function, parts: (
        (n, function(x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(1, -1)).reshape(x.shape))
        for n, x in parts.items() if x.numel()))  # fmt: skip
    c = configured("muon", **PLANS[layout])
    plan, results = run(c)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="final of"):
        compare(c, plan, results, serial(c))
    assert counted(results) != communication(plan)


def test_negative_control_what_another_rank_has_is_lost(monkeypatch):
    whole = FlatBucket.gather_whole_blocks

    def joined(self, parts):
        return {n: x * (self._index == 0) for n, x in whole(self, parts).items()}

    c = configured("muon", **PLANS["zero1"])
    serial(c)
    monkeypatch.setattr(FlatBucket, "gather_whole_blocks", joined)
    with pytest.raises(AssertionError, match="final of|replicas of|!="):
        prove(c)


@pytest.mark.parametrize("layout", ["1d", "zero1", "zero3"])
@pytest.mark.parametrize("kind", ["plain", "sgd", "lion", "muon", "adafactor"])
def test_what_is_kept_is_what_was_forecast(kind, layout):
    c = configured(kind, **PLANS[layout])
    plan = make_plan(c)

    def on_rank(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.step(1)
        kept = sum(b.tensor.nbytes for b in RankTrainingState(trainer).live_blocks() if not b.name.startswith("model."))
        live = sum(x.nbytes for state in trainer.optimizer.state.values() for x in state.values()
                   if isinstance(x, torch.Tensor) and x.ndim)  # fmt: skip
        forecast = weight_bytes(trainer.stage, count_states_per_element(c), communicator.coordinates)["optimizer"]
        padding = sum(b.elements - sum(b.sizes) for b in plan.buckets) * 8 * 2
        assert kept == live and kept <= forecast <= kept + padding

    run_threads(plan.mesh, on_rank)


@pytest.mark.parametrize(
    ("keys", "said"),
    {
        "a": ({"groups": [{"match": "layer.*x"}]}, "optimizer.groups.0.match=layer.*x: matches no parameter"),
        "b": ({"kind": "muon", "matrices": "vector"}, "optimizer.matrices=vector: matches no matrix"),
        "c": ({"groups": [{"lr": 1}]}, "optimizer.groups.0="),
        "d": ({"groups": [{"match": "(", "lr": 1}]}, "must be a regular expression"),
        "e": ({"groups": [{"match": ".*", "lr": -1}]}, "optimizer.groups.0.lr=-1: must be a factor"),
        "f": ({"kind": "sgd", "momentum": 0.0, "nesterov": True}, "optimizer.nesterov=true: optimizer.momentum=0"),
        "g": ({"schedule": "wsd", "decay_steps": 9}, "optimizer.decay_steps=9: after warm-up come 2 updates"),
        "i": ({"groups": [{"match": ".*", "rate": 1}]}, "no rate"),
    }.values(),
    ids=str,
)
def test_mistakes_are_refused(keys, said):
    c = configure()
    for name, value in keys.items():
        setattr(c.optimizer, name, value)
    lines = violations_of_configuration(c)
    if not lines:
        with pytest.raises(ConfigError) as refused:
            make_plan(c)
        lines = refused.value.violations
    assert any(said in line for line in lines), lines
