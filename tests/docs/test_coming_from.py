"""docs/coming-from.md: the keys of every row are composed and planned, beside the command at the top of the page."""

from __future__ import annotations

import re
import shlex

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.predict.make_plan import make_plan
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
BASE = shlex.split(re.search(r"^\$ python -m platform\.plan (.*)$", PAGE, re.M)[1])
SYSTEMS = ("Megatron-LM", "torchtitan", "DeepSpeed")
# What a row says in the words of the other system that names a size of ours: the key of that size.
SIZES = {
    r"(?:--tensor-model-parallel-size |tensor_parallel_degree = |autotp_size\": )(\d+)": ("t",),
    r"(?:--pipeline-model-parallel-size |pipeline_parallel_degree = |num_stages=)(\d+)": ("stage",),
    r"(?:--context-parallel-size |context_parallel_degree = |sequence_parallel_size\": )(\d+)": ("context", "exchange"),
    r"(?:--expert-model-parallel-size |expert_parallel_degree = |ep_size=)(\d+)": ("expert",),
}


def rows(system: str) -> list[tuple[str, str]]:
    """Return (theirs, our keys) of each row of a system's table."""
    table = PAGE.partition(f"\n## {system}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`.+?`) \| `([^`|]+)` \| [^|]*\|$", table, re.M)


ROWS = [row for system in SYSTEMS for row in rows(system)]


def sizes(theirs: str) -> dict[tuple[str, ...], int]:
    """Return the sizes that a row names: axes of the mesh -> the product of their sizes."""
    return {axes: int(match[1]) for form, axes in SIZES.items() if (match := re.search(rf"(?<!expert_){form}", theirs))}


def check(theirs: str, keys: str) -> None:
    """Compose and plan the keys of a row. Raises if they are refused, or if the mesh has other sizes than it says."""
    config = compose_config([*BASE, *shlex.split(keys)])
    if -1 in (config.parallel.data, config.parallel.zero) or config.plan.search:
        return  # planned when the number of workers is known
    plan = make_plan(config)
    for axes, size in sizes(theirs).items():
        product = 1
        for axis in axes:
            product *= dict(plan.mesh.axes).get(axis, 1)
        assert product == size, (theirs, keys, plan.mesh.axes)


@pytest.mark.parametrize(("theirs", "keys"), ROWS, ids=[theirs for theirs, _ in ROWS])
def test_a_row_is_composed_and_planned(theirs, keys):
    check(theirs, keys)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_is_tested(system):
    table = PAGE.partition(f"\n## {system}\n")[2].partition("\n## ")[0]
    assert len(rows(system)) == table.count("\n| ") - 1 > 25


@pytest.mark.parametrize(
    ("theirs", "keys", "error"),
    [
        ("`--tensor-model-parallel-size 8`", "tensor=1d tensor.axis.t=8", ConfigError),  # no such key
        ("`--tensor-model-parallel-size 3`", "tensor=1d tensor.axes.t=3", ConfigError),  # it divides nothing
        ("`--tensor-model-parallel-size 4`", "tensor=1d tensor.axes.t=8", AssertionError),  # another size
        ("`--expert-model-parallel-size 4`", "model.experts=8 parallel.experts=2", AssertionError),
    ],
)
def test_a_wrong_row_is_seen(theirs, keys, error):
    """Negative control."""
    with pytest.raises(error):
        check(theirs, keys)
