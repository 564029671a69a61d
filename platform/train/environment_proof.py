"""Proof of a process's environment: the storage, code and versions that it sees. Workers give it before forming."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platform as package
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import split_url
from platform.checkpoint.manifest import NAME
from platform.config.fields import Config
from platform.config.groups import RESUME
from platform.train.replies import Proof

# Storage locations of a run's checkpoints: the one it saves to and the one it resumes from.


def home(config: Config) -> str:
    """Return the URL to which a run's workers save checkpoints: checkpoint.url, else run.dir's `checkpoints`."""
    return config.checkpoint.url or os.path.join(config.run.dir, "checkpoints")


def storage_key(config: Config) -> str:
    """Return the setting KEY=VALUE that determines where a run saves its checkpoints, for messages to the user."""
    key = "checkpoint.url" if config.checkpoint.url else "run.dir"
    return f"{key}={bare_url(config.checkpoint.url or config.run.dir)}"


def saves(config: Config) -> bool:
    """Return True if a run ever saves checkpoints: regularly, at train.stop_at, or when stopped."""
    return bool(config.checkpoint.every or config.train.stop_at or config.checkpoint.on_stop)


def source(config: Config) -> tuple[str, str | None]:
    """Return where a run's workers resume from: the URL of the checkpoint storage, by default the one that they save
    to, and the checkpoint's name in it, None for the newest."""
    return (home(config), None) if config.checkpoint.resume in RESUME else split_url(config.checkpoint.resume)


LIBRARIES = ("elastic-platform", "torch", "numpy", "ray")


def proof(config: Config, run_dir: Path, probe: str, lacks: Mapping[str, str] | None = None) -> Proof:
    """Describe this process's environment, worker or driver, for the check before a mesh forms that all see the same
    storage and run the same code. Reads the file `probe`, which the driver has written to the run directory and the
    checkpoint storage, and the manifest of the checkpoint that checkpoint.resume names. `lacks`: see Proof."""
    sees = {"run.dir": _read(str(run_dir), probe)}
    if saves(config):
        sees["checkpoint.url"] = _read(home(config), probe)
    url, name = source(config)
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
