"""What a rank holds against what the plan, its checkpoints and its snapshots say that it holds."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from platform.checkpoint.blocks import Box, join_chains, list_written_parts
from platform.plan.model_types import NF4_UNITS
from platform.plan.plan import Plan
from platform.predict.footprint import weight_bytes
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState


def check_held(trainer: Trainer) -> None:
    """Compare the shards of one rank's trainer with those of the whole plan, which all ranks and the driver read.

    Raises AssertionError naming what differs.
    """
    plan, communicator, state = trainer.plan, trainer.communicator, RankTrainingState(trainer)
    rank, at, weights = communicator.rank, communicator.coordinates, trainer.weights
    for p in plan.parameters:
        start, stop = plan.shard_range(p, at) if plan.has_block(p, at) else (0, 0)
        have = elements_of(weights.master[p.name]) if p.name in weights.master else 0
        assert have == stop - start, f"rank {rank} holds {have} elements of {p.name}, planned are {start} to {stop}"
    buckets = [flat for flat in weights.buckets if flat.here]
    masters = sum(flat.masters.numel() for flat in buckets if not flat.bucket.frozen)
    kept = sum(elements_of(flat.part) * (1 if flat.bucket.frees_weights else flat.bucket.shards) for flat in buckets)
    frozen = sum(elements_of(w) for name, w in weights.own_masters.items() if name in plan.frozen)
    counted = masters, kept, frozen
    planned = (
        plan.count_masters_of_rank(at),
        plan.count_parameters_of_rank(at),
        plan.count_masters_of_parameters(plan.frozen, at),
    )
    assert counted == planned, f"rank {rank} holds (masters, copies, frozen) {counted}, planned are {planned}"
    blocks, boxes = state.live_blocks(), defaultdict[str, list[Box]](list)
    for name, box, _ in blocks:
        boxes[name].append(box)
    for held in state.held:
        live, whole = boxes.pop(held.name, []), Box.whole_tensor(held.shape)
        real = [cut for box in live if (cut := box.intersect_box(whole))]  # of a padded vocab
        said = [box for box, ranks in held.holders.items() if rank in ranks]
        assert sorted(real) == sorted(said), f"rank {rank} holds other blocks of {held.name} than the plan says"
    assert not boxes, f"rank {rank} holds {sorted(boxes)}, which the plan does not know"
    parts = [part for chain in join_chains(state.held, rank) for part in chain.blocks]
    blocks.view_stretches(
        [(part, 0, 0) for part in (*parts, *list_written_parts(state.held, rank))]
    )  # a snapshot's and a checkpoint's


def check_kept_parameters(trainer: Trainer, unit: int) -> None:
    """Compare the bytes that one rank keeps of parameters between uses with the plan's, of which so many elements, a
    `unit` of NF4_UNITS, are together in 4 bits.

    Raises AssertionError.
    """
    check_held(trainer)
    buckets = [flat for flat in trainer.weights.buckets if flat.here]
    kept = sum(flat.masters.nbytes for flat in buckets)  # masters, and what is frozen
    kept += sum(flat._whole.untyped_storage().nbytes() for flat in buckets if flat._whole is not flat.masters)
    kept += sum(flat.part.nbytes for flat in buckets if flat.bucket.zero == 3 and not flat.bucket.frozen)
    assert kept == weight_bytes(trainer.plan, 0, trainer.communicator.coordinates)["parameters"]
    in_4_bits = [flat for flat in buckets if flat.bucket.quantised]
    assert all(flat.masters.nbytes * unit == flat.bucket.shard_elements * NF4_UNITS[unit] for flat in in_4_bits)


def elements_of(w: Tensor) -> int:
    """How many elements of a parameter there are, perhaps in 4 bits."""
    units = {nbytes: elements for elements, nbytes in NF4_UNITS.items()}
    return len(w) * units[w.shape[-1]] if w.dtype == torch.uint8 and w.numel() else w.numel()


def check_stages(plan: Plan) -> None:
    """Compare what is computed for each stage's part of a plan with the same of the whole.

    Raises AssertionError naming what differs.
    """
    for stage in range(plan.num_stages):
        part, names = plan.stage_part(stage), {p.name for p in plan.stage_part(stage).parameters}
        expected = {b for b in plan.buckets if names & b.parameter_ranges.keys()}
        assert set(part.buckets) == expected and len(part.buckets) == len(expected), f"buckets of stage {stage}"
        for number, spans in part.buckets_by_chunk_span.items():
            assert list(map(set, spans)) == list(map(set, plan.buckets_by_chunk_span[number])), (
                f"spans of chunk {number}"
            )
        assert part.stages_of_tied_parameters == {
            name: stages for name, stages in plan.stages_of_tied_parameters.items() if name in names
        }, f"tied at {stage}"
        assert part.operations.items() <= plan.operations.items(), f"operations of stage {stage}"
        for name, readers in part.reader_layouts.items():
            assert readers.items() <= plan.reader_layouts[name].items(), f"readers of {name} at stage {stage}"
