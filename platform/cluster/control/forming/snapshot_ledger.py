"""The driver's record of the run state that crew members hold in memory, kept from their answers."""

from __future__ import annotations

from collections.abc import Collection

from platform.cluster.control.forming.context import Generation
from platform.train.recovery.source import Source, find_source


class SnapshotLedger:
    """Ledger of the snapshots of the run's state that workers hold in memory, kept by the driver. Members keep a
    generation's until the next generation takes its first step."""

    def __init__(self) -> None:
        """Initialise a ledger without any snapshot in workers' memory."""
        self._newest: dict[int, tuple[Generation, int]] = {}  # by number: the newest step that all its members hold
        self._distrusted: set[tuple[int, int]] = set()  # (generation, member)

    def add(self, generation: Generation, step: int) -> None:
        """Record that all members of a generation of workers hold a snapshot of the state after `step`."""
        self._newest[generation.number] = generation, step

    def distrust(self, generation: int, members: Collection[int]) -> None:
        """Ignore from now on these members' snapshots of a generation of workers, as their memory is damaged."""
        self._distrusted |= {(generation, member) for member in members}

    def only(self, generation: int) -> None:
        """Forget the snapshots of other generations of workers, which are dropped when this one takes a step."""
        self._newest = {number: held for number, held in self._newest.items() if number == generation}

    def source(self, alive: Collection[int], size: int) -> tuple[Source | None, list[str]]:
        """Return the newest training state that the members `alive` hold whole in memory, for a new mesh of `size`
        ranks, or None, and why newer states are not whole, a line each; see
        `platform.train.recovery.source.find_source`."""
        known = self._newest.items()
        newest = {number: step for number, (_, step) in known}
        formed = {number: generation.formed for number, (generation, _) in known}
        plans = {number: generation.plan for number, (generation, _) in known}
        return find_source(newest, formed, alive, size, self._distrusted, plans)
