"""Types of what a model is written in: activations, parameters, and the operations that are recorded of it.

A model's forward is written once against `platform.plan.operations.words.Ops`. Run with
`platform.plan.operations.recorder.Recorder` it yields the operations with their dims, which become part of the plan;
run with `platform.parallel.parallel_ops.ParallelOps` it computes. The type of an activation is its `Spec`: its region
and dims, from which a scheme derives its layout.

Data tensors (token ids, labels) are named tensors of integers [length, batch] whose negative entries are padding.
Every rank loads the block that an operation needs, so data never travels between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any


@dataclass(frozen=True)
class Spec:
    """Type of an activation: its region and its dims in memory order.

    `sizes`: sizes of the dims that differ from the model's, such as the length of an encoder's input. A layout
    depends on the name of a dim alone, as in Mesh-TensorFlow. `dtype`: compute or accumulate, as in Collective; a
    product whose result is of the latter is computed in it (a router's scores). `open`: its sums over ranks
    are left to an operation that is linear in it: of its `value` to the reader, of its `gradient` to the maker.
    """

    region: str
    dims: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    dtype: str = "compute"
    open: str = ""

    @classmethod
    def of(cls, region: str, dims: str, sizes: tuple[tuple[str, int], ...] = (), dtype: str = "compute") -> Spec:
        """Build the type of an activation from its region and its dims in one text, such as "length batch d_model"."""
        return cls(region, tuple(dims.split()), sizes, dtype)

    def renamed(self, old: str, new: str) -> Spec:
        """Return the type of the same activation with its dim `old` called `new`."""
        sizes = tuple((new if d == old else d, n) for d, n in self.sizes)
        return replace(self, dims=tuple(new if d == old else d for d in self.dims), sizes=sizes)

    def __str__(self) -> str:
        """Format this type of an activation as "region[dim dim ...]", then its dtype and `open`, if not the usual."""
        dtype = f" {self.dtype}" if self.dtype != "compute" else ""
        return f"{self.region}[{' '.join(self.dims)}]{dtype}" + (f" of open {self.open}" if self.open else "")


# role of a parameter that no gradient updates -> kind of training state that it is (`KIND.NAME` in a checkpoint)
STATES = {"choice": "model", "load": "state"}


@dataclass(frozen=True)
class Parameter:
    """Declaration of a parameter: its global name, dims and initialisation.

    `role` selects the scheme's layout: `in` contracts d_model, `out` produces it, `vector` is a norm, bias or position
    of d_model. Two more are states, which a step's load of experts updates in place of a gradient, whole on every rank
    of their stage and in the type of master copies: `choice` is a bias for the choice of experts, `load` their load in
    the step before, 1 where it is even. `init` is zeros, ones or normal (with `std`). `decay`: weight decay applies.
    `sizes` as in Spec. `turned`: its initial values are drawn with its last dim first.
    """

    name: str
    dims: tuple[str, ...]
    role: str
    init: str = "normal"
    std: float = 0.0
    decay: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    turned: bool = False

    @property
    def stacked(self) -> int:
        """Return how many first dims number matrices, or vectors, of which each is one to an optimizer: experts."""
        return int(self.dims[:1] == ("experts",))

    @property
    def row_dims(self) -> int:
        """Return how many dims come before the columns of a matrix: its rows, and what numbers matrices."""
        return len(self.dims) - 1 if self.role == "in" else self.stacked + 1

    def matrices(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return (number, rows, columns) of the matrices in a block of `shape`: outputs are rows, inputs columns."""
        return prod(shape[: self.stacked]), prod(shape[self.stacked : self.row_dims]), prod(shape[self.row_dims :])

    @property
    def is_state(self) -> bool:
        """Return True if the routing of a step updates this parameter, in place of a gradient."""
        return self.role in STATES


def dtype_of(tensor: Spec | Parameter) -> str:
    """Return the dtype (compute, accumulate) of an activation, or of a parameter as the forward pass reads it."""
    return tensor.dtype if isinstance(tensor, Spec) else "compute"


LOSSES = ("cross_entropy", "squared_error")  # kinds of operations that end the forward pass


@dataclass(frozen=True)
class Operation:
    """Operation of a model's recorded forward pass. `name` is unique within its kind; `reads` names the data tensors
    that it takes beside its inputs, in one layout; `recomputed`: it runs again in the backward pass; `once`: all but
    its result, which no gradient needs."""

    kind: str
    name: str
    inputs: tuple[Spec | Parameter, ...]
    outputs: tuple[Spec, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    reads: tuple[str, ...] = ()
    recomputed: bool = False
    once: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the model parameters among the operation's inputs, without states."""
        return tuple(t for t in self.inputs if isinstance(t, Parameter) and not t.is_state)

    @property
    def states(self) -> tuple[Parameter, ...]:
        """Return the states among the operation's inputs: parameters without gradient."""
        return tuple(t for t in self.inputs if isinstance(t, Parameter) and t.is_state)

    @cached_property
    def anonymous(self) -> tuple:
        """Return a key of all, but names, on which the plan of a recorded operation depends: equal layers share it."""
        inputs = ((t.dims, t.role, t.sizes) if isinstance(t, Parameter) else t for t in self.inputs)
        return self.kind, tuple(inputs), self.outputs, self.attributes, self.reads, self.once

    def __getitem__(self, attribute: str) -> Any:
        """Return an attribute of the recorded operation by name, such as `scale`. Raises KeyError if unknown."""
        return dict(self.attributes)[attribute]


@dataclass(frozen=True)
class Recompute:
    """Selects the activations that the backward pass computes again instead of keeping: `none`; `selective`, the inside
    of attention, whose memory grows with length^2 and whose work does not (Korthikanti et al. 2022); `full`, everything
    between the inputs of every `every` blocks, which with `offload` are kept in host memory."""

    kind: str = "none"
    every: int = 1
    offload: bool = False


NO_RECOMPUTATION = Recompute()


def scores_of(query: Spec, key: Spec) -> Spec:
    """Return the type [batch heads length memory_length] of attention scores of queries and keys [.. length ..]."""
    sizes = (*query.sizes, *key.renamed("length", "memory_length").sizes)
    return Spec(query.region, ("batch", "heads", "length", "memory_length"), sizes)


def resized(spec: Spec, dim: str, size: int) -> Spec:
    """Return the type of an activation with another size of a dim, such as the length of all keys in a cache."""
    return replace(spec, sizes=(*(pair for pair in spec.sizes if pair[0] != dim), (dim, size)))
