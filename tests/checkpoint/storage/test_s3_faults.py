"""The faults of `faults`, as an object store has them: requests that are lost, and answers that are."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import pytest
from aiobotocore.client import AioBaseClient

from platform.boundary.storage import open_storage
from platform.checkpoint import catalogue
from platform.checkpoint import manifest as manifests
from platform.checkpoint.catalogue import find_newest_checkpoint, load_manifest, verify_checkpoint
from platform.checkpoint.manifest import Refused
from platform.checkpoint.saver import CheckpointSaver
from tests.harness.storage_job import Job, meta, values

SHAPES = {"a": (6, 4), "b": (5,), "c": ()}


@cache
def job(step: int) -> Job:
    return Job.whole(values(SHAPES, step), 2)


class Wire:
    """What lies between s3fs and the server. The `at`-th request of all (from 0) is lost, or carried out and its answer
    lost; `gone`: and nothing that follows gets through, as where the process was killed."""

    def __init__(self, monkeypatch, at: int = -1, answer: bool = False, gone: bool = False):
        self.at, self.answer, self.gone, self.count, self.methods = at, answer, gone, 0, set()
        real = AioBaseClient._make_api_call

        async def call(client, method, parameters):
            number, self.count = self.count, self.count + 1
            self.methods.add(method)
            lost = number == self.at or self.gone and 0 <= self.at < number
            if lost and not (self.answer and number == self.at):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            out = await real(client, method, parameters)
            if lost:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return out

        monkeypatch.setattr(AioBaseClient, "_make_api_call", call)

    @property
    def fired(self) -> bool:
        return 0 <= self.at < self.count


@cache
def small(step: int) -> Job:
    return Job.whole(values({"c": ()}, step))


def newest(storage, job=job) -> int:
    """The step of the newest checkpoint that can be trusted, once its values are seen to be those of that step."""
    trusted = find_newest_checkpoint(storage)
    assert trusted.manifest is not None and trusted.directory is not None
    step = trusted.manifest.meta.step
    job(step).check(job(step).restore(storage, trusted.directory, trusted.manifest))
    return step


def save(storage, step: int) -> str:
    return job(step).save(storage, step)


ANSWER = pytest.mark.parametrize(
    "answer", [pytest.param(False, id="a request", marks=pytest.mark.full), pytest.param(True, id="an answer")]
)


@ANSWER
def test_a_connection_that_goes_at_every_request_of_a_save(s3, answer):
    storage, step, at, fired = open_storage(s3), 1, 0, True
    save(storage, 1)
    while fired:
        with pytest.MonkeyPatch.context() as patch:
            wire = Wire(patch, at, answer, gone=True)
            saved = False
            with suppress(OSError):
                save(storage, step + 1)
                saved = True
        assert newest(storage) == step + 1 if saved else newest(storage) in (step, step + 1)
        step += 2
        save(storage, step)
        catalogue.prune_checkpoints(storage, last=1)
        assert newest(storage) == step and len(storage.list_sizes("")) == 1
        at, fired = at + 1, wire.fired
    assert at > 10 and wire.methods >= {"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}


@pytest.mark.full
@ANSWER
def test_a_save_is_tried_again_whatever_is_lost(s3, answer):
    storage, step, at, fired = open_storage(s3), 1, 0, True
    save(storage, 1)
    saver = CheckpointSaver(storage, last=1, pause=0)
    while fired:
        step += 1
        with pytest.MonkeyPatch.context() as patch:
            wire = Wire(patch, at, answer)
            saver.start_save(job(step).shapes, meta(step), lambda directory: job(step).write(storage, directory))  # noqa: B023
            assert saver.wait(30)
        directories = {event["event"]: event.get("directory") for event in saver.poll_events()}
        assert newest(storage) == step and directories["checkpoint"] in storage.list_sizes("")
        assert directories.get("checkpoint_failed") not in storage.list_sizes("")  # it gave its space back
        at, fired = at + 1, wire.fired
    assert at > 10


@pytest.mark.full
@pytest.mark.parametrize("gone", [True, False])
@ANSWER
def test_a_failure_at_every_request_of_pruning(s3, answer, gone):
    storage, step, at, fired = open_storage(s3), 1, 0, True
    small(1).save(storage, 1)
    while fired:
        step += 2
        for number in (step - 1, step):
            small(number).save(storage, number)
        with pytest.MonkeyPatch.context() as patch:
            wire = Wire(patch, at, answer, gone)
            with suppress(OSError):
                catalogue.prune_checkpoints(storage, last=1)
        assert newest(storage, small) == step and not find_newest_checkpoint(storage).refused
        for directory in storage.list_sizes(""):
            with suppress(Refused):
                assert not load_manifest(storage, directory).list_faults()
        catalogue.prune_checkpoints(storage, last=1)
        assert [name[:13] for name in storage.list_sizes("")] == [f"step-{step:08d}"]
        at, fired = at + 1, wire.fired
    assert at > 5 and wire.methods & {"DeleteObject", "DeleteObjects"}


def change(storage, path: str, change) -> None:
    if (data := change(bytes(storage.read(path)))) is None:
        storage.delete(path)
    else:
        storage.write(path, [memoryview(data)])


DAMAGE = {
    "a flipped bit": lambda data: data[:-7] + bytes([data[-7] ^ 0x10]) + data[-6:],
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "torn": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
}
QUICK = ("missing",)


@pytest.mark.parametrize("damage", [pytest.param(d, marks=[pytest.mark.full] * (d not in QUICK)) for d in DAMAGE])
def test_damage_to_any_object_is_found(s3, damage):
    storage = open_storage(s3)
    save(storage, 1)
    for number in range(3):
        directory = save(storage, 2)
        file = sorted(storage.list_sizes(directory))[number]
        change(storage, f"{directory}/{file}", DAMAGE[damage])
        refused, reason = find_newest_checkpoint(storage).refused[0]
        assert refused == directory and "\n" not in reason
        incomplete = damage == "missing" and file == manifests.NAME
        assert (catalogue.BAD in storage.list_sizes(directory)) != incomplete
        catalogue.prune_checkpoints(storage, last=1)
        assert newest(storage) == 1 and directory in storage.list_sizes("")


def test_stale_attempts_and_two_writers(s3):
    storage = open_storage(s3)
    save(storage, 1)
    stale = catalogue.choose_attempt_directory(storage, 1)
    job(1).write(storage, stale)
    assert newest(storage) == 1 and find_newest_checkpoint(storage).refused[0][0] == stale

    def write(steps):
        own = open_storage(s3)
        for step in steps:
            with suppress(Refused, OSError):
                save(own, step)
                catalogue.prune_checkpoints(own, last=2)
                assert newest(own)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (range(2, 5), range(12, 15))))
    assert newest(storage) in (4, 14) and stale not in storage.list_sizes("")
    for directory in storage.list_sizes(""):
        verify_checkpoint(storage, directory)
