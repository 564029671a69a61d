"""Proof of a process's environment: the storage, code and versions that it sees. Workers give it before forming."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platform as package
from platform.boundary.files.file_storage import open_storage
from platform.boundary.refusals import ConfigError
from platform.checkpoint.storage.manifest import NAME
from platform.config.fields import Config
from platform.train.protocol.replies import Proof
from platform.train.recovery import urls

LIBRARIES = ("elastic-platform", "torch", "numpy", "ray")


def proof(config: Config, run_dir: Path, probe: str, lacks: Mapping[str, str] | None = None) -> Proof:
    """Describe this process's environment, worker or driver, for the check before a mesh forms that all see the same
    storage and run the same code. Reads the file `probe`, which the driver has written to the run directory and the
    checkpoint storage, and the manifest of the checkpoint that checkpoint.resume names. `lacks`: see Proof."""
    sees = {"run.dir": _read(str(run_dir), probe)}
    if urls.saves(config):
        sees["checkpoint.url"] = _read(urls.home(config), probe)
    url, name = urls.source(config)
    if name:
        sees["checkpoint.resume"] = _read(url, f"{name}/{NAME}")
    code = {name: _running(name) for name in ("platform", *config.extend)}
    return Proof(socket.gethostname(), sees, code, versions(), dict(lacks or {}))


def read_code() -> None:
    """Compute this process's code hash and library versions now, so that workers forked from it inherit them."""
    _running("platform")
    versions()


def code_of(config: Config) -> dict[str, str]:
    """Return the identity of a run's code: module -> hash of its source as first read, library -> version."""
    return {name: _running(name) for name in ("platform", *config.extend)} | _libraries()


@cache
def _running(module: str) -> str:
    """Return the `source_digest` of a module that this worker runs, as it was at the first call, for its proof."""
    return source_digest(module)


def _read(url: str, path: str) -> str:
    """Hash a file that the driver and all workers must see alike (the driver's probe or a checkpoint's manifest), at
    `path` in the storage at `url`; return 12 hex digits of its SHA-256 or, if it cannot be read, the reason."""
    try:
        return hashlib.sha256(open_storage(url).read(path)).hexdigest()[:12]
    except (OSError, ConfigError) as error:
        return f"unreadable ({type(error).__name__})"


def source_digest(module: str) -> str:
    """Hash the source of an imported module, or all source files of a package, to find workers that run other code than
    the driver; return 12 hex digits of SHA-256."""
    found = package if module == "platform" else sys.modules[module]
    if paths := getattr(found, "__path__", None):
        return _hash_files((str(f.relative_to(p)), f) for p in map(Path, paths) for f in sorted(p.rglob("*.py")))
    file = getattr(found, "__file__", None)
    return _hash_files([("", Path(file))] if file else [])


def _hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """Hash source files, given as (relative name, path), with their relative names, so that the folder in which a
    package is installed does not matter; return 12 hex digits of SHA-256."""
    total = hashlib.sha256()
    for name, file in files:
        total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and LIBRARIES here, by name; "none" or "not installed" if absent."""
    import torch  # here: the driver imports this file before it has time for torch

    return {"cuda": torch.version.cuda or "none"} | _libraries()


@cache
def _libraries() -> dict[str, str]:
    """Return library -> version of Python and LIBRARIES in this process, from package metadata without imports."""
    found = {"python": sys.version.split()[0]}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # e.g. imported from a checkout on the path
            found[library] = "not installed"
    return found
