"""Storage locations of a run's checkpoints: the one it saves to and the one it resumes from."""

from __future__ import annotations

import os

from platform.boundary.redaction import bare_url
from platform.checkpoint.storage.catalogue import split_url
from platform.config.fields import Config
from platform.config.groups.execution_group import RESUME


def home(config: Config) -> str:
    """Return the URL to which a run's workers save checkpoints: checkpoint.url, else run.dir's `checkpoints`."""
    return config.checkpoint.url or os.path.join(config.run.dir, "checkpoints")


def storage_key(config: Config) -> str:
    """Return the setting KEY=VALUE that determines where a run saves its checkpoints, for messages to the user."""
    key = "checkpoint.url" if config.checkpoint.url else "run.dir"
    return f"{key}={bare_url(config.checkpoint.url or config.run.dir)}"


def saves(config: Config) -> bool:
    """Return True if a run ever saves checkpoints: regularly, at train.stop_at, or when stopped."""
    return bool(config.checkpoint.every or config.train.stop_at or config.checkpoint.on_stop)


def source(config: Config) -> tuple[str, str | None]:
    """Return where a run's workers resume from: the URL of the checkpoint storage, by default the one that they save
    to, and the checkpoint's name in it, None for the newest."""
    return (home(config), None) if config.checkpoint.resume in RESUME else split_url(config.checkpoint.resume)
