"""A document's loss does not depend on its place in a row: every kind of position and mask, loss and plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from platform.config.fields import WEIGHTED
from platform.model.losses import LOSSES
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import Tokens, configure, trainer_of
from tests.harness.pairwise import product
from tests.harness.registries import as_before
from tests.harness.suite import suite
from tests.harness.threads import run_threads

LENGTH, PLACES = 12, (0, 1, 4, 7)  # of a row, and of the document's first token in it
DOCUMENT = 5  # tokens
MODEL = {"layers": 2, "within_documents": True, "d_model": 8, "heads": 2, "d_ff": 12, "length": LENGTH, "vocab": 29,
         "buckets": 4, "distance": 3}  # fmt: skip
PLANS = {
    "one process": {},
    "split vocab and heads": {"tensor": "1d", "axes": {"t": 2}},
    "split length": {"tensor": "layout", "axes": {"t": 2}, "rules": {"length": ["t"]}},
    "split batch and width": {"tensor": "2d", "axes": {"r": 2, "c": 1}},
    "stages": {"pipeline": "1f1b", "stages": 2, "recompute": "full"},
    "zero": {"data": 2, "zero": 3, "microbatch": 1},
}
FACTORS = {
    "positions": ["learned", "rope", "sinusoidal", "relative"],
    "window": [0, 3],
    "loss": ["", "sharp"],
    "weighted": [False, True],
    "plan": list(PLANS),
}


class Places:
    """A corpus in which sample i is a row with the same document at a place of its own among others, which alone is
    predicted."""

    validations = Tokens.validations
    special = Tokens.special
    teacher, counts_by_reading = None, False

    def __init__(self, weighted: bool):
        self.weighted = weighted

    def batch(self, split: str, start: int, end: int) -> dict[str, np.ndarray]:
        rows = [self.row(i // 2) for i in range(start, end)]  # a step has two alike
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def row(self, number: int) -> dict[str, np.ndarray]:
        first, document = PLACES[number], np.random.default_rng(7).integers(0, MODEL["vocab"], DOCUMENT + 1)
        draw, column = np.random.default_rng(number), np.arange(LENGTH)
        tokens, labels = draw.integers(0, MODEL["vocab"], LENGTH), np.full(LENGTH, -1)
        tokens[first : first + DOCUMENT], labels[first : first + DOCUMENT] = document[:-1], document[1:]
        before = draw.integers(0, first + 1)  # another document begins in front of it, or the row's first goes on
        begins = np.select([column >= first + DOCUMENT, column >= first, column >= before],
                           [first + DOCUMENT, first, before], 0)  # fmt: skip
        row_tensors = {"tokens": tokens, "labels": labels, "begins": begins, "positions": column - begins}
        return row_tensors | ({"label_weights": 0.5 + column - first} if self.weighted else {})

    def predicted(self, split: str, start: int, end: int) -> int:
        return DOCUMENT * (end - start)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with as_before():
        LOSSES["sharp"] = lambda of: -of.log_probability + 0.1 * of.log_sum_exp**2
        WEIGHTED.add("weighed")
        yield


def losses(case) -> list[float]:
    """Loss of the document at each place, of one model that nothing changes."""
    more = {"positions": case["positions"], "window": case["window"], **MODEL, **PLANS[case["plan"]]}
    c = configure(**{"microbatch": 2, "global_batch": 2, **more})
    c.train.loss, c.optimizer.lr = case["loss"], 0.0
    c.data.objective = "weighed" if case["weighted"] else ""
    plan = make_plan(c)

    def on_rank(communicator):
        trainer = trainer_of(c, plan, communicator, Places(case["weighted"]))
        return [trainer.step(i + 1).loss for i in range(len(PLACES))]

    return on_rank(SingleRank(plan.mesh)) if plan.mesh.world_size == 1 else run_threads(plan.mesh, on_rank)[0]


@suite("places of a document (threads)", product(FACTORS, lambda case: True))
def test_the_same_loss_at_every_place(case):
    actual = losses(case)
    assert actual == [pytest.approx(actual[0], rel=1e-11)] * len(actual)
    assert actual[0] > 0


def test_without_documents_the_place_matters(monkeypatch):
    """Negative control: positions that do not restart are seen."""
    monkeypatch.setitem(MODEL, "within_documents", False)
    actual = losses({"positions": "sinusoidal", "window": 3, "loss": "", "weighted": False, "plan": "one process"})
    assert len({round(loss, 6) for loss in actual}) > 1
