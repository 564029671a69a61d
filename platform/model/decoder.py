"""Transformer decoder: by configuration GPT-2/3 (learned positions, LayerNorm, GELU, tied head) or Llama (rotary
positions, RMSNorm, SwiGLU, grouped queries)."""

from platform.model.transformer import SingleStack


class Decoder(SingleStack):
    """Causal language model: `forward` maps `tokens` to the summed cross-entropy of `labels`, both data tensors
    [length, batch]."""

    causal = True
