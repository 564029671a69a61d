"""A crew whose processes torchrun has started: `torchrun --nproc-per-node N -m platform.launch +experiment=...`.

The process of rank 0 is the driver. Every process, this one too, serves a worker: it learns through torchrun's own
store where to dial, and from then on is a member like any other. One that fails goes on in the next generation; when a
process dies, torchrun asks the others to end, and the driver saves what they hold in memory.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from platform.cluster.job import Assignment, assign, one_gpu
from platform.cluster.remote import RemoteCrew
from platform.cluster.signals import STOPPING

_FOREVER = timedelta(days=365)  # a follower waits for its place for as long as the driver lives
_CONNECT = timedelta(seconds=30)
_EXIT_SECONDS = 3.0  # for this process's own worker


def present() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_follower() -> bool:
    """Whether this process only serves, because the driver is the process of rank 0."""
    return present() and os.environ["RANK"] != "0"


def serve_rank() -> None:
    """Serves the worker of this process until the driver hangs up."""
    from platform.cluster.host import serve  # torch takes seconds: a refusal does not wait for it

    store, rank = _connect(), os.environ["RANK"]
    store.wait([f"place/{rank}"], _FOREVER)
    if (told := json.loads(store.get(f"place/{rank}"))) is None:
        return
    place, address, token = told
    if place["device"] == "cuda":
        os.environ.update(one_gpu(int(os.environ["LOCAL_RANK"])))
    if is_follower():
        for (
            number
        ) in STOPPING:  # torchrun sends them to all processes; the driver decides, and wants its workers for it
            signal.signal(number, signal.SIG_IGN)
    serve(Assignment(**place), tuple(address), token, own_process=is_follower())


def dismiss() -> None:
    """Lets the followers go where no crew was formed. Called by the driver before it ends."""
    store = _connect()
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if not store.check([f"place/{rank}"]):
            store.set(f"place/{rank}", "null")


class TorchrunCrew(RemoteCrew):
    """The processes of torchrun, numbered by its ranks. Member 0 is a thread of this process, so that the driver can
    watch it; it cannot be killed, and nobody can be hired."""

    can_hire = False

    def _open(self) -> str:
        self._own = threading.Thread(target=serve_rank, name="worker0", daemon=True)
        return "127.0.0.1" if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] else os.environ["MASTER_ADDR"]

    def _launch(self, numbers: Sequence[int]) -> None:
        store, local_size = _connect(), int(os.environ["LOCAL_WORLD_SIZE"])
        for number in numbers:
            place = assign(self.job, number, local_rank=0, local_world_size=local_size, group_rank=0)
            # torchrun has set the environment, and it has its own options for logs
            plain = asdict(replace(place, environment={}, log=""))
            store.set(f"place/{number}", json.dumps([plain, self._board.address, self._board.token]))
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


def _connect() -> Any:
    """A connection of its own to torchrun's store: a thread that waits in it keeps no other from using it."""
    from torch.distributed import PrefixStore, TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=_CONNECT)
    return PrefixStore(f"crew/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
