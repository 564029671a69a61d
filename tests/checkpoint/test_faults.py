"""Whatever fails, and wherever: no wrong value is ever restored, and the newest checkpoint that holds is found."""

import errno
import itertools
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from threading import BrokenBarrierError

import pytest

from platform.checkpoint.storage import catalogue
from platform.checkpoint.storage import manifest as manifests
from platform.checkpoint.storage import storage as storage_module
from platform.checkpoint.storage.catalogue import find, load, verify
from platform.checkpoint.storage.manifest import Corrupt, Manifest, Refused
from platform.checkpoint.storage.saver import Saver
from platform.checkpoint.storage.storage import Storage, connect
from tests.checkpoint import faults
from tests.checkpoint.faults import FaultyOs, Killed
from tests.checkpoint.job import Job, meta, values

SHAPES = {"a": (6, 4), "b": (5,), "c": ()}


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch):
    """No real fsync; and small tensors are cut as large ones are."""
    monkeypatch.setattr(storage_module, "os", FaultyOs())
    monkeypatch.setattr("platform.checkpoint.blocks.placement.GRANULE", 16)


@cache
def job(step: int) -> Job:
    return Job.whole(values(SHAPES, step), 2)


def newest(storage) -> int:
    """The step of the newest checkpoint that can be trusted, once its values are seen to be those of that step."""
    found = find(storage)
    assert found.manifest is not None and found.directory is not None
    step = found.manifest.meta.step
    job(step).check(job(step).restore(storage, found.directory, found.manifest))
    return step


@pytest.fixture
def storage(tmp_path):
    """With a checkpoint of step 1."""
    storage = connect(str(tmp_path / "checkpoints"))
    job(1).save(storage, 1)
    return storage


@pytest.fixture
def copies(tmp_path) -> Callable[..., Storage]:
    """`copies(1, 2)`: a fresh storage with checkpoints of steps 1 and 2."""
    made: dict[tuple[int, ...], Path] = {}
    number = itertools.count()

    def copy(*steps: int) -> Storage:
        if steps not in made:
            made[steps] = tmp_path / f"steps {steps}"
            for step in steps:
                job(step).save(connect(str(made[steps])), step)
        return connect(str(copytree(made[steps], tmp_path / str(next(number)))))

    return copy


def faulty(monkeypatch, *args, **kwargs) -> FaultyOs:
    system = FaultyOs(*args, **kwargs)
    monkeypatch.setattr(storage_module, "os", system)
    return system


