"""Imports run one way: the contracts of pyproject.toml, held by import-linter."""

import subprocess
import sys
from pathlib import Path

# import-linter's own command, by whichever Python runs the tests; rich, which it uses, imports `platform` first.
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_the_contracts_are_kept(root):
    done = lint(root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imports run one way KEPT" in done.stdout


def test_a_broken_contract_is_seen(root, tmp_path):
    upside_down = tmp_path / "contracts.ini"
    upside_down.write_text(
        "[importlinter]\nroot_package = platform\n"
        "[importlinter:contract:1]\nname = upside down\ntype = layers\nlayers =\n  platform.config\n  platform.launch\n"
    )
    done = lint(root, "--config", str(upside_down), "--cache-dir", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "upside down BROKEN" in done.stdout
