"""Estimate of many contenders at once, in closed form from a sketch: seconds of a step and bytes of a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.plan.model_types import NF4_UNITS
from platform.plan.operations.experts import share_of_copies
from platform.plan.plan import ITEMSIZE
from platform.plan.quantisation import ROLES
from platform.plan.schedule import place_layers
from platform.plan.scheme import CONTEXT, REPLICAS
from platform.plan.step_collectives import DECODED, ROUNDED, SPREAD
from platform.predict import price
from platform.predict.bucket_size import MIB, choose_bucket_count
from platform.predict.contenders import Contender
from platform.predict.footprint import ROUNDING, overhead_bytes
from platform.predict.hardware import Hardware
from platform.predict.price import bytes_seconds, hidden_or_summed_seconds
from platform.predict.sketch import PARAMETERS, SIDES, Columns, Sketch
from platform.predict.work import CALLS_OF_BLOCK, CALLS_OF_KERNEL, FUSED_BACKWARD, SUMMED, MatrixProduct

FEW = 4  # layers of a model from whose last one the bytes of deeper ones follow
# numbers that take time
TIMED = SIDES[0], "fused", "summed", "touched", "rebuilt", "collective", "ahead", "beside", "quantised"
KERNELS_OF_ATTENTION = 1, 3  # in both passes
COMPUTING, WAITING, AHEAD, KERNELS = range(4)  # rows of sums of passes
TRAINED, _, QUANTISED = PARAMETERS


class PassBytes(NamedTuple):
    """Bytes that a microbatch takes on a worker: of each deep layer and of all else those `kept` from the forward to
    the backward pass, and those `pending` from the input gradient to the weight gradient where they are split; and the
    most at `work` beside these, without and with the split."""

    kept: tuple[Any, Any]
    pending: tuple[Any, Any]
    work: tuple[Any, Any]


Column = NDArray[np.float64]
USUAL = PassBytes((1.1, 1.0), (1.0, 1.0), (1.0, 1.0))  # meter by sketch, where a sketch's own sizes have no legal plan
GROUPS = 4  # process groups of a rank, about
LEAST = 1e-9  # seconds, for groups of one rank
QUEUED = 2.0  # times as long as alone do messages take on crowded links, about


class Offload(NamedTuple):
    """Move of a value of optimizer.offload, by parameter: numbers of states and masters that are `away`, in host
    memory, and the bytes that an update brings from there (`streamed`)."""

    away: float
    streamed: float


class Repeated(NamedTuple):
    """Work that a backward pass does again: the kind of recomputation, of `every` so many blocks at a time, and in how
    many chunks of rows feed-forward layers are (`mlp_chunks`), of which more than one are computed twice."""

    recompute: str
    every: int
    mlp_chunks: int


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of all contenders of a search: the `hardware`, the `precision`, the model's `layers`, its `units`,
    each with its cost and whether it is of a layer, sequences of a step (`batch`), numbers of optimizer state
    (`moments`), what each value of optimizer.offload moves (`offloads`), whether collectives of parameters go on beside
    computation (`overlap`), whether blocks are compiled where they can be (`compiles`), whether devices have libraries
    that reserve memory, MiB of gradients in a bucket, None if the links say (`bucket_mib`), elements that are together
    in 4 bits (`unit`), whether ZeRO-3 gathers weights in 8 bits (`narrow_gathers`), the precision at whose peak
    products in 8 bits are computed (`narrow`), and whether products are one with their collectives (`async_products`):
    on, off, or the faster way: auto."""

    hardware: Hardware
    precision: str
    layers: int
    units: tuple[tuple[float, bool], ...]
    batch: int
    moments: float
    offloads: Mapping[str, Offload]
    overlap: bool
    compiles: bool
    libraries: bool
    bucket_mib: int | None
    unit: int
    narrow_gathers: str
    narrow: str
    async_products: str = "off"


