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
from functools import lru_cache
from typing import NamedTuple

from platform.config.fields import Config
from platform.config.groups import Train


class LengthPhase(NamedTuple):
    """Consecutive training steps whose sequences have one length: the first step, from 1, and the length in tokens."""

    step: int
    length: int


def parse_length_ramp(train: Train) -> list[LengthPhase]:
    """Return the phases that train.length_ramp gives a run, as the user has written them; [] for none."""
    pairs = (entry.partition(":") for entry in train.length_ramp)
    return [LengthPhase(int(step) + 1, int(length)) for step, _, length in pairs]


def length_phases(config: Config) -> Sequence[LengthPhase]:
    """Return the phases of a run whose sequences grow, each with one length; the last has no end."""
    return parse_length_ramp(config.train) or [LengthPhase(1, config.model.length)]


def find_sequence_length(config: Config, step: int) -> int:
    """Return the tokens of each sequence that training step `step` (from 1) of a configured run takes."""
    ramp_phases = length_phases(config)
    return ramp_phases[max(0, bisect_right(ramp_phases, step, key=lambda phase: phase.step) - 1)].length


def list_remaining_lengths(config: Config, step: int) -> list[int]:
    """Return the lengths of sequences from training step `step` (from 1) of a configured run on, ascending."""
    present_length = find_sequence_length(config, step)
    return [phase.length for phase in length_phases(config) if phase.length >= present_length]


def fix_sequence_length(config: Config, length: int) -> Config:
    """Return the configuration of a run whose sequences always have `length` tokens, and its steps as many as ever."""
    train, pieces = config.train, config.model.length // length
    counts = {name: getattr(train, name) * pieces for name in ("global_batch", "microbatch", "ramp_from", "ramp_by",
                                                               "ramp_samples")}  # fmt: skip
    model = replace(config.model, length=length)
    return replace(config, model=model, train=replace(train, **counts, length_ramp=[]))


# Batch-size ramp: how many sequences each training step takes, and which, as functions of the step alone.
#
# GPT-3 (Brown et al. 2020, 2.3) and its successors begin with small batches. Megatron-LM's `--rampup-batch-size` names
# the same three numbers: the first size, what it grows by, and the samples over which it grows.
#
#     train.ramp_from=2 train.ramp_by=2 train.ramp_samples=8 train.global_batch=6
#
#     step             1  2   3  4   5   6 ...
#     sequences        2  2   4  6   6   6
#     samples before   0  2   4  8  14  20


class BatchPhase(NamedTuple):
    """Consecutive training steps with one batch size: the first of them, from 1; the samples consumed before it; and
    the sequences of each."""

    step: int
    sample: int
    batch: int


def batch_phases(train: Train) -> Sequence[BatchPhase]:
    """Return the phases of a run whose configured batch size grows, each with one size; the last has no end."""
    return _compute_batch_phases(train.global_batch, train.ramp_from, train.ramp_by, train.ramp_samples)


@lru_cache(maxsize=16)
def _compute_batch_phases(full: int, start: int, by: int, samples: int) -> Sequence[BatchPhase]:
    """Return the phases of configured batch sizes, from `start` by steps of `by` to `full`, over `samples` samples."""
    if not start:
        return (BatchPhase(1, 0, full),)
    ramp_phases, step, sample, sizes = [], 1, 0, range(start, full, by)
    for number, batch in enumerate(sizes, 1):
        end = -(-samples * number // len(sizes))  # the first sample of the next size
        if steps := max(0, -(-(end - sample) // batch)):
            ramp_phases.append(BatchPhase(step, sample, batch))
            step, sample = step + steps, sample + steps * batch
    return (*ramp_phases, BatchPhase(step, sample, full))


def list_batch_sizes(train: Train) -> list[int]:
    """Return the batch sizes that the configuration gives a run, ascending; the last is train.global_batch."""
    return [phase.batch for phase in batch_phases(train)]


def find_batch_size(train: Train, step: int) -> int:
    """Return the batch size that the configuration gives training step `step` (from 1), in sequences."""
    return _find_batch_phase(train, step).batch


def count_earlier_samples(train: Train, step: int) -> int:
    """Return how many samples the training steps before `step` (from 1) consume, by the configured batch sizes."""
    phase = _find_batch_phase(train, step)
    return phase.sample + (step - phase.step) * phase.batch


def step_sample_range(train: Train, step: int) -> tuple[int, int]:
    """Return the samples [first, end) of the global order that training step `step` (from 1) is configured to take."""
    first = count_earlier_samples(train, step)
    return first, first + find_batch_size(train, step)


def _find_batch_phase(train: Train, step: int) -> BatchPhase:
    """Return the phase of the configured, growing batch size that training step `step` (from 1) is in."""
    ramp_phases = batch_phases(train)
    return ramp_phases[max(0, bisect_right(ramp_phases, step, key=lambda phase: phase.step) - 1)]
