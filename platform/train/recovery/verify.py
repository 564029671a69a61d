"""Comparison of replicas before an update: ranks that should hold equal bytes compare checksums, and damaged ones are
named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.placement import Block, HeldTensor, Share, state_name
from platform.checkpoint.in_memory.snapshots import Snapshot
from platform.optimizer.optimizers import AVERAGE, SIDES
from platform.plan.core.plan import Plan
from platform.train.protocol.replies import Damage, Differences, Dispute
from platform.train.step.faults import WORDS
from platform.train.step.trainer import Trainer
from platform.train.step.training_state import State, all_gather_values

# words that are multiplied at once: what fits a cache, or pays a launch
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}
ODD = 0x1E3779B97F4A7C15
COPIES = "compute"  # kind of the compute copies, besides `model` and the optimizer's moments


@torch.no_grad()
def checksum(x: Tensor) -> Tensor:
    """Return an int64 scalar for the comparison of replicas, which changes with any one element of the tensor: the sum
    of its words times odd numbers, modulo 2^64."""
    words = x.detach().contiguous().view(-1).view(WORDS[x.element_size()])
    total, at = torch.zeros((), dtype=torch.int64, device=x.device), 0
    for piece in words.split(AT_ONCE[x.device.type]):
        odd = torch.arange(at, at + len(piece), device=x.device).mul_(2).add_(1).mul_(ODD)
        total, at = total + odd.mul_(piece).sum(), at + len(piece)
    return total


def differing(trainer: Trainer, state: State, before: Snapshot | None) -> Differences:
    """Compare weights and optimizer state over replicas, before an update, to find corrupted memory; all ranks call it
    together and get the same result.

    Damaged is what differs from the majority of its replicas or, if there is no majority, from its rank's own record
    (`before`, or for compute copies the master copies); the rest is undecided. `before`: this rank's snapshot after the
    last update, None if there is none.
    """
    plan, communicator = trainer.plan, trainer.communicator
    trainer.weights.settle()
    mine = _tensors(trainer)
    sums = torch.stack([checksum(x) for x in mine.values()]).tolist() if mine else []
    checksums = all_gather_values(communicator, dict(zip(mine, sums, strict=True)))
    damaged, undecided = judge(plan, checksums)
    if undecided:
        names = {dispute.tensor for dispute in undecided}
        changed = all_gather_values(communicator, [*_restless(trainer, names), *_changed(state, before, names)])
        more, undecided = _decide(undecided, checksums, changed)
        damaged += more
    return Differences(sorted(damaged), undecided)


def judge(plan: Plan, checksums: Sequence[Mapping[str, int]]) -> tuple[list[Damage], list[Dispute]]:
    """Judge replicas of weights and optimizer state by their checksums, before an update in training: return the
    tensors that differ from the majority of their replicas, so are damaged, and the tensors that differ without a
    majority. `checksums`: sums over local blocks, by rank and tensor (KIND.PARAMETER)."""
    parameters = {p.name: p for p in (*plan.parameters, *plan.states)}
    replicas: dict[tuple[str, Any], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(checksums):
        at = plan.mesh.coordinates(rank)
        for tensor, value in sums.items():
            block = plan.block(parameters[tensor.partition(".")[2]], at)
            replicas[tensor, tuple(map(tuple, block))][value].append(rank)
    damaged, undecided = [], []
    for (tensor, _), by_value in replicas.items():
        *others, most = sorted(by_value.values(), key=len)
        if others and 2 * len(most) > sum(map(len, by_value.values())):
            damaged += [Damage(rank, tensor) for ranks in others for rank in ranks]
        elif others:
            undecided.append(Dispute(sorted(rank for ranks in by_value.values() for rank in ranks), tensor))
    return damaged, undecided


def _decide(
    undecided: list[Dispute], checksums: Sequence[Mapping[str, int]], changed: Sequence[Collection[str]]
) -> tuple[list[Damage], list[Dispute]]:
    """Settle disputes over tensors that replicas hold differently, without a majority: a rank whose tensor contradicts
    its own record is damaged if all other replicas agree. Return the damage, and the disputes still undecided.
    `checksums`: sums by rank and tensor; `changed`: tensors that contradict a rank's record, by rank."""
    damaged, left = [], []
    for ranks, tensor in undecided:
        wrong = [rank for rank in ranks if tensor in changed[rank]]
        if wrong and len({checksums[rank][tensor] for rank in ranks if rank not in wrong}) == 1:
            damaged += [Damage(rank, tensor) for rank in wrong]
        else:
            left.append(Dispute(ranks, tensor))
    return damaged, left


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the tensors that this rank's replicas should hold alike, by KIND.PARAMETER: master and compute copies of
    weights, optimizer moments. ZeRO shards are left out, as no other rank holds them."""
    plan, weights, out = trainer.stage, trainer.weights, {}
    for name, master in weights.owned.items():
        if not plan.bucket_of[name].sharded:
            out[f"model.{name}"] = master.detach()
            moments = ((k, v) for k, v in trainer.optimizer.state[master].items() if isinstance(v, Tensor))
            out |= {f"{k}.{name}": v for k, v in moments if v.shape == master.shape or k in SIDES}
            out |= {f"{AVERAGE}.{name}": w for n, w in weights.averages.items() if n == name}
    out |= {state_name(p): weights.states[p.name] for p in plan.states}
    for name, w in weights.compute.items():
        if not plan.bucket_of[name].stored and w.numel() and w is not weights.master[name]:
            out[f"{COPIES}.{name}"] = w.detach()
    return out


@torch.no_grad()
def _restless(trainer: Trainer, names: Collection[str]) -> list[str]:
    """Return the compute copies of weights, among the tensors `names`, that were damaged in this rank's memory, as they
    differ from fresh copies of their master weights; all ranks call it together, as shards may have to be gathered."""
    weights, wanted = trainer.weights, [n for n in names if n.startswith(f"{COPIES}.")]
    if not wanted:
        return []
    fresh = weights.fresh()
    here = [(n, n.partition(".")[2]) for n in sorted(wanted)]
    return [n for n, p in here if p in fresh and checksum(fresh[p]) != checksum(weights.compute[p])]


def _changed(state: State, before: Snapshot | None, names: Collection[str]) -> list[str]:
    """Return the tensors of the training state, among `names`, of which this rank's block differs from the snapshot
    `before` taken after the last update, and so was damaged in memory; [] without a snapshot."""
    held = {h.name: h for h in state.held}
    mine = [block for block in state.blocks() if block.name in names] if before else []
    return sorted({block.name for block in mine if before and not _same(block, held[block.name], before)})


def _same(block: Block, held: HeldTensor, before: Snapshot) -> bool:
    """Return True if this rank's live block of a training-state tensor equals its copy in the snapshot `before`, byte
    by byte; padding beyond the tensor's global shape does not count."""
    real = block.box.overlap(Box.whole(held.shape))
    if real is None:
        return True
    live = block.tensor[real.within(block.box)].cpu().contiguous().view(-1).view(torch.uint8)
    return torch.equal(live, before.read(Share(held, real)).reshape(-1))
