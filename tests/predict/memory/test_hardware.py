import pytest

from platform.plan.accelerators import ACCELERATORS, dense_bf16_peak, find_accelerator


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 836e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA A10G", None),  # not an A10
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_by_name(device, peak):
    assert dense_bf16_peak(device) == peak


def test_no_entry_hides_a_later_one():
    for known in ACCELERATORS:
        assert find_accelerator(f"Vendor {known.name}") == known
