"""Rehearsal of training steps while a generation forms, when no step has a deadline: passes are compiled, and recorded
as graphs of the device (train.graphs)."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch

from platform.config.ramps import list_remaining_lengths, step_sample_range
from platform.plan.schedule import Action, count_in_flight
from platform.predict.memory_budget import has_room_for_graphs
from platform.runtime.compilation import CompileTrial
from platform.runtime.parallel_ops import ActivationWatch
from platform.runtime.pipeline import Accumulated, Forward, PipelineExecutor
from platform.train.pass_recorder import PassRecorder, Pools, Slot, Summed
from platform.train.stage_passes import StagePasses
from platform.train.trainer import Trainer


def rehearse_steps(trainer: Trainer, step: int) -> str:
    """Prepare training steps and evaluations of a rank from step `step` on, so that none of them waits for a compiler:
    run the passes of one microbatch on its pipeline stage alone, all ranks together, and drop their results; once for
    each length that sequences are going to have. Where any rank cannot compile something, none runs compiled from now
    on, as replicas must round alike. Return what this rank cannot compile, and why, in a line; "" for nothing."""
    passes_by_length = [trainer.passes_of_length(n) for n in list_remaining_lengths(trainer.config, step)]
    with trainer.communicator.suspend_counting():
        uncompiled = _compile_passes(trainer, step, passes_by_length) if trainer.compiles else ""
        if trainer.records:
            _record_passes(trainer, step, passes_by_length)
    return uncompiled


def _compile_passes(trainer: Trainer, step: int, passes_by_length: Sequence[StagePasses]) -> str:
    """Prepare compiled functions for passes of all lengths; return as `rehearse_steps` does."""
    trial, config = CompileTrial(), trainer.config
    row = [replace(action, paired=False) for action in trainer.stage_actions(step) if not action.microbatch]
    for trainer.passes in passes_by_length:
        ops, stage = trainer.passes.ops, trainer.passes.stage
        compiler, ops.compiler = ops.compiler, trial
        watches = [ActivationWatch(stage, trainer.communicator)] if config.monitor.layers else []
        for ops.watched in (*watches, None):
            _run_alone(trainer, step, row)
            trainer.weights.finish_reductions()
    if config.eval.every:
        first, end = step_sample_range(config.train, step)
        trainer.passes.evaluate_microbatch(trainer.rows.forward, "train", first, end, alone=True)
    failed = trainer.communicator.is_true_anywhere(bool(trial.failed))
    for passes in passes_by_length:
        passes.ops.compiler = None if failed else compiler
    trainer.compiles &= not failed
    return next(iter(trial.failed), "")


def _run_alone(trainer: Trainer, step: int, row: Sequence[Action]) -> None:
    """Run passes of a `row` of training step `step` on this pipeline stage alone."""
    trainer.run_passes(step, row, 1.0, trainer.passes.build_lone_stage)


def _record_passes(trainer: Trainer, step: int, passes_by_length: Sequence[StagePasses]) -> None:
    """Record passes of microbatches of all lengths, in memory of their own. If that fails on any rank all compute them
    as ever, since NCCL wants graphs of all ranks of a group, or raise RuntimeError under train.graphs=on."""
    asked, communicator = trainer.config.train.graphs, trainer.communicator
    is_cuda = communicator.device.type == "cuda"
    memory = torch.cuda.get_device_properties(communicator.device).total_memory if is_cuda else inf
    has_room = asked == "on" or has_room_for_graphs(trainer.config, trainer.plan, memory)
    if communicator.is_true_anywhere(not has_room):
        warnings.warn("train.graphs: memory has no room for recorded passes", stacklevel=1)
        return
    row = trainer.rows.row_of_step(trainer.plan.microbatches)
    pools = defaultdict[Slot, Any](torch.cuda.graph_pool_handle)
    for trainer.passes in passes_by_length:
        why = _record_passes_of_length(trainer, step, row, pools)
        if communicator.is_true_anywhere(bool(why)):
            trainer.passes.drop_recorder()
            why = why or "another rank cannot record its own"
            if asked == "on":
                raise RuntimeError(f"train.graphs=on: {why}")
            warnings.warn(f"train.graphs: passes are not recorded: {why}", stacklevel=1)
            for flat in trainer.weights.trained:
                flat.drop_sums()
        trainer.weights.finish_reductions()


def _run_first_passes(trainer: Trainer, step: int, row: Sequence[Action]) -> Summed:
    """Run what two microbatches of a `row` of training step `step` do, all ranks together: it makes what all passes
    share, and loads kernels. Return by kind of backward pass the parameters whose gradients it is the first to sum."""
    summed, known = Summed(), set[str]()

    def build_watched_stage(forward: Forward, accumulated: Accumulated) -> PipelineExecutor:
        """Construct an executor that notes what each backward pass of the first microbatch sums."""

        def note_backward(action: Action, done: int | None) -> None:
            """Note what a backward action has summed; `done`: the chunk it ends."""
            accumulated(action, done)
            names = [flat.summed - known for flat in trainer.weights.trained]
            if not action.microbatch:
                summed[action.chunk, action.kind] = names
            known.update(*names)

        return trainer.passes.build_lone_stage(forward, note_backward)

    trainer.run_passes(step, [a for a in row if a.microbatch < 2], 1.0, build_watched_stage)
    trainer.weights.finish_reductions()
    return summed


def _record_passes_of_length(trainer: Trainer, step: int, row: Sequence[Action], pools: Pools) -> str:
    """Record passes in a `row` of training step `step` over sequences of the present length; return why that fails.
    Recording runs no collective, in which others might not take part."""
    recorded, passes, weights = trainer.list_recorded_microbatches(row), trainer.passes, trainer.weights
    summed = _run_first_passes(trainer, step, row)
    for (chunk, _), names in summed.items() if recorded[0] else ():
        weights.note_replayed_gradients(chunk, names)  # of the microbatch before
    slots = count_in_flight(row)
    passes.recorder = PassRecorder(trainer.communicator, passes.ops, weights, slots, summed, pools)

    def build_recorded_stage(forward: Forward, accumulated: Accumulated) -> PipelineExecutor:
        """Construct an executor of which no pass is the last one, behind which gradients are reduced."""
        return passes.build_lone_stage(forward, lambda action, _: accumulated(action, None))

    try:
        with passes.recorder.record_new_passes():
            distinct = recorded[: 1 + max(slots.values())]  # the first one has graphs of its own
            recordable = [a for a in row if a.microbatch in distinct]
            trainer.run_passes(step, recordable, 1.0, build_recorded_stage, recorded)
    except Exception as error:
        passes.ops.ahead.begin_pass()  # forgets what the pass has begun
        return str(error) or type(error).__name__
    return ""
