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
    return squares(found) if found else torch.zeros((), dtype=torch.float64, device=communicator.device)


def squares(stretches: Sequence[Tensor]) -> Tensor:
    """Sum the squares of flat tensors of gradients, of any size and at least one, as an fp64 scalar."""
    if stretches[0].device.type == "cpu":
        return torch.stack([_on_cpu(x) for x in stretches]).sum()
    return _at_once(stretches)


def _at_once(stretches: Sequence[Tensor]) -> Tensor:
    """Sum the squares of all stretches in fp64 by kernels of a GPU that read each element once."""
    norms = torch.stack(torch._foreach_norm(list(stretches), 2, dtype=torch.float64))
    return norms.dot(norms)


def _on_cpu(x: Tensor) -> Tensor:
    """Sum the squares of a flat tensor on a CPU, in fp64 but for long ones in fp32."""
    if x.dtype == torch.float32 and len(x) > SQUARED_AT_ONCE:
        total = _by_rows(x)
        if len(x) * LEAST <= total < inf:
            return total
    wide = torch.empty(min(len(x), SQUARED_AT_ONCE), dtype=torch.float64, device=x.device)
    sums = [torch.dot(y, y) for y in (wide[: len(piece)].copy_(piece) for piece in x.split(SQUARED_AT_ONCE))]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _by_rows(x: Tensor) -> Tensor:
    """Sum the squares of fp32 gradients x [elements] in fp32 by rows of ROW elements, and the rows' sums in fp64."""
    rows = torch.linalg.vector_norm(x[: len(x) // ROW * ROW].view(-1, ROW), dim=1).double()
    rest = x[len(x) // ROW * ROW :].double()
    return rows.dot(rows) + rest.dot(rest)
