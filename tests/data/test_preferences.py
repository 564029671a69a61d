"""Pairs of answers: records in the forms that trl reads, whole in a row, and what a sample says of each label."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.config.validation import violations_of_configuration
from platform.data.conversations import read_preferences
from platform.data.corpus import open_corpus
from platform.data.packing import pack_streams
from platform.data.streams import DocumentStream
from platform.launch import compose_config

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in
                   (("user", "2+2?"), ("assistant", "4"), ("assistant", "5")))  # fmt: skip
FORMS = {
    "texts": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "a text and messages": {"prompt": "2+2?", "chosen": [GOOD], "rejected": [BAD]},
    "messages with their prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "texts with their prompt": {"chosen": "2+2? 4", "rejected": "2+2? 5"},
}
REFUSED = {
    "needs fields chosen and rejected, both texts or both lists of messages": {"prompt": "a", "chosen": "b"},
    "chosen and rejected are equal": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "has no field prompt, nor do chosen and rejected begin": {"chosen": "b", "rejected": "c"},
    "has a field functions, which is not read": {"prompt": "a", "chosen": "b", "rejected": "c", "functions": ["f"]},
    "has no answer": {"prompt": [USER], "chosen": [GOOD], "rejected": [USER]},
}


def file(folder: Path, *records: dict) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(tmp_path, form):
    data = Data(kind="preferences", path=str(file(tmp_path, FORMS[form])))
    [(number, pair)] = read_preferences([Path(data.path)], data)
    both = [[m["content"] for m in side.messages] for side in (pair.chosen, pair.rejected)]
    assert (
        number == 0 and both == [["2+2?", x.removeprefix("")] for x in (" 4", " 5")] if "texts with" in form else True
    )
    assert [[text.strip() for text in texts] for texts in both] == [["2+2?", "4"], ["2+2?", "5"]]


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_pair_is_refused(tmp_path, reason):
    data = Data(kind="preferences", path=str(file(tmp_path, REFUSED[reason])))
    with pytest.raises(ConfigError, match="line 1") as error:
        list(read_preferences([Path(data.path)], data))
    assert reason in error.value.violations[0]


def test_a_blank_answer_is_left_out(tmp_path):
    data = Data(kind="preferences", path=str(file(tmp_path, {"prompt": "a", "chosen": " ", "rejected": "b"})))
    assert list(read_preferences([Path(data.path)], data)) == []


def test_a_sample_says_which_answer_a_label_is_of(tmp_path):
    records = [{"prompt": f"say {i}:", "chosen": "yes" * (i + 1), "rejected": "no"} for i in range(12)]
    data = Data(kind="preferences", path=str(file(tmp_path, *records)), cache=str(tmp_path / "cache"), validation=0.25,
                packing="best_fit", document_mask=True, overlong="drop")  # fmt: skip
    corpus = open_corpus(data, length=64, vocab=280, seed=0, objective="preference")
    for split in ("train", "validation"):
        stream = corpus.parts[0].streams[split]
        stream.references[:] = -np.arange(1.0, len(stream.references) + 1)
        rows = corpus.count_samples(split)
        batch = corpus.batch(split, 0, rows)
        pairs = corpus.predicted(split, 0, rows)
        assert np.isclose(batch["label_weights"].sum(), pairs) and pairs == len(stream.references) // 2
        assert ((batch["paired"] >= 0) == (batch["labels"] >= 0)).all()
        totals = []
        for answers, labels, references in zip(*(batch[n] for n in ("paired", "labels", "references")), strict=True):
            for answer in range(answers.max() + 1):
                mine = answers == answer
                totals.append(references[mine].sum())
                text = corpus.decode(labels[mine].tolist()).removesuffix("<|endoftext|>")
                assert set(text) <= set("yes") if answer % 2 == 0 else text == "no"
        assert sorted(totals) == sorted(stream.references.tolist())


@pytest.mark.parametrize("seed", range(8))
def test_no_pair_is_divided(tmp_path, seed, caplog):
    """Of random documents: each row holds whole pairs, and those longer than a row are counted and dropped."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, 14, 2 * int(draw.integers(1, 30)))
    starts = np.append(0, np.cumsum(sizes)[:-1])
    learned = np.ones(sizes.sum(), bool)
    streams = {"train": DocumentStream(np.arange(sizes.sum()), starts, learned)}
    (tmp_path / "tokens").mkdir()
    with caplog.at_level(logging.INFO):
        packed = pack_streams(streams, tmp_path / "tokens", 16, -1, "drop", keeps_documents_apart=True, together=2)
    of_pairs = sizes.reshape(-1, 2).sum(1)
    kept = of_pairs <= 16
    pieces = packed["train"].pieces
    assert sorted(pieces.tolist()) == [[int(s), int(n)] for s, n in zip(starts[::2][kept], of_pairs[kept], strict=True)]
    assert (f"{(~kept).sum()} of {len(kept)} pairs are longer" in caplog.text) == bool((~kept).any())


def test_what_divides_pairs_is_refused():
    words = "+experiment=gpt_quick data=preferences data.path=x data.packing=cut data.document_mask=false".split()
    with pytest.raises(ConfigError) as error:
        compose_config([*words, "data.overlong=split", "train.loss=cross_entropy"])
    keys = {line.partition("=")[0] for line in error.value.violations}
    assert {"data.packing", "data.document_mask", "data.overlong", "train.loss"} <= keys
    streamed = "+experiment=gpt_quick data=preferences data.path=x data.validation=0 eval.every=0 data.streaming=true"
    with pytest.raises(ConfigError, match="data.streaming=true: data=preferences is scored .*nearest legal: false"):
        compose_config(streamed.split())
    c = compose_config("+experiment=gpt_quick data=preferences data.path=x train.loss=ipo".split())
    assert not violations_of_configuration(c) and c.train.loss_settings == {"beta": 0.1, "margin": 0.0}
    with pytest.raises(ConfigError, match="train.loss=dpo: .*nearest legal: .*data=preferences"):
        compose_config("+experiment=gpt_quick train.loss=dpo".split())
