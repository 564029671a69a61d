"""Manifests of strangers: sealed as ours are, and still no traceback, no memory beyond a bound, no nonsense."""

import io
import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from platform.boundary.storage import open_storage
from platform.checkpoint import manifest as manifests
from platform.checkpoint.__main__ import main
from platform.checkpoint.catalogue import find_newest_checkpoint, load_manifest, verify_checkpoint
from platform.checkpoint.manifest import Corrupt, Manifest, Refused
from tests.harness.storage_job import Job, meta, values

SHAPES = {"a": (6, 4), "b": (5,), "c": ()}
SHA = "0" * 64


@pytest.fixture
def saved(tmp_path):
    """A storage with one checkpoint, of step 2."""
    storage = open_storage(str(tmp_path / "checkpoints"))
    Job.whole(values(SHAPES, 2), 2).save(storage, 2)
    return storage


def seal(document) -> bytes:
    """A document (or its text) as `Manifest.encode` would end it."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    body = text.rstrip().removesuffix(b"}") + b",\n"
    return body + manifests._seal_line(body)


def read(storage) -> dict:
    manifest = json.loads((storage.root / find_newest_checkpoint(storage).directory / manifests.NAME).read_bytes())
    del manifest["sha256"]
    return manifest


def put(*keys, value):
    """Sets found[key][key]... to value."""

    def change(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


def drop(*keys):
    def change(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        del manifest[keys[-1]]

    return change


def bomb(dims: int, size: int, count: int, overlap: bool = False):
    """A tensor whose blocks lie on the diagonal: their edges would draw a grid of count ** dims cells."""

    def change(manifest):
        extent = [size - count + 1] * dims if overlap else [1] * dims
        blocks = [[[[i] * dims, extent], "blocks-00000.bin", i, SHA] for i in range(count)]
        manifest["tensors"] = [{"name": "bomb", "dtype": "uint8", "shape": [size] * dims, "blocks": blocks}]

    return change


def deep(depth: int):
    inner: object = 0
    for _ in range(depth):
        inner = {"a": inner}
    return inner


FIRST = ("tensors", 0)
BLOCK = (*FIRST, "blocks", 0)
HOSTILE = {
    "a step of text": put("meta", "step", value="abc"),
    "a negative step": put("meta", "step", value=-5),
    "a step that is a list": put("meta", "step", value=[2]),
    "a step that is true": put("meta", "step", value=True),
    "a fractional step": put("meta", "step", value=2.0),
    "a huge step": put("meta", "step", value=10**400),
    "another step": put("meta", "step", value=3),
    "no step": drop("meta", "step"),
    "a NaN step": put("meta", "step", value=float("nan")),
    "an infinite seed": put("meta", "seed", value=float("inf")),
    "samples of text": put("meta", "samples", value="8"),
    "a corpus that is a number": put("meta", "corpus", value=1),
    "an identity that is a list": put("meta", "identity", value=[]),
    "a plan that is a text": put("meta", "plan", value="1d"),
    "a mesh that is a number": put("meta", "plan", value={"mesh": 5}),
    "a mesh of texts": put("meta", "plan", "mesh", value={"t": "2"}),
    "versions that are a list": put("meta", "versions", value=["torch"]),
    "versions of numbers": put("meta", "versions", value={"torch": 2}),
    "values of NaN": put("meta", "values", value={"scale": float("nan")}),
    "deep values": put("meta", "values", value=deep(500)),
    "an unknown key": put("meta", "stepz", value=1),
    "meta that is a list": put("meta", value=[]),
    "no meta": drop("meta"),
    "half a surrogate pair": put("meta", "corpus", value="\ud800"),
    "files that are a list": put("files", value=[]),
    "a size of text": put("files", "blocks-00000.bin", value="76"),
    "a negative size": put("files", "blocks-00000.bin", value=-1),
    "a size that lies": put("files", "blocks-00000.bin", value=10**12),
    "a file above": put("files", "../x.bin", value=0),
    "a file elsewhere": put("files", "/etc/passwd.bin", value=0),
    "a file with a line in its name": put("files", "x\n.bin", value=0),
    "a file of another ending": put("files", "manifest.json", value=0),
    "tensors that are a map": put("tensors", value={}),
    "a tensor that is a list": put(*FIRST, value=[]),
    "a name that is a number": put(*FIRST, "name", value=7),
    "a name that clears the screen": put(*FIRST, "name", value="\x1b[2J"),
    "a name twice": put("tensors", 1, "name", value="a"),
    "no name": drop(*FIRST, "name"),
    "a type that is a list": put(*FIRST, "dtype", value=["float64"]),
    "an unknown type": put(*FIRST, "dtype", value="object"),
    "a shape of text": put(*FIRST, "shape", value="64"),
    "a shape with text": put(*FIRST, "shape", value=[6, "4"]),
    "a negative shape": put(*FIRST, "shape", value=[-6, -4]),
    "an empty shape": put(*FIRST, "shape", value=[0, 4]),
    "a huge shape": put(*FIRST, "shape", value=[10**30, 4]),
    "a shape of many dims": put(*FIRST, "shape", value=[1] * 1000),
    "blocks that are none": put(*FIRST, "blocks", value=None),
    "no blocks": put(*FIRST, "blocks", value=[]),
    "a block that is a map": put(*BLOCK, value={}),
    "a short block": put(*BLOCK, value=[[[0, 0], [6, 4]]]),
    "a block without a box": put(*BLOCK, 0, value=[]),
    "a box with more dims": put(*BLOCK, 0, value=[[0, 0, 0], [6, 4, 1]]),
    "a box with an offset alone": put(*BLOCK, 0, value=[[0, 0], []]),
    "a box of text": put(*BLOCK, 0, value=[["0", "0"], ["6", "4"]]),
    "a negative offset": put(*BLOCK, 0, 0, value=[-1, 0]),
    "negative extents": put(*BLOCK, 0, 1, value=[-3, -4]),
    "a fractional extent": put(*BLOCK, 0, 1, value=[3.0, 4]),
    "a huge extent": put(*BLOCK, 0, 1, value=[10**40, 4]),
    "a file that is none": put(*BLOCK, 1, value=None),
    "a file that is not listed": put(*BLOCK, 1, value="other.bin"),
    "a place before the file": put(*BLOCK, 2, value=-8),
    "a place beyond the file": put(*BLOCK, 2, value=1 << 70),
    "a place that is NaN": put(*BLOCK, 2, value=float("nan")),
    "a hash that is a number": put(*BLOCK, 3, value=0),
    "a short hash": put(*BLOCK, 3, value="0"),
    "a format of text": put("format", value="1"),
    "a format that is true": put("format", value=True),
    "a format below": put("format", value=-1),
    "an unknown part": put("more", value=1),
    "a bomb of one-element blocks": bomb(4, 600, 600),
    "a bomb of overlapping blocks": bomb(4, 600, 300, overlap=True),
    "a bomb in a line": bomb(1, 1 << 47, 10_000),
    "a bomb of many dims": bomb(16, 9, 500),
}  # fmt: skip
TEXTS = {
    "deep maps": b'{"kind": "elastic-platform checkpoint", "meta": ' + b'{"a":' * 100_000,
    "deep lists": b'{"kind": "elastic-platform checkpoint", "format": ' + b"[" * 100_000,
    "digits": b'{"kind": "elastic-platform checkpoint", "format": ' + b"1" * 100_000 + b"}",
    "a list": b"[1]",
    "nothing": b"",
    "a key twice": b'{"kind": "elastic-platform checkpoint", "format": 1, "format": 1}',
    "bytes": b'{"kind": "\xff\xfe"}',
    "nul": b"\0" * 1000,
}


@pytest.fixture
def small():
    """No more memory than there is now and half a GiB: what wants more ends with MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def check(storage, raw: bytes, capsys) -> None:
    directory = find_newest_checkpoint(storage).directory
    (storage.root / directory / manifests.NAME).write_bytes(raw)
    began = time.monotonic()
    with pytest.raises(Refused) as caught:
        verify_checkpoint(storage, directory)
    reason = str(caught.value)
    assert reason and reason.isprintable() and len(reason) < 500, reason
    assert time.monotonic() - began < 20  # a busy machine; idle it is well under a second
    for command in ("verify", "show"):
        assert main([command, storage.url]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 and len(err.splitlines()) == 1
    assert find_newest_checkpoint(storage).manifest is None


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
@pytest.mark.parametrize("what", HOSTILE)
def test_a_sealed_manifest_of_nonsense_is_corrupt(saved, small, capsys, what):
    manifest = read(saved)
    HOSTILE[what](manifest)
    check(saved, seal(manifest), capsys)


def test_another_hash_is_seen_where_the_block_is_read(saved):
    manifest = read(saved)
    put(*BLOCK, 3, value=SHA)(manifest)
    directory = find_newest_checkpoint(saved).directory
    (saved.root / directory / manifests.NAME).write_bytes(seal(manifest))
    with pytest.raises(Corrupt, match="not what was written"):
        verify_checkpoint(saved, directory)


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
@pytest.mark.parametrize("what", TEXTS)
def test_a_sealed_text_that_is_no_manifest_is_refused(saved, small, capsys, what):
    check(saved, seal(TEXTS[what]), capsys)


def test_a_manifest_that_is_larger_than_any_is_not_read(saved):
    directory = find_newest_checkpoint(saved).directory
    os.truncate(saved.root / directory / manifests.NAME, 1 << 40)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Corrupt):
        load_manifest(saved, directory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + (1 << 19)  # KiB


@pytest.mark.parametrize("name", [manifests.NAME, "blocks-00000.bin", "BAD.txt"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(saved, name):
    directory = find_newest_checkpoint(saved).directory
    (saved.root / directory / name).unlink(missing_ok=True)
    os.mkfifo(saved.root / directory / name)
    began = time.monotonic()
    assert find_newest_checkpoint(saved).manifest is None and time.monotonic() - began < 20


def test_a_block_that_is_larger_than_any_is_not_read(saved):
    """Reading would hold it as a whole. The file is a hole, and costs nothing."""
    directory, manifest = find_newest_checkpoint(saved).directory, read(saved)
    size = 1 << 36
    os.truncate(saved.root / directory / "blocks-00000.bin", size)
    manifest["files"] = {"blocks-00000.bin": size}
    block = [[[0], [size]], "blocks-00000.bin", 0, SHA]
    manifest["tensors"] = [{"name": "a", "dtype": "uint8", "shape": [size], "blocks": [block]}]
    (saved.root / directory / manifests.NAME).write_bytes(seal(manifest))
    with pytest.raises(Corrupt, match="too large"):
        verify_checkpoint(saved, directory)


def test_what_we_could_not_read_again_is_not_committed(saved):
    job = Job.whole(values(SHAPES, 3))
    strange = Job.whole({"a\n": job.tensors["a"]})
    with pytest.raises(Refused, match="not a name"):
        strange.save(saved, 3)
    assert find_newest_checkpoint(saved).manifest.meta.step == 2


def test_every_manifest_of_ours_is_read(saved):
    manifest = find_newest_checkpoint(saved).manifest
    again = Manifest.decode(manifest.encode())
    assert again == manifest and again.meta == meta(2)


HEADERS = {
    "deep": b'{"a":' * 100_000,
    "a list": b"[]",
    "bytes": b"\xff",
    "a tensor of text": b'{"a": "x"}',
    "a type that is a list": b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    "a shape of text": b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}',
    "a negative shape": b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
    "an offset beyond": b'{"a": {"dtype": "F32", "shape": [1000000000], "data_offsets": [0, 4000000000]}}',
    "offsets backwards": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    "a negative offset": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    "no offsets": b'{"a": {"dtype": "F32", "shape": [1]}}',
    "a size that lies": b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
    "metadata of numbers": b'{"__metadata__": {"elastic_platform_meta": 5}}',
    "metadata that is a list": b'{"__metadata__": []}',
    "metadata of nonsense": b'{"__metadata__": {"elastic_platform_meta": "{\\"step\\": -1}"}}',
    "deep metadata": b'{"__metadata__": {"elastic_platform_meta": "' + b"[" * 100_000 + b'"}}',
    "a name twice": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}',
    "digits": b'{"a": ' + b"1" * 100_000 + b"}",
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_safetensors_file_of_nonsense_is_refused(tmp_path, capsys, what):
    head = HEADERS[what]
    source, target = tmp_path / "x.safetensors", tmp_path / "to"
    source.write_bytes(len(head).to_bytes(8, "little") + head + b"\0" * 8)
    assert main(["import", str(source), str(target)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.isprintable() and len(said) < 500
    assert find_newest_checkpoint(open_storage(str(target))).manifest is None


@pytest.mark.parametrize("what", ["missing", "a directory", "a pipe", "short", "a long header"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, capsys, what):
    source = tmp_path / "x.safetensors"
    if what in ("a directory", "a pipe"):
        (os.mkfifo if what == "a pipe" else os.mkdir)(source)
    elif what != "missing":
        source.write_bytes(b"\xff" * (8 if what == "a long header" else 3))
    assert main(["import", str(source), str(tmp_path / "to")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_names_of_any_letters_are_shown(saved, monkeypatch):
    """Also where standard output takes ASCII alone."""
    manifest = read(saved)
    manifest["tensors"][0]["name"] = "\u0161\u2192"
    (saved.root / find_newest_checkpoint(saved).directory / manifests.NAME).write_bytes(seal(manifest))
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(taken, "ascii"))
    assert main(["show", saved.url]) == 0
    sys.stdout.flush()
    assert b"\\u0161\\u2192" in taken.getvalue()
