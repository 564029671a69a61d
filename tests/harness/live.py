"""Bytes of the storages that live on one rank: what `platform.predict.memory_budget.predict_peak_bytes` predicts,
counted.

A rank is a thread (`tests.harness.threads`), and so is the mode that sees its operations.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo  # now: the first mode would, and frames that import it are kept, with their tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.runtime import pipeline
from platform.runtime.communicator import Communicator, SingleRank
from platform.runtime.flat_buffers import FlatBucket
from platform.train.generator import TextGenerator
from platform.train.replies import AskedTexts, Choice
from tests.harness.oracle import trainer_of
from tests.harness.threads import ThreadInModes, run_threads

T = TypeVar("T")


class Live(TorchDispatchMode):
    """Counts every storage that an operation of this thread gives, until nothing holds it any more.

    `now` and `peak` are bytes, `largest` those of the largest storage. Whatever is inside a kernel, and what a copy
    that only the threads' transport makes, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._hidden = 0
        self._known: dict[int, int] = {}  # storage -> bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not self._hidden:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._count(key, nbytes)
        weakref.finalize(storage, self._gone, key)
        self.largest = max(self.largest, nbytes)

    def _count(self, key: int, nbytes: int) -> None:
        self.now += nbytes - self._known.get(key, 0)
        self.peak = max(self.peak, self.now)
        self._known[key] = nbytes

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)

    def follow(self, bucket: FlatBucket) -> None:
        """Sees the memory of a bucket's whole buffer, which is resized, come and go."""

        def seen(method: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                method()
                storage = bucket._whole.untyped_storage()
                self._count(storage._cdata, storage.nbytes())

            return run

        for name in ("_take_memory", "release_parameters"):
            setattr(bucket, name, seen(getattr(bucket, name)))
        bucket.release_parameters()

    def see_freed_masters(self, bucket: FlatBucket) -> None:
        """Sees that split master copies have given their memory back once they were there."""
        storage = bucket.masters.untyped_storage()
        self._count(storage._cdata, storage.nbytes())

    @contextmanager
    def hidden(self) -> Iterator[None]:
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def without_transport(self, communicator: Communicator) -> None:
        """The copies that threads pass one another stand for no memory of a device."""

        def quiet(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                with self.hidden():
                    wait = method(*args)

                def finish() -> Any:
                    with self.hidden():
                        return wait()

                return finish

            return run

        for name in ("_start_collective", "_start_send", "_start_receive"):
            setattr(communicator, name, quiet(getattr(communicator, name)))


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank. `peak`: the most at once after the first step, which makes the optimizer's state;
    `after`: what lives when each of the steps is done; `largest`: the largest storage of all steps."""

    peak: int
    after: tuple[int, ...]
    largest: int


def count(c: Config, plan: Plan, steps: int = 2) -> list[Counted]:
    """By rank. Nothing is collected meanwhile: what only a collection frees counts as held."""

    def work(communicator: Communicator) -> Counted:
        torch.set_num_threads(1)
        with Live() as live:
            live.without_transport(communicator)
            trainer = trainer_of(c, plan, communicator)
            for bucket in trainer.weights.buckets if plan.frees_weights else ():
                live.follow(bucket)
            for bucket in trainer.weights.buckets:
                live.see_freed_masters(bucket)
            trainer.step(1)
            after = [live.now]
            live.peak = live.now
            for step in range(2, steps + 1):
                trainer.step(step)
                after.append(live.now)
            return Counted(live.peak, tuple(after), live.largest)

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "ThreadPoolExecutor", ThreadInModes)
            return _on_each_rank(plan, work)
    finally:
        gc.enable()


def count_answering(c: Config, plan: Plan) -> int:
    """The most bytes that live on a rank while it scores texts of the model's length, and reads as many to continue
    them, after a step."""
    m, n = c.model, plan.sizes["batch"]
    ids = [i % m.vocab for i in range(m.length)]
    sources = [ids[: m.source_length or m.length]] * n if m.kind == "encoder_decoder" else []
    texts, read = (AskedTexts([some] * n, sources) for some in (ids, ids[1:]))

    def work(communicator: Communicator) -> int:
        torch.set_num_threads(1)
        with Live() as live:
            live.without_transport(communicator)
            trainer = trainer_of(c, plan, communicator)
            for bucket in trainer.weights.buckets if plan.frees_weights else ():
                live.follow(bucket)
            trainer.step(1)
            live.peak = live.now
            with torch.no_grad():
                generator = TextGenerator(c, plan, communicator, trainer.weights)
                generator.score_texts(texts, [1] * n)
                generator.continue_texts(read, 1, Choice(m.vocab))
            return live.peak

    return max(_on_each_rank(plan, work))


def _on_each_rank(plan: Plan, work: Callable[[Communicator], T]) -> list[T]:
    return [work(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, work)
