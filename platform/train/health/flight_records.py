"""Torch's own records of this process's last collectives (its flight recorder), as JSON, never as pickle."""

from __future__ import annotations

import json
from typing import Any

from torch._C import _distributed_c10d

MOST = 200  # last collectives of a record that are kept
_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}  # backend -> function, where torch has it


def flight_records() -> dict[str, dict[str, Any]]:
    """Return torch's record of the last collectives by backend, without the backends that have none. Callable from any
    thread."""
    found = {}
    for backend, name in _DUMPS.items():
        if dump := getattr(_distributed_c10d, name, None):
            record = json.loads(dump(includeCollectives=True, onlyActive=False))
            if entries := record.get("entries"):
                found[backend] = record | {"entries": entries[-MOST:]}
    return found
