"""Endings of a run: one table from the exception that ended it to the journal's last event, the message and the exit
status.

Every end but a refused configuration goes through `end`, which reports what was saved and how to continue, and raises
nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from platform.boundary.redaction import redact
from platform.boundary.terminal import print_line
from platform.cluster.crew.base.failures import GaveUp, NoPlaces, WorkerFailed
from platform.cluster.crew.base.signals import Stopped
from platform.config.fields import Config
from platform.monitor import Journal, Monitor, goodput, story

if TYPE_CHECKING:
    from platform.cluster.control.controller import Controller
    from platform.cluster.control.saving.checkpoints import Checkpoints
    from platform.cluster.run.callbacks import CallbackGuard
    from platform.cluster.run.commands import Command
    from platform.cluster.run.directory import RunDirectory

DONE, FAILED, STOPPED = 0, 1, 75  # exit statuses; 75: the same command continues


class Unsaved(Exception):
    """Signals that the last step is done and could not be saved."""


@dataclass
class Known:
    """State of a run that its ending needs; the driver fills it in as the run comes up. `command`: the command line;
    `steps`: the number of the last step; `guard`: the callbacks."""

    config: Config
    directory: RunDirectory
    command: Command
    steps: int
    guard: CallbackGuard
    journal: Journal | None = None
    monitor: Monitor | None = None
    checkpoints: Checkpoints | None = None
    controller: Controller | None = None
    status: int = FAILED

    def say(self, text: str) -> None:
        """Send a message to the user: through the monitor if it is open, else to the terminal."""
        (self.monitor.say if self.monitor else print_line)(text)

    @property
    def done(self) -> int:
        """Return the step that this driver's workers have reached, trained or resumed from; 0 for none."""
        return self.controller.done if self.controller else 0

    @property
    def worked(self) -> bool:
        """Return True if this driver completed a step, even if it was rolled back since."""
        return bool(self.controller and self.controller.worked)

    @property
    def saved(self) -> int:
        """Return the step of the newest checkpoint, 0 for none."""
        return self.checkpoints.step if self.checkpoints else 0

    @property
    def kept(self) -> str:
        """Return a readable statement of what is saved and how to continue."""
        return self.checkpoints.kept if self.checkpoints else "nothing was done; the same command does it"

    @property
    def resume(self) -> str:
        """Return the command that continues the run, indented on a line of its own."""
        return f"\n  {self.command.again(self.checkpoints.resume if self.checkpoints else '')}"


class Ending(NamedTuple):
    """Report of an end. `event`: name and fields for the journal; `text`: message to the user."""

    status: int
    event: dict[str, Any]
    text: str = ""


def _done(error: BaseException | None, known: Known) -> Ending:
    return Ending(DONE, {"event": "done"})


def _unsaved(error: BaseException, known: Known) -> Ending:
    return Ending(FAILED, {"event": "unsaved"}, f"step {known.done} could not be saved: {known.kept}:{known.resume}")


def _stopped(error: BaseException, known: Known) -> Ending:
    """Describe a requested stop: status STOPPED (resumable), or FAILED if steps were done and none is saved."""
    if not (known.worked or known.saved):
        event = {"event": "drained", "signal": str(error)}
        return Ending(STOPPED, event, f"stopped by {error}: nothing was done; the same command does it")
    lost = max(0, known.done - known.saved)
    off = "" if known.config.checkpoint.on_stop else ", as checkpoint.on_stop=false says"
    how = f" ({lost} step{'' if lost == 1 else 's'} not saved{off})" if lost else ""
    where = f"after step {known.done}" if known.done else "before its first step"
    event = {"event": "drained" if known.saved else "stopped", "signal": str(error)}
    return Ending(STOPPED if known.saved else FAILED, event, f"stopped by {error} {where}{how}: {known.kept}")


def _no_places(error: BaseException, known: Known) -> Ending:
    text = f"{error}; {known.kept}" if known.checkpoints else f"{error}; the same command tries again"
    return Ending(STOPPED, {"event": "no_places", "cause": str(error)}, text)


def _gave_up(error: BaseException, known: Known) -> Ending:
    text = f"{error}\nstopped after step {known.done}: {known.kept}:{known.resume}"
    return Ending(FAILED, {"event": "gave_up", "cause": str(error)}, text)


def _unexpected(error: BaseException, known: Known) -> Ending:
    cause = f"{type(error).__name__}: {error}".partition("\n")[0]
    where = _write_down(error, known)
    text = f"unexpected: {cause} (where it happened: {where})\nstopped after step {known.done}: {known.kept}"
    return Ending(FAILED, {"event": "gave_up", "cause": cause}, f"{text}:{known.resume}")


HOW: tuple[tuple[type, Callable[[Any, Known], Ending]], ...] = (  # the first whose type matches ends the run
    (type(None), _done),
    (Stopped, _stopped),
    (NoPlaces, _no_places),
    (GaveUp, _gave_up),
    (WorkerFailed, _gave_up),
    (Unsaved, _unsaved),
    (BaseException, _unexpected),
)


def end(error: BaseException | None, known: Known) -> int:
    """Report to journal and user how the run ended, what is saved and what failures cost; return the exit status."""
    if known.checkpoints and error:
        known.checkpoints.confirm()
    ending = next(how for kind, how in HOW if isinstance(error, kind))(error, known)
    known.status = ending.status
    if known.journal:
        known.journal.event(**ending.event | _state(error, known))
    if ending.text:
        known.say(ending.text)
    if known.journal and known.monitor:
        _account(known.journal, known.monitor)
    return ending.status


def _state(error: BaseException | None, known: Known) -> dict[str, Any]:
    """Return the progress of the run, for the journal's last event: steps done, saved and lost, useful seconds."""
    controller = known.controller
    if error is None:
        return {"step": known.steps} | (controller.told() if controller else {})
    return {"step": known.done, "saved": known.saved} | (controller.lost() if controller else {})


def _account(journal: Journal, monitor: Monitor) -> None:
    """Report goodput and the cost of failures, computed from the journal; tell the user if there were any."""
    try:
        events = journal.events()
        cost = goodput(events)
        told = f"{story(events)}\n{cost}" if cost.failures or cost.transitions else ""
    except Exception as error:  # affects the account alone: the end of the run is already recorded
        return monitor.say(f"WARNING: what failures cost cannot be told ({type(error).__name__}: {error})")
    journal.event("goodput", **cost.to_dict())
    monitor.summary(cost.to_dict())
    if told:
        monitor.say(told)


def _write_down(error: BaseException, known: Known) -> str:
    """Write the traceback to the run's logs, else to standard error; return the path, or "above"."""
    text = redact("".join(traceback.format_exception(error)))
    log = known.directory.path / "logs" / "driver.log"
    try:
        with open(log, "a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\n{text}")
        return str(log)
    except OSError:
        print_line(text, sys.stderr)
        return "above"
