"""Checks of what a configuration needs on this machine: directories, storages, environment variables; read-only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from platform.boundary.files.protocols import violation_of_protocol
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import violation
from platform.config.fields import Config
from platform.config.groups.execution_group import RESUME

Variable = tuple[str, str, tuple[str, ...]]  # (pattern of its value, constraint in words, examples)
_NUMBER: Variable = (r"\d{1,9}", "must be an integer", ("0",))
_SIZE: Variable = (r"[1-9]\d{0,8}", "must be an integer of at least 1", ("1",))
_HOST = r"[\w.-]+|\[[0-9a-fA-F:.]+\]"
TORCHRUN: Mapping[str, Variable] = {
    "RANK": _NUMBER,
    "LOCAL_RANK": _NUMBER,
    "WORLD_SIZE": _SIZE,
    "LOCAL_WORLD_SIZE": _SIZE,
    "MASTER_PORT": (r"\d{1,5}", "must be a port", ("29500",)),
    "TORCHELASTIC_RESTART_COUNT": _NUMBER,
}
_RAY: Variable = (rf"auto|local|(ray://)?({_HOST}):\d{{1,5}}", "must be HOST:PORT, or auto", ("auto", "127.0.0.1:6379"))
_DETERMINISTIC: Mapping[str, Variable] = {  # of workers on GPUs, under train.deterministic
    "CUBLAS_WORKSPACE_CONFIG": (r":4096:8|:16:8", "must be as train.deterministic=true needs it", (":4096:8", ":16:8")),
    "NCCL_ALGO": (
        r"(?i)\^(?=.*\bnvls\b)(?=.*\bnvlstree\b).*|(?!\^)(?!.*nvls).+",
        "NVLS adds in no fixed order, which train.deterministic=true needs",
        ("^NVLS,NVLSTree", "Ring"),
    ),
}
_MODES = ("online", "offline", "disabled")
_WANDB: Variable = (r"online|offline|disabled|shared|run|dryrun|", "no mode of W&B", _MODES)


def violations_of_surroundings(config: Config) -> list[str]:
    """Return one refusal line per directory, storage URL or environment variable that a run of `config` cannot use on
    this machine, judging without creating or connecting to anything."""
    lines = list(_variables(config))
    checkpoint, folders = config.checkpoint, {"run.dir": config.run.dir, "data.cache": config.data.cache}
    for key, path in {**folders, "checkpoint.url": checkpoint.url}.items():
        if path and "://" not in path and (reason := _unusable(path)):
            lines.append(violation(key, path, reason, ["a directory that you can write to"]))
    for key, url in (("checkpoint.url", checkpoint.url), ("checkpoint.resume", checkpoint.resume)):
        if url not in ("", *RESUME) and (reason := violation_of_protocol(url, key == "checkpoint.url")):
            lines.append(violation(key, bare_url(url), reason, ["a path", "s3://BUCKET/PATH", "gs://BUCKET/PATH"]))
    for key, path in folders.items():
        if "://" in path:
            lines.append(violation(key, path, "must be a path; only checkpoints and data may be at a URL", ["a path"]))
    return lines


def _variables(config: Config) -> Iterator[str]:
    """Yield a refusal line per environment variable of torchrun, Ray, W&B, cuBLAS or NCCL, as far as this
    configuration's run reads it, that is malformed or asks for what the run cannot have; torchrun's also if one is
    missing."""
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    read = {
        **({"RAY_ADDRESS": _RAY} if config.cluster.kind == "ray" and not torchrun else {}),
        **({"WANDB_MODE": _WANDB} if config.monitor.kind == "wandb" else {}),
        **(TORCHRUN if torchrun else {}),
        **(_DETERMINISTIC if config.train.deterministic and config.cluster.device != "cpu" else {}),
    }
    for name, (pattern, words, legal) in read.items():
        missing = torchrun and name in TORCHRUN and name not in os.environ
        if missing or (name in os.environ and not re.fullmatch(pattern, os.environ[name], re.ASCII)):
            yield violation(name, os.environ.get(name, ""), f"(environment) {words}", legal)


def _unusable(path: str) -> str:
    """Return why `path`, configured for a run directory, cache or checkpoints, is no writable directory and cannot
    become one; "" if it is or can."""
    path = os.path.abspath(path)
    if path.strip("/") == "":
        return "is the root of the file system"
    try:
        while not _is_there(path):
            path = os.path.dirname(path)
    except (OSError, ValueError) as error:
        return f"cannot be used ({getattr(error, 'strerror', None) or error})"
    if not os.path.isdir(path):
        return f"cannot be used ({path} is no directory)"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"cannot be used (Permission denied, or read-only: {path})"
    return ""


def _is_there(path: str) -> bool:
    """Return True if a configured `path` exists. Raises OSError for an impossible one, such as a 300-character name."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def expanded(key: str, path: str) -> tuple[str, list[str]]:
    """Expand ~ in the path that configuration key `key` holds, and make it absolute (a URL and "" stay as they are).
    Return it, and [] or, if ~USER names no user, one refusal line."""
    if not path or "://" in path:
        return path, []
    there = os.path.expanduser(path)
    user = path.partition("/")[0]
    if there != path or not user.startswith("~") or os.path.lexists(user):
        return os.path.abspath(there), []
    return os.path.abspath(there), [violation(key, path, f"there is no user {user[1:]}", [f"./{path}"])]
