"""Checks before a run forms: every worker sees the driver's run directory and storage, and runs the same code."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from platform.boundary.files.file_storage import Storage, open_storage
from platform.boundary.redaction import redact
from platform.boundary.refusals import as_refusal, violation
from platform.cluster.crew.base.crew import Crew
from platform.config.bounds import flat_values
from platform.config.fields import Config
from platform.train.protocol.replies import Proof
from platform.train.recovery import urls
from platform.train.recovery.proof import proof

_ALWAYS = {"train.compile": ["auto", "off"], "train.attention_kernel": ["auto", "math"]}  # what every worker can do


def violations_of_workers(crew: Crew, config: Config, run_dir: Path) -> dict[int, list[str]]:
    """Return rank -> lines on how its environment differs from the driver's (storage, code, versions), for the ranks
    that differ. The probe files that this writes to run directory and checkpoint storage are deleted afterwards. Raise
    ConfigError if the driver itself cannot write them."""
    storages = {"run.dir": open_storage(str(run_dir))}
    if urls.saves(config):
        storages["checkpoint.url"] = open_storage(urls.home(config))
    with _probe(storages) as name:
        own, found = proof(config, run_dir, name), crew.call("prove", name)
    return {rank: lines for rank, its in enumerate(found) if (lines := disagreements(own, its, config))}


@contextmanager
def _probe(storages: Mapping[str, Storage]) -> Iterator[str]:
    """Write a file of random bytes to each storage, for the workers to read, yield the file's name, and delete the
    files at the end. `storages`: configuration key -> storage. Raise ConfigError, naming the key, for one that cannot
    be written."""
    name = f".probe-{secrets.token_hex(8)}"
    try:
        for key, storage in storages.items():
            with as_refusal(key, storage.url, OSError, why="cannot be written to: {}"):
                storage.write(name, [memoryview(secrets.token_bytes(16))], durable=False)
        yield name
    finally:
        for storage in storages.values():
            with suppress(OSError):
                storage.delete(name, durable=False)


def disagreements(own: Proof, its: Proof, config: Config) -> list[str]:
    """Return one line for each difference between a worker's environment, `its`, and the driver's, `own` (storage,
    hashes of code, versions of libraries), and for each feature that the worker lacks."""
    where = {
        "run.dir": config.run.dir,
        "checkpoint.url": redact(urls.home(config)),
        "checkpoint.resume": redact(config.checkpoint.resume),
    }
    lines = []
    for kind, name, value in ((k, n, v) for k in ("sees", "code", "versions") for n, v in getattr(own, k).items()):
        if (there := getattr(its, kind).get(name)) != value:
            how = f"{there} on node {its.node}, {value} at the driver"
            if kind == "sees":
                lines.append(violation(name, where[name], f"{how}; all nodes must see the same"))
            else:
                lines.append(f"cluster: {kind} of {name}: {how}; all nodes must run the same")
    for key, legal in _ALWAYS.items():
        if why := its.lacks.get(key):
            lines.append(violation(key, flat_values(config)[key], f"{why} on node {its.node}", legal))
    return lines
