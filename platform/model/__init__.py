"""Models by name. A model is a class with `sizes`, `inputs`, `parameters()` and `forward(ops, inputs)`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from platform.config.bounds import allow
from platform.config.fields import OBJECTIVES
from platform.config.fields import Model as ModelConfig
from platform.config.layout_map import allow_dims
from platform.model.decoder import Decoder
from platform.model.encoder import Encoder
from platform.model.encoder_decoder import EncoderDecoder
from platform.model.two_layer import TwoLayer
from platform.plan.language.mistakes import of_the_user

MODELS: dict[str, Any] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
    "two_layer": TwoLayer,
}


def register_model(
    name: str,
    model: Callable[[ModelConfig], Any],
    objectives: Sequence[str] = ("causal",),
    dims: Iterable[str] = (),
) -> None:
    """Makes `model.kind=NAME` known: `model(config.model)` is what `platform.plan.core.chunks.Model` asks for.
    `objectives`: the values that data.objective may have with it, the default first. `dims`: its own, for tensor.layout
    to split."""
    MODELS[name] = model
    OBJECTIVES[name] = objectives
    allow("model.kind", name)
    allow_dims(dims)


def build(config: ModelConfig) -> Any:
    """The model of a configuration. Raises ModelMistake for what a class of the user's own raises."""
    with of_the_user(MODELS[config.kind]):
        return MODELS[config.kind](config)
