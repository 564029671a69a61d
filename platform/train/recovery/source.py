"""Choice of the state that a re-formed run continues from: the newest one that is whole in its workers' memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from platform.checkpoint.blocks.placement import HeldTensor
from platform.checkpoint.in_memory.copies import Copy, copies
from platform.checkpoint.in_memory.recover import handed_over, is_recoverable, keepers, lost_to, surviving
from platform.config.fields import Config
from platform.planning.make_plan import make_plan
from platform.train.step.training_state import held_of


def who_has(source: Mapping[str, Any]) -> list[HeldTensor]:
    """List the tensors of a state in memory, each with the new ranks that hold its blocks; equal on all ranks.

    `source` is plain data:

    generation, step           of the snapshots
    config, stage_of, domains  as that generation's workers got them
    ranks                      [old rank, new rank] of each survivor that has a seat in the new generation
    gathered                   [old rank, member] of all survivors if some of them have no seat, in the order of their
                               ranks in `Worker.gather`, which is called first; else []
    """
    ranks = dict(source["ranks"])
    if not source["gathered"]:
        return surviving(*_state(source), ranks)
    survived, handed = gathering(source)
    order = [old for old, _ in source["gathered"]]
    return surviving(survived, handed, {order.index(old): new for old, new in ranks.items()})


def gathering(source: Mapping[str, Any]) -> tuple[list[HeldTensor], list[Copy]]:
    """Return the blocks that the `gathered` members hold, by their index among these, and the parts that the members
    without a seat send to those with one."""
    order, seated = [old for old, _ in source["gathered"]], dict(source["ranks"])
    survived = surviving(*_state(source), {old: i for i, old in enumerate(order)})
    return survived, handed_over(survived, [old in seated for old in order])


def find_source(
    held: Mapping[int, Iterable[tuple[int, Sequence[int]]]], formed: Mapping[int, Mapping[str, Any]], size: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """Find the newest state that is whole in the members' memory, or None if only storage is left; and say why newer
    states are not whole, in a line each.

    `held`: alive member -> (generation, steps of its snapshots) pairs. `formed`: generation -> {"config", "stage_of",
    "domains", "seats": the member at every rank}. `size`: number of ranks of the new generation. The result is a
    source (`who_has`) without "ranks" and with "members": [old rank, member] of those to be seated by `take_seats`.
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
        if not is_recoverable(found, set(alive)):
            missing = lost_to(*state, alive)
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            reasons.append(f"step {step} of generation {generation}: not all is left of {missing[0]}{more}")
            continue
        chosen = _choose(found, alive, size)
        source = {key: old[key] for key in ("config", "stage_of", "domains")}
        source |= {"generation": generation, "step": step, "members": [[r, old["seats"][r]] for r in chosen[:size]]}
        return source | {"gathered": [[r, old["seats"][r]] for r in alive] if len(chosen) > size else []}, reasons
    return None, reasons


def take_seats(source: Mapping[str, Any], others: Sequence[int], size: int) -> tuple[list[int], dict[str, Any]]:
    """Assign a member to every rank of the new generation, and return with these seats the source that its workers
    `recover` from. A member that holds part of the state keeps its rank if it exists, so that little moves; `others`
    fill the remaining seats in order."""
    keep = {rank: member for rank, member in source["members"] if rank < size}
    rest = iter([member for rank, member in source["members"] if rank >= size] + list(others))
    seats = [keep[rank] if rank in keep else next(rest) for rank in range(size)]
    ranks = [[rank, seats.index(member)] for rank, member in source["members"]]
    return seats, {**{key: value for key, value in source.items() if key != "members"}, "ranks": ranks}


def _choose(found: Mapping[tuple[int, ...], Set[int]], alive: Sequence[int], size: int) -> list[int]:
    """Choose among the old ranks `alive` some that together hold the whole state, given its `keepers`: at most `size`,
    or more if a greedy search finds no fewer."""
    chosen = set(alive)
    for rank in reversed(alive):
        if len(chosen) > size and is_recoverable(found, chosen - {rank}):
            chosen.remove(rank)
    return sorted(chosen)


def _state(formed: Mapping[str, Any]) -> tuple[list[HeldTensor], list[Copy]]:
    """Return the tensors of a generation's state with their holders, and the copies kept in other failure domains."""
    config = Config.from_dict(formed["config"])
    plan = make_plan(config, stage_of=formed["stage_of"])
    state = held_of(config, plan)
    return state, copies(state, formed["domains"] or [""] * plan.mesh.size)
