"""Optimizers by name: how to make one, the state it keeps per parameter, the memory of its updates, and what it needs
whole. Forecasts and refusals are pure Python without torch, so that they are quick.

- `muon_scratch_bytes`, `adafactor_scratch_bytes`: the memory that an optimizer allocates, beside its state, while it
  updates a worker's parameters.
- `group_parameters`: parameters that are updated alike; `find_muon_matrices`: the ones that are matrices to Muon.
- `violations_of_splits`: refusals of a plan that splits tensors which the optimizer needs whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from platform.boundary.refusals import closest_values, format_violation
from platform.config.extensions import bind_settings_object, register_own_function
from platform.config.fields import Config, Optimizer
from platform.plan.layout import is_at_index_zero
from platform.plan.model_types import (
    SCALE_BLOCK,
    STAGING_BUFFERS,
    WIDE_STATES,
    Parameter,
    StoredStates,
    count_buffer_bytes,
)
from platform.plan.operations.registry import OPERATIONS
from platform.plan.plan import ITEMSIZE, Plan, base_precision
from platform.plan.step_collectives import factor_sum_sizes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerUpdate:
    """Update of the parameters of a worker at mesh coordinates `at` of a plan. `parts`: elements of each parameter of
    which it updates a part."""

    plan: Plan
    at: Mapping[str, int]
    parts: Mapping[str, int]

    @property
    def itemsize(self) -> int:
        """Return the bytes per element of the master copies that the optimizer updates."""
        return self.plan.itemsize["master"]

    @property
    def largest_part_bytes(self) -> int:
        """Return the bytes of the largest part of a parameter that the worker's optimizer update changes."""
        return self.itemsize * max(self.parts.values(), default=0)


def muon_scratch_bytes(o: Optimizer, update: OptimizerUpdate) -> int:
    """Return the bytes of temporary memory of one update by the Muon optimizer: Nesterov's sums of all matrices at
    once, if used, plus the most that one bucket needs: its gathered buffer and the larger of its shard (0 if not
    sharded) and the Newton-Schulz iteration of its largest matrix."""
    plan, wide = update.plan, update.itemsize
    nesterov_elements = sum(n for name, n in update.parts.items() if name in plan.matrices) if o.nesterov else 0
    most = 0
    for b in plan.buckets:
        matrices = [p for p in b.parameters if p.name in plan.matrices]
        if matrices and is_at_index_zero(b.only, update.at):
            iteration_bytes = max(_newton_schulz_bytes(plan, p, wide) for p in matrices)
            shard_elements = b.shard_elements if b.sharded else 0
            most = max(most, wide * (b.elements + shard_elements), wide * b.elements + iteration_bytes)
    return wide * nesterov_elements + most


def adafactor_scratch_bytes(o: Optimizer, update: OptimizerUpdate) -> int:
    """Return the bytes of temporary memory of one update by the Adafactor optimizer: the second moments of the largest
    parameter, rebuilt from its rows and columns, and the sums over ranks for all parameters."""
    plan = update.plan
    if not plan.factored:
        return update.largest_part_bytes
    most = max((n for name, n in update.parts.items() if name in plan.factored), default=0)
    return 2 * (most + sum(map(sum, factor_sum_sizes(plan).values()))) * update.itemsize


def _newton_schulz_bytes(plan: Plan, p: Parameter, wide: int) -> int:
    """Return the peak bytes of temporary memory that the Muon optimizer takes while it gathers a parameter's matrices
    and makes them orthogonal (`muon.orthogonal`). `wide`: bytes per element of master copies."""
    number, rows, columns = p.shape_as_matrices(plan.planner.local_shape(p, plan.matrix_layout(p)))
    n, square = number * rows * columns, number * min(rows, columns) ** 2
    half = plan.itemsize["compute"] == 2
    gathered_bytes = wide * n if plan.matrix_gather_steps(p) else 0
    narrow, item = (2 * n, 2) if half else (0, wide)
    iterated = item * (2 * n + 2 * square)
    turned = item * n * (1 + (rows > columns)) if not half else item * n * (rows > columns) + max(item, wide) * n
    return gathered_bytes + narrow + max(iterated, turned)


