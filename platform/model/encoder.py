"""Bidirectional Transformer encoder with a masked-token objective: BERT (Devlin et al. 2018), by configuration with its
segments and the transform in front of its head, and always without its second objective."""

from platform.model.transformer import SingleStack


class Encoder(SingleStack):
    """Masked-token model: `forward` maps `tokens` to the summed cross-entropy of the `labels` to be predicted (the
    others are padding), both data tensors [length, batch]."""

    causal = False
