"""A crew whose processes torchrun has started: `torchrun --nproc-per-node N -m platform.launch +experiment=...`.

The process of rank 0 is the driver. Every process, this one too, serves a worker: it learns through torchrun's own
store where to dial, and from then on is a member like any other. One that fails goes on in the next generation; when a
process dies, torchrun asks the others to end, and the driver saves what they hold in memory.

Anybody on the network can read and write torchrun's store. So it holds the driver's address and session, which are no
secrets; the key that tokens are made of is in the environment of all processes, PLATFORM_SECRET, or in a file of the
run directory that only this user can read, while the crew starts; and who answers at that address has to prove that it
has the key, before it is believed. The configuration travels on that connection.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from platform.cluster.crew.base.job import Assignment, assign, one_gpu
from platform.cluster.crew.base.remote import RemoteCrew
from platform.cluster.crew.base.signals import STOPPING
from platform.cluster.crew.launchers.host import attend
from platform.cluster.wire import secret
from platform.cluster.wire.channel import dial
from platform.config.fields import ConfigError, violation

SECRET = "PLATFORM_SECRET"
_SHORTEST = 16  # characters of it
_FILE = "torchrun.key"
_KEY_SECONDS = 30.0  # for a file to be seen that another machine has just written
_DRIVER = "driver"  # the store's only key: where the driver is, or null where there is none
_FOREVER = timedelta(days=365)  # a follower waits for its place for as long as the driver lives
_CONNECT = timedelta(seconds=30)
_EXIT_SECONDS = 3.0  # for this process's own worker


def present() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_follower() -> bool:
    """Whether this process only serves, because the driver is the process of rank 0."""
    return present() and os.environ["RANK"] != "0"


def follow(run_dir: Path) -> None:
    """Serve the worker of this process until the driver hangs up.

    Raises ConfigError where the driver's secret cannot be had, PermissionError where who answers does not have it.
    """
    store = _connect()
    store.wait([_DRIVER], _FOREVER)
    if (told := _published(store.get(_DRIVER))) is None:
        return
    address, session = told
    for number in STOPPING:  # torchrun sends them to all processes; the driver decides, and wants its workers for it
        signal.signal(number, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    _serve(address, secret.token(_key(run_dir), session, rank), rank, own_process=True)


def dismiss() -> None:
    """Let the followers go where no crew was formed. Called by the driver before it ends."""
    store = _connect()
    if not store.check([_DRIVER]):
        store.set(_DRIVER, "null")


def given_key() -> str:
    """Return the secret that the environment has, "" where it has none. Raises ConfigError where it is too short."""
    key = os.environ.get(SECRET, "")
    if key and len(key) < _SHORTEST:
        raise ConfigError(f"{SECRET}: has {len(key)} characters, and must have {_SHORTEST} at least, or none")
    return key


class TorchrunCrew(RemoteCrew):
    """The processes of torchrun, numbered by its ranks. Member 0 is a thread of this process, so that the driver can
    watch it; it cannot be killed, and nobody can be hired."""

    can_hire = False

    def _open(self) -> str:
        self._key = given_key()
        if not self._key:
            self._key = secret.new()
            _write(self._key, file := self.job.run_dir / _FILE)
            self._opened.callback(file.unlink, missing_ok=True)
        return "127.0.0.1" if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] else os.environ["MASTER_ADDR"]

    def _start(self) -> None:
        super()._start()
        (self.job.run_dir / _FILE).unlink(missing_ok=True)  # everybody has it

    def _launch(self, numbers: Sequence[int]) -> None:
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        place = assign(self.job, 0, local_rank=0, local_world_size=local_size, group_rank=0)
        # torchrun has set the environment, and it has its own options for logs
        self._board.tell({"place": asdict(replace(place, environment={}, log=""))})
        _connect().set(_DRIVER, json.dumps({"address": self._board.address, "session": self._board.session}))
        own = self._board.address, self._board.token(0), 0
        self._own = threading.Thread(
            target=_serve, args=own, kwargs={"own_process": False}, name="worker0", daemon=True
        )
        self._own.start()

    def _log(self, number: int) -> Path | None:
        return None

    def _ended(self, number: int, seconds: float) -> str | None:
        return None  # torchrun says so, and ends this process too

    def _kill(self, number: int) -> None:
        pass  # it ends by itself when its connection is closed

    def _dismiss(self, polite: bool) -> None:
        if polite:
            self._own.join(_EXIT_SECONDS)


def _serve(address: tuple[str, int], token: str, number: int, *, own_process: bool) -> None:
    """Dial the driver and be the worker that it wants."""
    line = dial(address, token, number)
    place = Assignment(**line.welcome["place"])
    if place.device == "cuda":
        os.environ.update(one_gpu(int(os.environ["LOCAL_RANK"])))
    attend(replace(place, number=number), line, own_process=own_process)


def _published(data: bytes) -> tuple[tuple[str, int], str] | None:
    """Where the driver is and its session, None where there is none. Raises PermissionError for what no driver writes:
    the store is open to everybody."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        if (told := json.loads(data)) is None:
            return None
        (host, port), session = told["address"], told["session"]
        if isinstance(host, str) and type(port) is int and 0 < port < 1 << 16 and isinstance(session, str):
            return (host, port), session
    raise PermissionError("torchrun's store holds what no driver writes: somebody else uses it")


def _write(key: str, file: Path) -> None:
    """Raises FileExistsError where somebody else makes one at this moment."""
    file.unlink(missing_ok=True)  # of a driver that was killed
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as out:
        out.write(key)


def _key(run_dir: Path) -> str:
    """The run's secret, from the environment or the file. Raises ConfigError."""
    if key := given_key():
        return key
    deadline = monotonic() + _KEY_SECONDS
    while True:
        try:
            return _read(run_dir / _FILE)
        except (OSError, ValueError) as error:
            if monotonic() > deadline:
                constraint = f"the driver's secret cannot be read there ({error}); all nodes must see the same"
                raise ConfigError(
                    violation("run.dir", run_dir, constraint, [f"{SECRET} in the environment of all"])
                ) from None
        sleep(0.2)


def _read(file: Path) -> str:
    """Raises OSError, or ValueError where somebody else could have written it."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor) as source:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("others can read or write it")
        key = source.read(100)
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise ValueError("it is not whole")
    return key


def _connect() -> Any:
    """A connection of its own to torchrun's store: a thread that waits in it keeps no other from using it."""
    from torch.distributed import PrefixStore, TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=_CONNECT)
    return PrefixStore(f"crew/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
