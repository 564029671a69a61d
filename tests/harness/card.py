"""A card that is not there, and one rank's work on it, in a world that is not there either.

The card is a device of the kind that torch has for hardware of others (PrivateUse1). Its tensors are fake: they have
shapes and no memory. As on CUDA, the backward pass runs in the device's own thread of autograd, the optimizer is the
fused one, tensors of two devices in one operation raise, and so does whatever needs a number that the device has not
computed yet. What is launched and moved is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from platform.config.fields import Config
from platform.optimizer.optimizers import PIECES
from platform.plan.chunks import ADDS_WIDE
from platform.plan.plan import Plan
from platform.plan.step_collectives import process_groups
from platform.predict.make_plan import make_plan
from platform.runtime import pipeline
from platform.runtime.chunked_loss import LossClasses, Targets, compute_loss_and_gradient
from platform.runtime.communicator import Communicator, SingleRank
from platform.runtime.process_groups import ProcessGroups
from platform.runtime.residual import RANDOM_DRAWN_AT_ONCE
from platform.train.state_recovery import AT_ONCE
from platform.train.trainer import Trainer
from tests.harness.launches import launched, moved
from tests.harness.one_attention import OneAttention
from tests.harness.oracle import Tokens, trainer_of
from tests.harness.threads import ThreadInModes

SECTIONS = ("forward", "backward", "reduce", "optimizer")  # of a step
LOADING = "data"  # the section in which tensors may be on the CPU: a batch on its way to the device


class CardModule(_DummyBackendModule):
    """torch.card, which other tests of this process shall not find in the machine."""

    present = False

    def is_available(self) -> bool:
        return self.present

    def device_count(self) -> int:
        return int(self.present)


MODULE = CardModule()


_setup_privateuseone_for_python_backend("card", MODULE)  # before a backward pass: then autograd counts the devices
CARD = torch.device("card", 0)
PINNED = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)  # of torch.cuda.cudart
# torch lacks what its fused SGD makes of tensors without memory: nothing
META = torch.library.Library("aten", "IMPL", "Meta")
META.impl("_fused_sgd_", lambda *_, **__: None)


dist.Backend.register_backend(
    "card_fake", lambda options, _: FakeProcessGroup._create_internal(options.group_rank, options.group_size),
    extended_api=True, devices=["cpu", "card"],
)  # fmt: skip


@dataclass
class Counted:
    """Kernels by name, the bytes that they read and write, clones, and the threads of the host that launched them."""

    kernels: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    threads: set[str] = field(default_factory=set)

    @property
    def launched(self) -> int:
        return self.kernels.total()

    @property
    def nbytes(self) -> int:
        return self.moved.total()

    @property
    def clones(self) -> int:
        return self.kernels["clone"]

    def __sub__(self, other: Counted) -> Counted:
        left, moved = Counter(self.kernels), Counter(self.moved)
        left.subtract(other.kernels)
        moved.subtract(other.moved)
        return Counted(+left, moved)


class KernelCounter(TorchDispatchMode):
    """Counts what is launched on the device, by the first of SECTIONS that is open, else as "other". Raises
    AssertionError for a tensor on another device outside of LOADING."""

    def __init__(self, communicator: Communicator):
        super().__init__()
        self._clock = communicator
        self.sections: dict[str, Counted] = defaultdict(Counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "prim":  # a fake tensor is asked for its device
            return function(*args, **(kwargs or {}))
        out = function(*args, **(kwargs or {}))
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        opened = [name for name, *_ in self._clock.clock._open]
        if LOADING not in opened:
            wrong = [x.device for x in written if x.device != CARD]
            assert not wrong, f"{function} makes a tensor on {wrong} in {opened}"
        nbytes = moved(function, args, kwargs or {}, out)
        if function.namespace in ("c10d", "profiler") or nbytes is None:
            return out
        counted = self.sections[next((s for s in SECTIONS if s in opened), "other")]
        name = function.overloadpacket.__name__
        counted.kernels[name] += launched(function, args)
        counted.moved[name] += nbytes
        counted.threads.add(current_thread().name)
        return out


@contextmanager
def alone(
    c: Config,
    rank: int,
    reads: list[int],
    communicator: Callable[[Plan, int], Communicator] | None = None,
    corpus: Any = None,
) -> Iterator[Trainer]:
    """The trainer of one rank on the card, in a world of torch's `fake` transport. `reads`: collects how many numbers
    each synchronisation with the device reads; all are 1. `communicator`: makes the rank's, by default that of
    `communicator_of`; `corpus`: by default one whose samples are all alike."""
    plan = make_plan(c)

    def read(self: Communicator, x: Tensor) -> list[float]:
        assert x.device == CARD
        reads.append(x.numel())
        return [1.0] * x.numel()

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(pipeline, "ThreadPoolExecutor", ThreadInModes)
        patch.setattr(MODULE, "present", True)
        patch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0)  # a number of the host is computed with on the device too
        patch.setattr(Communicator, "read_numbers", read)
        patch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: None)  # nothing takes time there
        patch.setattr(torch.cuda, "cudart", lambda: PINNED)
        for known in (AT_ONCE, ADDS_WIDE, RANDOM_DRAWN_AT_ONCE, PIECES):
            patch.setitem(known, "card", known["cuda"])  # type: ignore[attr-defined]
        if plan.mesh.world_size > 1:
            dist.init_process_group("card_fake", rank=rank, world_size=plan.mesh.world_size, store=FakeStore())
        try:
            yield trainer_of(c, plan, (communicator or communicator_of)(plan, rank), corpus or Cached(c), fresh=False)
        finally:
            if plan.mesh.world_size > 1:
                dist.destroy_process_group()


class AsOnNccl(ProcessGroups):
    """Groups of the `fake` transport that are used as those of NCCL are; stages send to each other in the world."""

    def __init__(self, plan: Plan, rank: int):
        super().__init__(plan.mesh, rank, process_groups(plan), CARD)
        self._nccl = True

    def _connect_group(self, name, peers, timeout=None):
        """A group in host memory, whose messages go nowhere, as the `fake` transport's do."""
        done = SimpleNamespace(wait=lambda *_: True)
        return SimpleNamespace(send=lambda *_: done, recv=lambda *_: done)

    def _find_stage_group(self, sender: int, receiver: int) -> None:
        return None

    def sum_numbers(self, numbers):
        """Of ranks that all have the same, and something."""
        return [self.mesh.world_size * max(1.0, n) for n in numbers]


