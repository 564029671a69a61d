"""Gauges of a worker's process and device, read once a second by a thread beside its steps. The reports of its steps
carry the readings, so that no message is sent for them. An unreadable gauge is left out, never guessed.

`RunningGpuQuery` asks `nvidia-smi` for the state of a GPU: memory errors, slowdown, version. `read_flight_records`
reads torch's own records of this process's last collectives (its flight recorder), as JSON, never as pickle.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any

import torch
from torch._C import _distributed_c10d

from platform.train.replies import Findings

SECONDS = 1.0  # between two readings
_KEPT = 600  # readings between two reports
_SENSORS = ("coretemp", "k10temp", "zenpower")  # drivers of the sensors in processors

Source = Callable[[], Mapping[str, float]]  # reads some of `replies.GAUGES`


class GaugeReader:
    """Gauges of this process, of which a thread takes readings from `start_reading` on."""

    def __init__(self) -> None:
        """Prepare the gauges of a worker's process, which nothing reads yet."""
        self._readings = deque[Mapping[str, float]](maxlen=_KEPT)
        self._newest: dict[str, float] = {}
        self._process = 0

    def start_reading(self, device: torch.device) -> None:
        """Start to read the gauges of this worker's process and `device`, unless that has been done already."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()  # a thread does not outlive a fork
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
        Thread(target=self._read_forever, args=(gpu,), name="gauges", daemon=True).start()

    def _read_forever(self, gpu: str) -> None:
        """Read the gauges of this worker's process and of its GPU, "" for none, as long as the process lives."""
        sources = list(gauge_sources(gpu))
        while True:
            self.take_reading(sources)
            time.sleep(SECONDS)

    def take_reading(self, sources: Iterable[Source]) -> None:
        """Take one reading of a worker's gauges from `sources`."""
        reading: dict[str, float] = {}
        for source in sources:
            with suppress(OSError, ValueError):
                reading |= source()
        self._readings.append(reading)

    def take_means(self) -> dict[str, float]:
        """Return the means of this worker's readings since the last call, by gauge; the same again if it has none."""
        readings = [self._readings.popleft() for _ in range(len(self._readings))]
        if names := dict.fromkeys(name for reading in readings for name in reading):
            self._newest = {name: fmean(reading[name] for reading in readings if name in reading) for name in names}
        return self._newest


GAUGES = GaugeReader()


def gauge_sources(gpu: str) -> Iterator[Source]:
    """Yield the sources of a worker's gauges: its process, and its GPU of that NVML name or, if it is "", the
    processors of its machine."""
    yield ProcessGauges()
    if not gpu:
        yield ProcessorGauges()
        return
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            yield GpuGauges(pynvml, gpu)


class ProcessGauges:
    """Gauges of this process: how many processors it kept busy since the reading before, the share of that time in
    which its main thread waited for one, its threads, and its resident memory."""

    def __init__(self, read_delay: Callable[[], float] | None = None) -> None:
        """Begin to count this worker's processor time, and its main thread's waits for one by `read_delay`."""
        self._read_delay = read_delay or _read_delay
        self._before = time.monotonic(), time.process_time(), self._read_delay()

    def __call__(self) -> dict[str, float]:
        """Read this worker's use of processors, what it waits for them, and its resident memory."""
        (then, spent, waited), self._before = self._before, (time.monotonic(), time.process_time(), self._read_delay())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        reading = {"memory": float(pages * os.sysconf("SC_PAGE_SIZE")), "threads": float(torch.get_num_threads())}
        if (seconds := self._before[0] - then) <= SECONDS / 2:
            return reading
        used, delayed = self._before[1] - spent, self._before[2] - waited
        return reading | {"cpu": used / seconds, "delayed": delayed / seconds}


def _read_delay() -> float:
    """Return the seconds in which this worker's main thread could run and had no processor; NaN if unknown."""
    words = _read_text(Path("/proc/self/schedstat")).split()
    return int(words[1]) / 1e9 if len(words) > 1 else nan


class GpuGauges:
    """Gauges of a GPU, by `nvml`, the package pynvml."""

    def __init__(self, nvml: Any, gpu: str):
        """Open NVML for the worker's GPU of that name, GPU-UUID. Raises NVMLError without driver or GPU."""
        nvml.nvmlInit()
        self._nvml, handle = nvml, nvml.nvmlDeviceGetHandleByUUID(gpu)
        self._asked: dict[str, Callable[[], float]] = {
            "gpu": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "device_memory": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }

    def __call__(self) -> dict[str, float]:
        """Read the gauges of the worker's GPU, leaving out unsupported ones."""
        reading = {}
        for name, ask in self._asked.items():
            with suppress(self._nvml.NVMLError):
                reading[name] = ask()
        return reading


class ProcessorGauges:
    """Gauges of the processors of this machine, which its workers share: power since the reading before, by their
    counters of energy (RAPL), and temperature, where the kernel lets this process read them."""

    def __init__(self, root: Path = Path("/sys/class")):
        """Find the counters and sensors of this worker's machine below `root`."""
        packages = [z for z in sorted(root.glob("powercap/intel-rapl:*")) if _read_text(z / "name")[:7] == "package"]
        self._counters = [(zone / "energy_uj", _read_text(zone / "max_energy_range_uj")) for zone in packages]
        chips = [chip for chip in sorted(root.glob("hwmon/*")) if _read_text(chip / "name") in _SENSORS]
        self._sensors = [sensor for chip in chips for sensor in sorted(chip.glob("temp*_input"))]
        self._before: tuple[float, Sequence[int]] = 0.0, []

    def __call__(self) -> dict[str, float]:
        """Read power and temperature of this worker's machine. Raises OSError, ValueError."""
        reading: dict[str, float] = {}
        if degrees := [int(text) for sensor in self._sensors if (text := _read_text(sensor))]:
            reading["temperature"] = max(degrees) / 1000
        texts = [_read_text(counter) for counter, _ in self._counters]
        if texts and all(texts):
            (then, before), self._before = self._before, (time.monotonic(), [int(text) for text in texts])
            now, energy = self._before
            if before and now > then:
                # a counter that has fallen began anew
                pairs = zip(energy, before, self._counters, strict=True)
                spent = (e - b if e >= b else e - b + int(most) for e, b, (_, most) in pairs)
                reading["power"] = sum(spent) / 1e6 / (now - then)
        return reading


