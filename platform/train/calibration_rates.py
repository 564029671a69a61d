"""Rates of a worker for `python -m platform.plan calibrate`: products by shape, a copy, attention, steps of a tiny and
of a usual model, and collectives by their bytes, all while the other workers measure the same.

Ranks on a CPU share its cores, memory and network stack, so all times are by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from platform.config.fields import Config
from platform.data.corpus import open_run_corpus
from platform.plan.layout import Mesh
from platform.plan.plan import BASE_PRECISION, base_precision
from platform.plan.simulate import stage_rows
from platform.predict.choose_schedule import build_schedules
from platform.predict.make_plan import make_plan
from platform.predict.step_price import step_configs
from platform.runtime.communicator import Communicator, SingleRank
from platform.runtime.compilation import reason_uncompiled
from platform.runtime.process_groups import connect_process_groups
from platform.train.measurements import TOGETHER, synchronize_device
from platform.train.rank_parameters import DTYPES
from platform.train.rehearsal import rehearse_steps
from platform.train.replies import Rates, Timing
from platform.train.trainer import Trainer

LINE = ("stage",)  # axis of the ranks that measure collectives together, and send each other messages
FEW, MANY = 2, 8  # collectives in a row, of long ones and of others
LONGEST = 0.25  # seconds of a collective, beyond which no larger one is measured
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "rotate")
# Shapes of products, in units of a side: rows, columns and length of the sums, as of a layer's products, and with each
# of the three short.
SHAPES = (
    (2, 3, 1), (2, 1, 1), (2, 4, 1), (2, 1, 4), (8, 1, 1), (4, 2, 1 / 2), (4, 1 / 2, 2),
    (1 / 2, 1, 1), (1 / 8, 1, 1), (2, 1 / 4, 1), (2, 1 / 16, 1), (2, 1, 1 / 4), (2, 1, 1 / 16),
)  # fmt: skip


@dataclass(frozen=True)
class Extents:
    """Extents of measurements. `side`: unit of SHAPES; `copied`: bytes of a copy; `seconds`: span of each measurement
    on a device; `largest`: bytes of the largest collective; `repeats`: number of measurements of each collective."""

    side: int
    copied: int
    seconds: float
    largest: int
    repeats: int = 7


ON_CPU = Extents(256, 1 << 25, 0.15, 1 << 24)
ON_GPU = Extents(4096, 1 << 30, 0.15, 1 << 28)
TINY = Extents(32, 1 << 16, 0.002, 1 << 12, 1)  # for tests


def choose_extents(device: str, tiny: bool) -> Extents:
    """Return the extents of measurements on a device; `tiny`: sizes that take a moment and say nothing."""
    return TINY if tiny else ON_CPU if device == "cpu" else ON_GPU


def connect_groups(rank: int, shape: tuple[int, int], name: str, store: tuple[str, int], device: str) -> Communicator:
    """Connect a worker, as `rank` of a mesh of members by groups, to its group along LINE and to the others."""
    mesh = Mesh.arrange_axes(dict(zip((*LINE, TOGETHER), shape, strict=True)))
    if mesh.world_size == 1:
        return SingleRank(mesh, device)
    groups = dict.fromkeys(mesh.order_axes(axes) for axes in (LINE, mesh.axes))  # and all of them, for barriers
    pairs = [(0, 1)] if shape[0] > 1 else []
    return connect_process_groups(mesh, rank, store, f"calibrate/{name}", groups, device, pairs)


def measure_kernel_rates(communicator: Communicator, config: Config, tiny: bool) -> Rates:
    """Measure what this worker computes, in the configuration's precision, while all others of its group do."""
    device, sizes = communicator.device, choose_extents(communicator.device.type, tiny)
    timer = _Timer(device, sizes.seconds)
    timings: list[Timing] = []
    for measure in (_time_square_products, _time_products_of_fixed_shapes, _time_copy, _time_attention, _time_steps):
        communicator.barrier()
        timings += measure(timer, sizes, config)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return Rates(gpu.name, float(gpu.total_memory), gpu.multi_processor_count, timings)
    return Rates("cpu", 0.0, 1, timings)


