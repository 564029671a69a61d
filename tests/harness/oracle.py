"""The oracle: one process, no sharding, fp64 (docs/numerics.md). What ranks computed must equal it, gradients too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml
from torch import Tensor

from platform.config.fields import (
    PREFERENCE,
    WEIGHTED,
    Branch,
    Config,
    Pipeline,
    choose_quantisation,
    distill_settings,
    training_objective_name,
)
from platform.config.fields import Model as ModelConfig
from platform.config.fields import Tensor as TensorConfig
from platform.data.special_tokens import SpecialIds
from platform.optimizer.optimizers import NOT_OF_FACTORED, NOT_OF_MATRICES, probe_optimizer_state
from platform.plan.model_types import NF4_KINDS, Parameter
from platform.plan.operation_plan import collective_label
from platform.plan.plan import Plan
from platform.plan.simulate import stage_rows
from platform.plan.step_collectives import communication
from platform.predict.choose_schedule import build_schedules
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, Launch, SingleRank
from platform.runtime.eight_bits import quantise_matrices
from platform.runtime.normal_floats import decode_weights
from platform.train.replies import Differences
from platform.train.trainer import Trainer
from tests.harness.replay import replay
from tests.harness.replayed_bytes import replay_traffic
from tests.harness.threads import run_threads

CONF = Path(__file__).parents[2] / "conf"
ROUNDING = 1e-5  # what is trained may have no gradient at all, but for rounding of larger ones
STEPS = 2  # the second one goes on from weights and moments that the first has made

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt_untied": {"tied": False, "vocab": 64},
    "llama": {"kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False,
              "tied": False, "d_ff": 48},
    "gqa_tied": {"kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "vocab": 63},
    "bert": {"kind": "encoder", "post_norm": True},
    "original": {"kind": "encoder_decoder", "post_norm": True, "positions": "sinusoidal", "activation": "relu",
                 "label_smoothing": 0.1, "layers": 1},
    "t5": {"kind": "encoder_decoder", "norm": "rmsnorm", "positions": "relative", "activation": "geglu", "bias": False,
           "source_length": 8, "buckets": 8, "distance": 12},
    "modern": {"kind": "decoder", "kv_heads": 2, "norm": "rmsnorm", "norm_eps": 1e-2, "activation": "geglu_tanh",
               "positions": "rope", "rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_length": 8,
               "bias": False, "attention_bias": "qkv", "query_key_norm": True, "tied": False, "head_bias": True,
               "window": 5, "window_layers": [1], "within_documents": True},
    "experts": {"experts": 4, "experts_per_token": 2, "expert_d_ff": 24, "shared_experts": 1, "capacity_factor": 1.0,
                "balance_loss": 0.3, "z_loss": 0.05},
    "latent": {"kv_latent": 12, "q_latent": 20, "d_kv": 10, "d_rope": 4, "d_value": 6, "positions": "rope",
               "rope_pairs": "neighbours", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied": False},
    "gpt_oss": {"kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu_clamped", "positions": "rope", "bias": False,
                "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 8, "rope_truncate": False,
                "attention_bias": "all", "attention_sinks": True, "window": 5, "window_layers": [0], "tied": False,
                "experts": 4, "expert_d_ff": 24, "expert_bias": True, "capacity_factor": 0.0, "balance_loss": 0.3},
    "packed_gpt": {"within_documents": True, "layers": 1},
    "whole_bert": {"kind": "encoder", "post_norm": True, "norm_eps": 1e-2, "embedding_norm": True, "segments": 3,
                   "activation": "gelu_tanh", "head_transform": True, "head_bias": True, "layers": 1},
    "whole_t5": {"kind": "encoder_decoder", "norm": "rmsnorm", "norm_eps": 1e-2, "positions": "relative",
                 "activation": "reglu", "bias": False, "buckets": 8, "distance": 12, "attention_scale": 1.0,
                 "logit_scale": 0.25, "query_key_norm": True, "query_key_norm_over": "heads", "layers": 1},
}  # fmt: skip


@cache
def text(group: str, option: str) -> str:
    """What a file of conf/ says, as JSON: much is configured while tests are collected, and YAML is read slowly."""
    return json.dumps(yaml.safe_load((CONF / group / f"{option}.yaml").read_text()))


def read(group: str, option: str) -> dict[str, Any]:
    return json.loads(text(group, option))


def configure(
    tensor: str = "serial",
    axes: Mapping[str, int] | None = None,
    *,
    rules: Mapping[str, Any] | None = None,
    branch: str = "none",
    branch_axes: Mapping[str, int] | None = None,
    order: str = "inner",
    data: int = 1,
    zero: int = 0,
    zero_group: int = 0,
    bucket_mib: int | str = "auto",
    experts_of: int = 1,
    tensor_experts: str = "split",
    context: int = 1,
    context_kind: str = "auto",
    context_heads: int = 0,
    context_pieces: int = 0,
    microbatch: int = 4,
    global_batch: int = 8,
    precision: str = "fp64",
    pipeline: str = "none",
    stages: int = 1,
    chunks: int = 1,
    scatter_gather: bool = True,
    recompute: str = "none",
    every: int = 1,
    offload: bool = False,
    gathered: str = "",
    async_products: str = "auto",
    pair_passes: str = "auto",
    mlp_chunks: int = 1,
    **model: Any,
) -> Config:
    """A small model under any scheme; `rules` is the map of tensor=layout, for all regions and parameters."""
    c = Config(precision=precision, recompute=recompute, recompute_every=every, recompute_offload=offload)
    c.model = ModelConfig(**{"layers": 2, "d_model": 32, "heads": 8, "length": 16, "vocab": 61, **model})
    c.tensor = TensorConfig(**{**read("tensor", tensor), "axes": dict(axes or {})})
    c.tensor.gathered, c.tensor.async_products = gathered or c.tensor.gathered, async_products
    if rules is not None:
        regions = ("stream", "attention", "mlp", "logits")
        c.tensor.regions, c.tensor.parameters = {r: dict(rules) for r in regions}, {"all": dict(rules)}
    c.branch = Branch(**{**read("branch", branch), "axes": dict(branch_axes or {}), "order": order})
    c.parallel.data, c.parallel.zero, c.parallel.zero_group = data, zero, zero_group
    c.parallel.bucket_mib = bucket_mib
    c.parallel.experts, c.parallel.tensor_experts, c.parallel.context = experts_of, tensor_experts, context
    c.parallel.context_kind, c.parallel.context_heads = context_kind, context_heads
    c.parallel.context_pieces = context_pieces
    c.pipeline = Pipeline(pipeline, stages, chunks, scatter_gather=scatter_gather)
    c.train.microbatch, c.train.global_batch, c.train.steps = microbatch, global_batch, STEPS
    c.train.mlp_chunks, c.train.pair_passes = mlp_chunks, pair_passes
    c.optimizer.lr, c.optimizer.clip = 1e-2, 0.5
    return c


class Tokens:
    """A corpus of pseudo-random tokens, with padding and labels that do not count unless the model is a decoder."""

    validations: ClassVar = {"": ("validation", 1)}
    special, vocabulary, teacher, counts_by_reading = SpecialIds(), None, None, True

    def __init__(self, c: Config):
        self.model, self.vocab, self.weighted = c.model, c.model.vocab, training_objective_name(c) in WEIGHTED
        self.paired = training_objective_name(c) == PREFERENCE
        if settings := distill_settings(c):
            self.teacher = Teacher(c.model.vocab, settings.top, settings.temperature)

    def batch(self, split: str, start: int, end: int) -> dict[str, np.ndarray]:
        draws = (np.random.default_rng([split == "train", i]) for i in range(start, end))
        more = self.pairs if self.paired else self.weights if self.weighted else lambda draw: {}
        samples = [self.sample(draw) | more(draw) for draw in draws]
        tensors = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        if self.teacher:
            tensors["teacher"] = np.arange(start, end)[:, None] * self.model.length + np.arange(self.model.length)
        return tensors

    def sample(self, draw: np.random.Generator) -> dict[str, np.ndarray]:
        c = self.model
        row = draw.integers(0, self.vocab, c.length + 1)
        if c.kind not in ("encoder", "encoder_decoder"):
            begin = np.sort(draw.integers(0, c.length, 2))
            place = np.arange(c.length)
            begins = np.where(place < begin[0], 0, np.where(place < begin[1], begin[0], begin[1]))
            return {"tokens": row[:-1], "labels": row[1:], "begins": begins, "positions": place - begins}
        source = draw.integers(0, self.vocab, c.source_length or c.length)
        source[draw.integers(1, len(source) + 1) :] = -1
        end = draw.integers(1, c.length + 1)
        row[end:] = -1
        if c.kind == "encoder":
            segments = np.sort(draw.integers(0, max(1, c.segments), c.length))
            labels = np.where(draw.random(c.length) < 0.5, row[:-1], -1)
            return {"tokens": row[:-1], "labels": labels, "segments": segments}
        return {"source": source, "tokens": row[:-1], "labels": row[1:]}

    def weights(self, draw: np.random.Generator) -> dict[str, np.ndarray]:
        """Some labels count less, some not at all, some the other way."""
        return {"label_weights": draw.choice([1.0, 0.1, 0.0, 3.0, -0.2], self.model.length)}

    def pairs(self, draw: np.random.Generator) -> dict[str, np.ndarray]:
        """One pair or two of answers that lie anywhere, of which some labels count."""
        answers = draw.integers(-1, 4 if self.model.length > 8 else 2, self.model.length)
        answers[:4] = [0, 1, 2, 3] if answers.max() > 1 else [0, 1, 0, 1]
        counts = answers >= 0
        labels = np.where(counts, draw.integers(0, self.vocab, len(answers)), -1)
        weights = np.where(counts, 1 / np.maximum(np.bincount(answers[counts] // 2, minlength=2), 1)[answers // 2], 0.0)
        references = np.where(counts, -draw.random(len(answers)) * 5, 0.0)
        return {"labels": labels, "paired": answers, "label_weights": weights, "references": references}

    def predicted(self, split: str, start: int, end: int) -> int:
        batch = self.batch(split, start, end)
        return int(round(batch["label_weights"].sum()) if self.paired else (batch["labels"] >= 0).sum())

    def encode(self, text: str) -> list[int]:
        return [b % self.vocab for b in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@dataclass
class Teacher:
    """A teacher that says something else of every label."""

    vocab: int
    classes: int
    temperature: float

    def read_classes(self, numbers: np.ndarray) -> np.ndarray:
        logits = [np.random.default_rng([3, n]).normal(size=self.vocab) * 2 for n in np.maximum(numbers, 0).flatten()]
        scaled = np.stack(logits) / self.temperature
        logs = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
        kept = np.argsort(-logs, 1)[:, : self.classes]
        values = np.take_along_axis(logs, kept, 1)
        return np.concatenate((kept.astype(float), values), 1).reshape(*numbers.shape, -1)


@dataclass
class Result:
    """What one rank computed. Tensors are local: blocks, or chunks of them; `moved` and `log` are those of the first
    step."""

    rank: int
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    losses: list[float]
    moved: Counter[str]
    log: list[Launch]
    averages: dict[str, Tensor] = field(default_factory=dict)
    routed: list[int] = field(default_factory=list)  # of experts: what this rank counts in the first step
    states: dict[str, Tensor] = field(default_factory=dict)  # parameters without gradient, in the end
    routing: dict[str, list[Any]] = field(default_factory=dict)  # of rows in the first step, by layer
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # of trained parameters, in the end


def on_host(result: Result) -> Result:
    """The same result with its tensors in host memory."""
    parts = ("gradients", "initial", "final", "averages")
    return replace(result, **{part: {n: x.cpu() for n, x in getattr(result, part).items()} for part in parts})


def trainer_of(c: Config, plan: Plan, communicator: Communicator, corpus: Any = None, fresh: bool = True) -> Trainer:
    """A rank's trainer, with the rows that the driver would hand it."""
    stage = communicator.coordinates["stage"]
    rows = stage_rows(build_schedules(c, c.parallel.data, plan.pairs_passes))[stage]
    return Trainer(c, plan, communicator, corpus or Tokens(c), rows, fresh)


