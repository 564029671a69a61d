"""The W&B workspace of a training run, as code. Every metric in it is logged by `platform.monitor` (a test holds that).

    python dashboards/workspace.py ENTITY/PROJECT    save it there (needs a W&B key) and print its address
    python dashboards/workspace.py [--json]          print it as JSON, offline

Needs `pip install 'elastic-platform[dashboards]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

PHASES = ("data", "forward", "backward", "exposed_comm", "bubble", "reduce", "optimizer", "checkpoint")


def sections() -> dict[str, list[Any]]:
    """Section title -> panels. Learning goes by tokens, which a change of batch or world size leaves comparable."""
    import wandb_workspaces.reports.v2 as wr

    def line(title: str, *metrics: str, x: str = "step", **options: Any) -> Any:
        return wr.LinePlot(title=title, x=x, y=list(metrics), **options)

    return {
        "Learning": [
            line("Training loss", "train/loss", x="tokens"),
            line("Validation loss", "val/loss", x="tokens"),
            wr.LinePlot(title="Validation loss by source", x="tokens", metric_regex="val/sources/.*"),
            wr.LinePlot(title="Scores of tasks", x="tokens", metric_regex="tasks/.*"),
            line("Learning rate", "train/lr", x="tokens"),
            line("Gradient norm before clipping", "train/grad_norm", x="tokens", log_y=True),
            wr.LinePlot(title="Load of experts", x="tokens", metric_regex="experts/.*"),
            wr.LinePlot(title="Gradient norm by layer", x="tokens", metric_regex="layers/grad_norm/.*", log_y=True),
            wr.LinePlot(title="Size of what a layer returns", x="tokens", metric_regex="layers/rms/.*", log_y=True),
        ],
        "Throughput": [
            line("Tokens per second", "perf/tokens_per_second"),
            line("Model FLOPs utilisation", "perf/mfu", range_y=(0, 1)),
            line("TFLOP/s per worker", "perf/tflops_per_worker"),
            line("Seconds per step", "perf/step_seconds"),
        ],
        "Where a step goes": [
            line("Seconds by phase", *(f"time/{phase}" for phase in PHASES), plot_type="stacked-area"),
            wr.LinePlot(title="Bytes sent per step, by collective and axis", x="step", metric_regex="comm/.*"),
            line("Bubble over ideal (a pipeline with monitor.timeline)", "bubble/planned", "bubble/measured"),
            line("Peak memory of the largest worker (bytes)", "memory/peak_bytes"),
        ],
        "Elasticity": [
            line("Workers", "elastic/world_size"),
            line("Generation (one per formation of the mesh)", "elastic/generation"),
            line("Seconds from a failure to the next step", "elastic/recovery_seconds"),
            line("Steps that updated nothing", "train/skipped"),
            line("Loss scale (fp16)", "train/loss_scale"),
            line("Tokens of a sequence (train.length_ramp)", "train/length"),
        ],
    }


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
