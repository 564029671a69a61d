"""Weights & Biases: offline if there is no API key, and never a prompt."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from platform.boundary.local_files import replace_text
from platform.boundary.redaction import strip_url_secrets
from platform.monitor import events
from platform.monitor.events import JournalEvent
from platform.monitor.sinks.alerts import RESUMABLE, Alert, MonitorSink, Numbers, SinkRun
from platform.monitor.sinks.other_sinks import bin_counts

_TABLE_SECONDS = 600.0  # between versions of the tables of a run that goes on: each holds all rows
_TABLE_ROWS = 10_000  # as many as W&B shows
NEWEST = ("step", "train/loss", "perf/tokens_per_second")
_TABLES = {"journal": ("time", "generation", "event", "step", "details"), "samples": ("step", "prompt", "text")}


class WandbSink(MonitorSink):
    """W&B run of a run directory, shared by all its processes. W&B cannot replace a step that it has: its curves get
    steps that are kept, its summary at once the `show_newest_step`.

    W&B's own step counter is never set: it refuses to go back, as a run does whose texts and tables come later.
    """

    replaces = False
    stored_after = 20.0  # W&B writes its file every 15 seconds

    def __init__(self, run: SinkRun):
        """Start or continue the W&B run: online if there is an API key that the server accepts, else offline; offline
        or disabled if WANDB_MODE says so."""
        os.environ.setdefault("GOMAXPROCS", "1")  # W&B's own process: by its four threads it takes half as much again
        import wandb

        self._of, self._step, self._own_checkpoints = run, 0, _checkpoint_folder(run)
        self._rows: dict[str, list[list[Any]]] = {name: [] for name in _TABLES}
        self._logged, self._new = monotonic(), False
        wandb_dir = run.directory / "wandb"
        wandb_dir.mkdir(0o700, exist_ok=True)
        settings = wandb.Settings(silent=True, console="off", x_stats_pid=run.driver or os.getpid())

        def start_run(mode: str) -> Any:
            """Begin or continue the run at W&B, online or offline as `mode` says."""
            return wandb.init(
                project=run.monitor["project"],
                name=run.directory.name,
                id=_stored_wandb_run_id(wandb_dir / "run-id"),
                dir=run.directory,
                config=run.config,
                tags=run.monitor.get("tags") or None,
                group=run.monitor.get("group") or None,
                notes=run.monitor.get("notes") or None,
                job_type="train",
                mode=mode,  # type: ignore[arg-type]
                resume=None if mode == "offline" else "allow",  # offline parts of one id are merged by `wandb sync`
                settings=settings,
            )

        mode: str = wandb.setup(settings).settings.mode
        why = "WANDB_MODE"
        mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)  # older names of W&B modes
        try:
            if mode not in ("offline", "disabled") and not wandb.login(prompt=False, verify=False):
                mode, why = "offline", "no API key"
            self._run = start_run(mode)
        except wandb.Error as error:  # key refused, or server unreachable: train all the same
            wandb.teardown()  # otherwise it keeps the id of the failed attempt
            mode, why = "offline", str(error).splitlines()[0]
            self._run = start_run(mode)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._offline = mode == "offline"
        upload = f"; upload with `wandb sync {shlex.quote(str(wandb_dir))}/offline-run-*`"
        self.where = {"offline": f"offline ({why}){upload}", "disabled": f"disabled ({why})"}.get(mode) or self._run.url

    def note_already_sent_event(self, event: JournalEvent) -> None:
        """Add an event of the run to the tables of the W&B run, of which each version holds all."""
        self._step = getattr(event, "step", self._step)
        if isinstance(event, events.Sampled):
            self._rows["samples"].append([event.step, event.prompt, event.text])
        else:
            fields = {name: value for name, value in event.own_fields().items() if name != "step"}
            details = json.dumps(fields, default=str)
            self._rows["journal"].append([event.time, event.generation, event.word, self._step, details])
        self._new = True

    def send_event(self, event: JournalEvent) -> None:
        """Add an event to the W&B run: to its tables; a checkpoint as an artifact that the run made or went on from,
        the cost of failures as numbers of the whole run."""
        self.note_already_sent_event(event)
        if isinstance(event, events.Checkpoint):
            artifact = self._checkpoint_artifact(event.directory, {"step": event.step, "bytes": event.bytes})
            self._run.log_artifact(artifact, aliases=["latest", f"step-{event.step}"])
        elif isinstance(event, events.Restored) and event.directory:
            self._use_artifact(self._checkpoint_artifact(event.directory, {"step": event.step}))
        elif isinstance(event, events.Initialised):
            self._use_artifact(_build_reference_artifact("weights", strip_url_secrets(event.weights), {}))
        elif isinstance(event, events.Goodput):
            self._run.summary.update({f"elastic/{key}": value for key, value in event.own_fields().items()})

    def _checkpoint_artifact(self, directory: str, metadata: dict[str, Any]) -> Any:
        """Make the artifact that refers to a checkpoint of the W&B run where it lies; nothing is uploaded."""
        return _build_reference_artifact(f"checkpoint-{self._run.id}", f"{self._own_checkpoints}/{directory}", metadata)

    def _use_artifact(self, artifact: Any) -> None:
        """Note in the W&B run that it went on from what an artifact refers to."""
        if self._offline:  # what use_artifact refuses offline, and does itself online
            self._run._log_artifact(artifact, aliases=[], is_user_created=True, use_after_commit=True)
        else:
            self._run.use_artifact(artifact)

    def send_alert(self, alert: Alert) -> None:
        """Send an alert by W&B, which mails it or posts it, as its user has set there."""
        self._run.alert(f"{alert.title}: {self._of.directory.name}"[:63], alert.text, alert.level, 1e-3)

    def send_steps(self, rows: Sequence[Numbers]) -> None:
        """Log the numbers and histograms of committed steps, by their names, on W&B."""
        for row in rows:
            self._run.log({name: build_histogram(x) if isinstance(x, list) else x for name, x in row.items()})
            self._step = int(row["step"])  # type: ignore[arg-type]

    def show_newest_step(self, row: Numbers) -> None:
        """Show numbers of the run's newest step in the summary of the W&B run."""
        self._run.summary.update({f"newest/{name}": row[name] for name in NEWEST if name in row})

    def flush(self) -> None:
        """Log the tables of the W&B run again, if they have new rows and the last time is long ago."""
        if monotonic() - self._logged > _TABLE_SECONDS:
            self._log_tables()

    def _log_tables(self) -> None:
        """Log the newest rows of the W&B run's tables, the events of its journal and the texts of its model."""
        import wandb

        if self._new:
            filled = {name: rows[-_TABLE_ROWS:] for name, rows in self._rows.items() if rows}
            tables = {n: wandb.Table(columns=list(_TABLES[n]), data=filled[n], allow_mixed_types=True) for n in filled}
            self._run.log({**tables, "step": self._step})
        self._logged, self._new = monotonic(), False

    def close(self, status: int | None) -> None:
        """End the W&B run with the launcher's exit status; marks it as preempted if the run will be continued, and
        uploads the rest if online."""
        self._log_tables()
        if status == RESUMABLE:
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if status is None else status)


