"""Bad files of the user's own, bad flags, and a refusal as the user sees it: status 2, soon, nothing left."""

import os
import subprocess
import sys
import time

import pytest

from platform import launch

# Files of the user's own.

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES = {
    "itself": ("# @package _global_\ndefaults: [itself]\n", "includes itself"),
    "loop": ("# @package _global_\nextend: &a [*a]\n", "holds itself"),
    "bomb": (f"# @package _global_\n{BOMB}", "more than 20000 values"),
    "deep": ("# @package _global_\na: " + "[" * 100 + "]" * 100, "deeper than 30"),
    "deeper": ("# @package _global_\na: " + "[" * 30_000 + "]" * 30_000, "deeper than 30"),
    "large": ("# @package _global_\n" + "# x\n" * 20_000, "bytes"),
    "listing": ("- a\n- b\n", "holds a list"),
    "words": ("just words\n", "holds a str"),
    "latin": (b"# @package _global_\nseed: caf\xe9\n", "not UTF-8"),
    "nul": (b"seed: \0\n", "special characters"),
    "torn": ("# @package _global_\ntrain: {steps: 9\n", "while parsing"),
    "tag": ("# @package _global_\nseed: !!python/object/apply:os.getpid []\n", "could not determine a constructor"),
    "twice": ("# @package _global_\nseed: 1\nseed: 2\n", "duplicate key"),
    "typo": ("# @package _global_\ntrain: {stepz: 9}\n", "train.stepz: unknown key; nearest legal: train.steps"),
    "type": ("# @package _global_\ntrain: {steps: many}\n", "train.steps: must be an integer"),
    "nothing": ("# @package _global_\ntrain: {steps: '${nope}'}\n", "nope"),
    "absent": ("# @package _global_\ndefaults: [{override /model: nope}]\n", "unknown; nearest legal: "),
}


@pytest.mark.parametrize("name", FILES)
def test_an_own_file(tmp_path, capsys, name):
    content, said = FILES[name]
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.thread_time()
    assert launch.main(["--config-dir", str(tmp_path / "own"), f"+experiment={name}"]) == 2
    assert time.thread_time() - began < 3.0
    lines = capsys.readouterr().err.splitlines()
    assert any(said in line for line in lines), lines
    assert any(line.startswith((f"config: experiment={name}: ", "config: model=nope")) for line in lines), lines


def test_own_files_that_are_no_files(tmp_path, capsys):
    (tmp_path / "experiment" / "folder.yaml").mkdir(parents=True)
    os.mkfifo(tmp_path / "experiment" / "pipe.yaml")
    (tmp_path / "file").write_text("")
    for name in ("folder", "pipe"):
        assert launch.main(["--config-dir", str(tmp_path), f"+experiment={name}"]) == 2
        assert f"experiment={name}: unknown" in capsys.readouterr().err
    for folder in ("file", "nowhere"):
        assert launch.main(["--config-dir", str(tmp_path / folder), "+experiment=gpt_quick"]) == 2
        assert f"--config-dir={tmp_path / folder}: no such directory" in capsys.readouterr().err


# The command line itself.

FLAGS = [
    ["--nosuch"],
    ["-x"],
    ["--cfg"],
    ["--cfg", "nosuch"],
    ["--config-path", "x", "+experiment=gpt_quick"],
    ["--config-name=x", "+experiment=gpt_quick"],
    ["--package"],
    [],
]


@pytest.mark.parametrize("arguments", FLAGS)
def test_a_flag(capsys, arguments):
    assert launch.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err and all(line.startswith("config: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["train.stepz=1", "modle=x", "optimizer.lr=fast", "seed=-1"], "train.stepz=1: unknown key"),
        (["tensor.axes.t=3"], "model.heads=4 is not divisible"),
        (["model.d_model=999999999999"], "model.d_model=999999999999: must be <= 1048576"),
        (["run.dir=a\udcff"], "run.dir="),
        (["checkpoint.url=ftp://127.0.0.1:9/x"], "checkpoint.url=ftp://127.0.0.1:9/x: cannot be used"),
    ],
)
def test_the_command(tmp_path, arguments, start):
    """As users type it: soon by CPU time, which a busy machine does not stretch, and nothing stays behind."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "platform.launch", "+experiment=gpt_quick", *map(os.fsencode, arguments)],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    after = os.times()
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"config: {start}") and all(line.startswith("config: ") for line in lines)
    assert sum(after[2:4]) - sum(before[2:4]) < 3.0
    assert list(tmp_path.iterdir()) == []
