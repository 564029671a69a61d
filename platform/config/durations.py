"""Parsers for durations that users type: `checkpoint.every=30m`, `run.time_limit=1:30:00`."""

from __future__ import annotations

import re
from math import inf

RHYTHM = "a number of steps, or a duration like 45s, 30m or 1h30m"
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # seconds
_DURATION = re.compile(r" *".join(rf"(?:([0-9]+(?:\.[0-9]+)?){unit})?" for unit in _UNITS))


def rhythm_of(every: int | str) -> tuple[int, float]:
    """Parse the configuration key `checkpoint.every`, a number of steps or a duration such as 1h30m, into (steps,
    seconds), at least one of them 0. Raises ValueError if it is neither."""
    if isinstance(every, int) or re.fullmatch(r"[0-9]+", every):
        if (steps := int(every)) < 0:
            raise ValueError(every)
        return steps, 0.0
    found = _DURATION.fullmatch(every.strip())
    amounts = [float(number or 0) for number in found.groups()] if found else []
    seconds = sum(n * unit for n, unit in zip(amounts, _UNITS.values(), strict=False))
    if not 0 < seconds < inf:
        raise ValueError(every)
    return 0, seconds


def in_units(seconds: float) -> str:
    """Format seconds as a user types a duration, such as 45s, 14m or 1h30m, to a minute from two minutes on."""
    if seconds < 120:
        return f"{max(1, round(seconds))}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")


def nearest_rhythms(every: str) -> list[str]:
    """Return legal values to suggest for a malformed key `checkpoint.every`: its first number as steps, as minutes."""
    found = re.search(r"[0-9]{1,9}", every)
    number = int(found[0]) if found else 30
    return [str(number), f"{number or 1}m"]


def seconds_of(duration: str) -> float:
    """Parse a duration that a configuration gives in seconds, M:SS or H:MM:SS, as `run.time_limit` takes it, into
    seconds: 90, 1:30 and 0:01:30 are 90; "" is 0. Raises ValueError for any other form."""
    parts = duration.split(":") if duration else ["0"]
    numbers = [float(part) for part in parts]
    seconds = sum(n * 60**i for i, n in enumerate(reversed(numbers)))
    if len(parts) > 3 or not all(0 <= n < inf for n in numbers):
        raise ValueError(duration)
    return seconds


def job_seconds(limit: str) -> int:
    """Parse the time limit that a user sets for a job, as Slurm does, into seconds: MINUTES, M:SS, H:MM:SS, D-HH,
    D-HH:MM or D-HH:MM:SS. Raises ValueError for any other form."""
    if not re.fullmatch(r"([0-9]{1,6}-[0-9]{1,6}(:[0-9]{1,6}){0,2})|([0-9]{1,6}(:[0-9]{1,6}){0,2})", limit):
        raise ValueError(limit)
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(parts, units, strict=False))


def hms(seconds: int) -> str:
    """Format seconds as H:MM:SS, the form of a duration that a user sets, such as a job's time limit."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
