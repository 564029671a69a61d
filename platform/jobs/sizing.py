"""Size of a job: what a run's plan asks of a cluster, as nodes, CPUs, memory and seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from platform.config.fields import Config
from platform.jobs.options import JobOptions
from platform.optimizer.optimizers import kept_numbers
from platform.plan.core.plan import Plan
from platform.plan.memory.worker_bytes import state_elements, weight_bytes
from platform.planning.memory_budget import host_bytes, needed_bytes

GIB = 1 << 30
_PER_NODE = 8  # workers of a node, unless job.workers says otherwise
_PROCESS = {"cuda": 6 * GIB, "cpu": 1 * GIB}  # a worker's libraries and, for a GPU, their part of its context
_NODE = {"cuda": 16 * GIB, "cpu": 2 * GIB}  # Ray's own processes, and the page cache of what is read and written
_SHARED = {"cuda": 2 * GIB, "cpu": GIB // 4}  # /dev/shm for each worker: NCCL's buffers and Ray's small object store
_CPUS = {"cuda": 8, "cpu": 1}  # for each worker
# The state of a step in host memory, in units of a worker's own: two snapshots, two of what it keeps for peers, and its
# part of a checkpoint that is being written (docs/recovery.md).
_COPIES, _SAVED = 4, 1
_ROOM = 1.1  # for what is not counted
_WRITTEN = 0.5e9  # bytes per second and node, at least, of a storage that is fit for checkpoints
_LEAST_MARGIN = 60.0  # seconds of a stop beside writing


@dataclass(frozen=True)
class JobSize:
    """Size of a job. Attributes:
    device: of the workers, cpu | cuda.
    workers: of a node; there is a GPU for each, if that is their device.
    nodes: of the plan; `spares`: nodes beside them; `least`: nodes with which the run starts and goes on.
    cpus, memory, shm: of a node; bytes. `memory` includes `shm`.
    state: bytes of a checkpoint.
    margin: seconds before its end at which the run begins to save its last checkpoint.
    """

    device: str
    workers: int
    nodes: int
    spares: int
    least: int
    cpus: int
    memory: int
    shm: int
    state: int
    margin: int

    @property
    def most(self) -> int:
        """Return the number of nodes of the whole job, with the spare ones."""
        return self.nodes + self.spares


def workers_per_node(options: JobOptions, world_size: int) -> int:
    """Return the workers on each node of a job: job.workers or, if 0, `world_size`, at most 8 (8 if it is 0)."""
    return options.workers or min(_PER_NODE, world_size or _PER_NODE)


def job_size(config: Config, plan: Plan, options: JobOptions) -> JobSize:
    """Compute the nodes, GPUs and memory that the run of `config` under `plan` asks of a cluster. Where the
    configuration says nothing of fewer workers (elastic.min_workers), half of the nodes are enough to start with."""
    device = "cuda" if config.cluster.device == "cuda" else "cpu"
    workers = workers_per_node(options, plan.mesh.size)
    nodes = _ceil(plan.mesh.size, workers)
    most = max(nodes + _ceil(config.elastic.spares, workers), _ceil(config.elastic.max_workers, workers))
    least = _ceil(config.elastic.min_workers, workers) or (nodes if config.cluster.check else _ceil(nodes, 2))
    own = _state_of_a_worker(config, plan)
    state = _state(config, plan)
    each = _PROCESS[device] + (_COPIES * own if config.elastic.snapshot_every else 0) + _SAVED * own
    each += needed_bytes(config, plan) if device == "cpu" else host_bytes(config, plan)
    shm = _gib(workers * _SHARED[device] + GIB)
    memory = options.memory * GIB or _gib(int(_ROOM * (workers * each + _NODE[device])) + shm)
    margin = _LEAST_MARGIN + 2 * state / nodes / _WRITTEN
    return JobSize(
        device=device,
        workers=workers,
        nodes=nodes,
        spares=most - nodes,
        least=least,
        cpus=options.cpus or workers * _CPUS[device],
        memory=memory,
        shm=shm,
        state=state,
        margin=30 * _ceil(int(margin), 30),
    )


def _state_of_a_worker(config: Config, plan: Plan) -> int:
    """Return the bytes of master copies and optimizer state on the worker that has most of them."""
    first, kept, master = plan.mesh.coordinates(0), kept_numbers(config), plan.itemsize["master"]
    places = [{**first, "stage": stage} for stage in range(plan.stages)]
    return max(plan.masters_at(at) * master + weight_bytes(plan, kept, at)["optimizer"] for at in places)


def _state(config: Config, plan: Plan) -> int:
    """Return the bytes of a job's checkpoint: all master copies and optimizer state, once."""
    return (plan.parameter_count + state_elements(plan, kept_numbers(config))) * plan.itemsize["master"]


def _gib(nbytes: int) -> int:
    """Return a number of bytes of a job's node rounded up to whole GiB."""
    return _ceil(nbytes, GIB) * GIB


def _ceil(count: int, by: int) -> int:
    """Return `count` divided by `by`, rounded up: such as the nodes that a job's workers need."""
    return -(-count // by)
