"""Words for what workers are seen to do, in the verdict on a run."""

from __future__ import annotations

from collections.abc import Iterable

from platform.parallel.communicator.progress import Activity, Wait


def activity_text(beat: Activity) -> str:
    """Format what a worker does, by its heartbeat, as "waiting in all_reduce over data"."""
    if not beat.waiting:
        where = f"in {beat.section}" if beat.section else f"in {beat.call}"
        return f"preparing {where}" if beat.preparing else f"at work {where}"
    return f"waiting in {wait_text(beat.wait) if beat.wait else beat.section}"


def doings_text(doings: Iterable[tuple[int, Activity]]) -> list[str]:
    """Format what workers do, by (rank, heartbeat), as a line for each activity, the most frequent first."""
    found: dict[str, list[int]] = {}
    for rank, beat in doings:
        found.setdefault(activity_text(beat), []).append(rank)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{ranks_text(ranks)} {text}" for text, ranks in ordered]


def wait_text(wait: Wait) -> str:
    """Format the collective or message that a worker waits for."""
    if wait.peer >= 0:
        return f"{wait.op} {'to' if wait.op == 'send' else 'from'} rank {wait.peer}"
    name = f" ({wait.name})" if wait.name not in ("", wait.op) else ""
    return f"{wait.op} over {'+'.join(wait.axes)}{name}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks for people: "rank 3", "ranks 0 and 2", "ranks 0, 1, 2 and 61 more"."""
    found = [str(rank) for rank in sorted(ranks)]
    if len(found) == 1:
        return f"rank {found[0]}"
    more = [f"{len(found) - 3} more"] if len(found) > 4 else found[-1:]
    first = found[:3] if len(found) > 4 else found[:-1]
    return f"ranks {', '.join(first)} and {more[0]}"
