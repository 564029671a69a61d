"""Products in 8 bits as data of a plan: how numbers are scaled, which products of which operations, by which maxima.

A weight has three products: `forward` contracts the features that it reads, `input`, the gradient of these, the
features that it makes, and `weight`, its own gradient, the tokens of a microbatch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from platform.plan.model_types import RANK, Operation, Parameter, Spec

T = TypeVar("T")
Dims = tuple[str, ...]
Tile = tuple[int, int]  # rows and columns with one scale, of matrices whose columns a product contracts; 0: all
Version = tuple[int, int]

MX_BLOCK = 32  # elements with one scale, as the OCP's MX formats have
SCALE_BYTES = 4  # of a scale in fp32, whatever values it may have
LEAST_MAXIMUM = 1e-12  # of numbers with one scale that is no power of two, as in torchao
# product -> what its two operands are; the first is the activation or, in `input`, the gradient of the result
ROLES = {"forward": ("activation", "weight"), "input": ("gradient", "weight"), "weight": ("activation", "gradient")}
PHASES = {"forward": "forward", "input": "backward", "weight": "backward"}
EXACT = ("block", "mx")  # scales of blocks, whose maxima no rank asks another for


class ScaledKernel(NamedTuple):
    """Kernel of torch that multiplies matrices in 8 bits, on GPUs of a compute capability from `least` to below `below`
    with the `cuda` that brought it. `scalings`: tiles whose scales it takes -> their name in torch's `ScalingType`;
    `of_powers`: its scales are powers of two."""

    least: Version
    below: Version
    cuda: Version
    scalings: Mapping[Tile, str]
    of_powers: bool = False


KERNELS = (
    ScaledKernel((8, 9), (99, 0), (12, 0), {(0, 0): "TensorWise"}),
    ScaledKernel((9, 0), (99, 0), (12, 0), {(1, 0): "RowWise"}),
    ScaledKernel((9, 0), (10, 0), (12, 9), {(1, 128): "BlockWise1x128", (128, 128): "BlockWise128x128"}),
    # a longer tile than MX's: several of these with one scale
    ScaledKernel(
        (10, 0), (11, 0), (12, 8), dict.fromkeys([(1, MX_BLOCK), (1, 128), (128, 128)], "BlockWise1x32"), True
    ),
)
ARCHITECTURES = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}  # GPUs with which a kernel begins or ends


def find_scaled_kernel(tiles: Iterable[Tile], powers: bool, capability: Version) -> ScaledKernel | None:
    """Return the kernel of GPUs for operands with scales of `tiles`, powers of two or not; None if they emulate it."""
    wanted = set(tiles)
    of_gpu = (k for k in KERNELS if k.least <= capability < k.below and (powers or not k.of_powers))
    return next((k for k in of_gpu if wanted <= k.scalings.keys()), None)


@dataclass(frozen=True)
class Quantisation:
    """Form of the operands of products in 8 bits. `scale`: one for each tensor, row, `block` of elements along what a
    product contracts (of a weight for each block by block; DeepSeek-V3), or mx, which is along it for weights too.
    `powers`: scales are powers of two; `gradients`: the form of gradients, e4m3 or e5m2."""

    scale: str
    block: int = 128
    powers: bool = True
    gradients: str = "e4m3"

    @property
    def tiles(self) -> tuple[Tile, Tile]:
        """Return the tiles with one scale of 8 bits, of activations or gradients, and of weights."""
        b = self.block
        by_scale = {"tensor": ((0, 0), (0, 0)), "row": ((1, 0), (1, 0)), "block": ((1, b), (b, b))}
        return by_scale.get(self.scale, ((1, b), (1, b)))

    @property
    def has_equal_tiles(self) -> bool:
        """Return True if both passes make the same numbers of a weight in 8 bits, and make them again of themselves."""
        return self.scale in ("block", "tensor") and self.powers

    def has_kernels(self, capability: Version) -> bool:
        """Return True if GPUs of a compute capability have kernels for such operands."""
        return find_scaled_kernel(self.tiles, self.powers, capability) is not None

    @property
    def title(self) -> str:
        """Return how numbers are scaled to 8 bits, for people."""
        of = f"{self.scale} of {self.block}" if self.scale in EXACT else self.scale
        return f"a scale for each {of}{', a power of two' if self.powers else ''}"


@dataclass(frozen=True)
class ScaledProducts:
    """Products of one planned einsum that are computed in 8 bits, of those in ROLES. `maxima`: (product, number of the
    operand, axes) where ranks along axes have parts of what has one scale, and take its maximum over them."""

    how: Quantisation
    products: tuple[str, ...] = tuple(ROLES)
    maxima: tuple[tuple[str, int, tuple[str, ...]], ...] = ()

    def axes_of_maximum(self, product: str, operand: int) -> tuple[str, ...]:
        """Return the axes over which the maxima of an operand of a product in 8 bits are taken."""
        return next((axes for p, n, axes in self.maxima if (p, n) == (product, operand)), ())


@dataclass(frozen=True)
class WeightTiles:
    """Square tiles with one scale of 8 bits each, of `block` rows and columns, the last ones shorter, in which a weight
    is gathered: its block on a rank is so many `matrices` of `rows` and `columns`, one after another."""

    block: int
    matrices: int
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the tiles of a weight in 8 bits: [matrices, along rows, along columns]."""
        return self.matrices, -(-self.rows // self.block), -(-self.columns // self.block)


def arrange_product(x: T, weight: T, out: T, product: str) -> tuple[T, T, T]:
    """Return an einsum's values of activation, weight and output as operands and result of one of its products."""
    return {"forward": (x, weight, out), "input": (out, weight, x), "weight": (x, out, weight)}[product]


def contracted_dims(a: Dims, b: Dims, out: Dims) -> Dims:
    """Return the dims that a product in 8 bits contracts, in the order of its blocks: sequence after sequence."""
    return tuple(sorted((d for d in b if d in a and d not in out), key=lambda d: d != "batch"))


def mark_quantised(
    operations: Sequence[Operation],
    in_blocks: Iterable[bool],
    how: Quantisation,
    layers: Sequence[str],
    skip: Sequence[str],
) -> list[Operation]:
    """Return the operations of a model, with the attribute `quantise` where weights of its blocks have products in 8
    bits: their names match a pattern in `layers` and none in `skip`. Routers and adapters have none."""
    return [
        replace(o, attributes=tuple(sorted((*o.attributes, ("quantise", how)))))
        if inside and can_quantise_products(o) and _are_chosen(o, layers, skip)
        else o
        for o, inside in zip(operations, in_blocks, strict=True)
    ]


def can_quantise_products(o: Operation) -> bool:
    """Return True if an operation of a block multiplies by weights in the compute type, which 8 bits can stand for."""
    tensors = (*o.inputs, *o.outputs)
    plain = all(t.dtype == "compute" for t in tensors if isinstance(t, Spec))
    return o.kind == "project" and plain and not any({"vocab", RANK} & {*t.dims} for t in tensors)


def _are_chosen(o: Operation, layers: Sequence[str], skip: Sequence[str]) -> bool:
    """Return True if patterns choose all weights of an operation, which share an operand in 8 bits."""
    names = [p.name for p in o.inputs if isinstance(p, Parameter)]
    return all(_matches(name, layers) and not _matches(name, skip) for name in names)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if the name of a weight matches a pattern of those in 8 bits."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
