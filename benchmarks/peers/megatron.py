"""megatron-core on CPUs: its tensor parallelism and its 1F1B schedule, with what asks for CUDA turned to the CPU.

Its layers, collectives and schedules are its own. Attention is torch's fused kernel, as megatron's own without
Transformer Engine is not fused; its fusions are for CUDA and off.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from math import nan
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.gpt import Batches, settings_of
from benchmarks.peers.norms import clip
from benchmarks.peers.pipelined import split_of
from platform.config.fields import Config
from platform.runtime.communicator import Communicator

warnings.filterwarnings("ignore", module="megatron")
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
torch.cuda.synchronize = lambda device=None: None
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()


class OnCpu(types.ModuleType):
    """The module torch, as the schedules see it: their counter of tokens is not on a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **how: Any) -> Tensor:
        return torch.zeros(*size, **how)


schedules.torch = OnCpu("torch")


class FusedAttention(nn.Module):
    """Causal attention of [length, batch, heads, width], in place of megatron's unfused one."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return a.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def build_model(c: Config, weights: Mapping[str, Tensor], compiled: bool, shards: int, stages: int) -> GPTModel:
    """Build the model of this rank with our initial weights."""
    parallel_state.initialize_model_parallel(shards, stages)
    first = split_of(c) if stages > 1 else None
    settings = TransformerConfig(
        num_layers=c.model.layers,
        hidden_size=c.model.d_model,
        num_attention_heads=c.model.heads,
        ffn_hidden_size=c.model.d_ff or 4 * c.model.d_model,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        layernorm_epsilon=1e-5,
        activation_func=F.gelu,
        tensor_model_parallel_size=shards,
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=c.model.layers - first if first is not None else None,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=True,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    model = GPTModel(
        settings,
        spec,
        c.model.vocab,
        c.model.length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=c.model.tied,
    )
    load(model, c, weights, shards)
    for layer in model.decoder.layers if compiled else ():
        layer.compile()
    return model


# ours, in a layer -> theirs, and the dim of [out, in] that tensor parallelism splits
LAYER = {
    "attention.norm.gain": ("input_layernorm.weight", None),
    "attention.norm.bias": ("input_layernorm.bias", None),
    "attention.output": ("self_attention.linear_proj.weight", 1),
    "attention.output_bias": ("self_attention.linear_proj.bias", None),
    "mlp.norm.gain": ("pre_mlp_layernorm.weight", None),
    "mlp.norm.bias": ("pre_mlp_layernorm.bias", None),
    "mlp.up": ("mlp.linear_fc1.weight", 0),
    "mlp.up_bias": ("mlp.linear_fc1.bias", 0),
    "mlp.down": ("mlp.linear_fc2.weight", 1),
    "mlp.down_bias": ("mlp.linear_fc2.bias", None),
}
ENDS = {
    "embedding": ("embedding.word_embeddings.weight", 0),
    "position": ("embedding.position_embeddings.weight", None),
    "norm.gain": ("decoder.final_layernorm.weight", None),
    "norm.bias": ("decoder.final_layernorm.bias", None),
}


def flat(name: str, w: Tensor) -> Tensor:
    """Return one of our weights as a matrix [out, in]: those of attention have heads on one side."""
    if w.ndim < 3:
        return w
    return w.flatten(1) if name.endswith("output") else w.flatten(0, 1)


def named(model: GPTModel, c: Config, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield the name of each parameter of this rank, its whole value and the dim that tensor parallelism splits."""
    for ours, (theirs, dim) in ENDS.items():
        yield theirs, flat(ours, weights[ours]), dim
    if not model.pre_process:
        yield "output_layer.weight", weights["embedding"], 0
    for i, layer in enumerate(model.decoder.layers):
        at = f"layers.{layer.layer_number - 1}"
        for ours, (theirs, dim) in LAYER.items():
            yield f"decoder.layers.{i}.{theirs}", flat(f"{at}.{ours}", weights[f"{at}.{ours}"]), dim
        for kind, suffix in (("weight", ""), ("bias", "_bias")):  # head by head, each with its rows of Q, K and V
            names = [f"{at}.attention.{part}{suffix}" for part in ("query", "key", "value")]
            parts = [
                (flat(n, weights[n]) if kind == "weight" else weights[n].flatten()).unflatten(0, (c.model.heads, -1))
                for n in names
            ]
            yield f"decoder.layers.{i}.self_attention.linear_qkv.{kind}", torch.cat(parts, 1).flatten(0, 1), 0


@torch.no_grad()
def load(model: GPTModel, c: Config, weights: Mapping[str, Tensor], shards: int) -> None:
    """Copy our whole weights into a rank's parameters; every one of them gets a value."""
    parameters = dict(model.named_parameters())
    rank = parallel_state.get_tensor_model_parallel_rank()
    left = set(parameters)
    for name, whole, dim in named(model, c, weights):
        if name in parameters:
            value = whole if dim is None else whole.chunk(shards, dim)[rank]
            parameters[name].copy_(value.reshape(parameters[name].shape))
            left.discard(name)
    assert not left, left


def updater(c: Config, model: GPTModel, counted: Callable[[Tensor], bool]) -> Callable[[], None]:
    """Return a function that clips and updates. `counted`: whether this rank counts a parameter in the norm."""
    own = list(model.parameters())
    decays = [{"params": [p for p in own if p.ndim > 1], "weight_decay": c.optimizer.weight_decay}]
    decays += [{"params": [p for p in own if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decays, **settings_of(c))
    group = parallel_state.get_model_parallel_group()

    def update() -> None:
        clip([p.grad for p in own], [p.grad for p in own if counted(p)], c.optimizer.clip, group)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def tensor_parallel(
    c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool
) -> Callable[[int], float]:
    model = build_model(c, weights, compiled, communicator.mesh.world_size, 1)
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    update = updater(c, model, lambda p: first or getattr(p, "tensor_model_parallel", False))
    batches, positions = Batches(c), torch.arange(c.model.length)[None]

    def step(k: int) -> float:
        tokens, labels = batches(k)
        loss = model(tokens, positions.expand_as(tokens), None, labels=labels).mean()
        loss.backward()
        update()
        return loss.item()

    return step


def one_f_one_b(
    c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool
) -> Callable[[int], float]:
    model = build_model(c, weights, compiled, 1, communicator.mesh.world_size)
    last = parallel_state.is_pipeline_last_stage()
    tied = model.shared_embedding_or_output_weight() if c.model.tied else None
    update = updater(c, model, lambda p: not (last and p is tied))
    batches, positions = Batches(c), torch.arange(c.model.length)[None]
    run = schedules.get_forward_backward_func()

    def forward(rows: Iterator[tuple[Tensor, Tensor]], stage_model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
        tokens, labels = next(rows)
        return stage_model(tokens, positions, None, labels=labels), reduced

    def reduced(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = out.mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the other in place

    def step(k: int) -> float:
        tokens, labels = batches(k)
        losses = run(
            forward_step_func=forward,
            data_iterator=iter(zip(tokens.split(1), labels.split(1), strict=True)),
            model=[model],
            num_microbatches=c.train.global_batch,
            seq_length=c.model.length,
            micro_batch_size=1,
            forward_only=False,
        )
        if tied is not None:
            dist.all_reduce(tied.grad, group=parallel_state.get_embedding_group())
        update()
        return torch.stack([x["loss"] for x in losses]).mean().item() if losses else nan

    return step
