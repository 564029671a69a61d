"""Renders docs/predictions.md: published steps beside predicted ones, and errors with each family of models left out.

python -m docs.predictions > docs/predictions.md
python -m docs.predictions errors > platform/predict/published.yaml
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from platform.launch import compose_config
from platform.predict.measured_runs import (
    Comparison,
    MeasuredRun,
    fit_group_constants,
    mark_fitted_runs,
    read_measured_runs,
)
from platform.predict.step_price import names_of_hardware

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "predict" / "tables"
# file -> what it is, and which word of a row's name is its family where no column says so
TABLES = {
    "megatron_table_1": ("Megatron, Narayanan et al. 2021, table 1: A100", 0),
    "megatron_table_2": ("the same, table 2", 0),
    "megatron_table_2_zero3": ("the same, table 2: ZeRO-3 of DeepSpeed", 0),
    "korthikanti_table_5": ("Megatron, Korthikanti et al. 2022, table 5: A100", 0),
    "vtrain_a100": ("vTrain's multi-node runs of Megatron: A100", None),
    "llm_foundry_a100_80g": ("llm-foundry: A100", 0),
    "llm_foundry_h100": ("llm-foundry: H100", 0),
    "nemo_h100": ("NVIDIA's recipes, NeMo 24.12: H100", None),
    "torchtitan": ("torchtitan: H100 of 500 W, H200", None),
    "simumax_b200": ("SimuMax's runs of Megatron: B200", None),
    "nemo_gb200": ("NVIDIA's recipes, NeMo 25.05 and 25.11: GB200", 0),
    "nemo_newer": ("Megatron-Bridge 25.11 and 26.02: four GPUs", 1),
    "nemo_bridge": ("Megatron-Bridge 25.11 to 26.08: five GPUs", None),
    "bian_tables_1_and_2": ("Bian et al. 2021, tables 1 and 2: V100", 0),
}
FITTED = ("products", "memory")  # constants of a group that its other families settle
SHARE, FEWEST = "0.34", 4  # of their rows; all of them where that is fewer, none where all are


class PublishedRun(NamedTuple):
    """Published run: its `table`, its `family`, the run, and its predicted seconds: as `shipped`, and with constants
    that a third of the other families' rows settle (`left_out`); None where there are no others."""

    table: str
    family: str
    run: MeasuredRun
    shipped: float
    left_out: float | None


def has_experts(run: MeasuredRun) -> bool:
    """Return True if a run's model has experts."""
    return bool(run.work.plan.sizes.get("experts"))


def read_table(name: str, path: str = "") -> list[tuple[str, MeasuredRun]]:
    """Return the runs of a table, each with its family; `path`: a file with some of its rows, in place of its own."""
    word = TABLES[name][1]
    mark = {"megatron_table_1": "small"}.get(name, "" if word is not None else "family")
    with chdir(FOLDER):
        runs = read_measured_runs(path or f"{name}.csv", compose_config, mark=mark)
    return [(run.cells["family"] if word is None else run.name.split()[word], run) for run in runs]


def predict_published_runs() -> list[PublishedRun]:
    """Return all published runs with their predictions."""
    rows = [(name, family, run) for name in TABLES for family, run in read_table(name)]
    constants: dict[tuple[str, str], Mapping[str, float]] = {}
    for _, family, run in rows:
        if (key := (run.group, family)) not in constants:
            others = [other for _, f, other in rows if other.group == run.group and f != family]
            kin = [other for other in others if has_experts(other) == has_experts(run)]
            others = others if has_experts(run) else kin  # rows with experts say little of dense models
            marked = mark_fitted_runs(others, SHARE)
            fitted = [other for other, fits in zip(others, marked, strict=True) if fits]
            enough = fitted if len(fitted) >= FEWEST else others
            constants[key] = fit_group_constants(enough, FITTED)[run.group] if len(enough) >= FEWEST else {}
    return [_predict_run(*row, constants[row[2].group, row[1]]) for row in rows]


def _predict_run(table: str, family: str, run: MeasuredRun, constants: Mapping[str, float]) -> PublishedRun:
    """Return a run with its predictions; `constants`: those that other families settle."""
    left_out = run.predict_price(constants).seconds if constants else None
    return PublishedRun(table, family, run, run.predict_price({}).seconds, left_out)


def errors_as_shipped(rows: Sequence[PublishedRun]) -> list[float]:
    """Return the errors of predictions with the constants that are shipped."""
    return [row.shipped / row.run.seconds - 1 for row in rows]


def errors_left_out(rows: Sequence[PublishedRun]) -> list[float]:
    """Return the errors of predictions with constants that other families settle."""
    return [row.left_out / row.run.seconds - 1 for row in rows if row.left_out]


def format_errors(errors: Sequence[float]) -> str:
    """Format the mean and the largest of errors as two cells of a table."""
    return f"{mean(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%}" if errors else "- | -"


def render_errors(rows: Sequence[PublishedRun], key: Callable[[PublishedRun], tuple[str, ...]]) -> Iterator[str]:
    """Yield a line of a table for each group of rows, by the cells of its `key`."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    for cells, of_group in groups.items():
        shipped, left_out = errors_as_shipped(of_group), errors_left_out(of_group)
        yield f"| {' | '.join(cells)} | {len(of_group)} | {format_errors(shipped)} | {format_errors(left_out)} |"


def kind_of_model(row: PublishedRun) -> str:
    """Return which kind of model a run trained."""
    return "experts" if has_experts(row.run) else "dense"


def render_error_bars(rows: Sequence[PublishedRun]) -> str:
    """Return the text of platform/predict/published.yaml: by hardware and kind of model how many published rows there
    are, and the mean error of their predictions, left out where others settle constants, else as shipped."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.run.hardware.name, kind_of_model(row)].append(row)
    lines = [
        "# Written by `python -m docs.predictions errors`: published rows, and the mean error of their predictions."
    ]
    for hardware in sorted({hardware for hardware, _ in groups} & {*names_of_hardware()}):
        lines.append(f"{hardware}:")
        for kind in (kind for name, kind in sorted(groups) if name == hardware):
            of_group = groups[hardware, kind]
            error = mean(abs((row.left_out or row.shipped) / row.run.seconds - 1) for row in of_group)
            lines.append(f"  {kind}: {{rows: {len(of_group)}, error: {error:.3f}}}")
    return "\n".join([*lines, ""])


