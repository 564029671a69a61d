"""The judges of a run, most certain first: the first that finds a culprit speaks."""

from __future__ import annotations

from collections.abc import Callable

from platform.monitor.verdict import ended, links, running, stalled
from platform.monitor.verdict.evidence import Evidence
from platform.monitor.verdict.verdict import Verdict

JUDGES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    ended.of_end,
    ended.of_driver,
    stalled.of_pulse,
    stalled.of_call,
    stalled.of_itself,
    running.of_waiting,
    running.of_recovery,
    running.of_bad_save,
    stalled.of_saving,
    running.of_slow_worker,
    links.of_links,
    running.of_slow_steps,
    running.of_bad_loss,
)
_OF_A_RUN = JUDGES.index(ended.of_driver) + 1  # the judges from here on ask about a run that goes on


def verdict_on(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a run: the culprit of its end, its standstill or its slowness; None if all is well."""
    judges = JUDGES[: _OF_A_RUN if evidence.end else None]
    return next(filter(None, (judged(evidence) for judged in judges)), None)
