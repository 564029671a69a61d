"""Measurements of the doctor on one worker by itself: products and copies on its device, its GPU, a file on storage;
and of its connections, with one other worker (`measure_link`) and with all of its node at once (`measure_node`)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch

from platform.boundary.documents import error_line
from platform.boundary.storage import open_storage
from platform.config.fields import Config
from platform.config.identity import find_checkpoint_url, saves_checkpoints
from platform.plan.accelerators import dense_bf16_peak
from platform.plan.model_types import AUTO
from platform.runtime.communicator import Communicator
from platform.runtime.compilation import name_attention_kernel
from platform.train.gauges import RunningGpuQuery
from platform.train.rank_parameters import DTYPES
from platform.train.replies import Findings

REPEATS, REPEAT_SECONDS = 5, 0.05  # so often at least, and for so long by the clock; the fastest counts


@dataclass(frozen=True)
class Sizes:
    """Sizes of an examination. By device: the side of the square matrices, and the bytes copied and passed to a
    partner; `file`: the bytes of the file."""

    side: Mapping[str, int]
    copied: Mapping[str, int]
    passed: Mapping[str, int]
    file: int


QUICK = Sizes({"cpu": 512, "cuda": 4096}, {"cpu": 1 << 22, "cuda": 1 << 28}, {"cpu": 1 << 18, "cuda": 1 << 24}, 1 << 20)
FULL = Sizes({"cpu": 1024, "cuda": 8192}, {"cpu": 1 << 25, "cuda": 1 << 30}, {"cpu": 1 << 22, "cuda": 1 << 28}, 1 << 24)


class WorkerBench:
    """Bench on which one worker is examined. `device`: cpu | cuda, of which a worker sees one; `found`: the
    measurements so far."""

    def __init__(self, config: Config, run_dir: Path, device: str, sizes: Sizes):
        """Prepare the doctor's measurements of this worker: its `device` (cpu | cuda) and its checkpoint storage."""
        self.config, self.device, self.sizes, self.found = config, device, sizes, Findings()
        saves = saves_checkpoints(config)
        self.storage_url = find_checkpoint_url(config) if saves else str(run_dir)
        self.file, self.data = f".doctor-{secrets.token_hex(8)}", secrets.token_bytes(sizes.file)

    def time_fastest(self, work: Callable[[], Any]) -> float:
        """Time `work` repeatedly for the doctor, and return the seconds of its fastest run: of the device on a GPU, of
        this thread on a CPU, so that neither counts other work on the machine."""
        work()  # allocates, and loads what it needs
        fastest, repeats, end = inf, 0, time.perf_counter() + REPEAT_SECONDS
        while repeats < REPEATS or time.perf_counter() < end:
            fastest, repeats = min(fastest, self._time_once(work)), repeats + 1
        return max(1e-9, fastest)

    def _time_once(self, work: Callable[[], Any]) -> float:
        """Time one call of `work` for the doctor: return seconds, of this thread on a CPU, of the device on a GPU."""
        if self.device == "cpu":
            begin = time.thread_time()
            work()
            return time.thread_time() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def count_false_elements(self, is_right: torch.Tensor) -> None:
        """Add the elements of a boolean tensor that are False to the doctor's count of the device's wrong results."""
        self.found.readings["wrong"] = self.found.readings.get("wrong", 0.0) + is_right.logical_not().sum().item()


def measure_products(bench: WorkerBench) -> None:
    """Measure for the doctor the FLOP/s of a product of square matrices, bf16 on a GPU and fp32 on a CPU, and count
    wrong elements: the matrices are a·s' and s·b' of vectors of ±1, so that every element of their product is n or -n
    exactly."""
    n, dtype = bench.sizes.side[bench.device], torch.bfloat16 if bench.device == "cuda" else torch.float32
    signs = (torch.arange(3 * n, device=bench.device).mul(2654435761).bitwise_right_shift(7) & 2).sub(1)
    a, s, b = signs.to(dtype).view(3, n)
    left, right, out = torch.outer(a, s), torch.outer(s, b), torch.empty(n, n, dtype=dtype, device=bench.device)
    rate = 2 * n**3 / bench.time_fastest(lambda: torch.mm(left, right, out=out))
    bench.count_false_elements(out == torch.outer(a * n, b))
    bench.found.readings["gemm"] = rate
    if bench.device == "cuda" and (peak := dense_bf16_peak(torch.cuda.get_device_name())):
        bench.found.readings["peak"] = rate / peak


