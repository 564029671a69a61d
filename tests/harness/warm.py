"""Processes forked from one that has imported torch, where what is tested is not how processes start: the ranks of a
pool, the workers of a crew, and whole commands."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from tempfile import mkstemp

from platform.cluster.crew import fork_server, forked_workers
from platform.cluster.crew.forked_workers import ForkServer
from platform.cluster.crew.job import Assignment
from platform.config.fields import Config

# Of commands, of workers, and what the first optimizer imports
PRELOADED = [
    *("hydra", "platform.launch", "platform.cluster.driver", "platform.train.worker", "torch._dynamo"),
    "tests.harness.frozen",
]
CONTEXT = multiprocessing.get_context("forkserver")


def start() -> None:
    """Start the process that all others are forked from; it ends with this one."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class Server(CONTEXT.Process):  # type: ignore[misc, name-defined]
    """Forked process, with the methods of `subprocess.Popen` that a `ForkServer` calls."""

    def poll(self) -> int | None:
        return self.exitcode


class Shared(ForkServer):
    """Stands in for the fork server of a crew: one that all crews of this process share, whose workers each crew kills
    by itself. It is forked like commands, so that what workers need is imported once for both."""

    def __init__(self, place: Assignment):
        self._control, theirs = socket.socketpair()
        start()
        with theirs:
            self._process = Server(target=_serve, args=(place, theirs), daemon=True)  # type: ignore[assignment]
            self._process.start()
        atexit.register(self._control.close)  # before multiprocessing waits for its end

    def close(self) -> None:
        pass


@cache
def shared() -> Shared:
    place = Assignment("platform.train.worker:Worker", Config(), 0, device="cpu", run_dir="", threads=1)
    return Shared(place)


class Command(CONTEXT.Process):  # type: ignore[misc, name-defined]
    """`python -m module arguments` (or the script of a path that ends in .py) in the folder `cwd`, with this process's
    environment: forked, as its fork server is. Has the methods of `subprocess.Popen` that tests call; what it prints to
    both streams goes to files, and `communicate` returns it."""

    def __init__(self, module: str, *arguments: str, cwd: Path):
        self._printed = [Path(name) for _, name in (mkstemp(), mkstemp())]
        super().__init__(target=_run, args=(module, arguments, cwd, dict(os.environ), self._printed))
        start()
        self.start()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0, *self.printed())
        return self.exitcode

    def printed(self) -> tuple[str, str]:
        """Return what it has printed so far to stdout and to stderr."""
        out, error = (path.read_text() for path in self._printed)
        return out, error

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.printed()


def run_module(module: str, *arguments: str, cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a `Command` as `subprocess.run` does. Raises subprocess.TimeoutExpired after `timeout` seconds."""
    command = Command(module, *arguments, cwd=cwd)
    try:
        return subprocess.CompletedProcess(arguments, command.wait(timeout), *command.printed())
    finally:
        command.kill()


def _serve(place: Assignment, control: socket.socket) -> None:
    """Be the shared fork server, in a process just forked: one that ends with what it is forked from."""
    os.environ.update(place.unset_defaults(os.environ) | {"OMP_NUM_THREADS": "1"})
    fork_server.main(control.detach(), os.getppid(), place.worker.partition(":")[0])


def _run(module: str, arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], printed: list[Path]) -> None:
    """Be the command, in a process just forked."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate(printed, start=1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = [module, *arguments]
    forked_workers.ForkServer = Forking  # type: ignore[misc]
    if module.endswith(".py"):
        import torch.multiprocessing as ranks

        ranks.spawn = partial(ranks.start_processes, start_method="fork")  # type: ignore[assignment]  # not torch anew
        sys.path.insert(0, str(Path(module).resolve().parent))
        runpy.run_path(module, run_name="__main__")
    else:
        sys.path.insert(0, str(cwd))
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
        os.environ.update(place.unset_defaults(os.environ) | {"OMP_NUM_THREADS": "1"})
        fork_server.main(control.detach(), parent, place.worker.partition(":")[0])


class Child(multiprocessing.get_context("fork").Process):  # type: ignore[misc, name-defined]
    """Forked process, with the methods of `subprocess.Popen` that a `ForkServer` calls."""

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, seconds: float | None = None) -> None:
        self.join(seconds)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, seconds or 0.0)
