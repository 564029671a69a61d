"""What a re-formed run goes on from: which of the states in its workers' memory is the newest that is whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from platform.checkpoint import Copy, Held, copies, handed_over, keepers, suffice, surviving, whole
from platform.config.fields import Config
from platform.planning.make_plan import make_plan
from platform.train.step.training_state import held_of


def who_has(source: Mapping[str, Any]) -> list[Held]:
    """Which new ranks have which blocks of a state in memory, equal on all ranks.

    `source` is plain data: {"generation", "step"; "config", "stage_of", "domains": as that generation's workers got
    them; "ranks": [old rank, new rank] of each survivor that has both; "gathered": [old rank, member] of all survivors
    if some of these have no seat, in the order in which they `gather` first}.
    """
    ranks = dict(source["ranks"])
    if not source["gathered"]:
        return surviving(*_state(source), ranks)
    survived, handed = gathering(source)
    order = [old for old, _ in source["gathered"]]
    return surviving(survived, handed, {order.index(old): new for old, new in ranks.items()})


def gathering(source: Mapping[str, Any]) -> tuple[list[Held], list[Copy]]:
    """Who has what among the `gathered`, by their order, and what those without a seat pass to those with one."""
    order, seated = [old for old, _ in source["gathered"]], dict(source["ranks"])
    survived = surviving(*_state(source), {old: i for i, old in enumerate(order)})
    return survived, handed_over(survived, [old in seated for old in order])


def find_source(
    held: Mapping[int, Iterable[tuple[int, Sequence[int]]]], formed: Mapping[int, Mapping[str, Any]], size: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest state that is whole in the members' memory, and why newer ones are not: a line each. None where
    storage is the last resort.

    `held`: alive member -> what its `Worker.held` says. `formed`: generation -> {"config", "stage_of", "domains"} and
    "seats", the member at every rank. `size`: of the new generation. The result is a source (`who_has`) but for its
    "ranks"; "members" are [old rank, member] of those that shall have a seat, see `take_seats`.
    """
    having: dict[tuple[int, int], set[int]] = {}
    for member, generations in held.items():
        for generation, steps in generations:
            for step in steps if generation in formed else ():
                having.setdefault((step, generation), set()).add(member)
    reasons: list[str] = []
    for step, generation in sorted(having, reverse=True):
        old, members = formed[generation], having[step, generation]
        alive = [rank for rank, member in enumerate(old["seats"]) if member in members]
        state = _state(old)
        found = keepers(*state)
        if not suffice(found, set(alive)):
            missing = whole(*state, alive)
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            reasons.append(f"step {step} of generation {generation}: not all is left of {missing[0]}{more}")
            continue
        chosen = _choose(found, alive, size)
        source = {key: old[key] for key in ("config", "stage_of", "domains")}
        source |= {"generation": generation, "step": step, "members": [[r, old["seats"][r]] for r in chosen[:size]]}
        return source | {"gathered": [[r, old["seats"][r]] for r in alive] if len(chosen) > size else []}, reasons
    return None, reasons


def take_seats(source: Mapping[str, Any], others: Sequence[int], size: int) -> tuple[list[int], dict[str, Any]]:
    """The member at every rank of the new generation, and the source that its workers `recover` from. Who has a part of
    the state keeps its rank where it can, so that little moves; `others` fill the rest, the first ones first."""
    keep = {rank: member for rank, member in source["members"] if rank < size}
    rest = iter([member for rank, member in source["members"] if rank >= size] + list(others))
    seats = [keep[rank] if rank in keep else next(rest) for rank in range(size)]
    ranks = [[rank, seats.index(member)] for rank, member in source["members"]]
    return seats, {**{key: value for key, value in source.items() if key != "members"}, "ranks": ranks}


def _choose(found: Mapping[tuple[int, ...], Set[int]], alive: Sequence[int], size: int) -> list[int]:
    """Those of the old ranks `alive` that have everything together, by the `keepers`: `size` of them, or more where we
    find no fewer."""
    chosen = set(alive)
    for rank in reversed(alive):
        if len(chosen) > size and suffice(found, chosen - {rank}):
            chosen.remove(rank)
    return sorted(chosen)


def _state(formed: Mapping[str, Any]) -> tuple[list[Held], list[Copy]]:
    """Who kept what in a generation, and the copies."""
    config = Config.from_dict(formed["config"])
    plan = make_plan(config, stage_of=formed["stage_of"])
    state = held_of(config, plan)
    return state, copies(state, formed["domains"] or [""] * plan.mesh.size)
