"""Type checkers see both: Python's own `platform`, with every name that typeshed gives it, and our submodules."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

USER = """
import platform
from platform.api import Callbacks, Config, Result, compose, plan, resume, run

config: Config = compose("train.steps=2", experiment="two_layer")
name: str = platform.system() + platform.uname().machine + plan(config).precision
result: Result = run(config, Callbacks(on_step=lambda row: print(row.loss)))
loss: float = result.loss or resume(result.directory, "tensor=1d").metrics[-1].loss
"""
WRONG = 'import platform\nfrom platform.api import run\nrun("gpt_quick")\nplatform.sistem()\n'


def mypy(python: Path | str, cwd: Path, folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Check a user's file with `text`, which is written to `folder`, from the directory `cwd`."""
    file = folder / "users_own_code.py"
    file.write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [str(python), "-m", "mypy", *options, str(file)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def mistakes(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the numbers of the lines in which mypy found an error."""
    return [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]


def declared(stub: Path) -> dict[str, str]:
    """Map each public function and class of a stub to its arguments and result."""
    signatures = {}
    for node in ast.walk(ast.parse(stub.read_text())):
        if isinstance(node, ast.FunctionDef) and node.col_offset in (0, 4) and "self" not in ast.unparse(node.args):
            signatures[node.name] = f"({ast.unparse(node.args)}) -> {node.returns and ast.unparse(node.returns)}"
        elif isinstance(node, ast.ClassDef):
            signatures[node.name] = "class"
    return {name: text for name, text in signatures.items() if not name.startswith("_")}


def test_our_stub_says_what_typesheds_says(root):
    import mypy

    theirs = declared(Path(mypy.__file__).parent / "typeshed" / "stdlib" / "platform.pyi")
    assert len(theirs) > 25
    assert declared(root / "platform" / "__init__.pyi") == theirs


def test_code_in_the_checkout(root, tmp_path):
    done = mypy(sys.executable, root, tmp_path, USER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mistakes(mypy(sys.executable, root, tmp_path, WRONG)) == ["3", "4"]
