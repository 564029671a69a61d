"""Endings of a run: one table from the exception that ended it to the journal's last event, the message and the exit
status.

Every end but a refused configuration goes through `end`, which reports the saved state and how to continue, and raises
nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from platform.boundary.documents import error_line
from platform.boundary.redaction import redact
from platform.boundary.terminal import print_line
from platform.cluster.crew.failures import GaveUp, NoPlaces, WorkerFailed
from platform.cluster.crew.signals import Stopped
from platform.cluster.shown_commands import Phases, phase_table
from platform.config.fields import Config
from platform.monitor import Journal, MetricsRow, RunMonitor, cost_line, events, goodput, story
from platform.plan.layout import count_of

if TYPE_CHECKING:
    from platform.cluster.callbacks import CallbackGuard
    from platform.cluster.control.checkpoints import Checkpoints
    from platform.cluster.control.controller import Controller
    from platform.cluster.run_directory import RunDirectory
    from platform.cluster.shown_commands import Command

DONE, FAILED, STOPPED = 0, 1, 75  # exit statuses; 75: the same command continues


class Unsaved(Exception):
    """Signals that the run's last training step is done and that its state could not be saved."""


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
    phases: Phases
    journal: Journal | None = None
    monitor: RunMonitor | None = None
    checkpoints: Checkpoints | None = None
    controller: Controller | None = None
    status: int = FAILED

    def say(self, text: str) -> None:
        """Send a message on the run to the user: through the monitor if it is open, else to the terminal."""
        (self.monitor.say if self.monitor else print_line)(text)

    def event(self, event: events.JournalEvent) -> None:
        """Note an event that the run's journal has recorded, and pass it to the user's callback."""
        self.phases.event(event.word)
        self.guard.event(event)

    def step(self, row: MetricsRow) -> None:
        """Note a training step that the run has committed, and pass its row of metrics to the user's callback."""
        self.phases.step()
        self.guard.step(row)

    @property
    def done(self) -> int:
        """Return the last training step in the state of this driver's workers, trained or resumed from; 0 for none."""
        return self.controller.done if self.controller else 0

    @property
    def worked(self) -> bool:
        """Return True if this driver has committed a training step, even if it was rolled back since."""
        return bool(self.controller and self.controller.worked)

    @property
    def saved(self) -> int:
        """Return the training step of the run's newest checkpoint, 0 for none."""
        return self.checkpoints.step if self.checkpoints else 0

    @property
    def kept(self) -> str:
        """Return a sentence for the user at the end of a run: its saved state, and how to continue."""
        return self.checkpoints.kept if self.checkpoints else "nothing was done; the same command does it"

    @property
    def resume(self) -> str:
        """Return the command line that continues the run, for the user to copy: indented, on a line of its own."""
        return f"\n  {self.command.again(self.checkpoints.resume if self.checkpoints else '')}"


Ending = tuple[events.End, str]  # the journal's event, still without the run's progress, and the message to the user


def _done(error: None, state: DriverState) -> Ending:
    """Describe the end of a run that did its last step: the journal's event, and no message."""
    return events.Done(), ""