FAULTS = {
    "EIO": faults.error(errno.EIO),
    "ENOSPC": faults.error(errno.ENOSPC),
    "torn": faults.torn(errno.ENOSPC),
    "kill": faults.kill,
    "kill_after": faults.kill_after,
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
            assert step == 1  # a save that reports failure leaves nothing to be found
        job(3).save(storage, 3)
        catalogue.prune(storage, last=2)
        assert newest(storage) == 3 and len(storage.list("")) == 2
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
    assert find(storage).manifest.meta.step == 2
    system.lose_power()
    assert newest(storage) == 1


def test_a_short_write_is_continued(storage, monkeypatch):
    at, fired = 0, True
    while fired:
        with monkeypatch.context() as patch:
            system = faulty(patch, at, faults.short)
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
                catalogue.prune(storage, last=1)
        assert newest(storage) == 3 and not find(storage).refused
        for directory in storage.list(""):
            with suppress(Refused):
                assert not load(storage, directory).faults()
        catalogue.prune(storage, last=1)
        assert [name[:13] for name in storage.list("")] == ["step-00000003"]
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
    saver = Saver(storage, pause=0, **kwargs)
    job_ = job(step)
    saver.save(job_.shapes, meta(step), lambda directory: job_.write(storage, directory))
    assert saver.wait(30)
    return saver.poll()


def test_a_save_is_retried_whatever_failed_once(copies):
    at, fired = 0, True
    while fired:
        storage = copies(1)
        with pytest.MonkeyPatch.context() as patch:
            system = faulty(patch, at, faults.torn(errno.ENOSPC))
            events = saver_events(storage, 2)
        outcome = [e["event"] for e in events]
        assert outcome.count("checkpoint") == 1 and newest(storage) == 2
        if outcome[0] == "checkpoint_failed":
            assert events[0]["again"] and "No space left" in events[0]["reason"]
            assert len(storage.list("")) == 2  # the failed attempt gave its space back
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
    assert len(storage.list("")) == 1 and newest(storage) == 1
    assert [e["event"] for e in saver_events(storage, 2)] == ["checkpoint"] and newest(storage) == 2


def files(storage, directory: str) -> list[Path]:
    return sorted((storage.root / directory).iterdir())


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    **{f"a flipped bit at {p}": lambda f, p=p: flip(f, int(p * (f.stat().st_size - 1))) for p in (0, 0.3, 0.5, 0.9, 1)},
    "missing": Path.unlink,
    "empty": lambda f: f.write_bytes(b""),
    "torn": lambda f: os.truncate(f, f.stat().st_size - 1),
    "longer": lambda f: f.write_bytes(f.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_found(copies, damage):
    number = 0
    while True:
        storage = copies(1, 2)
        directory = max(storage.list(""))
        if number == len(files(storage, directory)):
            break
        DAMAGE[damage](files(storage, directory)[number])
        found = find(storage)
        assert found.manifest.meta.step == 1
        [(refused, reason)] = found.refused
        assert refused == directory and "\n" not in reason
        whole = 3 - (damage == "missing")
        incomplete = damage == "missing" and "no manifest" in reason
        assert len(files(storage, directory)) == whole + (not incomplete)  # marked, and nothing deleted
        assert newest(storage) == 1 and reason in find(storage).refused[0][1]
        catalogue.prune(storage, last=1)
        assert directory in storage.list("") and newest(storage) == 1
        number += 1
    assert number == 3


def rewrite(storage, directory: str, change) -> None:
    """The same checkpoint with another, validly sealed manifest."""
    path = f"{directory}/{manifests.NAME}"
    manifest = change(Manifest.decode(bytes(storage.read(path))))
    storage.write(path, [memoryview(manifest if isinstance(manifest, bytes) else manifest.encode())])


def without_a_block(manifest: Manifest) -> Manifest:
    a = manifest.tensors["a"]
    return replace(manifest, tensors={**manifest.tensors, "a": replace(a, blocks=a.blocks[1:])})


def with_a_block_twice(manifest: Manifest) -> Manifest:
    a = manifest.tensors["a"]
    return replace(manifest, tensors={**manifest.tensors, "a": replace(a, blocks=(*a.blocks, a.blocks[0]))})


def outside(manifest: Manifest) -> Manifest:
    return replace(manifest, tensors={**manifest.tensors, "a": replace(manifest.tensors["a"], shape=(5, 4))})


def sealed(change):
    def apply(manifest: Manifest) -> bytes:
        body = change(manifest.encode().rpartition(b'"sha256": ')[0])
        return body + manifests._seal(body)

    return apply


IMPOSSIBLE = {
    "a hole": (without_a_block, r"a: \[0:\d, 0:\d\] is in no block"),
    "an overlap": (with_a_block_twice, r"a: \[0:\d, 0:\d\] is in several blocks"),
    "out of range": (outside, r"a: \[\d:6, 0:4\] lies outside of \[0:5, 0:4\]"),
    "an unknown file": (sealed(lambda b: b.replace(b'"blocks-00001.bin", 0', b'"other.bin", 0')), "one after the"),
    "a gap in a file": (sealed(lambda b: b.replace(b'-00000.bin", 0', b'-00000.bin", 1')), "one after the"),
    "another file": (sealed(lambda b: b.replace(b"blocks-00001.bin", b"../../b-001.bin")), "not the name of a block"),
    "another type": (sealed(lambda b: b.replace(b'"float32"', b'"float99"')), "unknown type 'float99'"),
    "no metadata": (sealed(lambda b: b.replace(b'"samples"', b'"simples"')), "malformed"),
}  # fmt: skip


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_sealed_manifest_is_still_checked(storage, what):
    change, reason = IMPOSSIBLE[what]
    directory = job(2).save(storage, 2)
    rewrite(storage, directory, change)
    with pytest.raises(Corrupt, match=reason):
        load(storage, directory)
    assert newest(storage) == 1


OTHERS = {
    "newer": (sealed(lambda b: b.replace(b'"format": 1', b'"format": 2')), "format 2 is newer than 1"),
    "foreign": (sealed(lambda b: b.replace(b"elastic-platform", b"another-program!")), "not of this platform"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_others_wrote_is_passed_over_and_left_alone(storage, what):
    change, reason = OTHERS[what]
    directory = job(2).save(storage, 2)
    rewrite(storage, directory, change)
    before = files(storage, directory)
    found = find(storage)
    assert found.manifest.meta.step == 1 and reason in found.refused[0][1]
    assert files(storage, directory) == before
    catalogue.prune(storage, last=1)
    assert files(storage, directory) == before


def test_foreign_names_are_left_alone(storage, tmp_path):
    root = tmp_path / "checkpoints"
    (root / "step-1").mkdir()
    (root / "step-00000009-000009-abcdeg").mkdir()
    (root / "notes.txt").write_text("mine")
    job(2).save(storage, 2)
    catalogue.prune(storage, last=1)
    assert newest(storage) == 2
    assert {"step-1", "step-00000009-000009-abcdeg", "notes.txt"} <= set(storage.list(""))


def test_stale_attempts(storage):
    """What a dead writer left is never loaded; it goes once a newer checkpoint is complete."""
    stale = catalogue.begin(storage, 7)
    job(7).write(storage, stale)
    found = find(storage)
    assert found.manifest.meta.step == 1
    assert found.refused == ((stale, f"incomplete, or not a checkpoint: it has no {manifests.NAME}"),)
    catalogue.prune(storage, last=1)
    assert stale in storage.list("")  # it may be under way
    job(2).save(storage, 2)
    catalogue.prune(storage, last=2)
    assert stale not in storage.list("") and len(storage.list("")) == 2 and newest(storage) == 2


def test_a_run_taken_back_goes_on_from_where_it_is(storage):
    """Not the highest step but the newest checkpoint counts, and retention agrees."""
    job(9).save(storage, 9)
    job(4).save(storage, 4)
    assert newest(storage) == 4
    catalogue.prune(storage, last=1)
    assert newest(storage) == 4 and len(storage.list("")) == 1


def test_two_writers(storage):
    """Both save and prune into one storage at once."""

    def write(steps):
        for step in steps:
            with suppress(Refused, OSError, BrokenBarrierError):  # what the one reads, the other may just delete
                job(step).save(storage, step)
                catalogue.prune(storage, last=2)
                assert newest(storage)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (range(2, 12), range(12, 22))))
    assert newest(storage) in (11, 21)
    for directory in storage.list(""):
        # One that the other pruned while it was written has files, written since, and no manifest.
        if manifests.NAME in storage.list(directory):
            verify(storage, directory)


def test_a_commit_needs_all_reports(storage):
    step = job(2)
    directory = catalogue.begin(storage, 2)
    one, two = step.write(storage, directory)
    with pytest.raises(Refused, match="has no b|is in no block"):
        catalogue.commit(storage, directory, step.shapes, [one], meta(2))
    with pytest.raises(Refused, match="has no z"):
        catalogue.commit(storage, directory, {**step.shapes, "z": (1,)}, [one, two], meta(2))
    with pytest.raises(Refused, match="the workers wrote b, which is no part of the state"):
        catalogue.commit(storage, directory, {"a": (6, 4), "c": ()}, [one, two], meta(2))
    with pytest.raises(Refused, match="is in several blocks"):
        catalogue.commit(storage, directory, step.shapes, [one, two, replace(one, file=two.file)], meta(2))
    other = replace(two, blocks=[b._replace(shape=(9, 9)) if b.name == "a" else b for b in two.blocks])
    with pytest.raises(Refused, match="a has several shapes or types"):
        catalogue.commit(storage, directory, step.shapes, [one, other], meta(2))
    os.truncate(storage.root / directory / two.file, 1)
    with pytest.raises(Refused, match="blocks-00001.bin has 1 bytes instead of"):
        catalogue.commit(storage, directory, step.shapes, [one, two], meta(2))
    with pytest.raises(ValueError):
        replace(Manifest.of(meta(2), [one, two]), meta=replace(meta(2), values={"scale": float("nan")})).encode()
    assert newest(storage) == 1


class Unreadable:
    """A storage some of whose files cannot be read today."""

    def __init__(self, inner, what: str):
        self.inner, self.what = inner, what

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def read(self, path, *span):
        if self.what in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return self.inner.read(path, *span)


@pytest.mark.parametrize("file", ["manifest.json", "blocks-00001.bin"])
def test_what_cannot_be_read_today_is_passed_over_and_not_marked(storage, file):
    directory = job(2).save(storage, 2)
    assert newest(Unreadable(storage, f"{directory}/{file}")) == 1
    assert newest(storage) == 2
    with pytest.raises(OSError, match="Input/output error"):
        job(2).restore(Unreadable(storage, "blocks-00001.bin"), directory, load(storage, directory))


def test_a_quarantine_can_be_lifted(storage):
    directory = job(2).save(storage, 2)
    catalogue.quarantine(storage, directory, "for a test")
    assert find(storage).refused == ((directory, "quarantined: for a test"),)
    storage.delete(f"{directory}/{catalogue.BAD}")
    assert newest(storage) == 2


@pytest.mark.parametrize(
    ("steps", "last", "every", "gone"),
    [
        ([5, 4, 3, 2, 1], 2, 0, [3, 2, 1]),
        ([5, 4, 3, 2, 1], 2, 2, [3, 1]),
        ([5], 0, 0, []),
        ([6, 5, 4], 0, 0, [5, 4]),
        ([9, 4, 4, 2], 1, 4, [4, 2]),
        ([], 3, 2, []),
    ],
)
def test_retention(steps, last, every, gone):
    complete = [catalogue.Attempt(100 - i, step, "") for i, step in enumerate(steps)]
    found = catalogue.superseded(complete, last, every)
    assert [a.step for a in found] == gone
    assert complete[:1] not in ([a] for a in found)
    if steps == [9, 4, 4, 2]:
        assert found[0] == complete[2]  # of two attempts at a step the newer one stays
