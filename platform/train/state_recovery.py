"""Choice of the state that a re-formed run continues from: the newest one that is whole in its workers' memory.

`compare_replicas` finds corrupted memory before an update: ranks that should hold equal bytes compare checksums, and
`judge_replicas` names the damaged ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from platform.checkpoint import memory_recovery as recovery
from platform.checkpoint.blocks import Block, Box, HeldTensor, JoinedBlocks, Share, find_unit, state_name
from platform.checkpoint.snapshots import Copy, MemoryMap, Snapshot
from platform.config.fields import Config, SentConfig
from platform.optimizer.optimizers import AVERAGE, SIDES
from platform.plan.model_types import LOW, SCALES
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import all_gather_values
from platform.train.faults import WORDS
from platform.train.replies import Damage, Differences, Dispute
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState, list_kept_base, list_state_tensors


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

    def build_memory_map(self, plan: Plan | None = None) -> MemoryMap:
        """Return which parts of the training state each rank's snapshots have. `plan`: None makes the plan again."""
        plan = plan or make_plan(self.config, stage_of=self.stage_of)
        nodes = self.domains or [""] * plan.mesh.world_size
        state = list_state_tensors(plan, self.moments)
        return MemoryMap(state, nodes, self.shared, is_divided(self.config), list_kept_base(plan))


@dataclass(frozen=True)
class MemorySource:
    """State in workers' memory that a new generation continues from: the snapshots taken after training step `step` in
    the earlier generation of number `generation`.

    Attributes:
        formed: the formation of that generation.
        kept: its ranks whose members have a seat in the new generation, or at first are to have one.
        gathered: all its ranks that survived if some of their members have no seat, in the order of their ranks in
            `Worker.exchange_snapshots`, which is called first; else empty.
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

    def members_of_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the workers that had these `ranks` in the earlier generation, to recover from their memory."""
        return [self.formed.seats[rank] for rank in ranks]

    @property
    def new_rank_by_old(self) -> dict[int, int]:
        """Return rank before the failure -> rank in the re-formed mesh, of the surviving workers that have one."""
        new = {member: rank for rank, member in enumerate(self.seats)}
        return {old: new[member] for old, member in zip(self.kept, self.members_of_ranks(self.kept), strict=True)}

    def list_surviving_chains(self, held: MemoryMap) -> list[JoinedBlocks]:
        """Return the chains of blocks of the training state that surviving workers have in memory, each with the ranks
        of the new mesh that can read it; equal on all ranks. `held`: the memory map of `formed`."""
        if self.gathered:
            readers = {self.gathered.index(old): (new,) for old, new in self.new_rank_by_old.items()}
            return recovery.find_surviving_chains(*self.plan_handovers(held), readers)
        return self._list_readable_chains(held, self.new_rank_by_old)

    def _list_readable_chains(self, held: MemoryMap, seats: Mapping[int, int]) -> list[JoinedBlocks]:
        """Return the chains of blocks that ranks can read: of snapshots in their memory, and what they themselves keep
        of the base. `seats`: rank before the failure -> rank that reads."""
        survived = recovery.find_surviving_chains(held.chains, held.copies, held.map_readers(seats, self.distrusted))
        return survived + recovery.find_surviving_chains(held.base, (), {old: (new,) for old, new in seats.items()})

    def plan_handovers(self, held: MemoryMap) -> tuple[list[JoinedBlocks], list[Copy]]:
        """Return how workers that survived a failure pass parts of their training state on before the mesh re-forms:
        the chains of blocks that they can read, by their index among the `gathered` ranks; and the copies that
        survivors without a new rank send to others."""
        survived = self._list_readable_chains(held, {old: i for i, old in enumerate(self.gathered)})
        seated = set(self.kept)
        return survived, recovery.assign_handovers(survived, [old in seated for old in self.gathered])


def find_source(
    newest: Mapping[int, int],
    formed: Mapping[int, Formation],
    alive: Collection[int],
    size: int,
    distrusted: Collection[tuple[int, int]] = (),
    plans: Mapping[int, Plan] = MappingProxyType({}),
) -> tuple[MemorySource | None, list[str]]:
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
        damaged_ranks = [rank for rank, member in enumerate(old.seats) if (generation, member) in distrusted]
        survivors = [rank for rank, member in enumerate(old.seats) if member in alive and rank not in damaged_ranks]
        held = old.build_memory_map(plans.get(generation))
        part_keepers = recovery.map_keepers(held, damaged_ranks)
        if not recovery.is_recoverable(part_keepers, {held.memories[rank] for rank in survivors}):
            missing = recovery.list_unrecoverable_tensors(held, survivors, damaged_ranks)
            more_missing = f" and {len(missing) - 1} more" if missing[1:] else ""
            reasons.append(f"step {step} of generation {generation}: not all is left of {missing[0]}{more_missing}")
            continue
        base_holders = {frozenset(chain.holders).intersection(survivors) for chain in held.base}
        needed = _choose_few_covering_ranks(part_keepers, survivors, held.memories, size, base_holders)
        gathered = survivors if len(needed) > size else []
        return MemorySource(generation, step, old, needed[:size], gathered, survivors, damaged_ranks), reasons
    return None, reasons


