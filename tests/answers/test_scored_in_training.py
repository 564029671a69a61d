"""The mesh that trains scores texts between its steps: as uncached passes of one process do, by averages of weights."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch

from platform.cluster.asked_model import AskedModel
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train.generator import PaddedTexts
from platform.train.replies import AskedTexts
from platform.train.trainer import Trainer
from platform.train.worker import Worker
from tests.answers.cached import uncached
from tests.harness.oracle import MODELS, configure, trainer_of
from tests.harness.threads import run_threads

PLANS = {
    "1d_sp, pipeline": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2},
    "replicas, zero 1": {"data": 2, "zero": 1},
    "replicas, zero 3": {"data": 2, "zero": 3},
    "2d, replicas": {"tensor": "2d", "axes": {"r": 2, "c": 2}, "data": 2, "microbatch": 2},
}
MODEL = {"length": 32, **MODELS["llama"]}
PAIRS = [([5, 6, 7], [8, 9]), ([], [3]), (list(range(40)), [1, 2, 3, 4]), ([2] * 9, [7] * 20), ([60], [0, 1])]
LONG = [i * 7 % 61 for i in range(75)]  # of which windows are scored


def scored(c, plan, communicator: Communicator) -> tuple[list[float], float]:
    """The log-probabilities that a rank of a run hears after two steps, and the loss of its third."""
    torch.set_num_threads(1)
    rank = object.__new__(Worker)
    rank.config, rank.plan, rank.communicator = c, plan, communicator
    rank.trainer = trainer = trainer_of(c, plan, communicator)
    for step in (1, 2):
        trainer.step(step)
    asked = AskedModel(lambda method, *arguments: [getattr(rank, method)(*arguments)], c.model, None, batch=3)
    scores = [s.log_probability for s in asked.score_continuations(PAIRS)]
    return [*scores, *asked.score_full_texts([LONG])], trainer.step(3).loss


@cache
def expected() -> tuple[list[float], float]:
    """The same of one process, in plain functions, by the averages."""
    c = configured()
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    for step in (1, 2):
        trainer.step(step)
    shapes = {p.name: tuple(map(slice, plan.global_shape(p))) for p in plan.parameters}
    w = {name: x.detach().clone()[shapes[name]] for name, x in trainer.weights.averages.items()}

    def score(context: list[int], text: list[int]) -> float:
        ids = [*(context or [0]), *text][-(c.model.length + 1) :]
        p = uncached(c, w, ids[:-1], []).log_softmax(-1)
        return sum(float(p[i - 1, ids[i]]) for i in range(len(ids) - len(text), len(ids)))

    whole, most = [0, *LONG], c.model.length
    windows = [(whole[:1], whole[1:33]), (whole[32:33], whole[33:65]), (whole[75 - most : 65], whole[65:])]
    scores = [score(*pair) for pair in PAIRS]
    return [*scores, sum(score(*window) for window in windows)], trainer.step(3).loss


def configured(**plan):
    c = configure(**plan, **MODEL)
    c.train.ema, c.eval.averaged, c.optimizer.lr = 0.5, True, 0.1
    return c


def examine(how: str) -> None:
    c, (want, loss) = configured(**PLANS[how]), expected()
    plan = make_plan(c)
    for actual, third in run_threads(plan.mesh, lambda communicator: scored(c, plan, communicator)):
        assert third == pytest.approx(loss, rel=1e-9), "training goes on as if nothing had been asked"
        assert actual == pytest.approx(want, rel=1e-9), "scores"


@pytest.mark.parametrize("how", list(PLANS))
def test_scores_are_those_of_one_process(how):
    examine(how)


def test_texts_of_like_length_share_their_passes():
    """Each new length of a pass is planned anew; none is longer than the model and the token that it predicts."""
    asked = [AskedTexts([[1] * length, [2]]) for length in range(2, 34)]
    assert {
        PaddedTexts(texts, 1, pads_left=False, rows_per_text=1, source=0, most=33, ranks=1).longest for texts in asked
    } == {17, 33}


def test_negative_control_other_weights_score_otherwise(monkeypatch):
    """If the weights that are trained score, and not their averages, the oracle must fail."""
    monkeypatch.setattr(Trainer, "use_evaluation_weights", lambda trainer: nullcontext())
    with pytest.raises(AssertionError, match="scores"):
        examine("replicas, zero 1")
