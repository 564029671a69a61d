"""What the libraries of an object store log of a run has no secret in it, at the level at which a run logs."""

from __future__ import annotations

import logging
import random

from tests.commands.test_secrets import TINY, leaks, secret
from tests.harness.commands import in_this_process

SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def test_no_log_of_a_store_tells_a_secret(s3, tmp_path, monkeypatch, caplog):
    draw = random.Random(0)
    values = {name: secret(draw, "/+=") for name in SECRETS}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        done = in_this_process(*TINY, "run.dir=run", f"checkpoint.url={s3}/saved", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout + done.stderr + caplog.text
    assert caplog.records, "the store's libraries, or ours, have logged"
    for value in values.values():
        assert leaks(value, text, tmp_path) == []


def test_negative_control_a_token_in_a_log_is_seen(s3, tmp_path, monkeypatch, caplog):
    """botocore tells all headers at its level for debugging, which no run sets."""
    token = secret(random.Random(1), "/+=")
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    with caplog.at_level(logging.DEBUG):
        in_this_process(*TINY, "run.dir=run", f"checkpoint.url={s3}/saved", cwd=tmp_path)
    assert leaks(token, caplog.text) == ["output"]