def validation_loss(trainer: Trainer) -> float:
    """The loss that an evaluation of a run gives."""
    c = trainer.config
    with trainer.use_evaluation_weights():
        return trainer.compute_mean_loss("validation", c.eval.batches * c.train.global_batch)


def with_operations(plan: Plan, operations: Mapping[tuple[str, str], Any]) -> Plan:
    """The plan with other operations of the same names."""
    chunks = (replace(chunk, operations={key: operations[key] for key in chunk.operations}) for chunk in plan.chunks)
    return replace(plan, chunks=tuple(chunks))


def numbers_of(trainer: Trainer) -> dict[str, Tensor]:
    """New copies of what a rank has of its parameters, of those in 4 bits the numbers that they stand for."""
    plan, numbers = trainer.plan, {n: w.detach().clone() for n, w in trainer.weights.master.items()}
    for p in (p for p in trainer.stage.parameters if p.name in frozenset(plan.quantised) and numbers[p.name].numel()):
        stored, shape = numbers[p.name], plan.block_shape(p, trainer.communicator.coordinates)
        flat = decode_weights(stored, torch.empty(len(stored) * NF4_KINDS[plan.quantised_kind], dtype=torch.float64))
        numbers[p.name] = flat.view(shape) if flat.numel() == torch.Size(shape).numel() else flat
    return numbers


