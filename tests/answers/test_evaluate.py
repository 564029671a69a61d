"""`python -m platform.evaluate`: losses and perplexities of a checkpoint."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from platform.checkpoint.__main__ import main as checkpoint
from platform.cluster.session import find_trained_model
from platform.config.fields import Config
from platform.data.corpus import open_run_corpus
from platform.evaluate import main as evaluate
from platform.monitor import MetricsLog
from tests.answers.conftest import SENTENCES
from tests.harness import reference_transformer
from tests.harness.commands import QUICK, SMALL, in_this_process


@pytest.fixture
def table(learned, tmp_path, capsys):
    def run(*arguments: str) -> list[dict]:
        out = tmp_path / "out.json"
        cache = f"data.cache={learned.parent}/cache"
        assert evaluate([str(learned), cache, *arguments, "--json", str(out)]) == 0, capsys.readouterr().err
        return json.loads(out.read_text())["sources"]

    return run


def test_the_loss_is_that_of_the_samples_held_out(table, learned, tmp_path):
    """Two at a time, each with documents of its own."""
    (row,) = table("precision=fp64", "train.microbatch=2")
    assert (
        checkpoint(["export", str(learned / "checkpoints"), str(tmp_path / "w.safetensors"), "--only", "model."]) == 0
    )
    w = {name.removeprefix("model."): t.double() for name, t in load_file(tmp_path / "w.safetensors").items()}
    trained = find_trained_model(str(learned))
    trained.data.cache = f"{learned.parent}/cache"
    corpus = open_run_corpus(Config(model=trained.model, data=trained.data, seed=trained.seed))
    samples = corpus.batch("validation", 0, corpus.sample_counts["validation"])
    data = {name: torch.as_tensor(rows) for name, rows in samples.items()}
    logits = reference_transformer.logits(trained.model, w, data)
    loss = F.cross_entropy(logits.transpose(1, 2), data["labels"], ignore_index=-1)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
    text = corpus.decode([i for i in data["labels"].flatten().tolist() if i > 0])
    assert row["bytes"] == len(text.encode())
    assert row["perplexity_per_byte"] == pytest.approx(math.exp(row["loss"] * row["tokens"] / len(text.encode())))
    assert row["perplexity_per_token"] == pytest.approx(math.exp(row["loss"]))


def test_the_table_names_what_was_measured(learned, capsys):
    assert evaluate([str(learned), f"data.cache={learned.parent}/cache"]) == 0
    head, row = capsys.readouterr().out.splitlines()[-2:]
    assert head.split()[0] == "source" and row.split()[0] == "text.jsonl", "it was a dash"


@pytest.mark.full
def test_a_text_of_ones_own_under_another_plan(table, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("\n".join(SENTENCES * 8))
    own = ("data=text", f"data.path={text}")
    (row,) = table(*own, "precision=fp64")
    assert (
        len(text.read_text().split()) - 12 <= row["words"] <= len(text.read_text().split())
    )  # the end fills no sample
    (other,) = table(*own, "precision=fp64", "tensor=1d", "tensor.axes.t=2", "cluster=processes", "cluster.device=cpu")
    assert other["loss"] == pytest.approx(row["loss"], rel=1e-9)
    assert {**other, **row} == row | {k: row[k] for k in other}


@pytest.mark.parametrize("batches", ["eval.batches=15 train.global_batch=4", "eval.batches=1 train.global_batch=64"])
def test_an_evaluation_in_training_counts_each_held_out_row_once(tmp_path, batches, capsys):
    """The number of rows is no multiple of the batch, and there are fewer than all batches have."""
    for name, times in (("a", 40), ("b", 25)):
        (tmp_path / f"{name}.txt").write_text("\n".join(SENTENCES * times))
    data = "data=mixture data.validation=0.3 data.cache=cache".split()
    data += [f"data.sources.{name}.path={tmp_path}/{name}.txt" for name in "ab"]
    fixed = "cluster=inline tensor=serial parallel.data=1 precision=fp64 train.steps=1 eval.every=1".split()
    fixed += ["checkpoint.every=1", "run.dir=run"]
    assert in_this_process(QUICK, *SMALL, *fixed, *data, *batches.split(), cwd=tmp_path).returncode == 0
    (row,) = MetricsLog.read_rows(tmp_path / "run" / "metrics.jsonl")
    assert evaluate([str(tmp_path / "run"), "precision=fp64", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["sources"]
    assert all(r["samples"] % 4 and r["samples"] < 60 for r in rows)
    assert row["val_losses"] == {r["source"]: pytest.approx(r["loss"], rel=1e-12) for r in rows}


def test_several_sources(table, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{s} {name}"}}\n' for s in SENTENCES * 30))
    rows = table("data=mixture", f"data.sources.a.path={tmp_path}/a.jsonl", f"data.sources.b.path={tmp_path}/b.jsonl",
                 "data.validation=0.3", "--samples", "3")  # fmt: skip
    assert [(row["source"], row["samples"]) for row in rows] == [("a", 3), ("b", 3)]


def test_training_data_too(table):
    (row,) = table("--split", "train", "--samples", "8")
    assert row["samples"] == 8 and row["loss"] < 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["hello"], "argument=hello: is no KEY=VALUE of the configuration"),
        (["data=text", "data.path=nowhere"], "/nowhere: no file or folder"),
        (["--samples", "-1"], "--samples=-1: must be >= 0; nearest legal: 0"),
        (["data.validation=0"], "--split=validation: the data holds nothing out; nearest legal: train"),
    ],
)
def test_mistakes_are_refused_in_a_line(arguments, line, learned, capsys):
    assert evaluate([str(learned), f"data.cache={learned.parent}/cache", *arguments]) == 2
    assert line in capsys.readouterr().err
