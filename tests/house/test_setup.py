"""What `make` installs before a target: what trains for `make train`, the rest for others, and nothing twice. Python
and uv are stand-ins that note how they are called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.house.rooms import ROOT

STAND_IN = """#!/bin/sh
case "$*" in
  "-c "*) ;;
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
  *) echo "${0##*/} $*" >> calls;;
esac
case "$0" in *uv) exit $UV_STATUS;; esac
"""
TORCH = "python -m pip install --quiet --no-compile torch=="
BUILD = "install --quiet --no-compile editables=="
TRAINS = "--constraint requirements.txt --no-build-isolation --editable ."
TESTS = f"{TRAINS}[dev]"
LAUNCH, PYTEST = "python -m platform.launch +experiment=gpt_quick run.dir=runs/gpt_quick", "python -m pytest"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what `make` reads, and stand-ins for Python and uv."""
    for name in ("Makefile", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("python", "uv"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run_make(checkout: Path, *words: str, status: int = 0) -> list[str]:
    """Run `make`; return the calls of Python and uv that it makes."""
    environment = {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "UV_STATUS": str(status)}
    command = ["make", f"PYTHON={checkout}/bin/python", *words]
    subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
    calls = (checkout / "calls").read_text().splitlines()
    (checkout / "calls").unlink()
    return calls


def begins(calls: list[str], *wanted: str) -> None:
    assert len(calls) == len(wanted), calls
    assert [call for call, start in zip(calls, wanted, strict=True) if start not in call] == []


def test_a_target_installs_what_it_needs_once(checkout: Path):
    begins(run_make(checkout, "UV=", "train"), TORCH, BUILD, TRAINS, LAUNCH)
    assert run_make(checkout, "UV=", "train") == [LAUNCH]
    begins(run_make(checkout, "UV=", "test"), TESTS, PYTEST)
    begins(run_make(checkout, "UV=", "test"), PYTEST)
    assert run_make(checkout, "UV=", "train") == [LAUNCH]


def test_tests_alone_install_all(checkout: Path):
    begins(run_make(checkout, "UV=", "test"), TORCH, BUILD, TRAINS, TESTS, PYTEST)


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.txt"])
def test_a_change_of_versions_installs_again(checkout: Path, name: str):
    run_make(checkout, "UV=", "test")
    os.utime(checkout / name, (time.time() + 1,) * 2)
    begins(run_make(checkout, "UV=", "test"), TORCH, BUILD, TRAINS, TESTS, PYTEST)


def test_uv_installs_all_but_torch_and_pip_goes_on_where_it_fails(checkout: Path):
    calls = run_make(checkout, "train")
    begins(calls, TORCH, "uv pip install --quiet --python .venv/bin/python editables==", TRAINS, LAUNCH)
    assert [call.split()[0] for call in calls] == ["python", "uv", "uv", "python"]
    shutil.rmtree(checkout / ".venv")
    begins(run_make(checkout, "train", status=1), TORCH, "uv pip", BUILD, "uv pip", TRAINS, LAUNCH)


def test_every_target_of_python_sets_up_first():
    targets = re.findall(r"^([a-z-]+):(.*)\n\t(?:.*\n\t)*.*\$\(PY\)", (ROOT / "Makefile").read_text(), re.M)
    first = {name for name, needs in targets if needs.split()[0] == "$(TRAINS)"}
    rest = {name for name, needs in targets if needs.split()[0] == "$(READY)"}
    assert first == {"train"} and len(rest) > 5 and first | rest == {name for name, _ in targets}


def test_what_takes_a_minute_is_announced(checkout: Path):
    """pip is quiet: without a line `make test` shows nothing until pytest starts."""
    environment = {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "UV_STATUS": "0"}
    command = ["make", f"PYTHON={checkout}/bin/python", "UV=", "test"]
    runs = [subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True) for _ in range(2)]
    lines = "".join(run.stdout for run in runs).splitlines()
    assert [line for line in lines if line.startswith("installing")] == [
        "installing what trains into .venv: a minute or two, once",
        "installing what tests need into .venv: about a minute, once",
    ]