def render_rankings(rows: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield a line of a table for each table whose rows are rivals of each other: plans of one model and batch."""
    for table, (title, _) in TABLES.items():
        of_table = [row for row in rows if row.table == table]
        runs, predicted = [row.run for row in of_table], [row.shipped for row in of_table]
        rankings = Comparison(runs, predicted, [False] * len(runs), {}).score_rankings()
        if rankings:
            taus, regrets = [r.tau for r in rankings], [r.regret for r in rankings]
            yield f"| {title} | {len(rankings)} | {mean(taus):.2f} | {mean(regrets):.1%} | {max(regrets):.1%} |"


def format_row(row: PublishedRun) -> str:
    """Format a published run as a line of a table."""
    left_out = f"{row.left_out / row.run.seconds - 1:+.1%}" if row.left_out else "-"
    error = row.shipped / row.run.seconds - 1
    return f"| {row.run.name} | {row.run.seconds:.4g} | {row.shipped:.4g} | {error:+.1%} | {left_out} |"


def render_source(table: str) -> str:
    """Return the remarks at the head of a table's file, which name its source."""
    lines = (FOLDER / f"{table}.csv").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


HEAD = "| rows | mean, as shipped | largest | mean, left out | largest |"
RULE = "|---|---|---|---|---|"


def render_page(rows: Sequence[PublishedRun]) -> str:
    """Return the text of docs/predictions.md."""
    parts = [INTRODUCTION, f"| table {HEAD}\n|---{RULE}"]
    parts += render_errors(rows, lambda row: (TABLES[row.table][0],))
    parts += ["", "## By kind of model and hardware", "", f"| hardware | model {HEAD}\n|---|---{RULE}"]
    parts += render_errors(rows, lambda row: (row.run.hardware.name, kind_of_model(row)))
    parts += ["", "## By family and release", "", f"| constants of | family {HEAD}\n|---|---{RULE}"]
    parts += render_errors(rows, lambda row: (row.run.group, row.family))
    parts += ["", RANKINGS, "", "| table | groups | mean tau | mean regret | largest |\n|---|---|---|---|---|"]
    parts += [*render_rankings(rows), "", UNEXPLAINED]
    for table, (title, _) in TABLES.items():
        parts += ["", f"## {title}", "", f"`{table}.csv`. {render_source(table)}", ""]
        parts += ["| run | published, s | predicted, s | error | left out |\n|---|---|---|---|---|"]
        parts += [format_row(row) for row in rows if row.table == table]
    return "\n".join([*parts, ""])


INTRODUCTION = """# Predictions beside published steps

Every table of published steps that the project has (`tests/predict/tables/`), beside what `python -m platform.plan
compare` predicts. `python -m docs.predictions` prints this page; a test makes it again.

- **as shipped**: with the constants of `conf/hardware/` and `conf/system/`, some of which were fitted on these rows.
- **left out**: `products` and `memory` are fitted on a third of the rows of other families on the same hardware and
  release (or system), of dense models on dense ones alone; none of the family's own rows is used. Missing where other
  families have fewer than four rows.
"""
RANKINGS = """## Rankings

Rows of one model, batch and number of GPUs are rivals. Regret: by which share the plan that is predicted to be fastest
takes longer than the one that was."""
UNEXPLAINED = """## What is not explained

- **GPT-OSS**: until 26.04, and in 26.06.01, its steps take 1.4 times as long as its products, memory, messages and
  waits of the host do, by tokens and not by length. One number (`sink_accesses`) has it as slow attention with sinks,
  since notes of 26.06.01 name cuDNN. On B300 release 26.06 is as slow, but not predicted so.
- **Experts** stop a device for 3 ms a layer and microbatch while the host reads how many tokens they get (`read_wait`):
  GPT-OSS alone gives 2.5 ms, by which 32 rows of Qwen3 30B are 11.4 % off on average; Qwen3 30B alone gives 3.75, by
  which 31 rows of GPT-OSS are 7.7 % off. Runs in graphs, since 26.06, read nothing.
- **Qwen3 30B** until 26.02 takes twice as long as predicted on H100, with exchanges beside other microbatches, and 1.4
  times on B200 with microbatches of 4,096 tokens: the host, which launches more for each layer, most likely.
- **405B in 8 bits on H100** is 10 % quicker than by constants that are right for it in 16 bits.
- **vTrain**: 3.6B with a microbatch of 64 takes twice as long as with 32, and 39.1B on two tensor ranks a third longer
  than its neighbours.
- **torchtitan**: 65,536 tokens on two contexts are predicted 30 % too slow, which fits neither one context nor four.
- **llm-foundry on A100**: 30B at 8,192 fills the memory, and 760M at 512 is slower than its neighbours.
- **GB300, Llama 70B, release 26.02.01**: the source has one chunk where the releases around it have five.
- **Bian et al.**: rows of 2-D and 3-D contradict each other ([measured runs](measured.md#how-good-it-is))."""


if __name__ == "__main__":
    print((render_error_bars if sys.argv[1:] == ["errors"] else render_page)(predict_published_runs()), end="")
