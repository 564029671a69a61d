"""State of a job as its run directory has it: whether it runs, which lives it had, its last step, what happened last.

The run directory is all that a job's lives have in common, under any scheduler; so nothing is asked of Slurm or
Kubernetes, and a job of last year is shown as one of today.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.boundary import documents
from platform.boundary.command_line import typed_command
from platform.boundary.refusals import ConfigError, as_refusal, violation
from platform.boundary.schema import Malformed
from platform.cluster.run import traces
from platform.config.durations import hms
from platform.jobs.look.logs import log_files
from platform.jobs.retries import CLOSED, ENDED, read_drivers, spent
from platform.monitor.records import events
from platform.monitor.records.journal_event import End, JournalEvent
from platform.monitor.records.records import JOURNAL, METRICS
from platform.monitor.verdict.evidence import ALIVE, GONE, STOPPED, UNKNOWN
from platform.plan.language.numbers import count_of
from platform.status.owner import owner_state

_ENDS = {0: "done", 1: "gave up", 2: "refused", 75: "stopped, and can go on", 143: "told to end, and saved"}
_HOW = {GONE: "lost: it has no end, and is gone", STOPPED: "stopped by a signal, and without an end"} | dict.fromkeys(
    (ALIVE, UNKNOWN), "running, as it has no end"
)
_SHOWN = 20  # lives, the newest


def status_lines(run_dir: Path) -> Iterator[str]:
    """Yield the lines of `python -m platform.jobs status`. Raises ConfigError if the directory holds no run, or what
    none writes."""
    with as_refusal("run.dir", run_dir, OSError, Malformed, why="cannot be read ({})"):
        config = traces.configuration(run_dir)
        journal, drivers = list(traces.journal(run_dir)), read_drivers(run_dir)
        step = traces.steps(run_dir)
    if config is None and not journal and not drivers:
        raise ConfigError(violation("run.dir", run_dir, "holds no run", ["what run.dir= said in the job"]))
    lives = traces.lives(journal)
    yield f"run directory: {run_dir}"
    yield f"state: {_state(run_dir, lives, drivers)}"
    saved = [event for event in journal if isinstance(event, events.Checkpoint)]
    newest = f"{saved[-1].step} ({saved[-1].directory})" if saved else "none"
    yield f"step: {step}{f' of {config.train.steps}' if config else ''}; newest checkpoint: {newest}"
    if drivers:
        yield f"retries spent since the job was last closed: {spent(drivers)}"
    if lives:
        yield f"lives: {len(lives)}{f', of which the last {_SHOWN}' if len(lives) > _SHOWN else ''}"
        before = ""
        for number, life in [*enumerate(lives, 1)][-_SHOWN:]:
            yield _line(number, life, before)
            before = _code(life) or before
    yield from _last_failure(journal)
    found = log_files(run_dir)
    yield f"logs: {count_of(len(found), 'file')} in {run_dir / 'logs'}; {typed_command('jobs')} logs {run_dir}"


def _code(life: Sequence[JournalEvent]) -> str:
    """Return the hash of the package's sources that a job's driver ran, from its events; "" if not recorded."""
    return next(((e.code or {}).get("platform", "") for e in life if isinstance(e, events.Starting)), "")


def _end(life: Sequence[JournalEvent]) -> tuple[float | None, str]:
    """Return when and, in words, how a driver ended, from its events; (None, "no end") if it has not."""
    for event in life:
        if isinstance(event, End):
            cause = getattr(event, "cause", "") or getattr(event, "signal", "")
            return event.time, f"{event.word}{f': {cause}' if cause else ''}"
    return None, "no end"


def _state(run_dir: Path, lives: Sequence[Sequence[JournalEvent]], drivers: Sequence[dict[str, Any]]) -> str:
    """Return in words whether a driver trains the run now and, if not, how the last one ended."""
    last = drivers[-1] if drivers else {}
    if last.get("event") == CLOSED and "status" in last:
        return f"ended with status {last['status']} ({_ENDS.get(last['status'], 'lost')}), {_since(last['time'])}"
    if last.get("event") == ENDED:
        return f"between two lives: a driver ended with status {last.get('status')} {_since(last['time'])}"
    ended, end = _end(lives[-1]) if lives else (None, "")
    if ended is not None:
        return f"ended: {end}, {_since(ended)}"
    if not lives and not last:
        return "nothing has started"
    with suppress(OSError):
        owner = documents.one_line(documents.read_bytes(run_dir / traces.LOCK))
        return f"{_HOW[owner_state(owner)]}: {owner}, which wrote last {_ago(run_dir)}"
    return f"its driver has no end, and wrote last {_ago(run_dir)}"


def _ago(run_dir: Path) -> str:
    """Return in words how long ago the run in a run directory last wrote something."""
    times = []
    for name in (JOURNAL, METRICS):
        with suppress(OSError):
            times.append((run_dir / name).stat().st_mtime)
    return _since(max(times, default=0.0))


def _since(moment: float) -> str:
    """Return in words how long ago a moment was, given in seconds since the epoch; 0: never."""
    seconds = max(0, int(time.time() - moment))
    return f"{hms(seconds)} ago" if moment else "never"


def _line(number: int, life: Sequence[JournalEvent], code_before: str) -> str:
    """Return the line of `platform.jobs status` on one driver, from its journal events: number, start, duration, last
    step, end, nodes and failures. `code_before`: hash of the sources that the driver before it ran, "" if not known."""
    (ended, end), code = _end(life), _code(life)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(life[0].time))
    lasted = "no end" if ended is None else hms(int(ended - life[0].time))
    step = max(getattr(event, "step", 0) or 0 for event in life)
    formed = [event for event in life if isinstance(event, events.Formed)]
    nodes = len({worker.get("node") for worker in formed[-1].workers}) if formed else 0
    failures = sum(isinstance(event, events.Failure) for event in life)
    said = [count_of(nodes, "node")] if nodes else []
    said += [count_of(failures, "failure")] if failures else []
    said += [f"other code: {code}"] if code_before and code not in ("", code_before) else []
    return f"  {number}  {began}  {lasted}  to step {step}  {end}{''.join(f', {s}' for s in said)}"


def _last_failure(journal: Sequence[JournalEvent]) -> Iterator[str]:
    """Yield a line on the last failure of a worker, with node and cause, if there was one."""
    found = [event for event in journal if isinstance(event, events.Failure)]
    if found:
        last = found[-1]
        where = f"; {last.log}" if last.log else ""
        cause = documents.one_line(last.cause)
        yield f"last failure: worker {last.number} on {last.node}, {_since(last.time)}: {last.kind}: {cause}{where}"
