"""State of a GPU as its driver reports it by `nvidia-smi`: memory errors, slowdown, version."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from platform.train.protocol.replies import Findings

_OF_GPU = (
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.hw_slowdown",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "gpu_recovery_action",
)
_OLDER = tuple(name.replace("clocks_event_reasons", "clocks_throttle_reasons") for name in _OF_GPU[:-1])
# Query -> the fields that are asked for, of which the first is tried first: drivers before 565 know no recovery action,
# those before 535 slowdowns by another name; where one name is unknown, `nvidia-smi` says nothing at all.
FIELDS = {
    "gpu": (_OF_GPU, _OF_GPU[:-1], _OLDER),
    "remapped-rows": (("remapped_rows.pending", "remapped_rows.failure"),),
}
_SECONDS = 10.0  # for nvidia-smi to answer all of it; without it nothing is known, which is not bad


class GpuQuery:
    """Query of `nvidia-smi` on the GPU of this worker, which runs beside other work until `answer` takes its result.
    Where the command is missing or does not know, nothing is found."""

    def __init__(self) -> None:
        """Start `nvidia-smi` on this worker's GPU for the doctor, without waiting: `answer` takes its output later."""
        self._processes = {query: _asked(query, fields[0]) for query, fields in FIELDS.items()}

    def answer(self, found: Findings) -> None:
        """Wait for `nvidia-smi`, and add the state of this worker's GPU that it reports to the doctor's findings."""
        values: dict[str, str] = {}
        end = time.monotonic() + _SECONDS
        for query, (newest, *older) in FIELDS.items():
            answers = _values(newest, self._processes[query], end)
            for fields in older:
                if answers == {}:  # it answers, but not that
                    answers = _values(fields, _asked(query, fields), end)
            values |= answers or {}
        readings, facts = state(values)
        found.readings.update(readings)
        found.facts.update(facts)


def _asked(query: str, fields: Sequence[str]) -> subprocess.Popen[str] | None:
    """Start `nvidia-smi` to print these fields of this worker's GPU; return its process, None if not installed."""
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", "")
    command = ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [f"--id=GPU-{uuid}"] if uuid else ["--id=0"]
    with suppress(OSError):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None


def _values(fields: Sequence[str], process: subprocess.Popen[str] | None, end: float) -> dict[str, str] | None:
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


def state(values: Mapping[str, str]) -> tuple[dict[str, float], dict[str, str]]:
    """Convert a GPU's fields as `nvidia-smi` prints them, field -> value, to the doctor's readings (numbers: memory
    errors, rows to be replaced) and facts (texts: driver version, slowdown, PCIe width).

    >>> state({"driver_version": "550.54.15", "ecc.errors.uncorrected.volatile.total": "0"})
    ({'ecc': 0.0}, {'gpu driver': '550.54.15'})
    >>> state({"remapped_rows.pending": "1", "pcie.link.width.current": "8", "pcie.link.width.max": "16"})
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
