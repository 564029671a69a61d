"""What a rank holds against what the plan, its checkpoints and its snapshots say that it holds."""

from __future__ import annotations

from collections import defaultdict

from platform.checkpoint.blocks import Box, chains_of, shares
from platform.plan.plan import Plan
from platform.train.trainer import Trainer
from platform.train.training_state import State


def check_held(trainer: Trainer) -> None:
    """Compare the shards of one rank's trainer with those of the whole plan, which all ranks and the driver read.

    Raises AssertionError naming what differs.
    """
    plan, communicator, state = trainer.plan, trainer.communicator, State(trainer)
    rank, at, weights = communicator.rank, communicator.coordinates, trainer.weights
    for p in plan.parameters:
        start, stop = plan.shard_range(p, at) if plan.present(p, at) else (0, 0)
        have = weights.master[p.name].numel() if p.name in weights.master else 0
        assert have == stop - start, f"rank {rank} holds {have} elements of {p.name}, planned are {start} to {stop}"
    here = [flat for flat in weights.buckets if flat.here]
    masters = sum(flat.masters.numel() for flat in here)
    kept = sum(flat.part.numel() * (1 if flat.bucket.stored else flat.bucket.shards) for flat in here)
    frozen = sum(w.numel() for name, w in weights.owned.items() if name in plan.frozen)
    counted = masters, kept, frozen
    planned = plan.masters_at(at), plan.parameters_at(at), plan.masters_of(plan.frozen, at)
    assert counted == planned, f"rank {rank} holds (masters, copies, frozen) {counted}, planned are {planned}"
    blocks, boxes = state.blocks(), defaultdict[str, list[Box]](list)
    for name, box, _ in blocks:
        boxes[name].append(box)
    for held in state.held:
        found, whole = boxes.pop(held.name, []), Box.whole(held.shape)
        real = [cut for box in found if (cut := box.overlap(whole))]  # of a padded vocab
        said = [box for box, ranks in held.holders.items() if rank in ranks]
        assert sorted(real) == sorted(said), f"rank {rank} holds other blocks of {held.name} than the plan says"
    assert not boxes, f"rank {rank} holds {sorted(boxes)}, which the plan does not know"
    parts = [part for chain in chains_of(state.held, rank) for part in chain.blocks]
    blocks.parts([(part, 0, 0) for part in (*parts, *shares(state.held, rank))])  # a snapshot's and a checkpoint's


def check_stages(plan: Plan) -> None:
    """Compare what is computed for each stage's part of a plan with the same of the whole.

    Raises AssertionError naming what differs.
    """
    for stage in range(plan.stages):
        part, names = plan.at(stage), {p.name for p in plan.at(stage).parameters}
        here = {b for b in plan.buckets if names & b.ranges.keys()}
        assert set(part.buckets) == here and len(part.buckets) == len(here), f"buckets of stage {stage}"
        for number, spans in part.resident.items():
            assert list(map(set, spans)) == list(map(set, plan.resident[number])), f"spans of chunk {number}"
        assert part.tied == {name: stages for name, stages in plan.tied.items() if name in names}, f"tied at {stage}"
        assert part.operations.items() <= plan.operations.items(), f"operations of stage {stage}"
        for name, readers in part.readers.items():
            assert readers.items() <= plan.readers[name].items(), f"readers of {name} at stage {stage}"
