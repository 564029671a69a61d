"""What a worker is told: the job that all share, and each one's place on its machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = "platform.train.worker:Worker"
START = 0  # the number of the answer that tells how the making of the worker went


@dataclass(frozen=True)
class Job:
    """What all workers of a generation are told, whatever starts them."""

    config: Mapping[str, Any]  # Config.to_dict()
    coordinates: Sequence[Mapping[str, int]]  # of each rank in the mesh
    device: str  # cpu | cuda
    run_dir: Path
    worker: str = WORKER  # "module:Class", with the interface of platform.train.worker.Worker
    secrets: Mapping[str, str] = field(default_factory=dict)  # what workers must not write down: `redaction.learned`

    @property
    def world_size(self) -> int:
        return len(self.coordinates)

    def name(self, rank: int) -> str:
        """For people: rank3[data1 t1]. Axes of size 1 are left out."""
        at = self.coordinates[rank]
        wide = " ".join(f"{axis}{i}" for axis, i in at.items() if any(c[axis] for c in self.coordinates))
        return f"rank{rank}[{wide}]" if wide else f"rank{rank}"

    def log(self, number: int) -> Path:
        """What member `number` prints."""
        return self.run_dir / "logs" / f"worker-{number}.log"


@dataclass(frozen=True)
class Assignment:
    """A worker's place. Plain data: `asdict` is JSON."""

    worker: str
    config: Mapping[str, Any]
    number: int
    device: str
    run_dir: str
    threads: int
    log: str = ""  # file for standard output and error; "" = leave them
    environment: dict[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    node: str = ""  # its failure domain; "" = the machine's name


def assign(
    job: Job, number: int, *, local_rank: int, local_world_size: int, group_rank: int, cores: int | None = None
) -> Assignment:
    """The place of member `number`: slot `local_rank` on machine number `group_rank`, whose `cores` so many share.

    Of torchrun's environment it has what does not change with the generations.
    """
    count = threads(job.config, local_world_size, cores)
    environment = {
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": group_rank,
        "OMP_NUM_THREADS": count,
    }
    return Assignment(
        worker=job.worker,
        config=job.config,
        number=number,
        device=job.device,
        run_dir=str(job.run_dir),
        threads=count,
        log=str(job.log(number)),
        environment={key: str(value) for key, value in environment.items()},
        secrets=job.secrets,
    )


def threads(config: Mapping[str, Any], local_world_size: int, cores: int | None = None) -> int:
    """CPU threads per worker: `cluster.threads`, else the machine's cores shared among its workers."""
    return config["cluster"]["threads"] or max(1, (cores or usable_cores()) // local_world_size)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def one_gpu(local_rank: int) -> dict[str, str]:
    """The environment in which a process sees one GPU, as Ray's actors do: then "cuda" is the same GPU everywhere."""
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return {"CUDA_VISIBLE_DEVICES": visible[local_rank] if visible else str(local_rank)}
