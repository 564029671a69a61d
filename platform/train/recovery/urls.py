"""Storage locations of a run's checkpoints: the one it saves to and the one it resumes from."""

from __future__ import annotations

import os

from platform.checkpoint.storage.catalogue import split_url
from platform.config.execution import RESUME
from platform.config.fields import Config


def home(config: Config) -> str:
    """Return the URL of the storage that checkpoints are written to."""
    return config.checkpoint.url or os.path.join(config.run.dir, "checkpoints")


def saves(config: Config) -> bool:
    """Return True if the run writes checkpoints at all."""
    return bool(config.checkpoint.every or config.train.stop_at or config.checkpoint.on_stop)


def source(config: Config) -> tuple[str, str | None]:
    """Return the URL of the storage that the run resumes from, and the name of a checkpoint in it or None."""
    return (home(config), None) if config.checkpoint.resume in RESUME else split_url(config.checkpoint.resume)
