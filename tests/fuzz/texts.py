"""Text, token caches and safetensors files of strangers, as cases of `tests.fuzz.manifests`."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.checkpoint.interchange import import_safetensors
from platform.checkpoint.manifest import Refused
from platform.config.fields import Data
from platform.data import cache, text_sources
from platform.data.cache_entries import read_entry
from tests.fuzz import mutations
from tests.fuzz.world import SIZES, World, told


def safetensors(world: World, draw: Random) -> None:
    """The header of such a file."""
    raw = Path(world.safetensors).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    kind = draw.choice([*mutations.KINDS, "length"])
    head = raw[8 : 8 + length] if kind == "length" else mutations.document(draw, kind, json.loads(raw[8 : 8 + length]))
    told_length = draw.choice([0, 1, 1 << 40, (1 << 64) - 1]) if kind == "length" else len(head)
    path = world.root / "mutated.safetensors"
    path.write_bytes(told_length.to_bytes(8, "little") + head + raw[8 + length :])
    try:
        _, tensors = import_safetensors(str(path))
        assert sum(t.numel() * t.itemsize for _, t in tensors) <= len(raw) * 40
    except (Malformed, Refused, OSError) as error:
        assert len(str(error)) < 1000


def consumed(pieces: Iterator[Any]) -> None:
    """Read text to its end, or to the refusal."""
    try:
        for _ in pieces:
            pass
    except ConfigError as error:
        told(error)


def lines_of(draw: Random) -> bytes:
    """Return .jsonl, one line of which is mutated."""
    lines = [json.dumps({"text": f"a {i}", "target": f"b, [{i}]", "n": i}).encode() for i in range(4)]
    at = draw.randrange(4)
    lines[at] = mutations.document(draw, draw.choice(mutations.KINDS), json.loads(lines[at]))
    return b"\n".join(lines)


def text(world: World, draw: Random, kind: str) -> None:
    """Text of all sources, packed or not."""
    path = world.root / ("mutated.txt" if kind == "packed text" else "mutated.jsonl")
    if kind == "packed text":
        content = draw.choice([b"x", b"a\n", b"\xff", b"\0"]) * draw.choice([10, 10**6, 10**7])
        packed = gzip.compress(content, 1)
        path.write_bytes(draw.choice([lambda d, p: p, mutations.damaged, mutations.cut])(draw, packed))
    else:
        raw = lines_of(draw)
        path.write_bytes(gzip.compress(raw) if draw.random() < 0.3 else raw)
    data = Data(kind="text", path=str(path))
    consumed(
        text_sources.read_pairs(text_sources.find_pair_files(data), data)
        if kind == "pairs"
        else text_sources.read_documents([path], data)
    )


def tokens(world: World, draw: Random) -> None:
    """An entry of the token cache: it is what was built, or is built again."""
    with TemporaryDirectory(dir=world.root) as folder:
        entry = Path(shutil.copytree(world.entry, Path(folder, "entry")))
        meta = json.loads((entry / "meta.json").read_bytes())
        original = deepcopy(meta["content"])
        kind = draw.choice([*mutations.KINDS, "file", "file"])
        if kind == "file":
            name = draw.choice(["tokens.bin", "tokenizer.json", "blocks.bin"])
            raw = draw.choice([mutations.damaged, mutations.cut])(draw, (entry / name).read_bytes())
            (entry / name).write_bytes(raw)
            if draw.random() < 0.7:
                del meta["content"]["files"]["blocks.bin"]  # of a file that is changed they would tell
                meta["content"]["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
                meta["sha256"] = cache._hash_description(meta["content"])
            (entry / "meta.json").write_text(json.dumps(meta))
        else:
            raw = mutations.document(draw, kind, meta["content"])
            with suppress(ValueError, RecursionError):
                raw = json.dumps({"content": (c := json.loads(raw)), "sha256": cache._hash_description(c)}).encode()
            (entry / "meta.json").write_bytes(raw)
        trusted = cache.read_verified_entry(entry, partial(read_entry, vocab=SIZES["vocab"]))
        if trusted and kind != "file":
            known = ("files", "dtype")
            assert {k: vars(trusted)[k] for k in known} == {k: original[k] for k in known}, "another entry is trusted"
