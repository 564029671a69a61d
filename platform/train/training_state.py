"""Training state of a rank, to be saved and restored: master copies, optimizer moments and the optimizer's numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import prod
from typing import Annotated, Any

import torch
from torch import Tensor

from platform.boundary import schema
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, OpenMap
from platform.boundary.storage import Storage
from platform.checkpoint.blocks import (
    Block,
    Box,
    HeldTensor,
    JoinedBlocks,
    Share,
    find_unit,
    list_held_states,
    list_held_tensors,
    list_written_parts,
    local_blocks,
    state_name,
)
from platform.checkpoint.buffer import FileImage, LiveBlocks
from platform.checkpoint.manifest import Corrupt, Manifest, Refused
from platform.checkpoint.memory_recovery import list_lost_tensors, recover_state
from platform.checkpoint.moves import World, fill_blocks
from platform.checkpoint.snapshots import NodeSnapshot
from platform.config.fields import hash_values
from platform.optimizer.optimizers import AVERAGE, NOT_OF_FACTORED, NOT_OF_MATRICES, SIDES, probe_optimizer_state
from platform.plan.model_types import LOW, NF4_KINDS, SCALES
from platform.plan.plan import Plan
from platform.plan.step_collectives import matrix_sides
from platform.runtime.communicator import all_gather_values
from platform.runtime.normal_floats import average_scales, sum_scales
from platform.runtime.progress import PROGRESS
from platform.runtime.staged_memory import allocate_host_zeros, allocate_zeros
from platform.train.rank_parameters import DTYPES, LossScale
from platform.train.replies import Unrestored
from platform.train.state_forms import fill_wide, restore_states
from platform.train.trainer import Trainer
from platform.weights.importing import InitialWeights, open_initial_weights


def list_state_tensors(plan: Plan, moments: Iterable[str]) -> list[HeldTensor]:
    """Return all tensors of a run's training state under `plan`, with the ranks that keep them, and the `moments`;
    without the base of adapters."""
    dtype = DTYPES[plan.precision][1]
    low, weights = str(DTYPES[plan.precision][0]).removeprefix("torch."), list_held_tensors(plan, "model", dtype)
    by_name = {h.name.removeprefix("model."): h for h in weights}
    masters = [replace(h, dtype=low) if name in plan.frozen else h for name, h in by_name.items()]
    trained = {name: h for name, h in by_name.items() if name not in plan.frozen}  # moments are laid out like them
    if plan.adapters:
        masters = [*trained.values()]
    if plan.stored.masters == "split":
        masters = [replace(h, dtype="bfloat16") for h in masters]
        masters += [replace(h, name=f"{LOW}.{name}", dtype="int16") for name, h in trained.items()]
    held_moments = [held for kind in moments for held in _list_held_moments(plan, kind, trained)]
    return [*masters, *list_held_states(plan, dtype), *held_moments]


def _list_held_moments(plan: Plan, kind: str, masters: Mapping[str, HeldTensor]) -> list[HeldTensor]:
    """Return one moment, or its scales, of the weights by name as tensors of the ranks that hold their `masters`."""
    kept = {name: h for name, h in masters.items() if _is_kept_moment(plan, kind, name)}
    if kind in SIDES:
        return [_held_side(plan, h, kind) for h in kept.values()]
    if kind.endswith(SCALES):
        return list_held_tensors(plan, kind, torch.float32)
    return [replace(h, name=f"{kind}.{n}", dtype=_moment_type(plan, kind, n, h.dtype)) for n, h in kept.items()]


def _moment_type(plan: Plan, moment: str, name: str, wide: str) -> str:
    """Return the element type of a moment of a parameter with master copies of type `wide`, as averages have."""
    if moment == AVERAGE:
        return wide
    return "bfloat16" if plan.stored.moments == "bf16" else "uint8" if name in plan.scaled else wide


def list_base_tensors(plan: Plan) -> list[HeldTensor]:
    """Return the weights that a plan's adapters are of, as `list_state_tensors` does others; [] without adapters."""
    weights = list_held_tensors(plan, "model", DTYPES[plan.precision][0]) if plan.adapters else []
    quantised = {f"model.{name}" for name in plan.quantised}  # made of fp32 numbers, whatever is computed with
    base = [h for h in weights if h.name.removeprefix("model.") in plan.frozen]
    return [replace(h, dtype="float32") if h.name in quantised else h for h in base]


