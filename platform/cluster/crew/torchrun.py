"""Launcher for processes that torchrun has started: `torchrun --nproc-per-node N -m platform.launch +experiment=...`.

The process of rank 0 is the driver. Every process, including rank 0, serves a worker: it reads from torchrun's own
store where to dial, and from then on is a member like any other. A member that raises continues in the next generation.
When a process dies, torchrun asks the others to end, and the driver saves the state that they hold in memory.

Anyone on the network can read and write torchrun's store, so it holds only the driver's address and session, which are
public. The key from which tokens are derived is either in every process's environment, as PLATFORM_SECRET, or, while
the crew starts, in a file of the run directory that only this user can read. The peer at the published address has to
prove that it has the key before anything else that it sends, such as the configuration, is used.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any

from platform.boundary import documents, schema
from platform.boundary.interrupts import ENDING
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, Span
from platform.cluster.crew import channel
from platform.cluster.crew.channel import connect_to_driver, encode_json
from platform.cluster.crew.crew import Launcher
from platform.cluster.crew.job import Assignment, Job, assign_worker, local_tiers, single_gpu_environment
from platform.cluster.crew.switchboard import WorkerSwitchboard
from platform.cluster.crew.worker_host import serve_connection

SECRET = "PLATFORM_SECRET"
_SHORTEST = 16  # characters of PLATFORM_SECRET, at least
_FILE = "torchrun.key"
_KEY_SECONDS = 30.0  # for a file just written by another machine to become visible
_DRIVER = "driver"  # the store's only key; its value: the driver's address and session, or null if no crew was formed
_FOREVER = timedelta(days=365)  # a follower waits as long as the driver lives
_CONNECT = timedelta(seconds=30)
_THREAD_SECONDS = 3.0  # for the worker thread of this process to end


def is_under_torchrun() -> bool:
    """Return True if torchrun started this process, judged by the environment variables that it sets."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_follower() -> bool:
    """Return True if this process only serves a worker: torchrun started it, and its rank is not 0 (the driver)."""
    return is_under_torchrun() and os.environ["RANK"] != "0"


def follow_driver(run_dir: Path) -> None:
    """Serve the worker of this process, which torchrun started with a rank other than 0: wait until the driver (rank 0)
    has published its address in torchrun's store, dial it, and execute its calls until it closes the connection. Return
    without that if the driver ends before it has published an address.

    Raises ConfigError if the run's secret key is found neither in PLATFORM_SECRET nor in `run_dir`, PermissionError if
    the peer at the published address cannot prove that it has this key.
    """
    store = _connect_store()
    store.wait([_DRIVER], _FOREVER)
    if (driver := _parse_driver_entry(store.get(_DRIVER))) is None:
        return
    for number in ENDING:  # torchrun signals all processes; the driver decides, and needs its workers to save
        signal.signal(number, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    token = channel.member_token(_find_secret_key(run_dir), driver.session, rank)
    _serve_member(driver.address, token, rank, own_process=True)


def release_waiting_workers() -> None:
    """Release the processes that wait in `follow_driver` if the driver, about to end, has not published its address."""
    store = _connect_store()
    if not store.check([_DRIVER]):
        store.set(_DRIVER, "null")


def read_environment_key() -> str:
    """Return the run's secret key that the user set in PLATFORM_SECRET for all processes under torchrun, "" if it is
    not set. Raises ConfigError if it is shorter than _SHORTEST characters."""
    key = os.environ.get(SECRET, "")
    if key and len(key) < _SHORTEST:
        raise ConfigError(f"{SECRET}: has {len(key)} characters, and must have {_SHORTEST} at least, or none")
    return key


@dataclass(frozen=True)
class _Driver:
    """Address (host, port) and session of the driver, as it publishes them in torchrun's store under the key
    _DRIVER."""

    address: tuple[str, Annotated[int, Span(1, (1 << 16) - 1)]]
    session: str


class TorchrunLauncher(Launcher):
    """Admits the processes that torchrun started, numbered by torchrun's ranks. Member 0 is a thread of this process,
    so that the driver can watch it like the others. Members cannot be killed, and none can be hired."""

    can_hire = False
    _file: Path | None = None  # with the key, until all members have read it

    def prepare_launch(self, job: Job, size: int) -> str:
        """Return the host on which the driver is to listen, as torchrun has started the worker processes already."""
        self.key = read_environment_key()
        if not self.key:
            self.key = channel.new_nonce()
            _write_secret_key(self.key, file := job.run_dir / _FILE)
            self._file = file
        return "127.0.0.1" if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] else os.environ["MASTER_ADDR"]

    def clean_up_after_start(self) -> None:
        """Remove the file with the run's secret key, once all processes under torchrun have dialled in."""
        if self._file:
            self._file.unlink(missing_ok=True)

    def launch_workers(self, job: Job, numbers: Sequence[int], board: WorkerSwitchboard) -> None:
        """Publish the driver's address in torchrun's store, and serve member 0 in a thread of this process."""
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        assignment = assign_worker(job, 0, local_rank=0, local_world_size=local_size, group_rank=0)
        # torchrun sets the environment of the others, and has its own options for logs
        board.payload = replace(assignment, environment={}, log="")
        _connect_store().set(_DRIVER, encode_json(_Driver(board.address, board.session)).decode())
        serve = partial(_serve_member, board.address, board.member_token(0), 0, own_process=False)
        self._own = threading.Thread(target=serve, name="worker0", daemon=True)
        self._own.start()

    def log_path(self, job: Job, number: int) -> Path | None:
        """Return None: torchrun has options of its own for the output of worker processes."""
        return None

    def describe_exit(self, number: int, seconds: float) -> str | None:
        """Return None: torchrun itself reports how a process ended, and ends this process too."""
        return None  # torchrun reports it, and ends this process too

    def kill_worker(self, number: int) -> None:
        """Leave a process under torchrun to end by itself, as it does when its connection is closed."""
        pass  # it ends by itself when its connection is closed

    def end_workers(self, polite: bool) -> None:
        """Remove the secret key's file and, if `polite`, wait briefly for the end of member 0's thread."""
        self.clean_up_after_start()
        if polite:
            self._own.join(_THREAD_SECONDS)


