"""SIGKILL of an export: what it was to make is there whole, or not at all, and the same command makes it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from platform.boundary import local_files
from platform.checkpoint.__main__ import main as checkpoint
from platform.launch import main as launch
from platform.weights.__main__ import main as weights
from platform.weights.model_folder import SavedModel, is_saved_model

TINY = ("+experiment=gpt_quick cluster=inline tensor=serial parallel.data=1 model.layers=1 model.d_model=32 "
        "model.heads=2 model.length=32 model.vocab=300 train.steps=1 train.global_batch=2 train.microbatch=2 "
        "eval.every=0 monitor.sample=0 optimizer.warmup_steps=0 data=text data.path=d.txt data.cache=cache "
        "checkpoint.every=1 run.dir=run").split()  # fmt: skip
CHANGES = {"open", "write", "fsync", "replace", "rename", "rmdir", "mkdir"}  # operations before which it may die
EXPORTS = {
    "several files": (weights, "export run/checkpoints out --shard 20KB"),
    "one file": (weights, "export run/checkpoints out"),
    "into a folder": (weights, "export run/checkpoints there --shard 20KB"),
    "safetensors": (checkpoint, "export run/checkpoints out"),
    "dcp": (checkpoint, "export run/checkpoints out --format dcp"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "d.txt").write_text("a text of some words, said again and again\n" * 500)
    directory = os.getcwd()
    os.chdir(folder)
    try:
        assert launch(TINY) == 0
    finally:
        os.chdir(directory)
    return folder


class Mortal:
    """Stands for the module `os` in `platform.boundary.local_files`: the `number`-th operation is the last, and
    a write that is gets half of its bytes out."""

    def __init__(self, number: int):
        self.left = number

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in CHANGES:
            return real

        def call(*args, **more):
            self.left -= 1
            if self.left == 0:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call


def killed(command, line: str, number: int) -> bool:
    """Runs a command in a process that dies before its `number`-th change; False if it was done before."""
    if (child := os.fork()) == 0:
        status = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            local_files.os = Mortal(number)
            status = command(line.split())
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def seen(target: Path) -> dict[str, bytes]:
    """What people see of a file or folder: drafts are hidden."""
    if target.is_dir():
        return {path.name: path.read_bytes() for path in target.iterdir() if not path.name.startswith(".draft")}
    return {"": target.read_bytes()} if target.exists() else {}


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A directory with the run, and a folder that has been there before."""
    (tmp_path / "run").symlink_to(trained / "run")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "README").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dies_at_any_change(place: Path, how: str, some: int | None) -> None:
    command, line = EXPORTS[how]
    target = place / line.split()[2]
    before = seen(target)
    local_files.os = counted = Mortal(1 << 30)
    try:
        assert command(line.split()) == 0
    finally:
        local_files.os = os
    whole, most = seen(target), (1 << 30) - counted.left
    assert len(whole) > len(before) and most > 2
    moments = range(1, most + 1) if some is None else {1, *range(2, most, max(1, most // some)), most - 1, most}
    died = 0
    for number in sorted(moments):
        clear(target, before)
        died += killed(command, line, number)
        files = seen(target)
        if files != whole:
            assert not is_saved_model(str(target)) or not target.exists()
            if files != before:  # moved in part into a folder that was there: not sealed, and said
                assert "config.json" not in files and files.items() <= whole.items()
                assert command(line.split()) == 1
                clear(target, before)
            assert command(line.split()) == 0
        assert seen(target) == whole
    assert died == len(moments)


def clear(target: Path, before: dict[str, bytes]) -> None:
    if target.is_dir():
        for path in target.iterdir():
            if path.name not in before:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not before:
            target.rmdir()
    else:
        target.unlink(missing_ok=True)


def test_a_killed_export_of_weights_is_whole_or_not_there(place, capsys):
    dies_at_any_change(place, "several files", some=3)
    assert SavedModel("out").tensors


@pytest.mark.full
@pytest.mark.parametrize("how", EXPORTS)
def test_an_export_that_is_killed_at_any_change(place, capsys, how):
    dies_at_any_change(place, how, some=None)


@pytest.mark.parametrize("number", [1, 7])
def test_a_failed_export_leaves_a_folder_as_it_was(place, capsys, monkeypatch, number):
    """The first is that of a file in the draft; the seventh, when some have been moved in."""

    class Failing:
        count = 0

        def __getattr__(self, name):
            self.count += name == "replace"
            if name == "replace" and self.count == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return getattr(os, name)

    before = seen(place / "there")
    monkeypatch.setattr(local_files, "os", Failing())
    assert weights("export run/checkpoints there".split()) == 1
    assert local_files.os.count == number
    assert os.listdir(place / "there") == [*before] and seen(place / "there") == before


@pytest.mark.parametrize("first", ["several files", "one file"])
@pytest.mark.parametrize("left", ["model.safetensors.index.json", "*.safetensors"])
def test_an_export_does_not_join_other_weights(place, capsys, first, left):
    """Without its config.json, a folder is none of a model; transformers would take the weights that are left."""
    command = EXPORTS[first][1].split()
    assert weights(command) == 0
    kept = [name for name in os.listdir("out") if Path(name).match(left)]
    if not kept:
        return
    for name in {*os.listdir("out")} - {*kept}:
        os.unlink(f"out/{name}")
    before = {name: Path("out", name).read_bytes() for name in kept}
    for other in ("several files", "one file"):
        capsys.readouterr()
        assert weights(EXPORTS[other][1].split()) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"has {', '.join(sorted(kept))}" in line and line.endswith("already; name another folder")
        assert {name: Path("out", name).read_bytes() for name in os.listdir("out")} == before