def list_kept_base(plan: Plan) -> list[HeldTensor]:
    """Return the weights that a plan's adapters are of, as its ranks keep them: some in 4 bits."""
    in_4_bits = list_held_tensors(plan, plan.quantised_kind, torch.uint8) if plan.quantised else []
    quantised = {f"model.{name}" for name in plan.quantised}
    return [*(h for h in list_base_tensors(plan) if h.name not in quantised), *in_4_bits]


def _is_kept_moment(plan: Plan, moment: str, name: str) -> bool:
    """Return True if the optimizer keeps this moment of the trained parameter `name`, as part of the training state."""
    if moment in SIDES:
        return name in plan.factored
    if moment.endswith(SCALES):
        return name in plan.scaled
    return name not in {NOT_OF_MATRICES: plan.matrices, NOT_OF_FACTORED: plan.factored}.get(moment, ())


def matrix_side_length(plan: Plan, side: str, name: str) -> int:
    """Return how many numbers of Adafactor's training state weight matrices have: their rows or columns (`side`)."""
    p = next(p for p in plan.parameters if p.name == name)
    return matrix_sides(plan, p)[SIDES.index(side)]


def _held_side(plan: Plan, h: HeldTensor, side: str) -> HeldTensor:
    """Return Adafactor's training state of a weight `h`, by rows or columns (`side`), whole on all ranks of `h`."""
    name = h.name.removeprefix("model.")
    whole_box = Box.whole_tensor((matrix_side_length(plan, side, name),))
    ranks = tuple(sorted({rank for holders in h.holders.values() for rank in holders}))
    return HeldTensor(f"{side}.{name}", h.dtype, whole_box.extent, {whole_box: ranks})


