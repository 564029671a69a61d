"""Table of accelerators: peak speed, for model FLOPs utilisation (MFU), and memory."""

from __future__ import annotations

import re
from typing import NamedTuple


class Accelerator(NamedTuple):
    """Model of accelerator with its speed and memory. `name`: words that a device's name, or the accelerator type that
    Ray gives a node, contains; `peak`: dense bf16 matrix FLOP/s, None if not known; `memory`: nominal bytes, of which a
    driver shows a few percent more or less; `capability`: NVIDIA's compute capability, (0, 0) of another maker."""

    name: str
    peak: float | None
    memory: float
    capability: tuple[int, int]


# More specific names first. Sources: the data sheets of NVIDIA (half of the figure with sparsity where that is the only
# one) and AMD. A name that does not tell its size gets the largest memory that was sold under it.
ACCELERATORS = (
    Accelerator("GB300", 2.5e15, 279e9, (10, 3)),
    Accelerator("B300", 2.25e15, 270e9, (10, 3)),
    Accelerator("GB200", 2.5e15, 186e9, (10, 0)),
    Accelerator("B200", 2.25e15, 180e9, (10, 0)),
    Accelerator("GH200", 989e12, 96e9, (9, 0)),
    Accelerator("H200 NVL", 836e12, 141e9, (9, 0)),
    Accelerator("H200", 989e12, 141e9, (9, 0)),
    Accelerator("H100 NVL", 836e12, 94e9, (9, 0)),
    Accelerator("H100 PCIe", 756e12, 80e9, (9, 0)),
    Accelerator("H100", 989e12, 80e9, (9, 0)),  # SXM
    Accelerator("H800 PCIe", 756e12, 80e9, (9, 0)),
    Accelerator("H800", 989e12, 80e9, (9, 0)),
    Accelerator("H20", 148e12, 96e9, (9, 0)),
    Accelerator("A100 40GB", 312e12, 40e9, (8, 0)),
    Accelerator("A100", 312e12, 80e9, (8, 0)),
    Accelerator("A800 40GB", 312e12, 40e9, (8, 0)),
    Accelerator("A800", 312e12, 80e9, (8, 0)),
    Accelerator("A40", 149.7e12, 48e9, (8, 6)),
    Accelerator("A30", 165e12, 24e9, (8, 0)),
    Accelerator("A10", 125e12, 24e9, (8, 6)),
    Accelerator("A10G", None, 24e9, (8, 6)),
    Accelerator("L40S", 362e12, 48e9, (8, 9)),
    Accelerator("L40", 181e12, 48e9, (8, 9)),
    Accelerator("L4", 121e12, 24e9, (8, 9)),
    Accelerator("V100 16GB", None, 16e9, (7, 0)),
    Accelerator("V100", None, 32e9, (7, 0)),
    Accelerator("T4", None, 16e9, (7, 5)),
    Accelerator("MI300X", 1307e12, 192e9, (0, 0)),
    Accelerator("MI325X", 1307e12, 256e9, (0, 0)),
    Accelerator("MI250X", 191.5e12, 64e9, (0, 0)),  # one of its two dies, which is what a process sees
)


def find_accelerator(device: str) -> Accelerator | None:
    """Find the speed and memory of an accelerator by its device name, None if the table of accelerators lacks it. Names
    are compared by whole words, in capitals or not: "H100-80GB", "h100" and "a100_80g" name one as well.

    >>> find_accelerator("NVIDIA A100-SXM4-80GB")
    Accelerator(name='A100', peak=312000000000000.0, memory=80000000000.0, capability=(8, 0))
    """
    name = re.sub(r"(?<![A-Z\d])(\d+)G(?![A-Z\d])", r"\1GB", device.upper())  # Ray says A100-40G
    words = set(re.findall(r"[^\W_]+", name))
    return next((candidate for candidate in ACCELERATORS if words.issuperset(candidate.name.upper().split())), None)


def nominal_memory(device: str) -> float | None:
    """Return the nominal memory in bytes of an accelerator by its device name, such as "NVIDIA H100 80GB HBM3" or Ray's
    "H100", None if the table of accelerators lacks it."""
    entry = find_accelerator(device)
    return entry and entry.memory


def dense_bf16_peak(device: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of an accelerator by its device name, for model FLOPs utilisation; None if they
    are not known.

    >>> dense_bf16_peak("NVIDIA A10G") is None
    True
    """
    entry = find_accelerator(device)
    return entry and entry.peak
