"""Averaged weights of a checkpoint (train.ema) in the place of the trained ones."""

from __future__ import annotations

from dataclasses import replace

from platform.checkpoint.storage.manifest import Manifest, Refused
from platform.optimizer.optimizers import AVERAGE


def with_averages(manifest: Manifest) -> Manifest:
    """Return the manifest of a checkpoint with averaged weights (train.ema) in place of the trained ones; frozen
    weights, which have none, are as they are. Raises Refused if the checkpoint holds no averages."""
    averages = {n.partition(".")[2]: t for n, t in manifest.tensors.items() if n.startswith(f"{AVERAGE}.")}
    if not averages:
        raise Refused("holds no averaged weights: its run had train.ema=0")
    named = {f"model.{n}": replace(t, name=f"model.{n}") for n, t in averages.items()}
    return replace(manifest, tensors={**manifest.tensors, **named})
