"""Recipes of conf/experiment/tune: each fits the devices that it names, and shows its losses, shrunk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from platform.cluster import driver
from platform.launch import CONF, compose_config, main
from platform.plan.accelerators import nominal_memory
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from tests.commands.tuned import write_model, write_records
from tests.docs.pages import ROOT
from tests.harness.suite import suite

PAGE = (ROOT / "docs" / "recipes.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (\d+) x ([\w-]+) \| ([\d.]+) GB \| ([\d.]+) to ([\d.]+) \|$", re.M)
ROWS = {name: rest for name, *rest in ROW.findall(PAGE)}
RECIPES = sorted(path.stem for path in (CONF / "experiment" / "tune").glob("*.yaml"))
NEAR = 0.02  # of a loss, on another machine
# For a small model that knows nothing, which has to learn quickly.
SHRUNK = """cluster=inline cluster.gpu='' cluster.device=cpu precision=fp32 parallel.data=1 parallel.zero=0
model.length=128 train.steps=20 train.global_batch=8 train.microbatch=4 optimizer.warmup_steps=2
eval.every=0 checkpoint.last=true checkpoint.every=0 checkpoint.best=false monitor.sample=0 data.validation=0"""


def test_every_recipe_has_its_row():
    assert sorted(ROWS) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_devices_that_it_names(name):
    config = compose_config([f"+experiment=tune/{name}", "data.path=my.jsonl"])
    plan, [count, gpu, gigabytes, *_] = make_plan(config), ROWS[name]
    needed = predict_peak_bytes(config, plan)
    assert (plan.mesh.world_size, config.cluster.gpu, f"{needed / 1e9:.3g}") == (int(count), gpu, gigabytes)
    assert needed < nominal_memory(gpu) and config.checkpoint.every == "30m"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_begins_with_its_command(name):
    package, first, *_ = (CONF / "experiment" / "tune" / f"{name}.yaml").read_text().splitlines()
    assert package == "# @package _global_"
    assert first.startswith(f"# python -m platform.launch +experiment=tune/{name}   ")


CASES = [{"recipe": name} for name in RECIPES]


@suite("recipes, run shrunk", CASES, [{"recipe": "lora_8b_1"}, {"recipe": "dpo_8b_8"}])
def test_a_recipe_shows_its_losses(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, last = map(float, ROWS[case["recipe"]][-2:])
    losses = train_shrunk(case["recipe"], tmp_path)
    assert [losses[0], losses[-1]] == pytest.approx([first, last], rel=NEAR)
    assert losses[-1] < 0.9 * losses[0]


def train_shrunk(name: str, folder: Path) -> list[float]:
    """Train a recipe on a small model and 20 records; return the loss of each step."""
    write_model(folder / "hf")
    write_records(folder)
    records = "pairs" if name.startswith("dpo") else "talks"
    teacher = ["train.teacher=full_8b_8"] if name.startswith("distill") and train_shrunk("full_8b_8", folder) else []
    own = [*teacher, "model=from_hf", f"model.source={folder}/hf", f"data.path={folder}/{records}.jsonl"]
    rate = "optimizer.lr=0.001" if records == "pairs" else "optimizer.lr=0.01"
    typed = [f"+experiment=tune/{name}", *own, *SHRUNK.split(), rate, f"data.cache={folder}/cache", f"run.dir={name}"]
    assert main(typed) == driver.DONE
    return [row["loss"] for row in map(json.loads, open(f"{name}/metrics.jsonl")) if "loss" in row]
