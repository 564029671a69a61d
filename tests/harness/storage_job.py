"""A job without training: n ranks as threads that hold blocks of known global tensors, save and restore them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from platform.boundary.storage import Storage
from platform.checkpoint.blocks import Block, Box, HeldTensor, list_written_parts
from platform.checkpoint.buffer import FileImage
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint
from platform.checkpoint.manifest import Meta
from platform.checkpoint.moves import World, restore_checkpoint

META = Meta(
    step=0, samples=0, seed=3, corpus="c0", identity={"seed": 3}, configuration="cf",
    plan={"mesh": {"t": 2}, "scheme": "1d"}, versions={"torch": "2"},
    values={"scaler": {"scale": 65536.0, "growth": 7}, "optimizer.step": 11},
)  # fmt: skip
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def meta(step: int) -> Meta:
    return Meta(**{**vars(META), "step": step, "samples": 8 * step})


def values(shapes: dict[str, Sequence[int]], step: int = 0) -> dict[str, Tensor]:
    """Global tensors that differ by step, name and element, in several types."""
    draw = torch.Generator().manual_seed(step)
    return {
        name: (1000 * torch.rand(tuple(shape), generator=draw, dtype=torch.float64)).to(DTYPES[i % len(DTYPES)])
        for i, (name, shape) in enumerate(shapes.items())
    }


class Job:
    """`holds[name]`: (rank, box) of every block; boxes may reach beyond the tensor, where their values are -1."""

    def __init__(self, tensors: dict[str, Tensor], holds: dict[str, list[tuple[int, Box]]], world_size: int):
        self.tensors, self.holds, self.world_size = tensors, holds, world_size
        self.state = [HeldTensor.group_holders(n, t.dtype, t.shape, holds[n]) for n, t in tensors.items()]
        self.shapes = {n: tuple(t.shape) for n, t in tensors.items()}

    @classmethod
    def whole(cls, tensors: dict[str, Tensor], world_size: int = 1) -> Job:
        """Every rank has everything."""
        return cls(
            tensors,
            {n: [(r, Box.whole_tensor(t.shape)) for r in range(world_size)] for n, t in tensors.items()},
            world_size,
        )

    @classmethod
    def random(cls, tensors: dict[str, Tensor], world_size: int, draw: np.random.Generator) -> Job:
        """Grids with random cuts; every block on random ranks, one of them at least."""
        holds = {}
        for name, t in tensors.items():
            cuts = [sorted({0, size, *draw.integers(0, size, 2).tolist()}) for size in t.shape]
            spans = [[(a, b - a) for a, b in zip(c, c[1:], strict=False)] for c in cuts]
            places = []
            for cell in product(*spans):
                box = Box.build_box(cell)
                if cell and draw.random() < 0.2 and box.offset[0] + box.extent[0] == t.shape[0]:
                    box = Box(box.offset, (box.extent[0] + 2, *box.extent[1:]))  # padded, as vocab is
                ranks = draw.permutation(world_size)[: draw.integers(1, world_size + 1)]
                places += [(int(r), box) for r in ranks]
            holds[name] = sorted(places)
        return cls(tensors, holds, world_size)

    def blocks(self, rank: int, *, empty: bool = False, dtype: torch.dtype | None = None) -> list[Block]:
        out = []
        for name, places in self.holds.items():
            whole = self.tensors[name]
            for r, box in places:
                if r == rank:
                    block = torch.full(box.extent, -1, dtype=dtype or whole.dtype)
                    real = box.intersect_box(Box.whole_tensor(whole.shape))
                    assert real
                    if not empty:
                        block[real.relative_slices(box)] = whole[real.relative_slices(Box.whole_tensor(whole.shape))]
                    out.append(Block(name, box, block))
        return out

    def image(self, rank: int) -> FileImage:
        image = FileImage(rank, list_written_parts(self.state, rank))
        image.fill_parts(self.blocks(rank))
        return image

    def write(self, storage: Storage, directory: str) -> list[dict[str, Any]]:
        return [self.image(rank).write_file(storage, directory) for rank in range(self.world_size)]

    def save(self, storage: Storage, step: int = 1) -> str:
        """One checkpoint, the way of `CheckpointSaver` without its thread."""
        directory = choose_attempt_directory(storage, step)
        commit_checkpoint(storage, directory, self.shapes, self.write(storage, directory), meta(step))
        return directory

    def restore(
        self, storage: Storage, directory: str, manifest, dtype: torch.dtype | None = None, **more: Any
    ) -> list[list[Block]]:
        """Every rank's blocks, restored by all ranks together."""
        post = Post(self.world_size)

        def work(rank: int) -> list[Block]:
            blocks = self.blocks(rank, empty=True, dtype=dtype)
            world = World(rank, self.world_size, partial(post.all_gather, rank), partial(post.exchange, rank), **more)
            restore_checkpoint(storage, directory, manifest, self.state, blocks, world)
            return blocks

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(work, range(self.world_size)))

    def check(self, restored: list[list[Block]]) -> None:
        """Bit-equal to the global tensors, zero beyond them."""
        for blocks in restored:
            for name, box, tensor in blocks:
                whole = self.tensors[name]
                expected = torch.zeros(box.extent, dtype=whole.dtype)
                real = box.intersect_box(Box.whole_tensor(whole.shape))
                assert real
                expected[real.relative_slices(box)] = whole[real.relative_slices(Box.whole_tensor(whole.shape))]
                assert torch.equal(tensor, expected.to(tensor.dtype)), f"{name} {box}"


class Post:
    """What threads tell and send each other, as torch.distributed would do it."""

    def __init__(self, world_size: int):
        self.slots: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=30)

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        told = [*self.slots]
        self.barrier.wait()
        return told

    def exchange(self, rank: int, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        every = [dict(messages) for messages in self.all_gather(rank, [(peer, x.clone()) for peer, x in sent])]
        assert [sender for sender, messages in enumerate(every) if rank in messages] == [peer for peer, _ in received]
        for peer, out in received:
            out.copy_(every[peer][rank])


class Counting:
    """A storage that counts the bytes read from block files and written to them."""

    def __init__(self, inner: Storage):
        self.inner, self.read_bytes, self.reads, self.ranges = inner, 0, 0, set()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, path: str, start: int, end: int) -> Any:
        with self._lock:
            self.reads += 1
            self.ranges.add((path, start, end))
        return _CountingReader(self, self.inner.open(path, start, end))


class _CountingReader:
    def __init__(self, storage: Counting, inner: Any):
        self.storage, self.inner = storage, inner

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.close()

    def readinto(self, buffer: memoryview) -> int:
        count = self.inner.readinto(buffer)
        with self.storage._lock:
            self.storage.read_bytes += count
        return count
