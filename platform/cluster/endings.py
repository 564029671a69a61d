"""Endings of a run: one table from the exception that ended it to the journal's last event, the message and the exit
status.

Every end but a refused configuration goes through `report_end`, which reports the saved state and how to continue, and
raises nothing.
"""

from __future__ import annotations

import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from platform.boundary.documents import error_line
from platform.boundary.redaction import redact_secrets
from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import print_line
from platform.boundary.world_faults import UNAVAILABLE, is_external_fault
from platform.cluster.crew.failures import ClusterLost, GaveUp, NoPlaces, WorkerFailed
from platform.cluster.crew.signals import Stopped
from platform.cluster.shown_commands import PhaseTimes, phase_table
from platform.config.fields import Config
from platform.monitor import Journal, MetricsRow, RunMonitor, compute_goodput, cost_line, events, tell_story
from platform.plan.layout import format_count

if TYPE_CHECKING:
    from platform.cluster.callbacks import CallbackGuard
    from platform.cluster.control.checkpoints import Checkpoints
    from platform.cluster.control.controller import Controller
    from platform.cluster.run_directory import RunDirectory
    from platform.cluster.shown_commands import Command

DONE, FAILED, STOPPED = 0, 1, 75  # exit statuses; 75: the same command continues; beside them UNAVAILABLE


class Unsaved(Exception):
    """Signals that the run's last training step is done and that its state could not be saved."""

    of_world = True


@dataclass
class DriverState:
    """State of a run's driver, from which its end is reported; it is filled in as the run starts. `command`: the
    command line that started it; `steps`: the number of the last step; `guard`: calls the user's callbacks; `phases`:
    times at which it reached each phase; `status`: exit status."""

    config: Config
    directory: RunDirectory
    command: Command
    steps: int
    guard: CallbackGuard
    phases: PhaseTimes
    journal: Journal | None = None
    monitor: RunMonitor | None = None
    checkpoints: Checkpoints | None = None
    controller: Controller | None = None
    status: int = FAILED

    def say(self, text: str) -> None:
        """Send a message on the run to the user: through the monitor if it is open, else to the terminal."""
        (self.monitor.say if self.monitor else print_line)(text)

    def note_event(self, event: events.JournalEvent) -> None:
        """Note an event that the run's journal has recorded, and pass it to the user's callback."""
        self.phases.note_event(event.word)
        self.guard.call_on_event(event)

    def note_step(self, row: MetricsRow) -> None:
        """Note a training step that the run has committed, and pass its row of metrics to the user's callback."""
        self.phases.note_last_step()
        self.guard.call_on_step(row)

    @property
    def steps_done(self) -> int:
        """Return the last step that this driver's run has, at its end or so far, trained or resumed; 0 for none."""
        return self.controller.done if self.controller else 0

    @property
    def has_worked(self) -> bool:
        """Return True if this driver, as it ends, has committed any step, even if it was rolled back since."""
        return bool(self.controller and self.controller.worked)

    @property
    def newest_saved_step(self) -> int:
        """Return the step of the newest checkpoint that the driver leaves at its end, 0 for none."""
        return self.checkpoints.step if self.checkpoints else 0

    @property
    def resume_sentence(self) -> str:
        """Return a sentence for the user at a driver's end: the run's saved state, and how to continue."""
        return self.checkpoints.resume_sentence if self.checkpoints else "nothing was done; the same command does it"

    @property
    def resume_command(self) -> str:
        """Return the command line that continues the run, for the user to copy: indented, on a line of its own."""
        return f"\n  {self.command.resume_line(self.checkpoints.resume_override if self.checkpoints else '')}"


Ending = tuple[events.End, str]  # the journal's event, still without the run's progress, and the message to the user


def _describe_done(error: None, state: DriverState) -> Ending:
    """Describe the end of a run that did its last step: the journal's event, and no message."""
    return events.Done(), ""


