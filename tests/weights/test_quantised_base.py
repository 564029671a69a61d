"""Adapters of a base in 4 bits (tune=qlora): read from a saved model, resumed, merged, and given to PEFT."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from platform.checkpoint.blocks import Box, Piece
from platform.plan.model_types import NF4_DOUBLE
from platform.predict.make_plan import make_plan
from platform.runtime.normal_floats import round_to_normal_floats
from platform.train.training_state import RankTrainingState
from platform.weights import importing
from platform.weights.__main__ import main
from platform.weights.importing import open_importable, open_initial_weights, read_weight
from tests.harness.commands import QUICK, in_this_process, lines
from tests.harness.held import check_held
from tests.harness.oracle import Result, assemble, configure, numbers_of, trainer_of
from tests.harness.threads import run_threads
from tests.weights.test_adapters import PLANS, newest, product
from tests.weights.written import tensors_of, written

full = pytest.mark.full
ONE = ("tensor=serial", "parallel.data=1", "cluster=inline", "train.steps=4", "optimizer.warmup_steps=1")
WEIGHTS = ("layers.0.attention.query", "layers.1.attention.output", "layers.1.mlp.down", "embedding", "head")


def read_base(c, plan):
    """The weights of the base, whole, as the ranks of a plan read and keep them."""

    def on_rank(communicator):
        trainer = trainer_of(c, plan, communicator, fresh=False)
        RankTrainingState(trainer).load_initial_weights()
        check_held(trainer)
        return Result(communicator.rank, 0.0, 0.0, {}, numbers_of(trainer), {}, [], None, [])

    return assemble(plan, run_threads(plan.mesh, on_rank), lambda r: r.initial)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=full), pytest.param("mixtral", marks=full)])
@pytest.mark.parametrize("name", ["zero 3", pytest.param("stages", marks=full)])
def test_the_base_is_read_into_4_bits(tmp_path, name, family):
    folder = written(tmp_path / "base", family, tensors_of(family))
    c = configure(**PLANS[name], **vars(open_importable(str(folder), "source").model))
    c.tune.kind, c.tune.rank, c.train.init = "qlora", 3, str(folder)
    plan, weights = make_plan(c), open_initial_weights(c)
    assert plan.quantised
    for parameter, whole in read_base(c, plan).items():
        if parameter in plan.frozen:
            base = read_weight(weights, f"model.{parameter}").float()
            wanted = round_to_normal_floats(base) if parameter in plan.quantised else base
            assert torch.equal(whole, wanted.double()), parameter


@pytest.mark.parametrize("name", ["zero 3", pytest.param("stages", marks=full)])
def test_the_base_is_read_with_the_mean_of_all_scales(tmp_path, name):
    """With scales in 8 bits (tune.double), of which each rank has a part."""
    ours = {"d_model": 128, "d_kv": 32, "d_ff": 256, "heads": 4, "kv_heads": 4}
    folder = written(tmp_path / "base", "llama", ours=ours)
    c = configure(**PLANS[name], **vars(open_importable(str(folder), "source").model))
    c.tune.kind, c.tune.double, c.tune.rank, c.train.init = "qlora", True, 3, str(folder)
    plan, weights = make_plan(c), open_initial_weights(c)
    for parameter, whole in read_base(c, plan).items():
        if parameter in plan.quantised:
            base = read_weight(weights, f"model.{parameter}").float()
            assert torch.equal(whole, round_to_normal_floats(base, NF4_DOUBLE).double()), parameter
    read = importing._fetch_as_quantised(weights, c.model, double=True)
    wanted = round_to_normal_floats(read_weight(weights, "model.layers.1.mlp.down").float(), NF4_DOUBLE)
    piece = Piece("model.layers.1.mlp.down", "float32", Box((3, 5), (7, 11)), None)
    memory = torch.empty(piece.nbytes, dtype=torch.uint8)
    read([piece], [memory])
    assert torch.equal(memory.view(torch.float32).view(7, 11), wanted[3:10, 5:16])


def run(folder: Path, directory: Path, *more: str):
    what = f"model=from_hf model.source={folder} data=synthetic tune=qlora tune.rank=3 tune.targets=['*']"
    how = "train.global_batch=4 train.microbatch=2 optimizer.lr=0.05 checkpoint.every=2 monitor.sample=0 eval.every=0"
    return in_this_process(QUICK, *f"{what} {how} run.dir={directory}".split(), *more, cwd=directory.parent)


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in lines(directory / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base, and a run that trained adapters of it for two steps, stopped, and went on."""
    home = tmp_path_factory.mktemp("quantised")
    base = written(home / "base", "llama", tensors_of("llama"))
    for directory, *more in (("whole",), ("run", "train.stop_at=2"), ("run",)):
        done = run(base, home / directory, *ONE, *more)
        assert done.returncode == 0, done.stderr
    return base, home / "run"


