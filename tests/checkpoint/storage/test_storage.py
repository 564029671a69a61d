"""Every kind of storage keeps the same promises."""

import errno
import importlib
import os
import stat
import sys

import pytest

from platform.boundary.local_files import LocalStorage, replace_file
from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import find_newest_checkpoint, load_manifest
from tests.harness.storage_job import Counting, Job, values


def chunks(*parts: bytes):
    return [memoryview(part) for part in parts]


def test_files(url):
    storage = open_storage(url)
    assert storage.list_sizes("") == storage.list_sizes("step") == {}
    storage.write("step/a.bin", chunks(b"0123", b"", b"456789"))
    storage.write("step/b", chunks(b""))
    storage.write("top", chunks(b"x"))
    assert storage.list_sizes("").keys() == {"step", "top"} and storage.list_sizes("step") == {"a.bin": 10, "b": 0}
    assert storage.read("step/a.bin") == b"0123456789" and storage.read("step/a.bin", 3, 5) == b"34"
    assert storage.read("step/a.bin", 8, 20) == b"89"
    assert storage.read("step/b") == b""
    storage.write("top", chunks(b"yz"))
    assert storage.read("top") == b"yz"
    for gone in ("step/none", "none"):
        with pytest.raises(FileNotFoundError):
            storage.read(gone)
        storage.delete(gone)
    storage.delete("step/a.bin")
    assert open_storage(url).list_sizes("step") == {"b": 0}
    storage.delete("step")
    assert open_storage(url).list_sizes("") == {"top": 2}


def test_a_write_that_fails_midway_leaves_nothing(url):
    def failing():
        yield memoryview(b"half")
        raise KeyError("the worker")

    storage = open_storage(url)
    with pytest.raises((KeyError, OSError), match="the worker"):
        storage.write("step/a.bin", failing())
    assert storage.list_sizes("step") == {}


def test_a_checkpoint_lives_there(url):
    """Save, damage, fall back, restore under another plan, prune."""
    storage = Counting(open_storage(url))
    old, new = (Job.whole(values({"a": (300, 20), "b": (7,)}, step), 2) for step in (1, 2))
    first, second = old.save(storage, 1), new.save(storage, 2)
    newest = find_newest_checkpoint(storage)
    assert newest.directory == second
    other = Job.whole(new.tensors, 3)
    storage.read_bytes = 0
    other.check(other.restore(storage, second, newest.manifest))
    assert storage.read_bytes == newest.manifest.nbytes
    data = bytearray(storage.read(f"{second}/blocks-00001.bin"))
    data[5] ^= 1
    storage.write(f"{second}/blocks-00001.bin", chunks(bytes(data)))
    newest = find_newest_checkpoint(storage)
    assert newest.directory == first and "not what was written" in newest.refused[0][1]
    third = old.save(storage, 3)
    assert catalogue.prune_checkpoints(storage, last=1) == [first]
    assert open_storage(url).list_sizes("").keys() == {second, third} and load_manifest(storage, third)


def test_several_parts_make_one_file(url):
    """More than one part of a multipart upload, which S3 wants to be 5 MiB at least."""
    storage = open_storage(url)
    part = bytes(range(256)) * (3 << 12)
    storage.write("big", chunks(*[part] * 20))
    assert (
        storage.list_sizes("") == {"big": 20 * len(part)}
        and storage.read("big", len(part) - 1, len(part) + 1) == b"\xff\x00"
    )


def test_a_storage_that_cannot_be_had_is_refused_by_name(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"^checkpoint.url=nowhere://b/c: cannot be used: .*nowhere.*; nearest legal: a path$"
    ):
        open_storage("nowhere://user:secret@b/c")
    fsspec_registry = importlib.import_module("fsspec.registry")  # a name in fsspec hides it
    monkeypatch.delitem(fsspec_registry._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    missing = (
        r"cannot be used: Install s3fs to access S3 \(pip install 'elastic-platform\[s3\]'\); nearest legal: a path$"
    )
    with pytest.raises(ConfigError, match=missing):
        open_storage("s3://bucket/run")
    assert strip_url_secrets("ftp://user:secret@host/path") == "ftp://host/path"
    assert open_storage("memory://user:secret@b/c").url == "memory://b/c"


def test_a_bucket_that_does_not_exist(s3):
    storage = open_storage("s3://nobody-has-this/run")
    with pytest.raises(OSError):
        storage.write("a", chunks(b"x"))


@pytest.mark.parametrize("name", ["EINVAL", "EBADF", "ENOTSUP", "ENOSYS"])
def test_a_file_system_that_cannot_flush_folders_works(tmp_path, monkeypatch, name):
    """Some of CIFS and FUSE; what cannot be flushed at all is an error."""
    fsync, number = os.fsync, getattr(errno, name)

    def refuse(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse)
    storage = LocalStorage(tmp_path / "new")
    storage.write("a/b", [b"x"])
    storage.delete("a/b")
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        storage.write("a/c", [b"x"])


def test_a_file_stays_whole_where_its_folder_cannot_be_flushed(tmp_path, monkeypatch):
    """The old one was gone, and the new one was deleted."""
    path = tmp_path / "x"
    replace_file(path, [b"old"], durable=True)
    monkeypatch.setattr("platform.boundary.local_files._synchronise_directory", lambda _: os.close(1 << 20))
    with pytest.raises(OSError, match="Bad file"):
        replace_file(path, [b"new"], durable=True)
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]
