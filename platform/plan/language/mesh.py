"""The mesh of a run: its ranks arranged along named axes, from outer (slow links) to inner (fast links)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod


@dataclass(frozen=True)
class Mesh:
    """Arranges ranks in row-major order over `shape`, pairs of (axis, size): the last axis varies fastest.

    >>> Mesh.of({"data": 2, "t": 3}).coordinates(4)
    {'data': 1, 't': 1}
    """

    shape: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, axes: Mapping[str, int]) -> Mesh:
        """Build a mesh of ranks from the sizes of its axes, outer to inner."""
        return cls(tuple(axes.items()))

    def __str__(self) -> str:
        """Format the mesh for people, such as "data 2 x t 3", without axes of size 1."""
        return " x ".join(f"{a} {n}" for a, n in self.shape if n > 1) or "1"

    @cached_property
    def axes(self) -> dict[str, int]:
        """Return the size of every mesh axis by name, from outer to inner."""
        return dict(self.shape)

    @cached_property
    def size(self) -> int:
        """Return the number of ranks in the mesh."""
        return prod(n for _, n in self.shape)

    def extent(self, axes: Sequence[str]) -> int:
        """Return the number of ranks along these mesh axes together: the product of their sizes."""
        ranks = 1
        for axis in axes:
            ranks *= self.axes[axis]
        return ranks

    def ordered(self, axes) -> tuple[str, ...]:
        """Return the given axes of more than one rank in mesh order: the canonical name of their process group."""
        wanted = set(axes)
        return tuple(a for a, n in self.shape if a in wanted and n > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along every axis of the mesh."""
        out = {}
        for axis, n in reversed(self.shape):
            rank, out[axis] = divmod(rank, n)
        return {axis: out[axis] for axis, _ in self.shape}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at the given position along every axis of the mesh."""
        rank = 0
        for axis, n in self.shape:
            rank = rank * n + coordinates[axis]
        return rank

    def index(self, coordinates: Mapping[str, int], axes: Sequence[str]) -> int:
        """Return the position of a rank at `coordinates` in its group along `axes`, the first axis being major."""
        i = 0
        for axis in axes:
            i = i * self.axes[axis] + coordinates[axis]
        return i

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the process group of `rank`: the ranks that differ along `axes` alone, in the order of `index`."""
        return _group(self, rank, tuple(axes))

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ranks of every process group along `axes`, which partition all ranks, by first rank."""
        others = tuple(axis for axis in self.axes if axis not in axes)
        inside = _offsets(self, tuple(axes))
        return [tuple(first + offset for offset in inside) for first in _offsets(self, others)]

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Return by how many ranks two neighbours along each axis of the mesh are apart."""
        return {axis: prod(n for _, n in self.shape[i + 1 :]) for i, (axis, _) in enumerate(self.shape)}


@cache
def _offsets(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks at 0 along all mesh axes but `axes`, in the order of positions along these, first major."""
    offsets = [0]
    for axis in axes:
        steps = range(0, mesh.axes[axis] * mesh._strides[axis], mesh._strides[axis])
        offsets = [offset + step for offset in offsets for step in steps]
    return tuple(offsets)


@cache
def _group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks of a mesh that differ from `rank` along `axes` alone, itself included."""
    here = mesh.coordinates(rank)
    first = rank - sum(here[axis] * mesh._strides[axis] for axis in axes)
    return tuple(first + offset for offset in _offsets(mesh, axes))
