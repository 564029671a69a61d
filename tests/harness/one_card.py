"""Several workers on one GPU, each of which NCCL takes for a machine of its own: they talk over sockets, slowly, with
NCCL's own groups, kernels and aborts.

    python -m tests.harness.one_card +experiment=elastic_demo cluster=processes cluster.device=cuda

runs `platform.launch` with its workers so.
"""

from __future__ import annotations

import sys

from platform.cluster import resources
from platform.cluster.crew import forked_workers, job

WORKERS = 8  # that one GPU stands for


def as_a_machine(rank: int) -> dict[str, str]:
    """The environment of a worker on this machine's first GPU: NCCL refuses two ranks of one machine on one GPU."""
    return {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def main(arguments: list[str]) -> int:
    from platform import launch

    count = WORKERS if job.gpu_count() else 0
    for module in (job, resources, resources):
        module.gpu_count = lambda: count  # type: ignore[attr-defined]
    forked_workers.single_gpu_environment = as_a_machine
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
