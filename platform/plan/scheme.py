"""Schemes: a tensor scheme and a branch splitting, two small tables, composed into one layout per region and role.

The tables are the YAML files of conf/tensor and conf/branch; docs/numerics.md shows them side by side.

`lent_experts` are busy experts that ranks compute for others (redundant experts: DeepSeek-AI 2024, section 3.4), chosen
between steps by the load of the step before: they change where rows are computed, and no number. A `ModelMistake` in a
model's declarations is raised while it is recorded, and names the mistake, its place, and the legal choices.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from traceback import walk_stack, walk_tb
from types import FrameType, MappingProxyType
from typing import Any

from platform.plan.layout import Layout, common_prefix
from platform.plan.model_types import STATES, Parameter, Spec

REGIONS = ("stream", "attention", "core", "mlp", "experts", "logits")
SEQUENCE = "sequence"  # the region of attention whose ranks have whole sequences, of fewer heads: no table has it
ROLES = ("in", "out", "vector")
Rules = Mapping[str, Sequence[str]]  # dim -> axes
REPLICAS = ("data", "zero", "expert")  # axes of the replicas, which compute different sequences, outer to inner
CONTEXT = ("context", "exchange")  # axes that split length; in attention, length over the one and heads over the other
RESERVED = ("stage", *REPLICAS, *CONTEXT)
GATHERED = {
    "keep": "gathered operands are kept until the backward pass: fewest bytes",
    "again": "only the local blocks are kept, and gathered again: activation memory O(1/P)",
    "panels": "operands are never whole: SUMMA broadcasts one panel at a time and accumulates",
}
CONTEXT_KINDS = {
    "auto": "the legal kind that moves the fewest bytes, and fits a stated memory of devices",
    "gather": "each rank gathers all keys and values, for its own queries",
    "ring": "keys and values go around the ranks, a panel at a time, while the one before is computed",
    "heads": "ranks exchange length for heads, and back",
    "nested": "parallel.context_heads ranks next to each other exchange heads, and gather keys of the others",
    "nested_ring": "the same, and keys of the others go around: nested chooses it where only it fits a stated memory",
}
NESTED, RINGS = ("nested", "nested_ring"), ("ring", "nested_ring")  # of these kinds
TENSOR_EXPERTS = {
    "split": "split each, as they split other feed-forward layers",
    "whole": "divide the experts among them, each whole: fewer and wider products, where experts are narrow",
}
VECTORS = {
    "even": "every rank along the axes that do not split it holds a block of it: none is broadcast",
    "diagonal": "of the plane of axes y and z the diagonal holds it: algorithms 7 and 8 of Bian et al. 2021",
}
DIAGONAL = ("y", "z")  # axes of 3-D schemes, in the order of which algorithms 7 and 8 swap them
HEAD_DIMS = {"kv_heads", "d_kv"}  # dims beside heads that a vector has, such as the bias of queries
SLICE_VIA = {
    "all_to_all": "every rank gets what it needs",
    "all_gather": "every rank gets all and throws the rest away: as SUPER published it, which had no all-to-all",
}


@dataclass(frozen=True)
class Scheme:
    """Table of the layouts of a run: of the activations in every region of a model, and of the parameters in every
    role.

    `axes` are the tensor scheme's and the branch splitting's axes with their sizes, outer to inner, without `data`.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    regions: Mapping[str, Layout]
    parameters: Mapping[str, Layout]  # by role; of experts' by `experts ROLE`
    branches: tuple[str, ...] = ()  # the axes that come from the branch splitting
    branches_outer: bool = False  # True: branch axes are the outermost of the mesh, D&SP's naive order
    parameters_only: tuple[str, ...] = ()  # axes at whose index 0 alone a parameter exists, unless they split it
    gathered: str = "keep"  # what an einsum does with gathered operands: see GATHERED
    slice_via: str = "all_to_all"  # how a dim is sliced over the branches: see SLICE_VIA
    zero: int = 0  # replicas of an expert next to each other that divide one state (axis `zero`), 0: all do
    experts: int = 1  # replicas next to each other that divide the experts among them, along the axis `expert`
    uneven: bool = False  # axes may cut dims into blocks that differ by one unit: see UNEVEN
    lent: int = 0  # experts of others that each of them computes too, the busiest ones: see `lent_experts`
    context: tuple[tuple[str, int], ...] = ()  # the axes of CONTEXT with their sizes, of more than one rank
    ring: bool = False  # keys and values go around the axis context, and are not gathered over it
    zigzag: str = ""  # the axis to whose ranks pieces of length are dealt: see `layout.zigzag`
    rounds: int = 1  # in which they are dealt, two pieces a rank in each
    diagonal: tuple[str, ...] = ()  # two axes of one size: a vector that one of them splits exists at equal indices

    @cached_property
    def described_regions(self) -> str:
        """Return the layouts of all regions as text, equal for equal ones: what a recorder asks of a scheme."""
        return repr(self.regions)

    def mesh_axes(self, data: int) -> dict[str, int]:
        """Return every mesh axis of a run but `stage` with its size, outer to inner; `data`: the number of replicas."""
        sizes = {**_replica_axes(data, self.zero, self.experts), **dict(self.context), **dict(self.axes)}
        first = self.branches if self.branches_outer else ()
        return {a: sizes[a] for a in dict.fromkeys((*first, *sizes))}

    def key_of_axis(self, axis: str) -> str:
        """Return the key that sets the size of a mesh axis, such as `tensor.axes.t`, for error messages."""
        if axis in REPLICAS:
            return "parallel.experts" if axis == "expert" else "parallel.data"
        if axis in CONTEXT:
            return "parallel.context"
        return f"{'branch' if axis in self.branches else 'tensor'}.axes.{axis}"

    def activation_layout(self, region: str, dims: Sequence[str]) -> Layout:
        """Return an activation's layout, of these `dims` in a `region`; in SEQUENCE contexts split heads, no length."""
        if region != SEQUENCE:
            return self.regions[region].restrict_dims(dims)
        layout = self.regions["attention"]
        moved = [axis for axis in layout["length"] if axis in CONTEXT]
        rules = {dim: [axis for axis in axes if axis not in moved] for dim, axes in layout.items()}
        return Layout.build_canonical(rules | {"heads": [*layout["heads"], *moved]}, layout.only).restrict_dims(dims)

    def fuses_attention(self, region: str) -> bool:
        """Return True if one fused kernel can do attention: `region` leaves memory_length and d_kv whole."""
        return not any(self.regions[region][d] for d in ("memory_length", "d_kv"))

    def has_ring_attention(self, region: str, memory: str) -> bool:
        """Return True if keys in region `memory` go around: context alone splits length there and in `region`."""
        lengths = {self.regions[r]["length"] for r in (region, memory)}
        return self.ring and not self.uneven and lengths == {CONTEXT[:1]} and self.fuses_attention(region)

    def parameter_layout(self, role: str, dims: Sequence[str]) -> Layout:
        """Return the layout that the scheme gives to a parameter with dims `dims` and this `role`."""
        if role in STATES:
            return Layout.build_canonical({})
        name = _name_parameter_role_of_experts(role) if "experts" in dims and role != "vector" else role
        layout = self.parameters[name].restrict_dims(dims)
        held = [axis for axis in self.diagonal if axis in layout.axes and len({*dims} - HEAD_DIMS) == 1]
        beside = [f"{axis}-{held[0]}" for axis in self.diagonal if len(held) == 1 and axis not in held]
        return Layout.build_canonical(layout, (*self.parameters_only, *beside))

    @property
    def sub_grid_zero_axes(self) -> tuple[str, ...]:
        """Return the branch axes at whose index 0 alone some tensors exist (D&SP-cSub keeps its common layers on
        sub-grid 0); () if every rank has a block of all."""
        only_axes = {a for layout in self.regions.values() for a in layout.only} | set(self.parameters_only)
        return tuple(a for a in self.branches if a in only_axes)


