"""Processes forked from one that has imported torch, where what is tested is not how processes start: the ranks of a
pool, the workers of a crew, and whole commands."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory

from platform.cluster.crew.base.job import Assignment
from platform.cluster.crew.launchers import fork_server, processes
from platform.cluster.crew.launchers.forks import ForkServer
from platform.config.fields import Config

# Of commands, of workers, and what the first optimizer imports
PRELOADED = ["hydra", "platform.launch", "platform.cluster.driver", "platform.train.worker", "torch._dynamo"]
CONTEXT = multiprocessing.get_context("forkserver")


def start() -> None:
    """Start the process that all others are forked from; it ends with this one."""
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


def run_module(module: str, *arguments: str, cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` in the folder `cwd`, as `subprocess.run` does, in a process that is forked, as
    its fork server is. Raises subprocess.TimeoutExpired after `timeout` seconds."""
    start()
    with TemporaryDirectory() as folder:
        out, error = Path(folder, "out"), Path(folder, "error")
        process = CONTEXT.Process(target=_run, args=(module, arguments, cwd, dict(os.environ), (out, error)))
        process.start()
        process.join(timeout)
        status = process.exitcode
        if status is None:
            process.kill()
            raise subprocess.TimeoutExpired([module, *arguments], timeout, out.read_text(), error.read_text())
        return subprocess.CompletedProcess(arguments, status, out.read_text(), error.read_text())


def _run(
    module: str, arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], streams: tuple[Path, Path]
) -> None:
    """Be the command, in a process just forked."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate(streams, start=1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv, sys.path[:] = [module, *arguments], [str(cwd), *sys.path]
    processes.ForkServer = Forking  # type: ignore[misc]
    sys.modules.pop(module, None)  # as none has imported it before it runs
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Forking(ForkServer):
    """Fork server of a crew that is itself forked, by a process that has imported all it needs."""

    def __init__(self, place: Assignment):
        self._control, theirs = socket.socketpair()
        self._process = Child(target=self._serve, args=(place, theirs, os.getpid()), daemon=True)  # type: ignore
        self._process.start()
        theirs.close()

    def _serve(self, place: Assignment, control: socket.socket, parent: int) -> None:
        self._control.close()
        os.environ.update(place.unset(os.environ) | {"OMP_NUM_THREADS": "1"})
        fork_server.main(control.detach(), parent, place.worker.partition(":")[0])


class Child(multiprocessing.get_context("fork").Process):  # type: ignore[misc, name-defined]
    """Forked process, with the methods of `subprocess.Popen` that a `ForkServer` calls."""

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, seconds: float | None = None) -> None:
        self.join(seconds)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, seconds or 0.0)
