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
from platform.train.health.rates import collective_rates, in_groups, kernel_rates
from platform.train.protocol.replies import Findings, Proof, Rates
from platform.train.recovery.proof import proof
from platform.train.step.rank_parameters import DTYPES


class Candidate:
    """Worker without a seat, which answers what the driver asks to know whether it may get one. `run_dir`: the run
    directory."""

    def __init__(self, config: Config, device: str, run_dir: str):
        """Initialise a worker without a rank yet, on `device` (cpu | cuda). Raises ConfigError if `extend` fails."""
        self._configure(config)
        self.run_dir, self.device = Path(run_dir), device
        self.communicator: Communicator | None = None

    def _configure(self, config: Config) -> None:
        """Set this worker's configuration and import the user's modules in `extend`. Raises ConfigError."""
        self.config = config
        if mistakes := load_extensions(self.config.extend):
            raise ConfigError(mistakes)

    def prove(self, probe: str) -> Proof:
        """Return the proof of this worker's environment, for the driver to compare with its own before the worker gets
        a rank: hashes of the run's storage as this worker sees it, hashes and versions of its code, and settings that
        it cannot fulfil. `probe`: name of the file of random bytes that the driver has written to each storage."""
        train, m = self.config.train, self.config.model
        dtype, d_kv = DTYPES[self.config.precision][0], m.d_kv or m.d_model // m.heads
        lacks = {
            "train.compile": uncompiled("on", self.device) if train.compile == "on" else "",
            "train.attention_kernel": lacking(train.attention_kernel, self.device, dtype, d_kv, m.d_value),
        }
        return proof(self.config, self.run_dir, probe, {key: why for key, why in lacks.items() if why})

    def read_clock(self) -> float:
        """Return this worker's clock, in seconds since the epoch, for the doctor to compare with the driver's."""
        return time.time()

    def examine(self, thorough: bool) -> Findings:
        """Measure this worker's device and storage for the doctor; `thorough`: at larger sizes, which take seconds."""
        self._local_device()
        return findings(self.config, self.run_dir, self.device, FULL if thorough else QUICK)

    def examine_connection(
        self, check: str, index: int, size: int, name: str, store: tuple[str, int], thorough: bool
    ) -> Findings:
        """Measure for the doctor the bandwidth between this worker and the others of its group, all of which call this
        together. `check`: the measurement, link (a pair) | node (all workers of a node); `index`: this worker's place
        among the `size` of its group; `name`: the group's name in `store`, the driver's TCPStore (host, port);
        `thorough`: True for larger transfers. `leave` must follow."""
        mesh, device = Mesh.of({"stage": 1, TOGETHER: size}), self._local_device()
        try:
            self.communicator = connected(mesh, index, store, f"doctor/{name}", [(TOGETHER,)], device)
            return CONNECTIONS[check](self.communicator, FULL if thorough else QUICK)
        except Exception as error:
            return Findings(errors={check: error_line(error)})

    # In both: `rank` in a mesh of a `shape`, members of a group by groups, called `name` in `store`, the driver's
    # TCPStore (host, port); `tiny`: sizes that take a moment. `leave` must follow.
    def measure_kernels(
        self, rank: int, shape: tuple[int, int], name: str, store: tuple[str, int], tiny: bool
    ) -> Rates:
        """Measure how fast this worker computes, while all others do, which call this together."""
        self.communicator = in_groups(rank, shape, name, store, self._local_device())
        return kernel_rates(self.communicator, self.config, tiny)

    def measure_collectives(
        self, rank: int, shape: tuple[int, int], name: str, store: tuple[str, int], tiny: bool
    ) -> Rates:
        """Measure collectives and messages in this worker's group, while all groups do, which call this together."""
        self.communicator = in_groups(rank, shape, name, store, self._local_device())
        return collective_rates(self.communicator, tiny)

    def _local_device(self) -> str:
        """Return this worker process's torch device, "cpu" or "cuda:0", and make that GPU torch's current one."""
        if self.device != "cuda":
            return self.device
        torch.cuda.set_device(0)  # each worker process sees a single GPU
        return "cuda:0"