def communicator_of(plan: Plan, rank: int) -> Communicator:
    return SingleRank(plan.mesh, CARD) if plan.mesh.world_size == 1 else AsOnNccl(plan, rank)


class Cached(Tokens):
    """A corpus whose samples are all the first one, as what they say does not matter."""

    def __init__(self, c: Config):
        super().__init__(c)
        self._first: Any = None

    def batch(self, split: str, start: int, end: int) -> dict[str, Any]:
        self._first = self._first or super().batch(split, 0, 1)
        return {name: rows.repeat(end - start, 0) for name, rows in self._first.items()}

    def predicted(self, split: str, start: int, end: int) -> int:
        return (end - start) * self.model.length


def ranks(c: Config) -> list[int]:
    """One rank of every stage and sub-grid, and the last one: all others do the same on other numbers."""
    mesh = make_plan(c).mesh
    chosen: dict[tuple[int, ...], int] = {}
    for rank in range(mesh.world_size):
        at = mesh.rank_coordinates(rank)
        chosen.setdefault((at["stage"], *(at[axis] > 0 for axis in c.branch.axes)), rank)
    return sorted({*chosen.values(), mesh.world_size - 1})


def shrunk(c: Config) -> Config:
    """A run with a layer per chunk, or two, and no more stages and microbatches than its ranks differ in."""
    c = deepcopy(c)
    c.parallel.data = max(c.parallel.data, 1)  # -1: as many replicas as there are workers
    c.pipeline.stages, c.pipeline.chunks = min(c.pipeline.stages, 4), min(c.pipeline.chunks, 2)
    c.train.global_batch = c.train.microbatch * c.parallel.data * c.pipeline.stages
    c.model.layers = min(c.model.layers, max(2, c.pipeline.stages * c.pipeline.chunks))
    c.eval.batches = 1
    return c


def per_layer(c: Config, rank: int = 0, layers: Sequence[int] = (2, 3)) -> dict[str, Counted]:
    """What one layer adds to the forward and the backward pass of the first microbatch of a step, and to the backward
    pass of each further one (`again`), whose gradients are added to those of the first."""

    def counted(count: int, microbatches: int) -> dict[str, Counted]:
        deep = deepcopy(c)
        deep.model.layers = count
        deep.train.global_batch = deep.train.microbatch * deep.parallel.data * microbatches
        with alone(deep, rank, []) as trainer, KernelCounter(trainer.communicator) as counter, OneAttention():
            trainer.step(1)
        return counter.sections

    few, many = layers
    of = {(n, m): counted(n, m) for n in layers for m in (1, 2)}
    added = {section: of[many, 1][section] - of[few, 1][section] for section in ("forward", "backward")}
    both = of[many, 2]["backward"] - of[few, 2]["backward"]
    return {**added, "again": both - added["backward"]}


def of_an_update(c: Config, rank: int = 0) -> tuple[Trainer, dict[str, Counted]]:
    """What a rank's second step launches, when the optimizer has its state; and its trainer."""
    c = deepcopy(c)
    c.train.global_batch = c.train.microbatch * c.parallel.data
    with alone(c, rank, []) as trainer, OneAttention():
        trainer.step(1)
        with KernelCounter(trainer.communicator) as counter:
            trainer.step(2)
        return trainer, counter.sections


def of_the_loss(c: Config, shape: tuple[int, int], dtype: torch.dtype, classes: LossClasses, gradient: bool) -> Counted:
    """What the loss of logits of a shape and type launches eagerly, and its gradient by them."""
    with alone(c, 0, []) as trainer, KernelCounter(trainer.communicator) as counter, torch.no_grad():
        logits = torch.empty(shape, dtype=dtype, device=CARD)
        targets = Targets(torch.empty(shape[0], dtype=torch.int64, device=CARD))
        counter.sections.clear()
        compute_loss_and_gradient(logits, targets, trainer.communicator, classes, gradient)
    return counter.sections["other"]
