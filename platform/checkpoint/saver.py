"""Saving while training continues: one save at a time, in a background thread of the driver, retried on failure, and
never at the cost of an older checkpoint."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from platform.boundary.documents import error_line
from platform.boundary.storage import Storage
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import Shapes
from platform.checkpoint.catalogue import CarriedFiles, Lease, Superseded, delete_checkpoint, prune_checkpoints
from platform.checkpoint.manifest import FileReport, Meta

Write = Callable[[str], Sequence[FileReport]]
"""Has every worker write its image into the directory of this name, and returns their reports; raises what they raise.
Called from the saver's thread, again for every attempt: the images must stay as they are until the save is over."""


class CheckpointSaver:
    """Saves checkpoints from the driver, one at a time in a background thread. `poll_events` returns what happened; no
    exception ever reaches training.

    Events, plain data: {event: checkpoint, step, directory, bytes, seconds},
    {event: checkpoint_failed, step, directory, attempt, reason, again: whether it is tried once more},
    {event: checkpoint_prune_failed, step, reason}, {event: superseded, step, reason}.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        last: int = 2,
        every: int = 0,
        tries: int = 3,
        pause: float = 1.0,
        lease: Lease | None = None,
    ):
        """Configure the saver of checkpoints. `last`, `every`: the newest to keep, and the steps whose multiples are
        kept, see `dispensable`. `tries`: most attempts at one checkpoint; `pause`: seconds before the second try,
        doubled before every further one. `lease`: once it is lost, nothing is committed or deleted any more."""
        self._storage, self._last, self._every, self._tries, self._pause = storage, last, every, tries, pause
        self.losses: Mapping[int, float] = {}  # step -> validation loss, of which the lowest's checkpoint is kept
        self._check = lease.check_held if lease else lambda: None
        self._cancelled = threading.Event()
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_saving(self) -> bool:
        """Return True while a checkpoint is being saved in the background."""
        return self._thread is not None and self._thread.is_alive()

    def start_save(self, tensors: Shapes, meta: Meta, write: Write, files: CarriedFiles | None = None) -> None:
        """Begin to save a checkpoint of the workers' images, with the `files` that it carries, in the background.
        `tensors`: see `commit`; `write`: function that has the workers write into a directory. Must not be called while
        `is_saving`: the images are still in use."""
        assert not self.is_saving, "one save at a time"
        self._cancelled.clear()
        files = files or {}
        meta = replace(meta, values={**meta.values, **catalogue.hash_carried_files(files)})

        def write_all_images(directory: str) -> Sequence[FileReport]:
            """Let the workers write their files of a checkpoint into `directory`, and add the files that it carries."""
            reports = write(directory)
            catalogue.write_carried_files(self._storage, directory, files)
            return reports

        args = tensors, meta, write_all_images
        self._thread = threading.Thread(target=self._save_with_retries, args=args, name="saver", daemon=True)
        self._thread.start()

    def cancel_retries(self) -> None:
        """Stop retrying to save the checkpoint: the attempt under way is the last, as the workers' images are gone."""
        self._cancelled.set()

    def poll_events(self) -> list[dict[str, Any]]:
        """Return events of saved checkpoints since the last call, in order: saved, failed, not pruned, superseded."""
        events = []
        with suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the checkpoint being saved, at most `timeout` seconds; return True if the save is over."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_saving

    def _save_with_retries(self, tensors: Shapes, meta: Meta, write: Write) -> None:
        """Save one checkpoint in the saver's thread: try until it is committed, the tries are used up, the save is
        cancelled or the lease is lost; delete superseded checkpoints after a success."""
        for attempt in range(1, self._tries + 1):
            try:
                if self._attempt_save(tensors, meta, write, attempt):
                    return self._prune_dispensable(meta.step)
            except Superseded as error:
                return self._events.put({"event": "superseded", "step": meta.step, "reason": str(error)})
            if self._cancelled.wait(self._pause * 2 ** (attempt - 1) if attempt < self._tries else 0.0):
                return

    def _attempt_save(self, tensors: Shapes, meta: Meta, write: Write, attempt: int) -> bool:
        """Try once to have the workers write a checkpoint and to commit it, with an event for success or failure;
        return True if it is committed. Raises Superseded."""
        directory, start = "", time.monotonic()
        try:
            self._check()
            # fresh: the remains of a failed attempt do not matter
            directory = catalogue.choose_attempt_directory(self._storage, meta.step)
            reports = write(directory)
            manifest = catalogue.commit_checkpoint(self._storage, directory, tensors, reports, meta, self._check)
        except Exception as error:
            if not isinstance(error, Superseded):
                again = attempt < self._tries and not self._cancelled.is_set()
                failed = {"directory": directory, "attempt": attempt, "reason": error_line(error), "again": again}
                self._events.put({"event": "checkpoint_failed", "step": meta.step, **failed})
            if directory:
                with suppress(OSError):  # frees its space; if that fails too, `prune` will
                    delete_checkpoint(self._storage, directory)
            if isinstance(error, Superseded):
                raise
            return False
        seconds = time.monotonic() - start
        saved = {"directory": directory, "bytes": manifest.nbytes, "seconds": seconds}
        self._events.put({"event": "checkpoint", "step": meta.step, **saved})
        return True

    def _prune_dispensable(self, step: int) -> None:
        """Delete dispensable checkpoints; report a failure as an event, but raise if the lease is lost."""
        self._check()  # a newer driver may be about to read what would be deleted
        try:
            prune_checkpoints(self._storage, self._last, self._every, self.losses)
        except Exception as error:
            self._events.put({"event": "checkpoint_prune_failed", "step": step, "reason": error_line(error)})
