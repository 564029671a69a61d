"""Writes docs/papers.md and its pictures: what the four papers print, beside what the planner predicts.

`python -m docs.papers` writes all of them; `python -m docs.papers NAME` prints one table (NAMES). Texts are those of
docs/papers.yaml, published numbers those of tests/predict/tables.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from docs.curves import Curve, draw_bars, draw_curves
from platform.config.fields import Config
from platform.launch import compose_config
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.predict.measured_runs import MeasuredRun, compare_runs, mark_fitted_runs, read_measured_runs, read_system
from platform.predict.price import StepPrice
from platform.predict.recovery_price import Known, checkpoint_price
from platform.predict.step_price import build_step_work, read_hardware
from platform.predict.work import EVEN

DOCS = Path(__file__).parent
TABLES = DOCS.parent / "tests" / "predict" / "tables"
PAGE = DOCS / "papers.md"
OURS, A100 = "ours", "a100_80g"
LAYOUTS = {  # of Shazeer et al., section 8 -> axes
    "mesh_tf_empty": {"all": 4},
    "mesh_tf_data": {"all": 4},
    "mesh_tf_model": {"all": 4},
    "mesh_tf_2d": {"rows": 2, "cols": 2},
    "mesh_tf_3d": {"rows": 2, "cols": 2, "planes": 2},
}
SIZES = {  # of tables 2 and 3 of Shazeer et al.: kind of model -> heads -> billions of parameters, as printed
    "lm": {4: "0.14", 8: "0.22", 16: "0.37", 32: "0.67", 64: "1.28", 128: "2.48", 256: "4.90"},
    "mt": {4: "0.15", 8: "0.24", 16: "0.42", 32: "0.77", 64: "1.48", 128: "2.89"},
}
B, IO, H = 256, 64, 512  # of +experiment=two_layer


class Row(NamedTuple):
    """Published run beside its prediction: the `run`, its predicted seconds, whether constants are `fitted` on it."""

    run: MeasuredRun
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Return by which share the prediction is longer."""
        return self.predicted / self.run.seconds - 1

    @property
    def speed(self) -> float:
        """Return the predicted TFLOP/s of a GPU, as the table counts FLOPs."""
        return self.run.counted_flops / (self.predicted * self.gpus) / 1e12

    @property
    def published_speed(self) -> float:
        """Return the published TFLOP/s of a GPU."""
        return self.run.counted_flops / (self.run.seconds * self.gpus) / 1e12

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.run.work.plan.mesh.world_size

    @property
    def batch(self) -> int:
        """Return the sequences of a step."""
        return int(self.run.cells["global_batch"])


class Claim(NamedTuple):
    """Ratio of two plans' speeds that a paper prints: the cells of its row, and the ratios predicted for the paper's
    system and for ours."""

    cells: Mapping[str, str]
    theirs: float
    ours: float

    @property
    def published(self) -> float | None:
        """Return the published ratio, None where the paper prints a trend."""
        text = self.cells["published"]
        return float(text) if text[:1].isdigit() else None


@cache
def read_rows(name: str, calibrate: str = "") -> list[Row]:
    """Return the rows of a table of published runs with their predictions; `calibrate`: as of `plan compare`."""
    runs = read_measured_runs(str(TABLES / f"{name}.csv"), compose_config, mark=calibrate)
    compared = compare_runs(runs, mark_fitted_runs(runs, calibrate))
    return [Row(*row) for row in zip(runs, compared.predicted, compared.fitted, strict=True)]


def predict_step(arguments: Sequence[str], gpus: int, hardware: str, system: str) -> tuple[Config, Plan, StepPrice]:
    """Return the configuration, the plan and the predicted price of a step on so many GPUs, as a system runs it."""
    usual = ["cluster.device=cuda", "train.steps=1"]
    usual += [] if any(word.startswith("tensor=") for word in arguments) else ["tensor=serial"]
    config = compose_config([*usual, *arguments])
    stages, kind = config.pipeline.stages, config.pipeline.kind
    plan = make_plan(config, gpus, tuple(range(stages)) * config.pipeline.chunks if kind in EVEN else None)
    assert plan.mesh.world_size == gpus, f"{arguments}: {plan.mesh}"
    work = build_step_work(config, plan, system=read_system(system))
    return config, plan, MeasuredRun("", {}, work, read_hardware(hardware), 1.0, 1.0).predict_price({})