def _serve_member(address: tuple[str, int], token: str, number: int, *, own_process: bool) -> None:
    """Dial the driver at `address` as member `number` with its secret `token`, and serve the worker that the driver's
    welcome describes, as an Assignment, until the driver closes the connection."""
    line = connect_to_driver(address, token, number, tiers=local_tiers([], {}))
    assignment = schema.parse_value(Assignment, line.payload)
    if assignment.device == "cuda":
        os.environ.update(single_gpu_environment(int(os.environ["LOCAL_RANK"])))
    replace(assignment, environment={}).enter_environment()
    serve_connection(replace(assignment, number=number), line, own_process=own_process)


def _parse_driver_entry(data: bytes) -> _Driver | None:
    """Parse `data`, the driver's entry in torchrun's store: its address and session, or None if it ended without
    opening its crew. Raises PermissionError for a value that no driver writes, since anyone can write to the store."""
    try:
        driver: _Driver | None = schema.build_reader(_Driver | None)(documents.parse_json(data))
        return driver
    except Malformed:
        raise PermissionError("torchrun's store holds what no driver writes: somebody else uses it") from None


def _write_secret_key(key: str, file: Path) -> None:
    """Write the run's secret key to a new file that only this user can read, for the other processes that torchrun
    started. Raises FileExistsError if another process creates the file meanwhile."""
    file.unlink(missing_ok=True)  # left by a driver that was killed
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as key_file:
        key_file.write(key)


def _find_secret_key(run_dir: Path) -> str:
    """Return the run's secret key, from which the tokens of the workers are derived: from PLATFORM_SECRET, else from
    the file in `run_dir` that the driver writes. Raises ConfigError if neither has it within _KEY_SECONDS."""
    if key := read_environment_key():
        return key
    deadline = monotonic() + _KEY_SECONDS
    while True:
        try:
            return _read_secret_key(run_dir / _FILE)
        except (OSError, ValueError) as error:
            if monotonic() > deadline:
                constraint = f"the driver's secret cannot be read there ({error}); all nodes must see the same"
                raise ConfigError("run.dir", run_dir, constraint, [f"{SECRET} in the environment of all"]) from None
        sleep(0.2)


def _read_secret_key(file: Path) -> str:
    """Read the run's secret key from the file that the driver wrote. Raises OSError; ValueError if other users could
    have written the file or it is incomplete."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor) as source:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("others can read or write it")
        key = source.read(100)
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise ValueError("it is not whole")
    return key


def _connect_store() -> Any:
    """Open a separate connection to torchrun's TCPStore, with keys prefixed by torchrun's restart count, so that a
    thread waiting in it does not block another's use."""
    from torch.distributed import PrefixStore, TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=_CONNECT)
    return PrefixStore(f"crew/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
