"""Saving the state of gpt2_124m under AdamW (parameters and two moments, fp32) from one process, beside a raw write.

    python benchmarks/checkpoint.py [--directory DISK] [--repeats 5] [--layers 12] [--step]

Every variant writes as many bytes to the same disk, in turn: raw (sequential writes and one fsync of one file), ours
(blocks with SHA-256, durable names, verified commit) and torch DCP. Also: the copy to host memory, which is all that
a step waits for (--step measures a training step beside it), and reading back into memory that is in use, as a live
model's is: raw (sequential reads of one file), and restoring, every byte verified; warm, from the page cache, and cold,
after the kernel was told to drop the file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from platform.boundary.storage import open_storage
from platform.checkpoint.blocks import Block, Box, HeldTensor, list_written_parts
from platform.checkpoint.buffer import FileImage
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint, load_manifest  # noqa: E402
from platform.checkpoint.manifest import Meta
from platform.checkpoint.moves import restore_checkpoint  # noqa: E402
from platform.config.fields import Config, Model  # noqa: E402
from platform.plan.simulate import stage_rows  # noqa: E402
from platform.predict.choose_schedule import build_schedule  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime.communicator import SingleRank  # noqa: E402
from platform.train.trainer import Trainer  # noqa: E402
from tests.harness.oracle import Tokens, read  # noqa: E402

META = Meta(step=1, samples=1, seed=0, corpus="", identity={}, configuration="", plan={})


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of all cores together in this process."""
    begin, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - busy


def raw(path: Path, data: memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for i in range(0, len(data), 16 << 20):
        os.write(file, data[i : i + (16 << 20)])
    os.fsync(file)
    os.close(file)


def raw_read(path: Path, data: memoryview) -> None:
    file = os.open(path, os.O_RDONLY)
    for i in range(0, len(data), 16 << 20):
        os.preadv(file, [data[i : i + (16 << 20)]], i)
    os.close(file)


def forget(folder: Path) -> None:
    """Drop the files below a folder from the page cache."""
    os.sync()
    for path in (p for p in folder.rglob("*") if p.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="on the disk to measure (default: the temporary one)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--step", action="store_true", help="also time a training step, microbatch 1, length 1024")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")

    c = Config(model=Model(**{**read("model", "gpt2_124m"), "layers": arguments.layers}))
    c.train.global_batch = c.train.microbatch = 1
    plan = make_plan(c)
    tensors = {
        f"{kind}.{p.name}": torch.randn(plan.global_shape(p))
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for p in plan.parameters
    }
    state = [
        HeldTensor.group_holders(n, t.dtype, t.shape, [(0, Box.whole_tensor(t.shape))]) for n, t in tensors.items()
    ]
    blocks = [Block(n, Box.whole_tensor(t.shape), t) for n, t in tensors.items()]
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    image = FileImage(0, list_written_parts(state, 0))
    data = memoryview(torch.cat([t.view(-1) for t in tensors.values()]).view(torch.uint8).numpy().data)
    size = len(data)

    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        root = Path(directory)
        storage = open_storage(str(root / "ours"))

        def ours() -> None:
            name = choose_attempt_directory(storage, 1)
            commit_checkpoint(storage, name, shapes, [image.write_file(storage, name)], META)

        def torch_dcp(threads: int) -> None:
            writer = dcp.FileSystemWriter(root / "dcp", thread_count=threads)
            dcp.save(dict(tensors), storage_writer=writer, no_dist=True)

        variants: dict[str, Callable[[], None]] = {
            "raw": lambda: raw(root / "raw", data),
            "ours": ours,
            "DCP, 1 thread": lambda: torch_dcp(1),
            "DCP, 2 threads": lambda: torch_dcp(2),
        }
        reads = [f"{what}, {state}" for state in ("warm", "cold") for what in ("raw read", "restore")]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("copy", *variants, *reads)}
        image.fill_parts(blocks)
        again = [Block(n, b, torch.zeros_like(t).add_(1)) for n, b, t in blocks]
        memory = memoryview(torch.ones(size, dtype=torch.uint8).numpy().data)

        def read_back(folder: Path, what: str) -> None:
            """Read what was just written below `folder`, a raw file or a checkpoint, warm and then cold."""
            work: Callable[[], None] = partial(raw_read, folder, memory)
            if what == "restore":
                [checkpoint] = storage.list_sizes("")
                manifest = load_manifest(storage, checkpoint)
                work = partial(restore_checkpoint, storage, checkpoint, manifest, state, again)
            for temperature in ("warm", "cold"):
                if temperature == "cold":
                    forget(root)
                times[f"{what}, {temperature}"].append(seconds(work))

        for repeat in range(arguments.repeats):
            times["copy"].append(seconds(lambda: image.fill_parts(blocks)))
            order = list(variants.items())
            for name, work in order[repeat % 2 :] + order[: repeat % 2]:
                times[name].append(seconds(work))
                if name in ("raw", "ours"):
                    read_back(root / name, "restore" if name == "ours" else "raw read")
                    assert name == "raw" or all(map(torch.equal, (a.tensor for a in again), tensors.values()))
                    for block in again:
                        block.tensor.zero_()
                for entry in root.iterdir():
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                os.sync()

    print(f"{size / 1e9:.2f} GB, {arguments.repeats} repeats, {os.cpu_count()} cores")
    raws = [wall for wall, _ in times["raw"]]
    base, best = statistics.median(raws), min(raws)
    print(
        f"{'GB/s':<15} {'median':>9} {'x raw':>7} {'best':>9} {'x raw':>7} {'core seconds/GB':>17} {'x raw read':>11}"
    )
    for name, found_times in times.items():
        median, least = statistics.median(wall for wall, _ in found_times), min(wall for wall, _ in found_times)
        of_read = [wall for wall, _ in times.get(name.replace("restore", "raw read"), ())] if name in reads else []
        print(
            f"{name:<15} {size / median / 1e9:9.2f} {base / median:7.2f} {size / least / 1e9:9.2f} {best / least:7.2f}"
            f" {min(busy for _, busy in found_times) / size * 1e9:17.2f}"
            + (f" {statistics.median(of_read) / median:11.2f}" if of_read else "")
        )
    if arguments.step:
        trainer = Trainer(c, plan, SingleRank(plan.mesh), Tokens(c), stage_rows([build_schedule(c, 1)])[0])
        trainer.step(1)
        step = min(trainer.step(k).step_seconds for k in (2, 3))
        stall = statistics.median(wall for wall, _ in times["copy"])
        print(f"step {step:.2f} s; the copy is {100 * stall / step:.1f} % of it")


if __name__ == "__main__":
    main()