def predict_speed(cells: Mapping[str, str], side: str, system: str) -> float:
    """Return the predicted sequences per second of one side (base | fast) of a claim, run by the paper's system or, if
    it is `ours`, by this platform."""
    words = f"{cells['common']} {cells[side]}".split()
    named = [word.removeprefix("system=") for word in words if word.startswith("system=")]
    gpus = int(cells["base_gpus"] if side == "base" else cells["gpus"])
    arguments = [word for word in words if not word.startswith("system=")]
    runs_as = system if system == OURS else (named or [system])[0]
    config, _, price = predict_step(arguments, gpus, cells["hardware"], runs_as)
    return config.train.global_batch / price.seconds


def read_cells(name: str) -> list[dict[str, str]]:
    """Return the cells of each row of a table in tests/predict/tables."""
    lines = [line for line in (TABLES / f"{name}.csv").read_text().splitlines() if line and not line.startswith("#")]
    return list(csv.DictReader(lines))


@cache
def read_claims(name: str) -> list[Claim]:
    """Return the claims of a table of ratios with their predictions."""
    return [predict_claim(cells) for cells in read_cells(name)]


def predict_claim(cells: Mapping[str, str]) -> Claim:
    """Return a claim, as its cells say it, with its predictions."""
    ratios = [predict_speed(cells, "fast", s) / predict_speed(cells, "base", s) for s in (cells["system"], OURS)]
    return Claim(cells, *ratios)


def render_table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines) + "\n"


def render_speeds(rows: Sequence[Row]) -> str:
    """Return the table of published and predicted TFLOP/s of a GPU."""
    titles = ["row", "GPUs", "published", "predicted", "step, published", "step, predicted", "error", ""]
    cells = [
        [row.run.name, f"{row.gpus:,}", f"{row.published_speed:.0f}", f"{row.speed:.1f}", f"{row.run.seconds:.2f} s",
         f"{row.predicted:.2f} s", f"{row.error:+.1%}", "fitted on" if row.fitted else ""]
        for row in rows
    ]  # fmt: skip
    return render_table(titles, cells)


def render_sequences(rows: Sequence[Row]) -> str:
    """Return the table of published and predicted seconds per sequence."""
    cells = [
        [row.run.name, row.batch, f"{row.run.seconds / row.batch:.3f}", f"{row.predicted / row.batch:.3f}",
         f"{row.error:+.0%}"]
        for row in rows
    ]  # fmt: skip
    return render_table(["row", "batch", "published", "predicted", "error"], cells)


def render_speedups(rows: Sequence[Row]) -> str:
    """Return the table of speed-ups of the 3-D rows of Bian et al. over the others of their tables."""
    each = {row.run.name: row for row in rows}
    cells = []
    for table in "12":
        for gpus in (8, 64):
            three = each[f"3-D {gpus} of table {table}"]
            for name in ("1-D", "2-D"):
                if other := each.get(f"{name} {gpus} of table {table}"):
                    published = other.run.seconds / other.batch / (three.run.seconds / three.batch)
                    predicted = other.predicted / other.batch / (three.predicted / three.batch)
                    cells.append([f"table {table}, {gpus} GPUs, over {name}", f"{published:.2f}", f"{predicted:.2f}"])
    return render_table(["3-D", "published (of the printed times)", "predicted"], cells)


def render_claims(claims: Sequence[Claim]) -> str:
    """Return the table of ratios that a paper prints, predicted and measured."""
    cells = [
        [c.cells["figure"], c.cells["claim"], c.cells["published"], f"{c.theirs:.2f}", f"{c.ours:.2f}",
         c.cells["measured"] or "-"]
        for c in claims
    ]  # fmt: skip
    titles = ["figure", "speed of", "published", "predicted, their system", "predicted, ours", "measured here (ours)"]
    return render_table(titles, cells)


