"""What is refused late leaves nothing behind, and a storage that does not answer is known soon."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from platform import launch
from platform.boundary.refusals import ConfigError
from platform.cluster import origin
from platform.config.fields import Config

SMALL = ["+experiment=gpt_quick", "model.layers=1", "model.length=8", "model.vocab=300", "parallel.data=1",
         "tensor=serial", "cluster=processes", "eval.every=0", "monitor.sample=0"]  # fmt: skip


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A working and home directory of one's own, in which only what the test writes lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


def left(folder: Path, known: list[str]) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.relative_to(folder).parts[0] not in known)


LATE = {  # the mistake shows in the middle of a file, when the run directory has been claimed
    "a torn byte": (b"some words here\n" * 20_000 + b"\xff", "not UTF-8"),
    "too little text": (b"two words", "a sample is 9 tokens"),
    "a NUL": (b"some words here\n" * 20_000 + b"\0", "a binary file"),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("more", [[], ["monitor=wandb"], ["checkpoint.every=1", "checkpoint.url=saved/there"]], ids=str)
def test_data_that_is_refused_late(home, capsys, name, more):
    content, said = LATE[name]
    (home / "text.txt").write_bytes(content)
    assert launch.main([*SMALL, "data=text", "data.path=text.txt", "run.dir=a/b/run", *more]) == 2
    err = capsys.readouterr().err.splitlines()
    assert any(line.startswith("config: ") and said in line for line in err), err
    tokens = ["cache"] if name == "too little text" else []  # well tokenised: the next command finds them
    assert left(home, ["text.txt", *tokens]) == []


def test_a_directory_of_the_users_stays_as_it_was(home, capsys):
    (home / "text.txt").write_bytes(LATE["a torn byte"][0])
    (home / "run" / "logs").mkdir(parents=True)
    (home / "run" / "mine.txt").write_text("mine")
    assert launch.main([*SMALL, "data=text", "data.path=text.txt", "run.dir=run"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert left(home, ["text.txt"]) == ["run", "run/logs", "run/mine.txt"]


@pytest.fixture
def silent():
    """The port of a listener that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def closed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return port


@pytest.mark.parametrize("kind", ["silent", "closed"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_an_endpoint_that_is_dead(monkeypatch, request, kind, resume):
    pytest.importorskip("s3fs")
    monkeypatch.setattr(origin, "ANSWER_SECONDS", 2.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{request.getfixturevalue(kind)}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    config = Config()
    config.checkpoint.url, config.checkpoint.resume = "s3://bucket/run", resume
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        origin.find_resume_checkpoint(config)
        origin.check_storage_writable(config)
    assert time.monotonic() - began < 15.0
    [line] = error.value.violations
    assert line.startswith("checkpoint.url=s3://bucket/run: cannot be reached: ") and line.endswith("a path")


def test_an_answer_is_waited_for_so_long():
    assert 5.0 <= origin.ANSWER_SECONDS <= 12.0  # and 15 s are for the whole refusal


def test_a_storage_that_answers_slowly_is_none_that_is_dead(monkeypatch, tmp_path):
    monkeypatch.setattr(origin, "ANSWER_SECONDS", 5.0)
    real = origin.open_storage

    def slow(url, key):
        threading.Event().wait(0.5)
        return real(url, key)

    monkeypatch.setattr(origin, "open_storage", slow)
    assert origin.open_reachable_storage(str(tmp_path / "x"), "checkpoint.url").list_sizes("") == {}
    assert os.listdir(tmp_path) == []


def test_a_probe_leaves_no_directory(tmp_path):
    config = Config()
    config.checkpoint.url = str(tmp_path / "a" / "b")
    origin.check_storage_writable(config)
    assert os.listdir(tmp_path) == []
