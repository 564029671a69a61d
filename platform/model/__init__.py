"""Models by name. A model is a class with `sizes`, `parameters()` and `forward(ops, tokens, labels)`."""

from platform.config import Model as ModelConfig
from platform.model.decoder import Decoder

MODELS = {"decoder": Decoder}


def build(config: ModelConfig) -> Decoder:
    return MODELS[config.kind](config)
