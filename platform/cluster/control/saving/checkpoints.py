"""The driver's side of checkpoints: when and how a run saves, and what it restores from storage."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import Any

from platform.boundary.redaction import redact
from platform.checkpoint.storage.catalogue import find, quarantine
from platform.checkpoint.storage.lease import Lease
from platform.checkpoint.storage.manifest import Meta
from platform.checkpoint.storage.report import FileReport
from platform.checkpoint.storage.saver import Saver
from platform.checkpoint.storage.storage import open_storage
from platform.cluster.control.saving.cadence import Cadence
from platform.cluster.crew.base.crew import Crew
from platform.cluster.crew.base.failures import GaveUp
from platform.cluster.run.origin import Origin, origin, traced
from platform.config.fields import Config, ConfigError, short_hash, violation
from platform.config.identity import identity
from platform.monitor import Journal
from platform.monitor.records import events
from platform.plan.core.plan import Plan
from platform.plan.core.plan_data import digest as plan_digest
from platform.train.protocol.answers import Unrestored, Unwritten
from platform.train.recovery import urls
from platform.train.recovery.proof import versions

POLL_SECONDS = 0.01
WAIT_SECONDS = 1.0  # per call, for workers that write: such a call has no other limit
FAILURES = 3  # failed saves in a row, over at least elastic.wait seconds, after which the run gives up

_NEWEST = ("auto", "must")  # values of checkpoint.resume under which a run resumes from its own newest checkpoint

Reports = Sequence[FileReport | Unwritten]  # by rank


class Checkpoints:
    """Saves, finds and restores the checkpoints of one run. `step`: updates in the newest good checkpoint that the run
    resumed from or made, 0 if there is none; `plan`: the plan under which the saved state was computed.

    Methods that call the crew raise WorkerFailed, and GaveUp once another driver has taken over the run.
    """

    def __init__(self, config: Config, plan: Plan, found: Origin | None, journal: Journal, say: Callable[[str], None]):
        self._config, self.plan, self._origin, self._journal, self._say = config, plan, found, journal, say
        self._storage = open_storage(urls.home(config))
        c, owner = config.checkpoint, f"process {os.getpid()} on {socket.gethostname()}"
        lease = Lease.take(self._storage, owner) if urls.saves(config) else None
        self._cadence = Cadence(c.every)
        self._leased = lease is not None and c.resume in _NEWEST  # this driver alone judges the run's checkpoints
        self._saver = Saver(self._storage, last=c.keep, every=c.keep_every, lease=lease)
        self._wanted: SimpleQueue[str] = SimpleQueue()  # directory that the saver asks the workers to write
        self._reports: SimpleQueue[Reports] = SimpleQueue()  # the workers' answers
        self._writing = False  # the workers are writing
        self._abandoned = False  # the current or the last save was abandoned
        self._began = 0.0  # when the save under way began (monotonic)
        self._corpus = ""
        self._own: set[str] = set()  # directories of the checkpoints that this driver made
        self._failed, self._failing = 0, 0.0  # failed saves in a row; time of the first one
        self._why = ""  # reason of the last failed save
        self._useful: float | None = None  # useful seconds, for the next event of the save under way
        if self._leased and found:
            self._origin = origin(config, held=True)  # again, under the lease: an older driver could save and delete
        self.step = self._origin.step if self._origin else 0

    def due(self, step: int, last: bool, stopping: bool) -> bool:
        """Return True if `step` is to be saved. `last`: it is the run's last; `stopping`: the run was asked to end."""
        c = self._config
        if self.step == step:
            return False
        at_the_end = last and bool(c.checkpoint.every or c.train.stop_at)
        return at_the_end or self._cadence.due(step) or stopping and c.checkpoint.on_stop

    def check_hope(self) -> None:
        """Raise GaveUp if FAILURES saves in a row failed, over elastic.wait seconds: training on would be in vain."""
        if self._failed >= FAILURES and monotonic() - self._failing >= self._config.elastic.wait:
            raise GaveUp(f"{self._failed} checkpoints in a row could not be written: {self._why}")

    def lacks(self, last: int) -> bool:
        """Return True if `last`, the run's last step, was to be saved and could not be."""
        return self.step < last and self.due(last, last=True, stopping=False)

    @property
    def kept(self) -> str:
        """Return a line for people: what was saved of the run, and the command that continues it."""
        with_override = f" with {self.resume}" if self.resume else ""
        if not self.step:
            return f"nothing was saved; the same command{with_override} starts again from step 1"
        return f"the same command{with_override} continues after step {self.step}"

    @property
    def resume(self) -> str:
        """Return the override with which the run's command goes on from the newest checkpoint, or starts over if there
        is none and steps would be lost; "" if the command needs no override."""
        if not self.step and self._config.checkpoint.resume == "auto":
            with suppress(ConfigError):
                return "checkpoint.resume=never" if traced(self._config) else ""
        return "checkpoint.resume=auto" if self._own and self._config.checkpoint.resume not in _NEWEST else ""

    def check(self, corpus: str) -> None:
        """Raise ConfigError if the checkpoint was trained on another corpus (hash); report refused ones."""
        self._corpus = corpus
        if not self._origin:
            return
        for directory, reason in self._origin.refused:
            self._refuse(directory, reason)
        there = self._origin.manifest.meta.corpus if self._origin.manifest else corpus
        if there != corpus:
            where = f"{self._origin.storage.url}/{self._origin.directory}"
            reason = f"its corpus is {corpus} now, and was {there} for {where}: the files have changed"
            raise ConfigError(violation("data", self._config.data.kind, reason))

    def _refuse(self, directory: str, reason: str) -> None:
        self._journal.write(events.CheckpointRefused(directory=directory, reason=reason))
        self._say(f"checkpoint {directory} is passed over: {reason}")

    def restore(self, crew: Crew) -> bool:
        """Restore the checkpoint, if there is one, into the freshly built workers. Returns False if it turned out to be
        corrupt: it is quarantined, the next best is chosen, and the workers must be built again. Raises ConfigError if
        it is refused."""
        found = self._origin
        if not (found and found.directory):
            return True
        start = perf_counter()
        failure: Unrestored | None = crew.call("restore", found.directory, found.directory in self._own)[0]
        if failure is None:
            seconds = perf_counter() - start
            self._journal.write(events.Restored(step=self.step, directory=found.directory, seconds=seconds))
            self._say(f"continues after step {self.step}: {found.storage.url}/{found.directory}")
            return True
        if failure.fault != "corrupt":
            where = f"{found.storage.url}/{found.directory}"
            raise ConfigError(violation("checkpoint.resume", where, f"cannot be resumed from: {failure.reason}"))
        quarantine(found.storage, found.directory, failure.reason)
        self._refuse(found.directory, failure.reason)
        self.look_again()
        return False

    def look_again(self) -> None:
        """Look for the newest good checkpoint in storage now, of this run's own if it has made one. If there never was
        one, the run starts over. Raises ConfigError, OSError."""
        self._poll()
        self._origin = self._newest_own() or origin(self._config, held=self._leased, over=not self.step)
        self.step = self._origin.step if self._origin else 0
        self.check(self._corpus)

    def _newest_own(self) -> Origin | None:
        """Return the newest checkpoint if this driver made it and the run began from elsewhere (other checkpoints there
        belong to another run); None otherwise."""
        if not self._own or self._config.checkpoint.resume in _NEWEST:
            return None
        found = find(self._storage, deep=False)
        return Origin(self._storage, **vars(found)) if found.directory in self._own else None

    def confirm(self) -> None:
        """Confirm that the checkpoint to resume from is still there, and set `step` accordingly. Storage that does not
        answer proves nothing."""
        anybody_s = self._config.checkpoint.resume in _NEWEST
        if not self.step or not (self._own or anybody_s):
            return
        with suppress(OSError, ConfigError):
            found = find(self._storage, deep=False)
            there = found.manifest if anybody_s or found.directory in self._own else None
            self.step = there.meta.step if there else 0

    def abandon(self) -> None:
        """Abandon the save under way because the workers are being re-formed, without waiting for it."""
        if self._saver.busy:
            self._abandoned = True
            self._saver.cancel()
            self._reports.put([Unwritten("the workers were re-formed while they wrote")])
        self._writing, self._wanted, self._reports = False, SimpleQueue(), SimpleQueue()

    def save(self, crew: Crew, step: int, useful_seconds: float | None = None) -> None:
        """Begin a checkpoint once the previous save is over; waits only for the workers' copies in host memory.
        `advance` and `finish` carry it on, and report if it fails. `useful_seconds`: for the event of its end."""
        self.finish(crew)
        self._cadence.saved()
        self._abandoned, self._began = False, monotonic()
        snapshots = crew.call("snapshot")
        numbers: dict[str, Any] = next((s.values for s in snapshots if s.values), {})
        self._wanted, self._reports, self._useful = SimpleQueue(), SimpleQueue(), useful_seconds
        write = partial(_written, self._wanted, self._reports)
        self._saver.save(snapshots[0].tensors, self._meta(step, {"optimizer": numbers}), write)

    def advance(self, crew: Crew, wait: float = 0.0) -> None:
        """Advance the save under way between steps: give the workers their directory, collect their reports (waiting
        `wait` seconds for them) and handle its events."""
        if not self._writing and not self._wanted.empty():
            crew.call("write", self._wanted.get())
            self._writing = True
        if self._writing and None not in (reports := crew.call("written", wait)):
            self._writing = False
            self._reports.put(reports)
        self._poll()

    def finish(self, crew: Crew) -> None:
        """Wait until no save is under way. Raises GaveUp where that takes longer than checkpoint.timeout."""
        limit = self._config.checkpoint.timeout
        while self._saver.busy:
            self.advance(crew, wait=WAIT_SECONDS)
            self._saver.wait(POLL_SECONDS)
            if limit and monotonic() > self._began + limit:
                raise GaveUp(f"{self._storage.url}: a save has taken longer than checkpoint.timeout={limit:g} s")
        self.advance(crew)

    def _meta(self, step: int, values: dict[str, Any]) -> Meta:
        return Meta(
            step=step,
            samples=step * self._config.train.global_batch,
            seed=self._config.seed,
            corpus=self._corpus,
            identity=identity(self._config),
            configuration=short_hash(redact(self._config.to_dict())),
            plan={"mesh": self.plan.mesh.axes, "scheme": self.plan.scheme.name, "digest": plan_digest(self.plan)},
            values=values,
            versions=versions(),
        )

    def _poll(self) -> None:
        for found in self._saver.poll():
            self._note(events.named(**found, useful_seconds=self._useful))

    def _note(self, event: events.JournalEvent) -> None:
        self._useful = None
        self._journal.write(event)
        if isinstance(event, events.Checkpoint):
            self.step, self._failed = event.step, 0
            self._own.add(event.directory)
        elif isinstance(event, events.Superseded):
            raise GaveUp(event.reason)
        elif isinstance(event, events.CheckpointFailed | events.CheckpointPruneFailed):
            goes_on = f"the newest good one is of step {self.step}" if self.step else "there is no other"
            if isinstance(event, events.CheckpointFailed) and event.again:
                goes_on = "it is tried again"
            elif isinstance(event, events.CheckpointFailed) and not self._abandoned:
                self._failing = self._failing if self._failed else monotonic()
                self._failed += 1
                self._why = event.reason
            what = event.word.replace("_", " ")
            self._say(f"WARNING: {what} after step {event.step}: {event.reason}; {goes_on}")


def _written(wanted: SimpleQueue[str], reports: SimpleQueue[Reports], directory: str) -> list[FileReport]:
    """Wait for the workers' reports on a save attempt. Runs in the saver's thread; only the driver's calls the crew."""
    wanted.put(directory)
    found = []
    for rank, report in enumerate(reports.get()):
        if isinstance(report, Unwritten):
            raise OSError(f"rank {rank}: {report.error}")
        found.append(report)
    return found