def moments_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """New copies of the optimizer's moments that are laid out as parameters are: zeros for what has none."""
    plan, weights, moments = trainer.plan, trainer.weights, {}
    for kind in probe_optimizer_state(trainer.config.optimizer, torch.float64, torch.device("cpu"))[0]:
        lacks = {NOT_OF_MATRICES: plan.matrices, NOT_OF_FACTORED: plan.factored}.get(kind, ())
        states = {n: trainer.optimizer.state.get(weights.updated[n][0], {}) for n in weights.trainable_masters}
        moments[kind] = {
            n: torch.zeros_like(weights.master[n]) if n in lacks else weights.part_of_parameter(n, state[kind]).clone()
            for n, state in states.items()
        }
    return moments


def compute(c: Config, plan: Plan, communicator: Communicator) -> Result:
    """Gradients of the first step and parameters after three, on one rank."""
    torch.set_num_threads(1)
    trainer = trainer_of(c, plan, communicator)
    initial = numbers_of(trainer)
    gradients: dict[str, Tensor] = {}

    def keep() -> Differences:
        """Copies the gradients when they are reduced and not yet clipped."""
        gradients.update((n, g.clone()) for n, g in trainer.weights.gradients.items())
        return Differences()

    communicator.log, trainer.ops.routing = [], {}
    first = trainer.step(1, verify=keep)
    log, communicator.log = communicator.log, None
    routing, trainer.ops.routing = trainer.ops.routing, None
    moved = Counter(first.comm_bytes)
    losses = [first.loss, *(trainer.step(k).loss for k in range(2, STEPS + 1))]
    final = numbers_of(trainer)
    numbers, routed, states = (first.loss, first.grad_norm), first.routed, trainer.weights.states
    more = {}, routed, states, routing
    return Result(communicator.rank, *numbers, gradients, initial, final, losses, moved, log, *more)


