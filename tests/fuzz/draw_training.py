"""Draw what shapes a run's weights beside the plan, alike for all its plans: the optimizer, which parameters are
trained, averages, a batch that grows, the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from platform.config.fields import PREFERENCE, Config, Data, Quantise, training_objective_name
from platform.config.training_rules import CUT
from platform.model import build_model
from platform.optimizer.optimizers import OPTIMIZERS, list_further_offloads
from platform.plan.adapters import can_adapt
from platform.plan.layout import find_divisors
from platform.plan.model_types import PAIR_LOSSES
from tests.fuzz.draw_model import widen_to_blocks

OWN_LOSSES: dict[str, Any] = {
    "focal": lambda of: -((1 - of.log_probability.exp()) ** 2) * of.log_probability,
    "calm": lambda of: 0.01 * of.log_sum_exp**2 - 0.9 * of.log_probability - 0.1 * of.mean_log_probability,
}
RUN_WIDE = (
    "ema",
    "freeze",
    "ramp_from",
    "ramp_by",
    "ramp_samples",
    "length_ramp",
    "loss",
)  # keys of train that a run keeps
SCALES = ("block", "block", "tensor", "row")
SETTINGS: dict[str, Sequence[dict[str, Any]]] = {  # of optimizers, beside their defaults
    "sgd": ({}, {"nesterov": True}, {"momentum": 0.0}),
    "muon": ({"momentum": 0.95}, {"nesterov": True, "matrix_lr": "original"}, {"newton_schulz": 2}),
    "lion": ({"betas": [0.9, 0.99]},),
}


def draw_training(r: Random, configs: Sequence[Config]) -> None:
    """Draw which weights are trained, averages, a batch that grows, and the loss."""
    train, batch, model = configs[0].train, configs[0].train.global_batch, configs[0].model
    train.ema = r.choice((0.0, 0.0, 0.5))
    if r.random() < 0.25:
        train.freeze = [_pattern(r, p.name) for p in r.sample(build_model(model).parameters(), r.choice((1, 1, 2)))]
    if r.random() < 0.25 and model.kind != "two_layer":
        draw_adapters(r, configs)
    if r.random() < 0.3 and batch > 1 and all(c.pipeline.kind != "file" for c in configs):
        train.ramp_from = r.randint(1, batch - 1)
        train.ramp_by = r.choice(find_divisors(batch - train.ramp_from))
        train.ramp_samples = r.randint(1, 3 * batch)
    if model.kind != "two_layer" and not model.label_smoothing:
        train.loss = r.choice(("", "", "", *OWN_LOSSES))
    if r.random() < 0.3 and training_objective_name(configs[0]) in CUT:
        train.length_ramp = _length_ramp(r, model.length)
    for c in configs:
        c.model.position_rows = model.length if train.length_ramp and model.positions == "learned" else 0
        for name in RUN_WIDE:
            setattr(c.train, name, getattr(train, name))


def draw_adapters(r: Random, configs: Sequence[Config]) -> None:
    """Draw adapters, of a few weights, of one layer's or of all that may have one, in place of frozen weights."""
    model = configs[0].model
    shared = model.tied or model.kind == "encoder_decoder"
    weights = [p for p in build_model(model).parameters() if can_adapt(p) and not (shared and p.name == "embedding")]
    layer = r.choice(weights).name.rpartition(".")[0]
    some = r.choice((weights, weights[1:], r.sample(weights, 1), [p for p in weights if p.name.startswith(layer)]))
    experts, scaled = any(p.num_stack_dims for p in some), r.random() < 0.5
    more = Random(repr((model, [p.name for p in some])))  # all else is drawn as without it
    rank, alpha, dropout = more.choice((1, 3, 4)), more.choice((32.0, 5.0)), more.choice((0.0, 0.25))
    for c in configs:
        c.train.freeze, c.tune.kind, c.tune.targets = [], "lora", [p.name for p in some]
        c.tune.rank, c.tune.alpha, c.tune.rslora, c.tune.dropout = rank, alpha, scaled, 0.0 if experts else dropout


def _length_ramp(r: Random, longest: int) -> list[str]:
    """Draw up to three lengths of sequences, of which the last is `longest`, and the steps at which they begin."""
    lengths = sorted(r.sample(find_divisors(longest), min(r.choice((2, 2, 3)), len(find_divisors(longest)))))
    steps = sorted(r.sample((1, 2), len(lengths) - 1))
    return [f"{step}:{length}" for step, length in zip((0, *steps), (*lengths[:-1], longest), strict=True)]


