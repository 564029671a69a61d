"""What no command takes: one line that begins with its name, and status 2."""

from __future__ import annotations

import os
import random
import shlex
import string

import pytest

from platform import doctor, evaluate, generate, launch, tune
from platform.boundary.refusals import build_command_line, run_command
from platform.checkpoint.__main__ import main as checkpoint
from platform.data.__main__ import main as data
from platform.jobs.__main__ import main as jobs
from platform.plan.__main__ import main as plan
from platform.weights.__main__ import main as weights

COMMANDS = {
    "launch": launch.main, "doctor": doctor.main, "generate": generate.main, "evaluate": evaluate.main,
    "tune": tune.main,    "checkpoint": checkpoint, "data": data, "jobs": jobs, "plan": plan, "weights": weights,
}  # fmt: skip
SUBCOMMANDS = {
    "checkpoint": ("verify", "show", "export", "import"), "data": ("prepare", "convert"),
    "jobs": ("kubernetes", "slurm", "supervise", "node", "status", "logs"), "weights": ("import", "export"),
}  # fmt: skip
NONSENSE = (
    "--nonsense", "-x", "--help=5", "--no\x1b[31mnsense", "--\n", "--json=", "--config-dir", "nonsense --shard",
    "--é=\udcff", "+experiment=zzz", "${oc.env:NOPE}=1", "=", "=5", "no.key=1", "nonsense",
)  # fmt: skip


def ended(command, typed: list[str], capsys, monkeypatch) -> tuple[int, list[str]]:
    monkeypatch.setattr("sys.argv", ["x", *typed])
    try:
        status = command() if command is plan else command(typed)
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_no_argument_is_refused_in_a_line(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    typed = [shlex.split(line) for line in NONSENSE if "\n" not in line] + [["--\n"]]
    typed += [["--" + "".join(draw.choices(string.ascii_lowercase, k=9))] for _ in range(5)]
    typed += [[sub, *more] for sub in SUBCOMMANDS.get(name, ()) for more in (["--nonsense"], ["a"] * 9)]
    for words in typed:
        status, said = ended(COMMANDS[name], words, capsys, monkeypatch)
        assert status == 2, (words, said)
        distinct = 2 if name == "launch" else len(words)  # a line for each mistake; launch also wants an experiment
        assert 1 <= len(said) <= distinct and all(line.isprintable() for line in said), (words, said)
        assert all(": " in line and "Traceback" not in line and "usage" not in line for line in said), (words, said)
    assert not [*tmp_path.iterdir()]


def test_a_pipe_that_breaks_elsewhere_is_a_failure_and_a_reader_that_leaves_is_none(capfd, monkeypatch):
    def broken(_) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    parser = build_command_line("generate", None)
    assert run_command(parser, broken, [], failures=(OSError,)) == 1  # of a worker, say: nothing was answered
    assert capfd.readouterr().err == "generate: [Errno 32] Broken pipe\n"
    with pytest.raises(BrokenPipeError):
        run_command(parser, broken, [])
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody_reads:
        monkeypatch.setattr("sys.stdout", nobody_reads)
        assert run_command(parser, lambda _: print("answer", flush=True), [], failures=(OSError,)) == 0