def run(c: Config, plan: Plan | None = None) -> tuple[Plan, list[Result]]:
    """All ranks of a plan, as threads."""
    plan = plan or make_plan(c)
    if plan.mesh.world_size == 1:
        return plan, [compute(c, plan, SingleRank(plan.mesh))]
    return plan, run_threads(plan.mesh, lambda communicator: compute(c, plan, communicator))


_located: tuple[Plan | None, dict[tuple[str, int], Any]] = None, {}  # of the plan that was asked about last


def locate_part(plan: Plan, p: Parameter, rank: int) -> tuple[tuple[slice, ...], int, int] | None:
    """Where a rank's block of a parameter lies, and which part of the block its shard is; None if it has none."""
    global _located
    if _located[0] is not plan:
        _located = plan, {}
    if (key := (p.name, rank)) not in _located[1]:
        coordinates, place = plan.mesh.rank_coordinates(rank), None
        if plan.has_block(p, coordinates):
            place = (
                tuple(slice(o, o + n) for o, n in plan.locate_block(p, coordinates)),
                *plan.shard_range(p, coordinates),
            )
        _located[1][key] = place
    return _located[1][key]


def assemble(
    plan: Plan, results: Sequence[Result], pick: Callable[[Result], Mapping[str, Tensor]], trained: bool = False
) -> dict[str, Tensor]:
    """Whole tensors from what all ranks hold, without padding; of `trained` parameters alone, where others have none.
    Raises AssertionError where replicas disagree."""
    out = {}
    for p in plan.parameters:
        if trained and p.name in plan.frozen:
            assert not any(p.name in pick(r) for r in results), f"{p.name} is frozen"
            continue
        padded = [plan.planner.tensor_sizes(p)[d] for d in p.dims]
        whole = torch.full(padded, torch.nan, dtype=torch.float64)
        for r in results:
            if (place := locate_part(plan, p, r.rank)) is None:
                assert not pick(r).get(p.name, torch.empty(0)).numel(), f"rank {r.rank} has a block of {p.name}"
                continue
            where, start, stop = place
            if start == stop:
                assert not pick(r).get(p.name, torch.empty(0)).numel(), f"rank {r.rank} has a part of {p.name}"
                continue
            shard, padding = pick(r)[p.name].double().flatten().tensor_split([stop - start])
            assert not padding.any(), f"padding of a shard of {p.name} is not zero"
            block = whole[where].flatten()
            seen = block[start:stop]
            assert seen.isnan().all() or torch.allclose(seen, shard, rtol=1e-10, atol=1e-13), f"replicas of {p.name}"
            block[start:stop] = shard
            whole[where] = block.clone().view_as(whole[where])  # torch refuses to copy a view onto itself
        for i, n in enumerate(plan.global_shape(p)):
            assert not whole.narrow(i, n, whole.shape[i] - n).any(), f"padding of {p.name} is not zero"
            whole = whole.narrow(i, 0, n)
        assert not whole.isnan().any(), f"the blocks of {p.name} leave a hole"
        out[p.name] = whole
    return out


