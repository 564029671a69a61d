"""`python -m platform.generate`, from the command line's arguments to answers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from platform.checkpoint.__main__ import main as checkpoint
from platform.cluster.session import find_trained_model
from platform.generate import main as generate
from platform.generate import split_words
from platform.weights.__main__ import main as weights
from platform.weights.model_folder import build_vocabulary_if_readable
from tests.answers.conftest import SENTENCES
from tests.harness import reference_transformer


@pytest.fixture
def answers(learned, tmp_path, capsys):
    """Runs the command on the learned model, or on another; returns the lines of its --out."""
    number = iter(range(100))

    def run(*arguments: str, of=None) -> list[dict]:
        out = tmp_path / f"out-{next(number)}.jsonl"
        assert generate([str(of or learned), *arguments, "--out", str(out)]) == 0, capsys.readouterr().err
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_a_text_that_was_learned_is_continued_to_its_end(learned, capsys):
    assert generate([str(learned), "the plan", "--tokens", "40"]) == 0
    assert capsys.readouterr().out == " is data and data is the plan.\n"


def test_answers_are_those_of_uncached_passes(answers, learned, tmp_path):
    """Weights as they lie in the checkpoint, in plain functions of one process."""
    assert (
        checkpoint(["export", str(learned / "checkpoints"), str(tmp_path / "w.safetensors"), "--only", "model."]) == 0
    )
    w = {name.removeprefix("model."): t.double() for name, t in load_file(tmp_path / "w.safetensors").items()}
    trained = find_trained_model(str(learned))
    vocabulary = build_vocabulary_if_readable(trained.files)
    prompts = ["every", "a lay", "nothing is lost when", "the mesh"]
    lines = answers(*prompts, "--tokens", "12", "precision=fp64")
    trained.model.within_documents = False
    for prompt, line in zip(prompts, lines, strict=True):
        ids = [vocabulary.special.begin, *vocabulary.encode(prompt)]
        for chosen in line["answer_ids"]:
            prefix_weights = w | {"position": w["position"][: len(ids)]}
            logits = reference_transformer.logits(trained.model, prefix_weights, {"tokens": torch.tensor([ids])})[0, -1]
            assert int(logits[: vocabulary.size].argmax()) == chosen
            ids.append(chosen)


def test_any_plan_gives_the_same_answers(answers):
    prompts = ["every", "a lay", "nothing"]
    one = answers(*prompts, "--tokens", "10", "--temperature", "0.7", "--top-k", "20", "--seed", "3")
    two = answers(*prompts, "--tokens", "10", "--temperature", "0.7", "--top-k", "20", "--seed", "3", "--batch", "2",
                  "tensor=1d_sp", "tensor.axes.t=2", "cluster=processes", "cluster.device=cpu")  # fmt: skip
    assert one == two


def test_draws_depend_on_the_seed(answers):
    drawn = [answers("a", "--tokens", "8", "--temperature", "2", "--seed", str(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_exported_folder_and_one_checkpoint_answer_alike(answers, learned, tmp_path):
    assert weights(["export", str(learned / "checkpoints"), str(tmp_path / "hf")]) == 0
    (one,) = (learned / "checkpoints").glob("step-*")
    by_source = [answers("every worker", "--tokens", "20", of=of) for of in (learned, one, tmp_path / "hf")]
    assert by_source[0] == by_source[1] == by_source[2]


def test_prompts_from_files(answers, tmp_path):
    (tmp_path / "p.txt").write_text("every worker\n\nnothing is\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "every worker", "id": 7}\n{"ids": [1, 2, 3]}\n')
    texts = answers("--prompts", str(tmp_path / "p.txt"), "--tokens", "30")
    rows = answers("--prompts", str(tmp_path / "p.jsonl"), "--tokens", "30")
    assert [line["answer"] for line in texts] == [SENTENCES[1][12:], SENTENCES[3][10:]]
    assert all(line["ended"] for line in texts)
    assert rows[0]["id"] == 7 and rows[0]["answer"] == texts[0]["answer"] and rows[1]["ids"] == [1, 2, 3]


def test_words_that_are_no_keys_are_prompts():
    words = ["tensor=1d", "x = 1", "a=b", "model.length=7", "+model.a=1", "tensor.axes.t=2", "n=model"]
    assert split_words(words) == (["tensor=1d", "model.length=7", "+model.a=1", "tensor.axes.t=2"],
                                   ["x = 1", "a=b", "n=model"])  # fmt: skip


WRONG = {
    "no prompt": ([], 'a prompt is needed: "TEXT" or --prompts FILE, one of them'),
    "temperature": (["x", "--temperature", "-1"], "--temperature=-1.0: must be >= 0; nearest legal: 0"),
    "top-p": (["x", "--top-p", "0"], "--top-p=0.0: must be > 0 and <= 1; nearest legal: 1"),
    "beams that draw": (["x", "--beams", "2", "--temperature", "1"],
                        "--beams=2: a search draws nothing: --temperature=0; nearest legal: 1"),
    "no tokens": (["x", "--tokens", "0"], "--tokens=0: must be >= 1; nearest legal: 1"),
    "too long": (["the plan", "--tokens", "90"], "with --tokens=90 more than model.length=48; nearest"),
    "no such file": (["--prompts", "nowhere.txt"], "--prompts=nowhere.txt: cannot be read"),
    "another tokenizer": (["x", "data.tokenizer=nowhere"], "no such file or folder"),
    "an unknown axis": (["x", "tensor.axes.q=2"], "tensor.axes.q=2: tensor=serial has no such axis"),
    "inline": (["x", "tensor=1d", "tensor.axes.t=2", "cluster=inline"], "nearest legal: cluster=processes"),
    "another model": (["x", "model.d_model=64"], "shapes: "),
    "chat": (["x", "--chat"], "data.chat_template=: the tokenizer has none; nearest legal: chatml, a file"),
    "no folder": (["x", "--out", "nowhere/out"], "--out=nowhere/out: there is no such folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_mistakes_are_refused_in_a_line(case, learned, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, line = WRONG[case]
    assert generate([str(learned), *arguments]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and told[0].startswith("generate: ") and line in told[0], told
    assert list(tmp_path.iterdir()) == []


def test_all_prompts_that_are_wrong_are_named(learned, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"ids": [999]}\n{"prompt": 3}\n{"ids": []}\n{"prompt": "fine"}\n')
    assert generate([str(learned), "--prompts", str(tmp_path / "p.jsonl")]) == 2
    told = capsys.readouterr().err
    assert "p.jsonl:1: ids are a list of integers from 0 to 299" in told
    assert "p.jsonl:2: is no text" in told and "p.jsonl:3: is empty" in told and "p.jsonl:4" not in told


@pytest.mark.parametrize("name", ["nowhere", "empty", "run"])
def test_no_checkpoint_is_refused(name, learned, capsys, tmp_path):
    for folder in ("empty", "run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_bytes((learned / "config.yaml").read_bytes())
    assert generate([str(tmp_path / name), "x"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("generate: CHECKPOINT=")
    hint = "holds no checkpoint; a run saves its last step, and others with checkpoint.every=STEPS"
    assert (hint in line) == (name == "run")
