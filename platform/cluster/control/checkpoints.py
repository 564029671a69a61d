"""The driver's side of checkpoints: when a run saves (`CheckpointCadence`), how it saves, and which checkpoint it
restores."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import Any

from platform.boundary.redaction import redact_secrets
from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.boundary.terminal import Say, show_phase
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import CarriedFiles, Lease, Selection, find_newest_checkpoint, load_manifest
from platform.checkpoint.manifest import FileReport, Meta, Refused
from platform.checkpoint.saver import CheckpointSaver
from platform.cluster.crew.crew import Crew, Worker
from platform.cluster.crew.failures import GaveUp
from platform.cluster.origin import find_resume_checkpoint, last_recorded_step
from platform.config.fields import Config, hash_values
from platform.config.identity import (
    complete_identity,
    find_checkpoint_url,
    find_differences,
    run_identity,
    saves_checkpoints,
    storage_key,
)
from platform.config.key import parse_rhythm
from platform.config.ramps import count_earlier_samples
from platform.monitor import Journal, events
from platform.monitor.goodput import validation_losses
from platform.plan.layout import format_count
from platform.plan.plan import Plan
from platform.plan.plan_data import plan_digest as plan_digest
from platform.train.environment_proof import list_versions
from platform.train.replies import Unwritten


class CheckpointCadence:
    """Interval between checkpoints that `checkpoint.every` sets: every `steps` steps (0: none), or, if `seconds` is not
    None, once that many seconds have passed since the previous save began, or since the driver started."""

    def __init__(self, every: int | str):
        """Set the interval between checkpoints from checkpoint.every, in steps or in time, which counts from now."""
        self.steps, seconds = parse_rhythm(every)
        self.seconds = seconds or None
        self._since = monotonic()

    def is_due(self, step: int) -> bool:
        """Return True if `checkpoint.every` asks for a checkpoint of the state after training step `step`, now."""
        if self.seconds:
            return monotonic() - self._since >= self.seconds
        return bool(self.steps) and step % self.steps == 0

    def restart_interval(self) -> None:
        """Start the time interval between checkpoints anew, as a save begins, even if that save fails later."""
        self._since = monotonic()


POLL_SECONDS = 0.01
WAIT_SECONDS = 1.0  # per call, for workers that write: such a call has no other limit
FAILURES = 3  # failed saves in a row, over at least elastic.wait seconds, after which the run gives up

_NEWEST = ("auto", "must")  # values of checkpoint.resume under which a run resumes from its own newest checkpoint

Reports = Sequence[FileReport | Unwritten]  # by rank


class Checkpoints:
    """Saves, finds and restores the checkpoints of one run, for its driver. `step`: updates in the newest good
    checkpoint that the run resumed from or made, 0 if there is none; `plan`: the plan under which the saved state was
    computed; `found`: the checkpoint to resume from, None to start over; `files`: files that every checkpoint carries.

    Methods that call the crew raise WorkerFailed, and GaveUp once another driver has taken over the run.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        selection: Selection | None,
        journal: Journal,
        say: Say,
        files: CarriedFiles | None = None,
        more_values: Mapping[str, Any] | None = None,
    ):
        """Prepare to save and restore a run's checkpoints, and take the lease of their storage if the run saves any.
        `selection`: the checkpoint to resume from, None to start over; `say`: prints a line for the user; `files`: name
        -> contents of the files that every checkpoint carries; `more_values`: further entries of its metadata."""
        self._files, self._more_values = files or {}, more_values or {}
        self._config, self.plan, self._origin, self._journal, self._say = config, plan, selection, journal, say
        self._storage = open_storage(find_checkpoint_url(config))
        c, owner = config.checkpoint, f"process {os.getpid()} on {socket.gethostname()}"
        lease = Lease.take(self._storage, owner) if saves_checkpoints(config) else None
        self._cadence = CheckpointCadence(c.every)
        self._leased = lease is not None and c.resume in _NEWEST  # this driver alone judges the run's checkpoints
        self._saver = CheckpointSaver(self._storage, last=c.keep, every=c.keep_every, lease=lease)
        self._wanted: SimpleQueue[str] = SimpleQueue()  # directory that the saver asks the workers to write
        self._reports: SimpleQueue[Reports] = SimpleQueue()  # the workers' answers
        self._writing = False  # the workers are writing
        self._abandoned = False  # the current or the last save was abandoned
        self._saving, self._began = 0, 0.0  # step of the save under way, and when that began (monotonic)
        self._corpus = ""
        self._own: set[str] = set()  # directories of the checkpoints that this driver made
        self._failed, self._failing = 0, 0.0  # failed saves in a row; time of the first one
        self._why = ""  # reason of the last failed save
        self._useful: float | None = None  # useful seconds, for the next event of the save under way
        if self._leased and selection:
            # again, under the lease: an older driver could save and delete
            self._origin = find_resume_checkpoint(config, holds_lease=True)
        self.step = self._origin.step if self._origin else 0

    def is_save_due(self, step: int, last: bool, stopping: bool) -> bool:
        """Return True if the state after training step `step` is to be saved now. `last`: `step` is the last one that
        this command trains; `stopping`: the run was asked to stop, by a signal or its time limit."""
        c = self._config
        if self.step == step:
            return False
        at_the_end = last and bool(c.checkpoint.last or c.train.stop_at)
        if self._saver.losses and min(self._saver.losses, key=self._saver.losses.__getitem__) == step:
            return True
        return at_the_end or self._cadence.is_due(step) or stopping and c.checkpoint.on_stop

    def note_evaluations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note the validation losses in a run's rows of metrics, by which its best checkpoint is saved and kept."""
        self._saver.losses = validation_losses(rows)

    def describe_newest(self, done: int) -> str:
        """Return a line for the user that names the checkpoint of `done`, the run's last step, if there is one."""
        if self.step != done:
            return "no weights are saved, as checkpoint.last=false says"
        url = f"{self._storage.url}/{max(self._own)}" if self._own else self._origin.url if self._origin else ""
        return f"saved: step {done}: {url}"

    def describe_best(self) -> str:
        """Return a line for the user that names the checkpoint with the lowest validation loss; "" if there is none, or
        storage does not answer."""
        losses, complete = self._saver.losses, []
        with suppress(OSError):
            for attempt in catalogue.list_attempts(self._storage) if losses else []:
                with suppress(Refused):
                    load_manifest(self._storage, attempt.directory_name)
                    complete.append(attempt)
        return "".join(
            f"lowest val loss {losses[a.step]:.4f}, after step {a.step}: {self._storage.url}/{a.directory_name}"
            for a in catalogue.find_lowest_loss(complete, losses)
        )

    def check_save_failures(self) -> None:
        """Raise GaveUp, to end the run, if its last FAILURES checkpoints failed, the first elastic.wait seconds ago."""
        if self._failed >= FAILURES and monotonic() - self._failing >= self._config.elastic.wait:
            where, count = storage_key(self._config), format_count(self._failed, "checkpoint")
            raise GaveUp(f"{where}: {count} in a row could not be written: {self._why}", of_world=True)

    @property
    def save_under_way(self) -> tuple[int, float] | None:
        """Return the step of the save under way and when that began, monotonic; None if there is none."""
        return (self._saving, self._began) if self._saver.is_saving else None

    def is_last_step_unsaved(self, last: int) -> bool:
        """Return True if the state after `last`, the run's last step, was to be saved and no checkpoint holds it."""
        return self.step < last and self.is_save_due(last, last=True, stopping=False)

    def find_newest_fault(self) -> str:
        """Read back every byte of the run's newest checkpoint; return why that fails, "" if it does not."""
        try:
            newest = find_newest_checkpoint(self._storage, verifies_bytes=False, quarantines=False).directory
            if newest:
                catalogue.verify_checkpoint(self._storage, newest)
            return "" if newest else "none was saved"
        except (Refused, OSError) as error:
            return f"the newest cannot be read back: {error}"

    @property
    def resume_sentence(self) -> str:
        """Return a sentence for the user: after which checkpoint the same command goes on, or that none was saved."""
        with_override = f" with {self.resume_override}" if self.resume_override else ""
        if not self.step:
            return f"nothing was saved; the same command{with_override} starts again from step 1"
        return f"the same command{with_override} continues after step {self.step}"

    @property
    def resume_override(self) -> str:
        """Return the override, "checkpoint.resume=auto" or "checkpoint.resume=never", that the command of this run
        needs to go on from the newest checkpoint, or to start over if there is none although steps were done; "" if it
        needs none."""
        if not self.step and self._config.checkpoint.resume == "auto":
            with suppress(ConfigError):
                return "checkpoint.resume=never" if last_recorded_step(self._config) else ""
        return "checkpoint.resume=auto" if self._own and self._config.checkpoint.resume not in _NEWEST else ""

    def check_corpus(self, corpus_digest: str) -> None:
        """Report the newer checkpoints that were passed over, and raise ConfigError if the one to resume from was
        trained on another corpus than `corpus_digest`, the hash of today's data: its files have changed, or keys that
        resume.allow let differ."""
        self._corpus = corpus_digest
        if not self._origin:
            return
        for directory, reason in self._origin.refused:
            self._report_refused(directory, reason)
        trained_corpus = self._origin.manifest.meta.corpus if self._origin.manifest else corpus_digest
        if trained_corpus != corpus_digest:
            where = self._origin.url
            changed = "; ".join(f"{key}: {a} there, {b} here" for key, (a, b) in self._find_changed_data_keys().items())
            why = changed or "the files have changed"
            reason = f"its corpus is {corpus_digest} now, and was {trained_corpus} for {where}: {why}"
            legal = ["the data as it was", f"a run of its own from these weights, run.dir=DIRECTORY train.init={where}"]
            raise ConfigError("data", self._config.data.kind, reason, legal)

    def _find_changed_data_keys(self) -> dict[str, tuple[Any, Any]]:
        """Return the keys of data whose values differ from the resumed checkpoint's: key -> (there, here)."""
        assert self._origin and self._origin.manifest
        saved_identity = complete_identity(self._origin.manifest.meta.identity)
        changed_keys = find_differences(saved_identity, run_identity(self._config))
        return {key: pair for key, pair in changed_keys.items() if key.startswith("data.")}

    def _report_refused(self, directory: str, reason: str) -> None:
        """Journal and print that the checkpoint in `directory` is not used, and the reason."""
        self._journal.write(events.CheckpointRefused(directory=directory, reason=reason))
        self._say(f"checkpoint {directory} is passed over: {reason}")

    def restore_workers(self, crew: Crew) -> bool:
        """Restore the checkpoint to resume from, if there is one, into workers that have just been built. Return False
        if it turned out to be corrupt: it is quarantined, the next newest good one is chosen, and the caller must have
        the workers built again before another call. Raise ConfigError if the workers refuse it or cannot read it."""
        selection = self._origin
        if not (selection and selection.directory):
            return True
        start = perf_counter()
        is_own = selection.directory in self._own
        [failure, *_] = crew.call_ranks(Worker.restore_checkpoint, selection.directory, is_own)
        if failure is None:
            seconds = perf_counter() - start
            self._journal.write(events.Restored(step=self.step, directory=selection.directory, seconds=seconds))
            self._say(f"continues after step {self.step}: {selection.url}")
            return True
        if failure.fault != "corrupt":
            raise ConfigError("checkpoint.resume", selection.url, f"cannot be resumed from: {failure.reason}")
        catalogue.quarantine_checkpoint(selection.storage, selection.directory, failure.reason)
        self._report_refused(selection.directory, failure.reason)
        self.select_newest_again()
        return False

    def select_newest_again(self) -> None:
        """Search storage again for the newest good checkpoint, from which the next generation of workers goes on when
        no state is whole in memory: this driver's own newest if it has made one, else what checkpoint.resume means. If
        the run never had a checkpoint, it starts over. Raise ConfigError, OSError."""
        self._poll_saver()
        newest = self._find_newest_of_this_driver()
        self._origin = newest or find_resume_checkpoint(
            self._config, holds_lease=self._leased, may_start_over=not self.step
        )
        self.step = self._origin.step if self._origin else 0
        self.check_corpus(self._corpus)

    def _find_newest_of_this_driver(self) -> Selection | None:
        """Return the newest checkpoint in the storage that this run saves to, if this driver made it and
        checkpoint.resume names a checkpoint elsewhere or is `never`, so that others found there may belong to another
        run; else None."""
        if not self._own or self._config.checkpoint.resume in _NEWEST:
            return None
        newest = find_newest_checkpoint(self._storage, verifies_bytes=False)
        return newest if newest.directory in self._own else None

    def confirm_newest(self) -> None:
        """Check that the run's newest checkpoint is still in storage, and set `step` to the newest one's step, 0 if
        none is left. Storage that does not answer proves nothing and leaves `step` alone."""
        anybody_s = self._config.checkpoint.resume in _NEWEST
        if not self.step or not (self._own or anybody_s):
            return
        with suppress(OSError, ConfigError):
            newest = find_newest_checkpoint(self._storage, verifies_bytes=False)
            self.step = newest.step if anybody_s or newest.directory in self._own else 0

    def abandon_save(self) -> None:
        """Cancel the save under way, without waiting, because the workers that write it leave their mesh."""
        if self._saver.is_saving:
            self._abandoned = True
            self._saver.cancel_retries()
            self._reports.put([Unwritten("the workers were re-formed while they wrote")])
        self._writing, self._wanted, self._reports = False, SimpleQueue(), SimpleQueue()

    def begin_save(self, crew: Crew, step: int, useful_seconds: float | None = None) -> None:
        """Begin a checkpoint of the state after training step `step`, once the previous save is over. Wait only until
        the workers have copied their state to host memory; calls of `advance_save` and `finish_save` continue the save,
        and report its failure. `useful_seconds`: seconds of the steps committed since the last journal event that
        reported them, for the event that ends this save."""
        self.finish_save(crew)
        self._cadence.restart_interval()
        self._abandoned, self._saving, self._began = False, step, monotonic()
        snapshots = crew.call_ranks(Worker.copy_state)
        self._wanted, self._reports, self._useful = SimpleQueue(), SimpleQueue(), useful_seconds
        write = partial(_request_block_files, self._wanted, self._reports)
        self._saver.start_save(snapshots[0].tensors, self._build_meta(step, snapshots[0].values), write, self._files)

    def advance_save(self, crew: Crew, wait: float = 0.0) -> None:
        """Continue the save under way, between two training steps: send the workers the directory to write to, collect
        their reports (waiting for them up to `wait` seconds) and journal what the saver's thread has finished."""
        if not self._writing and not self._wanted.empty():
            crew.call_ranks(Worker.write_checkpoint, self._wanted.get())
            self._writing = True
        if self._writing and None not in (reports := crew.call_ranks(Worker.await_checkpoint, wait)):
            self._writing = False
            self._reports.put([report for report in reports if report])
        self._poll_saver()

    def finish_save(self, crew: Crew) -> None:
        """Wait until no save is under way. Raise GaveUp if the save has taken longer than checkpoint.timeout."""
        with show_phase(f"writing the checkpoint of step {self._saving}"):
            self._await_save(crew)
        self.advance_save(crew)

    def _await_save(self, crew: Crew) -> None:
        """Continue the save under way until it is over. Raise GaveUp if it takes longer than checkpoint.timeout."""
        limit = self._config.checkpoint.timeout
        while self._saver.is_saving:
            self.advance_save(crew, wait=WAIT_SECONDS)
            self._saver.wait(POLL_SECONDS)
            if limit and monotonic() > self._began + limit:
                key = storage_key(self._config)
                raise GaveUp(f"{key}: a save has taken longer than checkpoint.timeout={limit:g} s", of_world=True)

    def _build_meta(self, step: int, values: dict[str, Any]) -> Meta:
        """Return the metadata for the manifest of a checkpoint after training step `step`. `values`: the part of
        the state that is no tensor."""
        return Meta(
            step=step,
            samples=count_earlier_samples(self._config.train, step + 1),
            seed=self._config.seed,
            corpus=self._corpus,
            identity=run_identity(self._config),
            configuration=hash_values(redact_secrets(self._config.to_dict())),
            plan={"mesh": self.plan.mesh.axes, "scheme": self.plan.scheme.name, "digest": plan_digest(self.plan)},
            values={**values, **self._more_values},
            versions=list_versions(),
        )

    def _poll_saver(self) -> None:
        """Journal what the saver's thread has reported on checkpoints since the last call, and react to it."""
        for report in self._saver.poll_events():
            self._note_event(events.build_event(**report, useful_seconds=self._useful))

    def _note_event(self, event: events.JournalEvent) -> None:
        """Journal one event of saving a checkpoint and react to it: count a good checkpoint or a failed save, warn the
        user. Raise GaveUp if another driver has taken over the run."""
        self._useful = None
        self._journal.write(event)
        if isinstance(event, events.Checkpoint):
            self.step, self._failed = event.step, 0
            self._own.add(event.directory)
        elif isinstance(event, events.Superseded):
            raise GaveUp(event.reason)
        elif isinstance(event, events.CheckpointFailed | events.CheckpointPruneFailed):
            goes_on = f"the newest good one is of step {self.step}" if self.step else "this run has none yet"
            if isinstance(event, events.CheckpointFailed) and event.again:
                if self._failed:  # of a storage that has failed before, only what it comes to is said
                    return
                goes_on = "it is tried again"
            elif isinstance(event, events.CheckpointFailed) and not self._abandoned:
                self._failing = self._failing if self._failed else monotonic()
                self._failed += 1
                self._why = event.reason
                goes_on += f", and {format_count(event.step - self.step, 'step')} would be lost"
                if self._failed > 1:
                    goes_on += f"; {self._failed} saves in a row have failed, for {monotonic() - self._failing:.0f} s"
            what = event.word.replace("_", " ")
            where, loud = storage_key(self._config), "WARNING" if self._failed < FAILURES else "ALARM"
            self._say(f"{loud}: {what} after step {event.step}: {where}: {event.reason}; {goes_on}")


def _request_block_files(wanted: SimpleQueue[str], reports: SimpleQueue[Reports], directory: str) -> list[FileReport]:
    """Let the workers write their block files of one attempt at a checkpoint to `directory`, wait, and return their
    reports by rank; raise OSError if a worker could not write. Runs in the saver's thread, which must not call the
    crew: the driver's thread takes the directory from the queue `wanted` and puts the workers' answers into
    `reports`."""
    wanted.put(directory)
    file_reports = []
    for rank, report in enumerate(reports.get()):
        if isinstance(report, Unwritten):
            raise OSError(f"rank {rank}: {report.error}")
        file_reports.append(report)
    return file_reports
