"""What any plan saved, any other plan restores: parameters and moments, bit by bit."""

from collections import Counter, defaultdict
from functools import cache
from itertools import product
from operator import attrgetter
from threading import get_ident
from typing import Any

import pytest
import torch

from platform.boundary.storage import Storage, open_storage
from platform.checkpoint.blocks import list_held_tensors, list_written_parts, local_blocks
from platform.checkpoint.catalogue import load_manifest
from platform.checkpoint.manifest import Manifest
from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from tests.harness import suite
from tests.harness.oracle import configure
from tests.harness.storage_job import Counting, Job

KINDS = {"model": torch.float64, "exp_avg": torch.float64, "exp_avg_sq": torch.float64}
PLANS: dict[str, dict[str, Any]] = {
    "serial": {},
    "data 2": {"data": 2},
    "data 3": {"data": 3, "global_batch": 12},
    "data 4": {"data": 4, "global_batch": 16},
    "1d": {"tensor": "1d", "axes": {"t": 4}},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "2p5d": {"tensor": "2p5d", "axes": {"d": 2, "r": 2, "c": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "3d uneven": {"tensor": "3d", "axes": {"x": 1, "y": 4, "z": 2}},
    "layout": {"tensor": "layout", "axes": {"rows": 2, "cols": 2},
               "rules": {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}},
    "dsp_slice": {"branch": "dsp_slice", "branch_axes": {"g": 2}},
    "dsp_csub": {"branch": "dsp_csub", "branch_axes": {"g": 2}, "data": 2},
    "data 3, zero 1": {"data": 3, "zero": 1, "global_batch": 12},
    "1d, data 2, zero 3": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 3},
    "1f1b, zero 1": {"pipeline": "1f1b", "stages": 2, "data": 2, "zero": 1},
    "interleaved, v = 2": {"pipeline": "interleaved", "stages": 2, "chunks": 2},
    "interleaved, v = 3": {"pipeline": "interleaved", "stages": 2, "chunks": 3, "tensor": "1d", "axes": {"t": 2}},
    "3 uneven stages": {"pipeline": "1f1b", "stages": 3, "data": 2},
    "data 4, experts of 2, zero 3": {"data": 4, "experts_of": 2, "zero": 3, "global_batch": 16},
    "experts of 4, zero 1": {"data": 4, "experts_of": 4, "zero": 1, "global_batch": 16},
    "1d, experts of 4": {"tensor": "1d", "axes": {"t": 2}, "data": 4, "experts_of": 4, "global_batch": 16},
    "1d with dsp": {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp", "branch_axes": {"g": 2}, "data": 2},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tied, vocab 61, 4 layers": {"tied": True, "kv_heads": 8, "layers": 4},
    "grouped queries, untied, swiglu": {
        "layers": 4, "tied": False, "kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "bias": False,
        "vocab": 63, "d_ff": 48,
    },
    "experts": {"layers": 4, "experts": 4, "expert_d_ff": 24, "shared_experts": 1},
}  # fmt: skip
PAIRS = list(product(PLANS, PLANS))


@cache
def plan(model: str, name: str) -> Plan:
    c: Config = configure(**PLANS[name], **MODELS[model])
    return make_plan(c)


@cache
def tensors(model: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {p.name: plan(model, "serial").global_shape(p) for p in plan(model, "serial").parameters}
    return {f"{k}.{n}": torch.rand(s, generator=draw, dtype=d) for k, d in KINDS.items() for n, s in shapes.items()}


@cache
def job(model: str, name: str) -> Job:
    p = plan(model, name)
    holds: dict[str, list] = {}
    for rank, kind in product(range(p.mesh.world_size), KINDS):
        coordinates = p.mesh.rank_coordinates(rank)
        ranges = {q.name: p.shard_range(q, coordinates) for q in p.parameters}
        parts = {name: torch.empty(stop - start, device="meta") for name, (start, stop) in ranges.items()}
        for block in local_blocks(p, kind, parts, coordinates):
            assert block.tensor.shape == block.box.extent
            holds.setdefault(block.name, []).append((rank, block.box))
    planned = Job(tensors(model), holds, p.mesh.world_size)
    held_tensors = [held for kind, dtype in KINDS.items() for held in list_held_tensors(p, kind, dtype)]
    assert sorted(planned.state, key=attrgetter("name")) == sorted(held_tensors, key=attrgetter("name"))
    return planned


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(model, plan) -> its checkpoint, made once."""

    @cache
    def of(model: str, name: str) -> tuple[Storage, str, Manifest]:
        storage = Counting(open_storage(str(tmp_path_factory.mktemp("saved"))))
        directory = job(model, name).save(storage)
        return storage, directory, load_manifest(storage, directory)

    return of


def restores(saved, model: str, writer: str, reader: str) -> None:
    storage, directory, manifest = saved(model, writer)
    storage.read_bytes, storage.ranges = 0, set()
    job(model, reader).check(job(model, reader).restore(storage, directory, manifest))
    assert storage.read_bytes == manifest.nbytes == sum(t.numel() * 8 for t in tensors(model).values())
    ends = {path: 0 for path, _, _ in storage.ranges}
    for path, start, end in sorted(storage.ranges):  # every byte once: each read begins where the one before it ended
        assert start == ends[path]
        ends[path] = end


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_restores_what_another_saved(saved, record_count, model):
    """Every plan writes for one other and reads from one other; in `make test-all` all to and from serial, too."""
    names = list(PLANS)
    ring = {(a, b) for a, b in zip(names, names[5:] + names[:5], strict=True)}
    chosen = [(a, b) for a, b in PAIRS if (a, b) in ring or (suite.full and "serial" in (a, b))]
    for writer, reader in chosen:
        restores(saved, model, writer, reader)
    record_count(f"checkpoint resharding, {model}", len(chosen), len(PAIRS))


def test_a_restore_says_how_far_it_is(saved, monkeypatch):
    """Each rank by itself, in turns: all that it reads in the end, and all ranks together the whole checkpoint."""
    model, told = next(iter(MODELS)), defaultdict(list)
    storage, directory, manifest = saved(model, "data 2")
    monkeypatch.setattr("platform.checkpoint.moves.LARGEST_BLOCK", 1024)
    note = lambda done, total: told[get_ident()].append((done, total))  # noqa: E731
    job(model, "1d").restore(storage, directory, manifest, budget=4096, note=note)
    ends = [turns[-1] for turns in told.values()]
    assert len(ends) == 4 and all(len(turns) > 2 and turns == sorted(turns) for turns in told.values())
    assert sum(done for done, _ in ends) == sum(total for _, total in ends) == manifest.nbytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_a_worker_writes_its_part_of_what_it_shares(monkeypatch, model, name):
    """1/n of the bytes that it and n - 1 others have alike, but for a row; so 1/n of all where all are replicas."""
    monkeypatch.setattr("platform.checkpoint.blocks.LARGEST_ROW", 64)
    state, size = job(model, name).state, plan(model, name).mesh.world_size
    common: Counter[tuple[int, ...]] = Counter()
    for held in state:
        for box, ranks in held.holders.items():
            common[ranks] += box.num_elements * held.itemsize
    written = [
        sum(s.box.num_elements * s.tensor.itemsize for s in list_written_parts(state, rank)) for rank in range(size)
    ]
    assert sum(written) == common.total() == sum(t.numel() * 8 for t in tensors(model).values())
    for rank, bytes_ in enumerate(written):
        parts = [total / len(ranks) for ranks, total in common.items() if rank in ranks]
        assert abs(bytes_ - sum(parts)) <= 64 * len(parts)
        if list(common) == [tuple(range(size))]:
            assert abs(bytes_ - common.total() / size) <= 64


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reader", PLANS)
def test_every_plan_restores_what_every_other_saved(saved, model, reader):
    for writer in PLANS:
        restores(saved, model, writer, reader)
