"""n steps, a checkpoint, n steps under the same plan or another: what 2n steps in one go give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from platform.checkpoint import Meta, Storage, connect, load
from platform.checkpoint.catalogue import begin, commit
from platform.config import Config
from platform.parallel.groups import Alone, Communicator, run_threads
from platform.train.plan import make_plan
from platform.train.state import State
from platform.train.trainer import Trainer
from tests.oracle import configure, trainer_of

N = 2
COMMON = {"kv_heads": 4, "vocab": 61, "global_batch": 12, "microbatch": 2, "dropout": 0.1, "layers": 6}
PLANS: dict[str, dict[str, Any]] = {
    "serial": {},
    "data 3, zero 1": {"data": 3, "zero": 1},
    "1d, data 2, zero 3": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 3},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}},
    "dsp_csub, data 2": {"branch": "dsp_csub", "branch_axes": {"g": 2}, "data": 2},
    "1f1b": {"pipeline": "1f1b", "stages": 2, "data": 2, "zero": 1},
    "interleaved, v = 2": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "tensor": "1d", "axes": {"t": 2}},
    "interleaved, v = 3": {"pipeline": "interleaved", "stages": 2, "chunks": 3},
}
NAMES = list(PLANS)
PAIRS = list(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))


@dataclass
class Part:
    """What a rank had at the end, and the losses and gradient norms on the way there."""

    blocks: list[tuple[str, Any, Tensor]]
    numbers: list[tuple[float, float]]
    values: dict[str, Any]


def run(c: Config, steps: range, storage: Storage | None = None, save: str = "", restore: str = "") -> list[Part]:
    """All ranks, as threads: restore, some steps, save."""
    plan = make_plan(c)
    reports: list[dict[str, Any]] = []

    def work(communicator: Communicator) -> Part:
        torch.set_num_threads(1)
        trainer: Trainer = trainer_of(c, plan, communicator)
        state = State(trainer)
        if restore:
            state.restore(storage, restore, load(storage, restore))
        numbers = [(r["loss"], r["grad_norm"]) for r in (trainer.step(k) for k in steps)]
        if save:
            state.image.fill(state.blocks())
            reports.append(state.image.write(storage, save))
        shapes.update({h.name: h.shape for h in state.held})
        return Part([(n, b, t.clone()) for n, b, t in state.blocks()], numbers, state.values())

    shapes: dict[str, tuple[int, ...]] = {}
    parts = [work(Alone(plan.mesh))] if plan.mesh.size == 1 else run_threads(plan.mesh, work)
    if save:
        values = {"optimizer": parts[0].values}
        meta = Meta(steps[-1], steps[-1] * c.train.global_batch, c.seed, "", {}, "", {}, values)
        commit(storage, save, shapes, reports, meta)
    return parts


def whole(parts: list[Part], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Global tensors, where replicas are bit-equal."""
    out = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    for name, box, tensor in (block for part in parts for block in part.blocks):
        real = box.overlap(type(box).whole(shapes[name]))
        if real is None:
            continue
        mine, there = tensor[real.within(box)], out[name][real.within(type(box).whole(shapes[name]))]
        assert torch.equal(there, mine) or there.isnan().all() or torch.allclose(there, mine, rtol=1e-12), name
        there.copy_(mine)
    assert not any(t.isnan().any() for t in out.values())
    return out


class Saved:
    """A checkpoint after N steps under each plan, and the N steps that follow without a break."""

    def __init__(self, folder: Path):
        self.storage = connect(str(folder))
        self._made: dict[str, tuple[str, list[Part], list[Part]]] = {}

    def of(self, name: str) -> tuple[str, list[Part], list[Part]]:
        if name not in self._made:
            c, directory = config(name), begin(self.storage, N)
            at_n = run(c, range(1, N + 1), self.storage, save=directory)
            self._made[name] = directory, at_n, run(c, range(1, 2 * N + 1))
        return self._made[name]


def config(name: str, **more: Any) -> Config:
    return configure(**{**COMMON, **PLANS[name], **more})


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def continues(saved: Saved, writer: str, reader: str) -> None:
    directory, at_n, through = saved.of(writer)
    manifest = load(saved.storage, directory)
    shapes = {name: t.shape for name, t in manifest.tensors.items()}
    restored = run(config(reader), range(0), saved.storage, restore=directory)
    before, after = whole(at_n, shapes), whole(restored, shapes)
    assert {name.split(".")[0] for name in shapes} == {"model", "exp_avg", "exp_avg_sq"}
    for name in shapes:
        assert torch.equal(before[name], after[name]), name
    assert manifest.meta.values["optimizer"] == restored[0].values == {"step": float(N)}
    parts = run(config(reader), range(N + 1, 2 * N + 1), saved.storage, restore=directory)
    wanted = [part.numbers[N:] for part in through]
    if writer == reader:
        assert [part.numbers for part in parts] == wanted
        for mine, theirs in zip(parts, through, strict=True):
            assert all(torch.equal(a[2], b[2]) for a, b in zip(mine.blocks, theirs.blocks, strict=True))
    else:
        for part in parts:
            assert part.numbers == [pytest.approx(pair, rel=1e-10, abs=0) for pair in wanted[0]]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_plan_goes_on_bit_by_bit(saved, name):
    continues(saved, name, name)


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=" -> ".join)
def test_another_plan_goes_on_with_the_same_numbers(saved, writer, reader, record_count):
    record_count("training continued under another plan", len(PAIRS), len(NAMES) * (len(NAMES) - 1))
    continues(saved, writer, reader)
