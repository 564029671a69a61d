"""What one process of a run sees and runs: workers prove it to the driver before they form."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import platform as package
from platform.checkpoint import connect
from platform.checkpoint.storage.manifest import NAME
from platform.config.fields import Config, ConfigError
from platform.train.recovery import places

LIBRARIES = ("elastic-platform", "torch", "numpy", "ray")


def proof(config: Config, run_dir: Path, probe: str) -> dict[str, Any]:
    """Of this process, plain data and equal in all processes of a sound run, but for the node:

    node: its name; sees: run.dir, checkpoint.url (where the run saves) and checkpoint.resume (where it names a
    checkpoint) -> what is read there, the file `probe` or the manifest, or why not; code: `platform` and modules of the
    user -> hash of their source files; versions: see `versions`.
    """
    sees = {"run.dir": _read(str(run_dir), probe)}
    if places.saves(config):
        sees["checkpoint.url"] = _read(places.home(config), probe)
    url, name = places.source(config)
    if name:
        sees["checkpoint.resume"] = _read(url, f"{name}/{NAME}")
    return {
        "node": socket.gethostname(),
        "sees": sees,
        "code": {name: source_digest(name) for name in ("platform", *config.extend)},
        "versions": versions(),
    }


def _read(url: str, path: str) -> str:
    """A hash of what the file holds, or why it cannot be read."""
    try:
        return hashlib.sha256(connect(url).read(path)).hexdigest()[:12]
    except (OSError, ConfigError) as error:
        return f"unreadable ({type(error).__name__})"


def source_digest(module: str) -> str:
    """A hash of the source of an imported module, or of all of it where it is a package."""
    found = package if module == "platform" else sys.modules[module]
    if paths := getattr(found, "__path__", None):
        return _digest((str(f.relative_to(p)), f) for p in map(Path, paths) for f in sorted(p.rglob("*.py")))
    file = getattr(found, "__file__", None)
    return _digest([("", Path(file))] if file else [])


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """Names are hashed too: where the files lie does not matter."""
    total = hashlib.sha256()
    for name, file in files:
        total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Of what this process runs on."""
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda or "none"}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # a checkout on the path
            found[library] = "not installed"
    return found
