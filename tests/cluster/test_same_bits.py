"""A deterministic run that loses a worker ends with the same bits as one that loses nothing, if its size stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import find_newest_checkpoint
from platform.checkpoint.moves import read_tensor
from platform.cluster.driver import drive_run
from platform.config.fields import Config
from platform.monitor import JsonLines, MetricsLog
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure

pytestmark = pytest.mark.usefixtures("warm_server")
MODEL: dict[str, Any] = {"layers": 1, "d_model": 16, "vocab": 300, "dropout": 0.1, "precision": "fp32"}


def configured(directory: Path, **more: Any) -> Config:
    c = configure(microbatch=2, global_batch=8, **{**MODEL, **more})
    c.run.dir, c.data.kind, c.cluster.kind = str(directory), "synthetic", "processes"
    c.train.deterministic, c.train.steps, c.checkpoint.every = True, 4, 100
    return c


def history(c: Config) -> tuple[list[tuple[Any, ...]], dict[str, Tensor], list[dict[str, int]]]:
    """The numbers of every step, weights and moments at the end, and the meshes that were formed."""
    assert drive_run(c, make_plan(c), experiment="quick") == 0
    directory = Path(c.run.dir)
    rows = [(row["step"], row["loss"], row["grad_norm"]) for row in MetricsLog.read_rows(directory / "metrics.jsonl")]
    storage = open_storage(str(directory / "checkpoints"))
    newest = find_newest_checkpoint(storage)
    tensors = {n: read_tensor(storage, newest.directory, newest.manifest, n) for n in newest.manifest.tensors}
    formed = [e["mesh"] for e in JsonLines.read_objects(directory / "journal.jsonl") if e["event"] == "forming"]
    return rows, tensors, formed


NARROW: dict[str, Any] = {"precision": "fp8", "d_model": 32, "heads": 4, "dropout": 0.0}
FORMS = {  # names of keys -> their values
    "plain": {},
    "states and masters away": {"optimizer.offload": "states+masters"},
    "8 bits": {"quantise.block": 8},
    "8 bits, halves away": {
        "quantise.scale": "row",
        "optimizer.masters": "split",
        "optimizer.offload": "states+masters",
    },
}


def formed_as(name: str, directory: Path) -> Config:
    c = configured(directory, data=2, zero=1, **(NARROW if name != "plain" else {}))
    c.precision = "bf16" if name == "states and masters away" else c.precision
    for key, value in FORMS[name].items():
        group, _, field = key.partition(".")
        setattr(getattr(c, group), field, value)
    return c


@pytest.mark.parametrize("name", [n if n == "plain" else pytest.param(n, marks=pytest.mark.full) for n in FORMS])
def test_a_spare_takes_the_seat_and_no_bit_changes(name, tmp_path):
    """What the survivor holds in memory is where both go on; the step in which one was killed is done again."""
    rows, tensors, formed = history(formed_as(name, tmp_path / "undisturbed"))
    c = formed_as(name, tmp_path / "killed")
    c.elastic.faults, c.elastic.spares = ["3:kill:1:backward"], 1
    rows2, tensors2, formed2 = history(c)
    assert len(formed) == 1 and formed2 == formed * 2
    assert rows == rows2 and [row[0] for row in rows] == [1, 2, 3, 4]
    assert tensors.keys() == tensors2.keys() and all(torch.equal(tensors[n], tensors2[n]) for n in tensors)


@pytest.mark.full
def test_negative_control_another_size_gives_other_bits(tmp_path):
    rows, *_ = history(configured(tmp_path / "two", data=2))
    others, *_ = history(configured(tmp_path / "one"))
    assert rows != others and [row[1] for row in rows] == pytest.approx([row[1] for row in others], rel=1e-4)
