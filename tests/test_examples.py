"""The examples: short, self-explaining, and every one runs from an empty folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import warm
from tests.harness.commands import TIMEOUT

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SAYS = {  # example -> texts that its output holds
    "callbacks_and_resume": ["refused:\n    train.steps=0", "ended: step 3 is enough", "drained", "done: 6 steps"],
    "fine_tune": [
        "validation loss  stories",
        "questions  ",
        "\n It hunts.",
        "\n It waits.",
        "given_back: model.safetensors",
    ],
    "one_block": ["plan  4 workers = r 2 x c 2", "rank 0 (r=0, c=0): loss", "rank 3 (r=1, c=1): loss"],
    "own_family": ["pythia-160m: 148 tensors, 162,322,944 parameters", "[2304, 768] is layers.0.attention.query, "],
    "own_model": ["megatron would move {'all_reduce/t'", "experts would move {'all_reduce/e'", "\nloss 6."],
    "own_recurrence": ["megatron would move {'all_reduce/t'", "length would move {'all_gather/c'", "\nloss "],
    "own_schedule": ["stage 0 | 0F0 0F1 0F2 0B0", "eager_1f1b: 2 stages", "step    two stages   one process\n   1 "],
    "own_scheme": ["attention  s       h", "step   4 processes     1 process\n   1 "],
}


def test_every_example_is_expected():
    assert [path.stem for path in EXAMPLES] == sorted(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_shows(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    first, _, rest = ast.get_docstring(ast.parse(text)).partition("\n")
    assert first.endswith(".") and f"    python examples/{path.name}\n" in rest


COLD = "own_model"  # as a user starts it; the others by what has imported torch
QUICK = ("one_block", "own_model")  # the others take as long each; `make test-all` runs all
RUN = [pytest.param(p, marks=() if p.stem in QUICK else pytest.mark.full, id=p.stem) for p in EXAMPLES]


@pytest.mark.parametrize("path", RUN)
def test_an_example_runs(path, tmp_path):
    if path.stem == COLD:
        line = [sys.executable, path]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    else:
        done = warm.run_module(str(path), cwd=tmp_path, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [text for text in SAYS[path.stem] if text not in done.stdout] == [], done.stdout
    assert "Traceback" not in done.stderr
    assert {child.name for child in tmp_path.iterdir()} <= {"runs"}
