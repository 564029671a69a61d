"""What one GPU has room for where optimizer states take few bytes, as docs/training.md says."""

from __future__ import annotations

from pathlib import Path

from platform.launch import compose_config
from platform.plan.accelerators import nominal_memory
from platform.predict.footprint import Footprint
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import MemoryForecast

TEXT = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
[COMMAND] = [line for line in TEXT.splitlines() if "optimizer.moments=int8 optimizer.masters=split" in line]
H100 = nominal_memory("H100") or 0


def needs(*without: str) -> Footprint:
    """The memory of the plan of the page's command, without the keys that begin so."""
    words = [word for word in COMMAND.split("platform.plan ")[1].split(" --")[0].split()]
    config = compose_config([word for word in words if not word.startswith(without or ("--",))])
    return MemoryForecast(config, make_plan(config)).predict_stage(0)


def test_7b_is_trained_in_full_on_one_gpu_of_80_gb():
    whole = needs()
    assert 0.89 * H100 < whole.total_bytes < 0.91 * H100 and "in 72 GB" in TEXT
    n = 6_658_596_864
    assert whole.parameters == 4 * n and whole.gradients == 4 * n
    assert whole.optimizer < 2.04 * n, "two codes of a byte, and two scales for each 256"


def test_neither_of_both_is_enough():
    for key in ("optimizer.masters", "optimizer.moments"):
        assert needs(key).total_bytes > H100, key
