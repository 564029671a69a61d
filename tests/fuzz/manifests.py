"""Files of strangers: manifests, run directories, leases, listings, safetensors headers, text and token caches.

Each case mutates what a real run wrote, sealed anew or not. It must end as what was written, or as refused with the
reason in a line; in bounded memory and time, and nothing good is deleted.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from platform.checkpoint import manifest as manifests
from platform.checkpoint.__main__ import summarize_manifest
from platform.checkpoint.blocks import ITEMSIZE
from platform.checkpoint.catalogue import find_newest_checkpoint, verify_checkpoint
from platform.checkpoint.manifest import Manifest, Refused
from platform.checkpoint.moves import read_tensor
from tests.fuzz import directories, mutations, texts
from tests.fuzz.world import SHAPES, World, told

MEMORY = 1 << 30  # bytes beyond what the process has at the beginning
SECONDS = 10.0  # of CPU, of one case


MANIFESTS = [f"manifest: {kind}" for kind in (*mutations.KINDS, "tiling", "traversal", "sizes", "bombs", "blocks")]
RECORDS = [f"{file}: {kind}" for file in ("journal", "metrics") for kind in ("lines", "text")]
OTHERS = [
    "config.yaml",
    "kinds of files",
    "leases",
    "listings",
    "safetensors",
    "jsonl",
    "pairs",
    "packed text",
    "token cache",
]
CLASSES = [*MANIFESTS, *RECORDS, *OTHERS]


def seal(raw: bytes) -> bytes:
    """Return a manifest's text as `Manifest.encode` would end it."""
    body = raw.rstrip().removesuffix(b"}") + b",\n"
    return body + manifests._seal_line(body)


def manifest(world: World, draw: Random, kind: str) -> None:
    """A manifest, or a block file, of the newest checkpoint."""
    document, path = deepcopy(world.document), world.path
    if kind == "blocks":
        path = path.with_name(f"blocks-0000{draw.randrange(2)}.bin")
        raw = draw.choice([mutations.damaged, mutations.cut])(draw, path.read_bytes())
    elif kind in mutations.KINDS:
        raw = mutations.document(draw, kind, document)
        raw = seal(raw) if draw.random() < 0.8 else raw
    else:
        LAYOUTS[kind](draw, document)
        raw = seal(json.dumps(document).encode())
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        verified = verify_checkpoint(world.storage, world.directory)
    except Refused as error:
        told(error)
        assert find_newest_checkpoint(world.storage, quarantines=False).manifest.meta.step == 1
    else:
        same(world, verified)
    finally:
        path.write_bytes(before)


def same(world: World, verified: Manifest) -> None:
    """Assert that what was verified is what was written: the blocks, and their bytes. A tensor may have another name in
    what is sealed again: who looks for it finds that it is not there."""
    parts = [sorted(repr(replace(t, name="")) for t in m.tensors.values()) for m in (verified, world.manifest)]
    assert parts[0] == parts[1] and verified.files == world.manifest.files, "other blocks are verified"
    assert verified.meta.step == world.manifest.meta.step and Manifest.decode(verified.encode()) == verified
    json.dumps(summarize_manifest(verified)).encode()
    for name in verified.tensors.keys() & SHAPES.keys():
        tensor = read_tensor(world.storage, world.directory, verified, name)
        assert torch.equal(tensor, world.tensors[name]), f"{name} is another"


def tiling(draw: Random, document: dict[str, Any]) -> None:
    """Blocks are moved, doubled, dropped, cut or exchanged between tensors."""
    a, b = draw.sample(document["tensors"], 2)
    block = draw.choice(a["blocks"])
    (offset, extent), _, _, _ = block
    how = draw.randrange(6)
    if how == 0:
        a["blocks"].append(deepcopy(block))
    elif how == 1:
        a["blocks"].remove(block)
    elif how == 2:
        a["blocks"], b["blocks"] = b["blocks"], a["blocks"]
    elif how == 3:
        block[2] += draw.choice([-8, -1, 1, 8])
    elif how == 4:
        a["shape"] = [n + 1 for n in a["shape"]] + [2] * draw.randint(0, 1)
    else:
        part = draw.choice([offset, extent])
        part[:] = [n + draw.choice([-1, 1, 2]) for n in part] or [draw.randrange(3)]


