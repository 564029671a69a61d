"""Rank: its part of a model, built from a plan in one function, from its weights to its optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from platform.config.fields import Config
from platform.config.ramps import fix_sequence_length
from platform.model import build_model
from platform.model.losses import loss_functions
from platform.optimizer.optimizers import (
    OPTIMIZERS,
    build_idle_group,
    build_optimizer,
    group_parameters,
    is_piecewise,
)
from platform.optimizer.stored_states import PiecewiseOptimizer
from platform.optimizer.update_rules import Adafactor, Muon
from platform.plan.plan import Plan
from platform.runtime.communicator import Communicator
from platform.runtime.matrices import AdafactorSums, MuonMatrices
from platform.runtime.normal_floats import QuantisedBucket
from platform.runtime.parallel_ops import ParallelOps
from platform.runtime.tiled_gathers import TiledBucket
from platform.train.rank_parameters import DTYPES, RankWeights


class Rank(NamedTuple):
    """Part of a model on the rank of `communicator`: `model.forward(ops, inputs)` is its forward pass. `stage`: the
    plan of its pipeline stage."""

    stage: Plan
    communicator: Communicator
    weights: RankWeights
    model: Any
    ops: ParallelOps
    optimizer: torch.optim.Optimizer


def build_rank(
    config: Config,
    plan: Plan,
    communicator: Communicator,
    *,
    fresh: bool = True,
    compiles: bool = False,
    shared: Rank | None = None,
) -> Rank:
    """Build a rank's part of a model under `plan`. `communicator`: its process groups, along the axes of the plan's
    mesh; `fresh`: True gives the weights their initial values; False leaves them undefined until they are restored;
    `compiles`: True if the run compiles; `shared`: the same rank under the plan of another length of sequences, whose
    weights and optimizer it has."""
    overlap = config.parallel.overlap
    # The chunks of its pipeline stage: `PipelineExecutor` runs them in the order of the schedule's row.
    stage = plan.stage_part(communicator.coordinates["stage"])
    # Weights: blocks, or ZeRO shards of these, in flat buckets, which also add up gradients and reduce them over ranks.
    # What adapters are of is never restored with them, and they begin beside weights that are read.
    seed = config.seed if fresh or plan.adapters else None
    reads = bool(plan.adapters) and config.train.init not in ("", "random")
    weights = shared.weights if shared else RankWeights(stage, communicator, seed, overlap, reads)
    if config.train.ema and not shared:
        weights.begin_averages()
    # Operations: the model calls them on whole tensors, and they compute on blocks and communicate as the plan says;
    # regions of them are compiled, and computed again in the backward pass where the plan's `recompute` says so.
    model = build_model(fix_sequence_length(config, plan.sizes["length"]).model)
    ops = ParallelOps(stage, communicator, weights.forward_tensors, config.model.dropout, compiles, overlap)
    ops.residency, ops.losses = weights.residency, loss_functions(config)  # ZeRO shards are gathered around a pass
    for flat in weights.buckets:
        if isinstance(flat, QuantisedBucket | TiledBucket):
            flat.compile_function = ops.compile_function
    if shared:
        return shared._replace(stage=stage, model=model, ops=ops)
    # Optimizer of the master weights without frozen ones, with weight decay for the parameters that the model marks.
    o, named = config.optimizer, (set(stage.matrices), stage.scaled)
    groups = group_parameters(o, stage.parameters, weights.trainable_masters, *named)
    if OPTIMIZERS[o.kind].divides or is_piecewise(o):
        groups = weights.join_adjacent_parameters(groups)
    # A rank may train nothing, as a shard may be all padding. It counts updates too: others may not survive it.
    groups = groups or [build_idle_group(DTYPES[plan.precision][1], communicator.device)]
    optimizer = PiecewiseOptimizer(groups, o, weights.updated_halves) if is_piecewise(o) else build_optimizer(groups, o)
    if isinstance(optimizer, Muon):
        optimizer.matrices = MuonMatrices(stage, communicator, weights.buckets)
    if stage.factored and isinstance(optimizer, Adafactor):
        optimizer.factors = AdafactorSums(stage, communicator)
    return Rank(stage, communicator, weights, model, ops, optimizer)