class RankTrainingState:
    """Training state of one rank's trainer, as checkpoints and snapshots store it. `held`: all tensors of the run's
    state with the ranks that keep their blocks, equal on all ranks: model.PARAMETER, MOMENT.PARAMETER for each of the
    `moments` that are kept of it (the optimizer's, and the average), and parameters without gradient; `base`: the
    weights that adapters are of, which are neither in checkpoints nor in snapshots."""

    def __init__(self, trainer: Trainer):
        """List the tensors of the training state, weights and optimizer moments, that the rank of `trainer` saves and
        restores."""
        self._trainer, self._plan, self._communicator = trainer, trainer.plan, trainer.communicator
        communicator, size = trainer.communicator, trainer.plan.mesh.world_size
        all_gather = partial(all_gather_values, communicator)
        self._world = World(
            communicator.rank, size, all_gather, communicator.exchange, note=PROGRESS.note_call_progress
        )
        dtype = DTYPES[self._plan.precision][1]
        optimizer_moments, self._numbers = probe_optimizer_state(trainer.config.optimizer, dtype, communicator.device)
        optimizer_moments += SIDES if self._plan.factored else ()
        optimizer_moments += [moment + SCALES for moment in optimizer_moments if self._plan.stored.moments == "int8"]
        self.moments = optimizer_moments + ([AVERAGE] if trainer.config.train.ema else [])
        self.held, self.base = list_state_tensors(self._plan, self.moments), list_kept_base(self._plan)
        own_names = (h.name for h in self.held if any(self._communicator.rank in ranks for ranks in h.holders.values()))
        self._mine = set(own_names)
        self._image: FileImage | None = None
        self._blocks, self._where = LiveBlocks([]), [-1]  # the blocks, and the addresses of their tensors

    @property
    def checkpoint_image(self) -> FileImage:
        """Return the host-memory buffer that holds this rank's checkpoint file before it is written, allocated once."""
        if self._image is None:
            parts = list_written_parts(self.held, self._communicator.rank)
            self._image = FileImage(self._communicator.rank, parts, pinned=self._communicator.device.type == "cuda")
        return self._image

    def live_blocks(self) -> LiveBlocks:
        """Return this rank's blocks of the training state, weights and optimizer moments: views of the live tensors,
        for snapshots to copy and restoring to fill. Moments that no update has made yet are zeros."""
        weights, plan = self._trainer.weights, self._plan
        states = [self._trainer.optimizer.state.get(w, {}) for w in weights.updated_tensors.values()]
        stored = [state.get(kind) for state in states for kind in self.moments] + [*weights.averages.values()]
        addresses = [-1 if moment is None else moment.data_ptr() for moment in stored]
        if -1 in addresses or addresses != self._where:  # the optimizer may have put another tensor in a moment's place
            trained = weights.trainable_masters.items()
            kinds: dict[str, Mapping[str, Tensor]] = {"model": dict(trained) if plan.adapters else weights.master}
            if halves := weights.master_halves:
                masters = weights.stored_masters
                kinds = {"model": {name: masters.get(name, w) for name, w in kinds["model"].items()}}
                if plan.stored.masters == "split":
                    kinds[LOW] = {name: low for name, (_, low) in halves.items()}
            for kind in self.moments:
                kinds[kind] = {n: self._read_moment(n, w, kind) for n, w in trained if _is_kept_moment(plan, kind, n)}
            coordinates = self._communicator.coordinates
            laid_out = {kind: tensors for kind, tensors in kinds.items() if kind not in SIDES}
            blocks = [b for kind, tensors in laid_out.items() for b in local_blocks(plan, kind, tensors, coordinates)]
            sides = ((f"{kind}.{name}", x) for kind in SIDES for name, x in kinds.get(kind, {}).items())
            blocks += [Block(name, Box.whole_tensor(x.shape), x) for name, x in sides if name in self._mine]
            unlearned = ((state_name(p), weights.states[p.name]) for p in self._trainer.stage.states)
            blocks += [Block(name, Box.whole_tensor(x.shape), x) for name, x in unlearned]
            self._where, self._blocks = addresses, LiveBlocks(blocks)
        return self._blocks

    def base_blocks(self) -> list[Block]:
        """Return this rank's blocks of the weights that adapters are of, as it keeps them: views, for a recovery."""
        plan, at, quantised = self._plan, self._communicator.coordinates, frozenset(self._plan.quantised)
        base = [*self._trainer.weights.own_masters.items()] if plan.adapters else []
        kinds = {"model": plan.frozen.difference(quantised), plan.quantised_kind: quantised}
        by_kind = {kind: {n: w for n, w in base if n in names} for kind, names in kinds.items()}
        return [b for kind, tensors in by_kind.items() for b in local_blocks(plan, kind, tensors, at)]

    def read_values(self) -> dict[str, Any]:
        """Return the parts of the training state that are no tensors, as plain data; see `start_reading_values`."""
        return self.start_reading_values()()

    def start_reading_values(self) -> Callable[[], dict[str, Any]]:
        """Start reading the parts of the training state that are no tensors; return a function that waits for them, not
        for later work, and returns them as plain data, equal on all ranks: `optimizer`, its numbers, such as its count
        of steps, none before the first update; `loss_scale`, if computed in fp16."""
        scale, weight_state = self._trainer.loss_scale, self._optimizer_state(next(iter(self._updated_names)))
        kept_names = [name for name in self._numbers if name in weight_state]
        states = (torch.as_tensor(weight_state[name], dtype=torch.float64) for name in kept_names)
        tensors = [x.to(self._communicator.device, non_blocking=True) for x in states]
        read = self._communicator.start_reading(torch.stack(tensors)) if tensors else list
        more = {"loss_scale": asdict(scale)} if scale else {}
        return lambda: {"optimizer": dict(zip(kept_names, read(), strict=True)), **more}

    def restore_checkpoint(self, storage: Storage, directory: str, manifest: Manifest) -> None:
        """Restore this rank's training state from the checkpoint `directory` of any plan; all ranks call it together.
        Raises the errors of `platform.train.state_forms.restore_states`, and Refused; the state is then
        undefined."""
        self._load_base()
        self._prepare_state(manifest.meta.values)
        how = self.held, self.live_blocks(), self._world, str(DTYPES[self._plan.precision][1]).removeprefix("torch.")
        restore_states(storage, directory, manifest, *how)
        self._trainer.weights.refresh_copies()

    def load_initial_weights(self) -> None:
        """Fill this rank's weights from train.init; all ranks call it together. Raises Refused, Corrupt or OSError."""
        start_weights = self._open_initial_weights()
        self._fill_weights(start_weights, [*list_base_tensors(self._plan), *self.held])
        if AVERAGE in self.moments:
            self._trainer.weights.begin_averages()

    def _load_base(self, survived: Sequence[JoinedBlocks] = ()) -> None:
        """Fill the weights that adapters are of, but for blocks that `survived` in memory, from train.init; without it
        they have their initial values already."""
        lost = {name.partition(".")[2] for name in list_lost_tensors(self.base, survived)}
        if not lost or self._trainer.config.train.init in ("", "random"):
            return
        weights, boxes = self._open_initial_weights(), defaultdict[str, list[Box]](list)
        for tensor, box in (block for chain in survived for block in chain.blocks):
            boxes[tensor.name].append(box)
        pieces = [p for p in weights.pieces if not p.box.is_covered_by(boxes[p.name])]
        held = [h for h in list_base_tensors(self._plan) if h.name.partition(".")[2] in lost]
        self._fill_weights(replace(weights, pieces=pieces), held)

    def _fill_weights(self, start_weights: InitialWeights, held: Sequence[HeldTensor]) -> None:
        """Fill this rank's blocks of the weights `held` that are among `start_weights`; all ranks call it together."""
        names, plan = {p.name for p in start_weights.pieces}, self._plan
        blocks = [*self.base_blocks(), *self.live_blocks()]
        halves = [(h, f"model.{h.name.partition('.')[2]}") for h in held if h.name.startswith(("model.", f"{LOW}."))]
        wanted = {h.name: h for h, weight in halves if weight in names or not plan.adapters}
        for name in plan.quantised:
            if weight := wanted.pop(f"model.{name}", None):
                self._fill_quantised_weight(name, weight, start_weights)
        blocks = [b for b in blocks if b.name in wanted]
        pieces = [p for p in start_weights.pieces if p.name in wanted]
        wide = {name: "float32" for name in wanted if name.replace("model.", f"{LOW}.", 1) in wanted.keys() - {name}}
        fill_wide(pieces, start_weights.fetch, [*wanted.values()], blocks, self._world, wide)
        self._trainer.weights.refresh_copies()

    def _fill_quantised_weight(self, name: str, weight: HeldTensor, start_weights: InitialWeights) -> None:
        """Fill this rank's part of the parameter `name`, the tensor `weight`, which is kept in 4 bits: it is read as
        numbers, one parameter at a time; all ranks call it together."""
        weights, numbers = self._trainer.weights, dict[str, Tensor]()
        if (stored := weights.own_masters.get(name)) is not None:
            unit = NF4_KINDS[self._plan.quantised_kind]
            numbers[name] = stored.new_empty(len(stored) * unit, dtype=torch.float32)
        blocks = local_blocks(self._plan, "model", numbers, self._communicator.coordinates)
        pieces = [p for p in start_weights.pieces if p.name == weight.name]
        fill_blocks(pieces, start_weights.fetch, [weight], blocks, self._world)
        parts = {str([b.box for b in blocks]): sum_scales(numbers[name])} if blocks else {}
        sums = {place: n for part in all_gather_values(self._communicator, parts) for place, n in part.items()}
        weights.quantise_weights(numbers, average_scales(sums.values(), prod(weight.shape)))

    def _open_initial_weights(self) -> InitialWeights:
        """Open the weights of train.init, and check that all ranks see the same files. Raises Refused on all ranks
        alike if any cannot read them or they differ."""
        start_weights, answer = None, ""
        try:
            start_weights = open_initial_weights(self._trainer.config)
            answer = hash_values([[p.name, p.dtype, *p.box, *map(str, p.source)] for p in start_weights.pieces])
        except (ConfigError, OSError) as error:  # other ranks wait for this one's word
            answer = f"rank {self._communicator.rank}: {error}"
        answers = all_gather_values(self._communicator, [answer, start_weights is not None])
        if failed := [why for why, is_readable in answers if not is_readable]:
            raise Refused(failed[0])
        if len({word for word, _ in answers}) > 1:
            raise Refused("ranks see different files")
        assert start_weights
        return start_weights

    def recover_state(self, survived: Sequence[JoinedBlocks], node: NodeSnapshot | None) -> None:
        """Recover this rank's training state from in-memory snapshots of any plan that survivors of a failure can read;
        all ranks call it together. `survived`: chains of blocks with their readers; `node`: snapshot that this rank can
        read, None if it has none; see `platform.checkpoint.memory_recovery.recover_state`. The base of
        adapters comes from memory too, and from storage where no survivor holds it."""
        known = [values for values in all_gather_values(self._communicator, node.values if node else {}) if values]
        assert all(values == known[0] for values in known), "what is no tensor is alike on all ranks"
        self._load_base(survived)
        self._prepare_state(known[0])
        state, blocks = [*self.held, *self.base], [*self.live_blocks(), *self.base_blocks()]
        recover_state(survived, node.read_part if node else _refuse_read, state, blocks, self._world)
        self._trainer.weights.refresh_copies()

    def _prepare_state(self, values: Mapping[str, Any]) -> None:
        """Prepare this rank's training state to be filled from a checkpoint or snapshot: zero the optimizer's moments,
        and set its numbers and the fp16 loss scale from `values`, which are not trusted. Where these have no loss
        scale, the initial one is set. Raises Refused."""
        numbers, scale = _read_numbers(values, self._numbers), values.get("loss_scale")
        fresh = numbers.keys() < self._numbers.keys()
        if self._trainer.loss_scale:
            first = LossScale(self._trainer.config.loss_scale.initial)
            self._trainer.loss_scale = _read_value(LossScale, scale, "loss scale") if scale else first
        for parameter in self._updated_names:
            w, state = self._updated_tensor(parameter), self._optimizer_state(parameter)
            state.clear()
            if fresh:
                continue
            kept_moments = (m for m in self.moments if m != AVERAGE and _is_kept_moment(self._plan, m, parameter))
            state.update({moment: self._zero_moment(parameter, w, moment) for moment in kept_moments})
            for name, number in self._numbers.items():
                value = numbers[name]
                state[name] = torch.full_like(number, value) if isinstance(number, Tensor) else type(number)(value)

    def _read_moment(self, name: str, w: Tensor, moment: str) -> Tensor:
        """Return this optimizer moment or moving average of the master weight `w`; zeros if no update has made it."""
        weights = self._trainer.weights
        if moment == AVERAGE:
            return weights.averages[name]
        stored_moment: Tensor | None = self._optimizer_state(name).get(moment)
        if stored_moment is None:
            return self._zero_moment(name, w, moment)
        return stored_moment if moment in SIDES else weights.part_of_parameter(name, stored_moment, find_unit(moment))

    def _zero_moment(self, name: str, w: Tensor, moment: str) -> Tensor:
        """Return a zero optimizer moment of the master weight `w`, in place of one that no update has made yet."""
        if moment in SIDES:
            return w.new_zeros(matrix_side_length(self._plan, moment, name))
        allocate = allocate_host_zeros if self._plan.stored.offloads_states else allocate_zeros
        if (unit := find_unit(moment)) > 1:
            return allocate((w.numel() // unit,), torch.float32, w.device)
        kept_type = _moment_type(self._plan, moment, name, str(w.dtype).removeprefix("torch."))
        return allocate(w.shape, getattr(torch, kept_type), w.device)

    @property
    def _updated_names(self) -> Collection[str]:
        """Return a parameter of each tensor that the optimizer updates; [""] if this rank trains nothing."""
        weights = self._trainer.weights
        return {id(weights.updated[n][0]): n for n in weights.trainable_masters}.values() or [""]

    def _updated_tensor(self, name: str) -> Tensor:
        """Return what the optimizer updates with this parameter in it; for "" the zeros that stand for none."""
        idle: Tensor = self._trainer.optimizer.param_groups[0]["params"][0]
        return self._trainer.weights.updated[name][0] if name else idle

    def _optimizer_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of what it updates with this parameter in it: name -> moment or number."""
        return self._trainer.optimizer.state[self._updated_tensor(name)]


def attempt_fill(fill: Callable[[], None]) -> Unrestored | None:
    """Fill a worker's training state from storage by calling `fill`; return None, or why that failed: data that is
    corrupt, refused or cannot be read. The state is then undefined."""
    try:
        fill()
    except (Refused, OSError) as error:
        fault = "corrupt" if isinstance(error, Corrupt) else "refused" if isinstance(error, Refused) else "failed"
        return Unrestored(fault, str(error))
    return None


def _refuse_read(part: Share, memory: Tensor) -> None:
    """Raise AssertionError in place of reading a worker's snapshot of training state: it has none and is not asked."""
    raise AssertionError(f"{part.tensor.name} {part.box} is asked of a rank that was not there")


def _read_numbers(values: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, float]:
    """Return the optimizer's numbers, e.g. its count of steps, in the untrusted `values` of a saved training state; {}
    before the first update. Raises Refused if one of `names` is missing or no number."""
    stored_numbers = values.get("optimizer")
    kind = Annotated[dict[str, float], OpenMap((), tuple(names) if stored_numbers else ())]
    return _read_value(kind, stored_numbers, "optimizer")


def _read_value(kind: Any, value: Any, name: str) -> Any:
    """Read an untrusted value of a saved training state as the type `kind`. Raises Refused, which calls it `name`."""
    try:
        return schema.parse_value(kind, value)
    except Malformed as error:
        raise Refused(f"the values of its {name}: {error}") from None
