"""Who may write to a storage: the newest driver of a run, and no older one that is still alive.

A driver that starts writes `lease-EPOCH-TOKEN`, an epoch above all that it finds there. The highest name holds the
lease, at any moment and for everybody who looks, so that neither clocks nor renaming are needed. An older driver sees
it where it is about to commit, and stops. What it may still write in that moment is an attempt of its own, which harms
none: `platform.checkpoint.storage.catalogue`.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress

from platform.boundary import documents
from platform.checkpoint.storage.storage import Storage

_NAME = r"lease-([0-9]{6,18})-([0-9a-f]{8})"
_NOTE = 4096  # bytes of one: who holds it


class Superseded(Exception):
    """Another driver has taken over."""


class Lease:
    """Of one driver on one storage, from `take` on. `epoch` rises with every driver."""

    def __init__(self, storage: Storage, name: str, epoch: int, owner: str):
        self._storage, self._name, self.epoch, self._owner = storage, name, epoch, owner

    @classmethod
    def take(cls, storage: Storage, owner: str) -> Lease:
        """Supersedes whoever holds it. `owner`: for people. Raises OSError."""
        older = _found(storage)
        epoch = max((int(match[1]) for match in older), default=0) + 1
        lease = cls(storage, f"lease-{epoch:06d}-{secrets.token_hex(4)}", epoch, owner)
        if not re.fullmatch(_NAME, lease._name):
            raise OSError(f"{storage.url}: no lease is above {max(m[0] for m in older)}, which no driver wrote")
        lease._write()
        for match in older:
            with suppress(OSError):
                storage.read(match[0], 0, _NOTE)  # what is no file is no lease, and not ours to delete
                storage.delete(match[0])
        return lease

    def check(self) -> None:
        """Raises Superseded where another driver holds it now, OSError where the storage does not say. Takes it again
        where nobody does: then what lay there was removed."""
        if not _found(self._storage):
            self._write()
        newest = max(_found(self._storage), key=lambda match: (int(match[1]), match[2]), default=None)
        if newest is None or newest[0] != self._name:
            there = "nobody" if newest is None else self._holder(newest[0])
            raise Superseded(f"this driver's lease (epoch {self.epoch}) on {self._storage.url} is held by {there} now")

    def _write(self) -> None:
        self._storage.write(self._name, [memoryview(f"{self._owner}\n".encode())])

    def _holder(self, name: str) -> str:
        with suppress(OSError):
            return f"{documents.line(self._storage.read(name, 0, _NOTE))} ({name})"
        return name


def _found(storage: Storage) -> list[re.Match[str]]:
    found = (re.fullmatch(_NAME, name) for name in storage.list(""))
    return [match for match in found if match and match[1] == f"{int(match[1]):06d}"]
