"""What is other than when the run was last driven: journalled, and said to the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from platform.boundary.redaction import redact
from platform.checkpoint import Meta
from platform.config.fields import Config
from platform.config.identity import completed, differences, identity
from platform.monitor import Journal

# A key and what comes with its value, which says nothing more where it is another.
_TABLES = {
    "tensor.scheme": ("tensor.order", "tensor.regions.", "tensor.parameters."),
    "tensor.layout": ("tensor.order", "tensor.regions.", "tensor.parameters."),
    "branch.kind": ("branch.append.", "branch.prepend.", "branch.only"),
}
_OF_ONE_COMMAND = ("run.dir", "resume.allow", "checkpoint.resume")  # how it is gone on, not what the run is


def changes(
    there: Mapping[str, Any] | None, meta: Meta | None, config: Config, mesh: Mapping[str, int]
) -> dict[str, tuple[Any, Any]]:
    """KEY -> (there, here). `there`: the configuration in the run directory; `meta`: of the checkpoint that the run
    goes on from, which knows the run's identity and, as mesh.AXIS, the mesh; `mesh`: today's."""
    found = differences(completed(meta.identity), identity(config)) if meta else {}
    if meta and not there:
        found |= differences({"mesh": meta.plan.get("mesh", mesh)}, {"mesh": mesh})
    if there:
        found |= differences(redact(there), redact(config.to_dict()))
    came_along = tuple(part for key, parts in _TABLES.items() if key in found for part in parts)
    return {key: pair for key, pair in found.items() if not key.startswith((*came_along, *_OF_ONE_COMMAND))}


def report(found: Mapping[str, tuple[Any, Any]], journal: Journal, say: Callable[[str], None]) -> None:
    """One event and one line per change; nothing where nothing changed."""
    if found:
        journal.event("changed", keys={key: list(pair) for key, pair in found.items()})
    for key, (there, here) in found.items():
        say(f"changed  {key}: {there} there, {here} here")
