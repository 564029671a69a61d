"""Data as users give it: files of every kind, mixtures of them, stopped and resumed under other plans."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from platform.monitor import JsonLines, MetricsLog
from tests.harness.commands import QUICK, SMALL, command, in_this_process, refused

FIXED = "optimizer.warmup_steps=2 precision=fp64 model.dropout=0.1 eval.every=3 eval.batches=1 train.steps=6".split()
ONE = "cluster=inline tensor=serial parallel.data=1".split()
TWO = "cluster=processes tensor=serial parallel.data=2 parallel.zero=1 checkpoint.every=1".split()
SPLIT = "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1 checkpoint.every=1".split()


def train(cwd: Path, *arguments: str) -> list[dict]:
    launch = in_this_process if "cluster=inline" in arguments else command
    done = launch(QUICK, *SMALL, *FIXED, "data.cache=cache", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = [a.removeprefix("run.dir=") for a in arguments if a.startswith("run.dir=")]
    return MetricsLog.read_rows(cwd / run / "metrics.jsonl")


def equal(actual: list[dict], wanted: list[dict]) -> None:
    assert [row["step"] for row in actual] == [row["step"] for row in wanted]
    for have, want in zip(actual, wanted, strict=True):
        assert have["samples"] == want["samples"] and have.keys() - {"recovery_seconds"} == want.keys()
        for key in want.keys() & {"loss", "grad_norm", "val_loss"}:
            assert have[key] == pytest.approx(want[key], rel=1e-9, abs=0), (have["step"], key)
        for name, loss in want.get("val_losses", {}).items():
            assert have["val_losses"][name] == pytest.approx(loss, rel=1e-9, abs=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text and records."""
    root = tmp_path_factory.mktemp("data")
    (root / "a.txt").write_text("".join(f"line {i} of a text, {i * i} sheep\n" for i in range(1500)))
    rows = ({"body": f"record {i}: " + f"{i} wolves and {i + 1} sheep. " * 12} for i in range(120))
    (root / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    roles = ("user", "assistant")
    talks = ([{"role": role, "content": f"{i} {role} sheep"} for role in roles] for i in range(200))
    lines = [json.dumps({"messages": talk}) + "\n" for talk in talks]
    (root / "c.jsonl").write_text("".join(lines))
    (root / "held.jsonl").write_text("".join(lines[:20]))
    return root


MIXTURE = (
    "data=mixture data.sources.a.path=a.txt data.sources.a.weight=0.7 data.sources.b.path=b.jsonl"
    " data.sources.b.field=body data.sources.b.weight=0.3"
).split()


PACKED = [*MIXTURE, "data.packing=best_fit", "data.document_mask=true"]
TALKS = [*PACKED, "data.sources.c.path=c.jsonl", "data.sources.c.kind=instructions", "data.sources.c.field=messages",
         "data.sources.c.weight=0.5", "data.chat_template=chatml"]  # fmt: skip
STREAMED = [*TALKS, "data.sources.c.streaming=true", "data.sources.c.validation_path=held.jsonl", "data.block=1000"]
KINDS = {"mixture": MIXTURE, "packed": PACKED, "instructions": TALKS, "streamed": STREAMED}


@pytest.fixture(scope="module")
def whole(place) -> Callable[[str], list[dict]]:
    """Six steps on a kind of data by one process, in one go."""
    return cache(lambda kind: train(place, *KINDS[kind], *ONE, f"run.dir={kind}-whole"))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_run_under_other_plans_and_after_a_failure(place, whole, kind):
    run = f"run.dir={kind}-parts"
    first = train(place, *KINDS[kind], *TWO, "train.stop_at=2", run)
    assert [row["step"] for row in first] == [1, 2]
    rows = train(place, *KINDS[kind], *SPLIT, "elastic.faults=[4:kill:1]", "elastic.min_workers=1", run)
    equal(rows, whole(kind))
    happened = [event["event"] for event in JsonLines.read_objects(place / f"{kind}-parts" / "journal.jsonl")]
    assert "failure" in happened and happened.count("restored") >= 1


def test_each_source_has_a_validation_of_its_own(whole):
    losses = whole("streamed")[2]["val_losses"]
    assert set(losses) == {"a", "b", "c"} and len(set(losses.values())) == 3


def test_the_samples_are_those_of_its_sources(place, whole):
    """Another weight is another run: the loss tells."""
    other = [a.replace("0.7", "0.2") for a in MIXTURE]
    assert train(place, *other, *ONE, "train.stop_at=1", "run.dir=other")[0]["loss"] != whole("mixture")[0]["loss"]
    done = in_this_process(QUICK, *SMALL, *FIXED, "data.cache=cache", *other, *ONE, "run.dir=mixture-whole", cwd=place)
    assert done.returncode == 2 and "data.sources.a.weight: 0.7 there, 0.2 here" in done.stderr


BAD = {
    "nul.txt": (b"text\0text", "text", "a binary file (NUL at byte 4)"),
    "empty.txt": (b"", "text", "no text in it"),
    "torn.jsonl.gz": (b"\x1f\x8b\x08\0\0\0\0\0\0\xff", "text", "Compressed file ended"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_end_with_one_line(tmp_path, name):
    content, kind, reason = BAD[name]
    (tmp_path / name).write_bytes(content)
    [line] = refused(f"data={kind}", f"data.path={name}", "data.cache=cache", "run.dir=run", cwd=tmp_path)
    assert line.startswith("config: data.path=") and name in line and reason in line, line


def test_bad_files_of_a_mixture_end_with_one_line_each(tmp_path):
    for name, (content, _, _) in BAD.items():
        (tmp_path / name).write_bytes(content)
    overrides = [f"data.sources.s{i}.path={name}" for i, name in enumerate(BAD)]
    lines = refused("data=mixture", *overrides, "data.sources.s9.pth=x", "data.cache=cache", cwd=tmp_path)
    assert [line.partition("=")[0] for line in lines] == ["config: data.sources.s9.pth"]
    lines = refused("data=mixture", *overrides, "data.cache=cache", cwd=tmp_path)
    assert [line.partition("=")[0] for line in lines] == [f"config: data.sources.s{i}.path" for i in range(len(BAD))]
    assert np.all([reason in line for line, (_, _, reason) in zip(lines, BAD.values(), strict=True)])


@pytest.mark.parametrize(("steps", "line"), [(1, ""), (40, "data: 40 steps read it 23.7 times")])
def test_the_start_says_how_often_the_data_is_read(tmp_path, steps, line):
    (tmp_path / "a.txt").write_text("".join(f"{i} sheep and {i + 1} wolves\n" for i in range(60)))
    keys = ["data=text", "data.path=a.txt", "data.cache=cache", "data.validation=0", "data.tokenizer=train"]
    steps_typed = [f"train.steps={steps}", "optimizer.warmup_steps=0", "run.dir=run", "checkpoint.last=false"]
    done = in_this_process(QUICK, *SMALL, *ONE, *keys, *steps_typed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [said for said in done.stdout.splitlines() if "read it" in said] == [line] * bool(line)


APART = {
    "model.within_documents=true": "data.document_mask=true",
    "data.document_mask=true model.within_documents=false": "nearest legal: true, data.document_mask=false",
    "data.document_mask=true data=synthetic": "data=synthetic has no documents",
    "data.packing=best_fit data=synthetic": "data=synthetic has no documents",
    "data.packing=best_fit model.kind=encoder": "data.objective=masked does not read it",
    "data.document_mask=true model.kind=encoder": "model.kind=encoder has no such attention",
    "data=instructions data.path=c.jsonl model.kind=encoder": "data.objective=masked: learns of prompts too",
    "data.packing=worst_fit": "nearest legal: best_fit",
}


@pytest.mark.parametrize("typed", APART)
def test_what_does_not_go_together_is_refused(tmp_path, typed):
    lines = refused(*typed.split(), "run.dir=run", cwd=tmp_path)
    assert any(APART[typed] in line for line in lines), lines


OWN = """
from platform.api import register_objective
from platform.data.objectives import Causal

class Continued(Causal):
    def batch(self, stream, index, keys):
        found = super().batch(stream, index, keys)
        labels = found["labels"].copy()
        labels[:, : self.length // 2] = -1
        return {**found, "labels": labels}
    def predicted(self, stream, index):
        return len(index) * (self.length - self.length // 2)

class Silent(Causal):
    def batch(self, stream, index, keys):
        return {"tokens": super().batch(stream, index, keys)["tokens"]}

class Short(Causal):
    def batch(self, stream, index, keys):
        return {name: rows[:, 1:] for name, rows in super().batch(stream, index, keys).items()}

for name, kind in {"continued": Continued, "silent": Silent, "short": Short}.items():
    register_objective(name, lambda s, kind=kind: kind(s.length, s.special, s.document_mask))
register_objective("broken", lambda s: 1 / 0)
"""
WRONG = {
    "silent": "makes no data tensor 'labels', which the model reads: tokens",
    "short": "makes 'tokens' as int64 of shape [1, 15] for one sample; the model reads int64 [1, 16]",
    "broken": "raises ZeroDivisionError: division by zero",
    "missing": "nearest legal: ",
}


@pytest.mark.full
def test_an_objective_of_ones_own(place, tmp_path, monkeypatch):
    """It learns the second half of every sample; one process and two have the same losses."""
    (tmp_path / "own_goals.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ["extend=[own_goals]", "data=text", "data.path=a.txt", "train.stop_at=2"]
    rows = train(place, *overrides, "data.objective=continued", *ONE, "run.dir=own-one")
    equal(train(place, *overrides, "data.objective=continued", *TWO, "run.dir=own-two"), rows)
    assert train(place, *overrides, *ONE, "run.dir=own-causal")[0]["loss"] != rows[0]["loss"]
    for name, reason in WRONG.items():
        more = ["data.cache=cache", f"data.objective={name}", *ONE, "run.dir=wrong"]
        [line] = refused(*overrides, *more, cwd=place)
        assert line.startswith(f"config: data.objective={name}: ") and reason in line, line


@pytest.mark.parametrize("named", [False, True])
def test_documents_of_instructions_are_apart_and_an_earlier_run_goes_on_as_it_began(place, tmp_path, named):
    """Found by the same command, with or without run.dir, it keeps its own value and says so in a line."""
    keys = [*ONE, *SMALL, "model.vocab=400", "data=instructions", f"data.path={place / 'c.jsonl'}", "data.validation=0"]
    typed = [QUICK, *keys, "data.chat_template=chatml", "data.cache=cache", "train.steps=3", "checkpoint.every=1"]
    typed += ["run.dir=run"] if named else []
    begun = in_this_process(*typed, "data.document_mask=false", "train.stop_at=2", cwd=tmp_path)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    done = in_this_process(*typed, cwd=tmp_path)
    assert done.returncode == 0 and "continues after step 2" in done.stdout, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("documents in a row see each other, as this run began") == 1
    new = in_this_process(*typed, "seed=5", *(["run.dir=other"] if named else []), cwd=tmp_path)
    assert new.returncode == 0 and "see each other" not in new.stdout + new.stderr
    masks = sorted("document_mask: true" in path.read_text() for path in tmp_path.glob("**/config.yaml"))
    assert masks == [False, True]
