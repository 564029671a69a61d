"""Mistakes in a model, source or schedule of one's own: one line with name and place, before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from platform.plan.model_types import POINTWISE
from tests.harness.commands import QUICK, in_this_process

MODEL = """
from platform.model import register_model
from platform.plan.model_types import Parameter, Spec

STREAM, WIDE, LOGITS = (Spec.of(r, d) for r, d in [
    ("stream", "length batch d_model"), ("mlp", "length batch d_ff"), ("logits", "length batch vocab")])
EMBEDDING = Parameter("embedding", ("vocab", "d_model"), "in")
UP = Parameter("up", ("d_model", "d_ff"), "in")
DOWN = Parameter("down", ("d_ff", "d_model"), "out")
HEAD = Parameter("head", ("d_model", "vocab"), "in")

class Own:
    inputs = ("tokens", "labels")
    def __init__(self, c):
        self.sizes = {"length": c.length, "d_model": c.d_model, "d_ff": 32, "vocab": c.vocab}
    def parameters(self):
        return [EMBEDDING, UP, DOWN, HEAD]
    def forward(self, ops, inputs):
        x = ops.lookup("embedding", EMBEDDING, inputs["tokens"], STREAM)
        (h,) = ops.project(x, STREAM, [UP], [WIDE])
        h = ops.pointwise("gelu", h)
        (x,) = ops.project(h, WIDE, [DOWN], [STREAM])
        (y,) = ops.project(x, STREAM, [HEAD], [LOGITS])
        return ops.cross_entropy("loss", y, LOGITS, inputs["labels"])

