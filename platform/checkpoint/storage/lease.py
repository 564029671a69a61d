"""The lease on a storage: only the newest driver of a run may write, not an older one that is still alive.

A driver that starts writes `lease-EPOCH-TOKEN`, with an epoch above all that it finds there. The highest name holds the
lease, at any moment and for everybody who looks, so neither clocks nor renaming are needed. An older driver notices
when it is about to commit, and stops. At that moment it may still write an attempt directory of its own, which harms no
other: see `platform.checkpoint.storage.catalogue`.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress

from platform.boundary.files.file_storage import Storage, read_note, write_note

_NAME = r"lease-([0-9]{6,18})-([0-9a-f]{8})"


class Superseded(Exception):
    """Signals that another driver has taken the lease on the run's checkpoints: this one may write no more."""


class Lease:
    """Lease of one driver on one storage, from `take` on. `epoch` rises with every driver."""

    def __init__(self, storage: Storage, name: str, epoch: int, owner: str):
        """Construct the lease that the file `name` on a storage of checkpoints stands for; `take` writes that file."""
        self._storage, self._name, self.epoch, self._owner = storage, name, epoch, owner

    @classmethod
    def take(cls, storage: Storage, owner: str) -> Lease:
        """Take the lease on a storage of checkpoints, superseding its holder. `owner`: text for people that names this
        driver. Raises OSError."""
        older = _found(storage)
        epoch = max((int(match[1]) for match in older), default=0) + 1
        lease = cls(storage, f"lease-{epoch:06d}-{secrets.token_hex(4)}", epoch, owner)
        if not re.fullmatch(_NAME, lease._name):
            raise OSError(f"{storage.url}: no lease is above {max(m[0] for m in older)}, which no driver wrote")
        write_note(storage, lease._name, owner)
        for match in older:
            with suppress(OSError):
                read_note(storage, match[0])  # raises unless it is a file; else it is no lease
                storage.delete(match[0])
        return lease

    def check(self) -> None:
        """Raise Superseded if another driver holds the lease on the storage of checkpoints now, OSError if the storage
        does not say. If its file was removed, take it again."""
        if not _found(self._storage):
            write_note(self._storage, self._name, self._owner)
        newest = max(_found(self._storage), key=lambda match: (int(match[1]), match[2]), default=None)
        if newest is None or newest[0] != self._name:
            there = "nobody" if newest is None else self._holder(newest[0])
            raise Superseded(f"this driver's lease (epoch {self.epoch}) on {self._storage.url} is held by {there} now")

    def _holder(self, name: str) -> str:
        """Return the driver that a lease file on the checkpoints' storage names, with the file, or the file alone."""
        with suppress(OSError):
            return f"{read_note(self._storage, name)} ({name})"
        return name


def _found(storage: Storage) -> list[re.Match[str]]:
    """Return the matches of all names of lease files on a storage of checkpoints: (epoch, token) each."""
    found = (re.fullmatch(_NAME, name) for name in storage.list(""))
    return [match for match in found if match and match[1] == f"{int(match[1]):06d}"]
