"""A step that a run has taken, or will take: its samples, and the plan that it ran under, also after failures."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from platform.boundary import schema
from platform.boundary.refusals import ConfigError, refuse_all
from platform.boundary.schema import Malformed, OpenMap, Span
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import find_newest_checkpoint
from platform.cluster import run_directory
from platform.config.extensions import import_user_modules
from platform.config.fields import Config
from platform.config.ramps import find_sequence_length, step_sample_range
from platform.data.step_view import TakenStep
from platform.monitor import events
from platform.monitor.json_records import METRICS
from platform.monitor.metrics import MetricsLog
from platform.plan.plan import Plan
from platform.plan.plan_data import plan_digest
from platform.predict.make_plan import make_plan
from platform.predict.replan import replan
from platform.status.seen_run import list_newest_runs

_COUNT = Annotated[int, Span(0, 1 << 50)]
_KEYS = (("samples", tuple[_COUNT, _COUNT]), ("length", _COUNT), ("generation", _COUNT))
_TAKEN = Annotated[dict[str, Any], OpenMap(_KEYS, ("samples",))]


_OPEN = "which rank reads what is not known before the run starts and chooses {}"


def step_facts_from_config(config: Config, step: int, why: str = "") -> TakenStep:
    """Return what training step `step` takes by a configuration. Raises ConfigError if there is no such step."""
    check_step(step, config.train.steps)
    samples, length = step_sample_range(config.train, step), find_sequence_length(config, step)
    if open_ := [*config.plan.search, *(["parallel.data"] if config.parallel.data == -1 else [])]:
        return TakenStep(config, step, samples, length, None, _OPEN.format(", ".join(open_)))
    return TakenStep(config, step, samples, length, make_plan(config), why)


def check_step(step: int, steps: int) -> None:
    """Raise ConfigError, with the nearest legal one, unless a run of so many `steps` has the step to look into."""
    if not 1 <= step <= steps:
        raise ConfigError("step", step, f"must be from 1 to train.steps={steps}", [min(max(1, step), steps)])


def step_of_run(directory: Path, step: int | None, name: str = "") -> TakenStep:
    """Return what a training step of the run in a directory has taken, or is to take; None: the last that was done.
    Raises ConfigError if `directory`, called `name` for people, holds no run that can be read, or no such step."""
    run_name = name or directory
    try:
        config = run_directory.read_configuration(directory)
        if config is None:
            raise ConfigError("run.dir", run_name, "holds no run", list_newest_runs()[:3])
        refuse_all(import_user_modules(config.extend))
        rows: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            rows = MetricsLog.read_rows(directory / METRICS)
        step = (rows[-1]["step"] if rows else 1) if step is None else step
        check_step(step, config.train.steps)
        row = next((row for row in reversed(rows) if row["step"] == step), None)
        if row is None:
            return step_facts_from_config(config, step, f"the run has not done step {step}, and will take this")
        recorded = schema.parse_value(_TAKEN, row)
        generation = recorded.get("generation", 0)
        plan = _rebuild_plan(config, directory, generation)
        why = "" if plan else f"which rank read what is not known: no plan of generation {generation}"
        length = recorded.get("length") or find_sequence_length(config, step)
        return TakenStep(config, step, recorded["samples"], length, plan, why, _read_corpus_digest(config, directory))
    except Malformed as error:
        raise ConfigError("run.dir", run_name, f"is not a run's ({error})") from None
    except OSError as error:
        raise ConfigError("run.dir", run_name, f"cannot be read ({error.strerror})") from None


def _read_corpus_digest(config: Config, directory: Path) -> str:
    """Return the corpus's hash in the newest checkpoint of the run looked into; "" if it has none."""
    place = config.checkpoint.url or str(directory / "checkpoints")
    with suppress(OSError, ConfigError):
        manifest = find_newest_checkpoint(open_storage(place), verifies_bytes=False, quarantines=False).manifest
        return manifest.meta.corpus if manifest else ""
    return ""


def _rebuild_plan(config: Config, directory: Path, generation: int) -> Plan | None:
    """Return the plan of a generation of the run looked into, made again; None if that gives another plan."""
    formed = [
        event for event in run_directory.read_journal(directory)
        if isinstance(event, events.Forming) and event.generation == generation
    ]  # fmt: skip
    if not formed:
        return None
    with suppress(ConfigError):
        plan = make_plan(config)
        if plan.mesh.world_size != formed[-1].world_size or plan_digest(plan) != formed[-1].plan:
            again = replan(config, formed[-1].world_size)
            plan = again.plan if again else plan
        return plan if plan_digest(plan) == formed[-1].plan else None
    return None