def take_seats(source: MemorySource, seats: Sequence[int]) -> MemorySource | None:
    """Return `source` (training state in surviving workers' memory) with its readers settled, now that the new mesh has
    its members: `seats`, the member at each rank. None if no survivor is among them. If a survivor without a rank holds
    a part that no other has, all survivors are `gathered` first."""
    seated = set(seats)
    kept_ranks = [rank for rank in source.survivors if source.formed.seats[rank] in seated]
    if set(source.kept) <= set(kept_ranks):
        return replace(source, kept=kept_ranks, seats=list(seats))
    return replace(source, kept=kept_ranks, gathered=source.survivors, seats=list(seats)) if kept_ranks else None


def _choose_few_covering_ranks(
    keepers: recovery.Keepers,
    alive: Sequence[int],
    memories: Sequence[object],
    new_size: int,
    base_holders: Collection[Collection[int]],
) -> list[int]:
    """Choose a few of the surviving ranks `alive` whose in-memory snapshots together are the whole training state: at
    most `new_size`, the number of the new mesh's ranks, or more if a greedy search finds no fewer. `keepers`: a result
    of `map_keepers` for that state; `memories`: the memory in which every rank's snapshots are, perhaps shared with
    others; `base_holders`: the survivors that hold the same parts of a base, one of which is chosen too."""
    chosen, ranks_by_memory = set(alive), Counter(memories[rank] for rank in alive)
    left = [set(holders) for holders in base_holders]
    for rank in reversed(alive):
        memory = memories[rank]
        shares, may_go = ranks_by_memory[memory] > 1, len(chosen) > new_size and {rank} not in left
        if may_go and (shares or recovery.is_recoverable(keepers, ranks_by_memory.keys() - {memory})):
            chosen.remove(rank)
            ranks_by_memory -= Counter([memory])
            for holders in left:
                holders.discard(rank)
    return sorted(chosen)


# words that are multiplied at once: what fits a cache, or pays a launch
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}
ODD = 0x1E3779B97F4A7C15
COPIES = "compute"  # kind of the compute copies, besides `model` and the optimizer's moments


@torch.no_grad()
def compute_checksum(x: Tensor) -> Tensor:
    """Return an int64 scalar for the comparison of replicas, which changes with any one element of the tensor: the sum
    of its words times odd numbers, modulo 2^64."""
    words = x.detach().contiguous().view(-1).view(WORDS[x.element_size()])
    total, offset = torch.zeros((), dtype=torch.int64, device=x.device), 0
    for piece in words.split(AT_ONCE[x.device.type]):
        odd_factors = torch.arange(offset, offset + len(piece), device=x.device).mul_(2).add_(1).mul_(ODD)
        total, offset = total + odd_factors.mul_(piece).sum(), offset + len(piece)
    return total


def compare_replicas(trainer: Trainer, state: RankTrainingState, before: Snapshot | None) -> Differences:
    """Compare weights and optimizer state over replicas, before an update, to find corrupted memory; all ranks call it
    together and get the same result.

    Damaged is what differs from the majority of its replicas or, if there is no majority, from its rank's own record
    (`before`, or for compute copies the master copies); the rest is undecided. `before`: this rank's snapshot after the
    last update, None if there is none.
    """
    plan, communicator = trainer.plan, trainer.communicator
    trainer.weights.wait_for_gathers()
    own_tensors = _replica_tensors(trainer)
    own_sums = [compute_checksum(x).to(communicator.device) for x in own_tensors.values()]
    sums = torch.stack(own_sums).tolist() if own_sums else []
    checksums = all_gather_values(communicator, dict(zip(own_tensors, sums, strict=True)))
    damaged, undecided = judge_replicas(plan, checksums)
    if undecided:
        names = {dispute.tensor for dispute in undecided}
        suspects = [*_find_damaged_copies(trainer, names), *_find_changed_tensors(state, before, names)]
        changed = all_gather_values(communicator, suspects)
        settled, undecided = _settle_disputes(undecided, checksums, changed)
        damaged += settled
    return Differences(sorted(damaged), undecided)


