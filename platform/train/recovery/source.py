"""Choice of the state that a re-formed run continues from: the newest one that is whole in its workers' memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from platform.checkpoint.blocks.placement import HeldTensor
from platform.checkpoint.in_memory.copies import Copy, copies
from platform.checkpoint.in_memory.recover import handed_over, is_recoverable, keepers, lost_to, surviving
from platform.config.fields import SentConfig
from platform.planning.make_plan import make_plan
from platform.train.step.training_state import held_of


@dataclass(frozen=True)
class Formation:
    """Formation of a generation of workers, which determines who holds which part of its state in memory: its
    configuration, the pipeline stage of every model chunk (None: as the configuration says), and every rank's node
    (`domains`, its failure domain; all "" if they are empty) and member (`seats`), and the names of the optimizer's
    moments, as its workers have found them."""

    config: SentConfig
    stage_of: list[int] | None
    domains: list[str]
    seats: list[int]
    moments: list[str]

    def state(self) -> tuple[list[HeldTensor], list[Copy]]:
        """Return the tensors of this generation's training state with the ranks that hold their blocks, and the copies
        of parts that are kept by ranks in other failure domains."""
        plan = make_plan(self.config, stage_of=self.stage_of)
        state = held_of(plan, self.moments)
        return state, copies(state, self.domains or [""] * plan.mesh.size)


@dataclass(frozen=True)
class Source:
    """State in workers' memory that a new generation continues from: the snapshots taken after training step `step` in
    the earlier generation of number `generation`.

    Attributes:
        formed: the formation of that generation.
        kept: its ranks whose members have a seat in the new generation, or at first are to have one.
        gathered: all its ranks that survived if some of their members have no seat, in the order of their ranks in
            `Worker.gather`, which is called first; else empty.
        survivors: all its ranks whose members are alive, in order.
        seats: the member at every rank of the new generation; empty until `take_seats` assigns them.
    """

    generation: int
    step: int
    formed: Formation
    kept: list[int]
    gathered: list[int]
    survivors: list[int]
    seats: list[int] = field(default_factory=list)

    def members(self, ranks: Iterable[int]) -> list[int]:
        """Return the numbers of the members that had these ranks in the earlier generation."""
        return [self.formed.seats[rank] for rank in ranks]

    @property
    def ranks(self) -> dict[int, int]:
        """Return rank in the earlier generation -> rank in the new one, of the survivors that have a seat."""
        new = {member: rank for rank, member in enumerate(self.seats)}
        return {old: new[member] for old, member in zip(self.kept, self.members(self.kept), strict=True)}

    def holders(self) -> list[HeldTensor]:
        """List the tensors of the surviving state, each with the ranks of the new generation that hold its blocks in
        memory; equal on all ranks."""
        if not self.gathered:
            return surviving(*self.formed.state(), self.ranks)
        survived, handed = self.gathering()
        return surviving(survived, handed, {self.gathered.index(old): new for old, new in self.ranks.items()})

    def gathering(self) -> tuple[list[HeldTensor], list[Copy]]:
        """Return the blocks of the state that the survivors hold, by their index among the `gathered` ranks, and the
        parts that those without a seat in the new generation send to those with one."""
        survived = surviving(*self.formed.state(), {old: i for i, old in enumerate(self.gathered)})
        seated = set(self.kept)
        return survived, handed_over(survived, [old in seated for old in self.gathered])


def find_source(
    held: Mapping[int, Iterable[tuple[int, Sequence[int]]]], formed: Mapping[int, Formation], size: int
) -> tuple[Source | None, list[str]]:
    """Find the newest training state that is whole in the members' memory, for a new generation to continue from, or
    None if only storage is left; and say why newer states are not whole, in a line each.

    `held`: alive member -> (generation number, steps of its snapshots) pairs. `formed`: generation number -> how it was
    formed. `size`: number of ranks of the new generation.
    """
    having: dict[tuple[int, int], set[int]] = {}
    for member, generations in held.items():
        for generation, steps in generations:
            for step in steps if generation in formed else ():
                having.setdefault((step, generation), set()).add(member)
    reasons: list[str] = []
    for step, generation in sorted(having, reverse=True):
        old, members = formed[generation], having[step, generation]
        alive = [rank for rank, member in enumerate(old.seats) if member in members]
        state = old.state()
        found = keepers(*state)
        if not is_recoverable(found, set(alive)):
            missing = lost_to(*state, alive)
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            reasons.append(f"step {step} of generation {generation}: not all is left of {missing[0]}{more}")
            continue
        needed = _few(found, alive, size)
        gathered = alive if len(needed) > size else []
        return Source(generation, step, old, needed[:size], gathered, alive), reasons
    return None, reasons


def take_seats(source: Source, seats: Sequence[int]) -> Source | None:
    """Return `source` with the member at every rank of the new generation, `seats`; None if no survivor is among
    them. If some that hold a needed part are not, all survivors are `gathered` first."""
    seated = set(seats)
    kept = [rank for rank in source.survivors if source.formed.seats[rank] in seated]
    if set(source.kept) <= set(kept):
        return replace(source, kept=kept, seats=list(seats))
    return replace(source, kept=kept, gathered=source.survivors, seats=list(seats)) if kept else None


def _few(found: Mapping[tuple[int, ...], Set[int]], alive: Sequence[int], size: int) -> list[int]:
    """Choose a few of the earlier generation's ranks `alive` that together hold the whole state: at most as many as the
    new generation has seats (`size`), or more if a greedy search finds no fewer. `found`: a result of `keepers` for
    that state."""
    chosen = set(alive)
    for rank in reversed(alive):
        if len(chosen) > size and is_recoverable(found, chosen - {rank}):
            chosen.remove(rank)
    return sorted(chosen)