def iterate_updated_parts(plan: Plan, at: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield (name, elements) of the parts that the optimizer at `at` updates (`OptimizerUpdate.parts`)."""
    for p in plan.stage_part(at["stage"]).parameters:
        if p.name not in plan.frozen and plan.has_block(p, at):
            start, stop = plan.shard_range(p, at)
            if stop > start:
                yield p.name, stop - start


ELEMENT = "element"
FEWEST_DIMS = {"tensor": 1, "matrix": 2}  # need -> parameters of at least so many dims must be whole
Need = str | Callable[[Optimizer], str]


@dataclass(frozen=True)
class OptimizerKind:
    """Entry of OPTIMIZERS. `make(groups, config.optimizer)` returns a torch optimizer of parameter groups [{"params",
    "names", "weight_decay", "lr_factor", "matrix"}]; the params are local blocks or shards, whole tensors where `needs`
    says so. `moments`: numbers of state per element of a parameter, or a function that finds it. `divides`: True if
    they divide gradients in fp32 by their attribute `grad_scale` (fp32 scalar) while they read them, as torch's fused
    optimizers do for its GradScaler; `skips`: True if an update does nothing where their attribute `found_inf` (fp32
    scalar on the device) is 1. `stores`: True if its moments can be kept in fewer bits (optimizer.moments).
    `scratch`: bytes that an update takes for a time. `needs`: the parts that
    are updated as a whole, or a function that finds them: every `element` by itself, every `tensor`, or each tensor of
    two or more dims (`matrix`). Muon gets what it needs whole: the plan gathers it (`Plan.matrices`); Adafactor what it
    needs summed (`Plan.factored`)."""

    make: Callable[..., torch.optim.Optimizer]
    moments: int | Callable[[Optimizer], int]
    divides: bool = False
    skips: bool = False
    stores: bool = False
    scratch: Callable[[Optimizer, OptimizerUpdate], int] = lambda o, update: 0
    needs: Need = ELEMENT


def _build_adamw(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct torch's fused AdamW of parameter groups, or one to round moments after, by config.optimizer `o`."""
    import torch

    if o.moments != "fp32":
        from platform.optimizer.update_rules import OrderedAdamW

        return OrderedAdamW(groups, o.lr, (o.betas[0], o.betas[1]), o.eps)
    return torch.optim.AdamW(groups, o.lr, (o.betas[0], o.betas[1]), o.eps, fused=True)


def _build_sgd(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct torch's fused SGD of parameter groups; as there, weight decay is added to the gradient."""
    from platform.optimizer.update_rules import Sgd

    return Sgd(groups, o.lr, o.momentum, nesterov=o.nesterov, fused=True)


def _build_lion(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the Lion optimizer of parameter groups, by config.optimizer `o`."""
    from platform.optimizer.update_rules import Lion

    return Lion(groups, o.lr, (o.betas[0], o.betas[1]))


def _build_muon(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the Muon optimizer of parameter groups; groups with `matrix` set hold parts of whole matrices."""
    from platform.optimizer.update_rules import Muon

    return Muon(groups, o)


def _build_adafactor(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the Adafactor optimizer of parameter groups, by config.optimizer `o`."""
    from platform.optimizer.update_rules import Adafactor

    return Adafactor(groups, o)


OPTIMIZERS = {
    "adamw": OptimizerKind(_build_adamw, moments=2, divides=True, skips=True, stores=True),
    "sgd": OptimizerKind(_build_sgd, moments=lambda o: int(o.momentum > 0), divides=True, skips=True, stores=True),
    "lion": OptimizerKind(
        _build_lion, moments=1, skips=True, stores=True, scratch=lambda o, update: update.largest_part_bytes
    ),
    "muon": OptimizerKind(_build_muon, moments=2, skips=True, scratch=muon_scratch_bytes),  # one of matrices
    "adafactor": OptimizerKind(
        _build_adafactor, moments=1, skips=True, scratch=adafactor_scratch_bytes
    ),  # none of matrices, but SIDES
}


Names = Collection[str]
SHIPPED = dict(OPTIMIZERS)  # as they are here, whatever a module registers under their names
NOT_OF_MATRICES = "exp_avg_sq"  # the moment that is not kept of the plan's `matrices`
NOT_OF_FACTORED = "variance"  # the moment of whose place SIDES, one per row and one per column, take in `factored`
SIDES = ("row_var", "col_var")
UNSIGNED = ("exp_avg_sq",)  # moments that are never negative
HALF = ("bf16", "fp16")  # precisions in which masters are no copies to compute with
# kind of device -> elements that are updated at once where moments are stored: what fits a cache, or pays a launch
PIECES = {"cpu": 1 << 16, "cuda": 1 << 23}
AVERAGE = "ema"  # kind of the averaged weights, which are kept like a moment


def count_states_per_element(config: Config) -> int:
    """Return the numbers of optimizer state per trained element: moments, and one more for averaged weights."""
    return _count_moments(config.optimizer) + (config.train.ema > 0)


def _count_moments(o: Optimizer) -> int:
    """Return how many moments per trained element the configured optimizer keeps."""
    moments = OPTIMIZERS[o.kind].moments
    return moments if isinstance(moments, int) else moments(o)


def describe_stored_states(o: Optimizer) -> StoredStates:
    """Return how the configured optimizer's states lie in memory, for the plan."""
    return StoredStates(o.moments, _count_moments(o), o.masters, o.offload) if is_piecewise(o) else WIDE_STATES


def count_stored_numbers(config: Config) -> float:
    """Return the memory of an element's optimizer state, of a large parameter, in numbers of a master's size."""
    wide = ITEMSIZE[config.precision]["master"]
    saved = describe_stored_states(config.optimizer).count_saved_bytes(SCALE_BLOCK, SCALE_BLOCK, wide)
    return count_states_per_element(config) - saved / (SCALE_BLOCK * wide)


def count_offloaded_numbers(config: Config) -> float:
    """Return how many numbers of a master's size, of states and masters, an element has in host memory."""
    states = describe_stored_states(config.optimizer)
    masters = 0.5 if states.masters == "split" else 1.0
    return count_stored_numbers(config) * states.offloads_states + masters * states.offloads_masters


def list_offloads(config: Config) -> list[str]:
    """Return the legal values of optimizer.offload, the one first by which least lies in host memory."""
    o, stores = config.optimizer, OPTIMIZERS[config.optimizer.kind].stores
    moves = {"states": _count_moments(o) > 0, "states+masters": base_precision(config.precision) in HALF}
    return ["none", *(word for word, is_legal in moves.items() if stores and is_legal)]


def list_further_offloads(config: Config) -> list[str]:
    """Return the legal values of optimizer.offload by which more would lie in host memory, the least first."""
    words = list_offloads(config)
    return words[words.index(config.optimizer.offload) + 1 :]


def divides_gradients(o: Optimizer) -> bool:
    """Return True if the configured optimizer divides gradients by its attribute `grad_scale`."""
    return OPTIMIZERS[o.kind].divides and o.moments == "fp32"


def scratch_bytes(o: Optimizer, update: OptimizerUpdate, device: str) -> int:
    """Return the bytes of temporary memory of an update on a kind of `device`; of one piece, if it is piecewise."""
    if not is_piecewise(o):
        return OPTIMIZERS[o.kind].scratch(o, update)
    buckets = update.plan.buckets_of_rank(update.at)
    elements = min(PIECES[device], max((b.shard_elements for b in buckets), default=0))
    numbers = 0 if o.moments == "fp32" else _count_moments(o)  # wide ones are updated where they are
    numbers += 8 if o.moments == "int8" else 2 if o.kind == "adamw" and numbers else int(o.kind == "lion")
    numbers = max(numbers + 1, 2) if o.masters == "split" else numbers
    staged = STAGING_BUFFERS * count_buffer_bytes(_list_staged_bytes(o, elements, update.itemsize))
    return elements * update.itemsize * numbers + staged


def _list_staged_bytes(o: Optimizer, elements: int, wide: int) -> list[int]:
    """Return the bytes of each tensor of so many elements of parameters that an update brings from host memory."""
    states = describe_stored_states(o)
    moment = elements * wide - states.count_saved_bytes(elements, elements, wide) // max(1, states.count)
    masters = [elements * (2 if o.masters == "split" else wide)] * states.offloads_masters
    return [*[moment] * states.count * states.offloads_states, *masters]


def count_streamed_bytes(config: Config) -> float:
    """Return the bytes of an element that an update brings from host memory, and takes back there."""
    states = describe_stored_states(config.optimizer)
    wide = ITEMSIZE[config.precision]["master"]
    average = wide * (1 + states.offloads_masters) if config.train.ema and states.offloads_states else 0
    return sum(_list_staged_bytes(config.optimizer, SCALE_BLOCK, wide)) / SCALE_BLOCK + average


def is_piecewise(o: Optimizer) -> bool:
    """Return True if the configured optimizer updates piece by piece, from states stored in another form."""
    return o.moments != "fp32" or o.masters != "fp32" or o.offload != "none"


def build_optimizer(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the torch optimizer that config.optimizer `o` names, of parameter groups."""
    maker = OPTIMIZERS[o.kind].make
    make: Callable[..., torch.optim.Optimizer] = bind_settings_object(maker, "optimizer.kind", o.kind, o.settings)
    return make(groups, o)


def build_idle_group(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return a group of two zeros, which never change, for an optimizer that counts updates but trains nothing."""
    import torch

    w = torch.zeros(2, dtype=dtype, device=device, requires_grad=True)
    w.grad = torch.zeros_like(w)
    return {"params": [w], "weight_decay": 0.0}


def probe_optimizer_state(o: Optimizer, dtype: torch.dtype, device: torch.device) -> tuple[list[str], dict[str, Any]]:
    """Return what the configured optimizer keeps per parameter of `dtype`: the names of its moments (tensors of the
    parameter's shape), and its other state by name with the values after one step; for snapshots and checkpoints. Found
    by taking a step on two dummy elements."""
    import torch

    group = build_idle_group(dtype, device)
    (w,) = group["params"]
    optimizer = build_optimizer([group], o)
    optimizer.step()
    state = {name: value for name, value in optimizer.state[w].items() if value is not None}
    moments = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == w.shape]
    return moments, {name: value for name, value in state.items() if name not in moments}


def probe_granularity(o: Optimizer) -> str:
    """Find by trial whether the configured optimizer, registered without `needs`, updates parts of a matrix as it does
    the whole matrix: return `element` if so, else `tensor` (it must see every tensor whole). It takes three steps each
    on the whole matrix, on blocks of rows and on flat parts."""
    import torch

    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 4, generator=draw, dtype=torch.float64) for _ in range(4)]

    def update_parts(cut: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return a matrix in the parts that `cut` makes, after three optimizer steps with gradients cut alike."""
        start, *gradients = (cut(value.clone()) for value in values)
        parts = [part.requires_grad_() for part in start]
        optimizer = build_optimizer([{"params": parts, "weight_decay": 0.1}], o)
        for gradient in gradients:
            for part, of_part in zip(parts, gradient, strict=True):
                part.grad = of_part
            optimizer.step()
        return [part.detach() for part in parts]

    try:
        whole_matrix = update_parts(lambda x: [x])[0]
        rows = torch.cat(update_parts(lambda x: [part.contiguous() for part in x.split(2)]))
        flat = torch.cat(update_parts(lambda x: [part.clone() for part in x.flatten().split(8)])).view_as(whole_matrix)
    except Exception:  # the optimizer refuses such parts
        return "tensor"
    return ELEMENT if torch.allclose(whole_matrix, rows) and torch.allclose(whole_matrix, flat) else "tensor"


def keeps_groups(o: Optimizer) -> bool:
    """Return True if the configured optimizer keeps the parameter groups that it is given, with their own factors on
    the learning rate. One that a user registered is tried, as it may put all of its parameters into one group."""
    if OPTIMIZERS[o.kind] is SHIPPED.get(o.kind):
        return True
    import torch

    alike = {"weight_decay": 0.0, "matrix": False}
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "names": [f"{x}"], "lr_factor": x} for x in (1.0, 0.5)]
    optimizer = build_optimizer([{**group, **alike} for group in groups], o)
    return [group.get("lr_factor") for group in optimizer.param_groups] == [1.0, 0.5]


def preload_imports(o: Optimizer) -> None:
    """Take a dummy optimizer step, so that a spare worker has made torch's slow imports before a run needs it."""
    import torch

    probe_optimizer_state(o, torch.float32, torch.device("cpu"))


def register_optimizer(
    name: str,
    make: Callable[..., torch.optim.Optimizer],
    moments: int,
    needs: str | None = None,
    settings: type | None = None,
) -> None:
    """Register an optimizer as `optimizer.kind=NAME`; `make` and `moments` as in `OptimizerKind`. `needs`: `element` if
    it updates every element by itself, `tensor` if it must see every tensor whole, `matrix` if only tensors of two or
    more dims; found by trying (`probe_granularity`) if None. A plan that would split a tensor that it needs whole is
    refused. `settings`: a dataclass of optimizer.settings, which `make` gets as `settings`. Raises ValueError for any
    other value of `needs`."""
    if needs not in (None, ELEMENT, *FEWEST_DIMS):
        raise ValueError(f"needs={needs!r}: must be {ELEMENT}, {' or '.join(FEWEST_DIMS)}")
    register_own_function("optimizer.kind", name, settings, make)
    OPTIMIZERS[name] = OptimizerKind(make, moments, needs=needs or probe_granularity)


def find_group_factors(o: Optimizer, name: str) -> tuple[float, float]:
    """Return a parameter's factors on (learning rate, weight decay): of the first matching optimizer.groups, else 1."""
    matching_group = next((group for group in o.groups if re.fullmatch(group["match"], name)), {})
    return matching_group.get("lr", 1.0), matching_group.get("weight_decay", 1.0)


def group_parameters(
    o: Optimizer, parameters: Iterable[Parameter], owned: Mapping[str, Any], matrices: Names, scaled: Names = ()
) -> list[dict[str, Any]]:
    """Divide parameters into the groups, as torch's optimizers take them, that share decay and factors, none empty:
    dicts of `params`, their `new_group`, `weight_decay`, `lr_factor`, `matrix` (True for Muon's matrices) and `scaled`.
    `owned`: name -> tensor to update; `matrices`: names of the parameters that Muon updates as whole matrices;
    `scaled`: names of the parameters with scales of their moments."""
    groups: dict[tuple[float, float, bool, bool], dict[str, Any]] = {}
    for p in sorted((p for p in parameters if p.name in owned), key=lambda p: not p.decay):
        lr, decay = find_group_factors(o, p.name)
        kind = lr, o.weight_decay * decay if p.decay else 0.0, p.name in matrices, p.name in scaled
        words = dict(zip(("lr_factor", "weight_decay", "matrix", "scaled"), kind, strict=True))
        new_group = {"params": [], "names": [], **words}
        group = groups.setdefault(kind, new_group)
        group["params"].append(owned[p.name])
        group["names"].append(p.name)
    return list(groups.values())


def find_muon_matrices(o: Optimizer, plan: Plan) -> list[str]:
    """Return the names of the parameters of two or more dims that Muon updates as whole matrices: all that
    optimizer.matrices matches; by default the weights of layers except the last, which gives logits, and no tables."""
    uses: dict[str, list[bool]] = {}
    for operation in (o.operation for o in plan.operations.values()):
        gives_logits = any(spec.region == "logits" for spec in operation.outputs)
        hidden = OPERATIONS[operation.kind].multiplies_matrices and not gives_logits
        for p in operation.parameters:
            uses.setdefault(p.name, []).append(hidden)
    many = [p.name for p in plan.parameters if _is_matrix(p)]
    if o.matrices:
        return [name for name in many if re.fullmatch(o.matrices, name)]
    return [name for name in many if all(uses.get(name, [False]))]


def find_factored_matrices(plan: Plan) -> list[str]:
    """Return the names of the trained matrices whose second moments Adafactor keeps by row and column."""
    return [p.name for p in plan.parameters if _is_matrix(p) and p.decay and p.name not in plan.frozen]


def _is_matrix(p: Parameter) -> bool:
    """Return True if a parameter is a matrix, or one for each expert."""
    return len(p.dims) - p.num_stack_dims > 1


def violations_of_patterns(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line for each pattern in optimizer.groups that matches no parameter of the plan, for groups that
    the optimizer does not keep, and for Adafactor or Muon without a matrix to train."""
    o, names = config.optimizer, [p.name for p in plan.parameters]
    for i, pattern in enumerate(group["match"] for group in o.groups):
        if not any(re.fullmatch(pattern, name) for name in names):
            legal = [re.escape(name) for name in closest_values(pattern, names)[:3]]
            yield format_violation(f"optimizer.groups.{i}.match", pattern, "matches no parameter of the model", legal)
    if o.groups and not keeps_groups(o):
        constraint = f"optimizer.kind={o.kind} does not keep the groups of which it is made, and so not their factors"
        yield format_violation("optimizer.groups", o.groups, constraint, [[]])
    if o.kind == "adafactor" and not plan.factored:
        yield format_violation("optimizer.kind", o.kind, "no matrix is trained", ["adamw"])
    if o.kind == "muon" and not plan.matrices:
        legal = [""] if o.matrices else ["optimizer=adamw"]
        yield format_violation("optimizer.matrices", o.matrices, "matches no matrix that is trained", legal)
    on_diagonal = (p for p in plan.parameters if plan.layout(p).shifted_axes and not p.place)
    if lone := [p.name for p in on_diagonal if p.name in plan.matrices]:
        constraint = f"matches {lone[0]}, a vector that a diagonal of ranks holds (tensor.vectors)"
        yield format_violation("optimizer.matrices", o.matrices, constraint, ["", "tensor.vectors=even"])


def reason_against_early_update(config: Config) -> str:
    """Return why a step's update waits until its loss and norm are read, for the user; "" if the device may skip it."""
    if not OPTIMIZERS[config.optimizer.kind].skips:
        return f"optimizer={config.optimizer.kind} cannot skip an update on the device"
    return "" if config.optimizer.early == "auto" else "optimizer.early=off"


def reason_against_passes_ahead(config: Config, plan: Plan) -> str:
    """Return why no step's passes are launched before the numbers of the step before are read, for the user; "" if they
    are: then the device works while the host reads, reports and waits for the next order."""
    reasons = {
        "train.ahead=off": config.train.ahead == "off",
        f"precision={plan.precision} scales a loss as the step before says": plan.precision == "fp16",
        "parallel.lent_experts follow from the step before": bool(plan.scheme.lent),
        "monitor.timeline begins each step with a barrier": config.monitor.timeline,
        "monitor.log_launches writes the launches of each step": config.monitor.log_launches,
    }
    return next((why for why, applies in reasons.items() if applies), "") or reason_against_early_update(config)


def update_granularity(o: Optimizer) -> str:
    """Return how much of a parameter the optimizer must see at once for an update: `element`, `tensor` or `matrix`."""
    need = OPTIMIZERS[o.kind].needs
    return need if isinstance(need, str) else need(o)


def violations_of_splits(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if the plan gives the configured optimizer parts of tensors that it needs whole (it would
    silently compute different updates); the line names the axes that split them and the nearest legal choices."""
    need, kind = update_granularity(config.optimizer), config.optimizer.kind
    if need == ELEMENT:
        return
    needing = [p for p in plan.parameters if len(p.dims) >= FEWEST_DIMS[need]]
    split = {p.name: _splitting_axes(plan, p) for p in needing if _is_split(plan, p)}
    if not split:
        return
    all_axes = {a for split_axes in split.values() for a in split_axes}
    (name, _), *more = split.items()
    axes = "+".join(plan.mesh.order_axes(all_axes)) or "padding"
    also = f" and {len(more)} more" if more else ""
    constraint = f"updates each {need} as a whole, and {name}{also} is split over {axes}"
    legal = [k for k, other in OPTIMIZERS.items() if other.needs == ELEMENT]
    zero = all_axes and all_axes <= {*plan.sharded}
    yield format_violation("optimizer.kind", kind, constraint, [*legal, *(["parallel.zero=0"] if zero else [])])


def violations_of_stored_states(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if the configured optimizer cannot keep its moments in fewer bits, or if the plan cuts a
    parameter inside a block of elements that has one scale (the updates would be others than one process has)."""
    o, kind = config.optimizer, OPTIMIZERS[config.optimizer.kind]
    others = [f"optimizer={k}" for k, other in OPTIMIZERS.items() if other.stores and k != o.kind]
    if o.masters != "fp32" and plan.precision != "bf16":
        constraint = f"precision={config.precision} has no bf16 weights, of which they were the other half"
        yield format_violation("optimizer.masters", o.masters, constraint, ["fp32", "precision=bf16"])
    if o.masters != "fp32" and plan.frozen:
        constraint = "not built yet beside frozen weights (train.freeze, tune), which have no master copies"
        yield format_violation("optimizer.masters", o.masters, constraint, ["fp32"])
    if o.masters != "fp32" and not kind.stores:
        yield format_violation("optimizer.masters", o.masters, f"{o.kind} reads whole master copies", ["fp32", *others])
    if o.offload != "none" and not (kind.stores and (_count_moments(o) or o.offload == "states+masters")):
        constraint = f"{o.kind} {'reads whole states' if _count_moments(o) else 'keeps no moments'}"
        yield format_violation("optimizer.offload", o.offload, constraint, ["none", *others])
    if o.offload == "states+masters" and plan.precision not in HALF:
        constraint = f"precision={config.precision} computes with the masters themselves"
        yield format_violation("optimizer.offload", o.offload, constraint, ["states", "precision=bf16"])
    if o.moments != "fp32" and not (kind.stores and _count_moments(o)):
        constraint = f"{o.kind} keeps {'all its state as it is' if _count_moments(o) else 'no moments'}"
        yield format_violation("optimizer.moments", o.moments, constraint, ["fp32", *others])
    elif cut := [p for p in plan.parameters if p.name in plan.scaled and plan.cuts_blocks(p, SCALE_BLOCK)]:
        also = f" and {len(cut) - 1} more" if cut[1:] else ""
        axes = "+".join(plan.mesh.order_axes({a for p in cut for a in plan.layout(p).axes})) or "padding"
        constraint = f"{cut[0].name}{also} is cut by {axes} inside a block of {SCALE_BLOCK} elements with one scale"
        yield format_violation("optimizer.moments", o.moments, constraint, ["bf16", "fp32"])


def _is_split(plan: Plan, p: Parameter) -> bool:
    """Return True if the plan gives a rank only a part of the parameter, not all that the optimizer may need."""
    return plan.bucket_by_parameter[p.name].shards > 1 or plan.local_shape(p) != plan.global_shape(p)


def _splitting_axes(plan: Plan, p: Parameter) -> list[str]:
    """Return the mesh axes, of more than one rank, that split a parameter which the optimizer needs whole."""
    return [a for a in plan.master_split_axes(p) if plan.mesh.count_ranks((a,)) > 1]
