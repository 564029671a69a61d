"""Tables of accelerators: peak speed, for model FLOPs utilisation (MFU), and memory."""

from __future__ import annotations

import re

Table = tuple[tuple[str, float], ...]

# Device name -> dense bf16 matrix FLOP/s; more specific names first. Sources: the data sheets of NVIDIA (half of the
# figure with sparsity where that is the only one) and AMD.
DENSE_BF16_PEAKS: Table = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200 NVL", 836e12),
    ("H200", 989e12),
    ("H100 NVL", 836e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),  # SXM
    ("H800 PCIe", 756e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
    ("MI250X", 191.5e12),  # one of its two dies, which is what a process sees
)


# Device name, or the accelerator type that Ray gives a node -> bytes; more specific names first. Nominal: a driver
# shows a few percent more or less. A name that does not tell its size gets the largest that was sold under it.
MEMORIES: Table = (
    ("GB200", 186e9),
    ("B200", 180e9),
    ("GH200", 96e9),
    ("H200", 141e9),
    ("H100 NVL", 94e9),
    ("H100", 80e9),
    ("H800", 80e9),
    ("H20", 96e9),
    ("A100 40GB", 40e9),
    ("A100 40G", 40e9),
    ("A100", 80e9),
    ("A800 40GB", 40e9),
    ("A800", 80e9),
    ("A40", 48e9),
    ("A30", 24e9),
    ("A10", 24e9),
    ("A10G", 24e9),
    ("L40S", 48e9),
    ("L40", 48e9),
    ("L4", 24e9),
    ("V100 16GB", 16e9),
    ("V100", 32e9),
    ("T4", 16e9),
    ("MI300X", 192e9),
    ("MI325X", 256e9),
    ("MI250X", 64e9),
)


def memory_of(device: str) -> float | None:
    """Return the bytes of the device with this name, None if MEMORIES lacks it. Names are compared by whole words.

    >>> memory_of("NVIDIA A100-SXM4-80GB")
    80000000000.0
    """
    return _entry(MEMORIES, device)


def dense_bf16_peak(device: str) -> float | None:
    """Return the FLOP/s of the device with this name, None if DENSE_BF16_PEAKS lacks it. Names are compared by whole
    words.

    >>> dense_bf16_peak("NVIDIA A100-SXM4-80GB")
    312000000000000.0
    >>> dense_bf16_peak("NVIDIA A10G") is None
    True
    """
    return _entry(DENSE_BF16_PEAKS, device)


def _entry(table: Table, device: str) -> float | None:
    words = set(re.findall(r"\w+", device))
    return next((value for name, value in table if words.issuperset(name.split())), None)
