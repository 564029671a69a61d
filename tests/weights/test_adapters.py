"""Adapters in checkpoints, which hold them alone: of which base, under any plan, merged, and refused for another."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.checkpoint import catalogue
from platform.checkpoint.moves import read_tensor
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.training_state import RankTrainingState
from platform.weights.__main__ import main
from platform.weights.importing import open_importable, open_initial_weights, read_weight
from platform.weights.peft_format import export_adapters
from platform.weights.stored_adapters import StoredAdapters
from tests.harness.commands import QUICK, in_this_process, lines
from tests.harness.held import check_held
from tests.harness.oracle import Result, assemble, configure, trainer_of
from tests.harness.threads import run_threads
from tests.weights.written import tensors_of, written

full = pytest.mark.full
RANK = 3
ALL = ["*"]
PLANS = {
    "1d, zero 1": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 1},
    "zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "stages": {"pipeline": "1f1b", "stages": 2, "microbatch": 2},
}


def tuned(folder: Path, how: dict[str, Any], targets: list[str] = ALL):
    c = configure(**how, **vars(open_importable(str(folder), "source").model))
    c.tune.kind, c.tune.rank, c.tune.targets, c.train.init = "lora", RANK, targets, str(folder)
    return c


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=full), pytest.param("mixtral", marks=full)])
@pytest.mark.parametrize("name", ["1d, zero 1", pytest.param("zero 3", marks=full), pytest.param("stages", marks=full)])
def test_the_base_is_read_and_the_adapters_begin(tmp_path, name, family):
    folder = written(tmp_path / "base", family, tensors_of(family))
    c = tuned(folder, PLANS[name], ["attention.*", "mlp.*"])
    plan, weights = make_plan(c), open_initial_weights(c)

    def on_rank(communicator):
        trainer = trainer_of(c, plan, communicator, fresh=False)
        state = RankTrainingState(trainer)
        state.load_initial_weights()
        check_held(trainer)
        assert not {b.name.removeprefix("model.") for b in state.live_blocks()} & plan.frozen
        masters = {n: w.detach().clone() for n, w in trainer.weights.master.items()}
        return Result(communicator.rank, 0.0, 0.0, {}, masters, {}, [], None, [])

    fresh = configure(**vars(c.model))
    fresh.tune = c.tune
    begun = trainer_of(fresh, make_plan(fresh), make_single(fresh)).weights.master
    for parameter, whole in assemble(plan, run_threads(plan.mesh, on_rank), lambda r: r.initial).items():
        wanted = read_weight(weights, f"model.{parameter}") if parameter in plan.frozen else begun[parameter]
        assert torch.equal(whole, wanted.double()), parameter


def make_single(c):
    return SingleRank(make_plan(c).mesh)


def run(folder: Path, directory: Path, *more: str) -> CompletedProcess[str]:
    """Train adapters of the model in `folder` by command."""
    what = f"model=from_hf model.source={folder} data=synthetic tune=lora tune.rank={RANK} tune.targets=['*']"
    how = "train.global_batch=4 train.microbatch=2 optimizer.lr=0.05 checkpoint.every=2 monitor.sample=0 eval.every=0"
    arguments = f"{what} {how} run.dir={directory}".split()
    return in_this_process(QUICK, *arguments, *more, cwd=directory.parent)


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in lines(directory / "metrics.jsonl") if "loss" in row]


def newest(directory: Path) -> tuple[Any, ...]:
    return catalogue.select_checkpoint(str(directory / "checkpoints"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base, and a run that trained adapters of it for four steps, stopped, and went on under another plan."""
    home = tmp_path_factory.mktemp("adapters")
    tensors = tensors_of("llama")
    base = written(home / "base", "llama", tensors)
    other = written(home / "other", "llama", {name: x + 1 for name, x in tensors.items()})
    one = "tensor=serial", "parallel.data=1", "cluster=inline", "train.steps=4", "optimizer.warmup_steps=1"
    for directory, *more in (("whole",), ("run", "train.stop_at=2"), ("run",)):
        done = run(base, home / directory, *one, *more)
        assert done.returncode == 0, done.stderr
    return base, other, home / "run", one


