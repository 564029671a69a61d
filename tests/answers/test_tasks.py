"""Tasks of lm-eval and BLEU of sacrebleu, each with the real package and local files; and what a model is asked."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest

from platform.cluster.asked_model import AskedModel
from platform.evaluate import main as evaluate
from platform.launch import main as launch
from platform.monitor import MetricsLog
from platform.train.replies import AskedTexts, Scored
from tests.answers.conftest import SENTENCES
from tests.answers.eval_packages import evaluated
from tests.harness.commands import refused
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
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: last_word, filter: [{function: regex, regex_pattern: '(\\w+)$'}, {function: take_first}]}
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


def write_tasks(folder: Path) -> None:
    """Three tasks about the ends of the sentences, as files of a user's own."""
    rows = []
    for sentence in SENTENCES:
        begin, end = parted(sentence)
        wrong = [parted(other)[1] for other in SENTENCES if other != sentence]
        rows.append({"begin": begin, "whole": end, "ends": [*wrong[:1], end, *wrong[1:]], "right": 1})
    (folder / "ends.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("a", CHOICES), ("b", WRITTEN), ("c", ROLLING)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_local_tasks_of_lm_eval(learned, tmp_path):
    """A model knows the sentences that it has learned: it chooses, writes and expects their ends."""
    write_tasks(tmp_path)
    done = evaluated(tmp_path, str(learned), "--tasks", "which_end,write_end,whole_texts", "--include", str(tmp_path),
                     "--json", "out.json", "tensor=1d", "tensor.axes.t=2", "cluster.device=cpu")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    scores = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert scores["which_end"] == {"acc": 1}
    assert scores["write_end"] == {"exact_match.whole": 1, "exact_match.last_word": 0}
    assert 0 < scores["whole_texts"]["bits_per_byte"] < 1
    unknown = evaluated(tmp_path, str(learned), "--tasks", "which_ends", "--include", str(tmp_path))
    assert unknown.returncode == 2 and "--tasks=which_ends: unknown; nearest legal: which_end" in unknown.stderr


PIPELINE = "tensor=1d tensor.axes.t=2 parallel.data=1 pipeline=1f1b pipeline.stages=2 elastic.faults=[9:kill:1]".split()
SHARDS = "tensor=serial parallel.data=2 parallel.zero=3".split()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_is_scored_as_its_checkpoint_is(learned, tmp_path):
    """Two plans, one with a failure: the same scores at every evaluation, and those of the checkpoint by command."""
    write_tasks(tmp_path)
    tasks = ["eval.tasks=[which_end,write_end,whole_texts]", "eval.task_folder=.", "eval.every=8"]
    run = ["+experiment=gpt_quick", "data=text", f"data.path={learned.parent}/text.jsonl", "data.cache=cache",
           "model.vocab=300", "model.layers=2", "model.d_model=48", "model.heads=4", "model.length=48",
           "data.document_mask=true", "train.steps=16", "train.global_batch=8", "train.microbatch=4", "precision=fp64",
           "optimizer.lr=1e-2", "optimizer.warmup_steps=5", "monitor.sample=0", "checkpoint.every=16",
           "cluster=processes", "cluster.device=cpu"]  # fmt: skip
    scores_by_plan = []
    for name, plan in (("pipeline", PIPELINE), ("shards", SHARDS)):
        done = evaluated(tmp_path, *run, *plan, *tasks, f"run.dir={name}", module="launch")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "which_end/acc" in done.stdout and "%|" not in done.stderr, "a line of scores, and no progress bars"
        rows = MetricsLog.read_rows(tmp_path / name / "metrics.jsonl")
        scores_by_plan.append({row["step"]: row["task_scores"] for row in rows if "task_scores" in row})
    assert scores_by_plan[0].keys() == {8, 16} and scores_by_plan[0][8] != scores_by_plan[0][16]
    assert "failure" in (tmp_path / "pipeline" / "journal.jsonl").read_text()
    for step, scores in scores_by_plan[0].items():
        assert scores_by_plan[1][step] == {name: pytest.approx(score, rel=1e-9) for name, score in scores.items()}
    asked = ["--tasks", "which_end,write_end,whole_texts", "--include", ".", "--json", "out.json"]
    done = evaluated(tmp_path, "pipeline", *asked, "precision=fp64", "cluster.device=cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    by_command = json.loads((tmp_path / "out.json").read_text())["tasks"]
    flat = {f"{task}/{metric}": value for task, values in by_command.items() for metric, value in values.items()}
    assert flat == {name: pytest.approx(score, rel=1e-9) for name, score in scores_by_plan[0][16].items()}


BROKEN = {
    "nowhere": ("", "unknown; nearest legal: "),
    "no_data": (CHOICES.replace("ends.jsonl", "nothing.jsonl"), "cannot be read: FileNotFoundError: "),
    "no_field": (CHOICES.replace("{{begin}}", "{{ begin | no_such_filter }}"), "cannot be read: "),
    "code": (WRITTEN + "unsafe_code: true\n", "runs code that the model writes, which is not done here"),
}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_tasks_that_cannot_be_done_are_refused_before_anything_starts(learned, tmp_path):
    write_tasks(tmp_path)
    for name, (text, _) in BROKEN.items():
        if text:
            text = text.replace("FOLDER", str(tmp_path)).replace("which_end", name).replace("write_end", name)
            (tmp_path / f"{name}.yaml").write_text(text)
    more = ["+experiment=gpt_quick", "data=text", f"data.path={learned.parent}/text.jsonl", "cluster=processes",
            "data.cache=cache", "model.vocab=300", f"eval.tasks=[{','.join(BROKEN)},which_end]", "eval.every=1",
            "eval.task_folder=.", "run.dir=run"]  # fmt: skip
    done = evaluated(tmp_path, *more, module="launch")
    lines = [line for line in done.stderr.splitlines() if line.startswith("config: ")]
    assert done.returncode == 2 and len(lines) == len(BROKEN), done.stderr
    for line, (name, (_, reason)) in zip(lines, BROKEN.items(), strict=True):
        assert line.startswith(f"config: eval.tasks={name}: {reason}"), line
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


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
    report = json.loads((tmp_path / "out.json").read_text())
    assert (
        report["bleu"] > 90
        and report["pairs"] == 6
        and "BLEU " in done.stdout
        and "version:2.6.0" in report["signature"]
    )
    refused = evaluated(tmp_path, str(learned), "--bleu")
    assert refused.returncode == 2 and "the data are no pairs" in refused.stderr


def test_without_lm_eval_a_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.cluster.answer_scores.find_spec", lambda name: None)
    lines = refused("data=synthetic", "eval.tasks=[x,y]", "eval.every=1", "eval.task_folder=nowhere", cwd=tmp_path)
    assert lines[0] == "config: eval.tasks: needs the package lm_eval: pip install 'elastic-platform[eval]'"
    assert lines[1].startswith("config: eval.task_folder=") and lines[1].endswith("/nowhere: there is no such folder")


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
    assert asked.score_full_texts([text]) == [pytest.approx(-count * log(8))]
    scored = [(ids[start:], ids) for texts, starts in crew.asked for ids, start in zip(texts.ids, starts, strict=True)]
    assert sorted(i for tail, _ in scored for i in tail) == text
    assert all(len(ids) <= 5 for _, ids in scored)
    assert all(len(ids) == 5 for tail, ids in scored if count >= 4)


def test_the_last_tokens_of_a_long_context_are_read():
    crew = Uniform()
    AskedModel(crew.call, configure(length=4).model, None).score_continuations(
        [([1, 2, 3, 4, 5, 6], [7, 8]), ([], [9])]
    )
    ((texts, starts),) = crew.asked
    assert texts.ids == [[4, 5, 6, 7, 8], [0, 9]] and starts == [3, 1]