def measure_collective_rates(communicator: Communicator, tiny: bool) -> Rates:
    """Measure collectives and messages of growing size in this worker's group along LINE, and how a collective in the
    background slows products; all groups do so at the same time."""
    timings: list[Timing] = []
    n, sizes = communicator.mesh.count_ranks(LINE), choose_extents(communicator.device.type, tiny)
    between = _CollectiveTimer(communicator, sizes)
    for op in (*COLLECTIVES, "send"):
        size, spent = 1 << 10, 0.0
        while size <= sizes.largest and spent < LONGEST:
            x, times = torch.zeros(size // 4, device=communicator.device), FEW if spent > 0.02 else MANY
            spent = between.measure_seconds(op, x, times)
            timings.append(Timing(op, [float(n), float(size)], spent))
            spent = _max_over_all_ranks(communicator, spent)
            size *= 4
    timings.append(_measure_overlap(communicator, sizes, between))
    return Rates(communicator.device.type, 0.0, 1, timings)


class _CollectiveTimer:
    """Collectives as a step has them, between products: ranks reach them at different times, and cores and caches have
    been at other work."""

    def __init__(self, communicator: Communicator, sizes: Extents):
        """Prepare products that take about a millisecond."""
        self.communicator, self._repeats = communicator, sizes.repeats
        self._a = torch.ones(sizes.side, sizes.side, device=communicator.device)

    def compute_products(self, count: int) -> None:
        """Compute so many products."""
        for _ in range(count):
            self._a @ self._a

    def measure_seconds(self, op: str, x: torch.Tensor, count: int) -> float:
        """Return the seconds of a collective, or of a message between a group's first two ranks: `count` products and
        collectives in turn take so much longer than as many products."""
        n = self.communicator.mesh.count_ranks(LINE)
        x = x[: len(x) // n * n] if op in ("reduce_scatter", "all_to_all") else x
        apart, together = [], []
        for _ in range(min(self._repeats, 2 if count == FEW else self._repeats)):
            apart.append(self._time_repeats(count, lambda: None))
            together.append(self._time_repeats(count, partial(self._run_collective, op, x)))
        return max(1e-7, (median(together) - median(apart)) / count / (2 if op == "send" else 1))

    def _time_repeats(self, count: int, follow_up: Callable[[], None]) -> float:
        """Return the seconds of `count` times a few products and something after them."""
        self.communicator.barrier()
        synchronize_device(self.communicator.device)
        begin = time.perf_counter()
        for _ in range(count):
            self.compute_products(4)
            follow_up()
        synchronize_device(self.communicator.device)
        return time.perf_counter() - begin

    def _run_collective(self, op: str, x: torch.Tensor) -> None:
        """Launch a collective and wait for it; or send a message there and back."""
        communicator, stage = self.communicator, self.communicator.coordinates["stage"]
        if op != "send":
            communicator.launch(op, x, LINE).wait()
        elif stage < 2:
            for sends in (stage == 0, stage == 1):
                (communicator.send(x, 1 - stage) if sends else communicator.receive(x.shape, x.dtype, 1 - stage)).wait()


def _max_over_all_ranks(communicator: Communicator, seconds: float) -> float:
    """Return the most seconds that any rank of all groups has measured, the same on all."""
    most_seconds, axes = torch.tensor([seconds], device=communicator.device), communicator.mesh.axes
    return communicator.read_numbers(communicator.launch("all_reduce", most_seconds, [*axes], reduce="max").wait())[0]


def _measure_overlap(communicator: Communicator, sizes: Extents, between: _CollectiveTimer) -> Timing:
    """Measure products and an all-gather that takes about as long, one after the other and at the same time."""
    x = torch.zeros(sizes.largest // 64, device=communicator.device)
    moving = _max_over_all_ranks(communicator, between.measure_seconds("all_gather", x, MANY))

    def time_products(count: int, launched: bool) -> float:
        """Return the seconds of so many products, beside the all-gather if it is `launched`."""
        communicator.barrier()
        synchronize_device(communicator.device)
        begin = time.perf_counter()
        handle = communicator.launch("all_gather", x, LINE) if launched else None
        between.compute_products(count)
        if handle:
            handle.wait()
        synchronize_device(communicator.device)
        return time.perf_counter() - begin

    count = 1 + int(8 * moving / _max_over_all_ranks(communicator, time_products(8, False)))
    apart, together = ([time_products(count, launched) for _ in range(sizes.repeats)] for launched in (False, True))
    return Timing("beside", [median(apart), moving], median(together))


@dataclass(frozen=True)
class _Timer:
    """Timer of work on a device: repeats it for so many `seconds`."""

    device: torch.device
    seconds: float

    def __call__(self, work: Callable[[], Any]) -> float:
        """Return the mean seconds of `work` in a span of time in which other ranks are at work too."""
        # the mean: all that ranks take from each other counts, also where they are more than cores
        once = max(1e-7, min(self._time_work(work, 1) for _ in range(3)))
        many, done, spent = max(1, int(self.seconds / 20 / once)), 0, 0.0
        while spent < self.seconds:
            spent += many * self._time_work(work, many)
            done += many
        return spent / done

    def _time_work(self, work: Callable[[], Any], count: int) -> float:
        """Return the seconds of each of `count` times the same work."""
        synchronize_device(self.device)
        begin = time.perf_counter()
        for _ in range(count):
            work()
        synchronize_device(self.device)
        return (time.perf_counter() - begin) / count


def _time_square_products(timer: _Timer, sizes: Extents, config: Config) -> Iterator[Timing]:
    """Yield a square product in every precision that this device computes in."""
    for precision, (dtype, _) in ((name, types) for name, types in DTYPES.items() if name not in BASE_PRECISION):
        n = sizes.side * 2 if precision == base_precision(config.precision) else sizes.side
        a = torch.ones(n, n, dtype=dtype, device=timer.device)
        yield Timing(f"peak {precision}", [2.0 * n**3], timer(partial(torch.matmul, a, a)))


def _time_products_of_fixed_shapes(timer: _Timer, sizes: Extents, config: Config) -> Iterator[Timing]:
    """Yield products of all SHAPES, each with the products of both gradients."""
    dtype = DTYPES[config.precision][0]
    for shape in SHAPES:
        rows, columns, inner = (max(1, int(sizes.side * share)) for share in shape)
        x, w = (torch.randn(n, inner, dtype=dtype, device=timer.device).requires_grad_() for n in (rows, columns))
        g = torch.ones(rows, columns, dtype=dtype, device=timer.device)
        work = partial(_compute_gradients, partial(F.linear, weight=w), (x, w), g)
        yield Timing("product", [float(n) for n in (rows, columns, inner)], timer(work))


def _time_copy(timer: _Timer, sizes: Extents, config: Config) -> Iterator[Timing]:
    """Yield a copy, by the bytes that it reads and writes."""
    original = torch.ones(sizes.copied // 4, device=timer.device)
    copy = torch.empty_like(original)
    yield Timing("copy", [2.0 * original.nbytes], timer(partial(copy.copy_, original)))


def _time_attention(timer: _Timer, sizes: Extents, config: Config) -> Iterator[Timing]:
    """Yield causal attention in one kernel, in both passes: by sequences, heads, length and width of a head."""
    dtype, width = DTYPES[config.precision][0], 64
    for batch, length in ((4, sizes.side), (1, 4 * sizes.side)):
        shape = (batch, 4, length, width)
        q, k, v = (torch.randn(shape, dtype=dtype, device=timer.device).requires_grad_() for _ in range(3))
        g = torch.ones_like(q)
        causal = partial(F.scaled_dot_product_attention, key=k, value=v, is_causal=True)
        yield Timing("attention", [float(n) for n in shape], timer(partial(_compute_gradients, causal, (q, k, v), g)))


def _compute_gradients(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], g: torch.Tensor) -> Any:
    """Compute, for a worker's rates, a function of the first of `inputs`, and gradients of all from its result's, g."""
    return torch.autograd.grad(function(inputs[0]), inputs, g)


def _time_steps(timer: _Timer, sizes: Extents, config: Config) -> Iterator[Timing]:
    """Yield steps of the models of `step_configs` on this worker alone, by their numbers."""
    for number, c in enumerate(step_configs(config, timer.device.type == "cuda", sizes is TINY)):
        compiles = "off" if reason_uncompiled(c.train.compile, timer.device.type) else "on"
        c = replace(c, train=replace(c.train, compile=compiles, graphs="off"))
        plan = make_plan(c)
        communicator = SingleRank(plan.mesh, timer.device)
        trainer = Trainer(c, plan, communicator, open_run_corpus(c), stage_rows(build_schedules(c, 1))[0])
        if compiles == "on":
            rehearse_steps(trainer, 1)
        yield Timing("step", [float(number)], timer(partial(_run_next_step, trainer, count(1))))


def _run_next_step(trainer: Trainer, numbers: Iterator[int]) -> None:
    """Run a trainer's next step."""
    trainer.step(next(numbers))
