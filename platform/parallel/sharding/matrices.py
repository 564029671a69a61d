"""Whole matrices of parameters whose updates are made of them, gathered from the blocks and shards of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.sharding.convert import convert
from platform.parallel.sharding.flat import FlatBucket
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter


class Matrices:
    """Gathers the plan's `matrices` on the rank of `communicator`, as the plan says, bucket by bucket. `plan`: the plan
    of this rank's stage; `flats`: its buckets. `half`: the model is computed in half precision."""

    def __init__(self, plan: Plan, communicator: Communicator, flats: Sequence[FlatBucket]):
        """Find the flat buckets that hold parts of the weight matrices which Muon updates as wholes."""
        self._plan, self._communicator = plan, communicator
        self.half = plan.itemsize["compute"] == 2
        found = [(flat, [p for p in flat.bucket.parameters if p.name in plan.matrices]) for flat in flats if flat.here]
        self._flats = [(flat, parameters) for flat, parameters in found if parameters]

    def map(self, function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Apply `function` (Muon's) to each whole weight matrix, gathered from the ranks with the layer's outputs as
        rows; yield the parameter's name and this rank's part of the result. `parts`: parameter name -> this rank's part
        of the matrix, laid out as the master copy. All ranks go through it together."""
        for flat, parameters in self._flats:
            blocks = flat.joined({p.name: parts[p.name] for p in parameters if p.name in parts})
            for p in parameters:
                found = [self._part(flat, p, blocks[p.name], function)]
                if p.name in parts:
                    yield p.name, found.pop()  # so that none is held while the next is made
            del blocks

    @torch.no_grad()
    def _part(self, flat: FlatBucket, p: Parameter, block: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's part of function(whole matrix), of weight matrices gathered from the ranks' blocks."""
        whole = convert(self._communicator, block, self._plan.joining(p), name=f"join {p.name}").wait()
        found = function(whole.reshape(p.matrices(whole.shape)[not p.stacked :])).view(whole.shape)
        return flat.own(p.name, self._block(p, found))

    def _block(self, p: Parameter, whole: Tensor) -> Tensor:
        """Return this rank's block of the tensor `whole`, a parameter's whole matrices with their padding of vocab."""
        block = self._plan.block(p, self._communicator.coordinates)
        for dim, (offset, extent) in [*enumerate(block)][p.stacked :]:
            whole = whole.narrow(dim, offset, extent)
        return whole

    def shape(self, name: str) -> tuple[int, int]:
        """Return the shape (rows, columns) of each weight matrix that the parameter `name` is, without padding."""
        p = next(p for p in self._plan.parameters if p.name == name)
        return p.matrices(self._plan.global_shape(p))[1:]
