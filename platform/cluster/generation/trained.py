"""Trained model that a command names: its weights, configuration and tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from platform.boundary.files.file_storage import open_storage
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, as_refusal, rephrasing, violation
from platform.boundary.schema import Malformed
from platform.checkpoint.storage import catalogue
from platform.checkpoint.storage.carried import read_carried
from platform.checkpoint.storage.manifest import Refused
from platform.cluster.run import traces
from platform.config.fields import Config, Model
from platform.config.groups.data_group import Data
from platform.train.recovery import urls
from platform.weights.beside import GENERATION, beside
from platform.weights.folder import CONFIG, SavedModel
from platform.weights.importing import keys_of
from platform.weights.translate import stored_model

NAME = "CHECKPOINT"


@dataclass(frozen=True)
class TrainedModel:
    """Model whose weights are at `url` (for train.init). `data`: its training data, None if unknown; `files`: contents
    of its tokenizer's files and others beside its weights, by name, {} if it has none."""

    url: str
    model: Model
    data: Data | None = None
    seed: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def generation(self) -> bytes:
        """Return the contents of generation_config.json beside the model's weights, b"" if there is none."""
        return self.files.get(GENERATION, b"")


def find_trained(given: str) -> TrainedModel:
    """Find the trained model that `given` names: the directory of a run, a storage of checkpoints, which stands for its
    newest, one checkpoint, or a folder that transformers saved; paths or URLs. Only documents are read. Raises
    ConfigError."""
    url = given if "://" in given else os.path.abspath(os.path.expanduser(given))
    local = Path(url)
    if url.endswith(".safetensors"):
        return _of_folder(url)
    if "://" not in url and (local / traces.CONFIG).is_file():
        return _of_checkpoint(_of_run(local))
    with as_refusal(NAME, bare_url(given), OSError, why="cannot be read: {}"):
        found = open_storage(url, NAME).list("")
    if not found:
        legal = ["a run directory", "a checkpoint's URL", "a folder that transformers saved"]
        raise ConfigError(violation(NAME, bare_url(given), "there is nothing", legal))
    return _of_folder(url) if CONFIG in found else _of_checkpoint(url)


def _of_run(directory: Path) -> str:
    """Return the storage in which the run in a directory has its trained model's checkpoints. Raises ConfigError."""
    with as_refusal(NAME, directory, OSError, Malformed, why="its config.yaml cannot be read ({})"):
        config = traces.configuration(directory)
        assert config
    config.run.dir = str(directory)
    return urls.home(config)


def _of_folder(url: str) -> TrainedModel:
    """Return the trained model that transformers saved in the folder at `url`."""
    saved = SavedModel(url, NAME)
    files, _ = beside(saved, NAME)
    ends = saved.config.get("eos_token_id")
    if GENERATION not in files and isinstance(ends, list):  # as older models say it
        files[GENERATION] = json.dumps({"eos_token_id": ends}).encode()
    return TrainedModel(url, Model(**keys_of(saved)), files=files)


def _of_checkpoint(url: str) -> TrainedModel:
    """Return the trained model in a checkpoint, or in the newest good checkpoint of a storage."""
    with as_refusal(NAME, bare_url(url), Refused, OSError):
        storage, name, manifest = catalogue.select(url, NAME, none="holds no checkpoint")
        identity = manifest.meta.identity
        files = read_carried(storage, name, manifest)
    with rephrasing(lambda line: violation(NAME, bare_url(url), line)):
        model = stored_model(identity)
    given = identity.get("data")
    data = Config.from_dict({"data": given}).data if isinstance(given, dict) else None
    return TrainedModel(
        url if url.rstrip("/").endswith(name) else f"{url.rstrip('/')}/{name}", model, data, manifest.meta.seed, files
    )
