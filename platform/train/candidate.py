"""Candidate: a worker as far as the driver examines it before it gets a seat."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from platform.boundary.documents import error_line
from platform.boundary.refusals import ConfigError
from platform.config.extending.extensions import load_extensions
from platform.config.fields import Config
from platform.parallel.communicator.base import Communicator
from platform.parallel.communicator.meeting import connected
from platform.parallel.compiled import uncompiled
from platform.parallel.sdpa import lacking
from platform.plan.language.mesh import Mesh
from platform.train.health.link import CONNECTIONS, TOGETHER
from platform.train.health.measure import FULL, QUICK, findings
from platform.train.protocol.replies import Findings, Proof
from platform.train.recovery.proof import proof
from platform.train.step.rank_parameters import DTYPES


class Candidate:
    """Worker without a seat, which answers what the driver asks to know whether it may get one. `run_dir`: the run
    directory."""

    def __init__(self, config: Config, device: str, run_dir: str):
        """Initialise a worker without a rank on `device`, cpu | cuda. Raises ConfigError if `extend` cannot load."""
        self._configure(config)
        self.run_dir, self.device = Path(run_dir), device
        self.communicator: Communicator | None = None

    def _configure(self, config: Config) -> None:
        """Set the configuration and import the modules in `extend`. Raises ConfigError if one cannot be imported."""
        self.config = config
        if mistakes := load_extensions(self.config.extend):
            raise ConfigError(mistakes)

    def prove(self, probe: str) -> Proof:
        """Return what this worker sees of the run's storage, and hashes and versions of its code, for the driver to
        compare with its own. `probe`: name of the file of random bytes that the driver has written to each storage."""
        train, m = self.config.train, self.config.model
        dtype, d_kv = DTYPES[self.config.precision][0], m.d_kv or m.d_model // m.heads
        lacks = {
            "train.compile": uncompiled("on", self.device) if train.compile == "on" else "",
            "train.attention_kernel": lacking(train.attention_kernel, self.device, dtype, d_kv),
        }
        return proof(self.config, self.run_dir, probe, {key: why for key, why in lacks.items() if why})

    def read_clock(self) -> float:
        """Return the time by this machine's clock, in seconds since the epoch."""
        return time.time()

    def examine(self, thorough: bool) -> Findings:
        """Return the doctor's measurements of this worker by itself; `thorough`: True for sizes that take seconds."""
        self._local_device()
        return findings(self.config, self.run_dir, self.device, FULL if thorough else QUICK)

    def examine_connection(
        self, check: str, index: int, size: int, name: str, store: tuple[str, int], thorough: bool
    ) -> Findings:
        """Return the doctor's measurement of the connection of this worker with the others of its group, all of which
        call this. `check`: the measurement, link | node; `index`: this worker's place among the `size` of its group;
        `name`: the group's name in `store`, the driver's TCPStore (host, port); `thorough`: True for larger
        transfers. `leave` must follow."""
        mesh, device = Mesh.of({"stage": 1, TOGETHER: size}), self._local_device()
        try:
            self.communicator = connected(mesh, index, store, f"doctor/{name}", [(TOGETHER,)], device)
            return CONNECTIONS[check](self.communicator, FULL if thorough else QUICK)
        except Exception as error:
            return Findings(errors={check: error_line(error)})

    def _local_device(self) -> str:
        """Return the torch device of this worker, "cpu" or "cuda:0", and make it current."""
        if self.device != "cuda":
            return self.device
        torch.cuda.set_device(0)  # each worker process sees a single GPU
        return "cuda:0"