register_model("own", Own)
"""
MISTAKES = {  # the part of the model -> (what stands in its place, what the line says)
    "region": ('("mlp", "length batch d_ff")', '("adapters", "length batch d_ff")', "adapters: no such region"),
    "dim": ('("mlp", "length batch d_ff")', '("mlp", "length batch dff")', "dff: no such dim", "nearest legal: d_ff"),
    "dim of a parameter": ('("d_ff", "d_model"), "out"', '("dff", "d_model"), "out"', "dff: no such dim, of parameter"),
    "a dim twice": ('("mlp", "length batch d_ff")', '("mlp", "d_ff batch d_ff")', "d_ff: a dim comes once"),
    "undeclared": ("[EMBEDDING, UP, DOWN, HEAD]", "[EMBEDDING, UP, HEAD]", "down: a parameter that is not declared"),
    "unused": ("        h = ops.pointwise", "        x = x\n        h = ops.pointwise", None),
    "repeated": ('Parameter("up"', 'Parameter("down"', "down: several parameters have this name"),
    "role": ('"d_ff"), "in")', '"d_ff"), "inn")', "inn: no such role, of parameter up", "nearest legal: in"),
    "word": ('"gelu", h', '"gelo", h', "gelo: no such pointwise function", "nearest legal: gelu"),
    "arguments": ('"gelu", h', '"gelu", h, h', "gelu: takes 1 activations, not 2"),
    "another spec": ("(h, WIDE, [DOWN]", "(h, STREAM, [DOWN]", "the model passes it where it declares stream"),
    "plain arithmetic": ('ops.pointwise("gelu", h)', "h + h", "TypeError", "Symbol"),
    "no symbol": ("(h, WIDE, [DOWN]", "(3, WIDE, [DOWN]", "int: what flows is what an operation returned"),
    "no such key": ('inputs["labels"]', 'inputs["label"]', "KeyError: 'label'"),
    "no length": ('"length": c.length, ', "", "length: the model's sizes lack it"),
    "its own making": ("self.sizes = {", "self.missing; self.sizes = {", "AttributeError", "missing"),
    "the same name": ('[HEAD], [LOGITS])', '[HEAD], [LOGITS]); ops.project(x, STREAM, [HEAD], [LOGITS])', "several o"),
    "an operation that is none": ("ops.pointwise(", "ops.pointwize(", "AttributeError", "pointwize"),
}  # fmt: skip
MISTAKES["unused"] = ("[EMBEDDING, UP,", '[Parameter("idle", ("d_ff",), "vector"), EMBEDDING, UP,', "idle: a declared")
OPTIONS = ["data=synthetic", "tensor=serial", "cluster=inline", "parallel.data=1", "run.dir=run", "eval.every=0"]
OPTIONS += ["model.length=8", "model.d_model=16", "model.vocab=32", "train.global_batch=2", "train.microbatch=2"]
OPTIONS += ["train.steps=1", "optimizer.warmup_steps=0", "monitor.sample=0"]


def run(folder: Path, monkeypatch, name: str, text: str, *arguments: str):
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return in_this_process(QUICK, f"extend=[{name}]", *OPTIONS, *arguments, cwd=folder)


def test_the_model_without_mistakes_trains(tmp_path, monkeypatch):
    done = run(tmp_path, monkeypatch, "right_model", MODEL, "model.kind=own")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("which", MISTAKES)
def test_a_mistake_in_an_own_model_is_named_with_its_place(tmp_path, monkeypatch, which):
    good, bad, *said = MISTAKES[which]
    assert MODEL.count(good) == 1
    name = f"wrong_{which.replace(' ', '_')}"
    done = run(tmp_path, monkeypatch, name, MODEL.replace(good, bad), "model.kind=own")
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("config: model.kind=own: ") and all(part in line for part in said), line
    assert f"{name}.py:" in line and not (tmp_path / "run").exists()


def test_every_pointwise_word_can_be_computed():
    from platform.plan.operations import pointwise

    assert pointwise._pointwise_functions().keys() == POINTWISE.keys()


SOURCES = {
    "a generator": ("(p for p in [Path(data.path)])", 0, ""),
    "texts": ("[data.path]", 0, ""),
    "none": ("None", 2, "its source"),
    "numbers": ("[1, 2]", 2, "gives list, not paths of files"),
    "nothing": ("[]", 2, "no file in it"),
    "a failure": ("{}['mine']", 2, "its source KeyError: 'mine'"),
}


@pytest.mark.parametrize("which", SOURCES)
def test_a_source_of_ones_own(tmp_path, monkeypatch, which):
    source, status, said = SOURCES[which]
    (tmp_path / "poem.txt").write_text("so much depends upon a red wheel barrow\n" * 100)
    text = f"from pathlib import Path\nfrom platform.data.text_sources import register_source\n" \
           f"register_source('mine', lambda data: {source})\n"  # fmt: skip
    name = f"source_{which.replace(' ', '_')}"
    more = ["data=mine", "data.path=poem.txt", "data.cache=cache", "model.vocab=300", "model.layers=1"]
    done = run(tmp_path, monkeypatch, name, text, *more)
    assert done.returncode == status and said in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


VEE = """
from platform.plan.generators import SCHEDULES
from platform.predict.choose_schedule import register_pipeline
register_pipeline("own_1f1b", SCHEDULES["1f1b"])
"""


def test_a_registered_schedule_goes_by_its_name(tmp_path, monkeypatch):
    done = run(tmp_path, monkeypatch, "own_schedules", VEE, "pipeline=own_1f1b", "pipeline.stages=1", "--cfg", "job")
    assert done.returncode == 0 and "kind: own_1f1b" in done.stdout, done.stderr
    done = in_this_process(QUICK, "pipeline=vee", cwd=tmp_path)
    assert done.returncode == 2 and "pipeline.kind=vee where a module in extend=[MODULE] registers it" in done.stderr


def test_a_world_of_one_shows_the_traceback(tmp_path, monkeypatch):
    text = (
        "from platform.optimizer.learning_rate import register_schedule\n"
        "def rate(o, step, steps):\n    raise LookupError('in my own code')\n"
        "register_schedule('bad', rate)\n"
    )
    done = run(tmp_path, monkeypatch, "bad_rate", text, "optimizer.schedule=bad", "elastic.attempts=1")
    assert done.returncode == 1 and "bad_rate.py" in done.stderr and "LookupError: in my own code" in done.stderr
