"""A run that starts from weights: any plan takes them as they are, whatever wrote them, and trains on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from platform.boundary.local_files import LocalStorage
from platform.checkpoint import catalogue
from platform.checkpoint.moves import read_tensor
from platform.config.fields import Config, Model
from platform.launch import compose_config
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator
from platform.train.training_state import RankTrainingState
from platform.weights.__main__ import main
from platform.weights.deepseek import DEEPSEEK_V3
from platform.weights.exporting import Exportable
from platform.weights.importing import _describe_differences, import_model, open_importable, open_initial_weights
from platform.weights.tensor_names import list_parameters
from tests.harness.commands import QUICK, in_this_process
from tests.harness.oracle import Result, assemble, configure, trainer_of
from tests.harness.suite import suite
from tests.harness.threads import run_threads
from tests.weights import peer
from tests.weights.written import LATENT, LLAMA, OURS, tensors_of, written

PLANS = {
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 1}},
    "zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "stages": {"pipeline": "1f1b", "stages": 2, "microbatch": 2},
}
CASES = [{"plan": plan, "family": family, "source": source} for plan in PLANS for family in ("gpt2", "qwen2", "t5")
         for source in ("folder", "checkpoint")]  # fmt: skip
OF_EXPERTS = {
    "experts": {"data": 2, "experts_of": 2, "tensor": "1d", "axes": {"t": 2}},
    "experts, zero 3": {"data": 4, "experts_of": 2, "zero": 3},
    "stages": PLANS["stages"],
}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
EXPERTS = [{"plan": plan, "family": family, "source": source} for plan in OF_EXPERTS
           for family in WITH_EXPERTS for source in ("folder", "stacks", "checkpoint")]  # fmt: skip


def masters(c: Config, plan, communicator: Communicator) -> Result:
    trainer = trainer_of(c, plan, communicator, fresh=False)
    RankTrainingState(trainer).load_initial_weights()
    weights = {n: w.detach().clone() for n, w in trainer.weights.master.items()}
    return Result(communicator.rank, 0.0, 0.0, {}, weights, {}, [], None, [])


@suite("starts from weights (threads)", CASES + EXPERTS, CASES[::5] + EXPERTS[::4])
def test_every_plan_takes_the_same_weights(tmp_path, case):
    folder = written(tmp_path / "hf", case["family"], tensors_of(case["family"], fused=case["source"] == "stacks"))
    importable = open_importable(str(folder), "source")
    directory = import_model(importable, LocalStorage(tmp_path / "storage"))
    storage = LocalStorage(tmp_path / "storage")
    manifest = catalogue.verify_checkpoint(storage, directory)
    c = configure(**(PLANS | OF_EXPERTS)[case["plan"]], **vars(importable.model))
    c.train.init = str(tmp_path / "storage" if case["source"] == "checkpoint" else folder)
    plan = make_plan(c)
    results = run_threads(plan.mesh, lambda communicator: masters(c, plan, communicator))
    for name, whole in assemble(plan, results, lambda r: r.initial).items():
        assert torch.equal(whole, read_tensor(storage, directory, manifest, f"model.{name}").double()), name


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_stacks_and_separate_experts_are_the_same_weights(tmp_path, name):
    """In either form transformers computes the same model; in theirs expert e's matrix is row e of the stack."""
    library = peer.transformers()
    storage = LocalStorage(tmp_path / "storage")
    directory = import_model(open_importable(str(written(tmp_path / "hf", name)), "source"), storage)
    url = f"{tmp_path / 'storage'}"
    assert main(["export", url, str(tmp_path / "one")]) == main(["export", url, str(tmp_path / "two"), "--fused"]) == 0
    one, two = (library.AutoModelForCausalLM.from_pretrained(tmp_path / form).state_dict() for form in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    manifest = catalogue.verify_checkpoint(storage, directory)
    for key in ("gate", "up", "down"):
        ours = read_tensor(storage, directory, manifest, f"model.layers.1.mlp.experts.{key}")
        stack = one[f"model.layers.1.mlp.experts.{'down_proj' if key == 'down' else 'gate_up_proj'}"]
        half = ours.shape[1]
        theirs = {"gate": stack[:, :half], "up": stack[:, half:], "down": stack}[key]
        assert torch.equal(ours, theirs), key


def test_stacks_are_of_experts(tmp_path, capsys):
    import_model(open_importable(str(written(tmp_path / "hf", "gpt2")), "source"), LocalStorage(tmp_path / "storage"))
    assert main(["export", str(tmp_path / "storage"), str(tmp_path / "out"), "--fused"]) == 2
    assert capsys.readouterr().err == "weights: --fused: GPT2LMHeadModel has one form of names; leave it out\n"


RUN = [QUICK, "cluster=inline", "tensor=serial", "pipeline=none", "parallel.data=1", "data=synthetic", "eval.every=0",
       "monitor.sample=0", "train.steps=4", "train.global_batch=4", "train.microbatch=2", "run.dir=run",
       "checkpoint.every=2"]  # fmt: skip


def trained(cwd: Path, *arguments: str, status: int = 0) -> str:
    done = in_this_process(*RUN, *arguments, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_starts_where_another_has_ended(tmp_path, capsys):
    """model.source may be a checkpoint of ours: its sizes, its weights and its tokenizer, under another plan."""
    text = tmp_path / "text.txt"
    text.write_text("every worker knows its place in the mesh.\n" * 200)
    read = ["data=text", f"data.path={text}", f"data.cache={tmp_path}/cache", "model.length=16"]
    fast = ["train.steps=20", "optimizer.lr=0.03", "optimizer.warmup_steps=1"]
    trained(tmp_path, *read, "model.layers=1", "model.d_model=24", "model.heads=3", "model.vocab=270", *fast)
    [*_, checkpoint] = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    for source in (tmp_path / "run" / "checkpoints", checkpoint):
        config = compose_config([*RUN, *read, f"model.source={source}", "data.document_mask=true"])
        assert (config.model.d_model, config.model.vocab, config.model.within_documents) == (24, 270, True)
        assert config.train.init == config.data.tokenizer == str(checkpoint)
    own = ["run.dir=other", f"model.source={checkpoint.parent}", *fast, "train.steps=1"]
    trained(tmp_path, *read, *own)
    before, after = (json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
                     for name in ("run", "other"))  # fmt: skip
    assert max(before, after) < 4, "random weights have a loss of 5.6"
    (tmp_path / "empty").mkdir()
    line = trained(tmp_path, *read, "model.source=empty", status=2)
    assert line.startswith(f"config: model.source={tmp_path}/empty: holds neither a checkpoint nor a config.json; ")


def journal(cwd: Path) -> list[dict]:
    return [json.loads(line) for line in (cwd / "run" / "journal.jsonl").read_text().splitlines()]


def loss(cwd: Path) -> float:
    return json.loads((cwd / "run" / "metrics.jsonl").read_text().splitlines()[0])["loss"]


@pytest.mark.parametrize("name", ["qwen3", "mixtral", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_a_run_of_its_own(tmp_path, name):
    """From a folder of transformers, in and out by command: it starts from these weights, goes on from its own
    checkpoints without them, does not mistake other weights for these, and ends in a folder of transformers."""
    folder = written(tmp_path / "hf", name)
    source = ["model=from_hf", f"model.source={folder}"]
    printed = trained(tmp_path, *source, "train.stop_at=2")
    assert f"weights  of {folder}" in printed
    (started,) = (e for e in journal(tmp_path) if e["event"] == "initialised")
    assert started["weights"] == str(folder) and started["differences"] == []
    (folder / "model.safetensors").rename(tmp_path / "away.safetensors")
    (folder / "model.safetensors").write_bytes((tmp_path / "away.safetensors").read_bytes()[:200])
    assert main(["import", str(folder), str(tmp_path / "storage")]) == 2
    (tmp_path / "away.safetensors").replace(folder / "model.safetensors")
    assert "continues after step 2" in trained(tmp_path, *source)
    assert len([e for e in journal(tmp_path) if e["event"] == "initialised"]) == 1
    assert "train.init" in trained(tmp_path, *source, "train.init=random", "train.steps=6", status=2)
    assert main(["export", str(tmp_path / "run" / "checkpoints"), str(tmp_path / "out")]) == 0
    trained_on = open_importable(str(tmp_path / "out"), "source")
    assert trained_on.saved.config["model_type"] == name
    assert trained_on.saved.config["dtype"] == "float32"


@pytest.mark.full
def test_the_same_by_way_of_a_checkpoint(tmp_path):
    """And a key that the user typed is said, as the model then computes otherwise."""
    folder = written(tmp_path / "hf", "llama")
    assert main(["import", str(folder), str(tmp_path / "storage")]) == 0
    source = ["model=from_hf", f"model.source={folder}"]
    losses = {}
    cases = {
        "folder": [],
        "checkpoint": [f"train.init={tmp_path / 'storage'}"],
        "random": ["train.init=random"],
        "other": ["model.rope_theta=50", "model.length=10"],
    }
    for where, more in cases.items():
        (tmp_path / where).mkdir()
        printed = trained(tmp_path / where, *source, *more, "train.stop_at=1")
        assert ("model.rope_theta=50.0 here, 10000.0 where the weights come from" in printed) == (where == "other")
        losses[where] = loss(tmp_path / where)
    assert losses["folder"] == losses["checkpoint"]
    assert len(set(losses.values())) == 3


def test_a_capacity_is_said_where_the_weights_come_from_a_model_that_drops_nothing(tmp_path):
    """The numbers of training are others then."""
    folder = written(tmp_path / "hf", "mixtral")
    dropless, capped = (Config(model=Model(**OURS["mixtral"], capacity_factor=factor)) for factor in (0.0, 1.25))
    for c in (dropless, capped):
        c.train.init = str(folder)
    note = "model.capacity_factor=1.25 here, 0.0 where the weights come from"
    assert (open_initial_weights(dropless).notes, open_initial_weights(capped).notes) == ([], [note])
    assert "capacity_factor" not in str(_describe_differences(Model(**LLAMA), Model(**LLAMA, capacity_factor=2.0)))


def test_a_bias_that_chooses_experts_is_exported_as_it_is_kept():
    """Whatever the type of the weights: in 16 bits it would choose others."""
    model = Model(**LATENT, router="sigmoid", router_bias=True)
    tensors = {f"model.{name}": SimpleNamespace(dtype="float32") for name in list_parameters(model)}
    exportable = Exportable(Any, "", SimpleNamespace(tensors=tensors), model, DEEPSEEK_V3, {}, "bfloat16")  # type: ignore[arg-type]
    types = {stored.name: exportable.element_type(stored) for stored in exportable.tensors}
    assert {n for n, kind in types.items() if kind == "float32"} == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert set(types.values()) == {"float32", "bfloat16"}


def test_transformers_loads_what_was_trained(tmp_path):
    """A run that began at random: its family is found, and its tokenizer goes along."""
    library = peer.transformers()
    corpus = tmp_path / "text"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    model = "model.layers=1 model.d_model=32 model.length=16 model.vocab=300 model.activation=gelu_tanh".split()
    trained(tmp_path, *model, "data=text", f"data.path={corpus}", f"data.cache={tmp_path / 'cache'}")
    storage = tmp_path / "run" / "checkpoints"
    (tokenizer,) = (tmp_path / "cache").glob("*/tokenizer.json")
    assert main(["export", str(storage), str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--shard", "20KB"]) == 0
    assert len([*(tmp_path / "out").glob("model-*.safetensors")]) > 1
    theirs = library.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words = library.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "GPT2LMHeadModel" and theirs.config.eos_token_id == 0
    assert words.decode(words("quick fox")["input_ids"]) == "quick fox"
    importable = open_importable(str(tmp_path / "out"), "source")
    c = configure(precision="fp32", **vars(importable.model))
    c.train.init = str(tmp_path / "out")
    (ours,) = run_threads(make_plan(c).mesh, lambda communicator: masters(c, make_plan(c), communicator))
    assert torch.equal(ours.initial["embedding"][:300], theirs.get_input_embeddings().weight.detach())


GROWN = [{"plan": plan, "family": family, "source": source} for plan in PLANS for family in ("gpt2", "llama", "t5")
         for source in ("folder", "checkpoint")]  # fmt: skip


@suite("starts with a larger vocabulary (threads)", GROWN, GROWN[::5])
def test_tables_grow_alike_under_every_plan(tmp_path, case):
    """Rows of new tokens are the mean of the others, whatever the plan; all other weights are those that were."""
    folder = written(tmp_path / "hf", case["family"])
    importable = open_importable(str(folder), "source")
    storage = LocalStorage(tmp_path / "storage")
    manifest = catalogue.verify_checkpoint(storage, directory := import_model(importable, storage))
    had = importable.model.vocab
    c = configure(**PLANS[case["plan"]], **vars(importable.model) | {"vocab": had + 7})
    c.train.init = str(folder if case["source"] == "folder" else tmp_path / "storage")
    plan = make_plan(c)
    results = run_threads(plan.mesh, lambda communicator: masters(c, plan, communicator))
    grown = set()
    for name, whole in assemble(plan, results, lambda r: r.initial).items():
        before = read_tensor(storage, directory, manifest, f"model.{name}")
        if whole.shape != before.shape:
            grown.add(name)
            assert torch.equal(whole[had:], before.double().mean(0).float().double().expand(7, *whole.shape[1:])), name
        assert torch.equal(whole[: len(before)], before.double()), name
    assert grown == ({"embedding"} if importable.model.tied else {"embedding", "head"})


@pytest.mark.full
def test_a_mixture_with_other_weights(tmp_path):
    """No hint leads astray: with other weights the samples are others, which resume.allow cannot change; what the
    refusal names, a run of its own from these weights, runs."""
    sources = []
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(f"the quick brown {name} jumps over the lazy dog\n" * 200)
        sources += [f"data.sources.{name}.path={tmp_path / name}.txt", f"data.sources.{name}.weight=0.5"]
    small = "model.layers=1 model.d_model=32 model.heads=2 model.length=16 model.vocab=300".split()
    mixture = [*small, "data=mixture", *sources, f"data.cache={tmp_path / 'cache'}", "data.validation=0"]
    trained(tmp_path, *mixture, "train.stop_at=2")
    other = [*mixture[:-2], "data.sources.web.weight=0.9", *mixture[-2:]]
    line = trained(tmp_path, *other, status=2)
    assert "data.sources.web.weight: 0.5 there, 0.9 here; fixed: samples or their order" in line
    assert "resume.allow" not in line
    (line,) = (line for line in trained(tmp_path, *other, "resume.allow=[data.sources]", status=2).splitlines()
               if line.startswith("config: "))  # fmt: skip
    assert "data.sources.web.weight: 0.5 there, 0.9 here" in line and "the files have changed" not in line
    hint = line.rpartition("run.dir=DIRECTORY ")[2]
    assert hint.startswith("train.init=")
    (tmp_path / "run").rename(tmp_path / "first")
    trained(tmp_path, *other, hint.replace("/run/", "/first/"), "train.stop_at=1")
