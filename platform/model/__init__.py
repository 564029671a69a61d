"""Models by name. A model is a class with `sizes`, `parameters()` and `forward(ops, tokens, labels)`."""

from typing import Any

from platform.config import Model as ModelConfig
from platform.model.decoder import Decoder
from platform.model.two_layer import TwoLayer

MODELS: dict[str, Any] = {"decoder": Decoder, "two_layer": TwoLayer}


def build(config: ModelConfig) -> Any:
    return MODELS[config.kind](config)
