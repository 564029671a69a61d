"""Redaction of what is printed and stored; the runs by command are in tests/commands/test_secrets.py."""

from __future__ import annotations

import pytest

from platform.boundary.redaction import (
    forget_secrets,
    isolate_secrets,
    redact_secrets,
    register_environment,
    register_url_secrets,
)


@pytest.fixture(autouse=True)
def none_known():
    with isolate_secrets():
        forget_secrets()
        yield


def test_a_password_is_hidden_wherever_it_occurs():
    register_url_secrets({"checkpoint": ["s3://me:hunter22@bucket/run"]})
    assert "hunter22" not in redact_secrets("could not reach s3://me:hunter22@bucket/run with hunter22")


@pytest.mark.parametrize("word", ["x", "x+", "x:", "x:/", "${", "{"])
def test_a_long_word_takes_time_in_its_length(word):
    """In its square it would take an hour."""
    text = word * 1_000_000
    register_url_secrets([text, f"{text}s3://me:hunter22@bucket"])
    assert redact_secrets(text) == text
    assert "hunter22" not in redact_secrets(f"{text} s3://me:hunter22@bucket")


def test_variables_that_are_named_as_secrets_are_hidden():
    secret = {"WANDB_API_KEY": "0123456789", "ADDRESS": "http://me:hunter22@host"}
    register_environment(secret | {"A_TOKEN": "true", "SHELL": "bash-five"})
    assert redact_secrets("0123456789 true hunter22 bash-five") == "${oc.env:WANDB_API_KEY} true *** bash-five"