def compare(c: Config, plan: Plan, results: Sequence[Result], expected: Result) -> None:
    """Tolerances of docs/numerics.md, for every rank. Raises AssertionError naming the tensor."""
    lr = c.optimizer.lr
    largest = max(g.abs().max() for g in expected.gradients.values()).clamp(min=ROUNDING)
    parts = {
        "initial": (lambda r: r.initial, 0.0, 0.0),
        "gradient": (lambda r: r.gradients, 1e-10, 1e-13 * largest),
        "final": (lambda r: r.final, 1e-10, 1e-10 * lr),
        **({"average": (lambda r: r.averages, 1e-10, 1e-10 * lr)} if expected.averages else {}),
    }
    for kind in expected.moments:
        parts[f"moment {kind}"] = (lambda r, kind=kind: r.moments[kind]), 1e-10, 1e-13 * max(largest, largest**2)
    for what, (pick, relative, absolute) in parts.items():
        trained = what == "gradient" or what.startswith("moment")
        actual, wanted = assemble(plan, results, pick, trained), pick(expected)
        for name, value in actual.items():
            whole = wanted[name][tuple(slice(n) for n in value.shape)]  # a large vocab is padded on one worker too
            error = (value - whole).abs().max()
            bound = relative * whole.abs().max() + absolute
            assert error <= bound, f"{what} of {name}: {error:.1e} > {bound:.1e}"
    routed = [sum(counts) for counts in zip(*(r.routed for r in results if r.routed), strict=True)]
    assert routed == expected.routed, f"tokens of experts: {routed} != {expected.routed}"
    for name, state in ((name, state) for r in results for name, state in r.states.items()):
        assert torch.equal(state, expected.states[name]), f"{name}: {state} != {expected.states[name]}"
    assert {name for r in results for name in r.states} == expected.states.keys()
    for r in results:
        numbers = zip(
            (r.loss, r.grad_norm, *r.losses), (expected.loss, expected.grad_norm, *expected.losses), strict=True
        )
        for have, want in numbers:
            assert abs(have - want) <= 1e-10 * abs(want), f"rank {r.rank}: {have} != {want}"


