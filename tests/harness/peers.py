"""Libraries that tests compare with, each in a folder of its own under build/: installed on demand, without what it
depends on."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).resolve().parents[2] / "build"
VERSIONS = {"transformers": "5.23.0", "tiktoken": "0.14.0"}


def install(name: str) -> str:
    """Install a library into its folder unless it is there; return "", or why it cannot be had."""
    version, folder = VERSIONS[name], BUILD / name
    if (folder / f"{name}-{version}.dist-info").is_dir():
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, f"{name}=={version}"], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"])[-1]


def peer(name: str) -> Any:
    """Import a library; skip the test if it cannot be had."""
    if reason := install(name):
        pytest.skip(f"{name} {VERSIONS[name]}: {reason}")
    if str(BUILD / name) not in sys.path:
        sys.path.append(str(BUILD / name))
    try:
        return import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} {VERSIONS[name]}: {error}")