def _name_parameter_role_of_experts(role: str) -> str:
    """Return the name under which a scheme has the layout of experts' parameters of a role."""
    return f"experts {role}"


def _replica_axes(data: int, zero: int, experts: int) -> dict[str, int]:
    """Return the mesh axes, with sizes, of `data` replicas in groups that share shards or experts."""
    inner = {axis: n for axis, n in (("zero", zero), ("expert", experts)) if n > 1}
    return {"data": data // (max(zero, 1) * experts), **inner}


def region_rules(table: Mapping[str, Rules], name: str) -> Rules:
    """Return a region's layout in a tensor scheme, as a map from dims to mesh axes, from its `table` of regions."""
    if name == "experts" and name not in table:
        wide = {dim: axes for dim, axes in region_rules(table, "mlp").items() if dim not in ("length", "d_model")}
        free = [a for a in region_rules(table, "stream").get("d_model", ()) if a not in wide.get("batch", ())]
        return {**wide, "d_model": free}
    fallback = "attention" if name == "core" and "attention" in table else "stream"
    return dict(table.get(name, table.get(fallback, {})))


def _branch_only_axes(branch: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the branch axes at whose index 0 alone the tensors of a region, or `parameters`, exist."""
    return tuple(axis for axis, n in branch["axes"].items() if n > 1 and name in branch["only"])


def _add_branch_axes(branch: Mapping[str, Any], name: str, rules: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Add the axes of a branch splitting to a region's map from dims to mesh axes, before or behind others."""
    is_named = any(name in branch[k] for k in ("append", "prepend"))
    key = name if is_named else {"core": "attention", "experts": "mlp"}.get(name, name)
    out, branches = {dim: list(axes) for dim, axes in rules.items()}, list(branch["axes"])
    for dim in branch["prepend"].get(key, ()):
        out[dim] = branches + out.get(dim, [])
    for dim in branch["append"].get(key, ()):
        out[dim] = out.get(dim, []) + branches
    return out


def axes_of_experts(regions: Mapping[str, Rules], branch: Mapping[str, Any], tensor_experts: str) -> list[str]:
    """Return the axes of a tensor scheme, by its table of `regions`, and of a branch splitting that divide experts."""
    rules = _add_branch_axes(branch, "experts", region_rules(regions, "experts"))
    return _add_expert_axes(rules, _axes_dividing_experts(rules, tensor_experts))["experts"]


def _axes_dividing_experts(rules: Mapping[str, Sequence[str]], tensor_experts: str) -> Sequence[str]:
    """Return the axes by which a scheme divides whole experts, where its region experts lets them split d_ff."""
    return rules.get("d_ff", ()) if tensor_experts == "whole" else ()


def _add_expert_axes(rules: Mapping[str, Sequence[str]], dealt: Sequence[str]) -> dict[str, list[str]]:
    """Add axes that divide experts to a map from dims of experts to axes: none of them splits d_ff or d_model there."""
    experts = list(dict.fromkeys([*rules.get("experts", ()), *dealt]))
    inside = {dim: [a for a in rules.get(dim, ()) if a not in experts] for dim in ("d_ff", "d_model")}
    return {**{dim: list(axes) for dim, axes in rules.items()}, **inside, "experts": experts}


def _role_rules(tensor: Mapping[str, Any], branch: Mapping[str, Any], whole: Sequence[str]) -> dict[str, Rules]:
    """Return by role the map from dims of parameters to mesh axes; `whole`: axes that divide whole experts."""
    rules_by_role = {r: tensor["parameters"].get(r, tensor["parameters"].get("all", {})) for r in ROLES}
    roles = {r: _add_branch_axes(branch, "parameters", rules) for r, rules in rules_by_role.items()}
    return {**roles, **{_name_parameter_role_of_experts(r): _add_expert_axes(roles[r], whole) for r in ("in", "out")}}


def _add_context_axes(contexts: Mapping[str, int], name: str, rules: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Add the axes of contexts to a region's map from dims to mesh axes: first of length, and last of heads."""
    heads = [axis for axis in contexts if name == "core" and axis == "exchange"]
    length = [axis for axis in contexts if axis not in heads]
    context_rules = {"length": [*length, *rules.get("length", [])], "heads": [*rules.get("heads", []), *heads]}
    return {**rules, **context_rules} if contexts else dict(rules)


NO_CONTEXT: Mapping[str, int] = MappingProxyType({})


def compose_scheme(
    tensor: Mapping[str, Any],
    branch: Mapping[str, Any],
    data: int,
    zero: int = 0,
    experts: int = 1,
    lent: int = 0,
    context: Mapping[str, int] = NO_CONTEXT,
    rounds: int = 0,
    ring: bool = False,
    tensor_experts: str = "split",
) -> Scheme:
    """Compose a Scheme from a tensor scheme and a branch splitting, two configuration groups
    (platform.config.fields.Tensor and Branch, as plain data), for `data` replicas in groups of `experts`, and
    `zero` such groups together (0: all). `context`: size of each axis of CONTEXT; `rounds`: in how many pieces of
    length are dealt to its ranks in zigzag, 0: parts lie straight. `tensor_experts`: see TENSOR_EXPERTS.

    The replicas' axes are put first in batch's list in every region and axes of size 1 are dropped; in region experts,
    and in its parameters, the axis expert splits dim experts instead. In batch's lists it is behind the axes with which
    all of them begin, so that it moves alone, by one all-to-all. The axes of CONTEXT are put first in length's list in
    every region; in the core of attention, exchange is put last in heads' list instead. A region without a map has the
    stream's (core: attention's; experts: mlp's, d_model as the stream). `whole` experts are split by axes of d_ff.
    """
    sizes = {a: tensor["axes"].get(a, 1) for a in tensor["order"] or tensor["axes"]} | dict(branch["axes"])
    contexts = {axis: context[axis] for axis in CONTEXT if context.get(axis, 1) > 1}
    branches, replicas = list(branch["axes"]), _replica_axes(data, zero, experts)
    dealt: dict[str, list[str]] = {"experts": ["expert"]} if experts > 1 else {}

    def build_layout(name: str, rules: Mapping[str, Sequence[str]], first: Mapping[str, list[str]]) -> Layout:
        """Return the layout of a region or role from its map of dims to mesh axes, behind the axes `first`."""
        merged = {dim: [*first.get(dim, []), *rules.get(dim, [])] for dim in [*first, *rules]}
        live = {**replicas, **contexts, **sizes}
        rules = {dim: [a for a in axes if live[a] > 1] for dim, axes in merged.items()}
        return Layout.build_canonical(rules, _branch_only_axes(branch, name))

    maps = {r: _add_branch_axes(branch, r, region_rules(tensor["regions"], r)) for r in REGIONS}
    maps = {r: _add_context_axes(contexts, r, rules) for r, rules in maps.items()}
    whole = _axes_dividing_experts(maps["experts"], tensor_experts)
    maps["experts"] = _add_expert_axes(maps["experts"], whole)
    stays = common_prefix(*(rules.get("batch", ()) for rules in maps.values()))
    maps = {r: {**rules, "batch": rules.get("batch", [])[len(stays) :]} for r, rules in maps.items()}
    outer = [*(a for a in replicas if a != "expert"), *stays]
    of_experts, of_others = {"batch": outer, **dealt}, {"batch": [*outer, *dealt.get("experts", ())]}
    weights = _role_rules(tensor, branch, whole).items()
    return Scheme(
        name=tensor["scheme"] + (f" + {branch['kind']}" if branches else ""),
        axes=tuple(sizes.items()),
        regions={r: build_layout(r, rules, of_experts if r == "experts" else of_others) for r, rules in maps.items()},
        parameters={r: build_layout("", rules, dealt if r.startswith("experts") else {}) for r, rules in weights},
        branches=tuple(branches),
        branches_outer=branch["order"] == "outer",
        parameters_only=_branch_only_axes(branch, "parameters"),
        gathered=tensor["gathered"],
        slice_via=branch["slice_via"],
        uneven=tensor["uneven"],
        diagonal=DIAGONAL if tensor["vectors"] == "diagonal" and _has_diagonal(sizes) else (),
        **dict[str, Any](zero=zero, experts=experts, lent=lent if experts > 1 else 0, ring=ring),
        context=tuple(contexts.items()),
        **dict[str, Any](zigzag="context", rounds=rounds) if rounds and "context" in contexts else {},
    )


def _has_diagonal(sizes: Mapping[str, int]) -> bool:
    """Return True if the plane of a scheme whose axes are of these `sizes` is a square of more than one rank."""
    sides = {sizes.get(axis, 1) for axis in DIAGONAL}
    return len(sides) == 1 and sides != {1}


Lent = tuple[tuple[int, ...], ...]  # for each rank of a group, the experts of others that it computes too, in order


def lent_experts(load: Sequence[int], ranks: int, max_lent_per_rank: int) -> Lent:
    """Plan the loans of experts: return for each of `ranks`, which have the experts in equal blocks, up to
    `max_lent_per_rank` experts of others that it computes too. `load`: tokens that chose each expert; an expert's are
    dealt evenly to the ranks that compute it.

    The busiest rank lends its busiest expert to the idlest rank with a free seat, as long as both are then less busy
    than it was. Example: lent_experts((6, 1, 1, 2), 2, 1) = ((3,), (0,)): 7 and 3 tokens become 5 and 5.
    """
    block_size = len(load) // ranks
    at = {expert: [expert // block_size] for expert in range(len(load))}
    lent: list[list[int]] = [[] for _ in range(ranks)]
    while loan := _next_loan(load, at, [rank for rank in range(ranks) if len(lent[rank]) < max_lent_per_rank], ranks):
        expert, rank = loan
        at[expert].append(rank)
        lent[rank].append(expert)
    return tuple(tuple(sorted(experts)) for experts in lent)


def lent_by_layer(layers: Sequence[str], loads: Sequence[float], scheme: Scheme) -> dict[str, Lent]:
    """Plan the loans `lent_experts` of each of `layers`, of whose loads in a step `loads` has one after another."""
    experts = len(loads) // len(layers)
    by_layer = (list(map(int, loads[i : i + experts])) for i in range(0, len(loads), experts))
    return {name: lent_experts(load, scheme.experts, scheme.lent) for name, load in zip(layers, by_layer, strict=True)}


def _next_loan(
    load: Sequence[int], ranks_by_expert: dict[int, list[int]], free: list[int], ranks: int
) -> tuple[int, int] | None:
    """Plan the next loan: return the expert to lend, and the rank, one of the `free`, that takes it; None if that helps
    no more. `ranks_by_expert`: the ranks that compute each expert."""
    busy = [0.0] * ranks
    for expert, holders in ranks_by_expert.items():
        for rank in holders:
            busy[rank] += load[expert] / len(holders)
    busiest = max(range(ranks), key=lambda rank: (busy[rank], -rank))
    busiest_experts = (expert for expert, holders in ranks_by_expert.items() if busiest in holders and load[expert])
    for expert in sorted(busiest_experts, key=lambda expert: (-load[expert] / len(ranks_by_expert[expert]), expert)):
        share = load[expert] / (len(ranks_by_expert[expert]) + 1)
        takers = [rank for rank in free if rank not in ranks_by_expert[expert] and busy[rank] + share < busy[busiest]]
        if takers:
            return expert, min(takers, key=lambda rank: (busy[rank], rank))
    return None


INITS = ("normal", "uniform", "zeros", "ones")


class ModelMistake(ValueError):
    """Error in the code of a user's model: the offending name, the reason with its file and line, and the names that
    would be legal there (empty if they cannot be listed)."""

    def __init__(self, name: str, reason: str, legal: Iterable[str] = (), place: str = ""):
        """Construct the error; `place`: file:line in the user's model, by default of the call being recorded."""
        self.name, self.legal = name, list(legal)
        self.reason = f"{reason} (at {place or _find_call_place()})"
        super().__init__(f"{name}: {self.reason}")


def check_specs(name: str, tensors: Sequence[Spec | Parameter], sizes: Mapping[str, int]) -> None:
    """Refuse by ModelMistake what a scheme cannot lay out: an unknown region, an unknown dim, or a dim that one tensor
    has twice, among the inputs and outputs `tensors` of the operation `name` of a model. `sizes`: the model's dims."""
    for t in tensors:
        if isinstance(t, Spec) and t.region not in (*REGIONS, SEQUENCE):
            raise ModelMistake(t.region, f"no such region, in {name}", REGIONS)
        _check_dims(t, sizes, f"in {name}")
        for dim in t.dims:
            if t.dims.count(dim) > 1:
                raise ModelMistake(dim, f"a dim comes once, in {name}: {' '.join(t.dims)}")


def check_parameters(declared: Sequence[Parameter], model: Any, sizes: Mapping[str, int]) -> None:
    """Raise ModelMistake for a duplicate name or an unknown role, initialiser or dim among the parameters that `model`
    declares. `sizes`: the model's dims."""
    place = definition_place(model)
    names = Counter(p.name for p in declared)
    for p in declared:
        if names[p.name] > 1:
            raise ModelMistake(p.name, "several parameters have this name", place=place)
        for value, legal, noun in ((p.role, (*ROLES, *STATES), "role"), (p.init, INITS, "initialiser")):
            if value not in legal:
                raise ModelMistake(value, f"no such {noun}, of parameter {p.name}", legal, place)
        _check_dims(p, sizes, f"of parameter {p.name}", place)


def _check_dims(tensor: Spec | Parameter, sizes: Mapping[str, int], whose: str, place: str = "") -> None:
    """Refuse by ModelMistake a dim of `tensor` that no scheme can lay out, with a size neither in the model's `sizes`
    nor in the tensor's own; `whose` ends the message, `place` is file:line."""
    for dim in tensor.dims:
        if dim not in sizes and dim not in dict(tensor.sizes):
            raise ModelMistake(dim, f"no such dim, {whose}: the model's sizes have none", sizes, place)


def check_parameters_used(declared: Sequence[Parameter], used: Iterable[str], model: Any) -> None:
    """Raise ModelMistake for a parameter that `model` declares and no recorded operation uses: it would have no
    gradient. `used`: names."""
    used_names = set(used)
    for p in declared:
        if p.name not in used_names:
            raise ModelMistake(p.name, "a declared parameter that nothing uses", place=definition_place(model))


@contextmanager
def raise_model_mistakes(model: Any) -> Iterator[None]:
    """Raise a ModelMistake with file and line in place of any exception that user code of `model`, from outside this
    package, raises within the context, in which it is made or planned.

    Exceptions of this package's own models, ModelMistake and MemoryError pass unchanged.
    """
    try:
        yield
    except (ModelMistake, MemoryError):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        user_frames = [(f, line) for f, line in walk_tb(error.__traceback__) if not _is_own_module(_module_of_frame(f))]
        if _is_own_module(model.__module__) or not user_frames:
            raise
        try:
            text = " ".join(str(error).split())
        except Exception:  # it may not even be printable
            text = "its text raises an error too"
        reason = f"{type(error).__name__}{': ' + text if text else ''}"
        name = getattr(model, "__name__", type(model).__name__)
        raise ModelMistake(name, reason, place=_format_place(*user_frames[-1])) from error


def _module_of_frame(frame: FrameType) -> str:
    """Return the module of a stack frame in which a plan is made: of a user's model or of this package."""
    return frame.f_globals.get("__name__", "")


def _is_own_module(module: str) -> bool:
    """Return True if a module that a plan is made in belongs to this package, and so is not a user's model."""
    return module.startswith("platform.") or module == "contextlib"


def _find_call_place() -> str:
    """Return file:line of the statement in a user's model that is being recorded for a plan: the innermost frame
    outside this package, else (a model of this package) outside platform.plan."""
    stack = (frame for frame, _ in walk_stack(sys._getframe(2)))
    frames = list(takewhile(lambda f: _module_of_frame(f) != "platform.plan.chunks", stack))  # the caller of the model
    models = [f for f in frames if not _module_of_frame(f).startswith("platform.plan")]
    caller = next((f for f in models if not _is_own_module(_module_of_frame(f))), (models or frames)[0])
    return _format_place(caller, caller.f_lineno)


def definition_place(model: Any) -> str:
    """Return file:line of the `parameters` of a model that cannot be planned, for the error, or its class's name."""
    code = getattr(getattr(type(model), "parameters", None), "__code__", None)
    return f"{_shorten_path(code.co_filename)}:{code.co_firstlineno}" if code else type(model).__name__


def _format_place(frame: FrameType, line: int) -> str:
    """Return file:line of a line in a user's model that cannot be planned, for a ModelMistake."""
    return f"{_shorten_path(frame.f_code.co_filename)}:{line}"


def _shorten_path(path: str) -> str:
    """Return the path of a model that cannot be planned, for a ModelMistake: absolute or relative, the shorter one."""
    return min(path, os.path.relpath(path), key=len)
