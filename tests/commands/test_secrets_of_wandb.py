"""What a run with Weights & Biases leaves on disk, beyond its own directory: not one byte of it tells a secret."""

from __future__ import annotations

import os
import random
import sys

import pytest

from tests.commands.test_secrets import TINY, environment, leaks
from tests.harness.commands import in_this_process

__all__ = ["environment"]
FILES_OF_WANDB = (".wandb", "debug.log", "wandb-metadata.json", "config.yaml")


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_no_file_of_a_run_with_wandb_tells_a_secret(tmp_path, environment, monkeypatch, seed):
    """Values of resolvers, credentials of URLs and keys of S3, as typed and as the environment has them: nowhere in
    the files of the run, of W&B's client (its logs and caches too) or in temporary ones."""
    known = environment(seed, "A_VALUE", "A_PLACE", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY")
    monkeypatch.setenv("WANDB_API_KEY", f"{random.Random(seed).getrandbits(160):040x}")
    known["WANDB_API_KEY"] = os.environ["WANDB_API_KEY"]
    known |= {"user": f"us{seed}" * 4, "password": f"pa.ss-w{seed}rd-of-mine", "signature": f"si-gn{seed}a-ture-token"}
    places = {name: tmp_path / name.lower() for name in ("HOME", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR",
                                                         "WANDB_DATA_DIR", "TMPDIR", "XDG_CACHE_HOME")}  # fmt: skip
    for name, place in places.items():
        place.mkdir()
        monkeypatch.setenv(name, str(place))
    url = f"memory://{known['user']}:{known['password']}@wandb{seed}/a?X-Amz-Signature={known['signature']}"
    arguments = [
        *(*TINY, "monitor=wandb", "monitor.project=p", "run.dir=run", f"checkpoint.url='{url}'"),
        *("data.field=${oc.env:A_VALUE}", "data.cache=/nowhere/${oc.env:A_PLACE}"),
    ]
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])  # W&B looks there
    done = in_this_process(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(any(path.name.endswith(end) for path in files) for end in FILES_OF_WANDB[:2]), files
    for name, value in known.items():
        assert not leaks(value, done.stdout + done.stderr, tmp_path), name


@pytest.mark.full
def test_the_name_of_a_project_is_no_secret(tmp_path, environment, monkeypatch):
    """As SECURITY.md says; the run's own files keep the reference all the same."""
    value = environment(3, "A_PROJECT")["A_PROJECT"].replace("/", "-")
    for sign in "\\#?%:":  # no name of a project has these
        value = value.replace(sign, "-")
    monkeypatch.setenv("A_PROJECT", value)
    arguments = [*TINY, "monitor=wandb", "monitor.project=${oc.env:A_PROJECT}", "run.dir=run"]
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    done = in_this_process(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    places = leaks(value, done.stdout + done.stderr, tmp_path)
    assert places and all("wandb" in place.removeprefix(str(tmp_path)) for place in places), places
