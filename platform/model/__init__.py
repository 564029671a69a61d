"""Registry of models by name. A model is a class with `sizes`, `inputs`, `parameters()` and `forward(ops, inputs)`,
written in named dims against `Ops`; no rank, layout or collective is named here.

Losses that users register by name are kept here too, and tried on a few labels before a run.

Its files in reading order: layers, attention, delta_net, feed_forward, multi_token, transformer, branches, losses,
tuning.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

from platform.config.extensions import bind_settings_object, register_own_function
from platform.config.fields import OBJECTIVES
from platform.config.fields import Model as ModelConfig
from platform.config.layout_rules import allow_dims
from platform.model.branches import TwoLayer
from platform.model.transformer import Decoder, Encoder, EncoderDecoder
from platform.plan.scheme import raise_model_mistakes

MODELS: dict[str, Any] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
    "two_layer": TwoLayer,
}
SHIPPED = dict(MODELS)
MOST_KEPT = 16
_KEPT: dict[str, Any] = {}  # shipped models by their configuration; they keep what is recorded of them


def register_model(
    name: str,
    model: Callable[[ModelConfig], Any],
    objectives: Sequence[str] = ("causal",),
    dims: Iterable[str] = (),
    settings: type | None = None,
) -> None:
    """Register a user's model class as `model.kind=NAME`: `model(config.model)` must satisfy
    `platform.plan.chunks.RecordableModel`. `objectives`: the values of data.objective that it allows, the default
    first. `dims`: dims that only this model has, which tensor.layout may then split. `settings`: a dataclass of
    model.settings, which `model` gets as `settings`."""
    register_own_function("model.kind", name, settings, model)
    MODELS[name] = model
    OBJECTIVES[name] = objectives
    allow_dims(dims)


def build_model(config: ModelConfig) -> Any:
    """Return the model that `config.kind` names. Raises ModelMistake for an error in a user's own model class."""
    if MODELS[config.kind] is SHIPPED.get(config.kind):
        return _build_shipped_model_once(config)
    model = bind_settings_object(MODELS[config.kind], "model.kind", config.kind, config.settings)
    with raise_model_mistakes(MODELS[config.kind]):
        return model(config)


def _build_shipped_model_once(config: ModelConfig) -> Any:
    """Return the shipped model of a configuration, which may change afterwards."""
    if (key := repr(config)) not in _KEPT:
        if len(_KEPT) >= MOST_KEPT:
            _KEPT.clear()
        _KEPT[key] = SHIPPED[config.kind](deepcopy(config))
    return _KEPT[key]


def forget_models() -> None:
    """Forget the shipped models that this process has constructed, and their recordings."""
    _KEPT.clear()
