"""Estimate of many contenders at once, in closed form from a sketch: seconds of a step and bytes of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.costs.machine import Hardware
from platform.costs.seconds import (
    MIB,
    bucket_count,
    bytes_seconds,
    group_seconds,
    message_seconds,
    update_bytes,
    with_hidden,
)
from platform.costs.work import FUSED_BACKWARD
from platform.plan.core.plan import ITEMSIZE
from platform.plan.language.scheme import CONTEXT, REPLICAS
from platform.plan.memory.hardware import ROUNDING, reserved_bytes
from platform.planning.search.sketch import Columns, Quantity, Sketch

Column = NDArray[np.float64]
KEPT, DELAYED = 0.8, 1.6  # share of the results counted that plans keep; and times that, with delayed weight gradients
GROUPS = 4  # process groups of a rank, about
LEAST = 1e-9  # seconds, for groups of one rank


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of all contenders of a search: the `hardware`, the `precision`, the model's `layers`, how many its
    sketch has (`few`), sequences of a step (`batch`), numbers of optimizer state (`moments`), whether collectives
    of parameters go on beside computation (`overlap`), whether devices have libraries that reserve memory, and MiB of
    gradients in a bucket, None if the links say (`bucket_mib`)."""

    hardware: Hardware
    precision: str
    layers: int
    few: int
    batch: int
    moments: int
    overlap: bool
    libraries: bool
    bucket_mib: int | None


class Mode(NamedTuple):
    """Part of a contender that all contenders of one estimate share."""

    kind: str
    chunks: int
    recompute: str
    zero: int


class Estimate(NamedTuple):
    """Estimated `seconds` of a step and `memory` in bytes of the worker that needs most, of many contenders."""

    seconds: Column
    memory: Column


