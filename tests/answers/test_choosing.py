"""Choice of tokens: draws, what top-k and top-p leave, and beam search against all continuations."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from platform.predict.make_plan import make_plan
from platform.train.generator import choose_tokens, restrict_logits
from platform.train.replies import AskedTexts, Choice
from tests.answers.cached import say, uncached, whole_weights
from tests.harness.oracle import MODELS, configure
from tests.runtime.oracle.test_delta_rule import NEXT

LOGITS = torch.tensor([[0.0, 1.0, 3.0, 2.0, -1.0]], dtype=torch.float64)


def kept(**how) -> list[int]:
    return [i for i, x in enumerate(restrict_logits(LOGITS, Choice(5, 1.0, **how))[0].tolist()) if x > -torch.inf]


def test_top_k_and_top_p_leave_the_likeliest():
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [2, 3] and kept(top_k=9) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.1) == [2] and kept(top_p=0.7) == [2, 3] and kept(top_p=0.98) == [0, 1, 2, 3]
    assert kept(top_k=3, top_p=0.7) == [2, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature):
    count = 40_000
    chosen = choose_tokens(LOGITS.expand(count, -1), Choice(5, temperature), torch.arange(count), 0)
    wanted = torch.softmax(LOGITS[0] / temperature, -1)
    assert (chosen.bincount(minlength=5) / count - wanted).abs().max() < 0.01


def test_a_draw_depends_on_seed_sequence_and_position_alone():
    draw = lambda seed, sequences, position: choose_tokens(  # noqa: E731
        LOGITS.expand(len(sequences), -1), Choice(5, 2.0, seed=seed), torch.tensor(sequences), position
    ).tolist()
    many = draw(1, list(range(64)), 3)
    assert draw(1, list(range(10, 20)), 3) == many[10:20]
    assert draw(2, list(range(64)), 3) != many != draw(1, list(range(64)), 4)


def test_ids_beyond_the_vocabulary_are_never_chosen():
    assert choose_tokens(torch.tensor([[0.0, 1.0, 9.0]]), Choice(2), torch.tensor([0]), 0).tolist() == [1]
    assert set(choose_tokens(torch.zeros(100, 8), Choice(3, 1.0), torch.arange(100), 0).tolist()) == {0, 1, 2}


SMALL = {"layers": 1, "d_model": 16, "heads": 4, "length": 16, "vocab": 5, "tied": False}


@pytest.mark.parametrize(
    ("scheme", "axes", "model"),
    [("serial", {}, {}), ("1d_sp", {"t": 2}, {}), ("2d", {"r": 2, "c": 2}, {}), ("3d", {"x": 2, "y": 2, "z": 1}, {}),
     ("1d_sp", {"t": 2}, {**MODELS["t5"], "source_length": 16}), ("serial", {}, NEXT)],
)  # fmt: skip
@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_many_beams_find_the_best_of_all_continuations(scheme, axes, model, penalty):
    """Three tokens of a vocabulary of five, one of which ends a text: 25 beams miss nothing."""
    c = configure(scheme, axes, microbatch=8, **{**model, **SMALL})
    rows = [[1, 2, 3], [4], [0, 0, 2, 1]]
    pair = c.model.kind == "encoder_decoder"
    texts = AskedTexts([[2]] * 3, rows) if pair else AskedTexts(rows)
    said = say(c, texts, 3, Choice(5, beams=25, length_penalty=penalty), make_plan(c), ends=[0])
    w = whole_weights(c)
    for number, ids in enumerate(texts.ids):
        source = texts.sources[number] if pair else []
        scores = {}
        for tail in product(range(5), repeat=3):
            tail = tail[: tail.index(0) + 1] if 0 in tail else tail
            if tail not in scores:
                p = uncached(c, w, [*ids, *tail], source).log_softmax(-1)
                total = sum(float(p[len(ids) - 1 + i, token]) for i, token in enumerate(tail))
                scores[tail] = total / len(tail) ** penalty, total
        best = max(scores, key=lambda tail: scores[tail][0])
        for s in said:
            beam = s.written[number]
            assert (*beam.ids, *[0] * beam.ended) == best
            assert beam.log_probability == pytest.approx(scores[best][1], rel=1e-10)
