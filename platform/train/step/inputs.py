"""Input blocks: each rank itself reads the block of data that each of its operations needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.data.corpus import Corpus
from platform.parallel.communicator.base import Communicator
from platform.plan.core.plan import Plan
from platform.plan.language.functions import LABEL_WEIGHTS
from platform.plan.language.layout import Layout, block

Blocks = dict[str, dict[tuple[str, str], Tensor]]  # data tensor -> operation that reads it -> [length, batch]


def place(plan: Plan, communicator: Communicator, rows: Callable[[int, int], Mapping[str, Any]]) -> Blocks:
    """Load this rank's input blocks of a microbatch (of all replicas together), for each operation that reads a data
    tensor.

    `rows(start, end)` returns every data tensor, by name, for sequences start..end of the microbatch: int64 [end -
    start, length], weights fp64. Blocks are [length, batch], local; equal ones are read once and shared; an operation
    that only other ranks compute gets an empty block.
    """
    dims = ("batch", "length")
    read: dict[tuple[int, int], Mapping[str, Any]] = {}

    def load(name: str, layout: Layout) -> Tensor:
        """Load this rank's block of the data tensor `name` in this layout: int64 [length, batch], local."""
        if not layout.present(communicator.coordinates):
            return torch.empty(0, dtype=torch.int64, device=communicator.device)
        ((start, n),) = block(dims[:1], plan.sizes, layout, plan.mesh, communicator.coordinates)
        if (start, n) not in read:
            read[start, n] = rows(start, start + n)
        whole = torch.as_tensor(read[start, n][name])
        ((offset, extent),) = block(dims[1:], {"length": whole.shape[1]}, layout, plan.mesh, communicator.coordinates)
        mine = whole[:, offset : offset + extent].t().contiguous()
        if communicator.device.type == "cuda":
            mine = mine.pin_memory()  # from pageable memory the copy would hold the host
        return mine.to(communicator.device, non_blocking=True)

    out: Blocks = {}
    for name, readers in plan.readers.items():
        blocks = {layout: load(name, layout) for layout in dict.fromkeys(readers.values())}
        out[name] = {operation: blocks[layout] for operation, layout in readers.items()}
    return out


def share_of(plan: Plan, corpus: Corpus, first: int, end: int) -> float:
    """Return what the loss summed over training samples [first, end) is divided by to be their mean: the number of
    labels that count or, if labels have weights, the sum of their magnitudes. Raises ConfigError if there is none."""
    if LABEL_WEIGHTS not in plan.readers:
        return corpus.predicted("train", first, end) or _no_label(corpus, first, end)
    total, at_once = 0.0, plan.sizes["batch"]
    for start in range(first, end, at_once):
        found = corpus.batch("train", start, min(start + at_once, end))
        total += float(np.abs(found[LABEL_WEIGHTS])[found["labels"] >= 0].sum())
    return total or _no_label(corpus, first, end)


def _no_label(corpus: Corpus, first: int, end: int) -> NoReturn:
    """Raise ConfigError for training samples [first, end), of which no label counts: a step on them alone would move
    the weights for no reason, and report a loss of 0."""
    where = f"training samples {first} to {end - 1}, of which the first is {corpus.name_of('train', first)}"
    raise ConfigError(f"train.global_batch={end - first}: {where}, have no label; nearest legal: a larger one")