def print_costs(scheme: str) -> list[float]:
    """Return what a row of table 1 of Shazeer et al. prints for a rank under a layout: multiplications of a product,
    elements that are all-reduced, their ratio, and elements in memory."""
    axes = LAYOUTS[scheme]
    n, r, c, p = (axes.get(axis, 1) for axis in ("all", "rows", "cols", "planes"))
    if scheme == "mesh_tf_empty":
        n = 1
    reduced, batches, hidden, io = {
        "mesh_tf_empty": (0, 1, 1, 1),
        "mesh_tf_data": (IO * H, n, 1, 1),
        "mesh_tf_model": (B * IO, 1, n, 1),
    }.get(scheme, (B // r * IO // p + (B // r * H // c if p > 1 else 0) + IO // p * H // c, r, c, p))
    products = B * IO * H // (n * r * c * p)
    memory = (B // batches) * (IO // io) + (B // batches) * (H // hidden) + (IO // io) * (H // hidden)
    return [products, reduced, reduced / products, memory]


def plan_costs(scheme: str, sizes_of_axes: Mapping[str, int] | None = None, *more: str) -> list[float]:
    """Return the same as `print_costs` of the plan of two layers, without the bias, which the table drops."""
    axes = [f"tensor.axes.{a}={n}" for a, n in (sizes_of_axes or LAYOUTS[scheme]).items()]
    plan = make_plan(compose_config(["+experiment=two_layer", f"tensor={scheme}", *axes, *more]))
    product = next(o.operation for o in plan.operations.values() if o.operation.kind == "project")
    tensors = (*product.inputs, *product.outputs)
    sizes = {dim: n for tensor in tensors for dim, n in zip(tensor.dims, plan.local_shape(tensor), strict=True)}
    activations = sum(c.elements for o in plan.operations.values() for c in o.collectives if c.op == "all_reduce")
    weights = sum(prod(plan.local_shape(w)) for w in plan.parameters if len(w.dims) > 1 and plan.reductions[w.name])
    reduced = (activations + weights) // 2  # of one pass
    products = prod(sizes.values())
    return [products, reduced, reduced / products, sum(prod(plan.local_shape(tensor)) for tensor in tensors)]


def render_headlines() -> str:
    """Return the table of what each paper is known for, as it prints it, and as predicted."""
    by_name = {row.run.name: row for row in (*read_rows(BIAN), *read_rows("megatron_table_1", "small"))}
    three, one = by_name["3-D 64 of table 1"], by_name["1-D 64 of table 1"]
    ratio = one.predicted / one.batch / (three.predicted / three.batch)
    largest, [first, *_] = by_name["1008.0B"], read_claims("jain_figures")
    rows = [
        ["Bian et al.", "the cube over 1-D on 64 GPUs", "2.32 (2.93 by its times)", f"{ratio:.2f}",
         "1.73 (8 ranks, 2.5 Mbit/s; the best cuboid 3.87)"],
        ["Jain et al.", "D&SP over data parallelism, figure 12a", first.cells["published"],
         f"{first.theirs:.2f} for its system, {first.ours:.2f} for ours", "losses equal to 15 digits"],
        ["Narayanan et al.", "a model of 1T on 3,072 GPUs: TFLOP/s of a GPU", f"{largest.published_speed:.0f}",
         f"{largest.speed:.1f}", "bytes of a step as planned"],
        ["Shazeer et al.", "costs of five layouts, table 1", "formulas", "equal", "equal elements, counted"],
    ]  # fmt: skip
    return render_table(["paper", "headline", "published", "predicted", "measured here"], rows)


def render_costs() -> str:
    """Return table 1 of Shazeer et al. for two layers on a mesh, what it prints before what is planned."""
    rows = []
    for scheme, axes in LAYOUTS.items():
        pairs = zip(print_costs(scheme), plan_costs(scheme), strict=True)
        cells = [f"{a:,.6g}, {b:,.6g}" if abs(a) < 1 else f"{a:,}, {b:,}" for a, b in pairs]
        rows.append([f"`{scheme}`", " x ".join(f"{axis} {size}" for axis, size in axes.items()), *cells])
    titles = ["layout", "mesh", "multiplications of a product", "elements all-reduced", "their ratio", "memory"]
    return render_table(titles, rows)


def render_ratios() -> str:
    """Return the ratios of computing to elements of appendix B of Shazeer et al., for square matrices on 64 ranks."""
    u, rows = 512, []
    square = [f"model.io={u}", f"model.hidden={u}", f"train.global_batch={u}", f"train.microbatch={u}"]
    for scheme, axes, text, ratio in (
        ("mesh_tf_2d", {"rows": 8, "cols": 8}, "2u/17 = 0.12u", 2 * u / 17),
        ("mesh_tf_3d", {"rows": 4, "cols": 4, "planes": 4}, "u/6 = 0.17u", u / 6),
    ):
        products, _, _, elements = plan_costs(scheme, axes, *square)
        mesh = " x ".join(map(str, axes.values()))
        rows.append([f"`{scheme}`", mesh, text, f"{ratio:.2f}", f"{2 * products / elements:.2f}"])
    return render_table(["partition", "mesh", "published", "published, u = 512", "planned"], rows)


def render_sizes(kind: str) -> str:
    """Return the sizes of the models of table 2 (`lm`) or 3 (`mt`) of Shazeer et al."""
    rows = []
    for heads, size in SIZES[kind].items():
        name = f"mesh_{kind}_{heads}"
        config = compose_config([f"model={name}", *(["data=pairs"] if kind == "mt" else [])])
        rows.append([f"`{name}`", config.model.d_ff, heads, size, f"{make_plan(config).parameter_count / 1e9:.2f}"])
    return render_table(["model", "d_ff", "heads", "published, billions", "ours, billions"], rows)


def render_training() -> str:
    """Return the days of training and the bytes of a checkpoint that Narayanan et al. print, beside the planner's."""
    runs = read_cells("megatron_training")
    rows = []
    for cells in runs:
        gpus, tokens = int(cells["gpus"]), float(cells["tokens"])
        config, plan, price = predict_step(cells["common"].split(), gpus, cells["hardware"], cells["system"])
        by_formula = 8 * tokens * plan.parameter_count / (gpus * float(cells["flops"])) / 86400
        rows.append([cells["claim"], cells["published"], f"{by_formula:.1f}", f"{price.training_days(tokens):.1f}"])
    by_formula, saved = plan.parameter_count * 14, checkpoint_price(config, plan, Known("cuda", read_hardware(A100)))
    ours = f"{saved.bytes / 1e12:.1f} TB (of 1,000 GB)"
    rows.append(["a checkpoint of 1T", "13.8 TB (of 1,024 GB)", f"{by_formula / 1e9 / 1024:.1f} TB", ours])
    rows.append(["written at 273 GB/s", "-", f"{by_formula / 273e9:.0f} s", f"{saved.saving:.0f} s"])
    rows.append(["read at 1 TB/s", "-", f"{by_formula / 1e12:.0f} s", f"{saved.reading:.0f} s"])
    return render_table(["what", "published", "by the paper's formula", "predicted, ours for the checkpoint"], rows)


def name_speed_table(name: str, calibrate: str = "") -> tuple[str, Callable[[], str]]:
    """Return the command of a table of speeds, and what renders it."""
    command = f"compare tests/predict/tables/{name}.csv" + (f" calibrate={calibrate}" if calibrate else "")
    return command, lambda: render_speeds(read_rows(name, calibrate))


BIAN = "bian_tables_1_and_2"
# name of a table -> (paper, its title, the command that prints its numbers, what renders it)
NAMES: Mapping[str, tuple[str, str, str, Callable[[], str]]] = {
    BIAN: ("bian", "Tables 1 and 2: seconds per sequence", f"compare tests/predict/tables/{BIAN}.csv",
           lambda: render_sequences(read_rows(BIAN))),
    "bian_speedups": ("bian", "The cube's speed-ups", "", lambda: render_speedups(read_rows(BIAN))),
    "jain_figures": ("jain", "Figures 12 to 17", "", lambda: render_claims(read_claims("jain_figures"))),
    "megatron_table_1": ("narayanan", "Table 1: TFLOP/s of a GPU", *name_speed_table("megatron_table_1", "small")),
    "megatron_table_2": ("narayanan", "Table 2, PTD-P", *name_speed_table("megatron_table_2")),
    "megatron_table_2_zero3": ("narayanan", "Table 2, ZeRO-3", *name_speed_table("megatron_table_2_zero3")),
    "megatron_figures": ("narayanan", "Figures 7 to 18", "", lambda: render_claims(read_claims("megatron_figures"))),
    "megatron_training": ("narayanan", "Days and terabytes", "", render_training),
    "shazeer_table_1": ("shazeer", "Table 1: costs of a rank", "", render_costs),
    "shazeer_appendix_b": ("shazeer", "Appendix B: FLOPs of a rank for each element that it needs", "", render_ratios),
    "shazeer_table_2": ("shazeer", "Table 2: parameters of language models", "", lambda: render_sizes("lm")),
    "shazeer_table_3": ("shazeer", "Table 3: parameters of translation models", "", lambda: render_sizes("mt")),
}  # fmt: skip
SAYS = {  # name of a table -> what is said above it
    BIAN: "On V100, by the constants of `conf/hardware/v100.yaml`. We measured a smaller case: 8 ranks on links "
    "of 2.5 Mbit/s, d_model 64, 4 layers, 4 sequences of 256 (`python -m benchmarks.nodes`, 2 CPU cores, 2026-11-23): "
    "6.82 s a sequence under 1-D, 6.06 under 2-D, 3.95 on the cube, 1.76 on the cuboid 4 x 2 x 1.",
    "jain_figures": "A ratio of sequences per second, as the text prints it; words where it prints a trend. *Their "
    "system* is `conf/system/lbann.yaml` on `conf/hardware/v100_lassen.yaml`, in which each head has kernels of "
    "its own; *ours* batches the heads. Losses are equal to 15 digits under every plan.",
    "megatron_table_1": "Two constants are fitted on the five small rows. Not measured here; the bytes of the last row "
    "were handed to a stand-in of torch's transport on 3,072 ranks, and are the plan's "
    "(`tests/runtime/test_paper_worlds.py`).",
    "megatron_table_2": "By the constants of `conf/hardware/a100_80g.yaml`, fitted on table 1.",
    "megatron_table_2_zero3": "Likewise; one constant of `conf/system/deepspeed-2021.yaml` was fitted on these rows.",
    "megatron_figures": "A ratio of sequences per second, as the text prints it; words where it prints a trend. *Their "
    "system* is `conf/system/megatron-2021.yaml`.",
    "shazeer_table_1": "256 sequences, io 64, hidden 512: each cell has what the table's formula gives, then what is "
    "planned; elements of one pass. Counters on ranks measure the all-reduced ones (`python -m pytest "
    "tests/runtime/oracle/test_two_layer.py`, 2026-11-29).",
    "shazeer_appendix_b": "A product of square matrices of length u on 64 ranks, each with the blocks of all three.",
    "shazeer_table_2": "By the digit that is printed. In miniature, quality rises with size as in the paper: 1,500 "
    "steps of 1,024 tokens end with validation losses of 3.751, 3.703, 3.665 and 3.640 for a d_ff of 128, 256, 512 "
    "and 1,024 with 2, 4, 8 and 16 heads, one seed each (`python -m platform.launch -m "
    "+experiment=paper/shazeer_table_2 train.steps=1500 eval.every=500 optimizer.lr=1.5e-3 optimizer.warmup_steps=60 "
    "cluster=inline parallel.data=1 tensor=serial train.microbatch=16 model.layers=2 model.d_model=64 model.d_kv=16 "
    "model.length=64 model.vocab=512`, 2 CPU cores, 2026-11-29). The learning rate has to be one that the widest "
    "model bears: with `optimizer.lr=5e-3`, 600 steps end with 3.887 for a d_ff of 256 and 4.123 for 1,024.",
    "shazeer_table_3": "By the digit that is printed.",
}


def draw_megatron() -> str:
    """Return the picture of table 2 and figure 10 of Narayanan et al."""
    plots = {}
    for size in ("174.6B", "529.6B"):
        curves = []
        for name, table in (("PTD-P", "megatron_table_2"), ("ZeRO-3", "megatron_table_2_zero3")):
            rows = [row for row in read_rows(table) if row.run.name.startswith(size)]
            published = [(row.gpus, row.published_speed) for row in rows]
            curves.append(Curve(name, published, [(row.gpus, row.speed) for row in rows]))
        plots[f"{size}: TFLOP/s of a GPU"] = curves
    return draw_curves("Narayanan et al. 2021, table 2 and figure 10", plots, 200, 50)


def draw_bian() -> str:
    """Return the picture of both tables of Bian et al."""
    plots = {}
    for table, kind in (("1", "weak scaling"), ("2", "strong scaling")):
        curves = []
        for name in ("1-D", "2-D", "3-D"):
            rows = [row for row in read_rows(BIAN) if row.run.name.startswith(name) and row.run.name.endswith(table)]
            published = [(row.gpus, row.run.seconds / row.batch) for row in rows]
            curves.append(Curve(name, published, [(row.gpus, row.predicted / row.batch) for row in rows]))
        plots[f"table {table}, {kind}: seconds per sequence"] = curves
    return draw_curves("Bian et al. 2021, tables 1 and 2", plots, 2, 0.5)


def draw_jain() -> str:
    """Return the picture of the speed-ups over data parallelism that Jain et al. print."""
    claims = [c for c in read_claims("jain_figures") if c.published and "over DP" in c.cells["claim"]]
    groups = {
        " / ".join([c.cells["figure"], c.cells["gpus"], c.cells["common"].split("global_batch=")[1].split()[0]]):
        (c.published or 0.0, c.theirs, c.ours) for c in claims
    }  # fmt: skip
    names = ["published", "predicted, their system", "predicted, ours"]
    return draw_bars("Jain et al.: D&SP over data parallelism, by figure / GPUs / batch", groups, names, 4)


# paper -> file, what draws it, what it shows
PICTURES: Mapping[str, tuple[str, Callable[[], str], str]] = {
    "bian": ("papers-bian.svg", draw_bian, "Seconds per sequence over GPUs, published and predicted"),
    "jain": ("papers-jain.svg", draw_jain, "Speed-ups of D&SP over data parallelism, published and predicted"),
    "narayanan": ("papers-narayanan.svg", draw_megatron,
                  "TFLOP/s over GPUs of PTD-P and ZeRO-3, published and predicted"),
}  # fmt: skip

ENDS = {"missed": "what did not come out, and why", "slips": "slips in the paper", "better": "better here"}


def render_paper(name: str, texts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the page on one paper."""
    yield f"## {texts['title']}\n"
    yield render_table(["in the paper", "what", "here", "test"], [[*row[:3], code(row[3])] for row in texts["map"]])
    if name in PICTURES:
        file, _, says = PICTURES[name]
        yield f"![{says}.]({file})\n"
    for table, (paper, title, command, render) in NAMES.items():
        if paper == name:
            ways = [f"`{command}`"] * bool(command) + [f"`python -m docs.papers {table}`"]
            yield f"### {title}\n\n" + " ".join(filter(None, [SAYS.get(table, ""), f"Command: {' or '.join(ways)}."]))
            yield ""
            yield render()
    for key, title in ENDS.items():
        yield f"### {name.title()}: {title}\n"
        yield "\n".join(f"- {line}" for line in texts[key]) + "\n"


def code(path: str) -> str:
    """Return a path as code, - as it is."""
    return path if path == "-" else f"`{path}`"


def render_page() -> str:
    """Return the text of docs/papers.md."""
    texts = yaml.safe_load((DOCS / "papers.yaml").read_text())
    head = f"# The four papers, reproduced\n\n{texts.pop('head')}\n\n## In short\n"
    parts = [part for name, paper in texts.items() for part in render_paper(name, paper)]
    return "\n".join([head, render_headlines(), *parts])


def main(names: Sequence[str]) -> int:
    """Write the page and its pictures, or print the tables that are named."""
    if unknown := set(names) - NAMES.keys():
        print(f"papers: {', '.join(sorted(unknown))}: no such table; legal: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in names:
        print(NAMES[name][3](), end="")
    if not names:
        PAGE.write_text(render_page())
        for file, draw, _ in PICTURES.values():
            (DOCS / file).write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
