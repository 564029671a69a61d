"""State of a GPU as its driver reports it by `nvidia-smi`: memory errors, slowdown, version."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress

import torch

from platform.train.protocol.replies import Findings

FIELDS = ("driver_version", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown")
_SECONDS = 10.0  # for nvidia-smi to answer; without it nothing is known, which is not bad


class GpuQuery:
    """Query of `nvidia-smi` on the GPU of this worker, which runs beside other work until `answer` takes its result.
    Where the command is missing or does not know, nothing is found."""

    def __init__(self) -> None:
        """Start `nvidia-smi` for this worker's GPU, without waiting for its answer."""
        self._process: subprocess.Popen[str] | None = None
        uuid = getattr(torch.cuda.get_device_properties(), "uuid", "")
        command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        command += [f"--id=GPU-{uuid}"] if uuid else ["--id=0"]
        with suppress(OSError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def answer(self, found: Findings) -> None:
        """Wait for `nvidia-smi`, and add its report on this worker's GPU to the doctor's findings."""
        if self._process is None:
            return
        try:
            line, _ = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and no waiting for the end of its output, which a child of it may hold open
            self._process.wait()
            return
        readings, facts = parsed(line)
        found.readings.update(readings)
        found.facts.update(facts)


def parsed(line: str) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """Parse the line that `nvidia-smi` prints for FIELDS into readings and facts, without unknown ones ("[N/A]").

    >>> parsed("550.54.15, 0, Not Active")
    ({'ecc': 0.0}, {'gpu driver': '550.54.15', 'gpu slowdown': 'Not Active'})
    >>> parsed("550.54.15, [N/A], [N/A]")
    ({}, {'gpu driver': '550.54.15'})
    """
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(FIELDS):
        return {}, {}
    driver, errors, slowdown = values
    facts = {"gpu driver": driver, "gpu slowdown": slowdown}
    known = {name: fact for name, fact in facts.items() if fact and not fact.startswith("[")}
    return ({"ecc": float(errors)} if errors.isdigit() else {}), known
