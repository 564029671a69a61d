"""Length ramp: how long the sequences of each training step are, as a function of the step alone.

A run that trains on short sequences first spends less on attention, and learns what short contexts teach (BERT, Devlin
et al. 2018, A.2). `STEP:LENGTH`: once STEP updates are done, sequences have LENGTH tokens.

    train.length_ramp=[0:256,200:512,400:1024] model.length=1024 train.global_batch=8

    steps                    1-200   201-400   from 401
    tokens of a sequence       256       512       1024
    sequences                   32        16          8
    samples of 1024 tokens       8         8          8

A sample has model.length tokens of the corpus in every step: here it is cut into *pieces*, sequences one after another.
So a step has the same tokens and labels as without a ramp. An epoch has each token once, at any lengths, and
train.global_batch and train.microbatch count samples in all steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from platform.config.fields import Config
from platform.config.groups.train_group import Train


class LengthPhase(NamedTuple):
    """Consecutive training steps whose sequences have one length: the first step, from 1, and the length in tokens."""

    step: int
    length: int


def ramp_of(train: Train) -> list[LengthPhase]:
    """Return the phases that train.length_ramp gives a run, as the user has written them; [] for none."""
    pairs = (entry.partition(":") for entry in train.length_ramp)
    return [LengthPhase(int(step) + 1, int(length)) for step, _, length in pairs]


def phases_of(config: Config) -> Sequence[LengthPhase]:
    """Return the phases of a run whose sequences grow, each with one length; the last has no end."""
    return ramp_of(config.train) or [LengthPhase(1, config.model.length)]


def length_at(config: Config, step: int) -> int:
    """Return the tokens of each sequence that training step `step` (from 1) of a configured run takes."""
    found = phases_of(config)
    return found[max(0, bisect_right(found, step, key=lambda phase: phase.step) - 1)].length


def lengths_from(config: Config, step: int) -> list[int]:
    """Return the lengths of sequences from training step `step` (from 1) of a configured run on, ascending."""
    now = length_at(config, step)
    return [phase.length for phase in phases_of(config) if phase.length >= now]


def at_length(config: Config, length: int) -> Config:
    """Return the configuration of a run whose sequences always have `length` tokens, and its steps as many as ever."""
    train, pieces = config.train, config.model.length // length
    counts = {name: getattr(train, name) * pieces for name in ("global_batch", "microbatch", "ramp_from", "ramp_by",
                                                               "ramp_samples")}  # fmt: skip
    model = replace(config.model, length=length)
    return replace(config, model=model, train=replace(train, **counts, length_ramp=[]))
