"""Compressed text of strangers, drawn from a seed: gzip and zstd are unpacked in this process, so what they take of its
memory, and what comes out, must stay within the configuration's bounds whatever the file says of itself."""

from __future__ import annotations

import gzip
import json
import random
import struct
import subprocess
import sys
import zlib

import pytest

from platform.data import data_files

ZSTD = b"\x28\xb5\x2f\xfd"
WINDOW = 128 << 20  # bytes, 2 ** 27: the largest window of a zstd frame that the library opens
UNPACKED = 2 << 20  # bytes that a file may unpack to whatever its size: few, as millions of empty lines take long
SLACK = 96 << 20  # bytes of pieces of text, of the library itself, and of what Python keeps
READ = """
import json, resource, sys
from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import data_files
from platform.data import text_sources as texts
import pyarrow
data_files.LINE, data_files.UNPACKED = 1 << 20, int(sys.argv[1])
for name in sys.stdin.read().split():
    data, size, said = Data(kind="text", path=name), 0, ""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for _, piece in texts.read_documents(texts.find_text_files(data), data):
            size += len(piece.encode())
    except ConfigError as error:
        [said] = error.violations
    print(json.dumps([name, size, said, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def zstd(blocks: int, window: int, content: bytes = b"\n", last: bool = True, claims: int | None = None) -> bytes:
    """A frame with a window of 2 ** window bytes, of blocks that each repeat a byte 128 Ki times; `claims`: the size
    that it says."""
    size = min(1 << window, 1 << 17)
    head = bytes([0xC0 if claims is not None else 0, window - 10 << 3])
    head += struct.pack("<Q", claims) if claims is not None else b""
    block = [struct.pack("<I", (i == blocks - 1 and last) | 1 << 1 | size << 3)[:3] + content for i in range(blocks)]
    return ZSTD + head + b"".join(block)


def skippable(size: int, present: int | None = None) -> bytes:
    return struct.pack("<II", 0x184D2A50 + size % 16, size) + b"\0" * (size if present is None else present)


def deflated(draw: random.Random, level: int = 9) -> bytes:
    """A member of gzip with whatever its header may have, and sizes and sums that may lie."""
    name = b"n" * draw.choice([1, 10**5]) + b"\0"
    raw = zlib.compressobj(level, zlib.DEFLATED, -15)
    body = raw.compress(draw.choice([b"\n", b"a b\n"]) * draw.choice([1, 10**4, 4 * 10**6])) + raw.flush()
    return b"\x1f\x8b\x08\x08" + b"\0" * 6 + name + body + struct.pack("<II", draw.getrandbits(32), 0)


def bomb(draw: random.Random) -> bytes:
    """One file, of a kind that is drawn."""
    window = draw.choice([10, 17, 23, 27, 28, 31, 41])
    blocks = draw.choice([1, 100, 10_000])
    frames = [
        lambda: zstd(blocks, window),
        lambda: zstd(blocks, window, claims=draw.choice([0, 1, 1 << 20, (1 << 63) - 1])),
        lambda: zstd(blocks, window, last=False),
        lambda: zstd(1, 10) * draw.choice([10, 10_000]),
        lambda: zstd(1, 17) + skippable(draw.choice([0, 5, 10**6])) + zstd(draw.choice([1, 5000]), 17),
        lambda: zstd(1, 17) + skippable((1 << 32) - 1, 100),
        lambda: gzip.compress(b"a b\n" * draw.choice([10, 8_000_000]), 9, mtime=0),
        lambda: gzip.compress(b"\n", 9, mtime=0) * draw.choice([10, 20_000]),
        lambda: gzip.compress(gzip.compress(b"\n" * 40_000_000, 9, mtime=0), 9, mtime=0),
        lambda: gzip.compress(zstd(5000, 17), 9, mtime=0),
        lambda: deflated(draw),
        lambda: gzip.compress(b"x" * draw.choice([100, 40_000_000]), 9, mtime=0),
        lambda: gzip.compress(b"{" + b'"text": "' + b"y" * 40_000_000 + b'"}', 9, mtime=0),
    ]
    raw = bytearray(draw.choice(frames)())
    for _ in range(draw.choice([0, 0, 1, 3])):
        raw[draw.randrange(4, len(raw))] ^= 1 << draw.randrange(8)
    return bytes(raw[: draw.choice([len(raw)] * 3 + [len(raw) // 2 + 4])])


@pytest.mark.parametrize("count", [16, pytest.param(1500, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_bombs_stay_within_their_bounds(tmp_path, count):
    draw, names = random.Random(count), []
    for number in range(count):
        path = tmp_path / f"{number}.{draw.choice(['txt', 'jsonl'])}.x"
        path = path.with_suffix("") if draw.random() < 0.5 else path.with_suffix(draw.choice([".gz", ".zst"]))
        path.write_bytes(bomb(draw))
        names.append(path)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(UNPACKED)], input="\n".join(map(str, names)), capture_output=True, text=True
    )
    reads = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reads) == count, done.stderr[-2000:]
    first = reads[0][3] << 10
    for path, (_, size, said, _, peak) in zip(names, reads, strict=True):
        most = max(UNPACKED, data_files.RATIO * path.stat().st_size)
        assert size <= most, (path, size, most)
        assert (peak << 10) - first <= WINDOW + SLACK, (path, peak, said)
        assert not said or (said.startswith(f"data.path={path}: ") and said.isprintable() and len(said) < 600), said
    refused = [said for _, _, said, _, _ in reads if said]
    assert any("unpacks to more than 300 times" in said for said in refused), refused
    assert any(size for _, size, said, _, _ in reads if not said), "none was read"
