"""torchrun on the node of one pod: its command and its processes; what they say is kept in the run directory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import IO

from platform.cluster.crew.launchers import leftovers
from platform.jobs.look.logs import NodeLog
from platform.jobs.pods.rank import PID, STATUS


@dataclass(frozen=True)
class PodOptions:
    """Options of a pod. `shared`: folder of the job's board; `index`: number of this pod, one of `pods` with `workers`
    each; `first`: host name of the first pod; `address`: address of this pod; `drain`: seconds that its workers are
    given to end."""

    shared: Path
    index: int
    pods: int
    workers: int
    first: str
    address: str
    drain: int = 60


def torch_command(o: PodOptions, address: str, port: int, life: int, folder: str, launch: Sequence[str]) -> list[str]:
    """Return the command of torchrun on one pod, for a start (life) of it whose store is at `address` and `port`. It
    never starts a worker again by itself (--max-restarts): the driver goes on without it, and the next life has it
    back. Every line of a worker gets its rank and node before it; the lines of rank 0 are the run's own."""
    shown = [f"{local}:3" for local in range(o.workers) if o.index or local]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={o.pods}", f"--node-rank={o.index}", f"--nproc-per-node={o.workers}"),
        *("--rdzv-backend=static", f"--rdzv-id={life}", f"--master-addr={address}", f"--master-port={port}"),
        *("--max-restarts=0", f"--shutdown-timeout={o.drain}", f"--log-dir={folder}/torchrun"),
        *([f"--tee={','.join(shown)}"] if shown else []),
        *("-m", "platform.jobs.pods.rank", folder, *launch),
    ]


class TorchNode(leftovers.Marked):
    """torchrun on this node, at most one at a time; a context that ends its processes and removes its files."""

    def __init__(self, options: PodOptions, run_dir: Path):
        """Prepare to run torchrun on this pod; nothing is started before the context is entered."""
        super().__init__()
        self._options, self._log = options, NodeLog(run_dir)
        self._reader: threading.Thread | None = None

    def start(self, address: str, port: int, life: int, launch: Sequence[str]) -> None:
        """Start torchrun on this pod for a new life of the run, as `torch_command` says."""
        self.end()
        for name in (PID, STATUS):
            Path(self.directory, name).unlink(missing_ok=True)
        prefix = f"[rank${{rank}} {gethostname()}] "
        environment = {**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": prefix, "PYTHONUNBUFFERED": "1"}
        command = torch_command(self._options, address, port, life, self.directory, launch)
        torchrun = self.run(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert torchrun.stdout
        self._reader = threading.Thread(target=self._keep, args=(torchrun.stdout,), daemon=True)
        self._reader.start()

    def _keep(self, said: IO[bytes]) -> None:
        """Print what torchrun and its workers print on this pod, and copy it to the run directory."""
        with said:
            for line in said:
                with suppress(OSError):  # nobody listens
                    os.write(1, line)
                self._log.write(line)

    def number(self, name: str) -> int | None:
        """Return the number that the driver on this pod has left in its file PID or STATUS, None before it has."""
        with suppress(OSError, ValueError):
            return int(Path(self.directory, name).read_text())
        return None

    def end(self) -> None:
        """End torchrun on this pod at once, with all that it has started, and read the rest of its output."""
        super().end()
        if self._reader:
            self._reader.join(1.0)
            self._reader = None
