"""Causes of failures as errors' texts show them."""

from __future__ import annotations

import re

_MEMORY = re.compile(r"OutOfMemoryError|out of memory|t allocate memory|\bMemoryError\b")
_OTHERS = re.compile(r"DistBackendError|DistNetworkError|DistStoreError|/gloo/|by peer")
_TOO_FEW = re.compile(r"workers? there, and elastic\.min_workers|^there is no legal plan for")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$')
_KEPT = 8  # frames of a stack, the innermost


def is_out_of_memory(error: str) -> bool:
    """Return True if a failed worker's error says that its device or machine had no memory left."""
    return bool(_MEMORY.search(error))


def blames_others(error: str) -> bool:
    """Return True if a failed worker's error is one of communication, as when another rank is gone."""
    return bool(_OTHERS.search(error))


def is_too_few(error: str) -> bool:
    """Return True if an error ended a run because too few workers were left."""
    return bool(_TOO_FEW.search(error))


def last_line(error: str) -> str:
    """Return the last line of a failed worker's error, which names it."""
    return error.strip().rpartition("\n")[2].strip()


def frames(error: str) -> list[str]:
    """Return the innermost frames of the traceback in a failed worker's error, the innermost last."""
    found = [match for line in error.splitlines() if (match := _FRAME.match(line))]
    return [f"{match[1]}:{match[2]} in {match[3]}" for match in found][-_KEPT:]