def _describe_unsaved(error: Unsaved, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run whose last step is done and could not be saved."""
    text = f"step {state.steps_done} could not be saved: {state.resume_sentence}"
    return events.Unsaved(), f"{text}:{state.resume_command}"


def _describe_stop(error: Stopped, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run by a requested stop: as resumable (Drained) unless steps were
    done and none is saved (Stopped)."""
    if not (state.has_worked or state.newest_saved_step):
        return events.Drained(signal=str(error)), f"stopped by {error}: nothing was done; the same command does it"
    lost = max(0, state.steps_done - state.newest_saved_step)
    off = "" if state.config.checkpoint.on_stop else ", as checkpoint.on_stop=false says"
    how = f" ({format_count(lost, 'step')} not saved{off})" if lost else ""
    where = f"after step {state.steps_done}" if state.steps_done else "before its first step"
    kind = events.Drained if state.newest_saved_step else events.Stopped
    return kind(signal=str(error)), f"stopped by {error} {where}{how}: {state.resume_sentence}"


def _describe_no_places(error: NoPlaces, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run for whose workers the cluster had no room."""
    hint = state.resume_sentence if state.checkpoints else "the same command tries again"
    kind = events.ClusterLost if isinstance(error, ClusterLost) else events.NoPlaces
    return kind(cause=str(error)), f"{error}; {hint}"


def _describe_give_up(error: GaveUp | WorkerFailed | ConfigError, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run by a failure that it could not survive."""
    text = f"{error}\nstopped after step {state.steps_done}: {state.resume_sentence}:{state.resume_command}"
    return events.GaveUp(cause=str(error)), text


def _describe_unexpected(error: BaseException, state: DriverState) -> Ending:
    """Describe, for journal and user, a run's end by an unforeseen exception; write its traceback to a log."""
    cause = _describe_cause(error)
    where = _log_traceback(error, state)
    stopped = f"stopped after step {state.steps_done}: {state.resume_sentence}:{state.resume_command}"
    return events.GaveUp(cause=cause), f"unexpected: {cause} (where it happened: {where})\n{stopped}"


def _describe_cause(error: BaseException) -> str:
    """Return an unforeseen exception in one line, with what limits the driver's memory if it got no more."""
    if not isinstance(error, MemoryError):
        return error_line(error)
    soft = {"-d": resource.getrlimit(resource.RLIMIT_DATA)[0], "-v": resource.getrlimit(resource.RLIMIT_AS)[0]}
    limits = [f"ulimit {flag} {size >> 10}" for flag, size in soft.items() if size != resource.RLIM_INFINITY]
    why = " and ".join(limits) or "the machine has none left"
    return f"{error_line(error).rstrip(': ')}: this process got no more memory ({why})"


ENDINGS: tuple[tuple[type, Callable[[Any, DriverState], Ending]], ...] = (  # the first whose type matches ends the run
    (type(None), _describe_done),
    (Stopped, _describe_stop),
    (NoPlaces, _describe_no_places),
    (GaveUp, _describe_give_up),
    (WorkerFailed, _describe_give_up),
    (ConfigError, _describe_give_up),  # a fault of the world, in one line
    (Unsaved, _describe_unsaved),
    (BaseException, _describe_unexpected),
)
STATUS: dict[type[events.End], int] = {
    events.Done: DONE,
    **dict.fromkeys((events.Drained, events.NoPlaces, events.ClusterLost), STOPPED),
}


def report_end(error: BaseException | None, state: DriverState) -> int:
    """Report to journal and user how a run ended, its saved state and the cost of failures; return the exit status.
    `error`: the exception that ended the run, None if its last step is done and saved."""
    if state.checkpoints and error:
        state.checkpoints.confirm_newest()
    event, text = next(how for kind, how in ENDINGS if isinstance(error, kind))(error, state)
    state.status = STATUS.get(type(event), UNAVAILABLE if is_external_fault(error) else FAILED)
    if state.journal:
        state.journal.write(replace(event, **_end_event_fields(error, state)))
    if text:
        state.say(text)
    if state.controller:
        state.controller.forecast.report_typical_step()
    if state.journal and state.monitor:
        _report_failure_costs(state.journal, state.monitor)
        if isinstance(error, Stopped) and state.checkpoints and state.newest_saved_step and state.command.alone:
            state.say(state.checkpoints.describe_newest(state.newest_saved_step))
            state.say(f"next:{state.resume_command}  # go on")
        if state.config.monitor.timing:
            _report_run_phases(state.phases, state.journal, state.monitor)
    return state.status


def _end_event_fields(error: BaseException | None, state: DriverState) -> dict[str, Any]:
    """Return the progress fields of the journal's `End` event: steps done, saved and lost, useful and lost seconds."""
    controller = state.controller
    useful = {"useful_seconds": controller.take_unreported_seconds()} if controller else {}
    if error is None:
        return {"step": state.steps_done, **useful}
    discarded = controller.discard_unsaved_steps() if controller else ()
    lost = dict(zip(("steps_lost", "lost_seconds"), discarded, strict=False))
    return {"step": state.steps_done, "saved": state.newest_saved_step, **lost, **useful}


def _report_failure_costs(journal: Journal, monitor: RunMonitor) -> None:
    """Report the run's goodput and the cost of its failures, computed from its journal: in the journal and to the
    monitor, and to the user if there were failures or re-forming."""
    try:
        happened = journal.read_events()
        cost = compute_goodput(happened)
        text = f"{tell_story(happened)}\n{cost_line(cost)}" if cost.failures or cost.transitions else ""
    except Exception as error:  # affects the account alone: the end of the run is already recorded
        return monitor.say(f"WARNING: what failures cost cannot be told ({error_line(error)})")
    journal.write(cost)
    monitor.record_summary(cost.own_fields())
    if text:
        monitor.say(text)


def _report_run_phases(phases: PhaseTimes, journal: Journal, monitor: RunMonitor) -> None:
    """Report to journal and user how long each phase of the run's start and end took; the run ends with this."""
    phases.reach_phase("ended")
    reached: dict[str, Any] = dict(phases.seconds)
    journal.write(events.Timing(**reached))
    monitor.say(phase_table(phases.seconds))


def _log_traceback(error: BaseException, state: DriverState) -> str:
    """Write the traceback of the exception that ended the run to its logs/driver.log, or to standard error if that
    fails; return the file's path, or "above"."""
    text = redact_secrets("".join(traceback.format_exception(error)))
    log = state.directory.path / "logs" / "driver.log"
    try:
        with open(log, "a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\n{text}")
        return str(log)
    except OSError:
        print_line(text, sys.stderr)
        return "above"
