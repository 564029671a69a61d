"""Re-planning of a run for another number of workers: the best legal configuration derived from its own.

Pure and deterministic. The starting point is always the configuration that the run was started with, so a run that
shrinks and grows again returns to the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import inf, prod
from operator import attrgetter
from typing import Any, NamedTuple

from platform.config.fields import Config, is_open_key
from platform.config.layout_rules import list_tensor_axes
from platform.optimizer.optimizers import count_offloaded_numbers, count_states_per_element
from platform.plan.plan import Plan
from platform.plan.step_collectives import communication
from platform.predict.contenders import CHOOSABLE
from platform.predict.footprint import state_bytes
from platform.predict.hardware import Hardware
from platform.predict.make_plan import has_legal_plan, make_plan, plan_quickly, settle_for_workers
from platform.predict.memory_budget import (
    MemoryForecast,
    device_kind,
    predict_peak_bytes,
    weight_bytes_by_stage,
)

FEW_LAYERS = 4  # deeper models get a bound first, and are counted exactly only if it leaves them a chance


class MemoryBudget:
    """Memory budget of a worker, to check which candidate configurations fit. `memory`: bytes of a worker; inf:
    unknown, everything fits. The budget is at least what the plan of `config`, with which the run was started, needs by
    our count: the run fits, and the count is an estimate."""

    def __init__(self, config: Config, memory: float):
        """Set the budget to `memory` bytes per worker or, if more, what the plan of the run's own `config` needs."""
        self.memory = memory
        if memory < inf:
            plan = make_plan(config)
            self.memory = max(memory, predict_peak_bytes(config, plan))
            half = 2 if plan.stored.masters == "split" else 0
            state = state_bytes(plan, count_states_per_element(config))
            away = count_offloaded_numbers(config) if device_kind(config) == "cuda" else 0.0
            self._updated = state + ((1 - away) * plan.itemsize["master"] - half) * plan.parameter_count
            self._count, self._itemsize = plan.parameter_count, plan.itemsize

    def may_hold_config(self, config: Config) -> bool:
        """Return True if an even share of the candidate's parameters, gradients and optimizer state fits the budget of
        a worker; quick, as it makes no plan."""
        if self.memory == inf:
            return True
        split = prod((*config.tensor.axes.values(), *config.branch.axes.values(), config.pipeline.stages))
        zero, data = config.parallel.zero, config.parallel.data * config.parallel.context
        experts = config.parallel.experts  # divides at most all parameters
        master, compute = self._itemsize["master"], self._itemsize["compute"]
        updated = self._updated / (data if zero else experts)
        used = master / (data if zero >= 2 else experts)
        used += (compute if compute != master else 0) / (data if zero == 3 else experts)
        return (updated + self._count * used) / split <= self.memory

    def holds_plan(self, config: Config, plan: Plan) -> bool:
        """Return True if the predicted peak memory of every worker under a candidate's plan fits the budget."""
        if self.memory == inf:
            return True
        if max(weight_bytes_by_stage(config, plan)) > self.memory:
            return False
        return not MemoryForecast(config, plan).exceeds_memory(self.memory)


class Replanned(NamedTuple):
    """Configuration and plan of a run for another number of workers. `reason`: one line for people, such as "3 workers:
    data 2 -> 1, 1 idle"."""

    config: Config
    plan: Plan
    reason: str


def replan(config: Config, workers: int, *, memory: float = inf, hardware: Hardware | None = None) -> Replanned | None:
    """Find the best configuration and plan of a run for at most `workers` ranks; None if no plan fits.

    First choice: everything as configured except the replicas, which are min(workers / replica size, initial replicas);
    with elastic.max_workers, the cap is the number of sequences in a batch. The second choice applies if not even one
    replica is possible, if its plan is illegal or does not fit, or if tensor.uneven could use idle workers. It searches
    all sizes of the tensor scheme's axes, branch groups, stages and context ranks (each at most as configured), and
    replicas. The best plan uses the most ranks; among equals, it moves the fewest bytes per step by its own count;
    among equals, it is nearest to the configured sizes. All axes may become 1, so there is a plan for any number of
    workers that have the memory.

    Where the configuration left keys to the planner (`plan.search`), these are chosen anew, as at the start; so are the
    sizes of the axes that it has, on a `hardware` that was fitted to the run's own steps.

    `config`: the run's configuration at its start, with parallel.data settled, not -1. Everything in the run's identity
    (platform.config.identity) stays, and so does train.microbatch. `memory`: bytes of a worker; a plan may not need
    more, unless the configured one does.
    """
    assert config.parallel.data >= 1, "-1 is settled before a run starts"
    workers = min(workers, most_workers(config))
    budget = MemoryBudget(config, memory)
    if (config.plan.search or hardware) and (best := _search_open_keys(config, workers, budget, hardware)):
        return best
    configured_plan = _plan_fewer_replicas(config, workers, budget)
    if not configured_plan or (config.tensor.uneven and configured_plan[1].mesh.world_size < workers):
        configured_plan = _MeshSearch(config, workers, budget).find_best() or configured_plan
    return configured_plan and Replanned(*configured_plan, _explain_replan(config, *configured_plan, workers))


