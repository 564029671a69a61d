"""What adapters are of moves from memory to memory when the mesh re-forms; storage is read for what nobody holds."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from platform.boundary.storage import open_storage
from platform.checkpoint.snapshots import RankSnapshots
from platform.config.fields import Config, Tune
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train import training_state
from platform.train.training_state import RankTrainingState
from tests.fuzz.passages import InMemory, OnStorage
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "length": 4, "vocab": 61, "tied": False}
T = {"tensor": "1d", "axes": {"t": 2}}
PLANS: dict[str, dict[str, Any]] = {
    "one": {"microbatch": 4},
    "t": {**T, "microbatch": 4},
    "data": {"data": 2, "microbatch": 2},
    "data, t": {**T, "data": 2, "microbatch": 2},
    "data, zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "stages": {"pipeline": "1f1b", "stages": 2, "microbatch": 2},
    "stages, data": {"pipeline": "1f1b", "stages": 2, "data": 2, "microbatch": 2},
}
# old plan, its ranks that live, the new plan
KEPT = [
    ("data, t", [0, 1], "t"),
    ("data, t", [1, 2], "t"),
    ("data, t", [0, 1, 2], "t"),
    ("t", [0, 1], "data, t"),
    ("stages, data", [1, 2], "data, zero 3"),
    ("data", [1], "stages"),
    ("data, t", [1, 2], "one"),  # of whom one gets no seat, and hands over what only it holds
    ("data, zero 3", [0, 1], "stages, data"),
]
LOST = [("t", [1], "t"), ("stages", [0], "data"), ("data, zero 3", [1], "one")]
HERE = [("lora", *KEPT[1]), ("lora", *KEPT[6]), ("qlora", *KEPT[4])]


def config(plan: str, kind: str, base: str) -> Config:
    c = configure(global_batch=4, **{**SIZES, "d_model": 128 if kind == "qlora" else 64}, **PLANS[plan])
    c.train.init = base
    c.tune = Tune(kind=kind, rank=2, targets=["layers.1.*"])
    return c


def on_ranks(c: Config, work) -> list[Any]:
    plan = make_plan(c)

    def one(communicator):
        torch.set_num_threads(1)
        return work(trainer_of(c, plan, communicator, fresh=False), RankTrainingState)

    return [one(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, one)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    """By kind of adapters a checkpoint of whole weights, from which nobody starts by himself."""
    return {kind: base_of(str(tmp_path_factory.mktemp(kind)), kind) for kind in ("lora", "qlora")}


def base_of(folder: str, kind: str) -> str:
    storage, c = OnStorage(), config("one", kind, "")
    c.tune, c.seed, storage.storage = Tune(), 7, open_storage(folder)
    storage.begin(1)
    plan = make_plan(c)
    storage.seal(c, plan, 1, [storage.keep(trainer_of(c, plan, SingleRank(plan.mesh)), 1)])
    return f"{storage.storage.url}/{storage.directory}"


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The bytes of pieces that ranks read of the base."""
    opening, counts = training_state.open_initial_weights, []

    def counted(c: Config):
        weights = opening(c)

        def fetch(pieces, into):
            counts.append(sum(piece.nbytes for piece in pieces))
            weights.fetch(pieces, into)

        return replace(weights, fetch=fetch)

    monkeypatch.setattr(training_state, "open_initial_weights", counted)
    return counts


def numbers(trainer, step: int) -> tuple[float, float]:
    report = trainer.step(step)
    return report.loss, report.grad_norm


def recover(kind: str, old: str, alive: list[int], new: str, base: str, read: list[int]) -> tuple[int, int]:
    """Go on from the memory of some ranks, as one process does. Return the bytes of the base that are read for the
    first plan, and for the second."""

    def through(trainer, state_of):
        state_of(trainer).load_initial_weights()
        return [numbers(trainer, step) for step in (1, 2, 3)]

    (expected,) = on_ranks(config("one", kind, base), through)
    read.clear()
    passage = InMemory(Random(0), [""])
    passage.nodes, passage.shared = 1, False

    def begin(trainer, state_of):
        state_of(trainer).load_initial_weights()
        return numbers(trainer, 1), passage.keep(trainer, 1)

    before = on_ranks(config(old, kind, base), begin)
    whole = sum(read)
    read.clear()
    passage.seal(config(old, kind, base), make_plan(config(old, kind, base)), 1, [kept for _, kept in before])
    passage.alive = alive
    passage.prepare(make_plan(config(new, kind, base)))

    def go_on(trainer, state_of):
        passage.restore(trainer)
        return [numbers(trainer, step) for step in (2, 3)]

    for actual in on_ranks(config(new, kind, base), go_on):
        for have, want in zip([before[0][0], *actual], expected, strict=True):
            assert have == pytest.approx(want, rel=1e-10)
    return whole, sum(read)


FULL = [(kind, *case) for case in KEPT for kind in ("lora", "qlora") if (kind, *case) not in HERE]


@pytest.mark.parametrize("case", [*HERE, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
def test_nothing_is_read_of_what_somebody_holds(case, base, read):
    whole, again = recover(*case, base[case[0]], read)
    assert whole > 0 and again == 0


@pytest.mark.parametrize("kind", ["lora", pytest.param("qlora", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", [LOST[1], *(pytest.param(c, marks=pytest.mark.full) for c in LOST[::2])], ids=str)
def test_what_nobody_holds_is_read(kind, case, base, read):
    whole, again = recover(kind, *case, base[kind], read)
    assert 0 < again < whole or case[0] == "t" and again <= whole, "a split piece is read whole"


def test_negative_control_a_base_that_moves_wrongly(base, read, monkeypatch):
    parts = RankSnapshots._iterate_base_parts
    monkeypatch.setattr(RankSnapshots, "_iterate_base_parts", lambda self: ((s, x.roll(1, 0)) for s, x in parts(self)))
    with pytest.raises(AssertionError, match="approx|=="):
        recover(*HERE[0], base["lora"], read)


def test_negative_control_a_base_that_stays_behind(base, read, monkeypatch):
    monkeypatch.setattr(RankSnapshots, "_iterate_base_parts", lambda self: ())
    with pytest.raises(AssertionError, match="is not in the memory"):
        recover(*HERE[0], base["lora"], read)
