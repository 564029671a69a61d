"""What a run wrote, for fuzzers to damage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.checkpoint import manifest as manifests
from platform.checkpoint.catalogue import verify_checkpoint
from platform.checkpoint.interchange import export_safetensors
from platform.checkpoint.moves import read_tensor
from platform.cluster.run_directory import RunDirectory
from platform.config.fields import Config, Data
from platform.data.corpus import open_corpus
from platform.monitor import Journal, MetricsLog, events
from tests.harness.storage_job import Job, values

SHAPES = {"a": (6, 4), "b": (5,), "c": (), "d": (2, 3, 4)}
SIZES = {"length": 16, "vocab": 300, "seed": 0}


class World:
    """What a run wrote, in a directory of its own."""

    def __init__(self, root: Path):
        self.root = root
        self.storage = open_storage(str(root / "checkpoints"))
        first = Job.whole(values(SHAPES, 1), 2)
        first.save(self.storage, 1)
        self.directory = Job.whole(values(SHAPES, 2), 2).save(self.storage, 2)
        self.path = self.storage.root / self.directory / manifests.NAME
        self.raw = self.path.read_bytes()
        self.manifest = verify_checkpoint(self.storage, self.directory)
        self.document = json.loads(self.raw)
        del self.document["sha256"]
        self.tensors = {n: read_tensor(self.storage, self.directory, self.manifest, n) for n in SHAPES}
        self.config = Config()
        self.config.run.dir = str(root / "run")
        with RunDirectory(self.config.run.dir).claim(self.config, {"mesh": {"data": 2}}):
            pass
        self.run = root / "run"
        self._record()
        self.safetensors = str(root / "x.safetensors")
        export_safetensors(self.storage, self.directory, self.manifest, self.safetensors, list(SHAPES))
        self.text = root / "text.txt"
        self.text.write_text("".join(f"line {i} of {i * i} sheep\n" for i in range(200)))
        self.data = Data(kind="text", path=str(self.text), validation=0.2, cache=str(root / "cache"))
        open_corpus(self.data, **SIZES)
        (self.entry,) = (root / "cache").iterdir()

    def _record(self) -> None:
        journal, metrics = Journal(self.run / "journal.jsonl"), MetricsLog(self.run / "metrics.jsonl")
        journal.write(events.Starting(world_size=2, cluster="processes", device="cpu"))
        journal.begin_generation()
        journal.write(events.Formed(workers=[{"rank": 0, "node": "n", "coordinates": {"data": 0}}]))
        for step in (1, 2, 3):
            journal.write(events.Checkpoint(step=step, directory="d", bytes=9, seconds=0.25, useful_seconds=0.5))
            metrics.append({"step": step, "loss": 2.5 / step, "comm_bytes": {"send/stage": 5}, "samples": [0, 4]})
        failed = {"number": 1, "rank": 1, "coordinates": {"data": 1}, "node": "n", "method": "step(3)", "kind": "died"}
        journal.write(events.Failure(**failed, cause="killed", log=None, step=3))
        journal.write(events.RolledBack(step=2, steps_lost=1, lost_seconds=0.5))
        journal.write(events.Done(step=3))
        journal.close(), metrics.close()


def told(error: Exception) -> None:
    """Assert that a refusal is one line that a terminal may show."""
    for line in error.violations if isinstance(error, ConfigError) else [str(error)]:
        assert line and line.isprintable() and len(line) < 1000, f"the reason is {line[:200]!r}"


@contextmanager
def changed(path: Path, raw: bytes) -> Iterator[None]:
    """`raw` in the place of a file's content."""
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(before)


def broken(draw: Random, path: Path) -> None:
    """Something that is no regular file, or anybody's."""
    how = draw.randrange(7)
    if how == 0:
        path.mkdir()
    elif how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.symlink_to(path)
    elif how == 3:
        path.symlink_to("/nowhere/at/all")
    elif how == 4:
        path.symlink_to("/dev/zero")
    elif how == 5:
        path.write_bytes(draw.randbytes(draw.choice([0, 1, 100])))
    else:
        path.touch()
        os.truncate(path, 1 << 40)
