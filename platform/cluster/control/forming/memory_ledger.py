"""What the members of a crew hold in memory of the run's state: known to the driver from what they have answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


class Held:
    """A generation's snapshots stay in its members' memory until the next one takes a step."""

    def __init__(self) -> None:
        self._formed: dict[int, dict[str, Any]] = {}  # generation -> how it was formed, and its seats
        self._distrusted: set[tuple[int, int]] = set()  # (generation, member)
        self._steps: dict[int, int] = {}  # generation -> the newest step that all its members hold

    @property
    def formed(self) -> Mapping[int, Mapping[str, Any]]:
        """See `platform.train.recovery.source.find_source`."""
        return self._formed

    def add(
        self,
        generation: int,
        step: int,
        config: Any,
        stage_of: Sequence[int],
        domains: Sequence[str],
        seats: Sequence[int],
    ) -> None:
        """All members of a generation hold the state after `step`: it goes on from it, or has committed it."""
        how = {"config": config, "stage_of": list(stage_of), "domains": list(domains), "seats": list(seats)}
        self._formed[generation], self._steps[generation] = how, step

    def distrust(self, generation: int, members: Collection[int]) -> None:
        """Count on nothing that these members hold of a generation: their memory is damaged."""
        self._distrusted |= {(generation, member) for member in members}

    def only(self, generation: int) -> None:
        """It takes a step: what members hold of others is forgotten."""
        self._formed = {g: how for g, how in self._formed.items() if g == generation}
        self._steps = {g: step for g, step in self._steps.items() if g == generation}

    def by(self, members: Collection[int]) -> dict[int, list[tuple[int, list[int]]]]:
        """Member -> (generation, the steps that it holds of it) each."""
        found: dict[int, list[tuple[int, list[int]]]] = {member: [] for member in members}
        for generation, step in self._steps.items():
            for member in set(self._formed[generation]["seats"]) & set(members):
                if (generation, member) not in self._distrusted:
                    found[member].append((generation, [step]))
        return found
