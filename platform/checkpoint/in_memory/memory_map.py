"""The map of a generation's snapshots: which rank's memory has which part of the state, and who can read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence

from platform.checkpoint.blocks.chain import chains_of
from platform.checkpoint.blocks.placement import HeldTensor, Share
from platform.checkpoint.in_memory.copies import copies


class MemoryMap:
    """Map of the snapshots that the ranks of one generation hold of a step; equal on all of them.

    `memories`: the memory of each rank's snapshots. Where the ranks of a node share memory, it is the node's: each can
    read what any of them has written, also after that one is dead. Else every rank has one of its own. If `divided`,
    ranks of one memory that hold the same blocks write an equal part of them each; else each writes all that it holds,
    as one of them may turn out to be damaged. A part that only one failure domain has is copied to others (`copies`);
    domains are the nodes or, where there is one node, what can be lost there: a memory or, where ranks may be
    distrusted, a rank.
    """

    def __init__(self, state: Sequence[HeldTensor], nodes: Sequence[Hashable], shared: bool, divided: bool = True):
        """Make the map of in-memory snapshots. `state`: the tensors of the training state, with the ranks that hold
        their blocks; `nodes`: the node of every rank; `shared`: True if the ranks of each node share memory; `divided`:
        True if these ranks divide what they hold alike, instead of writing all of it each."""
        self.state, self.chains, self.shared = state, chains_of(state), shared
        self.memories: Sequence[Hashable] = nodes if shared else range(len(nodes))
        self._divided = shared and divided
        within = self.memories if self._divided else range(len(nodes))
        self.copies = copies(self.chains, nodes if len(set(nodes)) > 1 else within)
        self._held = defaultdict(list)  # rank -> its chains
        for chain in self.chains:
            for rank in chain.holders:
                self._held[rank].append(chain)

    def mates(self, rank: int) -> list[int]:
        """Return the ranks that share the memory of their snapshots with `rank`, itself included."""
        return [mate for mate, memory in enumerate(self.memories) if memory == self.memories[rank]]

    def own(self, rank: int) -> list[Share]:
        """Return the parts of its own blocks of the training state that `rank` writes into its snapshot in memory."""
        out: list[Share] = []
        for chain in self._held[rank]:
            alike = [holder for holder in chain.holders if self.memories[holder] == self.memories[rank]]
            part = chain.share(alike.index(rank), len(alike)) if self._divided else (0, chain.nbytes)
            out += chain.parts(*part)
        return out

    def readers(self, seats: Mapping[int, int], distrusted: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
        """Map each rank to another mesh's ranks that can read its in-memory snapshots; `seats`: rank here -> there."""
        assert not (distrusted and self._divided), "who may be distrusted keeps all that it holds"
        living: dict[Hashable, list[int]] = defaultdict(list)
        for old, new in seats.items():
            living[self.memories[old]].append(new)
        found = {memory: tuple(sorted(ranks)) for memory, ranks in living.items()}
        return {r: () if r in distrusted else found.get(memory, ()) for r, memory in enumerate(self.memories)}
