"""A step whose samples have no label is refused, with its place: it would report a loss of 0."""

import json
from types import SimpleNamespace

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.corpus import open_corpus
from platform.plan.model_types import LABEL_WEIGHTS
from platform.train.stage_passes import compute_loss_divisor, refuse_missing_labels


@pytest.fixture
def corpus(tmp_path):
    """Conversations cut to a row, the third of which is all prompt."""
    rows = [{"prompt": "So? " * (20 if i == 2 else 1), "response": f"So {i}."} for i in range(8)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_corpus(Data(kind="instructions", path=str(tmp_path / "p.jsonl"), field="prompt", packing="best_fit",
                            target_field="response", overlong="cut", validation=0, cache=str(tmp_path / "cache")),
                       length=12, vocab=270, seed=0)  # fmt: skip


def test_a_step_on_prompts_alone_is_refused(corpus, monkeypatch):
    """Of an objective of one's own: rows of instructions without a label are not made."""
    plan, empty = SimpleNamespace(reader_layouts={}, sizes={"batch": 1}), 1
    counts = [corpus.predicted("train", i, i + 1) for i in range(corpus.sample_counts["train"])]
    assert 0 not in counts
    counts[empty] = 0
    monkeypatch.setattr(type(corpus), "predicted", lambda self, split, first, last: sum(counts[first:last]))
    with pytest.raises(ConfigError) as refused:
        compute_loss_divisor(plan, corpus, empty, empty + 1) or refuse_missing_labels(corpus, empty, empty + 1)
    name = corpus.describe_sample("train", empty)
    assert str(refused.value) == (
        f"train.global_batch=1: training samples {empty} to {empty}, of which the first is {name}, have no label; "
        "nearest legal: a larger one"
    )
    assert compute_loss_divisor(plan, corpus, 0, len(counts)) == sum(counts)


def test_labels_that_all_weigh_nothing_are_none(corpus, monkeypatch):
    plan = SimpleNamespace(reader_layouts={LABEL_WEIGHTS: {}}, sizes={"batch": 2})
    whole = type(corpus).batch
    for weight in (1.0, 0.0):
        monkeypatch.setattr(
            type(corpus),
            "batch",
            lambda *a, weight=weight: whole(*a) | {LABEL_WEIGHTS: whole(*a)["labels"] * 0.0 + weight},
        )
        assert compute_loss_divisor(plan, corpus, 0, 4) == corpus.predicted("train", 0, 4) * weight
