"""Gauges of a worker: its process, its GPU by NVML (a stand-in with the package's own signatures), its machine."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from platform.train import gauges
from platform.train.gauges import GaugeReader, GpuGauges, ProcessGauges, ProcessorGauges, gauge_sources
from platform.train.replies import GAUGES


class StandIn:
    """Stands in for pynvml on a machine with one GPU, of which `broken` functions are not supported."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, *broken: str):
        self.called, self._broken = [], broken

    def _call(self, name: str, reading: Any) -> Any:
        self.called.append(name)
        if name in self._broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return reading

    def nvmlInit(self) -> None:
        self._call("nvmlInit", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        assert uuid == "GPU-7", "as nvidia-smi calls it"
        return self._call("nvmlDeviceGetHandleByUUID", "handle")

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return self._call("nvmlDeviceGetUtilizationRates", pynvml.c_nvmlUtilization_t(97, 40))

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        return self._call("nvmlDeviceGetMemoryInfo", pynvml.c_nvmlMemory_t(80 << 30, 20 << 30, 60 << 30))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._call("nvmlDeviceGetPowerUsage", 612_500)  # milliwatts

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._call("nvmlDeviceGetTemperature", 61)


def test_a_gpu_is_read_by_nvml() -> None:
    assert GpuGauges(StandIn(), "GPU-7")() == {
        "gpu": 0.97,
        "device_memory": 60 << 30,
        "power": 612.5,
        "temperature": 61,
    }


def test_what_a_gpu_does_not_have_is_left_out() -> None:
    readings = GpuGauges(StandIn("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"), "GPU-7")()
    assert readings.keys() == {"device_memory", "temperature"}


def test_the_stand_in_is_called_as_the_package_is() -> None:
    """All that the reader calls is there in the real package, with these parameters and these units."""
    stand_in = StandIn()
    GpuGauges(stand_in, "GPU-7")()
    assert len(stand_in.called) == 6
    for name in stand_in.called:
        mine, its = (inspect.signature(getattr(owner, name)) for owner in (stand_in, pynvml))
        assert [*mine.parameters] == [*its.parameters], name
    assert [name for name, _ in pynvml.c_nvmlUtilization_t._fields_] == ["gpu", "memory"]
    assert [name for name, _ in pynvml.c_nvmlMemory_t._fields_] == ["total", "free", "used"]


def test_without_a_driver_the_gpu_is_left_out() -> None:
    """By the real package, which finds no driver here, and no GPU of that name anywhere."""
    [only] = gauge_sources("GPU-00000000-0000-0000-0000-000000000000")
    assert isinstance(only, ProcessGauges)


def test_a_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    process = ProcessGauges()
    assert process()["memory"] > 1 << 20 and "cpu" not in process(), "a moment shows no use of processors"
    assert process()["threads"] == torch.get_num_threads()
    monkeypatch.setattr(gauges, "SECONDS", 0.1)
    process()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0.1 < process()["cpu"] < 2.5
    waited = iter((1.0, 1.06))
    process = ProcessGauges(lambda: next(waited))  # not the module's: a worker's thread of another test may read it
    time.sleep(0.1)
    assert 0.2 < process()["delayed"] <= 0.6


def test_a_thread_that_has_no_processor_is_delayed() -> None:
    """Two processes on one core, of which the other is never asked to leave it: each gets about half."""
    if gauges._read_delay() == 0.0:
        pytest.skip("this kernel does not count")
    before, cores = gauges._read_delay(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, cores)
    assert gauges._read_delay() - before > 0.1


def machine(root: Path, energy: tuple[int, int], degrees: tuple[int, ...]) -> None:
    """Write what the kernel says of two packages with counters of energy, and of sensors."""
    files = {"hwmon/hwmon0/name": "nvme", "hwmon/hwmon0/temp1_input": "99000", "hwmon/hwmon1/name": "coretemp"}
    files |= {f"hwmon/hwmon1/temp{i}_input": str(n) for i, n in enumerate(degrees, 1)}
    for i, joules in enumerate(energy):
        zone = f"powercap/intel-rapl:{i}"
        files |= {f"{zone}/name": f"package-{i}", f"{zone}/max_energy_range_uj": "1000000000"}
        files |= {f"{zone}/energy_uj": str(joules), f"{zone}:0/name": "core", f"{zone}:0/energy_uj": "5"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_a_machine_is_read_where_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(gauges.time, "monotonic", lambda: clock.now)
    machine(tmp_path, (100_000_000, 999_000_000), (41_000, 43_500))
    processors = ProcessorGauges(tmp_path)
    assert processors() == {"temperature": 43.5}, "power takes two readings"
    machine(tmp_path, (220_000_000, 79_000_000), (44_000, 43_500))  # the second counter has begun anew
    clock.now = 12.0
    assert processors() == {"temperature": 44.0, "power": 100.0}
    assert ProcessorGauges(tmp_path / "none")() == {}


def test_readings_are_means_since_the_report_before() -> None:
    own = GaugeReader()
    assert own.take_means() == {}
    for numbers in ({"cpu": 1.0}, {"cpu": 2.0, "power": 5.0}):
        own.take_reading([lambda numbers=numbers: numbers, unreadable])
    assert own.take_means() == {"cpu": 1.5, "power": 5.0} == own.take_means(), "the same again without a new one"
    own.take_reading([lambda: {"cpu": 4.0}])
    assert own.take_means() == {"cpu": 4.0}


def unreadable() -> dict[str, float]:
    raise OSError("no such file")


def test_every_reading_has_a_column_in_the_report() -> None:
    readings = {"cpu", "delayed", *ProcessGauges()(), *GpuGauges(StandIn(), "GPU-7")()}
    assert readings == set(GAUGES)
