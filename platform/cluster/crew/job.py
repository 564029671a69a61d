"""Instructions for workers: the job that all of them share, and each one's assignment on its machine.

`open_tcp_store` opens the TCPStore in which the workers of a generation meet. `local_tiers` are the tiers of the
cluster that a node is in, such as zone, rack and switch, as its Ray labels and Slurm report them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL, c_int
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from platform.boundary.interrupts import POLICY, SPINNING, SPINS
from platform.config.fields import KEYS, Config, SentConfig

WORKER = "platform.train.worker:Worker"
# Environment of a worker on a GPU, set before torch is imported unless the user has set it: name -> value.
CUDA_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the driver aborts: torch's watchdog would end the process meanwhile
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the driver's heartbeats find what hangs
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the main thread meets the error, and reports it
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # the watchdog sleeps 4 of these after an error, and a leave with it
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # a direction between stages has its own group
    "NCCL_RUNTIME_CONNECT": "0",  # connect for all sizes while forming: a first large call would block the host
    "NCCL_GRAPH_REGISTER": "0",  # no buffers of recorded collectives, whose memory is in segments that expand
    "NCCL_RAS_ENABLE": "0",  # its thread connects processes for their lives, and crashes when peers die (nccl#1996)
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # memory does not fragment
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # each worker sees one GPU, which all of them call number 0
}
# The same where a tensor scheme splits layers: one hardware queue, so that kernels start in the order of their launch,
# the collectives of a backward pass before the products beside them. Under ZeRO-3 a gather would hold up what follows.
TENSOR_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# The same under train.deterministic.
DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one workspace per stream, so that cuBLAS splits its sums alike each time
    "NCCL_ALGO": "^NVLS,NVLSTree",  # NVSwitches add in the order in which numbers come
}
# Environment of every worker. gloo's ranks tell each other 4 bytes of each connection in place of a record of it.
GLOO_ENVIRONMENT = {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
THREAD_ENVIRONMENT = {SPINNING: SPINS}
# Other names that the user may have set instead.
ALSO = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF", SPINNING: POLICY}
START = 0  # call number of the answer that reports the construction of the worker


@dataclass(frozen=True)
class Job:
    """Instructions common to all workers of a generation, independent of the launcher."""

    config: Config
    coordinates: Sequence[Mapping[str, int]]  # mesh coordinates of each rank
    device: str  # cpu | cuda
    run_dir: Path
    worker: str = WORKER  # "module:Class", with the interface of platform.train.worker.Worker
    secrets: Mapping[str, str] = field(default_factory=dict)  # to redact from output: `redaction.known_secrets()`

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the mesh that this job describes, without spares."""
        return len(self.coordinates)

    def rank_name(self, rank: int) -> str:
        """Return a rank's name with its mesh coordinates, such as rank3[data1 t1], without axes of size 1."""
        at = self.coordinates[rank]
        wide = " ".join(f"{axis}{i}" for axis, i in at.items() if any(c[axis] for c in self.coordinates))
        return f"rank{rank}[{wide}]" if wide else f"rank{rank}"

    def log_path(self, number: int) -> Path:
        """Return the path of the file in the run directory for the output of member `number`'s worker process."""
        return self.run_dir / "logs" / f"worker-{number}.log"


