"""Folder of Qwen3-8B as a laptop can have it: its description, the header of its weights before a hole in their place,
a tokenizer of bytes with the marks of its template; and conversations to tune it on."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40960, "initializer_range": 0.02,
    "rms_norm_eps": 1e-06, "use_cache": True, "tie_word_embeddings": False, "rope_theta": 1000000,
    "rope_scaling": None, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 36, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = {
    "input_layernorm": [4096], "post_attention_layernorm": [4096], "self_attn.q_norm": [128], "self_attn.k_norm": [128],
    "self_attn.q_proj": [4096, 4096], "self_attn.k_proj": [1024, 4096], "self_attn.v_proj": [1024, 4096],
    "self_attn.o_proj": [4096, 4096], "mlp.gate_proj": [12288, 4096], "mlp.up_proj": [12288, 4096],
    "mlp.down_proj": [4096, 12288],
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> None:
    """Write the folder of the model, whose weights take no room on disk."""
    shapes = {"model.embed_tokens": [151936, 4096], "model.norm": [4096], "lm_head": [151936, 4096]}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(36) for name, shape in LAYER.items()}
    write_weights(folder, CONFIG, {f"{name}.weight": shape for name, shape in shapes.items()})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path, config: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a description, and tensors of bf16 of these names and shapes that are all 0 and take no room on disk."""
    folder.mkdir(parents=True)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    (folder / "config.json").write_text(json.dumps(config))


def write_talks(path: Path, record: str) -> None:
    """Write a file of conversations: one that a page shows, and as many like it as a step and a validation need."""
    path.write_text("".join(record.replace("east", f"east {i}") + "\n" for i in range(400)))
