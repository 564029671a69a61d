"""What lies in a storage that is damaged, impossible, foreign or stale: it is found, passed over or left alone."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from platform.checkpoint import catalogue
from platform.checkpoint import manifest as manifests
from platform.checkpoint.catalogue import find_newest_checkpoint, load_manifest
from platform.checkpoint.manifest import Corrupt, Manifest
from tests.harness.small_storage import job, newest


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
        directory = max(storage.list_sizes(""))
        if number == len(files(storage, directory)):
            break
        DAMAGE[damage](files(storage, directory)[number])
        selection = find_newest_checkpoint(storage)
        assert selection.manifest.meta.step == 1
        [(refused, reason)] = selection.refused
        assert refused == directory and "\n" not in reason
        whole = 3 - (damage == "missing")
        incomplete = damage == "missing" and "no manifest" in reason
        assert len(files(storage, directory)) == whole + (not incomplete)  # marked, and nothing deleted
        assert newest(storage) == 1 and reason in find_newest_checkpoint(storage).refused[0][1]
        catalogue.prune_checkpoints(storage, last=1)
        assert directory in storage.list_sizes("") and newest(storage) == 1
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
        return body + manifests._seal_line(body)

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
        load_manifest(storage, directory)
    assert newest(storage) == 1


OTHERS = {
    "newer": (sealed(lambda b: b.replace(b'"format": 2', b'"format": 3', 1)), "format 3 is newer than 2"),
    "older": (sealed(lambda b: b.replace(b'"format": 2', b'"format": 1', 1)), "format 1 is older than 2"),
    "imported": (sealed(lambda b: b.replace(b', "format": 2', b"", 1)), "format 1 is older than 2"),
    "foreign": (sealed(lambda b: b.replace(b"elastic-platform", b"another-program!")), "not of this platform"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_others_wrote_is_passed_over_and_left_alone(storage, what):
    change, reason = OTHERS[what]
    directory = job(2).save(storage, 2)
    rewrite(storage, directory, change)
    before = files(storage, directory)
    selection = find_newest_checkpoint(storage)
    assert selection.manifest.meta.step == 1 and reason in selection.refused[0][1]
    assert files(storage, directory) == before
    catalogue.prune_checkpoints(storage, last=1)
    assert files(storage, directory) == before


def test_foreign_names_are_left_alone(storage, tmp_path):
    root = tmp_path / "checkpoints"
    (root / "step-1").mkdir()
    (root / "step-00000009-000009-abcdeg").mkdir()
    (root / "notes.txt").write_text("mine")
    job(2).save(storage, 2)
    catalogue.prune_checkpoints(storage, last=1)
    assert newest(storage) == 2
    assert {"step-1", "step-00000009-000009-abcdeg", "notes.txt"} <= set(storage.list_sizes(""))


def test_stale_attempts(storage):
    """What a dead writer left is never loaded; it goes once a newer checkpoint is complete."""
    stale = catalogue.choose_attempt_directory(storage, 7)
    job(7).write(storage, stale)
    selection = find_newest_checkpoint(storage)
    assert selection.manifest.meta.step == 1
    assert selection.refused == ((stale, f"incomplete, or not a checkpoint: it has no {manifests.NAME}"),)
    catalogue.prune_checkpoints(storage, last=1)
    assert stale in storage.list_sizes("")  # it may be under way
    job(2).save(storage, 2)
    catalogue.prune_checkpoints(storage, last=2)
    assert stale not in storage.list_sizes("") and len(storage.list_sizes("")) == 2 and newest(storage) == 2


def test_a_run_taken_back_goes_on_from_where_it_is(storage):
    """Not the highest step but the newest checkpoint counts, and retention agrees."""
    job(9).save(storage, 9)
    job(4).save(storage, 4)
    assert newest(storage) == 4
    catalogue.prune_checkpoints(storage, last=1)
    assert newest(storage) == 4 and len(storage.list_sizes("")) == 1


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

    def open(self, path, *span):
        if self.what in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return self.inner.open(path, *span)


@pytest.mark.parametrize("file", ["manifest.json", "blocks-00001.bin"])
def test_what_cannot_be_read_today_is_passed_over_and_not_marked(storage, file):
    directory = job(2).save(storage, 2)
    assert newest(Unreadable(storage, f"{directory}/{file}")) == 1
    assert newest(storage) == 2
    with pytest.raises(OSError, match="Input/output error"):
        job(2).restore(Unreadable(storage, "blocks-00001.bin"), directory, load_manifest(storage, directory))


def test_a_quarantine_can_be_lifted(storage):
    directory = job(2).save(storage, 2)
    catalogue.quarantine_checkpoint(storage, directory, "for a test")
    assert find_newest_checkpoint(storage).refused == ((directory, "quarantined: for a test"),)
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
    dispensable = catalogue.list_dispensable(complete, last, every)
    assert [a.step for a in dispensable] == gone
    assert complete[:1] not in ([a] for a in dispensable)
    if steps == [9, 4, 4, 2]:
        assert dispensable[0] == complete[2]  # of two attempts at a step the newer one stays
