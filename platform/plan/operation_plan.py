"""Data types of an operation's plan: collectives, groups of einsums, conversions; the shapes along their steps, and the
bytes that each collective moves, by the counting conventions of docs/contract.md (`traffic_bytes`).

`OffloadedActivation` is in host memory from the forward pass of a block to its backward pass. `loss_chunk_rows` and
`computes_gradients_in_forward` settle how a loss over vocab is computed in chunks of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from platform.plan.layout import Cut, Layout, Mesh
from platform.plan.model_types import TEACHER, Operation
from platform.plan.quantisation import ScaledProducts
from platform.plan.rule import Conversion, RelayoutStep


@dataclass(frozen=True)
class Collective:
    """Planned launch of a collective by every rank at index 0 of the axes `only`. `elements`: size of one rank's input;
    for a scatter, of one rank's output.

    `dtype` is `compute` (activations, weights), `accumulate` (statistics, a router's scores, summed gradients),
    `integers` (numbers of rows), `bytes` (weights in 4 bits) or `metrics` (fp64 sums of a step). `phase` is forward or
    backward inside an operation, `reduce` or `update` at the end of a step. `rows`: the most rows that there can be, of
    a collective of experts' rows, whose elements these are; else 0. `cuts`: cuts of the dims along which blocks of
    ranks of different groups differ; `elements` is then the size of the largest.
    """

    op: str
    axes: tuple[str, ...]
    elements: int
    dtype: str
    phase: str
    only: tuple[str, ...] = ()
    rows: int = 0
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class Einsum:
    """Einsum of a group that shares its first operand x: the other operand, which has dims `dims` and is converted by
    `operand`, times x gives the operation's output number `index`, which leaves by `output`.

    `regathered`: the converted operand is not kept but converted again for the backward pass. `frozen`: it takes no
    gradient. `scaled`: its products in 8 bits.
    """

    index: int
    x_dims: tuple[str, ...]
    dims: tuple[str, ...]
    out_dims: tuple[str, ...]
    operand: Conversion
    output: Conversion
    regathered: bool = False
    frozen: bool = False
    scaled: ScaledProducts | None = None

    @property
    def num_row_dims(self) -> int:
        """Return how many dims of an einsum's x its result has too."""
        return sum(d in self.out_dims for d in self.x_dims)


@dataclass(frozen=True)
class Panels:
    """Computation of an EinsumGroup by SUMMA, in place of two gathers: `dim`, which every einsum contracts, is split
    over `x_axes` in x and over `operand_axes` in the operands (either may be empty), and comes in `count` panels, each
    broadcast by its owners."""

    dim: str
    x_axes: tuple[str, ...]
    operand_axes: tuple[str, ...]
    count: int

    def panel_elements(self, local: int, axes: Sequence[str], mesh: Mesh) -> int:
        """Return the elements of one SUMMA panel of a matrix split over mesh `axes`, `local` elements per rank."""
        return local * mesh.count_ranks(axes) // self.count


# kind of device -> gradients of the results of joined weights are copied together, for one product instead of one each.
# On a CPU two more products are faster than the copy (by 5 % of the backward pass of Q, K and V of width 256).
JOINS_GRADIENTS = {"cpu": False}


@dataclass(frozen=True)
class EinsumGroup:
    """Einsums of one operation that read x in one compute layout, so that they share one gather of x and one reduction
    of its gradient.

    With `panels`, the conversions leave out the gathers of the contracted dim and their adjoints. `regathered`: x is
    converted again for the backward pass, as in `Einsum`. `fuses`: the end whose one collective runs as one with the
    products, in both passes (`platform.plan.async_products`): x, which is gathered, or result, which is scattered.
    """

    x: Conversion
    einsums: tuple[Einsum, ...]
    panels: Panels | None = None
    regathered: bool = False
    fuses: str = ""

    @property
    def fused_conversion(self) -> Conversion | None:
        """Return the conversion whose collective this planned group of einsums runs as one with its products."""
        return {"x": self.x, "result": self.einsums[0].output}.get(self.fuses)

    @cached_property
    def has_wide_dtype(self) -> bool:
        """Return True if the plan has this group's products computed in the type of statistics, by types of results."""
        return self.einsums[0].output.dtype == "accumulate"

    @property
    def x_dims(self) -> tuple[str, ...]:
        """Return the dims of x, the first operand that all einsums of this group of the plan share."""
        return self.einsums[0].x_dims

    @cached_property
    def is_frozen(self) -> bool:
        """Return True if no operand of this einsum group takes a gradient, for which x would be kept."""
        return all(e.frozen for e in self.einsums)

    @cached_property
    def is_scaled(self) -> bool:
        """Return True if any product of this planned group of einsums is in 8 bits."""
        return any(e.scaled for e in self.einsums)

    @cached_property
    def is_local(self) -> bool:
        """Return True if the plan converts or broadcasts no operand or result of this group of einsums: it is local."""
        conversions = [self.x, *(c for e in self.einsums for c in (e.operand, e.output))]
        return not self.panels and not any(c.forward or c.backward for c in conversions)

    @cached_property
    def can_join_operands(self) -> bool:
        """Return True if operands that lie one after another in memory are one matrix [.., contracted], and the results
        parts of its product with x: the plan converts no operand or result."""
        ends = (c for e in self.einsums for c in (e.operand, e.output))
        straight = all(e.x_dims[-1] == e.dims[-1] and e.out_dims == e.x_dims[:-1] + e.dims[:-1] for e in self.einsums)
        plain = len(self.einsums) > 1 and straight and not (self.panels or self.has_wide_dtype or self.is_scaled)
        return plain and not any(c.forward or c.backward for c in ends)


# d_model from which on products with weights do not keep what a norm or a function of elements has made of tensors that
# are kept anyway: for the gradients of the weights it is made again. That is 2 to 3 accesses of each of its elements,
# for which products do 6 d_model FLOPs or more: 2 % of a step on an H100 at this width, 1 % at twice the width.
REBUILT_FROM = 4096


def rebuilds_inputs(sizes: Mapping[str, int]) -> bool:
    """Return True if a plan of a model of such `sizes` has products make their inputs again rather than keep them."""
    return sizes.get("d_model", 0) >= REBUILT_FROM


@dataclass(frozen=True)
class PlannedOperation:
    """Layout and communication with which a rank executes one operation of a model, planned by the communication rule.

    project and einsum have `groups`; other operations have `conversions`, one per parameter or moved operand. `over`:
    the axes that split the dim over which a norm, softmax or cross-entropy takes statistics, a lookup its rows or a
    reduce its result; partial results are merged over them. `tokens`: the layout over batch and length in which the
    operation reads a data tensor, and `token_count` the integers in a rank's block of it. Only ranks at index 0 of the
    axes `only` compute the operation. `once`: its result is left out where it is recomputed, with the collectives
    `results` that convert it.
    """

    operation: Operation
    collectives: tuple[Collective, ...] = ()
    groups: tuple[EinsumGroup, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    over: tuple[str, ...] = ()
    tokens: Layout = Layout()
    token_count: int = 0
    compute_axes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    once: bool = False
    results: tuple[Collective, ...] = ()

    def plan_alike(self, operation: Operation) -> PlannedOperation:
        """Return the plan of another operation that is alike, of this one that nothing has been asked of yet."""
        twin = object.__new__(type(self))  # a plan has thousands, and `replace` takes ten times as long
        vars(twin).update(vars(self), operation=operation)
        return twin

    @cached_property
    def collectives_launched_again(self) -> Counter[Collective]:
        """Count the forward collectives of this planned operation that recomputation launches again."""
        forward = Counter(c for c in self.collectives if c.phase == "forward" and self.operation.recomputed)
        return forward - Counter(self.results)

    def rebuilds_input(self, group: EinsumGroup) -> bool:
        """Return True if x of a group of its einsums is made again in the backward pass: not if kept as gathered."""
        made_by = dict(self.operation.attributes).get("made_by")
        return bool(made_by) and not (group.panels or group.is_frozen) and (group.regathered or not group.x.forward)

    @property
    def is_frozen(self) -> bool:
        """Return True if this operation multiplies with frozen parameters alone, which take no gradient."""
        return bool(self.groups) and all(group.is_frozen for group in self.groups)

    def adds_biases(self, shifts: Iterable[PlannedOperation]) -> bool:
        """Return True if this planned operation's matrix products add its biases, planned as `shifts`, themselves."""
        return self._has_plain_products and not any(s.has_conversions for s in shifts)

    @cached_property
    def has_conversions(self) -> bool:
        """Return True if any conversion of this planned operation has a step."""
        return any(c.forward or c.backward for c in self.conversions)

    @cached_property
    def _has_plain_products(self) -> bool:
        """Return True if this operation's einsums are plain products in the compute type, not converted by the plan."""
        converts = any(e.output.forward or e.output.backward for g in self.groups for e in g.einsums)
        return not converts and not any(g.panels or g.has_wide_dtype for g in self.groups)


def shapes_along_steps(
    steps: Sequence[RelayoutStep], shape: tuple[int, ...], mesh: Mesh
) -> Iterator[tuple[RelayoutStep, tuple[int, ...], tuple[int, ...]]]:
    """Yield the steps of a conversion with the local shapes before and after each; `shape`: the first of them."""
    for step in steps:
        before, shape = shape, step.apply_to_shape(shape, mesh.count_ranks(step.axes))
        yield step, before, shape


# Elements moved by one group of n ranks if one rank's input has e elements. For a scatter e is one rank's output, so
# that it moves as much as its adjoint, the gather. For an all_to_allv e is the most that a rank can send to others.
TRAFFIC = {
    "all_gather": lambda n, e: n * (n - 1) * e,
    "reduce_scatter": lambda n, e: (n - 1) * e,
    "all_to_all": lambda n, e: (n - 1) * e,
    "all_to_allv": lambda n, e: n * e,
    "all_reduce": lambda n, e: 2 * (n - 1) * e,
    "broadcast": lambda n, e: (n - 1) * e,
    "reduce": lambda n, e: (n - 1) * e,
    "scatter": lambda n, e: (n - 1) * e,
    "gather": lambda n, e: (n - 1) * e,
    "rotate": lambda n, e: n * e,
    "send": lambda n, e: n * e,  # each of the n stages sends
}

EVER = {"metrics": 8, "integers": 8, "bytes": 1}  # bytes per element of the types that are the same in every precision


def collective_label(op: str, axes: Iterable[str]) -> str:
    """Return the key under which a collective is counted in `comm_bytes`, such as `all_reduce/data+t`."""
    return f"{op}/{'+'.join(axes)}"


def traffic_bytes(c: Collective, mesh: Mesh, itemsize: dict[str, int]) -> int:
    """Return the bytes that all workers together move in one launch of the planned collective `c`; `itemsize`: bytes
    per element by `Collective.dtype`."""
    n = mesh.count_ranks(c.axes)
    everywhere = c.elements * (mesh.world_size // n // mesh.count_ranks(c.only))
    for cut in c.cuts:  # the mean of what ranks have, as every combination of blocks occurs alike
        everywhere = everywhere * cut.size // (cut.longest_extent() * cut.blocks)
    return TRAFFIC[c.op](n, everywhere) * {**EVER, **itemsize}[c.dtype]


T = TypeVar("T")


class OffloadedActivation(Generic[T]):
    """Activation in host memory. `fetch()` starts to bring it back; `before`: the one that left before it in the same
    pass, which the backward pass needs next, and which so travels while this one's block is computed."""

    def __init__(self, fetch: Callable[[], T], before: OffloadedActivation[T] | None):
        """Construct the place of an activation that the plan keeps in host memory; arguments as in the class."""
        self._fetch: Callable[[], T] | None = fetch
        self._before, self._coming = before, list[T]()

    def start_fetch(self) -> None:
        """Start to bring back the activation that the plan keeps in host memory, unless it is on its way, or was."""
        if self._fetch:
            self._coming.append(self._fetch())
            self._fetch = None

    def take_back(self) -> T:
        """Return the activation that the plan kept in host memory, once, and start to bring back the one before it."""
        self.start_fetch()
        if self._before:
            self._before.start_fetch()
            self._before = None
        return self._coming.pop()


_ELEMENTS = 2**20  # of logits in a chunk: 4 MB in fp32, which a core's caches hold (measured: 2**19 to 2**21 are alike)
_CHUNKS = 8  # at most: each adds once to the gradient of the whole table, and costs a few dozen launches on a GPU
_LARGEST = 2**28  # elements of logits in a chunk, of which there are then more: half a GB in 16 bits
_KEPT = 2**31  # logits, from which on they are not kept in 16 bits: 4 GB


def loss_chunk_rows(rows: int, columns: int) -> int:
    """Return how many of `rows` tokens a plan has in one chunk of the loss, if a rank has `columns` of vocab."""
    return max(1, min(rows, max(_ELEMENTS // columns, min(-(-rows // _CHUNKS), _LARGEST // columns))))


ANSWER_SUMS = 3  # of an answer: log-probabilities of its labels, their reference, and their number


def is_paired(loss: Operation) -> bool:
    """Return True if a model's loss is one of pairs of answers, which needs the labels of a whole answer at once."""
    return dict(loss.attributes).get("paired", False)


def count_classes(loss: Operation) -> int:
    """Return how many of a teacher's likeliest classes a model's loss reads for each label; 0 without a teacher."""
    return dict(loss.attributes).get("classes", 0)


def count_data_numbers(planned: PlannedOperation, name: str) -> int:
    """Return the numbers, of 8 bytes, in a rank's block of the data tensor `name` that a planned operation reads."""
    return planned.token_count * (2 * count_classes(planned.operation) if name == TEACHER else 1)


def answer_slots(length: int) -> int:
    """Return how many answers a sequence of `length` tokens is planned to hold: two of each pair, each with a label."""
    return length + length % 2


def computes_gradients_in_forward(
    product: PlannedOperation, loss: PlannedOperation, rows: int, columns: int, width: int, wide: bool
) -> bool:
    """Return True if the forward pass of a product and the cross-entropy of its result (`rows` tokens, `columns` of
    vocab; `width`: contracted elements) computes the gradients of both operands too, as planned, chunk by chunk, so
    that logits never exist as a whole.

    Else the gradient of the logits is kept, in the compute type: where a split vocab needs the statistics of all ranks
    first, where operands or logits are converted, where the operands' gradients would not be smaller, and where the
    compute type is no type to add up in (`wide` is false): but many logits are not kept, and the gradient of the table
    adds up in the type of statistics.
    """
    (group,) = product.groups
    (e,) = group.einsums
    plain = group.is_local and e.x_dims[:-1] == e.out_dims[:-1] and len(e.dims) == 2 and not is_paired(loss.operation)
    small = not wide and rows * columns < _KEPT
    return plain and not loss.over and not small and (rows + columns) * width < rows * columns
