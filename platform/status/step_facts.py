"""A step that a run has taken, or will take: its samples, and the plan that it ran under, also after failures."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from platform.boundary import schema
from platform.boundary.refusals import ConfigError, refuse_all, violation
from platform.boundary.schema import Malformed, OpenMap, Span
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import find
from platform.cluster import run_directory
from platform.config.extensions import load_extensions
from platform.config.fields import Config
from platform.config.ramps import length_at, samples_of
from platform.data.step_view import TakenStep
from platform.monitor import events
from platform.monitor.json_records import METRICS
from platform.monitor.metrics import MetricsLog
from platform.plan.plan import Plan
from platform.plan.plan_data import digest
from platform.predict.make_plan import make_plan
from platform.predict.replan import replan
from platform.status.seen_run import newest_runs

_COUNT = Annotated[int, Span(0, 1 << 50)]
_TAKEN = Annotated[
    dict[str, Any],
    OpenMap((("samples", tuple[_COUNT, _COUNT]), ("length", _COUNT), ("generation", _COUNT)), ("samples",)),
]


_OPEN = "which rank reads what is not known before the run starts and chooses {}"


def configured_step(config: Config, step: int, why: str = "") -> TakenStep:
    """Return what training step `step` takes by a configuration. Raises ConfigError if there is no such step."""
    check_step(step, config.train.steps)
    samples, length = samples_of(config.train, step), length_at(config, step)
    if open_ := [*config.plan.search, *(["parallel.data"] if config.parallel.data == -1 else [])]:
        return TakenStep(config, step, samples, length, None, _OPEN.format(", ".join(open_)))
    return TakenStep(config, step, samples, length, make_plan(config), why)


def check_step(step: int, steps: int) -> None:
    """Raise ConfigError, with the nearest legal one, if a run of so many `steps` has no such training step."""
    if not 1 <= step <= steps:
        raise ConfigError(violation("step", step, f"must be from 1 to train.steps={steps}", [min(max(1, step), steps)]))


def taken_step(directory: Path, step: int | None, name: str = "") -> TakenStep:
    """Return what a training step of the run in a directory has taken, or is to take; None: the last that was done.
    Raises ConfigError if `directory`, called `name` for people, holds no run that can be read, or no such step."""
    shown = name or directory
    try:
        config = run_directory.configuration(directory)
        if config is None:
            raise ConfigError(violation("run.dir", shown, "holds no run", newest_runs()[:3]))
        refuse_all(load_extensions(config.extend))
        rows: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            rows = MetricsLog.read(directory / METRICS)
        step = (rows[-1]["step"] if rows else 1) if step is None else step
        check_step(step, config.train.steps)
        row = next((row for row in reversed(rows) if row["step"] == step), None)
        if row is None:
            return configured_step(config, step, f"the run has not done step {step}, and will take this")
        found = schema.read(_TAKEN, row)
        plan = _plan_then(config, directory, found.get("generation", 0))
        why = "" if plan else f"which rank read what is not known: no plan of generation {found.get('generation', 0)}"
        length = found.get("length") or length_at(config, step)
        return TakenStep(config, step, found["samples"], length, plan, why, _corpus_of(config, directory))
    except Malformed as error:
        raise ConfigError(violation("run.dir", shown, f"is not a run's ({error})")) from None
    except OSError as error:
        raise ConfigError(violation("run.dir", shown, f"cannot be read ({error.strerror})")) from None


def _corpus_of(config: Config, directory: Path) -> str:
    """Return the hash of the corpus that the newest checkpoint of a run was trained on; "" if it has none."""
    place = config.checkpoint.url or str(directory / "checkpoints")
    with suppress(OSError, ConfigError):
        found = find(open_storage(place), deep=False, mark=False).manifest
        return found.meta.corpus if found else ""
    return ""


def _plan_then(config: Config, directory: Path, generation: int) -> Plan | None:
    """Return the plan under which a generation of a run worked, made again; None if that gives another plan."""
    formed = [
        event for event in run_directory.journal(directory)
        if isinstance(event, events.Forming) and event.generation == generation
    ]  # fmt: skip
    if not formed:
        return None
    with suppress(ConfigError):
        plan = make_plan(config)
        if plan.mesh.size != formed[-1].world_size or digest(plan) != formed[-1].plan:
            again = replan(config, formed[-1].world_size)
            plan = again.plan if again else plan
        return plan if digest(plan) == formed[-1].plan else None
    return None