class Estimator:
    """Estimates contenders of one scheme, whose axes of more than one rank are the same: `columns` gives, by variable,
    the values of each contender, `axes` the mesh axes, outer to inner."""

    def __init__(self, sketch: Sketch, setting: Circumstances, axes: tuple[str, ...], columns: Columns):
        """Evaluate all numbers of a sketch for all contenders."""
        self.setting, self.axes, self.columns = setting, axes, columns
        self.kinds, self.numbers = sketch.numbers.kinds, sketch.numbers.at(columns)
        self.layer = sketch.numbers.layer
        self.whole = sketch.numbers.once + (setting.layers - setting.few) * sketch.numbers.layer
        self.ends = np.maximum(0.0, sketch.numbers.once - setting.few * sketch.numbers.layer)
        self.size = ITEMSIZE[setting.precision]
        self.stages = columns["stage"]

    @cached_property
    def _ranks(self) -> dict[str, tuple[Column, Column]]:
        """Return by axis the number of ranks along it, and how many of these share a node, for each contender."""
        found, stride = {}, np.ones_like(self.stages, dtype=float)
        for axis in reversed(("stage", *self.axes)):
            n = self.columns[axis].astype(float)
            found[axis] = n, np.clip(np.floor(self.setting.hardware.ranks / stride), 1.0, n)
            stride = stride * n
        return found

    def _extent(self, axes: tuple[str, ...]) -> Column:
        """Return the number of ranks along some axes, for each contender."""
        return prod((self._ranks[a][0] for a in axes), start=np.ones_like(self.stages, dtype=float))

    def moved(self, op: str, axes: tuple[str, ...], size: Column) -> Column:
        """Return the seconds of a collective on an input of `size` bytes; 0 along axes of one rank."""
        here = prod((self._ranks[a][1] for a in axes), start=np.ones_like(size))
        return group_seconds(op, size, self._extent(axes), here, self.setting.hardware)

    @cached_property
    def _passes(self) -> tuple[NDArray, NDArray, NDArray]:
        """Return the seconds of each number, of computing, of waiting and of what goes on beside computing: arrays of
        [forward and backward, numbers, contenders]."""
        h, size = self.setting.hardware, self.size["compute"]
        peak = h.peak(self.setting.precision)
        speed = peak * h.reached.products
        computing = np.zeros((2, *self.numbers.shape))
        waiting, hidden = np.zeros_like(computing), np.zeros_like(computing)
        for i, kind in enumerate(self.kinds):
            number = self.numbers[i]
            if kind.what == "flops":
                width, read = self.numbers[i + 1], self.numbers[i + 2] * size
                one = number / (speed * width / (width + h.fill))
                one = with_hidden(one, bytes_seconds(read, h), h)
                computing[0, i], computing[1, i] = one, 2 * one
            elif kind.what == "fused":
                one = number / (peak * h.reached.attention)
                computing[0, i], computing[1, i] = one, FUSED_BACKWARD * one
            elif kind.what == "touched":
                one = bytes_seconds(number * size, h)
                computing[0, i], computing[1, i] = kind.times[0] * one, kind.times[1] * one
            elif kind.what == "collective":
                waiting[int(kind.phase == "backward"), i] = self.moved(kind.op, kind.axes, number * size)
            elif kind.what == "ahead":
                into = hidden if self.setting.overlap else waiting
                into[int(kind.phase == "backward"), i] = self.moved(kind.op, kind.axes, number * size)
        return computing, waiting, hidden

    def _both(self, weights: NDArray) -> tuple[Column, Column]:
        """Return the seconds of both passes of the numbers, each so often as `weights` says."""
        computing, waiting, hidden = (np.tensordot(part, weights, (1, 0)) for part in self._passes)
        found = np.maximum(computing, hidden) + waiting
        kernels = float(weights @ [kind.what in ("touched", "flops", "fused") for kind in self.kinds])
        host = kernels * self.setting.hardware.launch
        return with_hidden(found[0], host, self.setting.hardware), with_hidden(
            found[1], 2 * host, self.setting.hardware
        )

    @cached_property
    def _times(self) -> tuple[Column, Column, Column, Column]:
        """Return the seconds of the passes, forward and backward, of a layer and of all around the layers."""
        return (*self._both(self.layer), *self._both(self.ends))

    @cached_property
    def _again(self) -> Column:
        """Return the seconds in which recompute=selective does the inside of attention again, of a layer."""
        return self._both(self.layer * [kind.inside for kind in self.kinds])[0]

    @cached_property
    def _kept(self) -> tuple[Column, Column, Column]:
        """Return the bytes kept for the backward pass: of a layer, of it without attention, and of all else."""
        kept = np.array([kind.what == "kept" for kind in self.kinds]) * self.size["compute"]
        outside = kept * [not kind.inside for kind in self.kinds]
        return tuple(w @ self.numbers for w in (self.layer * kept, self.layer * outside, self.ends * kept))

    @cache  # noqa: B019
    def _parameters(self, zero: int) -> tuple[Column, Column, Column]:
        """Return, of all parameters as if they were on one stage, the bytes of a worker's state, the seconds in which
        gradients are summed and updated parameters gathered, and the elements that it updates."""
        master, compute = self.size["master"], self.size["compute"]
        memory, seconds, updated = (np.zeros_like(self.stages, dtype=float) for _ in range(3))
        copies = compute if compute != master or zero in (1, 2) else 0
        for axes in dict.fromkeys(kind.axes for kind in self.kinds if kind.what == "parameter"):
            rows = self._rows(axes)
            elements = self.whole[rows] @ self.numbers[rows]
            shards = self._extent(tuple(a for a in axes if a in (*REPLICAS, *CONTEXT)))
            state, summed, used = (shards if zero >= least else 1.0 for least in (1, 2, 3))
            held = master * (1 + self.setting.moments) / state + master / summed + copies / used
            memory += elements * held
            updated += elements / state
            buckets = np.minimum(self._buckets(axes), max(1.0, self.whole[rows].sum()))
            one = elements * master / buckets
            if zero:
                seconds += buckets * self.moved("reduce_scatter", axes, one)
                seconds += buckets * self.moved("all_gather", axes, one * compute / master / shards)
            else:
                seconds += buckets * self.moved("all_reduce", axes, one)
        return memory, seconds, updated

    def _rows(self, axes: tuple[str, ...]) -> list[int]:
        """Return which numbers are of parameters whose gradients are summed over some axes."""
        return [i for i, kind in enumerate(self.kinds) if kind == Quantity("parameter", axes, inside=kind.inside)]

    @cache  # noqa: B019
    def _buckets(self, axes: tuple[str, ...]) -> Column:
        """Return in how many buckets all gradients that are summed over some axes are, wherever blocks end."""
        size = self.whole[self._rows(axes)] @ self.numbers[self._rows(axes)] * self.size["master"]
        if (mib := self.setting.bucket_mib) is not None:
            return np.ceil(size / max(1, mib * MIB))
        latency = self.moved("all_reduce", axes, np.zeros_like(size))
        transfer = self.moved("all_reduce", axes, size) - latency
        return bucket_count(transfer, np.maximum(LEAST, self.setting.hardware.interference * latency))

    @cached_property
    def _stream(self) -> Column:
        """Return the elements of the activation between two layers, of which each rank keeps or sends its part."""
        found = [i for i, kind in enumerate(self.kinds) if kind.what == "stream"]
        found = found or [i for i, kind in enumerate(self.kinds) if kind.what == "kept"]
        return self.numbers[max(found, key=lambda i: self.numbers[i].max(initial=0.0))]

    @cached_property
    def _sent(self) -> Column:
        """Return the seconds in which a stage sends an activation to the next."""
        return message_seconds(self._stream * self.size["compute"], self._ranks["stage"][1] > 1, self.setting.hardware)

    @cached_property
    def _microbatches(self) -> Column:
        """Return the microbatches of a step."""
        replicas = self._extent(tuple(a for a in self.axes if a in REPLICAS))
        return np.ceil(self.setting.batch / (self.columns["microbatch"] * replicas))

    def estimate(self, mode: Mode, rows: NDArray[np.intp]) -> Estimate:
        """Estimate the contenders `rows` in one mode."""
        s, stages, sent = self.setting, self.stages[rows], self._sent[rows]
        m = np.maximum(self._microbatches[rows], stages if mode.chunks > 1 else 1)
        there, back, ends_there, ends_back = (part[rows] for part in self._times)
        again = {"full": self._times[0], "selective": self._again}.get(mode.recompute)
        back = back if again is None else back + again[rows]
        layer, ends = there + back, ends_there + ends_back
        per = np.ceil(s.layers / (stages * mode.chunks))
        slack = (stages * mode.chunks * per - s.layers) * layer
        slowest = mode.chunks * per * layer + np.maximum(0.0, ends - slack)
        average = (s.layers * layer + ends) / stages
        lost = average * (there / layer if mode.kind == "zb_h1" else 1.0)
        bubble = (stages - 1) * (lost / mode.chunks + 2 * sent)
        handed = np.where(stages > 1, 4 * mode.chunks * sent, 0.0)
        state, moved, updated = (part[rows] / stages for part in self._parameters(mode.zero))
        hidden = (s.layers * back + ends_back) / stages / mode.chunks if s.overlap else 0.0
        exposed = (m if mode.zero > 1 else 1.0) * np.maximum(0.1 * moved, moved - hidden)
        update = bytes_seconds(updated * update_bytes(self.size, s.moments), s.hardware)
        held = self._held(mode, rows, m, mode.chunks * per)
        return Estimate(m * (slowest + handed) + bubble + exposed + update, self._reserved(state + held))

    def _held(self, mode: Mode, rows: NDArray[np.intp], m: Column, layers: Column) -> Column:
        """Return the bytes of activations in flight on a stage of so many `layers`, and of the layer at work."""
        stages, (layer, outside, ends) = self.stages[rows], (part[rows] for part in self._kept)
        more = (stages - 1) / mode.chunks if mode.chunks > 1 else 0.0
        passes = m if mode.kind == "gpipe" else np.minimum(m, stages + more)
        stream = self._stream[rows] * self.size["compute"]
        kept = {"full": stream, "selective": outside}.get(mode.recompute, layer)
        share = KEPT * (DELAYED if mode.kind == "zb_h1" else 1.0)
        return share * passes * layers * kept + layer + ends / np.maximum(1, stages / 2)

    def _reserved(self, memory: Column) -> Column:
        """Return the bytes of a worker with what its device's libraries reserve."""
        return memory * (1 + ROUNDING) + reserved_bytes(GROUPS, 0, 0) if self.setting.libraries else memory
