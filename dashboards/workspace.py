"""The W&B workspace of a training run, as code, from the table that the page of a run is made from
(`platform/report/panels.yaml`). Every metric in it is logged by `platform.monitor` (a test holds that).

    python dashboards/workspace.py ENTITY/PROJECT    save it there (needs a W&B key) and print its address
    python dashboards/workspace.py [--json]          print it as JSON, offline

Needs `pip install 'elastic-platform[dashboards]'`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ABOVE = Path(__file__).resolve().parents[1]  # the checkout; in a wheel the package, which the dashboards are in
TABLE = next(p for p in (ABOVE / "platform" / "report", ABOVE / "report") if p.is_dir()) / "panels.yaml"
UNITS = {
    "B": " (bytes)",
    "Bps": " (bytes/s)",
    "W": " (W)",
    "C": " (°C)",
}  # of a number whose title on the page says none

SUMMARIES = {"elastic/goodput": "Goodput, the useful share of the time", "elastic/steps_lost": "Steps lost by failures"}


def sections() -> dict[str, list[Any]]:
    """Section title -> panels. Learning goes by tokens, which a change of batch or world size leaves comparable."""
    table = yaml.safe_load(TABLE.read_text())["sections"]
    found = {s["title"]: [panel(p) for said in s["panels"] for p in drawn(said)] for s in table}
    return {title: panels for title, panels in found.items() if panels}


def drawn(said: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that W&B needs for one of the table: none for what only the page shows; it cannot write ranks beside
    the numbers that they have."""
    if "ranks" not in said:
        return [said] if said.keys() & {"metrics", "table", "summary"} else []
    return [said, {"title": f"{said['title']}: ranks of min and max", "metrics": [f"{said['ranks']}/*"]}]


def panel(said: dict[str, Any]) -> Any:
    """A panel of the table as W&B has it: one of metrics by name, or of all inside a name; a table that the run logs,
    or a number of the whole run."""
    import wandb_workspaces.reports.v2 as wr

    if "table" in said:
        return wr.WeavePanelSummaryTable(table_name=said["table"])
    if "summary" in said:
        return wr.ScalarChart(title=SUMMARIES[said["summary"]], metric=said["summary"])
    options: dict[str, Any] = {"title": said["title"] + UNITS.get(said.get("unit", ""), ""), "x": said.get("x", "step")}
    if said.get("log"):
        options["log_y"] = True
    if said.get("kind") == "stack":
        options["plot_type"] = "stacked-area"
    inner = [metric.removesuffix("/*") for metric in said["metrics"] if metric.endswith("/*")]
    if inner:  # a list, such as the load of experts, is one histogram at W&B
        return wr.LinePlot(metric_regex="|".join(f"{re.escape(name)}(/.*)?" for name in inner), **options)
    return wr.LinePlot(y=said["metrics"], **options)


def build(entity: str, project: str) -> Any:
    """The workspace, not yet saved."""
    import wandb_workspaces.workspaces as ws

    return ws.Workspace(
        entity=entity,
        project=project,
        name="Elastic training",
        sections=[ws.Section(name=name, panels=panels, is_open=True) for name, panels in sections().items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Save the W&B workspace, or print it as JSON.")
    parser.add_argument("target", nargs="?", metavar="ENTITY/PROJECT")
    parser.add_argument("--json", action="store_true", help="print it instead of saving it")
    args = parser.parse_args()
    entity, slash, project = (args.target or "ENTITY/PROJECT").partition("/")
    if not (entity and slash and project):
        parser.error(f"{args.target!r} is not ENTITY/PROJECT")
    workspace = build(entity, project)
    if args.json or not args.target:
        print(json.dumps(workspace._to_model().model_dump(by_alias=True, mode="json"), indent=2))
        return
    import wandb

    try:
        print(workspace.save().url)
    except wandb.Error as error:  # no key, no network, no such entity
        sys.exit(f"not saved: {error}")


if __name__ == "__main__":
    main()
