"""State of a GPU as its driver reports it by `nvidia-smi`: memory errors, slowdown, version."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from platform.train.protocol.replies import Findings

FIELDS = (
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.hw_slowdown",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
# The same by the names of drivers before 535: where one is unknown, `nvidia-smi` says nothing at all.
OLDER = tuple(name.replace("clocks_event_reasons", "clocks_throttle_reasons") for name in FIELDS)
_SECONDS = 10.0  # for nvidia-smi to answer; without it nothing is known, which is not bad


class GpuQuery:
    """Query of `nvidia-smi` on the GPU of this worker, which runs beside other work until `answer` takes its result.
    Where the command is missing or does not know, nothing is found."""

    def __init__(self) -> None:
        """Start `nvidia-smi` for this worker's GPU, without waiting for its answer."""
        self._process = _asked(FIELDS)

    def answer(self, found: Findings) -> None:
        """Wait for `nvidia-smi`, and add its report on this worker's GPU to the doctor's findings."""
        line = _line(self._process)
        if line is not None and line.count(",") + 1 != len(FIELDS):
            line = _line(_asked(OLDER))
        readings, facts = parsed(line or "")
        found.readings.update(readings)
        found.facts.update(facts)


def _asked(fields: Sequence[str]) -> subprocess.Popen[str] | None:
    """Start `nvidia-smi` to show these fields of this worker's GPU; None if there is no such command."""
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", "")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [f"--id=GPU-{uuid}"] if uuid else ["--id=0"]
    with suppress(OSError):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None


def _line(process: subprocess.Popen[str] | None) -> str | None:
    """Return the line that `nvidia-smi` prints; None if it does not run, or not in time."""
    if process is None:
        return None
    try:
        return process.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # and no waiting for the end of its output, which a child of it may hold open
        process.wait()
        return None


def parsed(line: str) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """Parse the line that `nvidia-smi` prints for FIELDS into readings and facts, without unknown ones ("[N/A]").

    >>> parsed("550.54.15, 0, Not Active, 16, 16")
    ({'ecc': 0.0}, {'gpu driver': '550.54.15', 'gpu slowdown': 'Not Active', 'gpu link': '16 of 16 PCIe lanes'})
    >>> parsed("550.54.15, [N/A], [N/A], [N/A], [N/A]")
    ({}, {'gpu driver': '550.54.15'})
    """
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(FIELDS):
        return {}, {}
    driver, errors, slowdown, width, most = values
    link = f"{width} of {most} PCIe lanes" if width.isdigit() and most.isdigit() else ""
    facts = {"gpu driver": driver, "gpu slowdown": slowdown, "gpu link": link}
    known = {name: fact for name, fact in facts.items() if fact and not fact.startswith("[")}
    return ({"ecc": float(errors)} if errors.isdigit() else {}), known
