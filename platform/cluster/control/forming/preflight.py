"""Before a run forms: every worker sees the run directory and storage that the driver sees, and runs what it runs."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from platform.boundary.redaction import redact
from platform.checkpoint import Storage, connect
from platform.cluster.crew.base.crew import Crew
from platform.config.fields import Config, ConfigError, violation
from platform.train.recovery import places
from platform.train.recovery.proof import proof

Proof = Mapping[str, Any]  # platform.train.recovery.proof.proof


def refused(crew: Crew, config: Config, run_dir: Path) -> dict[int, list[str]]:
    """The ranks whose proof is not the driver's, with one line per disagreement. What was written for it is gone
    afterwards. Raises ConfigError where the driver itself cannot write."""
    storages = {"run.dir": connect(str(run_dir))}
    if places.saves(config):
        storages["checkpoint.url"] = connect(places.home(config))
    with _probe(storages) as name:
        own, found = proof(config, run_dir, name), crew.call("prove", name)
    return {rank: lines for rank, its in enumerate(found) if (lines := disagreements(own, [its], config))}


@contextmanager
def _probe(storages: Mapping[str, Storage]) -> Iterator[str]:
    """The name of a file in each of them that nobody else could have made."""
    name = f".probe-{secrets.token_hex(8)}"
    try:
        for key, storage in storages.items():
            try:
                storage.write(name, [memoryview(secrets.token_bytes(16))])
            except OSError as error:
                raise ConfigError(violation(key, storage.url, f"cannot be written to: {error}")) from None
        yield name
    finally:
        for storage in storages.values():
            with suppress(OSError):
                storage.delete(name)


def disagreements(own: Proof, found: Iterable[Proof], config: Config) -> list[str]:
    """One line for everything in which a node is not as the driver, whose proof is `own`."""
    where = {
        "run.dir": config.run.dir,
        "checkpoint.url": redact(places.home(config)),
        "checkpoint.resume": redact(config.checkpoint.resume),
    }
    lines = []
    for its in found:
        for kind, name, value in ((k, n, v) for k in ("sees", "code", "versions") for n, v in own[k].items()):
            if (there := its[kind].get(name)) != value:
                how = f"{there} on node {its['node']}, {value} at the driver"
                if kind == "sees":
                    lines.append(violation(name, where[name], f"{how}; all nodes must see the same"))
                else:
                    lines.append(f"cluster: {kind} of {name}: {how}; all nodes must run the same")
    return list(dict.fromkeys(lines))