@lru_cache(maxsize=1 << 12)
def share_units(units: Sequence[tuple[float, bool]], stages: int, chunks: int) -> NDArray[np.float64]:
    """Return the shares that each stage has of a model's `units`, placed as in plans, [3, stages]: of all layers, and
    of the other units, by cost and by number."""
    totals, shares = [[sum(c for c, of in units if of is kind) for kind in (True, False)], np.zeros((3, stages))]
    around = sum(not of_layer for _, of_layer in units)
    for number, part in enumerate(place_layers([cost for cost, _ in units], stages * chunks)):
        for cost, of_layer in (units[i] for i in part):
            share = (cost / totals[0], 0, 0) if of_layer else (0, cost / totals[1], 1 / around)
            shares[:, number % stages] += share
    return shares


class _ParameterCosts(NamedTuple):
    """Costs of parameters on a worker: bytes of `state`, of all and of a deep layer (`layer_state`); seconds in which
    gradients are summed (`reduces`), of all and of the `last` bucket, and parameters gathered (`gathers`); elements
    `updated`; bytes a deep layer has `whole` at work under ZeRO-3: weights, gradients, the next layer's weights. Of
    gathers in 8 bits: seconds of `maxima` once a step, and bytes `rounded` and kernels `launched` in each pass."""

    state: Column
    layer_state: Column
    reduces: Column
    last: Column
    gathers: Column
    updated: Column
    whole: Column
    maxima: Column
    rounded: Column
    launched: Column


