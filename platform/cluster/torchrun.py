"""A crew whose processes torchrun has started: `torchrun --nproc-per-node N -m platform.launch +experiment=...`.

The process of rank 0 is the driver. Every process, this one too, serves its worker: calls and their outcomes travel as
JSON through torchrun's own store. When a process dies, torchrun ends the others.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Set
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from platform.cluster.crew import Outcome, RemoteCrew, arguments
from platform.cluster.host import Answer, Call, serve
from platform.cluster.job import Assignment, assign, one_gpu

_FOREVER = timedelta(days=365)  # a rank waits for its next call for as long as the driver lives
_CONNECT = timedelta(seconds=30)
_POLL_SECONDS = 0.002  # the driver does not block in the store, where Ctrl-C would not reach it
_EXIT_SECONDS = 3.0  # for this process's own rank


def present() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_follower() -> bool:
    """Whether this process only serves, because the driver is the process of rank 0."""
    return present() and os.environ["RANK"] != "0"


def serve_rank() -> None:
    """Serves the worker of this process until the driver dismisses it."""
    store, rank = _connect(), int(os.environ["RANK"])
    if (place := _get(store, f"place/{rank}")) is None:
        return
    if place["device"] == "cuda":
        os.environ.update(one_gpu(int(os.environ["LOCAL_RANK"])))
    number = 0  # of the call; 0 is the making of the worker

    def receive() -> Call | None:
        return _get(store, f"call/{number}/{rank}")

    def send(answer: Answer) -> None:
        nonlocal number
        place_in_line = store.add(f"outcomes/{number}", 1)  # the driver reads them as they come
        store.set(f"outcome/{number}/{place_in_line}", json.dumps({"rank": rank, **answer}))
        number += 1

    serve(Assignment(**place), receive, send)


def dismiss() -> None:
    """Lets the followers go where no crew was formed. Called by the driver before it ends."""
    store = _connect()
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if not store.check([f"place/{rank}"]):
            store.set(f"place/{rank}", "null")


class TorchrunCrew(RemoteCrew):
    """The processes of torchrun. The worker of rank 0 runs in a thread of this one, so that the driver can watch it."""

    def _start(self) -> None:
        self.store = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._number = 0  # of the running call; 0 is the making of the workers
        self._arrived = 0  # its outcomes so far
        self._store = _connect()
        self._own = threading.Thread(target=serve_rank, name=self.job.name(0), daemon=True)
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        for rank in range(self.job.world_size):
            place = assign(self.job, rank, local_rank=0, local_world_size=local_size, group_rank=0, store=self.store)
            # torchrun has set the environment, and it has its own options for logs
            self._store.set(f"place/{rank}", json.dumps(asdict(replace(place, environment={}, log=""))))
        self._own.start()

    def _log(self, rank: int) -> Path | None:
        return None

    def _send(self, method: str, args: tuple[Any, ...]) -> None:
        ranks = range(self.job.world_size)
        for key in (*(f"call/{self._number}/{rank}" for rank in ranks), f"outcomes/{self._number}"):
            self._store.delete_key(key)  # all ranks are done with it
        for place_in_line in range(1, self._arrived + 1):
            self._store.delete_key(f"outcome/{self._number}/{place_in_line}")
        self._number, self._arrived = self._number + 1, 0
        for rank in ranks:
            self._store.set(f"call/{self._number}/{rank}", json.dumps([method, arguments(args, rank)]))

    def _receive(self, pending: Set[int], timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        key = f"outcome/{self._number}/{self._arrived + 1}"
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return []
            time.sleep(_POLL_SECONDS)
        self._arrived += 1
        return [Outcome(**json.loads(self._store.get(key)))]

    def _dismiss(self) -> None:
        for rank in range(self.job.world_size):
            self._store.set(f"call/{self._number + 1}/{rank}", "null")
        if self._polite:
            self._own.join(_EXIT_SECONDS)


def _connect() -> Any:
    """A connection of its own to torchrun's store: a thread that waits in it keeps no other from using it."""
    from torch.distributed import PrefixStore, TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=_CONNECT)
    return PrefixStore(f"crew/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _get(store: Any, key: str) -> Any:
    store.wait([key], _FOREVER)
    return json.loads(store.get(key))
