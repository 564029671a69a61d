"""Run directories and storages of strangers, as cases of `tests.fuzz.manifests`."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import yaml

from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.boundary.storage import open_storage
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import Lease, find_newest_checkpoint, verify_checkpoint
from platform.cluster import run_directory
from platform.cluster.run_directory import RunDirectory
from platform.config.fields import Config
from platform.monitor import Journal, MetricsLog, compute_goodput, cost_line
from platform.monitor.json_records import JOURNAL, METRICS
from tests.fuzz import mutations
from tests.fuzz.world import World, broken, changed, told

ODD_NAMES = [
    b"\xff\xfe",
    b"lease-\xff",
    "lease-\u0661\u0661\u0661\u0661\u0661\u0661-deadbeef".encode(),
    b".probe-1",
    b"x" * 200,
    b"step-1",
]


def checked(world: World) -> bool:
    """Whether a run directory is taken; what is taken can be read to its end."""
    directory = RunDirectory(world.run)
    before = sorted(os.listdir(world.run))
    try:
        directory.check_identity(world.config)
        directory.find_final_step(9, world.config.eval)
    except ConfigError as error:
        told(error)
        return False
    finally:
        assert sorted(os.listdir(world.run)) == before, "something was written"
    assert 0 <= run_directory.find_last_step(world.run) <= 10**15
    cost_line(compute_goodput(run_directory.read_journal(world.run)))
    with suppress(Malformed, FileNotFoundError):  # the launch looks at the end of the metrics alone
        MetricsLog.read_rows(world.run / "metrics.jsonl")
    Journal(world.run / "journal.jsonl").close()
    return True


def record(world: World, draw: Random, file: str, how: str) -> None:
    """A line of journal or metrics."""
    path = world.run / f"{file}.jsonl"
    lines = path.read_bytes().splitlines()
    if how == "lines":
        at = draw.randrange(len(lines))
        kind = draw.choice(mutations.KINDS)
        lines[at] = mutations.document(draw, kind, json.loads(lines[at]))
        raw = b"\n".join(lines) + draw.choice([b"\n", b"\n", b""])
    else:
        raw = draw.choice([mutations.damaged, mutations.cut])(draw, path.read_bytes())
    with changed(path, raw):
        checked(world)


ODD_YAML = [
    "&a [*a]", "*x", "!!python/name:os.system", "2001-99-99", "!!binary zz", "0x" + "f" * 400, "1:2:3", "? [a]",
    "<<: 5", "!!set {a}", "&a\n  - &b [1]\n  - [*b, *b]", ".nan", ".inf", "'", "|", "%",
]  # fmt: skip


def configuration(world: World, draw: Random) -> None:
    """A config.yaml, as data or as text."""
    path = world.run / "config.yaml"
    content = yaml.safe_load(path.read_bytes())
    kind = draw.choice([*mutations.STRUCTURED, "deep", "text", "yaml"])
    if kind in mutations.STRUCTURED:
        mutations.STRUCTURED[kind](draw, content)
        raw = yaml.dump(content, allow_unicode=False).encode(errors="surrogatepass")
    elif kind == "deep":
        raw = path.read_bytes() + b"\nextra: " + mutations.deep(draw)[:5000].encode()
    elif kind == "yaml":
        raw = path.read_bytes().replace(
            draw.choice([b"seed: 0", b"steps: 100", b"dropout: 0.0"]), b"seed: " + draw.choice(ODD_YAML).encode()
        )
    else:
        raw = draw.choice([mutations.damaged, mutations.cut])(draw, path.read_bytes())
    with changed(path, raw):
        if checked(world):
            stored = run_directory.read_configuration(world.run)
            assert stored is None or Config.from_dict(stored.to_dict()) == stored or "nan" in str(stored)


def kinds(world: World, draw: Random) -> None:
    """A file of a run directory that is something else."""
    name = draw.choice([run_directory.CONFIG, run_directory.PLAN, JOURNAL, METRICS, run_directory.LOCK])
    path = world.run / name
    with changed(path, b"") if name == run_directory.PLAN else changed(path, path.read_bytes()):
        kept = path.with_name("kept")
        path.rename(kept)
        try:
            broken(draw, path)
            if path.is_symlink() or path.is_dir() or path.is_fifo() or path.stat().st_size < 1 << 30:
                checked(world)
        finally:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            kept.rename(path)


def leases(world: World, draw: Random) -> None:
    """Names beside a lease: whoever takes it holds it, and no file of others is deleted."""
    with TemporaryDirectory(dir=world.root) as folder:
        root, storage = Path(folder), open_storage(folder)
        mine = b"lease-%06d-%08x" % (draw.choice([1, 7, 999_999, 10**9, 10**17]), draw.getrandbits(32))
        odd = [
            b"lease-1-deadbeef",
            b"lease-0000007-deadbeef",
            b"lease-%s-deadbeef" % (b"9" * 180),
            b"lease--00001-deadbeef",
            *ODD_NAMES,
        ]
        for name in {mine, *draw.sample(odd, 4)}:
            broken(draw, root / os.fsdecode(name))
        others = {p.name for p in root.iterdir() if p.name != mine.decode()}
        lease = Lease.take(storage, "me")
        lease.check_held()
        assert others <= {p.name for p in root.iterdir()}, "what is no lease was deleted"
        assert not (root / mine.decode()).is_dir() or (root / mine.decode()).exists()


def listings(world: World, draw: Random) -> None:
    """Broken entries among checkpoints: the good ones are found, and stay."""
    with TemporaryDirectory(dir=world.root) as folder:
        shutil.copytree(world.storage.root, folder, dirs_exist_ok=True)
        storage, within = open_storage(folder), draw.random() < 0.4
        attempts = {a.step: a.directory_name for a in catalogue.list_attempts(storage)}
        close = [
            b"step-00000002-000009-abcdef",
            b"step-000000002-000002-abcdef",
            "step-\u066100000000-000001-abcdef".encode(),
        ]
        for name in draw.sample([*ODD_NAMES, *close], 3):
            broken(draw, Path(folder, attempts[2] if within else "", os.fsdecode(name)))
        newest = find_newest_checkpoint(storage, quarantines=draw.random() < 0.5)
        assert newest.directory == attempts[2], f"{newest}"
        with suppress(OSError):
            catalogue.prune_checkpoints(storage, last=draw.randint(1, 2))
        assert verify_checkpoint(storage, attempts[2]).tensors == world.manifest.tensors
        if draw.random() < 0.5:
            victim = draw.choice(os.listdir(Path(folder, attempts[2])))
            path = Path(folder, attempts[2], victim)
            if path.is_file() and not path.is_symlink():
                path.unlink()
                broken(draw, path)
            with suppress(OSError):
                catalogue.prune_checkpoints(storage, last=1)
            older = find_newest_checkpoint(storage).directory
            assert older is None or verify_checkpoint(storage, older)