ELSEWHERE = [
    "../x.bin", "/etc/passwd", "..", ".", "", "a/b.bin", "a\\..\\b.bin", "x\n.bin", "x.bin\x00", "manifest.json",
    "BAD.txt", "\u0661.bin", "~/.bin", "file:///x.bin", "x" * 5000 + ".bin",
]  # fmt: skip


def traversal(draw: Random, document: dict[str, Any]) -> None:
    """A file lies elsewhere."""
    old = draw.choice(list(document["files"]))
    new = draw.choice([*ELSEWHERE, f"../{old}", f"./{old}", f"{old}/"])
    document["files"] = {new if name == old else name: size for name, size in document["files"].items()}
    if draw.random() < 0.7:
        for tensor in document["tensors"]:
            for block in tensor["blocks"]:
                block[1] = new if block[1] == old else block[1]


def sizes(draw: Random, document: dict[str, Any]) -> None:
    """A size lies, or a type has other bytes."""
    if draw.random() < 0.5:
        name = draw.choice(list(document["files"]))
        document["files"][name] = draw.choice([0, 1, -1, 10**12, 1 << 62, document["files"][name] + 1])
    else:
        tensor = draw.choice(document["tensors"])
        others = [name for name, size in ITEMSIZE.items() if size != ITEMSIZE[tensor["dtype"]]]
        tensor["dtype"] = draw.choice([*others, "object", "float128"])


def bombs(draw: Random, document: dict[str, Any]) -> None:
    """Few blocks whose edges would draw a grid of any size, or one that is larger than memory."""
    dims, count = draw.randint(1, 16), draw.choice([2, 50, 600])
    size = draw.choice([count, 600, 10**6, 1 << 48])
    extent = draw.choice([1, 1, max(1, size - count)])
    blocks = [[[[i] * dims, [extent] * dims], "blocks-00000.bin", i, "0" * 64] for i in range(count)]
    if draw.random() < 0.2:
        blocks = [[[[0] * dims, [size] * dims], "blocks-00000.bin", 0, "0" * 64]]
    document["tensors"].append({"name": "bomb", "dtype": "uint8", "shape": [size] * dims, "blocks": blocks})


LAYOUTS: dict[str, Callable[[Random, dict[str, Any]], None]] = {
    "tiling": tiling, "traversal": traversal, "sizes": sizes, "bombs": bombs,
}  # fmt: skip


@contextmanager
def opened() -> Iterator[Callable[[int], str]]:
    """Yield `attempt`, in a process that may have MEMORY more than now."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        world = World(Path(folder))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
        try:
            yield partial(attempt, world)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def attempt(world: World, seed: int) -> str:
    """Check the case that a seed draws; return its class."""
    draw = Random(seed)
    name = draw.choice(CLASSES)
    began = time.process_time()
    part, _, kind = name.partition(": ")
    if part == "manifest":
        manifest(world, draw, kind)
    elif kind:
        directories.record(world, draw, part, kind)
    elif name in ("jsonl", "pairs", "packed text"):
        texts.text(world, draw, name)
    else:
        ALONE[name](world, draw)
    assert (took := time.process_time() - began) < SECONDS, f"{name} took {took:.1f} s"
    return name


ALONE: dict[str, Callable[[World, Random], None]] = {
    "config.yaml": directories.configuration, "kinds of files": directories.kinds, "leases": directories.leases,
    "listings": directories.listings, "safetensors": texts.safetensors, "token cache": texts.tokens,
}  # fmt: skip
