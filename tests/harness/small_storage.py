"""Checkpoints of a few numbers, whose values tell their step."""

from functools import cache

from platform.boundary import local_files as storage_module
from platform.checkpoint.catalogue import find_newest_checkpoint
from tests.doubles.faulty_os import FaultyOs
from tests.harness.storage_job import Job, values

SHAPES = {"a": (6, 4), "b": (5,), "c": ()}


@cache
def job(step: int) -> Job:
    return Job.whole(values(SHAPES, step), 2)


def newest(storage) -> int:
    """The step of the newest checkpoint that can be trusted, once its values are seen to be those of that step."""
    checkpoint = find_newest_checkpoint(storage)
    assert checkpoint.manifest is not None and checkpoint.directory is not None
    step = checkpoint.manifest.meta.step
    job(step).check(job(step).restore(storage, checkpoint.directory, checkpoint.manifest))
    return step


def faulty(monkeypatch, *args, **kwargs) -> FaultyOs:
    system = FaultyOs(*args, **kwargs)
    monkeypatch.setattr(storage_module, "os", system)
    return system
