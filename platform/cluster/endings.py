"""How a run ends: one table from what ended it to the journal's last event, what is said, and the exit status.

Every end passes through `end`, which tells what was saved and how to go on, and raises nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from platform.boundary.redaction import redact
from platform.boundary.terminal import say
from platform.cluster.crew.base.failures import GaveUp, NoPlaces, WorkerFailed
from platform.cluster.crew.base.signals import Stopped
from platform.config.fields import Config
from platform.monitor import Journal, Monitor, goodput, story

if TYPE_CHECKING:
    from platform.cluster.control.controller import Controller
    from platform.cluster.control.saving.checkpoints import Checkpoints
    from platform.cluster.run.commands import Command
    from platform.cluster.run.directory import RunDirectory

DONE, FAILED, STOPPED = 0, 1, 75


class Unsaved(Exception):
    """The last step is done and could not be saved."""


@dataclass
class Known:
    """What is known of a run that ends: more and more while it comes up. `command`: what was typed; `steps`: the
    last one."""

    config: Config
    directory: RunDirectory
    command: Command
    steps: int
    journal: Journal | None = None
    monitor: Monitor | None = None
    checkpoints: Checkpoints | None = None
    controller: Controller | None = None
    status: int = FAILED

    def say(self, text: str) -> None:
        """Tells the user something, wherever the run has got to."""
        (self.monitor.say if self.monitor else say)(text)

    @property
    def done(self) -> int:
        """Updates that this driver's workers had."""
        return self.controller.done if self.controller else 0

    @property
    def worked(self) -> bool:
        """Whether a step was done, though it may have been taken back since."""
        return bool(self.controller and self.controller.worked)

    @property
    def saved(self) -> int:
        """Updates in the newest checkpoint; 0 where there is none."""
        return self.checkpoints.step if self.checkpoints else 0

    @property
    def kept(self) -> str:
        """What is left, for people."""
        return self.checkpoints.kept if self.checkpoints else "nothing was done; the same command does it"

    @property
    def resume(self) -> str:
        """The command that goes on, on a line of its own."""
        return f"\n  {self.command.again(self.checkpoints.resume if self.checkpoints else '')}"


class Ending(NamedTuple):
    """`event`: its name and fields in the journal; `text`: what is said."""

    status: int
    event: dict[str, Any]
    text: str = ""


def _done(error: BaseException | None, known: Known) -> Ending:
    return Ending(DONE, {"event": "done"})


def _unsaved(error: BaseException, known: Known) -> Ending:
    return Ending(FAILED, {"event": "unsaved"}, f"step {known.done} could not be saved: {known.kept}:{known.resume}")


def _stopped(error: BaseException, known: Known) -> Ending:
    """Tells a stop: resumable, unless work was done of which nothing is left."""
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


HOW: tuple[tuple[type, Callable[[Any, Known], Ending]], ...] = (  # the first that fits
    (type(None), _done),
    (Stopped, _stopped),
    (NoPlaces, _no_places),
    (GaveUp, _gave_up),
    (WorkerFailed, _gave_up),
    (Unsaved, _unsaved),
    (BaseException, _unexpected),
)


def end(error: BaseException | None, known: Known) -> int:
    """Journals and says how the run ended, what of it is left and what it cost; returns the exit status."""
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
    """How far the run has come, for the journal's last event."""
    controller = known.controller
    if error is None:
        return {"step": known.steps} | (controller.told() if controller else {})
    return {"step": known.done, "saved": known.saved} | (controller.lost() if controller else {})


def _account(journal: Journal, monitor: Monitor) -> None:
    """Says what failures cost, from the journal, where there were any."""
    try:
        events = journal.events()
        cost = goodput(events)
        told = f"{story(events)}\n{cost}" if cost.failures or cost.transitions else ""
    except Exception as error:  # of the account alone: the run has ended well or badly before
        return monitor.say(f"WARNING: what failures cost cannot be told ({type(error).__name__}: {error})")
    journal.event("goodput", **cost.to_dict())
    monitor.summary(cost.to_dict())
    if told:
        monitor.say(told)


def _write_down(error: BaseException, known: Known) -> str:
    """Puts the traceback where it can be read, and returns where: the run's logs, else standard error."""
    text = redact("".join(traceback.format_exception(error)))
    log = known.directory.path / "logs" / "driver.log"
    try:
        with open(log, "a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\n{text}")
        return str(log)
    except OSError:
        say(text, sys.stderr)
        return "above"
