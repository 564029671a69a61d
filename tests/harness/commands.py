"""Commands as a user types them: in a process of their own, or in this one where they start none or are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config, main
from tests.harness import warm

QUICK = "+experiment=gpt_quick"
SMALL = "model.layers=1 model.d_model=32 model.length=16 model.vocab=300 eval.every=0 monitor.sample=0".split()
TIMEOUT = 280  # seconds; a loaded machine is slow, and a hang must still end


def command(*arguments: str, cwd: Path, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "platform.launch", *arguments],
        cwd=cwd,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def warm_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`command` without the seconds in which processes import torch, where what is tested is not how they start."""
    return warm.run_module("platform.launch", *arguments, cwd=cwd, timeout=TIMEOUT)


def in_this_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`command` of a run that starts no process, or is refused: importing torch takes seconds."""
    with chdir(cwd), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as error:
        status = main(list(arguments) or None)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), error.getvalue())


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(*arguments: str, cwd: Path) -> list[str]:
    """The lines of a command that ends with status 2 and leaves everything as it was."""

    def read_files() -> dict[Path, bytes | None]:
        return {p: p.read_bytes() if p.is_file() else None for p in cwd.rglob("*")}

    before = read_files()
    done = in_this_process(QUICK, *SMALL, "cluster=processes", *arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert read_files() == before
    return done.stderr.splitlines()


def mistakes(*arguments: str) -> list[str]:
    """The lines in which a configuration is refused."""
    with pytest.raises(ConfigError) as error:
        compose_config([QUICK, *arguments])
    return error.value.violations
