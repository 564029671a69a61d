"""What a re-formed run goes on from: which of the states in its workers' memory is the newest that is whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from platform.checkpoint import Copy, Held, copies, surviving, whole
from platform.config import Config
from platform.train.plan import make_plan
from platform.train.state import held_of


def who_has(source: Mapping[str, Any]) -> list[Held]:
    """Which new ranks have which blocks of a state in memory, equal on all ranks.

    `source` is plain data: {"generation", "step"; "config", "stage_of", "domains": as that generation's workers got
    them; "ranks": [old rank, new rank] of each survivor that holds it}.
    """
    state, kept = _state(source)
    return surviving(state, kept, dict(source["ranks"]))


def find_source(
    held: Mapping[int, Iterable[tuple[int, Sequence[int]]]], formed: Mapping[int, Mapping[str, Any]], size: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest state that is whole in the memory of at most `size` members, and why newer ones are not: a line each.
    None where storage is the last resort.

    `held`: alive member -> what its `Worker.held` says. `formed`: generation -> {"config", "stage_of", "domains"} and
    "seats", the member at every rank. The result is a source (`who_has`) but for its "ranks"; "members" are [old rank,
    member] of those that must have a seat in the new generation, see `take_seats`.
    """
    having: dict[tuple[int, int], set[int]] = {}
    for member, generations in held.items():
        for generation, steps in generations:
            for step in steps:
                having.setdefault((step, generation), set()).add(member)
    reasons: list[str] = []
    for step, generation in sorted(having, reverse=True):
        old, members = formed[generation], having[step, generation]
        alive = [rank for rank, member in enumerate(old["seats"]) if member in members]
        chosen, missing = _choose(old, alive, size)
        if not missing:
            source = {key: old[key] for key in ("config", "stage_of", "domains")}
            source |= {"generation": generation, "step": step, "members": [[r, old["seats"][r]] for r in chosen]}
            return source, reasons
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        reasons.append(f"step {step} of generation {generation}: {missing[0]}{more} was lost with its holders")
    return None, reasons


def take_seats(source: Mapping[str, Any], others: Sequence[int], size: int) -> tuple[list[int], dict[str, Any]]:
    """The member at every rank of the new generation, and the source that its workers `recover` from. Who has a part of
    the state keeps its rank where it can, so that little moves; `others` fill the rest, the first ones first."""
    keep = {rank: member for rank, member in source["members"] if rank < size}
    rest = iter([member for rank, member in source["members"] if rank >= size] + list(others))
    seats = [keep[rank] if rank in keep else next(rest) for rank in range(size)]
    ranks = [[rank, seats.index(member)] for rank, member in source["members"]]
    return seats, {**{key: value for key, value in source.items() if key != "members"}, "ranks": ranks}


def _choose(old: Mapping[str, Any], alive: Sequence[int], size: int) -> tuple[list[int], list[str]]:
    """At most `size` of the old ranks `alive` that have everything; else the names of tensors that these have not."""
    state, kept = _state(old)
    chosen = list(alive)
    missing = whole(state, kept, chosen)
    for rank in reversed(alive):
        if missing or len(chosen) <= size:
            break
        fewer = [r for r in chosen if r != rank]
        if not whole(state, kept, fewer):
            chosen = fewer
    return chosen, missing or whole(state, kept, chosen[:size])


def _state(formed: Mapping[str, Any]) -> tuple[list[Held], list[Copy]]:
    """Who kept what in a generation, and the copies."""
    config = Config.from_dict(formed["config"])
    plan = make_plan(config, stage_of=formed["stage_of"])
    state = held_of(config, plan)
    return state, copies(state, formed["domains"] or [""] * plan.mesh.size)
