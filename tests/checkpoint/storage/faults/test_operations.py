"""Operations that fail while a checkpoint is saved or pruned: what is found afterwards is whole, and the newest."""

import errno
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import BrokenBarrierError

import pytest

from platform.boundary import local_files as storage_module
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import find_newest_checkpoint, load_manifest, verify_checkpoint
from platform.checkpoint.manifest import Manifest, Refused
from platform.checkpoint.saver import CheckpointSaver
from tests.doubles import faulty_os
from tests.doubles.faulty_os import FaultyOs, Killed
from tests.harness.small_storage import faulty, job, newest
from tests.harness.storage_job import meta

FAULTS = {
    "EIO": faulty_os.error(errno.EIO),
    "ENOSPC": faulty_os.error(errno.ENOSPC),
    "torn": faulty_os.torn(errno.ENOSPC),
    "kill": faulty_os.kill,
    "kill_after": faulty_os.kill_after,
}


@pytest.mark.parametrize("power", [False, True], ids=["", "power"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_at_every_operation_of_a_save(copies, kind, power):
    """Every fault at every open, write, fsync, close, rename and mkdir, and a loss of power right after it."""
    at, kinds = 0, set()
    while True:
        storage = copies(1)
        with pytest.MonkeyPatch.context() as patch:
            system = faulty(patch, at, FAULTS[kind])
            saved = False
            with suppress(OSError, Killed):
                job(2).save(storage, 2)
                saved = True
        if power:
            system.lose_power()
        step = newest(storage)
        assert step == 2 if saved else step in (1, 2)
        if not saved and "kill" not in kind:
            assert step == 1  # a save that reports failure flat_values nothing to be found
        job(3).save(storage, 3)
        catalogue.prune_checkpoints(storage, last=2)
        assert newest(storage) == 3 and len(storage.list_sizes("")) == 2
        if not system.fired:
            break
        at += 1
        kinds |= set(system.seen)
    assert at >= 20 and kinds >= {"open", "write", "fsync", "close", "replace", "mkdir"}


def test_the_fault_tests_see_a_missing_fsync(storage, monkeypatch):
    """Negative control: were nothing synchronised, a save that was reported would be lost with the power."""
    with monkeypatch.context() as patch:
        system = faulty(patch, forget_fsync=True)
        job(2).save(storage, 2)
    assert find_newest_checkpoint(storage).manifest.meta.step == 2
    system.lose_power()
    assert newest(storage) == 1


def test_a_short_write_is_continued(storage, monkeypatch):
    at, fired = 0, True
    while fired:
        with monkeypatch.context() as patch:
            system = faulty(patch, at, faulty_os.short)
            job(2).save(storage, 2)
        assert newest(storage) == 2
        at, fired = at + 1, system.fired


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_at_every_operation_of_pruning(copies, kind):
    """Every unlink, rmdir and fsync: what is left is whole, or is not taken for a checkpoint."""
    at, fired, kinds = 0, True, set()
    while fired:
        storage = copies(1, 2, 3)
        with pytest.MonkeyPatch.context() as patch:
            system = faulty(patch, at, FAULTS[kind])
            with suppress(OSError, Killed):
                catalogue.prune_checkpoints(storage, last=1)
        assert newest(storage) == 3 and not find_newest_checkpoint(storage).refused
        for directory in storage.list_sizes(""):
            with suppress(Refused):
                assert not load_manifest(storage, directory).list_faults()
        catalogue.prune_checkpoints(storage, last=1)
        assert [name[:13] for name in storage.list_sizes("")] == ["step-00000003"]
        at, fired = at + 1, system.fired
        kinds |= set(system.seen)
    assert at > 10 and kinds >= {"unlink", "rmdir", "fsync"}


def test_sigkill_at_every_operation_of_a_save(copies):
    """A real process, really killed."""
    at, killed = 0, True
    while killed:
        storage = copies(1)
        child = os.fork()
        if child == 0:
            try:
                storage_module.os = FaultyOs(at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                job(2).save(storage, 2)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0
        assert newest(storage) in ((1, 2) if killed else (2,))
        job(3).save(storage, 3)
        assert newest(storage) == 3
        at += 1
    assert at > 20


def saver_events(storage, step: int, **kwargs) -> list[dict]:
    saver = CheckpointSaver(storage, pause=0, **kwargs)
    job_ = job(step)
    saver.start_save(job_.shapes, meta(step), lambda directory: job_.write(storage, directory))
    assert saver.wait(30)
    return saver.poll_events()


def test_a_save_is_retried_whatever_failed_once(copies):
    at, fired = 0, True
    while fired:
        storage = copies(1)
        with pytest.MonkeyPatch.context() as patch:
            system = faulty(patch, at, faulty_os.torn(errno.ENOSPC))
            events = saver_events(storage, 2)
        outcome = [e["event"] for e in events]
        assert outcome.count("checkpoint") == 1 and newest(storage) == 2
        if outcome[0] == "checkpoint_failed":
            assert events[0]["again"] and "No space left" in events[0]["reason"]
            assert len(storage.list_sizes("")) == 2  # the failed attempt gave its space back
        at, fired = at + 1, system.fired
    assert at > 20


def test_a_full_disk_is_loud_and_harms_nothing(storage, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(storage_module.os, "write", full)
        events = saver_events(storage, 2, tries=3)
    assert [(e["event"], e["attempt"], e["again"]) for e in events] == [
        ("checkpoint_failed", 1, True), ("checkpoint_failed", 2, True), ("checkpoint_failed", 3, False),
    ]  # fmt: skip
    assert len({e["directory"] for e in events}) == 3  # fresh ones
    assert len(storage.list_sizes("")) == 1 and newest(storage) == 1
    assert [e["event"] for e in saver_events(storage, 2)] == ["checkpoint"] and newest(storage) == 2


def test_two_writers(storage):
    """Both save and prune into one storage at once."""

    def write(steps):
        for step in steps:
            with suppress(Refused, OSError, BrokenBarrierError):  # what the one reads, the other may just delete
                job(step).save(storage, step)
                catalogue.prune_checkpoints(storage, last=2)
                assert newest(storage)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (range(2, 12), range(12, 22))))
    assert newest(storage) in (11, 21)
    for attempt in catalogue.list_attempts(storage):
        # What the other pruned while it was written is no checkpoint: it has no manifest, or no blocks if they were
        # deleted just before its manifest came. (Drivers hold a lease, which `commit` asks about at that moment.)
        try:
            verify_checkpoint(storage, attempt.directory_name)
        except Refused as error:
            assert re.search(r"it has no |blocks-\d+.bin is missing", str(error))


def test_a_commit_needs_all_reports(storage):
    step = job(2)
    directory = catalogue.choose_attempt_directory(storage, 2)
    one, two = step.write(storage, directory)
    with pytest.raises(Refused, match="has no b|is in no block"):
        catalogue.commit_checkpoint(storage, directory, step.shapes, [one], meta(2))
    with pytest.raises(Refused, match="has no z"):
        catalogue.commit_checkpoint(storage, directory, {**step.shapes, "z": (1,)}, [one, two], meta(2))
    with pytest.raises(Refused, match="the workers wrote b, which is no part of the state"):
        catalogue.commit_checkpoint(storage, directory, {"a": (6, 4), "c": ()}, [one, two], meta(2))
    with pytest.raises(Refused, match="is in several blocks"):
        catalogue.commit_checkpoint(storage, directory, step.shapes, [one, two, replace(one, file=two.file)], meta(2))
    other = replace(two, blocks=[b._replace(shape=(9, 9)) if b.name == "a" else b for b in two.blocks])
    with pytest.raises(Refused, match="a has several shapes or types"):
        catalogue.commit_checkpoint(storage, directory, step.shapes, [one, other], meta(2))
    os.truncate(storage.root / directory / two.file, 1)
    with pytest.raises(Refused, match="blocks-00001.bin has 1 bytes instead of"):
        catalogue.commit_checkpoint(storage, directory, step.shapes, [one, two], meta(2))
    with pytest.raises(ValueError):
        replace(
            Manifest.build_from_reports(meta(2), [one, two]), meta=replace(meta(2), values={"scale": float("nan")})
        ).encode()
    assert newest(storage) == 1
