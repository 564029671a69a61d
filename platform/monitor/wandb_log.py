"""Weights & Biases logging, written by the driver alone: offline if there is no API key, and never a prompt."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from platform.boundary.redaction import redact, register_url_secrets
from platform.config.fields import Config

RESUMABLE = 75  # the launcher's exit status of a run that will be continued


class WandbLog:
    """W&B run of a run directory, shared by all its drivers. `where`: text for people that says where it is written.

    W&B's own step counter is never set: it refuses to go back, as a resumed or rolled-back run does.
    """

    def __init__(self, config: Config, run_dir: Path):
        """Start or continue the W&B run: online if there is an API key that the server accepts, else offline; offline
        or disabled if WANDB_MODE says so."""
        with _arguments_redacted():
            self._start(config, run_dir)

    def _start(self, config: Config, run_dir: Path) -> None:
        """Start or continue the W&B run in the mode that WANDB_MODE and the API key allow, and set `where`."""
        import wandb

        wandb_dir = run_dir / "wandb"
        wandb_dir.mkdir(0o700, exist_ok=True)
        settings = wandb.Settings(silent=True, console="off")

        def start(mode: str) -> Any:
            """Begin or continue the run at W&B, online or offline as `mode` says."""
            return wandb.init(
                project=config.monitor.project,
                name=run_dir.name,
                id=_stable_id(wandb_dir / "run-id"),
                dir=run_dir,
                config=redact(config.to_dict()),
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
            self._run = start(mode)
        except wandb.Error as error:  # key refused, or server unreachable: train all the same
            wandb.teardown()  # otherwise it keeps the id of the failed attempt
            mode, why = "offline", str(error).splitlines()[0]
            self._run = start(mode)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        upload = f"; upload with `wandb sync {shlex.quote(str(wandb_dir))}/offline-run-*`"
        self.where = {"offline": f"offline ({why}){upload}", "disabled": f"disabled ({why})"}.get(mode) or self._run.url

    def step(self, values: dict[str, float | list[int]]) -> None:
        """Log the numbers and histograms of a committed step, by their names, on W&B."""
        self._run.log({name: histogram(x) if isinstance(x, list) else x for name, x in values.items()})

    def summary(self, values: dict[str, Any]) -> None:
        """Record numbers of the whole run by name on W&B, which shows them beside the name of the run."""
        self._run.summary.update(values)

    def close(self, status: int) -> None:
        """End the W&B run with the launcher's exit status; marks it as preempted if the run will be continued, and
        uploads the rest if online."""
        if status == RESUMABLE:
            self._run.mark_preempting()
        self._run.finish(exit_code=status)


def histogram(counts: list[int]) -> Any:
    """Make W&B's histogram of `counts`, a bin for each; of neighbours together, where W&B has fewer bins."""
    import numpy as np
    import wandb

    each = -(-len(counts) // wandb.Histogram.MAX_LENGTH)
    bins = [sum(counts[i : i + each]) for i in range(0, len(counts), each)]
    edges = [*range(0, len(counts), each), len(counts)]
    return wandb.Histogram(np_histogram=(np.array(bins), np.array(edges)))


@contextmanager
def _arguments_redacted() -> Iterator[None]:
    """Keep secrets out of sys.argv within the context: W&B records the arguments, also of a user's own script."""
    own = list(sys.argv)
    register_url_secrets(own)
    sys.argv[:] = redact(own)
    try:
        yield
    finally:
        sys.argv[:] = own


def _stable_id(path: Path) -> str:
    """Return the id of the W&B run, drawn once and kept in the file `path` of the run directory: a restarted driver
    continues its W&B run, and no other run joins it."""
    if not path.exists():
        draft = path.with_suffix(".new")
        draft.write_text(secrets.token_hex(4))
        draft.replace(path)
    return path.read_text()