def _search_open_keys(config: Config, workers: int, budget: MemoryBudget, fitted: Hardware | None) -> Replanned | None:
    """Choose the open keys of a run's configuration anew, for at most `workers`, or without any the sizes of its
    axes; None if no plan fits. `fitted`: hardware to take in place of the usual one."""
    from platform.predict.search import search_plans  # with numpy, which only this needs
    from platform.predict.step_price import choose_pricing_hardware, memory_of_worker

    hardware = fitted or choose_pricing_hardware(config)
    memory = budget.memory if budget.memory < inf else memory_of_worker(config, 0.0, hardware)
    sized = replace(config, plan=replace(config.plan, search=config.plan.search or _list_axis_keys(config)))
    if is_open_key(config, "parallel.zero") and config.quantise.gather == "on":  # as a start has settled it of ZeRO-3
        sized = replace(sized, quantise=replace(config.quantise, gather="auto"))
    if not (best := search_plans(sized, workers, memory, hardware).quickest_fitting_finalist):
        return None
    chosen = deepcopy(replace(best.config, plan=config.plan))
    settle_for_workers(chosen, best.plan)
    return Replanned(chosen, best.plan, _explain_replan(config, chosen, best.plan, workers))


def _list_axis_keys(config: Config) -> list[str]:
    """Return the keys of the sizes of the axes that a configuration has."""
    has_axis = {
        "tensor.axes": list_tensor_axes(config.tensor),
        "pipeline.stages": config.pipeline.kind not in ("none", "file"),
        "parallel.context": config.parallel.context > 1,
    }
    return ["parallel.data", *(key for key, has in has_axis.items() if has)]


def iterate_shrinking(config: Config, *, memory: float = inf) -> Iterator[tuple[int, Replanned | None]]:
    """Yield (workers, plan) for a run that loses workers one by one, from `most_workers` down: each plan with the
    largest number of workers that gets it; a number without a plan is yielded with None and ends it. `memory`: bytes of
    a worker."""
    workers = most_workers(config)
    while workers:
        replanned = replan(config, workers, memory=memory)
        yield workers, replanned
        workers = replanned.plan.mesh.world_size - 1 if replanned else 0


def most_workers(config: Config) -> int:
    """Return how many workers a re-planned run may grow to: elastic.max_workers or, where 0, as many as configured."""
    return config.elastic.max_workers or _workers_per_replica(config) * config.parallel.data


ConfiguredPlan = tuple[Config, Plan]


def _workers_per_replica(config: Config) -> int:
    """Return the workers that a re-planned replica needs: the product of tensor and branch axes, stages and context."""
    sizes = (*config.tensor.axes.values(), *config.branch.axes.values())
    return prod((*sizes, config.pipeline.stages, config.parallel.context))