def once_each(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an estimator that computes once for equal arguments."""

    @wraps(method)
    def look_up(self: Estimator, *arguments: Any) -> Any:
        """Return what the method of an estimator has for some arguments."""
        key = method.__name__, *arguments
        if key not in self._computed:
            self._computed[key] = method(self, *arguments)
        return self._computed[key]

    return look_up


class Estimator:
    """Estimates contenders of one scheme, whose axes of more than one rank are the same: `columns` gives, by variable,
    the values of each contender, `axes` the mesh axes, outer to inner; `find_quotients` returns, by the kind of
    recomputation and the chunks of feed-forward layers, what the memory meter says of passes by what the sketch
    says."""

    def __init__(
        self,
        sketch: Sketch,
        setting: Circumstances,
        axes: tuple[str, ...],
        columns: Columns,
        find_quotients: Callable[[str, int], PassBytes] = lambda *_: USUAL,
        fused: Sketch | None = None,
    ):
        """Evaluate all numbers of a sketch for all contenders, and of the one with products that are `fused`."""
        self._fused = Estimator(fused, setting, axes, columns) if fused else None
        self.setting, self.axes, self.columns, self.find_quotients = setting, axes, columns, find_quotients
        self.kinds, self.numbers = sketch.numbers.kinds, sketch.numbers.evaluate_columns(columns)
        self.layer, self.whole = sketch.numbers.layer, sketch.numbers.whole
        self.ends = np.maximum(0.0, self.whole - setting.layers * self.layer)
        self.size = ITEMSIZE[setting.precision]
        self.stages = columns["stage"]
        alone = set(axes) <= {"data", "zero"}
        self.compiles = setting.compiles and sketch.is_traceable and alone
        self._computed: dict[tuple, Any] = {}

    @cached_property
    def _ranks_by_axis(self) -> dict[str, tuple[Column, Column]]:
        """Return by axis the number of ranks along it, and how many of these share a node, for each contender."""
        ranks, stride = {}, np.ones_like(self.stages, dtype=float)
        for axis in reversed(("stage", *self.axes)):
            n = self.columns[axis].astype(float)
            ranks[axis] = n, np.clip(np.floor(self.setting.hardware.ranks / stride), 1.0, n)
            stride = stride * n
        return ranks

    def _group_size(self, axes: tuple[str, ...]) -> Column:
        """Return the number of ranks along some axes, for each contender."""
        return prod((self._ranks_by_axis[a][0] for a in axes), start=np.ones_like(self.stages, dtype=float))

    def collective_seconds(self, op: str, axes: tuple[str, ...], size: Column) -> Column:
        """Return the seconds of a collective on an input of `size` bytes; 0 along axes of one rank."""
        node_ranks = prod((self._ranks_by_axis[a][1] for a in axes), start=np.ones_like(size))
        return price.group_seconds(op, size, self._group_size(axes), node_ranks, self.setting.hardware)

    def _price_number(self, i: int) -> Sequence[tuple[int, Any, Any]]:
        """Return which rows of `_pass_sums` a number is of, and its seconds in the forward and the backward pass."""
        kind, number, h, size = self.kinds[i], self.numbers[i], self.setting.hardware, self.size["compute"]
        if kind.what == SIDES[0]:
            product, count = MatrixProduct(*self.numbers[i : i + len(SIDES)]), self.numbers[i + len(SIDES)]
            products = dict(zip(ROLES, (product, *product.gradient_products), strict=True))
            by_role: dict[str, Any] = {r: self._product_seconds(products[r], r in kind.narrow) for r in kind.roles}
            forward = by_role.pop("forward", 0.0)
            return [(COMPUTING, count * forward, count * sum(by_role.values()))]
        if kind.what in ("collective", "ahead", "beside"):
            rows, is_forward = self._price_collective(i), kind.phase == "forward"
            return [(row, seconds * is_forward, seconds * (not is_forward)) for row, seconds in rows]
        if kind.what == "fused":
            seconds, times = (
                number / (h.peak_flops(self.setting.precision) * h.reached.attention),
                (1.0, FUSED_BACKWARD),
            )
        elif kind.what == "quantised":
            seconds, times = bytes_seconds(number * (DECODED[self.setting.compiles][0] + size), h), (1.0, 1.0)
        elif kind.what == "summed":
            seconds, times = bytes_seconds(number * SUMMED, h) * (self._num_microbatches > 1), (0.0, 1.0)
        else:
            seconds, times = bytes_seconds(number * size, h), kind.times
        return [(COMPUTING, times[0] * seconds, times[1] * seconds)]

    def _price_collective(self, i: int) -> Sequence[tuple[int, Any]]:
        """Return the rows of `_pass_sums` of a collective, with its seconds: of what products hide the slowing."""
        kind, number = self.kinds[i], self.numbers[i]
        if kind.copies:
            number = number * self._share_of_copies(*kind.copies)
        seconds = self.collective_seconds(kind.op, kind.axes, number * self.size["compute"])
        if kind.what != "beside":
            return [(AHEAD if kind.what == "ahead" else WAITING, seconds)]
        *roles, _ = ROLES
        in_8_bits, each = roles[kind.phase == "backward"] in kind.narrow, len(SIDES) + 1
        under = self.numbers[i + 1 : i + 1 + kind.beside * each].reshape(kind.beside, each, -1)
        multiplying = sum(count * self._product_seconds(MatrixProduct(*sides), in_8_bits) for *sides, count in under)
        share = 1 - kind.in_parts / self._group_size(kind.axes)
        hidden = np.minimum(seconds, multiplying) * share * self.setting.overlap
        return [(WAITING, seconds - hidden), (COMPUTING, self.setting.hardware.interference * hidden)]

    def _share_of_copies(self, axes: tuple[str, ...], experts: int, chosen: int) -> Column:
        """Return what a token's copies are of its `chosen` experts, which lie along `axes`, for each contender."""
        ranks, places = np.unique(self._group_size(axes).astype(int), return_inverse=True)
        return np.array([share_of_copies(experts, experts // n, chosen) for n in ranks.tolist()])[places]

    def _product_seconds(self, p: MatrixProduct, in_8_bits: bool) -> Column:
        """Return the seconds of a product of every contender, whose sizes are columns."""
        h = self.setting.hardware
        tiled = price.tiling_shares(p.rows, p.columns, p.batch, h.processors, h.tile)
        if in_8_bits:
            return price.products_seconds(p, h, self.setting.narrow, 1, tiled) + price.cast_seconds(p, h)
        return price.products_seconds(p, h, self.setting.precision, self.size["compute"], tiled)

    @cached_property
    def _pass_sums(self) -> dict[str, NDArray[np.float64]]:
        """Return the seconds of `computing`, of waiting, and of moving operands ahead, and kernels of the host, [4,
        forward and backward, contenders]: of all layers and of the `whole` model, of what of all layers is `rebuilt`,
        and of what recompute=full does again, `between` blocks beside if of several at a time, and =selective."""
        layers = self.setting.layers * self.layer
        rebuilt = np.array([kind.what == "rebuilt" for kind in self.kinds])
        again = np.array([kind.again for kind in self.kinds])
        weights = {
            "layers": layers * ~rebuilt,
            "whole": self.whole * ~rebuilt,
            "rebuilt": layers * rebuilt,
            "full": layers * (again & ~rebuilt),
            "between": layers * ~again,
            "selective": layers * [kind.inside for kind in self.kinds],
            "hidden": layers * [kind.hidden for kind in self.kinds],
        }
        often, sums = np.array([*weights.values()]), np.zeros((4, len(weights), 2, len(self.stages)))
        for i, kind in enumerate(self.kinds):
            if kind.what in TIMED:
                for row, *seconds in self._price_number(i):
                    for phase in (0, 1):
                        sums[row, :, phase] += often[:, i, None] * seconds[phase]
            kernels = self._count_kernels(i)
            for phase in (0, 1):
                sums[KERNELS, :, phase] += often[:, i, None] * kernels[phase]
        return {name: sums[:, k] for k, name in enumerate(weights)}

    def _count_kernels(self, i: int) -> tuple[Any, Any]:
        """Return the kernels that a number stands for in the forward and the backward pass."""
        kind = self.kinds[i]
        if kind.what == "products":
            is_forward = "forward" in kind.roles
            return is_forward * self.numbers[i], (len(kind.roles) - is_forward) * self.numbers[i]
        return KERNELS_OF_ATTENTION if kind.what == "fused" else (kind.times[0] > 0, kind.times[1] > 0)

    @once_each
    def _sum_passes(self, repeated: Repeated, is_split: bool) -> tuple[NDArray, NDArray]:
        """Return the seconds of passes of all layers, and of the whole model, as `_pass_sums` but with the host's
        seconds, and what the backward pass computes again. `is_split`: True if weight gradients have passes of their
        own."""
        recompute, every, mlp_chunks = repeated
        by_block = self.compiles and recompute != "selective"  # each one function
        layers, whole, again = self._pass_sums["layers"], self._pass_sums["whole"], np.zeros_like(self.numbers[:4])
        if recompute == "full":
            again = self._pass_sums["full"][:, 0] + (1 - 1 / every) * self._pass_sums["between"][:, 0]
            parts = self.collective_seconds("all_gather", self._stream[1], self._stream[0] * self.size["compute"])
            again[WAITING] += self._blocks / every * parts
        elif not by_block:
            again = self._pass_sums["rebuilt"][:, 1] + (recompute == "selective") * self._pass_sums["selective"][:, 0]
        again = again + (mlp_chunks > 1) * self._pass_sums["hidden"][:, 0]
        layers, whole = (sums + np.stack([0 * again, again], axis=1) for sums in (layers, whole))
        for sums in (whole, layers):
            calls = CALLS_OF_KERNEL * sums[KERNELS]
            if by_block:
                calls = CALLS_OF_KERNEL * np.maximum(0.0, sums[KERNELS] - layers[KERNELS])
                calls += CALLS_OF_BLOCK * self._blocks * np.array([[1], [1 + (recompute == "full") + is_split]])
            sums[KERNELS] = price.host_seconds(sums[KERNELS], calls, self.setting.hardware)
        return layers, whole

    @property
    def _blocks(self) -> int:
        """Return the number of blocks of the model's layers."""
        return sum(of_layer for _, of_layer in self.setting.units)

    def _device_seconds(self, sums: NDArray, moved: Any = 0.0, slower: float = 1.0) -> NDArray[np.float64]:
        """Return the seconds of both passes with `moved` seconds of collectives beside, and `slower` computing."""
        computing, waiting, ahead, host = sums
        hidden = np.minimum(ahead + moved, computing if self.setting.overlap else 0.0)
        exposed = ahead + moved - (1 - self.setting.hardware.interference) * hidden
        return hidden_or_summed_seconds(slower * computing + waiting + exposed, host, self.setting.hardware)

    def sketch_passes(self, recompute: str) -> PassBytes:
        """Return the bytes of passes by the sketch alone: as many as there are results."""
        kept = np.array([kind.what == "kept" for kind in self.kinds]) * self.size["compute"]
        outside = kept * [not kind.inside for kind in self.kinds]
        until_weights = np.array([kind.what in ("kept", "pending") for kind in self.kinds]) * self.size["compute"]
        layer, outside, ends = (w @ self.numbers for w in (self.layer * kept, self.layer * outside, self.ends * kept))
        pending, pending_ends = self.layer * until_weights @ self.numbers, self.ends * until_weights @ self.numbers
        stream = self._stream[0] * self.size["compute"]
        each = {"full": stream, "selective": outside}.get(recompute, layer)
        return PassBytes((each, ends), (pending, pending_ends), (pending + pending_ends,) * 2)

    @once_each
    def _pass_bytes(self, recompute: str, mlp_chunks: int) -> PassBytes:
        """Return the bytes of passes as the meter would count them."""
        chunks = mlp_chunks if any(kind.hidden for kind in self.kinds) else 1  # which is what a plan does then
        by_sketch, quotients = self.sketch_passes(recompute), self.find_quotients(recompute, chunks)
        return PassBytes(*(
            tuple(size * q for size, q in zip(*pair, strict=True)) for pair in zip(by_sketch, quotients, strict=True)
        ))  # fmt: skip

    @once_each
    def _parameter_costs(self, zero: int, offload: str, narrow: bool = False) -> _ParameterCosts:
        """Return what a worker has of all parameters and does with them, as if they were on one stage. `narrow`: True
        if weights that can be so are gathered in 8 bits."""
        master, compute = self.size["master"], self.size["compute"]
        costs = _ParameterCosts(*(np.zeros_like(self.stages, dtype=float) for _ in _ParameterCosts._fields))
        copies = compute if compute != master or zero in (1, 2) else 0
        alike: dict[tuple, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            if kind.what in PARAMETERS:
                alike.setdefault((kind.what, kind.axes, narrow and kind.tiled), []).append(i)
        for (what, axes, tiled), rows in alike.items():
            elements, of_layer = (times[rows] @ self.numbers[rows] for times in (self.whole, self.layer))
            shards, is_trained = self._group_size(tuple(a for a in axes if a in (*REPLICAS, *CONTEXT))), what == TRAINED
            state, summed, used = (shards if zero >= least else 1.0 for least in (1, 2, 3))
            in_4_bits = NF4_UNITS[self.setting.unit] / self.setting.unit
            kept = in_4_bits if what == QUANTISED else copies if is_trained else compute
            # of master copies and states, on the device
            numbers = 1 + self.setting.moments - self.setting.offloads[offload].away
            held = kept / used + is_trained * (master * numbers / state + master / summed)
            weights = self.whole[rows].sum()
            blocks = max(1.0, min(weights, self.setting.layers + 2))
            buckets = blocks if zero == 3 else np.minimum(self._count_buckets(axes, elements * master), blocks)
            elements_at_once = elements / buckets
            summed_bytes = elements_at_once * (compute if zero >= 2 else master)
            each = is_trained * self.collective_seconds("reduce_scatter" if zero else "all_reduce", axes, summed_bytes)
            in_tiles = tiled * (shards > 1)  # what is not sharded is not gathered
            moved = elements_at_once * (kept if what == QUANTISED else np.where(in_tiles, 1, compute)) / shards
            gather = self.collective_seconds("all_gather", axes, moved) if zero == 3 or (zero and is_trained) else 0.0
            updated = is_trained * elements / state
            whole = of_layer * compute * (1 + self.setting.overlap + is_trained) * (zero == 3) * (shards > 1)
            maxima = in_tiles * buckets * self.collective_seconds("all_reduce", axes, 0 * elements)  # a few kB
            times, launches = SPREAD[self.setting.compiles]
            rounded = in_tiles * elements * ((ROUNDED[0] + compute) / shards + 1 + times * compute)
            launched = in_tiles * weights * (ROUNDED[1] + launches)
            more = (
                elements * held, of_layer * held, buckets * each, each, buckets * gather, updated, whole,
                maxima, rounded, launched,
            )  # fmt: skip
            costs = _ParameterCosts(*(total + part for total, part in zip(costs, more, strict=True)))
        return costs

    def _count_buckets(self, axes: tuple[str, ...], size: Column) -> Column:
        """Return in how many buckets `size` bytes of gradients, summed over some axes, are, wherever blocks end."""
        if (mib := self.setting.bucket_mib) is not None:
            return np.ceil(size / max(1, mib * MIB))
        latency = self.collective_seconds("all_reduce", axes, np.zeros_like(size))
        transfer = self.collective_seconds("all_reduce", axes, size) - latency
        return choose_bucket_count(transfer, np.maximum(LEAST, self.setting.hardware.interference * latency))

    @cached_property
    def _stream(self) -> tuple[Column, tuple[str, ...]]:
        """Return the elements of a rank's part of the stream between layers, and the axes that replicate it."""
        candidates = [i for i, kind in enumerate(self.kinds) if kind.what == "stream"]
        candidates = candidates or [i for i, kind in enumerate(self.kinds) if kind.what == "kept"]
        largest = max(candidates, key=lambda i: self.numbers[i].max(initial=0.0))
        axes = tuple(a for a in self.kinds[largest].axes if a in self.axes)
        return self.numbers[largest] / self._group_size(axes), axes

    @cached_property
    def _num_microbatches(self) -> Column:
        """Return the microbatches of a step."""
        replicas = self._group_size(tuple(a for a in self.axes if a in REPLICAS))
        return np.ceil(self.setting.batch / (self.columns["microbatch"] * replicas))

    @cached_property
    def _groups_by_stages(self) -> list[tuple[int, NDArray[np.intp]]]:
        """Return which contenders have so many stages, but for one."""
        return [(n, np.flatnonzero(self.stages == n)) for n in sorted({*self.stages.tolist()}) if n > 1]

    def _list_groups(self, chunks: int) -> list[tuple[int, NDArray[np.intp]]]:
        """Return which contenders have so many stages, but for one, of so many `chunks`, each of one layer at least."""
        return [(n, alike) for n, alike in self._groups_by_stages if n * chunks <= self.setting.layers]

    def _most_of_stages(self, chunks: int, layers: Column, around: Column, by_number: bool = False) -> Column:
        """Return the largest part of a stage of totals of `layers` and of the units `around`, as in `share_units`."""
        most = np.asarray(layers + around)
        for n, alike in self._list_groups(chunks):
            deep, *others = share_units(self.setting.units, n, chunks)[:, :, None]
            most[alike] = (deep * layers[alike] + others[by_number] * around[alike]).max(axis=0)
        return most

    @once_each
    def _microbatches_of(self, chunks: int) -> Column:
        """Return the microbatches of a step: at least one for each stage where a stage has several chunks."""
        return np.maximum(self._num_microbatches, self.stages if chunks > 1 else 1)

    @once_each
    def _passes_seconds(self, kind: str, chunks: int, repeated: Repeated) -> Column:
        """Return the seconds from the first to the last pass of a step, with waits for other stages."""
        h, stages, slower = self.setting.hardware, self.stages, 1 + price.LOCKSTEP * (chunks > 1)
        of_passes = [self._device_seconds(sums, slower=slower) for sums in self._sum_passes(repeated, kind == "zb_h1")]
        layers, whole = (passes.sum(axis=0) for passes in of_passes)
        slowest = self._most_of_stages(chunks, layers, np.maximum(0.0, whole - layers))
        part = self._stream[0] * self.size["compute"]
        sent = price.message_seconds(part, self._ranks_by_axis["stage"][1] > 1, h)
        gathered = self.collective_seconds("all_gather", self._stream[1], part)
        crowded = (kind != "1f1b") & (2 * sent > price.CROWDED * whole / (stages * chunks))
        handed = 2 * (chunks - 1 / stages) * (gathered + sent * np.where(crowded, QUEUED, 1.0)) * (stages > 1)
        m, lost = self._microbatches_of(chunks), np.maximum(0.0, whole - slowest)
        if kind == "zb_h1":  # weight gradients fill the pause, if there are enough microbatches
            forward, backward = of_passes[0] / np.maximum(LEAST**2, layers)
            few = lost * (forward + backward / 2) - (m - 1) * forward * slowest
            lost = np.maximum(lost * forward, few)
        return m * (slowest + handed) + (lost + (stages - 1) * handed) / chunks

    @once_each
    def _stage_state(self, zero: int, chunks: int, offload: str) -> Column:
        """Return the bytes of parameters and of what belongs to them on the worker that has most."""
        costs, layers = self._parameter_costs(zero, offload), self.setting.layers
        of_layers = layers * costs.layer_state
        return self._most_of_stages(chunks, of_layers, np.maximum(0.0, costs.state - of_layers), True)

    @once_each
    def _parameter_seconds(self, zero: int, chunks: int, offload: str, recompute: str) -> Column:
        """Return the seconds of a step for collectives of parameters that passes do not hide, and by which those slow
        the passes that are hidden, and for the update."""
        s, costs = self.setting, self._parameter_costs(zero, offload)
        passes = self._sum_passes(Repeated(recompute, 1, 1), False)[1]
        share = self._stage_state(zero, chunks, offload) / costs.state  # of the stage that has most
        forward, backward = passes[COMPUTING] / self.stages * s.overlap

        def exposed_seconds(total: Column, beside: Column) -> Column:
            """Return the seconds by which collectives once a step make it longer."""
            buckets = costs.reduces / np.maximum(costs.last, LEAST**2) * share
            hidden = price.beside_passes_seconds(total * share, buckets, chunks, self.stages, beside / chunks)
            return total * share - (1 - s.hardware.interference) * hidden

        seconds = bytes_seconds(costs.updated * share * price.update_bytes(self.size, s.moments), s.hardware)
        seconds = seconds + price.streaming_seconds(
            costs.updated * share * s.offloads[offload].streamed, seconds, s.hardware
        )
        if zero in (1, 2):
            seconds = seconds + exposed_seconds(costs.gathers, forward)
        if zero < 2:
            return seconds + exposed_seconds(costs.reduces, backward)
        ways = {"on": (True,), "off": (False,)}.get(s.narrow_gathers, (False, True)) if zero == 3 else (False,)
        each, m = (self._parameter_costs(zero, offload, way) for way in ways), self._microbatches_of(chunks)
        return seconds + np.minimum.reduce([self._seconds_beside_passes(zero, way, passes, share, m) for way in each])

    def _seconds_beside_passes(
        self, zero: int, costs: _ParameterCosts, passes: NDArray, share: Column, m: Column
    ) -> Column:
        """Return the seconds that collectives of parameters beside the `passes` of m microbatches, and roundings before
        gathers in 8 bits, add to a step. `share`: part of the stage that has most."""
        beside = np.zeros_like(passes)
        beside[COMPUTING] = bytes_seconds(costs.rounded, self.setting.hardware)
        beside[KERNELS] = price.host_seconds(costs.launched, 0.0, self.setting.hardware)
        gathers = costs.gathers if zero == 3 else 0 * costs.gathers
        moved = np.stack([gathers, gathers + costs.reduces]) * share * self.stages
        longer = self._device_seconds(passes + beside * share * self.stages, moved) - self._device_seconds(passes)
        return costs.maxima * share + m * longer.sum(axis=0) / self.stages

    def _mode_seconds(self, mode: Contender) -> Column:
        """Return the seconds of a step of every contender in a mode, with asynchronous products where it has them."""
        passes = mode.kind, mode.chunks, Repeated(mode.recompute, mode.recompute_every, mode.mlp_chunks)
        seconds = self._passes_seconds(*passes)
        seconds = seconds + self._parameter_seconds(mode.zero, mode.chunks, mode.offload, mode.recompute)
        if not self._fused or mode.mlp_chunks > 1:
            return seconds
        fused, is_auto = self._fused._mode_seconds(mode), self.setting.async_products == "auto"
        return np.where(self._fused._shares_nodes & (not is_auto or fused < seconds), fused, seconds)

    @cached_property
    def _shares_nodes(self) -> NDArray[np.bool_]:
        """Return which contenders' products that are one with collectives have these within a node."""
        axes = {axis for kind in self.kinds if kind.in_parts for axis in kind.axes}
        near = [ranks == inside for ranks, inside in (self._ranks_by_axis[axis] for axis in axes)]
        return np.logical_and.reduce([np.full(len(self.stages), bool(near)), *near])

    def estimate_contenders(self, mode: Contender, rows: NDArray[np.intp]) -> tuple[Column, Column]:
        """Return the estimated seconds of a step, and bytes of the neediest worker, of contenders `rows` in a mode."""
        repeated = Repeated(mode.recompute, mode.recompute_every, mode.mlp_chunks)
        parameters, seconds = (mode.zero, mode.chunks, mode.offload), self._mode_seconds(mode)[rows]
        memory = self._activation_bytes(mode.kind, mode.chunks, repeated)[rows] + self._stage_state(*parameters)[rows]
        at_once = mode.recompute_every if mode.recompute == "full" else 1  # layers, whose gradients come together
        memory = memory + at_once * self._parameter_costs(mode.zero, mode.offload).whole[rows]
        if self.setting.libraries:
            memory = memory * (1 + ROUNDING) + overhead_bytes(GROUPS, 0, 0)
        return seconds, memory

    @once_each
    def _activation_bytes(self, kind: str, chunks: int, repeated: Repeated) -> Column:
        """Return the bytes of activations in flight on the stage that takes most, and of the layer at work."""
        recompute, every, mlp_chunks = repeated
        bytes_of_passes, splits = self._pass_bytes(recompute, mlp_chunks), kind == "zb_h1"
        m = self._microbatches_of(chunks)
        (kept, kept_ends), (pending, pending_ends) = bytes_of_passes[:2]
        work, layers = bytes_of_passes.work[splits], self.setting.layers
        per_pass = np.ceil(layers / (self.stages * chunks))
        if recompute == "full":  # whose stretches keep their inputs, and are whole while they are computed again
            at_once = np.minimum(every, per_pass)
            work = work + (at_once - 1) * self._pass_bytes("none", mlp_chunks).kept[0]
            kept = kept * np.ceil(per_pass / at_once) / per_pass
        held = layers * kept + np.maximum(0.0, kept_ends)
        for n, alike in self._list_groups(chunks):
            number = np.arange(n)[:, None]
            deep, around, _ = share_units(self.setting.units, n, chunks)[:, :, None]
            more = (n - 1) / chunks if chunks > 1 else 0.0
            first, last = n + more, 1 + more * (chunks - 1)
            flights = np.minimum(m[alike], first - number / (n - 1) * (first - last))
            if kind == "gpipe":
                flights = m[alike]
            of_stage = flights * (deep * layers * kept[alike] + around * np.maximum(0.0, kept_ends[alike]))
            if splits:  # weight gradients wait, the more the later the stage
                delayed = np.minimum(m[alike] - 1, number)
                again = np.maximum(0.0, pending - kept)[alike]  # what the pass at work does not take over
                of_stage = of_stage + deep * layers / chunks * (delayed * pending[alike] + again)
                of_stage = of_stage + delayed * around * np.maximum(0.0, pending_ends[alike])
            held[alike] = of_stage.max(axis=0)
        return held + work
