"""Replays the launch logs of all ranks under the strictest rule: every launch blocks until its whole group is there.

gloo forgives ranks that issue collectives in different orders, NCCL hangs: a log that replays hangs on neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class LoggedLaunch(Protocol):
    @property
    def op(self) -> str: ...
    @property
    def group(self) -> tuple[int, ...]: ...
    @property
    def elements(self) -> int: ...


def replay(logs: Sequence[Sequence[LoggedLaunch]]) -> str | None:
    """None if all ranks' logs run to their end; else what every stuck rank waits for.

    `logs[rank]` are the rank's launches in order.
    """
    at = [0] * len(logs)
    progress = True
    while progress:
        progress = False
        for rank, log in enumerate(logs):
            while at[rank] < len(log):
                launch = log[at[rank]]
                heads = [logs[r][at[r]] if at[r] < len(logs[r]) else None for r in launch.group]
                if any(h is None or (h.op, h.group, h.elements) != _key(launch) for h in heads):
                    break
                for r in launch.group:
                    at[r] += 1
                progress = True
    stuck = [
        f"rank {rank} at launch {at[rank]}: {log[at[rank]].op} of {log[at[rank]].elements} with {log[at[rank]].group}"
        for rank, log in enumerate(logs)
        if at[rank] < len(log)
    ]
    return "; ".join(stuck) or None


def _key(launch: LoggedLaunch) -> tuple:
    return launch.op, launch.group, launch.elements
