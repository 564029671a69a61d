"""Bidirectional Transformer encoder with a masked-token objective: BERT (Devlin et al. 2018) without its segments, its
second objective and its transform in front of the head."""

from platform.model.blocks import SingleStack


class Encoder(SingleStack):
    """Masked-token model: `forward` maps `tokens` to the summed cross-entropy of the `labels` to be predicted (the
    others are padding), both data tensors [length, batch]."""

    causal = False
