"""The user's own model, optimizer, schedule and text, from a directory that knows nothing of the checkout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.harness import warm
from tests.harness.commands import TIMEOUT

MODULE = """
from pathlib import Path
from platform.data.text_sources import register_source
from platform.model import register_model
from platform.model.transformer import Decoder
from platform.optimizer.optimizers import register_optimizer
from platform.optimizer.learning_rate import register_schedule
import torch

class Loud(Decoder):
    def __init__(self, config):
        super().__init__(config)
        print("a loud decoder")

register_model("loud", Loud)
register_optimizer("plain", lambda groups, o: torch.optim.SGD(groups, o.lr), moments=0)
register_schedule("halves", lambda o, step, steps: 0.5)
register_source("poem", lambda data: [Path(data.path)])
"""
SCHEME = "# heads alone\nscheme: heads_only\norder: [h]\nregions:\n  attention: {heads: [h]}\n" \
         "parameters:\n  all: {heads: [h]}\n"  # fmt: skip
SMALL = "model.kind=loud optimizer.kind=plain optimizer.schedule=halves tensor=heads_only tensor.axes.h=2"
RUN = "data.kind=synthetic parallel.data=1 train.steps=2 eval.every=0 monitor.sample=0 optimizer.warmup_steps=0"
SIZES = "model.layers=1 model.d_model=16 model.length=8 train.global_batch=4 train.microbatch=2 optimizer.lr=1.0"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "conf" / "tensor").mkdir(parents=True)
    (tmp_path / "conf" / "tensor" / "heads_only.yaml").write_text(SCHEME)
    return tmp_path


def launch(cwd: Path, *arguments: str, module: str = "platform.launch") -> subprocess.CompletedProcess[str]:
    return warm.run_module(
        module, "+experiment=gpt_quick", "--config-dir", "conf", *arguments, cwd=cwd, timeout=TIMEOUT
    )


@pytest.mark.full
def test_two_workers_train_it(elsewhere):
    options = [*SMALL.split(), *RUN.split(), *SIZES.split(), "cluster=processes", "cluster.device=cpu", "run.dir=run"]
    done = launch(elsewhere, "extend=[my_module]", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (elsewhere / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["world_size"], row["lr"]) for row in rows] == [(1, 2, 0.5), (2, 2, 0.5)]
    logs = [path.read_text() for path in sorted((elsewhere / "run" / "logs").glob("worker-*.log"))]
    assert len(logs) == 2 and all("a loud decoder" in log for log in logs)


def test_text_of_its_own(elsewhere):
    (elsewhere / "poem.txt").write_text("so much depends upon a red wheel barrow\n" * 200)
    where = ["data.kind=poem", "data.path=poem.txt", "data.cache=cache", "cluster=inline", "tensor=serial"]
    options = [a for a in [*SMALL.split(), *RUN.split(), *SIZES.split()] if not a.startswith(("data.kind", "tensor"))]
    done = launch(elsewhere, "extend=[my_module]", *options, *where, "cluster.device=cpu", "run.dir=run")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_explained(elsewhere):
    done = launch(elsewhere, "extend=[my_module]", *SMALL.split(), "parallel.data=1", module="platform.plan")
    assert done.returncode == 0, done.stderr
    assert "optimizer state" in done.stdout and "h  2  [0 1]" in done.stdout


def test_without_the_module_the_names_are_unknown(elsewhere):
    done = launch(elsewhere, "model.kind=loud", "optimizer.kind=plain", "optimizer.schedule=halves")
    assert done.returncode == 2
    keys = [line.split("=")[0] for line in done.stderr.splitlines()]
    assert keys == ["config: model.kind", "config: optimizer.kind", "config: optimizer.schedule"]


def test_a_module_that_is_not_there(elsewhere):
    done = launch(elsewhere, "extend=[my_modul]", "train.steps=0")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    first, second = done.stderr.splitlines()
    assert first == "config: extend=my_modul: cannot be imported (ModuleNotFoundError: No module named 'my_modul')"
    assert second.startswith("config: train.steps=0")