def count_flips(c: Config, plan: Plan, results: Sequence[Result], expected: Result) -> int:
    """How many numbers of the last weights with products in 8 bits are, in 8 bits, others than those of one process."""
    how, flips = choose_quantisation(c), 0
    einsums = [(o.operation, e) for o in plan.operations.values() for g in o.groups for e in g.einsums if e.scaled]
    names = {o.inputs[1 + e.index].name for o, e in einsums}
    weights = assemble(plan, results, lambda r: r.final) if how and names else {}
    for name, weight in ((name, weights[name]) for name in names):
        pair = [x.flatten(1).double() for x in (weight, expected.final[name][tuple(map(slice, weight.shape))])]
        codes = [quantise_matrices(x, how.tiles[1], "e4m3", how.powers).values.view(torch.uint8) for x in pair]
        flips += int((codes[0] != codes[1]).sum())
    return flips


def counted(results: Sequence[Result]) -> dict[str, int]:
    """Bytes moved in the first step, summed over the ranks."""
    return dict(sorted(sum((r.moved for r in results), Counter()).items()))


_serial: dict[str, Result] = {}


def serial(c: Config) -> Result:
    """One process: the same model, batch and optimizer without any parallelism. Computed once per model."""
    loss = c.train.loss, c.train.loss_settings
    trained = c.train.global_batch, loss, c.train.freeze, c.tune
    key = repr((c.model, trained, c.data.objective, c.optimizer, c.seed))
    if key not in _serial:
        one = configure(global_batch=c.train.global_batch, microbatch=c.train.global_batch)
        one.model, one.optimizer, one.seed, one.tune = c.model, c.optimizer, c.seed, c.tune
        (one.train.loss, one.train.loss_settings), one.data.objective = loss, c.data.objective
        one.train.freeze = c.train.freeze
        _serial[key] = run(one)[1][0]
    return _serial[key]


def prove(c: Config) -> tuple[Plan, list[Result]]:
    """Runs all ranks as threads; `examine`s what they computed."""
    plan, results = run(c)
    examine(c, plan, results)
    return plan, results


def examine(c: Config, plan: Plan, results: Sequence[Result]) -> None:
    """Equal to one process, the bytes those of the plan, of rows those of their routing, the launches in one order."""
    compare(c, plan, results, serial(c))
    check_bytes(plan, results)
    assert replay([r.log for r in results]) is None


def check_bytes(plan: Plan, results: Sequence[Result]) -> None:
    """Bytes moved are those of the plan or, of rows of experts, those of their routing, and no more than planned."""
    moved, most = counted(results), communication(plan)
    assert moved == replay_traffic(plan, [r.routing for r in results]), "bytes moved"
    of_rows = {
        collective_label(c.op, plan.mesh.order_axes(c.axes))
        for o in plan.operations.values()
        for c in o.collectives
        if c.rows
    }
    assert all(n <= most[key] if key in of_rows else n == most[key] for key, n in moved.items()), "bytes planned"
    assert moved.keys() >= most.keys() - of_rows, "bytes planned"
