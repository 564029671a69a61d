"""Batch sizes that grow: which samples each step takes."""

from __future__ import annotations

import random

import pytest

from platform.config.groups import Train
from platform.config.ramps import batch_phases, list_batch_sizes, step_sample_range


def ramp(full: int, start: int, by: int, samples: int) -> Train:
    return Train(global_batch=full, ramp_from=start, ramp_by=by, ramp_samples=samples)


def by_counting(train: Train, steps: int) -> list[tuple[int, int]]:
    """As Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator counts: the size follows from the samples so far."""
    sizes = (train.global_batch - train.ramp_from) // train.ramp_by
    stretches, consumed = [], 0
    for _ in range(steps):
        done = min(sizes, consumed * sizes // train.ramp_samples)
        end = consumed + train.ramp_from + train.ramp_by * done
        stretches.append((consumed, end))
        consumed = end
    return stretches


def test_the_worked_table():
    train = ramp(6, 2, 2, 8)
    assert [step_sample_range(train, step) for step in range(1, 6)] == [(0, 2), (2, 4), (4, 8), (8, 14), (14, 20)]
    assert list_batch_sizes(train) == [2, 4, 6]


def test_a_batch_that_does_not_grow():
    assert [step_sample_range(Train(global_batch=3), step) for step in (1, 2, 1000)] == [(0, 3), (3, 6), (2997, 3000)]


@pytest.mark.parametrize("seed", range(200))
def test_every_step_takes_what_counting_gives(seed):
    draw = random.Random(seed)
    by, start, sizes = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9)
    train = ramp(start + by * sizes, start, by, draw.randint(1, 400))
    assert [step_sample_range(train, step) for step in range(1, 150)] == by_counting(train, 149)


def test_a_table_is_as_long_as_its_sizes():
    train = ramp(1536, 16, 16, 6_000_000)
    assert len(batch_phases(train)) == 96
    first, end = step_sample_range(train, 10**9)
    assert end - first == 1536
