import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from platform.monitor.metrics import wandb_names
from platform.monitor.sinks.wandb_sink import NEWEST
from platform.report.page import panel_table
from tests.harness.offline_run import history, records

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")
TABLES = {"journal", "samples"}

WRITE_A_RUN = r"""
import json, sys, time
from pathlib import Path
from platform.config.fields import Config
from dataclasses import replace
from tests.harness.happenings import EXAMPLES
from platform.monitor import MetricsRow, open_monitor
from platform.train.replies import GAUGES
from platform.train.trainer import SECTIONS
config = Config()
config.monitor.kind = "wandb"
config.train.steps = 4321
monitor = open_monitor(config, Path(sys.argv[1]), total_steps=3)
row = dict.fromkeys(MetricsRow.__dataclass_fields__, 0.5) | {"samples": [0, 16]}
row |= {"comm_bytes": {"all_reduce/t": 1, "all_gather/data+t": 2}}
row["parts"] = {"computing": 0.25, "waiting for t": 0.125}
row["bubble"] = {"planned": 0.25, "measured": 0.5}
row["parts"] = {"computing": 0.25, "waiting for data": 0.25}
row["losses_ahead"] = {"loss_ahead_1": 0.5, "loss_ahead_2": 0.25}
row["val_losses"] = {"pages": 0.5, "code": 0.25}
row["task_scores"] = {"lambada_openai/acc": 0.5, "mmlu/acc": 0.25}
row |= dict.fromkeys(("layer_grad_norms", "layer_rms"), {"layers.0": 0.5, "layers.1": 0.25})
row["expert_load"] = list(range(600))  # more than W&B has bins
row["experts"] = dict.fromkeys(("dropped", "entropy", "largest"), 0.5)
gauges = (*GAUGES, "bandwidth/inside a node", "bandwidth/between nodes")
row["workers"] = {f"{name}/{end}": 0.5 for name in gauges for end in ("min", "median", "max")}
row["worker_ranks"] = {f"{name}/{end}": 3 for name in gauges for end in ("min", "max")}
row["seconds"] = dict.fromkeys(SECTIONS, 0.25)
row = MetricsRow(**row)
monitor.record_step(replace(row, step=1))
for step in (2, 3, 2, 3):  # a rollback
    monitor.record_step(replace(row, step=step, mfu=None, val_loss=None))
names = ("starting", "sampled", "goodput", "done")
lines = [json.dumps({"time": time.time(), "generation": 1, "event": name} | EXAMPLES[name]) for name in names]
Path(sys.argv[1], "journal.jsonl").write_text("".join(line + "\n" for line in lines))
monitor.close(0)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small run of our own Monitor, with every metric of docs/run-directory.md."""
    run_dir = tmp_path_factory.mktemp("run")
    env = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", WRITE_A_RUN, str(run_dir)], env=env, check=True, capture_output=True)
    [path] = run_dir.glob("wandb/offline-run-*/*.wandb")
    return path


@pytest.fixture(scope="module")
def workspace() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workspace", ROOT / "dashboards" / "workspace.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def panels(workspace: ModuleType) -> list[dict[str, Any]]:
    """The panels' configurations as W&B would store them."""
    model = workspace.build("team", "project")._to_model().model_dump(by_alias=True, mode="json")
    sections = model["spec"]["section"]["panelBankConfig"]["sections"]
    assert all(section["panels"] for section in sections)
    return [panel["config"] for section in sections for panel in section["panels"]]


def test_every_metric_on_a_panel_is_logged_and_every_logged_metric_is_on_a_panel(
    run: Path, panels: list[dict[str, Any]]
) -> None:
    logged = {name for row in history(run) for name in row} - TABLES
    lines = [panel for panel in panels if "xAxis" in panel]
    used = {name for panel in lines for name in [panel["xAxis"], *(panel["metrics"] or [])]}
    patterns = [panel["metricRegex"] for panel in lines if panel["useMetricRegex"]]
    matched = {name for name in logged if any(re.fullmatch(pattern, name) for pattern in patterns)}
    assert used - logged == set()
    assert logged - used == matched != set()
    assert all(any(re.fullmatch(pattern, name) for name in logged) for pattern in patterns)
    assert set(wandb_names().values()) <= {n for m in logged for n in (m, m.split("/")[0], m.rpartition("/")[0])}


def test_every_table_that_is_logged_is_on_a_panel(run: Path, panels: list[dict[str, Any]]) -> None:
    steps, others = ([row for row in history(run) if ("train/loss" in row) is of_step] for of_step in (True, False))
    logged = {name for row in others for name in row} - {"step"}
    assert steps
    tables = [panel["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"] for panel in panels if is_table(panel)]
    assert sorted(tables) == sorted(TABLES) and logged == TABLES


def test_every_number_of_the_whole_run_is_on_a_panel_or_listed(run: Path, panels: list[dict[str, Any]]) -> None:
    items = [item for r in records(run) if r.WhichOneof("record_type") == "summary" for item in r.summary.update]
    of_steps = {name for row in history(run) for name in row}
    logged = {item.key or item.nested_key[0] for item in items} - of_steps
    logged = {name for name in logged if name[0] != "_"}
    shown = {name for panel in panels if not is_table(panel) and "xAxis" not in panel for name in panel["metrics"]}
    hidden = panel_table()["not_shown"].keys() - {"step", "tokens"}
    assert shown < logged and not shown & hidden
    assert logged - shown == hidden - {f"newest/{name}" for name in NEWEST} != hidden


def is_table(panel: dict[str, Any]) -> bool:
    return "panel2Config" in panel


def test_no_panel_is_empty_or_twice_there(panels: list[dict[str, Any]]) -> None:
    charts = [panel for panel in panels if not is_table(panel)]
    titles = [panel["chartTitle"] for panel in charts]
    assert all(titles) and len(set(titles)) == len(titles)
    assert all(panel["metrics"] or panel["useMetricRegex"] for panel in charts)


def test_the_run_has_our_configuration_our_x_axis_and_every_row(run: Path) -> None:
    by_kind: dict[str, list[Any]] = {}
    for record in records(run):
        by_kind.setdefault(record.WhichOneof("record_type"), []).append(record)
    started = by_kind["run"][0].run
    assert started.project == "elastic-platform" and started.run_id in run.name
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["train"]["steps"] == 4321 and config["cluster"]["kind"] == "local"
    assert {(m.metric.name, m.metric.glob_name, m.metric.step_metric) for m in by_kind["metric"]} >= {
        ("step", "", ""),
        ("", "*", "step"),
    }
    assert [(row["step"], "perf/mfu" in row, "val/loss" in row) for row in history(run) if "train/loss" in row] == [
        (1, True, True),
        (2, False, False),
        (3, False, False),
    ]
    assert history(run)[0]["comm/all_gather/data+t"] == 2
    assert by_kind["exit"][0].exit.exit_code == 0


@pytest.mark.parametrize(
    "arguments, status, says",
    [
        ([], 0, '"Loss, of training and of validation"'),
        (["a/b", "--json"], 0, '"project": "b"'),
        (["nonsense"], 2, "is not ENTITY/PROJECT"),
    ],
)
def test_command_line(arguments: list[str], status: int, says: str, tmp_path: Path) -> None:
    """Run by its path from elsewhere: it needs neither the installed package nor an account."""
    command = [sys.executable, str(ROOT / "dashboards" / "workspace.py"), *arguments]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "PYTHONPATH"))}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr


def test_saving_without_a_key_ends_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "dashboards" / "workspace.py"), "team/project"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("not saved:") and "Traceback" not in done.stderr
