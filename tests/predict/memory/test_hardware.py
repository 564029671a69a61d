import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.plan.accelerators import ACCELERATORS, dense_bf16_peak, find_accelerator
from platform.predict.step_price import choose_pricing_hardware, find_gpu_hardware, names_of_hardware, read_hardware
from tests.harness.commands import QUICK


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
        ("h100", 989e12),
        ("a100_80g", 312e12),
        ("mi300x", 1307e12),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_by_name(device, peak):
    assert dense_bf16_peak(device) == peak


def test_no_entry_hides_a_later_one():
    for known in ACCELERATORS:
        assert find_accelerator(f"Vendor {known.name}") == known


def test_keys_and_options_take_the_same_names():
    """cluster.gpu=H100-80GB beside --hardware h100: either spelling is one for both."""
    for name in names_of_hardware():
        if name not in ("cpu", "v100", "v100_lassen"):  # V100s of 16 GB, as described
            assert find_gpu_hardware(name) == read_hardware(name)
            assert compose_config(["+experiment=one_gpu", f"cluster.gpu={name}"]).cluster.gpu == name
    for gpu, name in {"H100-80GB": "h100", "H100": "h100", "A100-80GB": "a100_80g", "B200": "b200"}.items():
        assert read_hardware(gpu) == read_hardware(name)
        assert (
            choose_pricing_hardware(compose_config([QUICK, f"cluster.hardware={gpu}", "precision=bf16"])).name == name
        )
    for unknown in ("H1000", "T5"):
        with pytest.raises(ConfigError, match=f"hardware {unknown}: there is no such file"):
            read_hardware(unknown)


def test_a_machine_of_a_million_workers_is_one_for_all(capsys):
    assert main([QUICK, "--hardware", "cpu"]) == 0
    assert "moved in a step, all workers in a node" in capsys.readouterr().out