def _most_replicas(config: Config) -> int:
    """Return how many data replicas get a sequence of the global batch; a re-plan with more would compute padding."""
    return -(-config.train.global_batch // config.train.microbatch)


def _plan_fewer_replicas(config: Config, workers: int, budget: MemoryBudget) -> ConfiguredPlan | None:
    """Return the configuration and plan with the most data replicas that `workers` and, beyond the configured number,
    the sequences of the global batch allow, and all else as configured; None if not even one replica is possible, or
    the plan is refused or does not fit the budget."""
    data = min(workers // _workers_per_replica(config), max(config.parallel.data, _most_replicas(config)))
    if not data:
        return None
    smaller = replace(config, parallel=replace(config.parallel, data=data))
    plan = plan_quickly(smaller)
    return (smaller, plan) if plan and budget.holds_plan(smaller, plan) else None


class _Sizes(NamedTuple):
    """Candidate of the search: sizes of the tensor scheme's axes and of the branch axes, each in order, and numbers of
    pipeline stages, ranks of a context and data replicas."""

    tensor: tuple[int, ...]
    branch: tuple[int, ...]
    stages: int
    context: int
    data: int

    @property
    def flat_sizes(self) -> tuple[int, ...]:
        """Return all sizes of a candidate mesh in one tuple: tensor axes, branch axes, stages, context, replicas."""
        return (*self.tensor, *self.branch, self.stages, self.context, self.data)


class _MeshSearch:
    """Searches all sizes of all axes for the best plan on at most `workers` ranks: most ranks, then fewest bytes moved
    per step, then nearest to the configured sizes."""

    def __init__(self, config: Config, workers: int, budget: MemoryBudget):
        """Begin the search for a re-planned run of at most `workers`, from its own `config`, within a memory budget."""
        self.config, self.workers, self.budget = config, workers, budget
        self.axes, self.branches = list_tensor_axes(config.tensor), list(config.branch.axes)
        configured_axes = config.tensor.axes
        sizes = tuple(configured_axes.get(a, 1) for a in self.axes), tuple(config.branch.axes.values())
        self.own = _Sizes(*sizes, config.pipeline.stages, config.parallel.context, config.parallel.data)
        self._legal: dict[_Sizes, bool] = {}
        self._bounds: dict[_Sizes, float] = {}

    def find_best(self) -> ConfiguredPlan | None:
        """Return the best configuration and plan for a re-planned run: with the most ranks; None if no plan fits."""
        for ranks in range(self.workers, 0, -1):
            candidates = [s for s in self._iterate_sizes(ranks) if self.is_feasible(s)]
            if configured_plan := self._pick_fewest_bytes(candidates):
                return configured_plan
        return None

    def _pick_fewest_bytes(self, candidates: Iterable[_Sizes]) -> ConfiguredPlan | None:
        """Return, of candidate sizes for one number of ranks, the configuration and plan that move the fewest bytes per
        step, of equals those nearest to the configured sizes; None if none is legal and fits. Exact counts are made
        only while the lower bound leaves a candidate a chance."""
        best_key, best_plan = (inf,), None
        for bound, sizes in sorted((self._bound_bytes(s), s) for s in candidates):
            if bound > best_key[0]:
                break
            config = self.build_config(sizes)
            if (plan := plan_quickly(config)) is None:
                continue
            key = (sum(communication(plan).values()), *self._measure_distance(sizes))
            if key < best_key and self.budget.holds_plan(config, plan):
                best_key, best_plan = key, (config, plan)
        return best_plan

    def _iterate_sizes(self, ranks: int) -> Iterator[_Sizes]:
        """Yield all candidate mesh sizes whose product is `ranks` and of which every data replica gets a sequence."""
        most = range(1, self.own.stages + 1), range(1, self.own.context + 1)
        for (tensor, branch), stages, context in product(self._scheme_sizes, *most):
            data, remainder = divmod(ranks, prod(tensor) * prod(branch) * stages * context)
            if not remainder and data <= _most_replicas(self.config):
                yield _Sizes(tensor, branch, stages, context, data)

    @cached_property
    def _scheme_sizes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the candidate sizes of the mesh's (tensor axes, branch axes): each axis takes the sizes that are legal
        with all others at 1, since the dims that it splits do not depend on the others."""
        tensor, branch = (1,) * len(self.axes), (1,) * len(self.branches)
        free = [[n for n in range(1, self.workers + 1) if self._is_allowed(_replace_size(tensor, i, n), branch)]
                for i in range(len(tensor))]  # fmt: skip
        fewer = [[n for n in range(1, size + 1) if self._is_allowed(tensor, _replace_size(branch, i, n))]
                 for i, size in enumerate(self.own.branch)]  # fmt: skip
        pairs = product(product(*free), product(*fewer))
        return [(t, b) for t, b in pairs if prod(t) * prod(b) <= self.workers]

    def is_feasible(self, sizes: _Sizes) -> bool:
        """Return True if a candidate mesh may fit the memory budget, by a quick bound, and has a legal plan."""
        allowed = self._is_allowed(sizes.tensor, sizes.branch, sizes.context)
        return allowed and self.budget.may_hold_config(self.build_config(sizes))

    def _is_allowed(self, tensor: tuple[int, ...], branch: tuple[int, ...], context: int = 1) -> bool:
        """Return True if the model has a legal plan at these candidate sizes of tensor and branch axes, with so many
        ranks of a context; planned once and remembered. One replica is tried, as any number of replicas divides."""
        sizes = _Sizes(tensor, branch, 1, context, 1)
        if sizes not in self._legal:
            self._legal[sizes] = has_legal_plan(self.build_config(sizes), 1)
        return self._legal[sizes]

    def _bound_bytes(self, sizes: _Sizes) -> float:
        """Return a lower bound of the bytes that a re-planned mesh of these sizes communicates per step: without
        stages, which only add traffic, and extrapolated linearly in the layers from models of 2 and 3; 0 for a model of
        at most FEW_LAYERS, or if one of these cannot be planned."""
        layers, single_stage = self.config.model.layers, sizes._replace(stages=1)
        if layers <= FEW_LAYERS:
            return 0.0
        if single_stage not in self._bounds:
            c = self.build_config(single_stage)
            plans = [plan_quickly(replace(c, model=replace(c.model, layers=few))) for few in (2, 3)]
            two, three = (sum(communication(plan).values()) if plan else 0 for plan in plans)
            self._bounds[single_stage] = two + (layers - 2) * (three - two) if all(plans) else 0.0
        return self._bounds[single_stage]

    def build_config(self, sizes: _Sizes) -> Config:
        """Return the configuration that a re-planned run has at these mesh sizes; a schedule from a file, which is only
        for the configured stages and microbatches, becomes a shipped one, and one stage has no pipeline."""
        c, kind = self.config, self.config.pipeline.kind
        if kind == "file":  # its table is only for the configured stages and microbatches
            kind = "1f1b" if c.pipeline.chunks == 1 else "interleaved"
        pipeline = replace(c.pipeline, kind=kind, file="", stages=sizes.stages)
        if sizes.stages == 1:
            pipeline = replace(pipeline, kind="none", chunks=1)
        return replace(
            c,
            tensor=replace(c.tensor, axes=dict(zip(self.axes, sizes.tensor, strict=True))),
            branch=replace(c.branch, axes=dict(zip(self.branches, sizes.branch, strict=True))),
            parallel=replace(
                c.parallel, data=sizes.data, context=sizes.context, **_choose_context_keys(c, sizes.context)
            ),
            pipeline=pipeline,
        )

    def _measure_distance(self, sizes: _Sizes) -> tuple:
        """Return how far a candidate mesh is from the configured one: axes that differ, then the sum of differences."""
        pairs = list(zip(sizes.flat_sizes, self.own.flat_sizes, strict=True))
        return sum(a != b for a, b in pairs), sum(abs(a - b) for a, b in pairs), sizes


def _choose_context_keys(config: Config, ranks: int) -> dict[str, Any]:
    """Return the keys of a configuration's contexts at another number of `ranks`: nested ones stay while they can."""
    inner, parallel = config.parallel.context_heads, config.parallel
    if not inner or (inner < ranks and ranks % inner == 0):
        return {"context_kind": parallel.context_kind, "context_heads": inner}
    return {"context_kind": "auto", "context_heads": 0}


def _replace_size(sizes: tuple[int, ...], i: int, n: int) -> tuple[int, ...]:
    """Return the mesh axes' candidate sizes with number `i` replaced by `n`, for the re-planning search."""
    return (*sizes[:i], n, *sizes[i + 1 :])


def _explain_replan(before: Config, after: Config, plan: Plan, workers: int) -> str:
    """Return the line that explains a re-planned run: the sizes that differ between the configurations `before` and
    `after`, and how many of its `workers` stay idle."""
    values = {part: (attrgetter(row.key)(before), attrgetter(row.key)(after)) for part, row in CHOOSABLE.items()}
    sizes = [(part, *values.pop(part)) for part in ("data", "stages", "context")]
    pairs = [
        ("tensor", before.tensor.scheme, after.tensor.scheme),
        *sizes,
        *((a, before.tensor.axes.get(a, 1), n) for a, n in after.tensor.axes.items()),
        *((a, before.branch.axes[a], n) for a, n in after.branch.axes.items()),
        *(("pipeline" if part == "kind" else part, a, b) for part, (a, b) in values.items() if part != "chunks"),
    ]
    parts = [f"{name} {a} -> {b}" for name, a, b in pairs if a != b] or ["as configured"]
    if idle := workers - plan.mesh.world_size:
        parts.append(f"{idle} idle")
    return f"{workers} {'worker' if workers == 1 else 'workers'}: {', '.join(parts)}"
