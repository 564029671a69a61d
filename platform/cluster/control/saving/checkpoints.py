"""The driver's part in checkpoints: when and how a run saves, and what it takes over from storage."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic, perf_counter
from types import MappingProxyType
from typing import Any

from platform.boundary.redaction import redact
from platform.checkpoint import Meta, Saver, connect, find, quarantine
from platform.checkpoint.storage.lease import Lease
from platform.cluster.control.saving.cadence import Cadence
from platform.cluster.crew.base.crew import Crew
from platform.cluster.crew.base.failures import GaveUp
from platform.cluster.run.origin import Origin, origin, traced
from platform.config.fields import Config, ConfigError, digest, violation
from platform.config.identity import identity
from platform.monitor import Journal
from platform.plan.core.plan import Plan
from platform.plan.core.plan_data import digest as plan_digest
from platform.train.recovery import places
from platform.train.recovery.proof import versions

POLL_SECONDS = 0.01
WAIT_SECONDS = 1.0  # in one call, for what workers write: a call has no other limit
FAILURES = 3  # saves in a row that come to nothing, for longer than elastic.wait: then the run has no future

_NEWEST = ("auto", "must")  # values of checkpoint.resume under which a run goes on from its own newest one

Reports = Sequence[Mapping[str, Any]]  # by rank: that of `Image.write`, or {"error": why}


class Checkpoints:
    """Of one run. `step`: updates that the newest good checkpoint holds, which the run resumed from or made; 0 where
    there is none. `plan`: what made the state that is saved.

    What calls the crew raises WorkerFailed; and GaveUp, once another driver has taken over.
    """

    def __init__(self, config: Config, plan: Plan, found: Origin | None, journal: Journal, say: Callable[[str], None]):
        self._config, self.plan, self._origin, self._journal, self._say = config, plan, found, journal, say
        self._storage = connect(places.home(config))
        lease = (
            Lease.take(self._storage, f"process {os.getpid()} on {socket.gethostname()}")
            if places.saves(config)
            else None
        )
        keep = config.checkpoint
        self._cadence = Cadence(keep.every)
        self._held = lease is not None and config.checkpoint.resume in _NEWEST
        self._saver = Saver(self._storage, last=keep.keep, every=keep.keep_every, lease=lease)
        self._wanted: SimpleQueue[str] = SimpleQueue()  # the directory that the saver wants the workers to write
        self._reports: SimpleQueue[Reports] = SimpleQueue()  # what the workers wrote
        self._writing = False  # the workers are
        self._abandoned = False  # the save under way was, or the one before
        self._began = 0.0  # when it did
        self._corpus = ""
        self._own: set[str] = set()  # the directories of those that this driver made
        self._failed, self._failing = 0, 0.0  # saves in a row that came to nothing; when the first one did
        self._told: dict[str, Any] = {}  # what the next event of the save under way tells besides
        if self._held and found:
            self._origin = origin(config, held=True)  # until now an older driver could save and delete
        self.step = self._origin.manifest.meta.step if self._origin and self._origin.manifest else 0

    def due(self, step: int, last: bool, stopping: bool) -> bool:
        """Says whether to save after `step`. `last`: no other follows; `stopping`: the run was asked to end."""
        c = self._config
        if self.step == step:
            return False
        at_the_end = last and bool(c.checkpoint.every or c.train.stop_at)
        return at_the_end or self._cadence.due(step) or stopping and c.checkpoint.on_stop

    def check_hope(self) -> None:
        """Raises GaveUp where no checkpoint could be written for so long that training on would be for nothing."""
        if self._failed >= FAILURES and monotonic() - self._failing >= self._config.elastic.wait:
            raise GaveUp(f"{self._failed} checkpoints in a row could not be written: {self._why}")

    def lacks(self, last: int) -> bool:
        """Whether `last`, a run's last step, was to be saved and could not be."""
        return self.step < last and self.due(last, last=True, stopping=False)

    @property
    def kept(self) -> str:
        """What is left of the run, for people."""
        if not self.step:
            told = f" with {self.resume}" if self.resume else ""
            return f"nothing was saved; the same command{told} starts again from step 1"
        return f"the same command{' with ' + self.resume if self.resume else ''} continues after step {self.step}"

    @property
    def resume(self) -> str:
        """Return the override with which the run's command goes on from the newest checkpoint, or starts again where
        there is none and steps would be lost; "" where it does without."""
        if not self.step and self._config.checkpoint.resume == "auto":
            with suppress(ConfigError):
                return "checkpoint.resume=never" if traced(self._config) else ""
        return "checkpoint.resume=auto" if self._own and self._config.checkpoint.resume not in _NEWEST else ""

    def check(self, corpus: str) -> None:
        """Raises ConfigError where the checkpoint was trained on another corpus (hash)."""
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
        self._journal.event("checkpoint_refused", directory=directory, reason=reason)
        self._say(f"checkpoint {directory} is passed over: {reason}")

    def restore(self, crew: Crew) -> bool:
        """Has the freshly built workers take over the checkpoint, if there is one. False where it turned out to be
        corrupt: the workers must be built again, and the next best is taken. Raises ConfigError where it is refused."""
        found = self._origin
        if not (found and found.directory):
            return True
        start = perf_counter()
        answer: Mapping[str, str] = crew.call("restore", found.directory, found.directory in self._own)[0]
        if not answer:
            seconds = perf_counter() - start
            self._journal.event("restored", step=self.step, directory=found.directory, seconds=seconds)
            self._say(f"continues after step {self.step}: {found.storage.url}/{found.directory}")
            return True
        [(how, reason)] = answer.items()
        if how != "corrupt":
            where = f"{found.storage.url}/{found.directory}"
            raise ConfigError(violation("checkpoint.resume", where, f"cannot be resumed from: {reason}"))
        quarantine(found.storage, found.directory, reason)
        self._refuse(found.directory, reason)
        self.look_again()
        return False

    def look_again(self) -> None:
        """Look for the newest good checkpoint there is now, of this run's own if it has made one. Where there never
        was one, the run starts over. Raises ConfigError, OSError."""
        self._poll()
        self._origin = self._newest_own() or origin(self._config, held=self._held, over=not self.step)
        self.step = self._origin.manifest.meta.step if self._origin and self._origin.manifest else 0
        self.check(self._corpus)

    def _newest_own(self) -> Origin | None:
        """Where the run began from elsewhere, what else lies in its storage is another's."""
        if not self._own or self._config.checkpoint.resume in _NEWEST:
            return None
        found = find(self._storage, deep=False)
        return Origin(self._storage, **vars(found)) if found.directory in self._own else None

    def confirm(self) -> None:
        """Looks whether what can be resumed from is still there. Storage that does not answer says nothing."""
        anybody_s = self._config.checkpoint.resume in _NEWEST
        if not self.step or not (self._own or anybody_s):
            return
        with suppress(OSError, ConfigError):
            found = find(self._storage, deep=False)
            there = found.manifest if anybody_s or found.directory in self._own else None
            self.step = there.meta.step if there else 0

    def abandon(self) -> None:
        """The workers are being re-formed: what they were writing comes to nothing, and nobody waits for that."""
        if self._saver.busy:
            self._abandoned = True
            self._saver.cancel()
            self._reports.put([{"error": "the workers were re-formed while they wrote"}])
        self._writing, self._wanted, self._reports = False, SimpleQueue(), SimpleQueue()

    def save(self, crew: Crew, step: int, told: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Begins a checkpoint, when the one before is over: waits for the workers' copies in host memory, no longer.
        `advance` and `finish` carry it on. It may fail: then they say so. `told`: for the event of its end."""
        self.finish(crew)
        self._cadence.saved()
        self._abandoned, self._began = False, monotonic()
        snapshots = crew.call("snapshot")
        numbers: dict[str, Any] = next((s["values"] for s in snapshots if s["values"]), {})
        self._wanted, self._reports, self._told = SimpleQueue(), SimpleQueue(), dict(told)
        write = partial(_written, self._wanted, self._reports)
        self._saver.save(snapshots[0]["tensors"], self._meta(step, {"optimizer": numbers}), write)

    def advance(self, crew: Crew, wait: float = 0.0) -> None:
        """Hand on, between steps, what the save under way needs and what became of it: for that the workers are waited
        for `wait` seconds."""
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
            configuration=digest(redact(self._config.to_dict())),
            plan={"mesh": self.plan.mesh.axes, "scheme": self.plan.scheme.name, "digest": plan_digest(self.plan)},
            values=values,
            versions=versions(),
        )

    def _poll(self) -> None:
        for event in self._saver.poll():
            self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        told, self._told = self._told, {}
        self._journal.event(**event, **told)
        if event["event"] == "checkpoint":
            self.step, self._failed = event["step"], 0
            self._own.add(event["directory"])
        elif event["event"] == "superseded":
            raise GaveUp(event["reason"])
        else:
            newest = f"the newest good one is of step {self.step}" if self.step else "there is no other"
            goes_on = "it is tried again" if event.get("again") else newest
            if event["event"] == "checkpoint_failed" and not event["again"] and not self._abandoned:
                self._failing = self._failing if self._failed else monotonic()
                self._failed += 1
                self._why = event["reason"]
            what = event["event"].replace("_", " ")
            self._say(f"WARNING: {what} after step {event['step']}: {event['reason']}; {goes_on}")


def _written(wanted: SimpleQueue[str], reports: SimpleQueue[Reports], directory: str) -> Reports:
    """In the saver's thread, which leaves the crew to the driver's."""
    wanted.put(directory)
    found = reports.get()
    if errors := [f"rank {rank}: {r['error']}" for rank, r in enumerate(found) if "error" in r]:
        raise OSError(errors[0])
    return found
