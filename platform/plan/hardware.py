"""Peak speeds of accelerators, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re

# Dense bf16 matrix FLOP/s of a device, by its name; more specific names first. Sources: the data sheets of NVIDIA (half
# of the figure with sparsity where they print no other) and AMD.
DENSE_BF16_PEAKS: tuple[tuple[str, float], ...] = (
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


def dense_bf16_peak(device: str) -> float | None:
    """FLOP/s of the device with this name, None where the table does not know it. Names are compared by whole words.

    >>> dense_bf16_peak("NVIDIA A100-SXM4-80GB")
    312000000000000.0
    >>> dense_bf16_peak("NVIDIA A10G") is None
    True
    """
    words = set(re.findall(r"\w+", device))
    return next((peak for name, peak in DENSE_BF16_PEAKS if words.issuperset(name.split())), None)