def _checkpoint_folder(run: SinkRun) -> str:
    """Return the URL of the folder of checkpoints of a run that W&B gets references to."""
    url = strip_url_secrets(run.config["checkpoint"]["url"] or str(run.directory / "checkpoints"))
    return url.rstrip("/") if "://" in url else Path(url).absolute().as_uri()


def _build_reference_artifact(name: str, url: str, metadata: dict[str, Any]) -> Any:
    """Make a W&B artifact of a model that lies at `url`: W&B gets the address alone."""
    import wandb

    artifact = wandb.Artifact(name, type="model", metadata={**metadata, "url": url})
    with suppress(Exception):  # W&B has no package for this protocol, or nothing lies there any more
        artifact.add_reference(url, name="checkpoint", checksum=False)
    if not artifact.manifest.entries:  # without one, all such artifacts would be the same
        from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry

        artifact.manifest.add_entry(ArtifactManifestEntry(path="checkpoint", ref=url, digest=url))  # type: ignore
    return artifact


def build_histogram(counts: list[int]) -> Any:
    """Make W&B's histogram of `counts`, a bin for each; of neighbours together, where W&B has fewer bins."""
    import wandb

    return wandb.Histogram(np_histogram=bin_counts(counts, wandb.Histogram.MAX_LENGTH))


def _stored_wandb_run_id(path: Path) -> str:
    """Return the id of the W&B run, drawn once and kept in the file `path` of the run directory: a restarted driver
    continues its W&B run, and no other run joins it."""
    if not path.exists():
        replace_text(path, secrets.token_hex(4))
    return path.read_text()
