"""Models by name. A model is a class with `sizes`, `parameters()` and `forward(ops, tokens, labels)`."""

from collections.abc import Callable
from typing import Any

from platform.checks import allow
from platform.config import Model as ModelConfig
from platform.model.decoder import Decoder
from platform.model.two_layer import TwoLayer

MODELS: dict[str, Any] = {"decoder": Decoder, "two_layer": TwoLayer}


def register_model(name: str, model: Callable[[ModelConfig], Any]) -> None:
    """Makes `model.kind=NAME` known: `model(config.model)` is what `platform.plan.plan.Model` asks for."""
    MODELS[name] = model
    allow("model.kind", name)


def build(config: ModelConfig) -> Any:
    return MODELS[config.kind](config)
