"""Training step of one rank: forward and backward passes of the microbatches, gradient reduction, clipping, update."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from math import inf, isfinite, nan, sqrt
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from platform.config.fields import Config, training_loss_name
from platform.config.ramps import find_sequence_length, step_sample_range
from platform.data.corpus import Corpus
from platform.model.layers import Activations
from platform.optimizer.learning_rate import learning_rate
from platform.optimizer.optimizers import (
    divides_gradients,
    reason_against_early_update,
    reason_against_passes_ahead,
)
from platform.plan.chunks import Chunk
from platform.plan.model_types import STATES
from platform.plan.plan import Plan
from platform.plan.schedule import Action, Kind
from platform.plan.scheme import lent_by_layer
from platform.plan.simulate import StageRows
from platform.plan.step_collectives import counts_at, grad_norm_slices
from platform.predict.recorded_passes import list_recorded_microbatches, reason_against_graphs
from platform.runtime import flat_buffers
from platform.runtime.chunked_loss import PairLoss
from platform.runtime.clock import ClockReading, SectionClock
from platform.runtime.communicator import Communicator
from platform.runtime.einsum import Deferred
from platform.runtime.expert_rows import update_router_states
from platform.runtime.parallel_ops import ActivationWatch, ParallelOps, PassPosition, gradient_squares, is_due
from platform.runtime.pipeline import sum_tied_gradients
from platform.runtime.progress import PROGRESS
from platform.runtime.teacher_loss import Distillation
from platform.train.faults import Fault, arm_fault, flip_bit
from platform.train.rank_model import build_rank
from platform.train.rank_parameters import DTYPES, LossScale
from platform.train.replies import CollectiveSpan, Differences, RankTimeline, SectionSpan, StepReport
from platform.train.stage_passes import PipelineOf, StagePasses, compute_loss_divisor, refuse_missing_labels

TIMED = ("data", "forward", "backward", "exposed_comm", "bubble", "reduce", "optimizer", "checkpoint")  # by the clock
Verify = Callable[[], Differences]  # compares replicas, on all ranks together
LOOKED_UP = 1 << 22  # labels that every rank counts from an index, in a millisecond or two, rather than sum up shares
SECTIONS = (*TIMED, "other")  # which is the rank's time in a step outside of all these


class Outcome(NamedTuple):
    """Numbers of a training step, by which all ranks alike update or not. `limit`: the most that the loss may be."""

    loss: float
    norm: float
    limit: float
    differences: Differences = Differences()

    @property
    def skips(self) -> bool:
        """Return True if the training step must change no weight."""
        is_fine = isfinite(self.loss) and isfinite(self.norm) and self.loss <= self.limit
        return bool(self.differences) or not is_fine


class StepSums(NamedTuple):
    """Sums of a step over all ranks, which the device may not have computed yet. `shared`: loss and squared gradient
    norm, then by depth losses of multi-token prediction of so many `labels`, and loads of the `lending_layers`;
    `counts`: this rank's counts of experts' tokens."""

    shared: Tensor
    counts: Sequence[Tensor]
    lending_layers: Sequence[str]
    labels: Sequence[float]


class PassesAhead(NamedTuple):
    """Passes of training step `step`, launched before its order came. `take` returns this rank's loss and the divisor
    of the global sum, or raises what went wrong in them."""

    step: int
    take: Callable[[], tuple[Tensor, float]]


class Trainer:
    """Executes the training steps of a plan on the rank of `communicator`, whose pipeline stage runs the schedule's
    `rows`.

    `fresh`: the weights get their initial values; if False they are undefined until they are restored.
    `settle` is called in each step before its sums are read, and so before any rank updates its weights; `note_update`
    behind an update, where passes of the next step follow at once.
    `peak_live`: most forward passes of chunks whose activations were alive at once in the last step. `loss_scale`: that
    of the next step, None unless the plan computes in fp16. `aligned`: each step begins with a barrier, which this rank
    `left` last at that time, in nanoseconds since the epoch, after `aligning` seconds.
    """

    peak_live = left = 0
    aligning = 0.0
    _ahead: PassesAhead | None = None  # of the next step
    _counted_ahead: tuple[int, Sequence[float]] = (0, ())  # a step, and what `_count_labels` returns of it
    _poison = 0.0  # added to this rank's part of the squared gradient norm, NaN under the fault `nan`
    _routed: Sequence[int] = ()  # tokens of experts on this rank in the last step, see `StepReport`
    _losses_ahead: Sequence[float] = ()  # of the last step, means by depth of multi-token prediction
    _loads: Mapping[str, Tensor] = {}  # of the last step: layer -> tokens of all ranks that chose each expert

    def __init__(
        self,
        config: Config,
        plan: Plan,
        communicator: Communicator,
        corpus: Corpus,
        rows: StageRows,
        fresh: bool = True,
    ):
        """Build this rank's model, weights and optimizer for training steps. `rows`: the pipeline schedule of its
        stage; `fresh`: True gives the weights their initial values; False leaves them undefined until they are
        restored."""
        self.config, self.plan, self.communicator, self.corpus = config, plan, communicator, corpus
        self.settle: Callable[[], None] = lambda: None
        self.note_update: Callable[[], None] = lambda: None
        self.compiles = config.train.compile == "on"  # the driver has settled auto
        self._rank = build_rank(config, plan, communicator, fresh=fresh, compiles=self.compiles)
        self.rows, self.stage, self.weights = rows, self._rank.stage, self._rank.weights
        self.optimizer = self._rank.optimizer
        self._counted = grad_norm_slices(self.stage, communicator.coordinates)
        self._divides = divides_gradients(config.optimizer) and DTYPES[plan.precision][1] == torch.float32
        is_host = communicator.device.type == "cpu"  # which launches nothing
        self.updates_early = not is_host and not reason_against_early_update(config)
        self.runs_ahead = self.updates_early and not reason_against_passes_ahead(config, plan)
        self.records = not reason_against_graphs(config, plan, communicator.device.type)
        self.loss_scale = LossScale(config.loss_scale.initial) if plan.precision == "fp16" else None
        self.aligned = config.monitor.timeline
        self.clock = communicator.clock = SectionClock(communicator.device, detailed=self.aligned)
        self._of_lengths: dict[int, StagePasses] = {}
        self._labels_ahead = [1.0] * config.model.predict_ahead  # of the current step, by depth
        self._factors_ahead = [1.0] * config.model.predict_ahead  # of their losses' sums
        self.passes = self.passes_of_length(config.model.length)  # of the current step

    def passes_of_length(self, length: int) -> StagePasses:
        """Return the passes of this rank over training sequences of `length` tokens."""
        if (passes := self._of_lengths.get(length)) is None:
            plan, rank = self.plan.plan_of_length(length), self._rank
            if plan is not self.plan:
                rank = build_rank(self.config, plan, self.communicator, compiles=self.compiles, shared=rank)
            passes = self._of_lengths[length] = StagePasses(self.config, plan, rank, self.corpus)
        return passes

    def passes_of_step(self, step: int) -> StagePasses:
        """Return the passes of this rank over sequences of training step `step`."""
        return self.passes_of_length(find_sequence_length(self.config, step))

    def enter_step(self, step: int) -> StagePasses:
        """Make the passes over sequences of training step `step` current, and return them; drop shorter ones."""
        length = find_sequence_length(self.config, step)
        for shorter in [n for n in self._of_lengths if n < length]:
            self._of_lengths.pop(shorter).drop_recorder()
        self.passes = self.passes_of_step(step)
        return self.passes

    def drop_recorders(self) -> None:
        """Drop the graphs of all recorded passes, for which the end of process groups would wait."""
        for passes in self._of_lengths.values():
            passes.drop_recorder()

    @property
    def ops(self) -> ParallelOps:
        """Return the executor of the current training step's operations on this rank."""
        return self.passes.ops

    def step(
        self, step: int, limit: float = inf, fault: Fault | None = None, verify: Verify | None = None, then: int = 0
    ) -> StepReport:
        """Run training step `step` (from 1) and return this rank's report, which `ReportCombiner` aggregates.

        If the loss or gradient norm is not finite, or the loss is above `limit`, nothing is updated and the report's
        `skipped` is true, alike on all ranks, because both numbers are global; `overflowed` too where that is due to
        the loss scale, which then falls. `fault`: one to be injected in this rank. `verify` compares replicas before
        the update, on all ranks: if it finds differences they are added to the report, and nothing is updated. `then`:
        the step whose passes are launched before this one's numbers are read, if its update was; 0: none.
        """
        plan, communicator, clock = self.plan, self.communicator, self.clock
        self._begin_step(step, fault)
        with clock.time_section("step"):
            lr = learning_rate(self.config.optimizer, step, self.config.train.steps)
            sums, share = self._reduce_gradients(step)
            passes, watched = self.passes, self.ops.watched
            sizes = gradient_squares(self.stage, communicator, self.weights.gradients) if watched else {}
            read_numbers = self._start_reading(sums, share)
            if early := self.updates_early and verify is None:
                with clock.time_section("optimizer"):
                    self._update_unless_skipped(sums.shared, share, lr, limit)
            else:
                outcome = self._update_after_reading(step, read_numbers, lr, limit, verify)
        moved, read_clock = dict(communicator.moved), clock.end_reading()
        if early:
            if then:
                self._launch_passes_ahead(then)
            self._count_labels_ahead(then or step)
            outcome = Outcome(*read_numbers(), limit)
        loss, norm, _, differences = outcome
        if skipped := outcome.skips:
            self.weights.drop_gradients()
        scale, overflowed = self.loss_scale, not differences and self._update_loss_scale(loss, norm, skipped)
        samples, reading = step_sample_range(self.config.train, step), read_clock()
        return StepReport(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            skipped=skipped,
            overflowed=overflowed,
            loss_scale=scale.scale if scale else None,
            tokens=samples[1] * plan.sizes["length"],
            samples=samples,
            **_clock_times(reading),
            comm_bytes=moved,
            peak_memory_bytes=read_peak_memory(communicator.device),
            world_size=plan.mesh.world_size,
            slow=[],
            differences=differences,
            layer_gradients={name: float(x) / (scale.scale**2 if scale else 1) for name, x in sizes.items()},
            layer_activations={n: float(x) / passes.pieces for n, x in watched.sums.items()} if watched else {},
            routed=list(self._routed),
            losses_ahead=list(self._losses_ahead),
            timeline=_build_timeline(reading) if self.clock.detailed else RankTimeline(),
        )

    def _begin_step(self, step: int, fault: Fault | None) -> None:
        """Begin training step `step`, with the passes that were launched ahead if they are its own, and inject a
        `fault` into this rank."""
        if self._ahead and self._ahead.step == step:
            self.aligning = 0.0
        else:
            self.drop_passes_ahead()
            self.communicator.moved.clear()
            self._align_clocks()
        self._poison = nan if fault and fault.kind == "nan" else 0.0
        if fault and fault.kind == "flip":
            self.weights.wait_for_gathers()
            flip_bit(self.weights.stored_masters if self.plan.frees_weights else self.weights.compute)
        self.clock.entered = arm_fault(fault) if fault and fault.kind not in ("nan", "flip") else None

    def _update_after_reading(
        self,
        step: int,
        read_numbers: Callable[[], tuple[float, float]],
        lr: float,
        limit: float,
        verify: Verify | None,
    ) -> Outcome:
        """Read a training step's numbers, `verify` replicas, and update the weights if both allow it."""
        self._count_labels_ahead(step)
        with self.clock.time_section("reduce"):
            numbers = read_numbers()
            outcome = Outcome(*numbers, limit, verify() if verify else Differences())
        if not outcome.skips:
            with self.clock.time_section("optimizer"):
                self._update_weights(outcome.norm, lr)
        return outcome

    def _launch_passes_ahead(self, step: int) -> None:
        """Launch the passes of training step `step` before its order comes, at which what goes wrong is raised."""
        self.note_update()
        self.communicator.moved.clear()
        try:
            launched = self._run_forward_backward(step)
            self._ahead = PassesAhead(step, lambda: launched)
        except Exception as error:
            self._ahead = PassesAhead(step, partial(_raise_error, error))

    def drop_passes_ahead(self) -> None:
        """Drop the results of passes that were launched ahead, if any, on all ranks: other work comes first."""
        ahead, self._ahead = self._ahead, None
        if ahead:
            ahead.take()
            self.weights.finish_reductions()
            self.clock.take_section_times()

    def _count_labels_ahead(self, step: int) -> None:
        """Count the labels of the training step after `step`, while the device works on this one's."""
        with suppress(Exception):  # raised again at the step's turn
            if step < self.config.train.steps and isfinite(sum(counts := self._count_labels(step + 1))):
                self._counted_ahead = step + 1, counts

    def _count_labels(self, step: int) -> Sequence[float]:
        """Return the divisor of the loss of a training step's global batch, and its labels by depth of multi-token
        prediction, perhaps counted ahead. Raises ConfigError if no label counts."""
        if self._counted_ahead[0] == step:
            return self._counted_ahead[1]
        samples, passes = step_sample_range(self.config.train, step), self.passes_of_step(step)

        def count_share(first: int, end: int) -> list[float]:
            """Count the labels of training samples [first, end)."""
            divisor = compute_loss_divisor(self.plan, self.corpus, first, end)
            return [divisor, *passes.count_labels_ahead("train", first, end)]

        size = 1 + self.config.model.predict_ahead
        counts = self._sum_shares(count_share, *samples, size, passes.counts_by_reading)
        return counts if counts[0] else refuse_missing_labels(self.corpus, *samples)

    def _sum_shares(
        self, count: Callable[[int, int], Sequence[float]], first: int, end: int, size: int, reads: bool
    ) -> Sequence[float]:
        """Return the sums over all ranks, which call it together, of the `size` numbers that `count` says of a rank's
        share of samples [first, end): so none `reads` all, or looks up very many. NaN where another rank fails."""
        if not reads and (end - first) * self.config.model.length <= LOOKED_UP:
            with self.clock.time_section("data"):
                return count(first, end)
        rank, world = self.communicator.rank, self.plan.mesh.world_size
        start, stop = (first + (end - first) * i // world for i in (rank, rank + 1))
        try:
            with self.clock.time_section("data"):
                counts = count(start, stop) if start < stop else [0.0] * size
        except Exception:
            self.communicator.sum_numbers([nan] * size)  # in which the others are
            raise
        with self.clock.time_section("reduce"):
            return self.communicator.sum_numbers(counts)

    def _align_clocks(self) -> None:
        """Start this rank's clock of a training step, together with all others' if they are `aligned`."""
        before = time.perf_counter()
        if self.aligned:
            self.communicator.barrier()
            self.left = time.time_ns()
        self.aligning = time.perf_counter() - before
        self.clock.take_section_times()

    def _update_loss_scale(self, loss: float, norm: float, skipped: bool) -> bool:
        """Set the next step's fp16 loss scale, if any; return True if it was too large in this one."""
        scale, rules = self.loss_scale, self.config.loss_scale
        overflowed = scale is not None and scale.has_overflowed(loss, norm, rules)
        if scale and (overflowed or not skipped):
            self.loss_scale = scale.scale_after_overflow(rules) if overflowed else scale.scale_after_update(rules)
        return overflowed

    def compute_gradients(self, step: int) -> tuple[float, float]:
        """Compute this rank's part of the gradient of the global mean loss in training step `step` into
        `weights.gradients`: reduced over the ranks, but not yet clipped, and times the loss scale. Return the loss and
        the whole gradient's 2-norm, both global and without the loss scale."""
        sums, share = self._reduce_gradients(step)
        with self.clock.time_section("reduce"):
            return self._start_reading(sums, share)()

    def _reduce_gradients(self, step: int) -> tuple[StepSums, float]:
        """Compute and reduce this rank's gradients of training step `step` into `weights.gradients`; return the step's
        sums over all ranks, which the device may not have yet, and the divisor of the loss."""
        ahead, self._ahead = self._ahead, None
        loss, share = ahead.take() if ahead else self._run_forward_backward(step)
        with self.clock.time_section("reduce"):
            reduced = self.weights.finish_reductions()
            sum_tied_gradients(self.stage, self.communicator, reduced)
            self.weights.set_gradients(reduced)
            squares = flat_buffers.local_squared_norm(self.communicator, self._counted, reduced)
            self.settle()
            return self._sum_over_world(loss, squares + self._poison, counted=True), share

    def _start_reading(self, sums: StepSums, share: float) -> Callable[[], tuple[float, float]]:
        """Start reading a step's sums; return a function that waits for them, not for later work, and returns the
        step's global loss, a sum divided by `share`, and the gradient's 2-norm."""
        read_sums, factor = self._start_reading_sums(sums), self._loss_factor

        def read_numbers() -> tuple[float, float]:
            """Return the step's loss and norm when the device has them."""
            total, square, *routed = read_sums()
            self._routed = list(map(int, routed))
            return total / share, sqrt(square) / factor

        return read_numbers

    def _run_forward_backward(self, step: int) -> tuple[Tensor, float]:
        """Run training step `step`'s passes; return this rank's summed loss and the divisor of the global sum."""
        model = self.config.model
        share, *labels = self._count_labels(step)
        passes = self.enter_step(step)
        is_watched = is_due(self.config.monitor.layers, step)
        passes.ops.watched = ActivationWatch(passes.stage, self.communicator) if is_watched else None
        for counts in passes.ops.routed.values():
            counts.zero_()
        self._labels_ahead = labels
        weight = model.predict_ahead_weight / max(1, model.predict_ahead)
        self._factors_ahead = [weight * share / max(1, n) for n in self._labels_ahead]  # each loss is a mean
        row = self.stage_actions(step)
        recorded = self.list_recorded_microbatches(row) if passes.recorder else ()
        return self.run_passes(step, row, share, passes.build_pipeline, recorded), share

    def stage_actions(self, step: int) -> Sequence[Action]:
        """Return the actions of this pipeline stage, in order, for the microbatches of training step `step`."""
        first, end = step_sample_range(self.config.train, step)
        return self.rows.row_of_step(-(-(end - first) // self.plan.sizes["batch"]))

    def run_passes(
        self, step: int, row: Sequence[Action], loss_divisor: float, build: PipelineOf, recorded: Sequence[int] = ()
    ) -> Tensor:
        """Run the forward and backward passes of the schedule's `row` on microbatches of training step `step`, and
        accumulate this rank's gradient of the global mean loss, whose reduction overlaps the passes. Return its summed
        loss (fp64 scalar). `loss_divisor`: the divisor of the global batch's loss; `build`: constructor of the row's
        executor; `recorded`: microbatches whose passes are recorded, alike on all ranks."""
        passes, ops = self.passes, self.passes.ops
        first, end = (passes.pieces * n for n in step_sample_range(self.config.train, step))
        total, divisor = passes.total.zero_(), passes.divisor.fill_(loss_divisor / self._loss_factor)
        batch, chunks = passes.batch, {chunk.number: chunk for chunk in passes.stage.chunks}
        is_unsplit = all(a.kind is not Kind.WEIGHT for a in row)
        last = {a.chunk: a.microbatch for a in row if is_unsplit and a.kind is Kind.BACKWARD}
        reduces_early = is_unsplit and not any(m in recorded for m in last.values())  # reductions are not
        ops.losses_ahead = {}

        def enter_microbatch(m: int) -> None:
            """Make microbatch `m` of the training step the one that passes compute."""
            ops.position = PassPosition(self.config.seed, step, m * batch, ahead=self._factors_ahead)
            if ops.watched:
                ops.watched.sequences = max(0, end - first - m * batch)

        def forward(chunk: Chunk, m: int, flow: Activations, deferred: Deferred | None) -> Activations:
            """Run a model chunk's forward pass on microbatch `m` of the training step, adding up the loss, and return
            its output."""
            ops.deferred = deferred
            if not passes.is_recording:
                enter_microbatch(m)
            out = passes.run_chunk(chunk, flow, "train", first + m * batch, end)
            if reduces_early and last.get(chunk.number) == m:
                for y in out.values():
                    y.register_hook(lambda _: self.weights.note_last_backward(chunk.number))
            if "loss" in out:
                total.add_(out["loss"].detach())
                out = {"loss": out["loss"] / divisor}
            return out

        def note_backward(action: Action, done: int | None) -> None:
            """Note in the weights that a backward action has added its gradients; `done`: the chunk it ends."""
            self.weights.note_backward_end(action.chunk, done is not None, action.kind is not Kind.INPUT)

        def begin_recorded_pass(chunk: int, m: int) -> None:
            """Load the data of microbatch `m` of the training step, of which a recorded pass computes a chunk."""
            enter_microbatch(m)
            passes.begin_chunk(chunks[chunk], "train", first + m * batch, end)

        self.weights.begin_step(is_unsplit)
        pipeline = build(forward, note_backward)
        pipeline.swap_state = ops.swap_pass_state
        if recorded and passes.recorder:
            pipeline.run_pass = partial(passes.recorder.run_pass, recorded, begin_recorded_pass)
        pipeline.run_row(row)
        self.peak_live = pipeline.peak_live
        return total

    def list_recorded_microbatches(self, row: Sequence[Action]) -> Sequence[int]:
        """Return the microbatches of a schedule's `row` whose passes are recorded, alike on all ranks."""
        if not self.records or self.ops.watched:
            return ()
        return list_recorded_microbatches(self.stage, self.config.parallel.overlap, 1 + max(a.microbatch for a in row))

    @property
    def _loss_factor(self) -> float:
        """Return the factor on the loss before a training step's backward pass: the fp16 loss scale, else 1."""
        return self.loss_scale.scale if self.loss_scale else 1.0

    def _sum_over_world(self, loss: Tensor, squares: Tensor, counted: bool = False) -> StepSums:
        """Sum this rank's loss (fp64 scalar) and `squares`, its part of the squared gradient norm, over all ranks;
        return both, and of a training step with `counted` tokens of experts this rank's counts of all layers. The loads
        of balanced layers are summed into `_loads`."""
        labels = self._labels_ahead if counted else []
        depths = range(1, len(labels) + 1)
        losses = [loss, *(self.ops.losses_ahead.get(k, torch.zeros_like(loss)) for k in depths)]
        if not counts_at(self.communicator.coordinates, self.plan.loss_layout.axes):
            losses = [torch.zeros_like(loss)] * len(losses)
        sums = torch.stack((losses[0], squares, *losses[1:]))
        routed_counts = list(self.ops.routed.values()) if counted else []
        if loads := self.plan.load_dependent_routes if counted else {}:
            none = torch.zeros(2, self.plan.sizes["experts"], dtype=torch.int64, device=sums.device)
            sums = torch.cat((sums, *(self.ops.routed.get(name, none)[0] for name in loads)))
        if world := self.plan.mesh.order_axes(self.plan.mesh.axes):
            sums = self.communicator.launch("all_reduce", sums, world).wait()
        end = 2 + len(labels)
        self._loads = dict(zip(loads, sums[end:].view(len(loads), -1), strict=True)) if loads else {}
        counts = [sum(routed_counts[1:], routed_counts[0]).flatten()] if routed_counts else []
        lends = bool(loads and self.plan.scheme.lent)
        return StepSums(sums[: len(sums) if lends else end], counts, list(loads) if lends else [], labels)

    def _start_reading_sums(self, sums: StepSums) -> Callable[[], list[float]]:
        """Start reading a step's sums; return a function that waits for them and returns them without the loads, by
        which experts are lent from then on."""
        shared, counts, lending_layers, labels = sums
        read = self.communicator.start_reading(torch.cat([shared, *counts]) if counts else shared)

        def read_sums() -> list[float]:
            """Return the step's sums when the device has them."""
            totals, end = read(), 2 + len(labels)
            if lending_layers:
                loads = totals[end : len(shared)]
                self.communicator.lent = lent_by_layer(lending_layers, loads, self.plan.scheme)
            self._losses_ahead = [total / max(1, n) for total, n in zip(totals[2:end], labels, strict=True)]
            return totals[:2] + totals[len(shared) :]

        return read_sums

    def _update_unless_skipped(self, sums: Tensor, share: float, lr: float, limit: float) -> None:
        """Launch the update before the host knows the step's `sums`; the device skips it as `step` says."""
        loss = sums[0] / share + 0 * sums[:2].sum()  # NaN if either is not finite
        norm, skipped = sums[1].sqrt(), (loss <= limit).logical_not().float()
        self._update_weights(norm if self._loss_factor == 1 else norm / self._loss_factor, lr, skipped)

    def _update_weights(self, norm: float | Tensor, lr: float, skipped: Tensor | None = None) -> None:
        """Update this rank's weights from their reduced gradients, by the optimizer at learning rate `lr`, with
        gradients clipped to optimizer.clip. `norm`: the whole gradient's 2-norm, without the loss scale. Where the host
        does not know it yet it is a tensor, and `skipped` 1 on the device if nothing is to change."""
        clip, optimizer = self.config.optimizer.clip, cast(Any, self.optimizer)
        divisor: float | Tensor = self._loss_factor
        if clip:
            ratio = (norm + 1e-6) / clip
            divisor = ratio.clamp(min=1) if isinstance(ratio, Tensor) else max(1.0, ratio)
            divisor = divisor if self._loss_factor == 1 else divisor * self._loss_factor
        if isinstance(divisor, Tensor) or divisor != 1.0:
            self._divide_gradients(divisor)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        if self.weights.are_masters_apart:
            self.weights.wait_for_gathers()  # of what no pass has read, whose memory is that of high halves
        optimizer.found_inf = skipped
        optimizer.step()
        optimizer.found_inf = optimizer.grad_scale = None  # nothing of a step lives on
        for name, o in self.stage.load_dependent_routes.items():
            changing = [p for p in o.operation.states if not (self.plan.adapters and STATES[p.role] == "model")]
            if states := {p.role: self.weights.states[p.name] for p in changing}:  # a base stays as it is
                update_router_states(o.operation["router"], states, self._loads[name], skipped)
        self.weights.update_averages(self.config.train.ema, skipped)
        self.weights.refresh_copies(ahead=True)

    def _divide_gradients(self, divisor: float | Tensor) -> None:
        """Divide the reduced gradients by a number, or let the optimizer do so as it reads them."""
        if self._divides:
            if not isinstance(divisor, Tensor):
                divisor = torch.full((), divisor, dtype=torch.float64, device=self.communicator.device)
            cast(Any, self.optimizer).grad_scale = divisor.float()  # inf, and no gradient is left, where fp32 ends
        elif gradients := [x for w in self.weights.updated_tensors.values() if (x := w.grad) is not None]:
            factor = 1 / divisor  # no gradients where a shard is padding alone
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype) if isinstance(factor, Tensor) else factor)

    def use_evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the weights to evaluate are in place: moving averages under eval.averaged."""
        self.drop_passes_ahead()
        return self.weights.use_averages() if self.config.eval.averaged else nullcontext()

    @torch.no_grad()
    def compute_mean_loss(self, split: str, end: int, measure: PairLoss | Distillation | int | None = None) -> float:
        """Compute the mean loss per token, or per pair of answers, over the first `end` samples of the data's `split`;
        equal on every rank. `measure`: loss, or depth of multi-token prediction, that is measured instead."""
        passes = self.passes_of_length(self.config.model.length)
        if isinstance(measure, int):
            passes.ops.measured_depth = measure
            try:
                mean = self.compute_mean_loss(split, end)
            finally:
                passes.ops.measured_depth = 0
            size, count = self.config.model.predict_ahead, partial(passes.count_labels_ahead, split)
            depths = self._sum_shares(count, 0, end, size, reads=True)
            return mean * self._count_predicted(split, end) / max(1, depths[measure - 1])
        if measure:
            name, losses = training_loss_name(self.config), passes.ops.losses
            passes.ops.losses = {**losses, name: measure}
            try:
                return self.compute_mean_loss(split, end)
            finally:
                passes.ops.losses = losses
        total = torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        for first in range(0, end, passes.batch):
            PROGRESS.note_call_progress(first, end)
            total += passes.evaluate_microbatch(self.rows.forward, split, first, end)
        loss, _ = self._start_reading_sums(self._sum_over_world(total, torch.zeros_like(total)))()
        return loss / self._count_predicted(split, end)

    def _count_predicted(self, split: str, end: int) -> float:
        """Count the labels in the first `end` samples of the data's `split`, at least 1, on all ranks together."""
        reads = self.corpus.counts_by_reading
        return max(1, *self._sum_shares(lambda i, j: [self.corpus.predicted(split, i, j)], 0, end, 1, reads))


def _raise_error(error: Exception) -> NoReturn:
    """Raise what went wrong in a training step's passes when it is their turn."""
    raise error


def _clock_times(reading: ClockReading) -> dict[str, Any]:
    """Return the seconds of a training step from the clock's reading, for the rank's report."""
    step_seconds, seconds = sum(reading.seconds.values()), {name: reading.seconds.get(name, 0.0) for name in TIMED}
    seconds["other"] = step_seconds - sum(seconds.values())
    return {"step_seconds": step_seconds, "seconds": seconds, "waits": reading.waits}


def _build_timeline(reading: ClockReading) -> RankTimeline:
    """Convert the clock's reading of a training step to this rank's timeline: sections, model spans, collectives."""
    spans = [CollectiveSpan(c.name, c.op, "+".join(c.axes), c.bytes, *times) for c, *times in reading.collectives]
    return RankTimeline([SectionSpan(*s) for s in reading.sections], [SectionSpan(*s) for s in reading.spans], spans)


def read_peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated by torch on a CUDA device, resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