@dataclass(frozen=True)
class Assignment:
    """Assignment of one worker: the worker to construct, with its device, threads, log and environment."""

    worker: str
    config: SentConfig
    number: int
    device: str
    run_dir: str
    threads: int
    log: str = ""  # file for standard output and error; "" = do not redirect
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)  # likewise, where its process has no value of its own
    secrets: dict[str, str] = field(default_factory=dict)
    node: str = ""  # its failure domain; "" = the machine's name
    tiers: list[str] = field(default_factory=list)  # what its node is in, outer to inner

    def enter_environment(self) -> None:
        """Set the variables of a worker's assignment in this process's environment, before torch is imported."""
        os.environ.update(self.environment)
        os.environ.update(self.unset_defaults(os.environ))

    def unset_defaults(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return this worker's default environment variables that `environment` does not set, name -> value."""
        is_set = (name in environment or ALSO.get(name, name) in environment for name in self.defaults)
        return {name: value for (name, value), has in zip(self.defaults.items(), is_set, strict=True) if not has}

    def construct_worker(self) -> Any:
        """Construct the worker object that this assignment describes, in the calling process."""
        options = {"device": self.device, "run_dir": self.run_dir, "threads": self.threads}
        return resolve_name(self.worker)(self.config, self.number, **options)


def assign_worker(
    job: Job, number: int, *, local_rank: int, local_world_size: int, group_rank: int, cores: int | None = None
) -> Assignment:
    """Return the assignment of member `number` with which a launcher starts its worker process: slot `local_rank` of
    `local_world_size` on machine `group_rank`, which has `cores` CPU cores (None: as many as this process may use),
    which are divided among its workers as threads, unless cluster.threads or OMP_NUM_THREADS of this process is set.

    Its environment has torchrun's variables, as far as they stay the same in all generations.
    """
    threads = count_threads(job.config, local_world_size, cores or usable_cores())
    return Assignment(
        worker=job.worker,
        config=job.config,
        number=number,
        device=job.device,
        run_dir=str(job.run_dir),
        threads=threads,
        log=str(job.log_path(number)),
        environment={
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "GROUP_RANK": str(group_rank),
            "OMP_NUM_THREADS": str(threads),
        },
        defaults=worker_environment(job.config, job.device),
        secrets=dict(job.secrets),
    )


def count_threads(config: Config, workers: int, cores: int) -> int:
    """Return the threads of each of a machine's workers: cluster.threads, OMP_NUM_THREADS, or a share of `cores`."""
    return config.cluster.threads or share_cores(cores, inf, workers, os.environ.get("OMP_NUM_THREADS", ""))


def worker_environment(config: Config, device: str) -> dict[str, str]:
    """Return the environment variables of the run's worker processes on this kind of `device` (cpu, cuda), name ->
    value. A value that is set in the environment of this process, the driver, replaces ours; if it is set under another
    name of the variable (ALSO), that name takes the variable's place."""
    ours = GLOO_ENVIRONMENT | THREAD_ENVIRONMENT
    if device == "cuda":
        ours |= CUDA_ENVIRONMENT
        ours |= TENSOR_ENVIRONMENT if prod(config.tensor.axes.values()) > 1 and config.parallel.zero < 3 else {}
        ours |= DETERMINISTIC_ENVIRONMENT if config.train.deterministic else {}
    environment = {}
    for name, value in ours.items():
        chosen = name if name in os.environ or ALSO.get(name, name) not in os.environ else ALSO[name]
        environment[chosen] = os.environ.get(chosen, value)
    return environment


def share_cores(cores: int, quota: float, workers: int, variable: str = "") -> int:
    """Return a worker's threads: OMP_NUM_THREADS (`variable`), else its share of cores and a container's `quota`."""
    # The load of the machine is not asked: with other threads a restarted worker would add in another order.
    asked = variable.partition(",")[0].strip()  # a list has the numbers of nested levels
    if asked.isdecimal() and int(asked):
        return min(int(asked), int(KEYS["cluster.threads"].most))
    return max(1, int(min(cores, quota)) // workers)


def usable_cores() -> int:
    """Return the CPU cores that worker processes here may use, by this process's affinity and its container's quota."""
    return share_cores(len(os.sched_getaffinity(0)), read_cpu_quota(), 1)


def read_cpu_quota(root: Path = Path("/")) -> float:
    """Return how many processors this process may keep busy by the quotas of its control groups (version 1 or 2) and of
    those around them, such as 1.5; inf if there are none. `root`: root of the file system."""
    quotas, groups = [inf], _read_text(root / "proc/self/cgroup").splitlines()
    for controllers, path in (line.split(":", 2)[1:] for line in groups if line.count(":") > 1):
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in ("cpu", controllers) if controllers else ("", "unified"):
            top = root / "sys/fs/cgroup" / mount
            group = top / path.lstrip("/")
            for place in (p for p in (group, *group.parents) if p.is_relative_to(top)):
                texts = [_read_text(place / f"cpu.{name}") for name in ("max", "cfs_quota_us", "cfs_period_us")]
                quota, _, period = " ".join(texts).strip().partition(" ")
                if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and "-1" are none
                    quotas.append(int(quota) / int(period))
    return min(quotas)


def _read_text(path: Path) -> str:
    """Return the text of the kernel's file on control groups, which limit worker processes; "" if it cannot be read."""
    with suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""


def gpu_count() -> int:
    """Return how many GPUs a crew's processes here may use; 0, without torch, if there is no GPU driver."""
    if not any(Path(sign).exists() for sign in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")):
        return 0
    import torch

    return torch.cuda.device_count()


def single_gpu_environment(local_rank: int) -> dict[str, str]:
    """Return the environment variable that shows a worker process only GPU `local_rank` of those visible to this
    process, as Ray does for its actors: "cuda" then means that GPU."""
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return {"CUDA_VISIBLE_DEVICES": visible[local_rank] if visible else str(local_rank)}


_LEVEL = "TORCH_CPP_LOG_LEVEL"
_ERROR = 2  # of torch's C++ log


def preload_torch() -> None:
    """Import torch.distributed, a second of CPU, which the driver's TCPStore needs, while the first workers start."""
    import torch.distributed  # noqa: F401


def open_tcp_store(host: str) -> Any:
    """Start a TCPStore server in the driver, at which the workers of a generation meet to form their process groups. It
    listens on `host` alone (by default it would listen on all addresses, and it has no authentication), and answers for
    as long as the returned store lives."""
    from torch.distributed import TCPStore

    _log_only_torch_errors()
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _log_only_torch_errors() -> None:
    """Let torch's C++ part in the driver, which serves the workers' TCPStore, log errors alone, unless the user's
    environment sets its level: for each invalid message, which any stranger can send, the store warns in 25 lines, and
    they would fill a disk.

    The variable itself is only read while torch is imported, which may have been long ago.
    """
    import torch

    if _LEVEL not in os.environ:
        with suppress(OSError, ValueError):  # another build of torch
            library = CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _ERROR


_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
LONGEST = 100  # characters of a tier: names of switches may be lists
MOST = 16


def local_tiers(names: Sequence[str], labels: Mapping[str, str]) -> list[str]:
    """Return the tiers of the node that this process is on, outer to inner, as NAME=VALUE: the values of its Ray
    `labels` that have one of `names`, in their order ("" for one that it lacks), then the switches or blocks above it
    that Slurm has put into the environment: of s0.s4.node17, with the pattern switch.switch.node, ["switch=s0",
    "switch=s4"]."""
    kinds = os.environ.get(_PATTERN, "").split(".")[:-1]
    values = os.environ.get(_ADDRESS, "").split(".", len(kinds))[:-1]
    tiers = [*((name, labels.get(name, "")) for name in names), *zip(kinds, values, strict=False)]
    return [f"{name}={value}"[:LONGEST] for name, value in tiers][:MOST]
