"""Names of a model's tensors at transformers and here: which of theirs hold which of ours, and in which shape."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod

import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.checkpoint.blocks.box import Box
from platform.config.fields import Model
from platform.model import build_model
from platform.plan.language.ops import STATES, Parameter
from platform.weights.families.family import Family, TensorRow

MOST_MATRICES = 1 << 20  # of experts: as many as an index of files names


@dataclass(frozen=True)
class MatrixPart:
    """Parameter of ours, or the block `box` of it that belongs to one expert or head, and the matrix that transformers
    sees in it: `rows` are what its product adds, `columns` what it contracts. A vector has one column."""

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    box: Box


@dataclass(frozen=True)
class Stored:
    """Tensor of theirs, by name, and the parameters of ours that it holds: it is the matrix of their rows, one after
    another, or a row of each in turn (`alternate`); `turned`: stored with columns first; `vector`: its matrix has one
    column, and it is stored as a vector; `stacked`: the number of experts whose matrices it stacks, else 0."""

    name: str
    parts: tuple[MatrixPart, ...]
    turned: bool
    vector: bool = False
    alternate: bool = False
    stacked: int = 0

    @property
    def matrices(self) -> list[tuple[MatrixPart, ...]]:
        """Return the parts of each matrix that this tensor stacks, or of the one that it is."""
        each = len(self.parts) // max(1, self.stacked)
        return [self.parts[i : i + each] for i in range(0, len(self.parts), each)]

    def join_blocks(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return this tensor of transformers, made of the `blocks` of our parameters that are its parts."""
        found, rest = [], iter(blocks)
        for parts in self.matrices:
            rows = [next(rest).reshape(part.rows, part.columns) for part in parts]
            matrix = torch.stack(rows, 1).flatten(0, 1) if self.alternate else torch.cat(rows)
            found.append(matrix.t() if self.turned else matrix)
        return torch.stack(found).reshape(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in which transformers stores this tensor."""
        rows, columns = sum(p.rows for p in self.matrices[0]), self.parts[0].columns
        one = (rows,) if self.vector else (columns, rows) if self.turned else (rows, columns)
        return (self.stacked, *one) if self.stacked else one


def parameters_of(m: Model) -> dict[str, tuple[Parameter, tuple[int, ...]]]:
    """Return name -> (parameter, global shape) of every parameter of a model, to match with names of saved weights; of
    states, those on which what a trained model says depends."""
    model = build_model(m)
    kept = [p for p in model.parameters() if STATES.get(p.role, "model") == "model"]
    return {p.name: (p, tuple({**model.sizes, **dict(p.sizes)}[d] for d in p.dims)) for p in kept}


def stored_tensors(m: Model, family: Family, fused: bool = False) -> list[Stored]:
    """List the tensors by which transformers stores a model of a family, in its order, with stacks of experts if
    `fused`. Each parameter is in one. Raises ConfigError, naming the parameters for which the family has none."""
    out: list[Stored] = []
    left = parameters_of(m)
    if (count := sum(shape[0] for p, shape in left.values() if _of_experts(p))) > MOST_MATRICES:
        raise ConfigError(f"names: {count} matrices of experts are more than {MOST_MATRICES}")
    gated = any(name.endswith(".mlp.gate") for name in left)
    for name, ours, row in _expanded(family.fused if fused else family.rows, m.layers):
        if row.gated not in (None, gated) or not all(part in left for part in ours):
            continue
        found = [left.pop(part) for part in ours]
        vector = _is_vector(name, found[0][0])
        if row.by_head:
            each = [tuple(_part_of_one(*one, head) for one in found) for head in range(m.heads)]
            out.append(Stored(name, tuple(chain.from_iterable(each)), row.turned))
            continue
        if not _of_experts(found[0][0]):
            out.append(Stored(name, tuple(_part(*one, vector) for one in found), row.turned, vector))
            continue
        each = [tuple(_part_of_one(*one, e) for one in found) for e in range(m.experts)]
        if "{e}" in name:
            out += [Stored(name.replace("{e}", str(e)), parts, row.turned, vector) for e, parts in enumerate(each)]
        else:
            parts = tuple(chain.from_iterable(each))
            out.append(Stored(name, parts, row.turned, vector, row.alternate, m.experts))
    if left:
        raise ConfigError(f"names: {family.architecture} has no tensor for {', '.join(left)}")
    return out


def _is_vector(name: str, p: Parameter) -> bool:
    """Return True if transformers stores the tensor `name`, our parameter `p`, as a vector: a bias, a norm's gain."""
    return name.endswith("bias") or p.name.endswith(".gain") or len(p.dims) == 1


def _of_experts(p: Parameter) -> bool:
    """Return True if our parameter `p` is a matrix or bias for each expert, which saved weights may hold one by one."""
    return p.dims[0] == "experts" and p.role in ("in", "out")


def _expanded(rows: Sequence[TensorRow], layers: int) -> Iterator[tuple[str, list[str], TensorRow]]:
    """Yield (tensor's name at transformers, names of our parameters, row) for a family's table of names, by layer."""
    for numbered, group in groupby(rows, lambda row: "{i}" in row.theirs):
        some = list(group)
        for i in range(layers if numbered else 1):
            for row in some:
                yield row.theirs.replace("{i}", str(i)), [name.replace("{i}", str(i)) for name in row.ours], row


def _part(p: Parameter, shape: tuple[int, ...], vector: bool) -> MatrixPart:
    """Describe our parameter `p` as transformers stores it, a matrix [rows, columns]; one column if `vector`."""
    if vector:
        return MatrixPart(p.name, shape, prod(shape), 1, Box.whole(shape))
    rows = shape[0] if p.role == "out" else prod(shape[:-1])
    return MatrixPart(p.name, shape, rows, prod(shape) // rows, Box.whole(shape))


def _part_of_one(p: Parameter, shape: tuple[int, ...], number: int) -> MatrixPart:
    """Describe the matrix or bias of one expert, or head, in our parameter `p` as transformers stores it."""
    rows, columns = shape[1], prod(shape[2:])
    return MatrixPart(p.name, shape, rows, columns, Box((number, *(0 for _ in shape[1:])), (1, *shape[1:])))


@dataclass(frozen=True)
class Matched:
    """Tensors of a checkpoint of transformers by the names under which a family has them. `there`: the family's name ->
    the name in the files; `repeated`: (name in the files, name of the family) of tensors that must equal another."""

    there: dict[str, str]
    repeated: tuple[tuple[str, str], ...]


def matched(names: Collection[str], wanted: Iterable[Stored], m: Model, family: Family) -> tuple[Matched, list[str]]:
    """Match the names in the files of a model that transformers saved with the tensors `wanted`; return the tensors
    found, and a line for the missing and one for the foreign ones."""
    known = {tensor.name for tensor in wanted}
    own = {name: name for name in names}
    if family.prefix and not any(name.startswith(family.prefix) for name in names):  # saved without the class's head
        own = {f"{family.prefix}{name}": name for name in names if name not in known}
        own |= {name: name for name in names if name in known}
    buffers = {name.replace("{i}", str(i)) for name in family.buffers for i in range(m.layers)}
    there = {name: file for name, file in own.items() if name in known}
    repeated = tuple(
        (file, family.same[name]) for name, file in own.items() if name not in known and name in family.same
    )
    rest = own.keys() - known - family.same.keys() - buffers
    lines = []
    if missing := [name for name in known if name not in there]:
        lines.append(f"names: {_listed(missing)}: missing")
    if rest:
        lines.append(
            f"names: {_listed(own[name] for name in rest)}: no part of {family.architecture} with this config.json"
        )
    return Matched(there, repeated), lines


def _listed(names: Iterable[str]) -> str:
    """Return names of tensors of saved weights as text: sorted, with commas in between."""
    return ", ".join(sorted(names))
