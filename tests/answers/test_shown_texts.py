"""Texts that a run shows, of eval.prompts and at its end: the same under every plan, those of `platform.generate`, and
longer than the model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from platform.boundary.terminal import escape_terminal_text
from platform.cluster.control.evaluations import Evaluations
from platform.generate import main as generate
from platform.launch import main as launch
from platform.model import MODELS as KINDS
from platform.model.transformer import Decoder
from platform.predict.choose_schedule import list_process_groups, violations_of_text_requests
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train.worker import Worker
from tests.answers.cached import louder
from tests.harness.oracle import MODELS, Tokens, configure, trainer_of
from tests.harness.threads import run_threads

PLANS = {
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2},
    "1d_sp, pipeline": {"tensor": "1d_sp", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2},
    "replicas, zero 3": {"data": 2, "zero": 3},
    "3d": {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}, "microbatch": 8},
}
MODEL = {
    "gpt": {"layers": 1},
    "t5": {**MODELS["t5"], "layers": 1},
    "original": {**MODELS["original"], "tied": False, "layers": 1},
}
LENGTH = 8
PROMPTS = ["def ", "", "x" * 100]


def configured(model: str, **plan):
    return configure(**plan, **{**MODEL[model], "length": LENGTH})


def shown(c, tokens: int) -> list[tuple[list[str], set]]:
    """Of every rank the texts, and the groups that it launches in meanwhile."""
    plan = make_plan(c)

    def on_rank(communicator: Communicator):
        torch.set_num_threads(1)
        rank = object.__new__(Worker)
        rank.config, rank.plan, rank.communicator = c, plan, communicator
        rank.trainer = trainer_of(c, plan, communicator)
        louder(rank.trainer)
        crew = SimpleNamespace(call_ranks=lambda method, *arguments, within=0: [getattr(rank, method)(*arguments)])
        run = SimpleNamespace(config=c, corpus=Tokens(c), journal=None, monitor=None, tasks=None, signals=None)
        communicator.log = log = []
        texts = Evaluations(run)._continue_prompts(crew, plan, PROMPTS, tokens)
        return texts, {launch.axes for launch in log if launch.op != "send"}

    return [on_rank(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, on_rank)


@pytest.mark.parametrize("model", MODEL)
def test_texts_longer_than_the_model_are_the_same_under_every_plan(model):
    [(expected, _)] = shown(configured(model), tokens := LENGTH + 6)
    lengths = [0, 0, 0] if "kind" in MODEL[model] else [len(prompt) for prompt in PROMPTS]  # an answer has no prompt
    assert [len(text.split()) - n for text, n in zip(expected, lengths, strict=True)] == [tokens] * 3
    assert all(len(set(text.split()[-tokens:])) > 3 for text in expected), "they are drawn"
    [(short, _)] = shown(configured(model), 2)
    assert all(long.startswith(text) for long, text in zip(expected, short, strict=True))
    for how in PLANS.values():
        c = configured(model, **how)
        c.monitor.sample = tokens
        for texts, used in shown(c, tokens):
            assert texts == expected
            assert used <= {*list_process_groups(c, make_plan(c))}, "real process groups exist only where it says so"


def test_draws_go_on_where_a_text_is_read_anew():
    """A second half that is drawn as the first one was would repeat it."""
    [(texts, _)] = shown(configured("gpt"), 5 * LENGTH)
    for text in texts:
        ids = text.split()[-4 * LENGTH :]
        halves = [ids[i : i + LENGTH // 2] for i in range(0, len(ids), LENGTH // 2)]
        assert len({*map(tuple, halves)}) == len(halves)


RUN = (
    "+experiment=gpt_quick data=text model.vocab=300 model.layers=1 model.d_model=32 model.heads=4 model.length=32 "
    "train.steps=4 train.global_batch=8 train.microbatch=4 optimizer.warmup_steps=1 checkpoint.every=4 precision=fp64 "
    "eval.every=4 eval.batches=1 eval.prompts=[the,a]  eval.prompt_tokens=6 monitor.sample=40 seed=5 cluster.device=cpu"
).split()
BY_COMMAND = {
    "one": "cluster=inline tensor=serial parallel.data=1",
    "tensor": "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1",
    "stages": "cluster=processes tensor=serial parallel.data=1 pipeline=1f1b pipeline.stages=2",
}


def test_they_are_those_of_the_checkpoint(tmp_path, capfd):
    text = "the plan is data and data is the plan. a layout says which rank holds what.\n" * 300
    (tmp_path / "text.txt").write_text(text)
    files, shown_texts = [f"data.path={tmp_path}/text.txt", f"data.cache={tmp_path}/cache"], {}
    for name, how in BY_COMMAND.items():
        capfd.readouterr()
        assert launch([*RUN, *files, *how.split(), f"run.dir={tmp_path}/{name}"]) == 0
        sample = capfd.readouterr().out.partition("a sample of 40 tokens:\n")[2].partition("\nrun directory: ")[0]
        events = map(json.loads, (tmp_path / name / "journal.jsonl").read_text().splitlines())
        shown_texts[name] = sample, {e["prompt"]: e["text"] for e in events if e["event"] == "sampled"}
    assert len({repr(texts) for texts in shown_texts.values()}) == 1
    sample, prompted = shown_texts["one"]
    [opening] = prompted.keys() - {"the", "a"}
    assert opening.strip() in text and "def " not in text, "what is held out begins so"
    assert escape_terminal_text(prompted[opening]) == sample
    (tmp_path / "prompts.txt").write_text("the\na\n")
    drawn = ["--tokens", "6", "--temperature", "0.8", "--seed", "5"]
    for words in ([opening], ["--prompts", f"{tmp_path}/prompts.txt"]):
        out = tmp_path / f"{len(words)}.jsonl"
        assert generate([f"{tmp_path}/one", *words, *drawn, "--out", str(out)]) == 0
        for line in map(json.loads, out.read_text().splitlines()):
            wanted = prompted[line["prompt"]]
            assert not line["ended"] and wanted.startswith(line["prompt"] + line["answer"])
            assert line["prompt"] == opening or wanted == line["prompt"] + line["answer"]


class InParts:
    """A model of one's own, in parts as ours are, that does not derive from ours: made of one."""

    inputs = ("tokens", "labels")

    def __init__(self, c):
        self._of = Decoder(c)
        self.sizes, self.units, self.inputs = self._of.sizes, self._of.units, self._of.inputs
        self.parameters, self.part = self._of.parameters, self._of.part

    def forward(self, ops, inputs):
        return self._of.forward(ops, inputs)


class AsAWhole(InParts):
    def __init__(self, c):
        super().__init__(c)
        del self.units, self.part


def test_a_model_of_ones_own_writes_if_it_has_parts(monkeypatch):
    [(expected, _)] = shown(configured("gpt"), 9)
    monkeypatch.setitem(KINDS, "own", InParts)
    c = configured("gpt", **PLANS["1d"])
    c.model.kind, c.monitor.sample = "own", 9
    assert [texts for texts, _ in shown(c, 9)] == [expected] * 4
    monkeypatch.setitem(KINDS, "own", AsAWhole)
    plan = make_plan(c)
    [line] = violations_of_text_requests(c, plan)
    assert line == "monitor.sample=9: model.kind=own generates no text; nearest legal: 0"
    c.monitor.sample = 0
    assert not [*violations_of_text_requests(c, plan)]
