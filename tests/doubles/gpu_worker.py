"""Workers that say which GPU they were given, without one: what Ray set for them, and the cores next to that GPU."""

import os
from pathlib import Path

from platform.cluster.crew.worker_host import cores_near_gpu
from tests.doubles.fake_worker import FakeWorker

TOLD = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "HABIT")
CORES = {"0": {0, 1}, "1": {2, 3}}  # of the NUMA node of each GPU


def lay_out_kernel_files(folder: Path) -> tuple[Path, Path]:
    """Write a kernel's files of two GPUs on two NUMA nodes; return its folders of GPUs and of PCI devices."""
    gpus, devices = folder / "gpus", folder / "devices"
    for place, cores in (("0000:1B:00.0", "0-1"), ("0000:9A:00.0", "2-3")):
        (gpus / place).mkdir(parents=True, exist_ok=True)
        (devices / place.lower()).mkdir(parents=True, exist_ok=True)
        (devices / place.lower() / "local_cpulist").write_text(f"{cores}\n")
    return gpus, devices


class GpuWorker(FakeWorker):
    """A fake worker that reports its place."""

    def place(self):
        near = cores_near_gpu(
            os.environ.get("CUDA_VISIBLE_DEVICES", ""), *lay_out_kernel_files(self.run_dir / "kernel")
        )
        told = {name: os.environ.get(name) for name in TOLD}
        return told | {"pid": os.getpid(), "device": self.device, "near": sorted(near)}
