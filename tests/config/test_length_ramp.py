"""Sequences that grow: how long they are in each step, and what a configuration of one length is."""

from __future__ import annotations

import pytest

from platform.config.fields import Config
from platform.config.ramps import (
    find_sequence_length,
    fix_sequence_length,
    length_phases,
    list_remaining_lengths,
    step_sample_range,
)
from platform.config.validation import violations_of_configuration
from platform.launch import compose_config


def ramp(*entries: str, length: int = 1024, **train: int) -> Config:
    c = Config()
    c.model.length, c.model.position_rows, c.train.length_ramp = length, length, list(entries)
    vars(c.train).update(train)
    return c


def test_the_worked_table():
    c = ramp("0:256", "200:512", "400:1024", global_batch=8)
    at = {1: 256, 200: 256, 201: 512, 400: 512, 401: 1024, 10**9: 1024}
    assert {step: find_sequence_length(c, step) for step in at} == at
    assert {n: fix_sequence_length(c, n).train.global_batch for n in (256, 512, 1024)} == {256: 32, 512: 16, 1024: 8}
    assert [list_remaining_lengths(c, step) for step in (1, 200, 201, 401)] == [
        [256, 512, 1024], [256, 512, 1024], [512, 1024], [1024]
    ]  # fmt: skip
    assert violations_of_configuration(c) == []


def test_without_a_ramp_all_steps_have_the_length_of_the_model():
    assert [find_sequence_length(Config(), step) for step in (1, 2, 10**9)] == [Config().model.length] * 3
    assert fix_sequence_length(Config(), Config().model.length) == Config() and len(length_phases(Config())) == 1


def test_a_step_has_as_many_tokens_at_every_length():
    """Also where the batch grows: the first token of a step, and that behind its last, are those of other lengths."""
    c = ramp("0:8", "3:32", length=32, global_batch=6, ramp_from=2, ramp_by=2, ramp_samples=8)
    for step in range(1, 12):
        tokens = [n * 32 for n in step_sample_range(c.train, step)]
        assert [n * 8 for n in step_sample_range(fix_sequence_length(c, 8).train, step)] == tokens


def test_a_command_sets_the_rows_of_positions():
    c = compose_config(["+experiment=gpt_quick", "model.length=64", "train.length_ramp=[0:16,9:64]"])
    assert c.train.length_ramp == ["0:16", "9:64"] and c.model.position_rows == 64
    assert compose_config(["+experiment=gpt_quick", "model.length=64"]).model.position_rows == 0


@pytest.mark.parametrize(
    ("entries", "lines"),
    [
        (("5:16", "9:64"), ["5:16: the first length is that of the first steps; nearest legal: 0:16"]),
        (("0:16", "9:24", "9:64"), [
            "9:24: must divide model.length=64, so that pieces of samples are sequences;"
            " nearest legal: 9:16 or 9:32 or 9:8", "9:64: must begin after 9:24 does; nearest legal: 10:64"]),
        (("0:32", "9:16", "12:64"), ["9:16: must be longer than the 32 tokens before; nearest legal: 9:64"]),
        (("0:8", "9:32"), ["9:32: the last length must be model.length=64; nearest legal: 9:64 or model.length=32"]),
    ],
)  # fmt: skip
def test_mistakes_are_refused_together_with_the_nearest_legal(entries, lines):
    violations = violations_of_configuration(ramp(*entries, length=64))
    assert [line.replace(", ", " or ") for line in violations] == [
        f"train.length_ramp={line}".replace(", ", " or ") for line in lines
    ]
