"""Worker processes forked from one that has imported torch, where what is tested is not how processes start."""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing import forkserver

from platform.cluster.crew.base.job import Assignment
from platform.cluster.crew.launchers.forks import ForkServer
from platform.config.fields import Config

PRELOADED = ["platform.train.worker", "torch.distributed", "torch._dynamo"]  # the last by the first optimizer, else
CONTEXT = multiprocessing.get_context("forkserver")


def start() -> None:
    """Start the process that workers of the pool are forked from; it ends with this one."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class Shared(ForkServer):
    """Stands in for the fork server of a crew: one that all crews of this process share, whose workers each crew kills
    by itself."""

    def close(self) -> None:
        pass


@cache
def shared() -> Shared:
    place = Assignment("platform.train.worker:Worker", Config(), 0, device="cpu", run_dir="", threads=1)
    return Shared(place)
