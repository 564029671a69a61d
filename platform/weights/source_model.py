"""Completion of a configuration from the model that its `model.source` names, as transformers saved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from platform.boundary.refusals import ConfigError, violation
from platform.config.fields import Config
from platform.data.tokenizers.tokenizer_files import has_tokenizer
from platform.weights import FROM_HF
from platform.weights.importing import source_keys


def complete_model(config: Config, typed: Mapping[str, Any]) -> list[str]:
    """Set the keys of the model in place from what its `model.source` says, except keys that the user typed, and
    train.init from it too; the configuration then says it all, without a source. Returns one line per mistake."""
    source, named = config.model.source, config.model.kind == FROM_HF
    config.model.kind = "decoder" if named else config.model.kind
    if not source:
        line = violation("model.source", "", "model=from_hf needs a folder that transformers saved", ["FOLDER"])
        return [line] if named else []
    try:
        found = source_keys(source, "model.source")
    except ConfigError as error:
        return error.violations
    for key, value in found.items():
        if f"model.{key}" not in typed:
            setattr(config.model, key, value)
    config.train.init, config.model.source = config.train.init or source, ""
    said = "data.tokenizer" in typed or config.data.tokenizer != "train" or config.data.kind == "synthetic"
    return [] if said else _complete_tokenizer(config, source)


def _complete_tokenizer(config: Config, source: str) -> list[str]:
    """Set data.tokenizer in place to that which lies beside the model at `source`. Returns a refusal line if there is
    none: a model reads the tokens that it was trained on."""
    folder = source.rstrip("/").rpartition("/")[0] if source.rstrip("/").endswith(".safetensors") else source
    if not has_tokenizer(folder):
        reason = f"there is none beside the model in {folder}, and one that is trained gives other tokens than it knows"
        return [violation("data.tokenizer", "", reason, ["data.tokenizer=PATH", "data.tokenizer=train"])]
    config.data.tokenizer = folder
    return []
