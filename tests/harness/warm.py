"""Worker processes forked from one that has imported torch, where what is tested is not how Python starts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

PRELOADED = ["platform.train.worker", "torch.distributed", "torch._dynamo"]  # the last by the first optimizer, else
CONTEXT = multiprocessing.get_context("forkserver")


def start() -> None:
    """Start the process that workers are forked from; it ends with this one."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class Warm:
    """Stands in for the module `multiprocessing` where a crew starts its processes."""

    @staticmethod
    def get_context(_: str) -> type[Warm]:
        return Warm

    @staticmethod
    def Process(target: Callable[..., None], args: tuple[Any, ...], **how: Any) -> Any:  # noqa: N802
        return CONTEXT.Process(target=_run, args=(dict(os.environ), target, args), **how)


def _run(environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run in a worker: it has the environment that the driver has now, as a spawned one would."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
