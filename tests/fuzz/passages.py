"""Passages of a run's state from one plan to the next: by a checkpoint on storage, or out of survivors' memory."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint, load_manifest
from platform.checkpoint.manifest import Meta
from platform.checkpoint.memory_recovery import list_lost_tensors
from platform.checkpoint.snapshots import RankSnapshots
from platform.config.fields import Config
from platform.config.ramps import step_sample_range
from platform.plan.layout import Mesh
from platform.plan.plan import Plan
from platform.runtime.communicator import Communicator
from platform.train.state_recovery import Formation, find_source
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState
from tests.harness.memories import opened, take
from tests.harness.seats import seated
from tests.harness.threads import run_threads


class OnStorage:
    """Passage by a checkpoint in `storage`, which is emptied in the end."""

    def __init__(self) -> None:
        self.storage, self.directory = open_storage("memory://plans"), ""

    def begin(self, step: int) -> None:
        self.writing = choose_attempt_directory(self.storage, step)

    def keep(self, trainer: Trainer, step: int) -> Any:
        """Return what one rank wrote, and of what."""
        state = RankTrainingState(trainer)
        state.checkpoint_image.fill_parts(state.live_blocks())
        report = state.checkpoint_image.write_file(self.storage, self.writing)
        return report, {held.name: held.shape for held in state.held}, state.read_values()

    def seal(self, c: Config, plan: Plan, step: int, kept: Sequence[Any]) -> None:
        values = next((values for _, _, values in kept if values), {})
        meta = Meta(step, step_sample_range(c.train, step)[1], c.seed, "", {}, "", {}, values)
        commit_checkpoint(self.storage, self.writing, kept[0][1], [report for report, _, _ in kept], meta)
        self.directory = self.writing

    def prepare(self, plan: Plan) -> None:
        pass

    def restore(self, trainer: Trainer) -> None:
        RankTrainingState(trainer).restore_checkpoint(
            self.storage, self.directory, load_manifest(self.storage, self.directory)
        )

    def end(self) -> None:
        for name in self.storage.list_sizes(""):
            self.storage.delete(name)


class InMemory:
    """Passage out of the snapshots of ranks on `nodes` nodes, some of which may be lost: the first or the last, where
    the copies of its snapshots at others leave the state whole; or `some` ranks, one less until it is whole.

    `killed`: how many were lost; `spared`: how many more would have left storage alone; `idle`: none that is alive
    trains anything."""

    killed = spared = 0
    alive: Sequence[int] = ()
    idle = False

    def __init__(self, r: Random, lost: Sequence[str] = ("", "first", "last", "some")) -> None:
        self.nodes, self.shared, self.lost = r.choice((1, 2, 2)), r.random() < 0.5, r.choice(lost)
        self._order = Random(r.random())  # in which ranks are lost

    def begin(self, step: int) -> None:
        pass

    def keep(self, trainer: Trainer, step: int) -> tuple[RankSnapshots, list[str], bool]:
        """Return one rank's snapshots, taken now, the names of its optimizer's moments, and if it trains anything."""
        state, communicator = RankTrainingState(trainer), trainer.communicator
        homes = self._homes(trainer.plan.mesh.world_size)
        memory = opened(state.held, homes, communicator, self.shared, base=state.base)
        memory.base = state.base_blocks()
        take(memory, step, state.live_blocks(), state.read_values(), communicator.transfer)
        return memory, list(state.moments), any(w.numel() for w in trainer.weights.trainable_masters.values())

    def seal(self, c: Config, plan: Plan, step: int, kept: Sequence[Any]) -> None:
        size = plan.mesh.world_size
        self.kept, self.step = [memory for memory, *_ in kept], step
        self._trains = [trains for *_, trains in kept]
        homes = self._homes(size)
        gone = {"first": homes[0], "last": homes[-1]}.get(self.lost) if len({*homes}) > 1 else ""
        self.alive = [rank for rank, home in enumerate(homes) if home != gone]
        self.formed = Formation(c, None, homes, list(range(size)), kept[0][1], self.shared)
        if self.lost == "some" and size > 1:
            self.alive = self._order.sample(range(size), self._order.randrange(1, size))

    def prepare(self, plan: Plan) -> None:
        """Find what the survivors have, and hand on what only those without a seat hold."""
        size, all_ranks = plan.mesh.world_size, range(len(self.kept))
        while True:
            source, reasons = find_source({0: self.step}, {0: self.formed}, sorted(self.alive), size)
            if source or self.lost != "some":
                break
            assert reasons and "not all is left of" in reasons[0], "storage alone is left, and the journal says why"
            self.alive, self.spared = [*self.alive, next(r for r in all_ranks if r not in self.alive)], self.spared + 1
        assert source and source.step == self.step, f"not whole in memory: {reasons}"
        self.killed = len(all_ranks) - len(self.alive)
        self.idle = not any(self._trains[rank] for rank in self.alive)
        source = seated(source, list(range(100, 100 + size)), size)
        if source.gathered:
            _, handed = source.plan_handovers(self.kept[0].held)

            def pass_on(communicator: Communicator) -> None:
                memory = self.kept[source.gathered[communicator.rank]]
                memory.exchange_handovers(handed, self.step, communicator.rank, communicator.transfer)

            run_threads(Mesh.arrange_axes({"data": len(source.gathered)}), pass_on)
        self.memories = {new: self.kept[source.seats[new]] for new in source.new_rank_by_old.values()}
        self.survived = source.list_surviving_chains(self.kept[0].held)

    def restore(self, trainer: Trainer) -> None:
        memory, state = self.memories.get(trainer.communicator.rank), RankTrainingState(trainer)
        lost = list_lost_tensors(state.base, self.survived)
        for name, _, weights in state.base_blocks():
            if name not in lost:
                weights.fill_(torch.nan if weights.is_floating_point() else 255)
        state.recover_state(self.survived, memory.open_node_snapshot(self.step) if memory else None)

    def end(self) -> None:
        pass

    def _homes(self, size: int) -> list[str]:
        return [f"node {rank * self.nodes // size}" for rank in range(size)]
