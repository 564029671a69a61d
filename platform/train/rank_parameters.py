"""Parameters on one rank: master copies, compute copies and gradients of its blocks or shards; with the loss scale of
float16 (`LossScale`).

`compute_rank_ranges` and `CollectiveBandwidths` show how far the ranks of a step differ, and which ranks are at the
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, isnan
from typing import Annotated, Any

import torch
from torch import Tensor

from platform.boundary.schema import Count, Span
from platform.config.fields import LossScaling
from platform.plan.chunks import common_name
from platform.plan.gather_order import first_reads_by_span
from platform.plan.layout import Mesh
from platform.plan.model_types import NF4_BLOCK
from platform.plan.plan import BASE_PRECISION, Plan
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import is_absent_block
from platform.runtime.flat_buffers import FlatBucket, join_masters, split_masters
from platform.runtime.normal_floats import QuantisedBucket, average_scales, sum_scales
from platform.runtime.parallel_ops import draw_initial_block, initialise
from platform.runtime.residency import ParameterResidency, ResidentSpan
from platform.runtime.staged_memory import StagingBuffers, allocate_host_zeros
from platform.runtime.tiled_gathers import TiledBucket
from platform.train.replies import RankRange

# precision -> dtype of compute copies, dtype of master copies and summed gradients
DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
}
DTYPES |= {name: DTYPES[base] for name, base in BASE_PRECISION.items()}


_PIECE = 1 << 20  # elements that are swapped at once


class RankWeights:
    """Weights of one rank: its copies of the model's parameters, and their gradients. `compute`: name -> the leaf that
    the forward pass reads, this rank's block. `master`: name -> the copy that the optimizer updates: the block, or what
    of it lies in this rank's shard; the same tensor as in `compute` if dtype and shape agree. A parameter of which this
    rank has nothing is an empty tensor. `residency`, under ZeRO: says when compute copies are there.

    `overlap`: gradients are reduced as soon as the last backward pass has them, and shards gathered a span ahead.
    `seed`: None leaves initial values out, where a state is going to be restored.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        seed: int | None,
        overlap: bool = True,
        reads_frozen: bool = False,
    ):
        """Allocate this rank's blocks or shards of the model's weights and gradients under `plan`. `seed`: seed of
        initial values, None for none; `overlap`: reduce gradients during backward passes, and gather ZeRO shards
        ahead; `reads_frozen`: frozen weights get no initial values, as they are read."""
        self._plan, self._overlap, self._staging = plan, overlap, StagingBuffers(communicator.device)
        low, high = DTYPES[plan.precision]
        kinds = [QuantisedBucket if b.quantised else TiledBucket if b.tiles else FlatBucket for b in plan.buckets]
        self.buckets = [kind(plan, communicator, b, low, high) for kind, b in zip(kinds, plan.buckets, strict=True)]
        self.trained = [flat for flat in self.buckets if not flat.bucket.frozen]
        for flat in self.buckets:
            flat.complete = self._reduce_complete_bucket
            begins = seed is not None and not (flat.bucket.frozen and reads_frozen)
            for p in flat.bucket.parameters if flat.here and begins else ():
                master = flat.master[p.name]
                is_encoded = flat.low is not None or flat.bucket.quantised
                apart = flat.bucket.sharded or is_encoded
                shape = plan.block_shape(p, communicator.coordinates)
                dtype = high if is_encoded else master.dtype
                block = torch.empty(shape, dtype=dtype, device=master.device) if apart else master
                initialise(plan, communicator, p, seed, block)
                if isinstance(flat, QuantisedBucket) and flat.bucket.quantised > NF4_BLOCK:
                    whole = torch.empty(plan.global_shape(p), dtype=high, device=master.device)
                    draw_initial_block(p, whole.shape, [(0, n) for n in whole.shape], seed or 0, whole)
                    flat.offsets[p.name] = average_scales([sum_scales(whole)], whole.numel())
                flat.fill_parameter(p.name, block)
            if isinstance(flat, TiledBucket) and seed is not None:
                flat.start_maxima()
        self._bucket_of = by_name = {p.name: flat for flat in self.buckets for p in flat.bucket.parameters}
        self.compute = {p.name: by_name[p.name].compute[p.name] for p in plan.parameters}
        self.master = {p.name: by_name[p.name].master[p.name] for p in plan.parameters}
        self.updated = {n: (w, 0) for n, w in self.master.items()}  # name -> what the optimizer updates, place in it
        self.states = {}  # name -> this rank's copy of a parameter without gradient, alike on all ranks of its stage
        for p in plan.states:
            self.states[p.name] = torch.empty(plan.global_shape(p), dtype=high, device=communicator.device)
            initialise(plan, communicator, p, seed, self.states[p.name])
        self.averages: dict[str, Tensor] = {}  # name -> average of a master copy over the updates, if they are kept
        self.residency = self._build_residency(communicator) if plan.sharded or plan.frees_weights else None
        self._reducing: deque[FlatBucket] = deque()
        self._early = overlap
        self._left: set[int] = set()  # chunks whose last backward pass of the step has not begun
        self._users = [{c.number for c in plan.chunks if c.parameter_names & f.compute.keys()} for f in self.trained]

    def _build_residency(self, communicator: Communicator) -> ParameterResidency:
        """Construct the Residency that gathers this rank's ZeRO shards, and makes numbers of 4 bits, for each span of
        the stage's model chunks, in training."""
        frees = self._plan.frees_weights
        spans = {
            c.number: [
                ResidentSpan(common_name(names) if frees else "", [f for f in self.buckets if read & f.compute.keys()])
                for names, read in zip(c.spans, map(set, c.spans) if frees else first_reads_by_span(c), strict=True)
            ]
            for c in self._plan.chunks
        }
        return ParameterResidency(
            communicator, spans, frees_parameters=frees, keeps_last_span=self._plan.turns, prefetches=self._overlap
        )

    @property
    def forward_tensors(self) -> dict[str, Tensor]:
        """Return name -> what the forward pass reads: this rank's blocks of parameters, and its states."""
        return self.compute | self.states

    def quantise_weights(self, numbers: Mapping[str, Tensor], offset: float) -> None:
        """Keep in 4 bits this rank's part, flat, of parameters by name, whose scales have the mean `offset`."""
        for name, weights in numbers.items():
            flat = self._bucket_of[name]
            assert isinstance(flat, QuantisedBucket), "others are filled as they are"
            flat.offsets[name] = offset
            flat.store_weights(name, weights)

    @property
    def own_masters(self) -> dict[str, Tensor]:
        """Return name -> master copy (block or ZeRO shard) of this rank's parameters, trained and frozen ones."""
        return {n: w for n, w in self.master.items() if not is_absent_block(w)}

    @property
    def trainable_masters(self) -> dict[str, Tensor]:
        """Return name -> master copy (block or ZeRO shard) of this rank's parameters that training updates."""
        return {n: w for n, w in self.own_masters.items() if n not in self._plan.frozen}

    @property
    def local_gradients(self) -> Mapping[str, Tensor]:
        """Return parameter name -> this rank's gradient, summed over the step's microbatches but not yet over ranks."""
        return {n: g for flat in self.buckets for n, g in flat.gradient_sums().items()}

    def begin_step(self, is_unsplit: bool = True) -> None:
        """Begin adding up gradients over a training step's backward passes. `is_unsplit`: True if completed gradients
        can be reduced before the end of a pass; False where weight gradients have passes of their own (zero bubble)."""
        self._early = is_unsplit and self._overlap
        self._left = {chunk.number for chunk in self._plan.chunks}
        for flat in self.trained:
            flat.launched = False

    def note_last_backward(self, chunk: int) -> None:
        """Note that a chunk's last backward pass of this training step begins: its gradients can be reduced early."""
        self._left.discard(chunk)

    def _reduce_complete_bucket(self, flat: FlatBucket) -> None:
        """Start reducing a bucket's gradients over ranks, now complete on this rank, if no later pass adds more."""
        if self._early and (flat.bucket.zero >= 2 or not self._left & self._users[self.trained.index(flat)]):
            self._reduce_bucket(flat)

    def _reduce_bucket(self, flat: FlatBucket) -> None:
        """Start reducing a bucket's gradients over ranks; under ZeRO-2 and 3, settle older reductions beyond two."""
        flat.start_reduction()
        if flat.bucket.zero >= 2:
            self._reducing.append(flat)
            while len(self._reducing) > 2:
                self._reducing.popleft().finish_pass_reduction()

    def note_backward_end(self, chunk: int, is_last_pass: bool, is_complete: bool) -> None:
        """Note the end of a model chunk's backward pass, whose gradients have been added up, and start the reductions
        that it makes possible. `is_last_pass`: it was the chunk's last pass in this training step; `is_complete`: all
        gradients of the pass have come, its weight gradients included."""
        if self.residency:
            self.residency.end_pass()
        if is_last_pass:
            self._left.discard(chunk)
        for flat, users in self._list_buckets_of(chunk) if is_complete and is_last_pass else ():
            if not flat.launched and flat.bucket.zero < 2 and not self._left & users:
                self._reduce_bucket(flat)
        self.end_backward_pass(chunk, is_complete)

    def end_backward_pass(self, chunk: int, is_complete: bool) -> None:
        """End a model chunk's backward pass: add up its gradients, and reduce what each pass does if `is_complete`."""
        for flat, _ in self._list_buckets_of(chunk):
            if is_complete and flat.bucket.zero >= 2 and not flat.launched:
                self._reduce_bucket(flat)
            flat.end_backward_pass() if is_complete else flat.end_input_gradient_pass()
        while is_complete and self._reducing:
            self._reducing.popleft().finish_pass_reduction()

    def note_replayed_gradients(self, chunk: int, summed: Sequence[Collection[str]]) -> None:
        """Note that a chunk's recorded backward pass has run, which sums gradients of the parameters `summed`."""
        for flat, names in zip(self.trained, summed, strict=True):
            flat.note_replayed_gradients(names)
        for flat, _ in self._list_buckets_of(chunk):
            flat.launched |= flat.bucket.zero >= 2

    def _list_buckets_of(self, chunk: int) -> list[tuple[FlatBucket, set[int]]]:
        """Return the trained buckets on this rank that a model chunk reads, with all chunks that do."""
        of_buckets = zip(self.trained, self._users, strict=True)
        return [(flat, users) for flat, users in of_buckets if flat.here and chunk in users]

    def finish_reductions(self) -> dict[str, Tensor]:
        """Wait until a training step's gradients are reduced; return them, flat, by the bucket's first parameter."""
        self._reducing.clear()
        local_buckets = [flat for flat in self.trained if flat.here]
        for flat in local_buckets:
            flat.start_final_reduction()
        return {next(iter(flat.compute)): flat.finish_reduction() for flat in local_buckets}

    def set_gradients(self, reduced: Mapping[str, Tensor]) -> None:
        """Set the gradients that the optimizer reads from `reduced`, the result of `finish_reductions`."""
        for flat in self.buckets:
            if (gradient := reduced.get(next(iter(flat.compute)))) is not None:
                flat.assign_gradients(gradient)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return parameter name -> this rank's gradient, reduced over ranks, shaped like the master copy it updates."""
        whole = ((n, self.updated[n][0].grad) for n in self.own_masters)
        return {n: self.part_of_parameter(n, gradient) for n, gradient in whole if gradient is not None}

    def drop_gradients(self) -> None:
        """Free the reduced gradients of this rank's master weights, after a training step's update or without."""
        for updated in self.updated_tensors.values():
            updated.grad = None

    def join_adjacent_parameters(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return an optimizer's groups with one flat tensor for parameters that lie one after another in memory: tens
        for hundreds, with the same numbers if each element is updated by itself."""
        joined_groups = []
        for group in groups:
            names, tensors = set(group["names"]), []
            for flat in self.buckets:
                for leaf, members in flat.join_adjacent_masters([n for n in flat.master if n in names]):
                    places = accumulate((self.master[n].numel() for n in members), initial=0)
                    self.updated |= {n: (leaf, place) for n, place in zip(members, places, strict=False)}
                    tensors.append(leaf)
            joined_groups.append({**group, "params": tensors})
        return joined_groups

    @property
    def are_masters_apart(self) -> bool:
        """Return True if master copies have no memory but their parts (optimizer.masters, optimizer.offload)."""
        return self._plan.stored.has_masters_apart

    @property
    def updated_halves(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Map the id of each tensor that the optimizer updates to its parts, if masters are kept apart."""
        owners = {id(w): (w, self._bucket_of[n]) for n, (w, _) in self.updated.items() if n in self.master_halves}
        return {number: flat.halves_of(w) for number, (w, flat) in owners.items()}

    @property
    def master_halves(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name -> the parts of this rank's master copy, if masters are kept apart."""
        owned = self.trainable_masters if self.are_masters_apart else {}
        return {name: self._bucket_of[name].halves_of(w) for name, w in owned.items()}

    @property
    def stored_masters(self) -> dict[str, Tensor]:
        """Return name -> the memory of this rank's master copy: its high half if masters are split."""
        part = 1 if self._plan.stored.masters == "fp32" else 0
        return self.own_masters | {name: halves[part] for name, halves in self.master_halves.items()}

    def read_master(self, name: str) -> Tensor:
        """Return a master copy: new memory where masters are split, of the host where they lie there."""
        w = self.master[name].detach()
        return join_masters(*halves) if (halves := self.master_halves.get(name)) else w

    @property
    def updated_tensors(self) -> dict[int, Tensor]:
        """Return the tensors that the optimizer updates, which may hold several parameters, by their ids."""
        return {id(tensor): tensor for tensor, _ in self.updated.values()}

    def part_of_parameter(self, name: str, whole: Tensor, unit: int = 1) -> Tensor:
        """Return a parameter's part of `whole`, a gradient or moment of what the optimizer updates, or its scales."""
        (updated, start), w = self.updated[name], self.master[name]
        if unit > 1:
            return whole[start // unit : (start + w.numel()) // unit]
        return whole if updated is w else whole[start : start + w.numel()].view(w.shape)

    @torch.no_grad()
    def refresh_copies(self, ahead: bool = False) -> None:
        """Update the compute copies of this rank's weights from the master copies after these have changed, and free
        the gradients. All ranks call it together, as masters may be ZeRO shards that are gathered. `ahead`: True lets
        gathers run under the next forward pass, which waits for each bucket where it reads it first, if overlap is
        allowed; any other reader of compute copies has to call `wait_for_gathers` before."""
        self.drop_gradients()
        self.wait_for_gathers()
        for flat in self.buckets:
            if not ahead:  # else the optimizer has written them
                flat.read_host_masters()
            flat.refresh_compute_copies()
        if not (ahead and self._overlap):
            self.wait_for_gathers()

    def wait_for_gathers(self) -> None:
        """Wait for compute copies of weights that are still being gathered since the last training step (ZeRO-1, 2)."""
        for flat in self.buckets:
            if not (flat.bucket.frees_weights or flat.resident):
                flat.gather_parameters()

    @torch.no_grad()
    def begin_averages(self) -> None:
        """Keep moving averages of the master weights (train.ema) from now on, starting at the weights' values."""
        self.averages = {n: self._clone_state(self.read_master(n)) for n in self.trainable_masters}

    def _clone_state(self, x: Tensor) -> Tensor:
        """Return a copy of master numbers where this rank keeps averages."""
        if not self._plan.stored.offloads_states:
            return x.clone()
        return allocate_host_zeros(x.shape, x.dtype, self._staging.device).copy_(x)

    @torch.no_grad()
    def update_averages(self, decay: float, skipped: Tensor | None = None) -> None:
        """Update the weights' moving averages, if kept: average = decay * average + (1 - decay) * master weight; not if
        the step is `skipped`, as the device says by 1 in a number."""
        if not self.averages:
            return
        share = 1 - decay if skipped is None else (1 - decay) * (1 - skipped.double())
        if self._plan.stored.offloads_states:
            self._update_host_averages(share)
        elif isinstance(share, float) and not self.are_masters_apart:
            torch._foreach_lerp_(list(self.averages.values()), list(self.trainable_masters.values()), share)
        else:
            for name, average in self.averages.items():
                _move_average(average, self.read_master(name), share)

    def _update_host_averages(self, share: float | Tensor) -> None:
        """Move averages in host memory by a `share` of the way to the masters, piece by piece, beside masters that lie
        there too."""
        halves, pieces = self.master_halves, list[tuple[Tensor, ...]]()
        for name, average in self.averages.items():
            tensors = [average, *halves.get(name, (self.master[name].detach(),))]
            pieces += zip(*(x.view(-1).split(_PIECE) for x in tensors), strict=True)
        last = 2 if self._plan.stored.offloads_masters else 3  # from which on parts lie in host memory
        staged = self._staging.pass_pieces([(piece[0], *piece[last:]) for piece in pieces])
        for (_, *parts), (average, *arrived) in zip(pieces, staged, strict=True):
            parts[last - 1 :] = arrived
            _move_average(average, join_masters(*parts) if parts[1:] else parts[0], share)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Swap the weights for their moving averages during the block, e.g. an evaluation, and back after it."""
        self._swap_averages()
        yield
        self._swap_averages()

    @torch.no_grad()
    def _swap_averages(self) -> None:
        """Swap moving averages and master weights in training, piece by piece, and refresh the compute copies."""
        self.wait_for_gathers()  # which write what may be the masters' high halves
        stored, is_split = self.stored_masters, self._plan.stored.masters == "split"
        for name, average in self.averages.items():
            if is_split:
                weights = self.read_master(name)
                split_masters(average, *self.master_halves[name])
                average.copy_(weights)
                continue
            for a, b in zip(average.view(-1).split(_PIECE), stored[name].view(-1).split(_PIECE), strict=True):
                buffer = a.clone()
                a.copy_(b)
                b.copy_(buffer)
        self.refresh_copies()

    @torch.no_grad()
    def compute_fresh_copies(self) -> dict[str, Tensor]:
        """Return name -> new compute copy of each block, from master weights, to verify them; on all ranks together."""
        return {name: w for flat in self.buckets if flat.here for name, w in flat.gather_fresh_copies().items()}


LEAST_WAIT = 0.01  # share of a step, below which waiting shows no bandwidth


def compute_rank_ranges(names: Sequence[str], numbers: Tensor) -> dict[str, RankRange]:
    """Return the range over the ranks of each of the `numbers` [ranks, names], by name; NaN is unknown."""
    unknown = numbers.isnan()
    least, least_rank = numbers.masked_fill(unknown, torch.inf).min(0)
    most, most_rank = numbers.masked_fill(unknown, -torch.inf).max(0)
    middle = numbers.nanquantile(0.5, 0)
    spreads = zip(names, *(x.tolist() for x in (least, middle, most, least_rank, most_rank)), strict=True)
    return {name: RankRange(*spread) for name, *spread in spreads if not isnan(spread[1])}


class CollectiveBandwidths:
    """Bandwidths of ranks in collectives, by tier of the cluster. `keys`, `waits`: collectives (OP/AXES) and axes, as
    the columns of a step's bytes and seconds of waiting have them; `reach`: axes -> the widest tier that their groups
    span."""

    def __init__(self, mesh: Mesh, keys: Sequence[str], waits: Sequence[str], reach: Mapping[str, str]):
        """Prepare to compute the bandwidths of the ranks of a mesh."""
        along, known = [key.partition("/")[2] for key in keys], [axes for axes in waits if axes in reach]
        self.tiers = list(dict.fromkeys(reach[axes] for axes in known))
        self._sent, self._waited = (
            torch.tensor([[axes in known and reach[axes] == tier for tier in self.tiers] for axes in some]).double()
            for some in (along, waits)
        )
        places = enumerate(along)
        self._groups = [(i, torch.tensor(mesh.list_groups(axes.split("+")))) for i, axes in places if axes in known]

    def compute_bandwidths(self, moved: Tensor, waits: Tensor, seconds: Tensor) -> Tensor:
        """Return the bytes per second [ranks, tiers] that each rank sent in a step's collectives while it waited for
        them, NaN where it hardly waited. `moved` [ranks, keys]: bytes of a group, at its first rank; `waits` [ranks,
        axes]: seconds of waiting; `seconds` [ranks]: of the step."""
        if not self.tiers:
            return moved.new_empty(len(moved), 0)
        sent = torch.zeros_like(moved)
        for column, groups in self._groups:
            sent[groups, column] = moved[groups, column].sum(1, keepdim=True) / groups.shape[1]
        waited = waits @ self._waited
        rate = sent @ self._sent / waited
        return rate.masked_fill(waited < LEAST_WAIT * seconds[:, None], torch.nan)


# Loss scale of float16 training: the loss is multiplied by it before the backward pass, so that small gradients do not
# vanish in float16, and gradients are divided by it before the update.
#
# Dynamic, as in Micikevicius et al. 2018, "Mixed Precision Training": it falls when a gradient overflows, and rises
# after many updates in a row. The norm of the whole model's gradient decides, so that all ranks decide alike.

LARGEST = 2.0**100  # a loss times this is finite in fp32


@dataclass(frozen=True)
class LossScale:
    """Factor by which the loss of a training step is multiplied (`scale`), and the number of updates since it last
    changed (`good_steps`)."""

    scale: Annotated[float, Span(1 / LARGEST, LARGEST)]
    good_steps: Count = 0

    def has_overflowed(self, loss: float, norm: float, rules: LossScaling) -> bool:
        """Return True if a training step's gradient overflowed in fp16, and a smaller loss scale may cure that: its
        global 2-norm `norm` is not finite but the loss is, and the scale is above its least value."""
        return isfinite(loss) and not isfinite(norm) and self.scale > rules.least

    def scale_after_overflow(self, rules: LossScaling) -> LossScale:
        """Return the smaller fp16 loss scale for the next training step, after one whose gradient overflowed."""
        return LossScale(max(rules.least, self.scale * rules.backoff))

    def scale_after_update(self, rules: LossScaling) -> LossScale:
        """Return the fp16 loss scale for the next training step, after an update: larger after growth_every of them."""
        if self.good_steps + 1 < rules.growth_every:
            return LossScale(self.scale, self.good_steps + 1)
        return LossScale(min(LARGEST, self.scale * rules.growth))


def _move_average(average: Tensor, weights: Tensor, share: float | Tensor) -> None:
    """Move the average of weights in training by a `share` of the way to them, in place."""
    average.lerp_(weights, share.to(average.dtype) if isinstance(share, Tensor) else share)