def _read_text(path: Path) -> str:
    """Return the text of a small file of the kernel about this machine; "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


_GPU = (
    *("driver_version", "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown"),
    *("pcie.link.width.current", "pcie.link.width.max", "gpu_recovery_action"),
)
_OLDER = tuple(name.replace("clocks_event_reasons", "clocks_throttle_reasons") for name in _GPU[:-1])
# Query -> the fields that are asked for, of which the first is tried first: drivers before 565 know no recovery action,
# those before 535 slowdowns by another name; where one name is unknown, `nvidia-smi` says nothing at all.
FIELDS = {"gpu": (_GPU, _GPU[:-1], _OLDER), "remapped-rows": (("remapped_rows.pending", "remapped_rows.failure"),)}
_SECONDS = 10.0  # for nvidia-smi to answer all of it; without it nothing is known, which is not bad


class RunningGpuQuery:
    """Query of `nvidia-smi` on the GPU of this worker, which runs beside other work until `add_answer` takes its
    result. Where the command is missing or does not know, nothing is found."""

    def __init__(self) -> None:
        """Start `nvidia-smi` on this worker's GPU, without waiting: `add_answer` takes its output later."""
        self._processes = {query: _start_query(query, fields[0]) for query, fields in FIELDS.items()}

    def add_answer(self, findings: Findings) -> None:
        """Wait for `nvidia-smi`, and add the state of this worker's GPU that it reports to the doctor's findings."""
        values: dict[str, str] = {}
        end = time.monotonic() + _SECONDS
        for query, (newest, *older) in FIELDS.items():
            answers = _read_fields(newest, self._processes[query], end)
            for fields in older:
                if answers == {}:  # it answers, but not that
                    answers = _read_fields(fields, _start_query(query, fields), end)
            values |= answers or {}
        readings, facts = summarize_gpu(values)
        findings.readings.update(readings)
        findings.facts.update(facts)


def _start_query(query: str, fields: Sequence[str]) -> subprocess.Popen[str] | None:
    """Start `nvidia-smi` to print these fields of this worker's GPU; return its process, None if not installed."""
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", "")
    command = ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [f"--id=GPU-{uuid}"] if uuid else ["--id=0"]
    with suppress(OSError):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None


def _read_fields(fields: Sequence[str], process: subprocess.Popen[str] | None, end: float) -> dict[str, str] | None:
    """Read what `nvidia-smi` prints about this worker's GPU: return field -> value, without unknown values ("[N/A]");
    {} if it prints anything else, None if it does not run or has not ended by `end`, a time of the monotonic clock."""
    if process is None:
        return None
    try:
        line = process.communicate(timeout=max(0.0, end - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        process.kill()  # and no waiting for the end of its output, which a child of it may hold open
        process.wait()
        return None
    words = [word.strip() for word in line.strip().split(",")]
    known = zip(fields, words, strict=True) if len(words) == len(fields) else ()
    return {field.replace("throttle", "event"): word for field, word in known if word and not word.startswith("[")}


def summarize_gpu(values: Mapping[str, str]) -> tuple[dict[str, float], dict[str, str]]:
    """Convert a GPU's fields as `nvidia-smi` prints them, field -> value, to the doctor's readings (numbers: memory
    errors, rows to be replaced) and facts (texts: driver version, slowdown, PCIe width).

    >>> summarize_gpu({"driver_version": "550.54.15", "ecc.errors.uncorrected.volatile.total": "0"})
    ({'ecc': 0.0}, {'gpu driver': '550.54.15'})
    >>> summarize_gpu({"remapped_rows.pending": "1", "pcie.link.width.current": "8", "pcie.link.width.max": "16"})
    ({'rows': 1.0}, {'gpu link': '8 of 16 PCIe lanes'})
    """
    numbers = {field: float(word) for field, word in values.items() if word.isdigit()}
    rows = [numbers[field] for field in FIELDS["remapped-rows"][0] if field in numbers]
    width, most = (values.get(f"pcie.link.width.{which}", "") for which in ("current", "max"))
    facts = {
        "gpu driver": values.get("driver_version", ""),
        "gpu slowdown": values.get("clocks_event_reasons.hw_slowdown", ""),
        "gpu link": f"{width} of {most} PCIe lanes" if width and most else "",
        "gpu recovery": values.get("gpu_recovery_action", ""),
    }
    ecc = numbers.get("ecc.errors.uncorrected.volatile.total")
    readings = ({} if ecc is None else {"ecc": ecc}) | ({"rows": sum(rows)} if rows else {})
    return readings, {name: fact for name, fact in facts.items() if fact}


MOST = 200  # last collectives of a record that are kept
_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}  # backend -> function, where torch has it


def read_flight_records() -> dict[str, dict[str, Any]]:
    """Return, for a worker's dump, torch's record of its last collectives by backend, without the backends that have
    none. Callable from any thread."""
    records = {}
    for backend, name in _DUMPS.items():
        if dump := getattr(_distributed_c10d, name, None):
            record = json.loads(dump(includeCollectives=True, onlyActive=False))
            if entries := record.get("entries"):
                records[backend] = record | {"entries": entries[-MOST:]}
    return records