def measure_copies(bench: WorkerBench) -> None:
    """Measure the bytes/s, read and written, of a copy in the worker's device memory, and count wrong elements."""
    original = torch.arange(bench.sizes.copied[bench.device] // 8, device=bench.device)
    copy = torch.empty_like(original)
    bench.found.readings["memory"] = 2 * original.nbytes / bench.time_fastest(lambda: copy.copy_(original))
    bench.count_false_elements(copy == original)


def note_gpu_memory(bench: WorkerBench) -> None:
    """Note the model, memory and share of free memory of this worker's GPU for the doctor; do nothing on a CPU."""
    if bench.device == "cpu":
        return
    device = torch.cuda.get_device_properties()
    free, total = torch.cuda.mem_get_info()
    bench.found.readings["free"] = free / total
    bench.found.facts.update({"gpu": device.name, "gpu memory": f"{device.total_memory / 2**30:.0f} GiB"})


def note_attention_kernel(bench: WorkerBench) -> None:
    """Note for the doctor which kernel computes attention of the run's model on this worker, by name."""
    train, m = bench.config.train, bench.config.model
    dtype, d_kv = DTYPES[bench.config.precision][0], m.d_kv or m.d_model // m.heads
    kernel = train.attention_kernel
    kernel = name_attention_kernel(bench.device, dtype, d_kv) if kernel == AUTO else kernel
    bench.found.facts["attention"] = f"{kernel}, heads of {d_kv} in {bench.config.precision}"


def measure_write(bench: WorkerBench) -> None:
    """Measure the bytes/s of writing a file to the checkpoint storage, else the run directory. Raises OSError."""
    begin = time.perf_counter()
    open_storage(bench.storage_url).write(bench.file, [memoryview(bench.data)])
    bench.found.readings["write"] = len(bench.data) / max(1e-9, time.perf_counter() - begin)


def measure_read(bench: WorkerBench) -> None:
    """Measure for the doctor the bytes/s at which the file of `measure_write` is read back, and delete it; do nothing
    if there is none. Raises OSError, also if its contents have changed."""
    if "write" not in bench.found.readings:
        return
    storage, begin = open_storage(bench.storage_url), time.perf_counter()
    try:
        content = storage.read(bench.file)
        seconds = max(1e-9, time.perf_counter() - begin)
    finally:
        with suppress(OSError):
            storage.delete(bench.file)
    if content != bench.data:
        raise OSError("what it wrote to the storage is not what it reads there")
    bench.found.readings["read"] = len(content) / seconds


MEASURES: dict[str, Callable[[WorkerBench], None]] = {  # check -> what measures it, and perhaps others, in this order
    "gemm": measure_products,
    "memory": measure_copies,
    "free": note_gpu_memory,
    "attention": note_attention_kernel,
    "write": measure_write,
    "read": measure_read,
}


def measure_worker(config: Config, run_dir: Path, device: str, sizes: Sizes) -> Findings:
    """Run all measurements that the doctor takes of this worker by itself, and return them; one that fails becomes an
    error of its check. `device`: cpu | cuda; `sizes`: sizes of matrices, copies and files."""
    query = RunningGpuQuery() if device == "cuda" else None  # answers while the rest is measured
    bench, threads = WorkerBench(config, run_dir, device, sizes), torch.get_num_threads()
    torch.set_num_threads(1)  # waiting for others, which spins, would count
    for check, measure in MEASURES.items():
        try:
            measure(bench)
        except Exception as error:  # from a device, a library or a storage: the very thing looked for
            bench.found.errors[check] = error_line(error)
    torch.set_num_threads(threads)
    if query:
        query.add_answer(bench.found)
    return bench.found


TOGETHER = "data"  # axis along which those lie who measure together
_VALUES = 1 << 10  # whose sums over all GPUs of a node are exact in fp32


def measure_link(communicator: Communicator, sizes: Sizes) -> Findings:
    """Measure the bytes/s that a worker receives in an all-gather with one partner, and count wrong bytes."""
    device, rank = communicator.device, communicator.rank
    block = torch.arange(sizes.passed[device.type], device=device).add(rank).to(torch.uint8)
    right = torch.cat([block - rank + i for i in range(communicator.mesh.world_size)])
    seconds, wrong_count = _time_collective(communicator, "all_gather", lambda: block, right)
    return Findings({"link": block.nbytes / seconds, "wrong": wrong_count})


def measure_node(communicator: Communicator, sizes: Sizes) -> Findings:
    """Measure the bytes/s that a worker sends in a ring all-reduce with all GPUs of its node, and count wrong sums."""
    device, n = communicator.device, communicator.mesh.world_size
    block = torch.arange(sizes.passed[device.type] // 4, device=device).remainder(_VALUES).float()
    right = block * n + n * (n - 1) / 2
    seconds, wrong_count = _time_collective(communicator, "all_reduce", lambda: block + communicator.rank, right)
    return Findings({"node": 2 * (n - 1) / n * block.nbytes / seconds, "wrong": wrong_count})


def _time_collective(
    communicator: Communicator, op: str, create_block: Callable[[], torch.Tensor], expected: torch.Tensor
) -> tuple[float, float]:
    """Time a collective several times, to measure a worker's connections. Return the fewest seconds, and the number of
    wrong elements in all results. `op`: the collective; `create_block`: makes its input block; `expected`: the correct
    result."""
    seconds, wrong_count = [], 0.0
    for _ in range(REPEATS + 1):  # the first is not timed
        block = create_block()
        synchronize_device(communicator.device)
        begin = time.perf_counter()
        received = communicator.launch(op, block, (TOGETHER,)).wait()
        synchronize_device(communicator.device)
        seconds.append(max(1e-9, time.perf_counter() - begin))
        wrong_count += (received.view(-1) != expected).sum().item()
    return min(seconds[1:]), wrong_count


def synchronize_device(device: torch.device) -> None:
    """Wait until the worker's GPU has done all launched work, so that a measurement can time it; not on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


CONNECTIONS: Mapping[str, Callable[[Communicator, Sizes], Findings]] = {"link": measure_link, "node": measure_node}
