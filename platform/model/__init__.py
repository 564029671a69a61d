"""Models by name. A model is a class with `sizes`, `inputs`, `parameters()` and `forward(ops, inputs)`."""

from platform.config import Model as ModelConfig
from platform.model.decoder import Decoder
from platform.model.encoder import Encoder
from platform.model.encoder_decoder import EncoderDecoder

MODELS: dict[str, type[Decoder] | type[Encoder] | type[EncoderDecoder]] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
}


def build(config: ModelConfig) -> Decoder | Encoder | EncoderDecoder:
    return MODELS[config.kind](config)