def test_a_run_goes_on_beside_the_same_base(trained):
    base, directory = trained
    assert losses(directory) == losses(directory.parent / "whole") and len(losses(directory)) == 4
    _, _, manifest = newest(directory)
    assert {n.rpartition(".")[2] for n in manifest.tensors} == {"lora_a", "lora_b"}
    assert manifest.meta.values["base"]["url"] == str(base) and manifest.meta.identity["tune.kind"] == "qlora"


def test_a_run_does_not_change_its_base_where_it_goes_on(trained):
    base, directory = trained
    refused = run(base, directory, *ONE, "tune.kind=lora")
    assert refused.returncode == 2 and "tune.kind: qlora there, lora here; fixed" in refused.stderr


def test_adapters_move_to_a_base_of_another_form_and_this_is_said(trained):
    base, directory = trained
    c = configure(**vars(open_importable(str(base), "source").model))
    c.train.init, c.tune.rank, c.tune.targets = str(directory / "checkpoints"), 3, ["*"]
    for kind, words in {
        "qlora": [],
        "lora": ["their base is not in 4 bits"],
        "none": ["what their base is in"],
    }.items():
        c.tune.kind = kind
        notes = open_initial_weights(c).notes
        assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


def test_the_merged_model_is_the_base_in_4_bits_and_the_sum(trained, tmp_path, capsys):
    base, directory = trained
    assert main(["export", str(directory), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    assert "added to what their base is in 4 bits" in capsys.readouterr().out
    storage, name, manifest = newest(directory)
    c = configure(**vars(open_importable(str(base), "source").model))
    weights = []
    for source in (base, tmp_path / "merged"):
        c.train.init = str(source)
        weights.append(open_initial_weights(c))
    for weight in WEIGHTS:
        old, new = (read_weight(w, f"model.{weight}").double() for w in weights)
        old = round_to_normal_floats(old.float()).double() if "." in weight else old
        added = product(storage, name, manifest, weight).reshape(old.shape)
        assert added.any() and torch.allclose(new, old + added, rtol=1e-6, atol=1e-6), weight


@pytest.mark.parametrize("weight", ["layers.1.mlp.down", "layers.0.attention.query"])
def test_pieces_that_cut_blocks_are_read_by_whole_ones(trained, weight):
    """A base in another checkpoint may be stored in any pieces."""
    base, _ = trained
    c = configure(**vars(open_importable(str(base), "source").model))
    c.train.init = str(base)
    weights, r = open_initial_weights(c), random.Random(1)
    whole = round_to_normal_floats(read_weight(weights, f"model.{weight}").float())
    read = importing._fetch_as_quantised(weights, c.model)
    for _ in range(20):
        ends = [sorted(r.sample(range(n + 1), 2)) for n in whole.shape]
        box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        piece = Piece(f"model.{weight}", "float32", box, None)
        memory = torch.empty(piece.nbytes, dtype=torch.uint8)
        read([piece], [memory])
        assert torch.equal(memory.view(torch.float32).view(box.extent), whole[tuple(slice(a, b) for a, b in ends)])


def test_peft_gets_its_adapters(trained, tmp_path):
    base, directory = trained
    assert main(["export", str(directory), str(tmp_path / "adapters"), "--adapters"]) == 0
    stored = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert stored["r"] == 3 and stored["base_model_name_or_path"] == str(base)
