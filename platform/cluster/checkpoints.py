"""The driver's part in checkpoints: what a run resumes from, and when and how it saves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from platform.checkpoint import Manifest, Meta, Refused, Saver, Storage, connect, find, load, quarantine
from platform.cluster.crew import Crew
from platform.config import RESUME, Config, ConfigError, digest, violation
from platform.identity import identity, refusal
from platform.monitor import Journal
from platform.plan.plan import Plan
from platform.train import places
from platform.train.proof import versions

POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from, or none; and the newer ones that were passed over, with the reasons."""

    storage: Storage
    directory: str | None
    manifest: Manifest | None
    refused: tuple[tuple[str, str], ...] = ()
    sound: tuple[str, ...] = ()  # see `platform.checkpoint.Found`


def origin(config: Config) -> Origin | None:
    """What checkpoint.resume means today; None where it is `never`. Reads manifests, not yet what they describe.

    Raises ConfigError where nothing can be resumed from and something must, and for a run of another identity.
    """
    c = config.checkpoint
    if c.resume == "never":
        return None
    url, name = places.source(config)
    key = "checkpoint.url" if c.resume in RESUME else "checkpoint.resume"
    storage = connect(url, key)
    where = os.path.join(storage.url, name) if name else storage.url
    try:
        found = (
            Origin(storage, name, load(storage, name)) if name else Origin(storage, **vars(find(storage, deep=False)))
        )
    except (Refused, OSError) as error:
        raise ConfigError(violation(key, where, f"cannot be resumed from: {error}")) from None
    if found.manifest is None and (c.resume != "auto" or found.sound):  # starting again would lose what is there
        reasons = "".join(f"; {directory}: {reason}" for directory, reason in found.refused)
        legal = ["checkpoint.resume=never"] if c.resume in RESUME else RESUME
        raise ConfigError(violation(key, where, f"holds no checkpoint to resume from{reasons}", legal))
    if found.manifest:
        what = f"{found.directory} is of another run; name another"
        if lines := refusal(found.manifest.meta.identity, config, key, where, what):
            raise ConfigError(lines)
    return found


def check_writable(config: Config) -> None:
    """Raises ConfigError where checkpoints could not be written."""
    storage = connect(places.home(config))
    name = f".probe-{secrets.token_hex(4)}"
    try:
        storage.write(name, [memoryview(b"x")])
        storage.delete(name)
    except OSError as error:
        raise ConfigError(violation("checkpoint.url", storage.url, f"cannot be written to: {error}")) from None


class Checkpoints:
    """Of one run. `step`: updates that the newest good checkpoint holds, which the run resumed from or made; 0 where
    there is none."""

    def __init__(self, config: Config, plan: Plan, found: Origin | None, journal: Journal, say: Callable[[str], None]):
        self._config, self._plan, self._origin, self._journal, self._say = config, plan, found, journal, say
        self._storage = connect(places.home(config))
        self._saver = Saver(self._storage, last=config.checkpoint.keep, every=config.checkpoint.keep_every)
        self._wanted: SimpleQueue[str] = SimpleQueue()  # the directory that the saver wants the workers to write
        self._reports: SimpleQueue[list[dict[str, Any]]] = SimpleQueue()  # what the workers wrote
        self._writing = False  # the workers are
        self._corpus = ""
        self.step = found.manifest.meta.step if found and found.manifest else 0

    def due(self, step: int, last: bool, stopping: bool) -> bool:
        """Whether to save after `step`. `stopping`: the run was asked to end."""
        every = self._config.checkpoint.every
        if self.step == step:
            return False
        return bool(every) and (step % every == 0 or last or stopping) or last and bool(self._config.train.stop_at)

    def lacks(self, last: int) -> bool:
        """Whether `last`, a run's last step, was to be saved and could not be."""
        return self.step < last and self.due(last, last=True, stopping=False)

    @property
    def kept(self) -> str:
        """What is left of the run, for people."""
        if not self.step:
            return "nothing was saved; the same command starts again from step 1"
        with_auto = "" if self._config.checkpoint.resume in ("auto", "must") else " with checkpoint.resume=auto"
        return f"the same command{with_auto} continues after step {self.step}"

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
        answer: Mapping[str, str] = crew.call("restore", found.directory)[0]
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
        self._origin = origin(self._config)
        self.step = self._origin.manifest.meta.step if self._origin and self._origin.manifest else 0
        self.check(self._corpus)
        return False

    def save(self, crew: Crew, step: int) -> None:
        """Begins a checkpoint, when the one before is over: waits for the workers' copies in host memory, no longer.
        `advance` and `finish` carry it on. It may fail: then they say so. Raises WorkerFailed."""
        self.finish(crew)
        snapshots = crew.call("snapshot")
        numbers: dict[str, Any] = next((s["values"] for s in snapshots if s["values"]), {})
        self._saver.save(snapshots[0]["tensors"], self._meta(step, {"optimizer": numbers}), self._write)

    def _write(self, directory: str) -> Sequence[Mapping[str, Any]]:
        """In the saver's thread, which leaves the crew to the driver's."""
        self._wanted.put(directory)
        reports = self._reports.get()
        if errors := [f"rank {rank}: {r['error']}" for rank, r in enumerate(reports) if "error" in r]:
            raise OSError(errors[0])
        return reports

    def advance(self, crew: Crew, wait: bool = False) -> None:
        """Between steps: hands on what the save under way needs and what became of it. Raises WorkerFailed."""
        if not self._writing and not self._wanted.empty():
            crew.call("write", self._wanted.get())
            self._writing = True
        if self._writing and None not in (reports := crew.call("written", wait)):
            self._writing = False
            self._reports.put(reports)
        for event in self._saver.poll():
            self._note(event)

    def finish(self, crew: Crew) -> None:
        """Until no save is under way. Raises WorkerFailed."""
        while self._saver.busy:
            self.advance(crew, wait=True)
            self._saver.wait(POLL_SECONDS)
        self.advance(crew)

    def _meta(self, step: int, values: dict[str, Any]) -> Meta:
        return Meta(
            step=step,
            samples=step * self._config.train.global_batch,
            seed=self._config.seed,
            corpus=self._corpus,
            identity=identity(self._config),
            configuration=digest(self._config.to_dict()),
            plan=self._plan.to_dict(),
            values=values,
            versions=versions(),
        )

    def _note(self, event: dict[str, Any]) -> None:
        self._journal.event(**event)
        if event["event"] == "checkpoint":
            self.step = event["step"]
        else:
            goes_on = "it is tried again" if event.get("again") else f"the newest good one is of step {self.step}"
            what = event["event"].replace("_", " ")
            self._say(f"WARNING: {what} after step {event['step']}: {event['reason']}; {goes_on}")