def judge_replicas(plan: Plan, checksums: Sequence[Mapping[str, int]]) -> tuple[list[Damage], list[Dispute]]:
    """Judge replicas of weights and optimizer state by their checksums, before an update in training: return the
    tensors that differ from the majority of their replicas, so are damaged, and the tensors that differ without a
    majority. `checksums`: sums over local blocks, by rank and tensor (KIND.PARAMETER)."""
    parameters = {p.name: p for p in (*plan.parameters, *plan.states)}
    replicas: dict[tuple[str, Any], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(checksums):
        coordinates = plan.mesh.rank_coordinates(rank)
        for tensor, value in sums.items():
            block = plan.locate_block(parameters[tensor.partition(".")[2]], coordinates)
            replicas[tensor, tuple(map(tuple, block))][value].append(rank)
    damaged, undecided = [], []
    for (tensor, _), by_value in replicas.items():
        *others, most = sorted(by_value.values(), key=len)
        if others and 2 * len(most) > sum(map(len, by_value.values())):
            damaged += [Damage(rank, tensor) for ranks in others for rank in ranks]
        elif others:
            undecided.append(Dispute(sorted(rank for ranks in by_value.values() for rank in ranks), tensor))
    return damaged, undecided


def _settle_disputes(
    undecided: list[Dispute], checksums: Sequence[Mapping[str, int]], changed: Sequence[Collection[str]]
) -> tuple[list[Damage], list[Dispute]]:
    """Settle disputes over tensors that replicas hold differently, without a majority: a rank whose tensor contradicts
    its own record is damaged if all other replicas agree. Return the damage, and the disputes still undecided.
    `checksums`: sums by rank and tensor; `changed`: tensors that contradict a rank's record, by rank."""
    damaged, unsettled = [], []
    for ranks, tensor in undecided:
        damaged_ranks = [rank for rank in ranks if tensor in changed[rank]]
        if damaged_ranks and len({checksums[rank][tensor] for rank in ranks if rank not in damaged_ranks}) == 1:
            damaged += [Damage(rank, tensor) for rank in damaged_ranks]
        else:
            unsettled.append(Dispute(ranks, tensor))
    return damaged, unsettled


def _replica_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the tensors that this rank's replicas should hold alike, by KIND.PARAMETER: master and compute copies of
    weights, optimizer moments. ZeRO shards are left out, as no other rank holds them."""
    plan, weights, stored = trainer.stage, trainer.weights, trainer.weights.stored_masters
    all_halves = weights.master_halves if plan.stored.masters == "split" else {}
    tensor_by_name: dict[str, Tensor] = {}
    for name, master in weights.own_masters.items():
        if not plan.bucket_by_parameter[name].sharded:
            tensor_by_name[f"model.{name}"] = stored[name].detach()
            tensor_by_name |= {f"{LOW}.{name}": low for _, low in [*filter(None, [all_halves.get(name)])]}
            updated = weights.updated[name][0]
            moments = ((k, v) for k, v in trainer.optimizer.state[updated].items() if isinstance(v, Tensor) and v.dim())
            parts = ((k, v if k in SIDES else weights.part_of_parameter(name, v, find_unit(k))) for k, v in moments)
            whole = ((k, v) for k, v in parts if v.shape == master.shape or k.endswith((*SIDES, SCALES)))
            tensor_by_name |= {f"{k}.{name}": v for k, v in whole}
            tensor_by_name |= {f"{AVERAGE}.{name}": w for n, w in weights.averages.items() if n == name}
    tensor_by_name |= {state_name(p): weights.states[p.name] for p in plan.states}
    for name, w in weights.compute.items():
        bucket = plan.bucket_by_parameter[name]
        is_master = w is weights.master[name] or (name in all_halves and not bucket.sharded)
        if not bucket.frees_weights and w.numel() and not is_master:
            tensor_by_name[f"{COPIES}.{name}"] = w.detach()
    return tensor_by_name


@torch.no_grad()
def _find_damaged_copies(trainer: Trainer, names: Collection[str]) -> list[str]:
    """Return the compute copies of weights, among the tensors `names`, that were damaged in this rank's memory, as they
    differ from fresh copies of their master weights; all ranks call it together, as shards may have to be gathered."""
    weights, copy_names = trainer.weights, [n for n in names if n.startswith(f"{COPIES}.")]
    if not copy_names:
        return []
    fresh = weights.compute_fresh_copies()
    copies = [(n, n.partition(".")[2]) for n in sorted(copy_names)]
    return [n for n, p in copies if p in fresh and compute_checksum(fresh[p]) != compute_checksum(weights.compute[p])]


def _find_changed_tensors(state: RankTrainingState, before: Snapshot | None, names: Collection[str]) -> list[str]:
    """Return the tensors of the training state, among `names`, of which this rank's block differs from the snapshot
    `before` taken after the last update, and so was damaged in memory; [] without a snapshot."""
    held = {h.name: h for h in state.held}
    own_blocks = [block for block in state.live_blocks() if block.name in names] if before else []
    return sorted({block.name for block in own_blocks if before and not _is_unchanged(block, held[block.name], before)})


def _is_unchanged(block: Block, held: HeldTensor, before: Snapshot) -> bool:
    """Return True if a worker's live weight or optimizer moment, its block, equals its copy in the snapshot `before`,
    byte by byte; padding beyond the tensor's global shape does not count."""
    real = block.box.intersect_box(Box.whole_tensor(held.shape))
    if real is None:
        return True
    live = block.tensor[real.relative_slices(block.box)].cpu().contiguous().view(-1).view(torch.uint8)
    return torch.equal(live, before.view_part(Share(held, real)).reshape(-1))
