"""The driver's record of the run state that crew members hold in memory, kept from their answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from platform.train.recovery.source import Formation


class Held:
    """Ledger of in-memory snapshots: a generation's are kept by its members until the next one takes a step."""

    def __init__(self) -> None:
        self._formed: dict[int, Formation] = {}  # by generation
        self._distrusted: set[tuple[int, int]] = set()  # (generation, member)
        self._steps: dict[int, int] = {}  # generation -> the newest step that all its members hold

    @property
    def formed(self) -> Mapping[int, Formation]:
        """Return how each generation was formed, as `platform.train.recovery.source.find_source` takes it."""
        return self._formed

    def add(self, generation: int, step: int, formed: Formation) -> None:
        """Record that all members of a generation hold the state after `step`: they start from it or committed it."""
        self._formed[generation], self._steps[generation] = formed, step

    def distrust(self, generation: int, members: Collection[int]) -> None:
        """Ignore from now on what these members hold of a generation: their memory is damaged."""
        self._distrusted |= {(generation, member) for member in members}

    def only(self, generation: int) -> None:
        """Forget the snapshots of all other generations: this one takes a step, and its workers drop them."""
        self._formed = {g: how for g, how in self._formed.items() if g == generation}
        self._steps = {g: step for g, step in self._steps.items() if g == generation}

    def by(self, members: Collection[int]) -> dict[int, list[tuple[int, list[int]]]]:
        """Return, for each of `members`, what it holds: a list of (generation, steps)."""
        found: dict[int, list[tuple[int, list[int]]]] = {member: [] for member in members}
        for generation, step in self._steps.items():
            for member in set(self._formed[generation].seats) & set(members):
                if (generation, member) not in self._distrusted:
                    found[member].append((generation, [step]))
        return found
