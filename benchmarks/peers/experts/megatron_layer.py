"""megatron-core's layer of experts with its all-to-all dispatcher, on CPUs.

Its experts are its `SequentialMLP`, the only ones that run here: `GroupedMLP` needs the package grouped_gemm and
`TEGroupedMLP` Transformer Engine, both for CUDA. Its streams are for CUDA too; copies to the host are nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import environment
from benchmarks.peers.experts.layer import BALANCE, RANKS, Given, Layer, Size
from platform.runtime.communicator import Communicator

environment.use()

from benchmarks.peers import megatron  # noqa: E402, F401, I001  (turns to the CPU what asks for CUDA)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe import router as moe_router  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


moe_utils.te_general_gemm = None  # 0.16.1 leaves it undefined without Transformer Engine
MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()


def _on_host(self: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Make lists of the sizes, where it would copy them from a GPU."""
    if point == "before_ep_alltoall" and not self.drop_and_pad:
        self.input_splits, self.output_splits = self.input_splits.tolist(), self.output_splits.tolist()
    return tokens_per_expert


def _first_come(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "position",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Let each expert take the first tokens that choose it. Its own policy `position` takes any of them: torch's topk
    does not say which of equals it returns."""
    tokens, experts = routing_map.shape
    capacity = moe_utils.get_capacity(tokens * router_topk, experts, capacity_factor)
    taken = routing_map & (routing_map.cumsum(0) <= capacity)
    if pad_to_capacity:
        others = ~routing_map
        taken |= others & (others.cumsum(0) <= capacity - taken.sum(0))
    return routing_probs * taken, taken


MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _on_host
moe_router.apply_router_token_dropping = _first_come


def build_layer(size: Size, weights: Mapping[str, Tensor], padded: bool) -> Any:
    """Build the layer of this rank with our weights. `padded`: empty slots are computed too."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=RANKS)
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=size.d_model,
        num_attention_heads=1,
        ffn_hidden_size=size.d_ff,
        num_moe_experts=size.experts,
        moe_ffn_hidden_size=size.d_ff,
        moe_shared_expert_intermediate_size=size.d_ff * size.shared or None,
        moe_router_topk=size.chosen,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=BALANCE,
        moe_router_dtype=size.precision if size.precision == "fp64" else None,
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=size.capacity or None,
        moe_pad_expert_input_to_capacity=padded,
        moe_token_drop_policy="position",
        expert_model_parallel_size=RANKS,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=weights["router"].dtype,
    )
    layer = build_module(get_moe_module_spec(use_te=False, num_experts=size.experts), config=settings, layer_number=1)
    with torch.no_grad():
        layer.router.weight.copy_(weights["router"])
        for i, expert in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
            _fill(expert, *(weights[f"experts.{name}"][i] for name in ("gate", "up", "down")))
        if size.shared:
            _fill(layer.shared_experts, *(weights[f"shared.{name}"] for name in ("gate", "up", "down")))
    return layer


def _fill(mlp: Any, gate: Tensor, up: Tensor, down: Tensor) -> None:
    mlp.linear_fc1.weight.copy_(torch.cat([gate, up]))
    mlp.linear_fc2.weight.copy_(down)


def _built(size: Size, inputs: Given, padded: bool) -> Layer:
    x, gradient = inputs.x.clone().requires_grad_(), inputs.gradient
    layer = build_layer(size, inputs.weights, padded)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y, _ = layer(x)
        out = x + y
        out.backward(gradient)
        return out.detach()

    def gradients() -> Mapping[str, Tensor]:
        named = {"x": x.grad, "router": layer.router.weight.grad}
        each = {f"experts.{name}": [] for name in ("gate", "up", "down")}
        for mlp in layer.experts.local_experts:
            for parts, g in zip(each.values(), _gradients(mlp), strict=True):
                parts.append(g)
        named |= {name: torch.stack(parts) for name, parts in each.items()}
        if size.shared:
            named |= dict(
                zip(("shared.gate", "shared.up", "shared.down"), _gradients(layer.shared_experts), strict=True)
            )
        return named

    return Layer(step, gradients)


def _gradients(mlp: Any) -> tuple[Tensor, ...]:
    return (*mlp.linear_fc1.weight.grad.chunk(2), mlp.linear_fc2.weight.grad)


def dropping(size: Size, communicator: Communicator, inputs: Given) -> Layer:
    """Build the layer that computes the tokens that are there."""
    return _built(size, inputs, padded=False)


def padding(size: Size, communicator: Communicator, inputs: Given) -> Layer:
    """Build the layer that computes all slots of a capacity."""
    return _built(size, inputs, padded=True)
