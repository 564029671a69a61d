"""Input blocks: each rank itself reads the block of data that each of its operations needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.data.corpus import Corpus
from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.in_panels.document_pairs import remember
from platform.plan.core.plan import Plan
from platform.plan.language.functions import LABEL_WEIGHTS
from platform.plan.language.layout import Layout, block

Blocks = dict[str, dict[tuple[str, str], Tensor]]  # data tensor -> operation that reads it -> [length, batch]
Stretch = tuple[int, int]  # of a microbatch's sequences: the number of the first one, and that behind the last one


def stretches(plan: Plan, communicator: Communicator) -> list[Stretch]:
    """Return the ranges [first, end) of a microbatch's sequences that this rank has to read from the data."""
    layouts = dict.fromkeys(layout for readers in plan.readers.values() for layout in readers.values())
    here = (layout for layout in layouts if layout.present(communicator.coordinates))
    return list(dict.fromkeys(_stretch(plan, communicator, layout) for layout in here))


def _stretch(plan: Plan, communicator: Communicator, layout: Layout) -> Stretch:
    """Return the range [first, end) of a microbatch's sequences in this rank's block of data in this layout."""
    ((start, n),) = block(("batch",), plan.sizes, layout, plan.mesh, communicator.coordinates)
    return start, start + n


def place(plan: Plan, communicator: Communicator, rows: Mapping[Stretch, Mapping[str, Any]]) -> Blocks:
    """Cut this rank's input blocks of a microbatch out of the sequences it has read, one for each operation that reads
    a data tensor: return data tensor -> operation -> block.

    `rows`: range of sequences, from `stretches` -> every data tensor, by name: int64 [sequences, length], weights fp64.
    Blocks are [length, batch], local; equal ones are shared; an operation that only other ranks compute gets an empty
    block.
    """

    def cut(name: str, layout: Layout) -> Tensor:
        """Return this rank's block [length, batch] of the microbatch's data tensor `name` in this layout, on its
        device."""
        if not layout.present(communicator.coordinates):
            return torch.empty(0, dtype=torch.int64, device=communicator.device)
        whole = rows[_stretch(plan, communicator, layout)][name]  # of an array, or of a pass of generation a tensor
        found = plan.planner.stretches("length", whole.shape[1], layout, communicator.coordinates)
        parts = [whole[:, first : first + n] for first, n in found]
        on_host = np.concatenate(parts, 1).T if isinstance(whole, np.ndarray) else torch.cat(parts, 1).t()
        here = torch.as_tensor(on_host).contiguous()
        # from pageable memory the copy would hold the host
        mine = here.pin_memory() if communicator.device.type == "cuda" else here
        out = mine.to(communicator.device, non_blocking=True)
        if name == "begins" and out.device.type != "cpu":
            remember(out, on_host)
        return out

    out: Blocks = {}
    for name, readers in plan.readers.items():
        blocks = {layout: cut(name, layout) for layout in dict.fromkeys(readers.values())}
        out[name] = {operation: blocks[layout] for operation, layout in readers.items()}
    return out


def share_of(plan: Plan, corpus: Corpus, first: int, end: int) -> float:
    """Return the divisor that turns the loss summed over training samples [first, end) into a mean: the number of
    labels that count or, if labels have weights, the sum of their magnitudes. Raises ConfigError if no label counts."""
    if LABEL_WEIGHTS not in plan.readers:
        return corpus.predicted("train", first, end) or _no_label(corpus, first, end)
    total, at_once = 0.0, plan.sizes["batch"]
    for start in range(first, end, at_once):
        found = corpus.batch("train", start, min(start + at_once, end))
        total += float(np.abs(found[LABEL_WEIGHTS])[found["labels"] >= 0].sum())
    return total or _no_label(corpus, first, end)


def _no_label(corpus: Corpus, first: int, end: int) -> NoReturn:
    """Raise ConfigError for a global batch, samples [first, end), without a label that counts: a step needs one."""
    where = f"training samples {first} to {end - 1}, of which the first is {corpus.name_of('train', first)}"
    raise ConfigError(f"train.global_batch={end - first}: {where}, have no label; nearest legal: a larger one")
