"""Imports run one way: the contracts of pyproject.toml, held by import-linter."""

import subprocess
import sys
from pathlib import Path

# As in the Makefile: rich, which import-linter uses, has imported the other `platform`.
LINT = "import sys; from importlinter import cli; sys.modules.pop('platform', None); sys.exit(cli.lint_imports({}))"


def lint(root: Path, arguments: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT.format(arguments)]
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
    done = lint(root, f"config_filename={str(upside_down)!r}, cache_dir={str(tmp_path)!r}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "upside down BROKEN" in done.stdout
