"""Proof of a process's environment: the storage, code and versions that it sees. Workers give it before forming."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platform as package
from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import find_resume_source
from platform.checkpoint.manifest import NAME
from platform.config.fields import Config
from platform.config.identity import find_checkpoint_url, saves_checkpoints
from platform.train.replies import Proof

_GIT_SECONDS = 2  # that a start may wait for git

LIBRARIES = ("elastic-platform", "torch", "numpy", "ray")


def describe_environment(
    config: Config, run_dir: Path, probe_name: str, lacks: Mapping[str, str] | None = None
) -> Proof:
    """Describe this process's environment, worker or driver, for the check before a mesh forms that all see the same
    storage and run the same code. Reads the file `probe_name`, which the driver has written to the run directory and
    the checkpoint storage, and the manifest of the checkpoint that checkpoint.resume names. `lacks`: see Proof."""
    sees = {"run.dir": _hash_stored_file(str(run_dir), probe_name)}
    if saves_checkpoints(config):
        sees["checkpoint.url"] = _hash_stored_file(find_checkpoint_url(config), probe_name)
    url, name = find_resume_source(config)
    if name:
        sees["checkpoint.resume"] = _hash_stored_file(url, f"{name}/{NAME}")
    code = {name: _cached_module_hash(name) for name in ("platform", *config.extend)}
    return Proof(socket.gethostname(), sees, code, list_versions(), dict(lacks or {}))


def read_code() -> None:
    """Compute this process's code hash and library versions now, so that workers forked from it inherit them."""
    _cached_module_hash("platform")
    list_versions()


def identify_code(config: Config) -> dict[str, str]:
    """Return the code in a process's environment: module -> hash of its source as first read, library -> version."""
    return {name: _cached_module_hash(name) for name in ("platform", *config.extend)} | _library_versions()


def describe_git_state() -> str:
    """Return, of a process's environment, git's commit of its directory, with -dirty if files differ; "" for none."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True).stdout.strip()
    return ""


@cache
def _cached_module_hash(module: str) -> str:
    """Return the `hash_module_source` of a module that this worker runs, as it was at the first call, for its proof."""
    return hash_module_source(module)


def _hash_stored_file(url: str, path: str) -> str:
    """Hash a file that the driver and all workers must see alike (the driver's probe or a checkpoint's manifest), at
    `path` in the storage at `url`; return 12 hex digits of its SHA-256 or, if it cannot be read, the reason."""
    try:
        return hashlib.sha256(open_storage(url).read(path)).hexdigest()[:12]
    except (OSError, ConfigError) as error:
        return f"unreadable ({type(error).__name__})"


def hash_module_source(module: str) -> str:
    """Hash the source of an imported module, or all source files of a package, to find workers that run other code than
    the driver; return 12 hex digits of SHA-256."""
    imported_module = package if module == "platform" else sys.modules[module]
    if paths := getattr(imported_module, "__path__", None):
        return _hash_files((str(f.relative_to(p)), f) for p in map(Path, paths) for f in sorted(p.rglob("*.py")))
    file = getattr(imported_module, "__file__", None)
    return _hash_files([("", Path(file))] if file else [])


def _hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """Hash source files, given as (relative name, path), with their relative names, so that the folder in which a
    package is installed does not matter; return 12 hex digits of SHA-256."""
    total = hashlib.sha256()
    for name, file in files:
        total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


@cache
def list_versions() -> dict[str, str]:
    """Return the versions in a process's environment, of Python, CUDA, LIBRARIES; "none", "not installed" if absent."""
    import torch  # here: the driver imports this file before it has time for torch

    return {"cuda": torch.version.cuda or "none"} | _library_versions()


@cache
def _library_versions() -> dict[str, str]:
    """Return library -> version in a process's environment, Python and LIBRARIES, by metadata, without imports."""
    version_by_name = {"python": sys.version.split()[0]}
    for library in LIBRARIES:
        try:
            version_by_name[library] = version(library)
        except PackageNotFoundError:  # e.g. imported from a checkout on the path
            version_by_name[library] = "not installed"
    return version_by_name
