"""Comparison of a resumed run's configuration with the last one: differences go to the journal and to the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from platform.boundary.redaction import redact
from platform.checkpoint.storage.manifest import Meta
from platform.config.fields import Config
from platform.config.identity import completed, differences, identity
from platform.monitor import Journal
from platform.monitor.records import events

# Key -> prefixes of the keys that are composed along with it: once the key itself differs, their differences are noise.
_TABLES = {
    "tensor.scheme": ("tensor.order", "tensor.regions.", "tensor.parameters."),
    "tensor.layout": ("tensor.order", "tensor.regions.", "tensor.parameters."),
    "branch.kind": ("branch.append.", "branch.prepend.", "branch.only"),
}
_OF_ONE_COMMAND = ("run.dir", "resume.allow", "checkpoint.resume")  # choices of one launch, not properties of the run


def changes(
    there: Mapping[str, Any] | None, meta: Meta | None, config: Config, mesh: Mapping[str, int]
) -> dict[str, tuple[Any, Any]]:
    """Return the configuration keys whose values differ from the run's last launch: key -> (value there, value here).

    `there`: the configuration in the run directory, None if it is new; `meta`: metadata of the checkpoint that the run
    resumes from, which holds the run's identity and its mesh (compared as mesh.AXIS, only if `there` is None); `mesh`:
    axis -> size in today's plan.
    """
    found = differences(completed(meta.identity), identity(config)) if meta else {}
    if meta and not there:
        found |= differences({"mesh": meta.plan.get("mesh", mesh)}, {"mesh": mesh})
    if there:
        found |= differences(redact(there), redact(config.to_dict()))
    came_along = tuple(part for key, parts in _TABLES.items() if key in found for part in parts)
    return {key: pair for key, pair in found.items() if not key.startswith((*came_along, *_OF_ONE_COMMAND))}


def report_code(now: Mapping[str, str], journal: Journal, say: Callable[[str], None]) -> None:
    """Report how the code of this driver, `now`, differs from the last driver's: a `changed` event in the journal and
    one line per name to the user. Nothing is refused: a run may continue with another version of the code."""
    starts = [event.code for event in journal.events() if isinstance(event, events.Starting) and event.code]
    before = starts[-1] if starts else now
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        journal.write(events.Changed(keys={f"code.{name}": (before.get(name), now.get(name)) for name in names}))
    for name in names:
        say(f"changed  code of {name}: {before.get(name, 'none')} before, {now.get(name, 'none')} here")


def report(found: Mapping[str, tuple[Any, Any]], journal: Journal, say: Callable[[str], None]) -> None:
    """Report a resumed run's changed configuration keys, which `changes` returns, in the journal and to the user."""
    if found:
        journal.write(events.Changed(keys=dict(found)))
    for key, (there, here) in found.items():
        say(f"changed  {key}: {there} there, {here} here")
