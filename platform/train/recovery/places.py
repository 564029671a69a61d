"""Where a run's checkpoints go and come from."""

from __future__ import annotations

import os

from platform.checkpoint import split
from platform.config.fields import RESUME, Config


def home(config: Config) -> str:
    """The URL of the storage that checkpoints are written to."""
    return config.checkpoint.url or os.path.join(config.run.dir, "checkpoints")


def saves(config: Config) -> bool:
    """Whether checkpoints are written at all."""
    return bool(config.checkpoint.every or config.train.stop_at or config.checkpoint.on_stop)


def source(config: Config) -> tuple[str, str | None]:
    """The URL of the storage that the run resumes from, and the name of the checkpoint in it where one is named."""
    return (home(config), None) if config.checkpoint.resume in RESUME else split(config.checkpoint.resume)
