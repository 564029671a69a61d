"""The driver's record of the run state that crew members hold in memory, kept from their answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from platform.cluster.control.forming.context import Generation
from platform.train.recovery.source import Formation


class SnapshotLedger:
    """Ledger of in-memory snapshots: a generation's are kept by its members until the next one takes a step."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[Generation, int]] = {}  # by number: the newest step that all its members hold
        self._distrusted: set[tuple[int, int]] = set()  # (generation, member)

    @property
    def formed(self) -> Mapping[int, Formation]:
        """Return how each generation was formed, as `platform.train.recovery.source.find_source` takes it."""
        return {number: generation.formed for number, (generation, _) in self._newest.items()}

    def add(self, generation: Generation, step: int) -> None:
        """Record that all members of a generation hold the state after `step`: they start from it or committed it."""
        self._newest[generation.number] = generation, step

    def distrust(self, generation: int, members: Collection[int]) -> None:
        """Ignore from now on what these members hold of a generation: their memory is damaged."""
        self._distrusted |= {(generation, member) for member in members}

    def only(self, generation: int) -> None:
        """Forget the snapshots of all other generations: this one takes a step, and its workers drop them."""
        self._newest = {number: held for number, held in self._newest.items() if number == generation}

    def by(self, members: Collection[int]) -> dict[int, list[tuple[int, list[int]]]]:
        """Return, for each of `members`, what it holds: a list of (generation, steps)."""
        found: dict[int, list[tuple[int, list[int]]]] = {member: [] for member in members}
        for number, (generation, step) in self._newest.items():
            for member in set(generation.seats) & set(members):
                if (number, member) not in self._distrusted:
                    found[member].append((number, [step]))
        return found
