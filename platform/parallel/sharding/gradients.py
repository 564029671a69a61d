"""The norm of the gradient, of which each rank counts its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.plan.core.buckets import SQUARED_AT_ONCE

ROW = 256  # elements that are summed in fp32: enough to read fast, few enough to add up accurately
LEAST = 2.0**-86  # mean square from which on squares that fp32 cannot hold (below 2**-126) do not matter


@torch.no_grad()
def squared_norm(
    communicator: Communicator, counted: Mapping[str, Sequence[slice]], gradients: Mapping[str, Tensor]
) -> Tensor:
    """Return this rank's part of the squared 2-norm of the whole model's gradient, an fp64 scalar; the sum over all
    ranks is the total. `gradients`: bucket -> the reduced ones, flat; `counted`: bucket -> what this rank counts of
    them, both by the name of the bucket's first parameter.

    Exact to the last digits of fp64, but for long stretches in fp32 on a CPU: to 1e-6, and where many elements make up
    the norm to 1e-8 (torch's own, in fp32 throughout, is off by 4e-4 at 7 million elements). Gradients in fp32 differ
    by more between two plans, and of one plan all ranks get one and the same number.
    """
    found = [flat[stretch] for name, flat in gradients.items() for stretch in counted[name]]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=communicator.device)
    return torch.stack([squares(x) for x in found]).sum()


def squares(x: Tensor) -> Tensor:
    """Sum the squares of a flat tensor x [elements] of gradients, of any size; return an fp64 scalar tensor."""
    most = SQUARED_AT_ONCE[x.device.type]
    if x.device.type == "cpu" and x.dtype == torch.float32 and len(x) > most:
        total = _by_rows(x)
        if len(x) * LEAST <= total < inf:
            return total
    wide = torch.empty(min(len(x), most), dtype=torch.float64, device=x.device)
    sums = [torch.dot(y, y) for y in (wide[: len(piece)].copy_(piece) for piece in x.split(most))]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _by_rows(x: Tensor) -> Tensor:
    """Sum the squares of fp32 gradients x [elements] in fp32 by rows of ROW elements, and the rows' sums in fp64."""
    rows = torch.linalg.vector_norm(x[: len(x) // ROW * ROW].view(-1, ROW), dim=1).double()
    rest = x[len(x) // ROW * ROW :].double()
    return rows.dot(rows) + rest.dot(rest)
