"""Choice of the state that a re-formed run continues from: the newest one that is whole in its workers' memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from platform.checkpoint.blocks.chain import Chain
from platform.checkpoint.in_memory.copies import Copy
from platform.checkpoint.in_memory.memory_map import MemoryMap
from platform.checkpoint.in_memory.recover import (
    Keepers,
    handed_over,
    is_recoverable,
    keepers,
    lost_to,
    surviving,
)
from platform.config.fields import Config, SentConfig
from platform.plan.core.plan import Plan
from platform.planning.make_plan import make_plan
from platform.train.step.training_state import held_of


def is_divided(config: Config) -> bool:
    """Return True if ranks that share memory each snapshot a part of equal state; not under train.verify_every."""
    return not config.train.verify_every


@dataclass(frozen=True)
class Formation:
    """Formation of a generation of workers, which determines who holds which part of its state in memory: its
    configuration, the pipeline stage of every model chunk (None: as the configuration says), and every rank's node
    (`domains`, its failure domain; all "" if they are empty) and member (`seats`), and the names of the optimizer's
    moments, as its workers have found them. `shared`: the ranks of each node share the memory of their snapshots."""

    config: SentConfig
    stage_of: list[int] | None
    domains: list[str]
    seats: list[int]
    moments: list[str]
    shared: bool = False

    def held(self, plan: Plan | None = None) -> MemoryMap:
        """Return which parts of the training state each rank's snapshots have. `plan`: None makes the plan again."""
        plan = plan or make_plan(self.config, stage_of=self.stage_of)
        nodes = self.domains or [""] * plan.mesh.size
        return MemoryMap(held_of(plan, self.moments), nodes, self.shared, is_divided(self.config))


@dataclass(frozen=True)
class Source:
    """State in workers' memory that a new generation continues from: the snapshots taken after training step `step` in
    the earlier generation of number `generation`.

    Attributes:
        formed: the formation of that generation.
        kept: its ranks whose members have a seat in the new generation, or at first are to have one.
        gathered: all its ranks that survived if some of their members have no seat, in the order of their ranks in
            `Worker.gather`, which is called first; else empty.
        survivors: all its ranks whose members are alive and whose memory is sound, in order.
        distrusted: its ranks whose memory is damaged.
        seats: the member at every rank of the new generation; empty until `take_seats` assigns them.
    """

    generation: int
    step: int
    formed: Formation
    kept: list[int]
    gathered: list[int]
    survivors: list[int]
    distrusted: list[int] = field(default_factory=list)
    seats: list[int] = field(default_factory=list)

    def members(self, ranks: Iterable[int]) -> list[int]:
        """Return the crew members that had these `ranks` in the earlier generation, whose snapshots are recovered."""
        return [self.formed.seats[rank] for rank in ranks]

    @property
    def ranks(self) -> dict[int, int]:
        """Return rank before the failure -> rank in the re-formed mesh, of the surviving workers that have one."""
        new = {member: rank for rank, member in enumerate(self.seats)}
        return {old: new[member] for old, member in zip(self.kept, self.members(self.kept), strict=True)}

    def survived(self, held: MemoryMap) -> list[Chain]:
        """Return the chains of blocks of the training state that survived a failure in workers' memory, each with the
        ranks of the new mesh that can read it; equal on all ranks. `held`: the memory map of `formed`."""
        if not self.gathered:
            return surviving(held.chains, held.copies, held.readers(self.ranks, self.distrusted))
        survived, handed = self.gathering(held)
        return surviving(survived, handed, {self.gathered.index(old): (new,) for old, new in self.ranks.items()})

    def gathering(self, held: MemoryMap) -> tuple[list[Chain], list[Copy]]:
        """Return how survivors of a failure pass parts of the state on before the mesh re-forms: the chains of blocks
        that they can read, by their index among the `gathered` ranks; and the copies that survivors without a new rank
        send to others."""
        readers = held.readers({old: i for i, old in enumerate(self.gathered)}, self.distrusted)
        survived, seated = surviving(held.chains, held.copies, readers), set(self.kept)
        return survived, handed_over(survived, [old in seated for old in self.gathered])


def find_source(
    newest: Mapping[int, int],
    formed: Mapping[int, Formation],
    alive: Collection[int],
    size: int,
    distrusted: Collection[tuple[int, int]] = (),
    plans: Mapping[int, Plan] = MappingProxyType({}),
) -> tuple[Source | None, list[str]]:
    """Find the newest training state that is whole in the members' memory, for a new generation to continue from, or
    None if only storage is left; and say why newer states are not whole, in a line each.

    `newest`: generation number -> the newest step of which all its members have taken a snapshot; `formed`: its
    formation; `plans`: its plan, where that is known; `distrusted`: (generation number, member) whose memory is
    damaged. `alive`: members that live, and so can read the memory in which their rank's snapshots are; `size`: number
    of ranks of the new generation.
    """
    reasons: list[str] = []
    for generation, step in sorted(newest.items(), key=lambda item: item[::-1], reverse=True):
        old = formed[generation]
        wrong = [rank for rank, member in enumerate(old.seats) if (generation, member) in distrusted]
        here = [rank for rank, member in enumerate(old.seats) if member in alive and rank not in wrong]
        held = old.held(plans.get(generation))
        found = keepers(held, wrong)
        if not is_recoverable(found, {held.memories[rank] for rank in here}):
            missing = lost_to(held, here, wrong)
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            reasons.append(f"step {step} of generation {generation}: not all is left of {missing[0]}{more}")
            continue
        needed = _few(found, here, held.memories, size)
        gathered = here if len(needed) > size else []
        return Source(generation, step, old, needed[:size], gathered, here, wrong), reasons
    return None, reasons


def take_seats(source: Source, seats: Sequence[int]) -> Source | None:
    """Return `source` (training state in survivors' memory) with its readers settled, now that the new mesh has its
    members: `seats`, the member at each rank. None if no survivor is among them. If a survivor without a rank holds a
    part that no other has, all survivors are `gathered` first."""
    seated = set(seats)
    kept = [rank for rank in source.survivors if source.formed.seats[rank] in seated]
    if set(source.kept) <= set(kept):
        return replace(source, kept=kept, seats=list(seats))
    return replace(source, kept=kept, gathered=source.survivors, seats=list(seats)) if kept else None


def _few(found: Keepers, alive: Sequence[int], memories: Sequence[object], size: int) -> list[int]:
    """Choose a few of the surviving ranks `alive` whose in-memory snapshots together are the whole training state: at
    most `size`, the number of the new mesh's ranks, or more if a greedy search finds no fewer. `found`: a result of
    `keepers` for that state; `memories`: the memory in which every rank's snapshots are, perhaps shared with others."""
    chosen, left = set(alive), Counter(memories[rank] for rank in alive)
    for rank in reversed(alive):
        memory = memories[rank]
        if len(chosen) > size and (left[memory] > 1 or is_recoverable(found, left.keys() - {memory})):
            chosen.remove(rank)
            left -= Counter([memory])
    return sorted(chosen)
