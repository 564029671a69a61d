"""Storage locations of a run's checkpoints: the one it saves to and the one it resumes from."""

from __future__ import annotations

import os

from platform.boundary.redaction import bare_url
from platform.checkpoint.storage.catalogue import split_url
from platform.config.fields import Config
from platform.config.groups.execution_group import RESUME


def home(config: Config) -> str:
    """Return the URL to which a run saves checkpoints: checkpoint.url, or run.dir's folder `checkpoints`."""
    return config.checkpoint.url or os.path.join(config.run.dir, "checkpoints")


def storage_key(config: Config) -> str:
    """Return the setting that says where a run saves its checkpoints, KEY=VALUE, for people."""
    key = "checkpoint.url" if config.checkpoint.url else "run.dir"
    return f"{key}={bare_url(config.checkpoint.url or config.run.dir)}"


def saves(config: Config) -> bool:
    """Return True if a run ever saves checkpoints: regularly, at train.stop_at, or when stopped."""
    return bool(config.checkpoint.every or config.train.stop_at or config.checkpoint.on_stop)


def source(config: Config) -> tuple[str, str | None]:
    """Return the URL of the storage that a run resumes from, and the name of the checkpoint in it that
    checkpoint.resume names, None if the newest is meant. By default the storage is the one that the run saves to."""
    return (home(config), None) if config.checkpoint.resume in RESUME else split_url(config.checkpoint.resume)