def test_a_run_goes_on_with_its_adapters(trained):
    base, _, directory, _ = trained
    assert losses(directory) == losses(directory.parent / "whole") and len(losses(directory)) == 4
    storage, name, manifest = newest(directory)
    assert {n.rpartition(".")[2] for n in manifest.tensors} == {"lora_a", "lora_b"}
    assert manifest.meta.values["base"]["url"] == str(base)
    stored = catalogue.verify_checkpoint(storage, name)
    assert sum(stored.files.values()) < sum(f.stat().st_size for f in base.glob("*.safetensors"))


def test_another_base_is_refused(trained):
    base, other, directory, one = trained
    refused = run(other, directory, *one, "train.steps=6", "resume.allow=[train.init,train.steps]")
    assert refused.returncode == 2 and f"nearest legal: train.init={base}" in refused.stderr
    assert "are of other weights" in refused.stderr
    none = in_this_process(QUICK, "tune=lora", f"run.dir={directory}2", cwd=directory.parent)
    assert none.returncode == 2 and "adapters are of weights that exist" in none.stderr


def product(storage, name: str, manifest, weight: str) -> Tensor:
    down, up = (
        read_tensor(storage, name, manifest, f"model.{weight}.{part}").double() for part in ("lora_a", "lora_b")
    )
    return 32 / RANK * torch.tensordot(up, down, 1)


def test_the_merged_model_has_the_sum(trained, tmp_path):
    base, _, directory, *_ = trained
    assert main(["export", str(directory), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    storage, name, manifest = newest(directory)
    before, after = (open_importable(str(folder), "source") for folder in (base, tmp_path / "merged"))
    c = configure(**vars(before.model))
    weights = []
    for source in (base, tmp_path / "merged"):
        c.train.init = str(source)
        weights.append(open_initial_weights(c))
    for weight in ("layers.0.attention.query", "layers.1.attention.output", "layers.1.mlp.down", "embedding", "head"):
        old, new = (read_weight(w, f"model.{weight}").double() for w in weights)
        added = product(storage, name, manifest, weight).reshape(old.shape)
        assert added.any() and torch.allclose(new, old + added, rtol=1e-6, atol=1e-6), weight
    assert after.model == before.model


def test_a_model_of_its_own_starts_from_the_sum(trained, tmp_path):
    base, _, directory, *_ = trained
    c = configure(**vars(open_importable(str(base), "source").model))
    c.train.init = str(directory / "checkpoints")
    merged = open_initial_weights(c)
    c.train.init = str(base)
    change = read_weight(merged, "model.head") - read_weight(open_initial_weights(c), "model.head")
    assert change.any() and {p.name for p in merged.pieces} == {p.name for p in open_initial_weights(c).pieces}


def test_hostile_bases_are_refused(trained, tmp_path):
    """A base that is itself adapters, that is missing, or whose description is no description."""
    _, _, directory, *_ = trained
    storage, name, manifest = newest(directory)
    c = configure(**vars(open_importable(str(trained[0]), "source").model))
    c.train.init = f"{storage.url}/{name}"
    descriptions = {
        "adapters are of whole weights": {"url": c.train.init, "hash": "0"},
        "there is nothing": {"url": str(tmp_path / "no"), "hash": "0"},
        "are of other weights": {"url": str(trained[0]), "hash": "0"},
        "its base": "no",
    }
    for reason, stored in descriptions.items():
        manifest.meta.values["base"] = stored
        with mock.patch.object(catalogue, "load_manifest", lambda *_: manifest):
            with pytest.raises(ConfigError, match=reason):
                open_initial_weights(c)


@pytest.mark.parametrize("family, target", [("gpt2", "query"), ("deepseek_v3", "shared.down")])
def test_weights_without_an_adapter_at_peft_are_refused_with_those_that_have_one(tmp_path, family, target):
    """In one line, and before anything is written."""
    c = tuned(written(tmp_path / "hf", family, tensors_of(family)), {}, [target, "attention.output"])
    stored: Any = StoredAdapters(mock.Mock(), "", mock.Mock(), c.model, c.tune)
    with pytest.raises(ConfigError, match=target) as error:
        export_adapters(stored, "", mock.Mock())
    (line,) = error.value.violations
    legal = line.partition("nearest legal: ")[2].split(", ")
    assert "has no adapter at PEFT" in line and "attention.output" in legal
    assert not any(target in word for word in legal)
