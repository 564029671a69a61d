"""The papers' own jobs, `+scale=paper`: each is priced by a command; they are those of the tables of published runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from datetime import date
from functools import cache
from random import Random

import pytest

from docs.papers import read_cells
from platform.boundary.refusals import ConfigError
from platform.config.composition import CONF
from platform.config.fields import Config
from platform.launch import compose_config, compose_sweep
from platform.plan.__main__ import main
from platform.plan.plan_data import plan_digest
from platform.predict.make_plan import make_plan
from platform.predict.measured_runs import iterate_overrides
from tests.harness.commands import in_this_process

SWEEPS = sorted(path.stem for path in (CONF / "experiment" / "paper").glob("*.yaml") if path.stem != "base")
TODAY = Random(date.today().toordinal())
DRAWN = TODAY.choice(SWEEPS)
SYSTEMS = {"megatron": "megatron-2021", "jain": "lbann"}


def heavy(names: Sequence[str]) -> list:
    """Return names, all but today's marked as heavy."""
    return [pytest.param(name, marks=() if name == DRAWN else pytest.mark.full) for name in names]


@cache
def jobs(name: str) -> list[tuple[list[str], Config]]:
    return compose_sweep([f"+experiment=paper/{name}", "+scale=paper"])


def digest(config: Config, gpus: int | None = None) -> str:
    """Return what names a plan, with buckets of gradients of one size: their size is the named hardware's."""
    config = deepcopy(config)
    config.parallel.bucket_mib = 25
    return plan_digest(make_plan(config, gpus))


def priced(capsys, name: str, *more: str) -> list[dict]:
    assert main(["-m", f"+experiment=paper/{name}", "+scale=paper", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_sweep_has_the_papers_sizes():
    assert SWEEPS == sorted(path.stem for path in (CONF / "scale" / "paper").glob("*.yaml"))
    for name in SWEEPS:
        said = (CONF / "experiment" / "paper" / f"{name}.yaml").read_text()
        assert "+scale=paper" in said and re.match(r"# @package _global_\n# ", said)


@pytest.mark.parametrize("name", heavy(SWEEPS))
def test_each_sweep_is_priced_with_its_best_job(name, capsys):
    system = SYSTEMS.get(name.split("_")[0], "ours")
    rows = priced(capsys, name, "--system", system)
    assert len(rows) == len(jobs(name)) > 1 and len({row["arguments"] for row in rows}) == len(rows)
    assert all(0 < row["model_speed"] <= row["hardware_speed"] for row in rows)
    fitting = [row for row in rows if row["fits"]]
    assert [row for row in rows if row["best"]] == [max(fitting, key=lambda row: row["model_speed"])]


@pytest.mark.parametrize("name", heavy(SWEEPS))
def test_a_drawn_job_of_a_sweep_runs_here(name, tmp_path):
    """In its small sizes: two steps of one job."""
    small = compose_sweep([f"+experiment=paper/{name}"])
    words, _ = TODAY.choice(small)
    few = ["train.steps=2", "cluster=processes", "optimizer.warmup_steps=0", "checkpoint.last=false"]
    done = in_this_process(*words, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_figure_13_by_the_command(capsys):
    """Tensor ranks fill a node, stages the rest; kernels compute a third more than the model has."""
    rows = priced(capsys, "megatron_figure_13", "--hardware", "a100_80g", "--system", "megatron-2021")
    best = {n: max((r for r in rows if r["sequences"] == n), key=lambda r: r["model_speed"]) for n in (32, 128)}
    assert all("tensor.axes.t=8 " in row["arguments"] for row in best.values())
    assert best[128]["best"] and best[128]["hardware_speed"] / best[128]["model_speed"] == pytest.approx(
        4 / 3, rel=0.01
    )
    assert main(["-m", "+experiment=paper/megatron_figure_13", "+scale=paper", "train.global_batch=32"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("jobs on a100_80g, predicted") and len(lines) == 5
    assert [line.split()[0] for line in lines if line.endswith("best")] == ["tensor.axes.t=8"]


TABLES = {
    "megatron_table_1": ["megatron_table_1"],
    "megatron_table_2": ["megatron_table_2", "megatron_table_2_zero3"],
    "bian_table_1": ["bian_tables_1_and_2"],
    "bian_table_2": ["bian_tables_1_and_2"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", TABLES)
def test_the_jobs_are_the_published_rows(name):
    """Of which `python -m platform.plan compare` shows the published steps."""
    digits = name[-1]
    cells = [row for table in TABLES[name] for row in read_cells(table)]
    cells = [row for row in cells if not name.startswith("bian") or row["name"].endswith(f"table {digits}")]
    rows = [digest(compose_config([*iterate_overrides(row)]), int(row["gpus"])) for row in cells]
    assert [digest(config) for _, config in jobs(name)] == rows


CLAIMS = [
    row for table in ("jain_figures", "megatron_figures") for row in read_cells(table) if row["figure"] not in "7 10"
]


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(CLAIMS)))
def test_both_sides_of_a_published_ratio_are_jobs(number):
    cells = CLAIMS[number]
    paper = "megatron" if "megatron" in cells["system"] else "jain"
    name = f"{paper}_figure_{cells['figure'].removesuffix('a')}"
    digests = {digest(config) for _, config in jobs(name)}
    for side, gpus in (("base", cells["base_gpus"]), ("fast", cells["gpus"])):
        words = f"cluster.device=cuda {cells['common']} {cells[side]}".split()
        assert digest(compose_config(words), int(gpus)) in digests, cells[side]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["+experiment=gpt_quick", "--system=ours"], "--system=ours: is read with -m alone"),
        (["-m", "+experiment=gpt_quick", "--check"], "--check=True: is of one plan; -m prints a row for each"),
        (["-m", "+experiment=gpt_quick", "seed=1,2", "--system=none"], "system=none: cannot be read"),
        (["+experiment=gpt_quick", "+scale=small"], "scale=small: no such folder of sizes; nearest legal: paper"),
        (["+experiment=gpt_quick", "+scale=paper"], "scale=paper: has no sizes for the experiment gpt_quick"),
        (["+scale=paper"], "scale=paper: has no sizes for the experiment none"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(words, line, capsys):
    assert main(words) == 2
    assert f"config: {line}".casefold() in capsys.readouterr().err.casefold()


def test_lines_of_jobs_and_what_is_typed(tmp_path):
    """A line per job, beside the product of the other keys; typed keys win, and no key is swept twice."""
    (tmp_path / "experiment").mkdir()
    lines = "train.steps=3\\ntrain.steps=4 eval.every=1"
    sweep = f'params: {{seed: "1,2", train.steps: "5,6", optimizer.lr: "", jobs: "{lines}"}}'
    (tmp_path / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults: [gpt_quick, _self_]\nhydra: {{sweeper: {{{sweep}}}}}\n"
    )

    def sizes(*more: str) -> list[tuple[int, int, int]]:
        configs = [config for _, config in compose_sweep(["+experiment=mine", *more], str(tmp_path))]
        return [(c.seed, c.train.steps, c.eval.every) for c in configs]

    assert sizes() == [(1, 3, 50), (2, 3, 50), (1, 4, 1), (2, 4, 1)]
    assert sizes("seed=7", "train.steps=9") == [(7, 9, 50), (7, 9, 1)]
    with pytest.raises(ConfigError, match="train.steps=-1"):
        sizes("train.steps=-1")