def _unsaved(error: Unsaved, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run whose last step is done and could not be saved."""
    return events.Unsaved(), f"step {state.done} could not be saved: {state.kept}:{state.resume}"


def _stopped(error: Stopped, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run by a requested stop: as resumable (Drained) unless steps were
    done and none is saved (Stopped)."""
    if not (state.worked or state.saved):
        return events.Drained(signal=str(error)), f"stopped by {error}: nothing was done; the same command does it"
    lost = max(0, state.done - state.saved)
    off = "" if state.config.checkpoint.on_stop else ", as checkpoint.on_stop=false says"
    how = f" ({count_of(lost, 'step')} not saved{off})" if lost else ""
    where = f"after step {state.done}" if state.done else "before its first step"
    kind = events.Drained if state.saved else events.Stopped
    return kind(signal=str(error)), f"stopped by {error} {where}{how}: {state.kept}"


def _no_places(error: NoPlaces, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run for whose workers the cluster had no room."""
    return events.NoPlaces(
        cause=str(error)
    ), f"{error}; {state.kept if state.checkpoints else 'the same command tries again'}"


def _gave_up(error: GaveUp | WorkerFailed, state: DriverState) -> Ending:
    """Describe, for journal and user, the end of a run by a failure that it could not survive."""
    text = f"{error}\nstopped after step {state.done}: {state.kept}:{state.resume}"
    return events.GaveUp(cause=str(error)), text


def _unexpected(error: BaseException, state: DriverState) -> Ending:
    """Describe, for journal and user, a run's end by an unforeseen exception; write its traceback to a log."""
    cause = error_line(error)
    where = _write_down(error, state)
    text = f"unexpected: {cause} (where it happened: {where})\nstopped after step {state.done}: {state.kept}"
    return events.GaveUp(cause=cause), f"{text}:{state.resume}"


ENDINGS: tuple[tuple[type, Callable[[Any, DriverState], Ending]], ...] = (  # the first whose type matches ends the run
    (type(None), _done),
    (Stopped, _stopped),
    (NoPlaces, _no_places),
    (GaveUp, _gave_up),
    (WorkerFailed, _gave_up),
    (Unsaved, _unsaved),
    (BaseException, _unexpected),
)
STATUS: dict[type[events.End], int] = {events.Done: DONE, events.Drained: STOPPED, events.NoPlaces: STOPPED}


def end(error: BaseException | None, state: DriverState) -> int:
    """Report to journal and user how a run ended, its saved state and the cost of failures; return the exit status.
    `error`: the exception that ended the run, None if its last step is done and saved."""
    if state.checkpoints and error:
        state.checkpoints.confirm()
    event, text = next(how for kind, how in ENDINGS if isinstance(error, kind))(error, state)
    state.status = STATUS.get(type(event), FAILED)
    if state.journal:
        state.journal.write(replace(event, **_progress(error, state)))
    if text:
        state.say(text)
    if state.controller:
        state.controller.forecast.report()
    if state.journal and state.monitor:
        _account(state.journal, state.monitor)
        if state.config.monitor.timing:
            _report_timing(state.phases, state.journal, state.monitor)
    return state.status


def _progress(error: BaseException | None, state: DriverState) -> dict[str, Any]:
    """Return the progress fields of the journal's `End` event: steps done, saved and lost, useful and lost seconds."""
    controller = state.controller
    useful = {"useful_seconds": controller.take_useful_seconds()} if controller else {}
    if error is None:
        return {"step": state.done, **useful}
    lost = dict(zip(("steps_lost", "lost_seconds"), controller.give_up_unsaved(), strict=True)) if controller else {}
    return {"step": state.done, "saved": state.saved, **lost, **useful}


def _account(journal: Journal, monitor: RunMonitor) -> None:
    """Report the run's goodput and the cost of its failures, computed from its journal: in the journal and to the
    monitor, and to the user if there were failures or re-forming."""
    try:
        happened = journal.events()
        cost = goodput(happened)
        text = f"{story(happened)}\n{cost_line(cost)}" if cost.failures or cost.transitions else ""
    except Exception as error:  # affects the account alone: the end of the run is already recorded
        return monitor.say(f"WARNING: what failures cost cannot be told ({error_line(error)})")
    journal.write(cost)
    monitor.summary(cost.own())
    if text:
        monitor.say(text)


def _report_timing(phases: Phases, journal: Journal, monitor: RunMonitor) -> None:
    """Report to journal and user how long each phase of the run's start and end took; the run ends with this."""
    phases.reach("ended")
    reached: dict[str, Any] = dict(phases.seconds)
    journal.write(events.Timing(**reached))
    monitor.say(phase_table(phases.seconds))


def _write_down(error: BaseException, state: DriverState) -> str:
    """Write the traceback of the exception that ended the run to its logs/driver.log, or to standard error if that
    fails; return the file's path, or "above"."""
    text = redact("".join(traceback.format_exception(error)))
    log = state.directory.path / "logs" / "driver.log"
    try:
        with open(log, "a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\n{text}")
        return str(log)
    except OSError:
        print_line(text, sys.stderr)
        return "above"
