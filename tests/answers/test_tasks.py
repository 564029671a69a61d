"""Tasks of lm-eval and BLEU of sacrebleu, each with the real package and local files; and what a model is asked."""

from __future__ import annotations

import json
from math import log

import pytest

from platform.cluster.asking.asked_model import AskedModel
from platform.evaluate import main as evaluate
from platform.launch import main as launch
from platform.train.protocol.asked import AskedTexts, Scored
from tests.answers.conftest import SENTENCES
from tests.answers.eval_packages import evaluated
from tests.harness.oracle import configure

CHOICES = """
task: which_end
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/ends.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{ends}}"
doc_to_target: "{{right}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITTEN = """
task: write_end
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/ends.jsonl}}
test_split: test
output_type: generate_until
generation_kwargs: {until: ["."], max_gen_toks: 30}
doc_to_text: "{{begin}}"
doc_to_target: "{{whole}}"
metric_list: [{metric: exact_match}]
"""
ROLLING = """
task: whole_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/ends.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{begin}}{{whole}}."
metric_list: [{metric: bits_per_byte}]
"""


def parted(sentence: str) -> tuple[str, str]:
    """Two words, and what follows them."""
    place = sentence.index(" ", sentence.index(" ") + 1)
    return sentence[:place], sentence[place:].rstrip(".")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_local_tasks_of_lm_eval(learned, tmp_path):
    """A model knows the sentences that it has learned: it chooses, writes and expects their ends."""
    rows = []
    for sentence in SENTENCES:
        begin, end = parted(sentence)
        wrong = [parted(other)[1] for other in SENTENCES if other != sentence]
        rows.append({"begin": begin, "whole": end, "ends": [*wrong[:1], end, *wrong[1:]], "right": 1})
    (tmp_path / "ends.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("a", CHOICES), ("b", WRITTEN), ("c", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FOLDER", str(tmp_path)))
    done = evaluated(tmp_path, str(learned), "--tasks", "which_end,write_end,whole_texts", "--include", str(tmp_path),
                     "--json", "out.json", "tensor=1d", "tensor.axes.t=2", "cluster.device=cpu")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert found["which_end"]["acc"] == 1 and found["write_end"]["exact_match"] == 1
    assert 0 < found["whole_texts"]["bits_per_byte"] < 1
    unknown = evaluated(tmp_path, str(learned), "--tasks", "which_ends", "--include", str(tmp_path))
    assert unknown.returncode == 2 and "--tasks=which_ends: unknown; nearest legal: which_end" in unknown.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_bleu_of_learned_translations(learned, tmp_path):
    """Words and what they mean: a model that has learned them all translates them."""
    words = {"one": "uno due tre quattro cinque", "two": "sole mare cielo terra vento", "red": "rosso verde blu giallo"}
    rows = [{"source": word, "target": means} for word, means in words.items()] * 60
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = ["+experiment=transformer_base", "cluster=inline", "tensor=serial", "branch=none", "parallel.data=1",
           "cluster.device=cpu", "precision=fp32", "data=pairs",
           f"data.path={tmp_path}/pairs.jsonl", f"data.cache={tmp_path}/cache", "model.vocab=300", "model.layers=1",
           "model.d_model=32", "model.heads=4", "model.d_ff=64", "model.length=24", "model.source_length=8",
           "train.steps=80", "train.global_batch=16", "train.microbatch=16", "eval.every=0", "optimizer.lr=1e-2",
           "optimizer.schedule=constant", "optimizer.warmup_steps=10", "monitor.sample=0", "model.dropout=0",
           f"run.dir={tmp_path}/run", "checkpoint.every=80", "elastic.snapshot_every=0"]  # fmt: skip
    assert launch(run) == 0
    done = evaluated(tmp_path, "run", "--bleu", "--samples", "6", "--json", "out.json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert (
        found["bleu"] > 90 and found["pairs"] == 6 and "BLEU " in done.stdout and "version:2.6.0" in found["signature"]
    )
    refused = evaluated(tmp_path, str(learned), "--bleu")
    assert refused.returncode == 2 and "the data are no pairs" in refused.stderr


def test_without_the_packages_it_says_which(learned, capsys, monkeypatch):
    monkeypatch.setattr("platform.evaluate.find_spec", lambda name: None)
    assert evaluate([str(learned), "--bleu", "--tasks", "x", "--beams", "0"]) == 2
    told = capsys.readouterr().err
    assert "--bleu: needs the package sacrebleu: pip install 'elastic-platform[eval]'" in told
    assert "--tasks: needs the package lm_eval" in told and "--beams=0: must be >= 1" in told


class Uniform:
    """A crew's double: every token has the probability 1 / 8, and is noted."""

    def __init__(self):
        self.asked: list[tuple[AskedTexts, list[int]]] = []

    def call(self, method: str, texts: AskedTexts, starts: list[int]):

        assert method == "score_texts"
        self.asked.append((texts, starts))
        return [[Scored(-log(8) * (len(ids) - start), False) for ids, start in zip(texts.ids, starts, strict=True)]]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11])
def test_a_long_text_is_scored_window_by_window(count):
    """Each token once, and none with fewer tokens before it than its window has room for."""
    crew = Uniform()
    asked = AskedModel(crew.call, configure(length=4).model, None, batch=2)
    text = list(range(10, 10 + count))
    assert asked.score_whole([text]) == [pytest.approx(-count * log(8))]
    scored = [(ids[start:], ids) for texts, starts in crew.asked for ids, start in zip(texts.ids, starts, strict=True)]
    assert sorted(i for tail, _ in scored for i in tail) == text
    assert all(len(ids) <= 5 for _, ids in scored)
    assert all(len(ids) == 5 for tail, ids in scored if count >= 4)


def test_the_last_tokens_of_a_long_context_are_read():
    crew = Uniform()
    AskedModel(crew.call, configure(length=4).model, None).score([([1, 2, 3, 4, 5, 6], [7, 8]), ([], [9])])
    ((texts, starts),) = crew.asked
    assert texts.ids == [[4, 5, 6, 7, 8], [0, 9]] and starts == [3, 1]