def _pattern(r: Random, name: str) -> str:
    """Draw a pattern that matches the parameter `name`, and maybe others."""
    layer, _, rest = name.rpartition(".")
    return r.choice((name, name, f"{layer}.*" if layer else name, f"*{rest}"))


def draw_optimizer(r: Random, configs: Sequence[Config]) -> None:
    """Draw the optimizer that the plans of a run have in common, with factors for some parameters."""
    m = configs[0].model
    kinds = ["adamw", "adamw", *OPTIMIZERS]
    if 1 in (m.length, m.source_length) or m.window == 1:  # gradients of attention are rounding, no update may be
        kinds = [kind for kind in kinds if kind not in ("muon", "lion")]
    kind = r.choice(kinds)
    drawn: dict[str, Any] = {"kind": kind, **r.choice(SETTINGS.get(kind, ({},)))}
    if r.random() < 0.3:
        drawn["groups"] = [{"match": ".*(gain|up|bias)", "lr": 0.5, "weight_decay": 2.0}]
    for c in configs:
        for name, value in drawn.items():
            setattr(c.optimizer, name, value)
        if kind == "lion":  # the sign of a gradient that is zero but for rounding, as a key bias has, is a coin's
            c.model.bias, c.model.attention_bias, c.model.norm = False, "", "rmsnorm"


def draw_lessons(r: Random, configs: Sequence[Config], need: Mapping[str, int], path: str) -> None:
    """Draw what else a run learns from, pairs of answers or a teacher, and what of its state is kept in fewer bits:
    moments, and what adapters are of. `need`: what layouts need of dims; `path`: any file."""
    model, train, data = configs[0].model, configs[0].train, configs[0].data
    invented = model.kind == "decoder" and data.kind == Data().kind and not (data.objective or model.predict_ahead)
    lesson = (
        r.choice(("", "pairs", "teacher", "teacher")) if invented and not (train.loss or model.label_smoothing) else ""
    )
    loss, settings = r.choice(PAIR_LOSSES), {"beta": 0.3, "margin": 0.5}
    taught = {"weight": 0.7, "direction": r.choice(("forward", "reverse")), "top": r.choice((0, 3)), "temperature": 2.0}
    narrow = r.random() < 0.2 and configs[0].optimizer.kind in ("adamw", "sgd") and configs[0].optimizer.momentum > 0
    in_4_bits = configs[0].tune.kind == "lora" and r.random() < 0.5
    for c in configs:
        if lesson == "pairs" and model.length >= 4:
            c.data.kind, c.data.path, c.data.objective, c.data.document_mask = "preferences", path, PREFERENCE, True
            c.data.packing, c.data.overlong, c.model.within_documents = "best_fit", "drop", True
            c.train.loss, c.train.loss_settings, c.train.length_ramp = loss, settings, []
        elif lesson == "teacher":
            c.train.loss, c.train.loss_settings, c.train.teacher = "distill", taught, path
        c.optimizer.moments = "bf16" if narrow else "fp32"
        if in_4_bits:
            c.tune.kind = "qlora"
            widen_to_blocks(c.model, need)
    draw_bits(r, configs)


def draw_bits(r: Random, configs: Sequence[Config]) -> None:
    """Draw products in 8 bits, with one kind of scale in all plans of a run, and states in host memory."""
    wholes = {c.train.microbatch * c.parallel.data for c in configs}
    scales = SCALES if len(wholes) == 1 else ("block",)  # a tensor or a row is of the sequences of a microbatch
    scale = r.choice(scales) if r.random() < 0.25 else "none"
    drawn: dict[str, Any] = {"scale": scale, "block": r.choice((2, 2, 4, 8))}
    drawn |= {"powers": r.choice(("auto", "auto", "off", "on")), "gradients": r.choice(("e4m3", "e5m2"))}
    drawn["skip"] = r.choice(([], [], ["*.attention.*"], ["*.mlp.*"]))
    away = r.random() < 0.25
    for c in configs:
        if away and "states" in list_further_offloads(c):
            c.optimizer.offload = "states"
        if scale != "none":
            c.quantise = Quantise(**drawn)
            c.train.mlp_chunks = 1
            c.parallel.lent_experts *= scale == "block"
