"""Chunks of tokens in which a loss over vocab is computed, and whether its gradients are computed with it."""

from __future__ import annotations

from platform.plan.communication.planned import PlannedOperation

_ELEMENTS = 2**20  # of logits in a chunk: 4 MB in fp32, which a core's caches hold (measured: 2**19 to 2**21 are alike)
_CHUNKS = 8  # at most: each adds once to the gradient of the whole table, and costs a few dozen launches on a GPU
_LARGEST = 2**28  # elements of logits in a chunk, of which there are then more: half a GB in 16 bits
_KEPT = 2**31  # logits, from which on they are not kept in 16 bits: 4 GB


def chunk_rows(rows: int, columns: int) -> int:
    """Return how many of `rows` tokens one chunk of the loss has, if a rank has `columns` entries of vocab."""
    return max(1, min(rows, max(_ELEMENTS // columns, min(-(-rows // _CHUNKS), _LARGEST // columns))))


def gradients_at_once(
    product: PlannedOperation, loss: PlannedOperation, rows: int, columns: int, width: int, wide: bool
) -> bool:
    """Return True if the forward pass of a product and the cross-entropy of its result (`rows` tokens, `columns` of
    vocab; `width`: contracted elements) computes the gradients of both operands too, chunk by chunk, so that logits
    never exist as a whole.

    Else the gradient of the logits is kept, in the compute type: where a split vocab needs the statistics of all ranks
    first, where operands or logits are converted, where the operands' gradients would not be smaller, and where the
    compute type is no type to add up in (`wide` is false): but many logits are not kept, and the gradient of the table
    adds up in the type of statistics.
    """
    (group,) = product.groups
    (e,) = group.einsums
    plain = group.local and e.x_dims[:-1] == e.out_dims[:-1] and len(e.dims) == 2
    small = not wide and rows * columns < _KEPT
    return plain and not loss.over and not small and (rows + columns) * width < rows * columns
