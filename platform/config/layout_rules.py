"""Rules that refuse the keys of groups parallel, tensor, branch and pipeline.

`parse_layout` reads a map from tensor dims to mesh axes (`tensor.layout`), and `violations_of_tables` checks scheme
tables (conf/tensor, conf/branch and the user's own files) as strictly as typed arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import gcd, prod
from operator import attrgetter
from typing import Any

import yaml

from platform.boundary.refusals import ConfigError, closest_values, format_violation, refuse_all
from platform.config.fields import ALL, KEYS, Branch, Config, Tensor, set_value
from platform.config.groups import AUTO as MESH_RULES_AUTO
from platform.config.groups import Rules
from platform.config.key import WORKERS, violation_of_key
from platform.config.ramps import length_phases
from platform.plan.chunks import BUCKET_MIB
from platform.plan.generators import NO_TABLE, ONE_CHUNK
from platform.plan.layout import DIMS, find_divisors
from platform.plan.scheme import DIAGONAL, NESTED, REGIONS, RESERVED, ROLES, axes_of_experts

KNOWN_DIMS = list(DIMS)  # tensor dims that tensor.layout may name
_REGIONS = (*REGIONS, "parameters")  # regions of tensor.layout and of branches
_PARTS = {  # key -> (what its entries are called, their legal names)
    "tensor.regions": ("region", REGIONS),
    "tensor.parameters": ("role", ("all", *ROLES)),
    "branch.append": ("region", _REGIONS),
    "branch.prepend": ("region", _REGIONS),
}


def allow_dims(names: Iterable[str]) -> None:
    """Add the dims of a user's model to the dims that the key `tensor.layout` and scheme tables may name."""
    KNOWN_DIMS.extend(name for name in names if name not in KNOWN_DIMS)


def list_tensor_axes(tensor: Tensor) -> list[str]:
    """Return the configured mesh axes of a tensor scheme, outer to inner: `tensor.order`, else its tables'."""
    tables = [*tensor.regions.values(), *tensor.parameters.values()]
    return tensor.order or list(dict.fromkeys(a for table in tables for axes in table.values() for a in axes))


def parse_layout(layout: str | Mapping[str, Any], axes: Iterable[str]) -> tuple[Rules, Rules]:
    """Parse the configuration key `tensor.layout`, a user's own layout over the mesh axes `axes`, into its rules (of
    regions, of parameters).

    `layout` has one of three forms; the first two apply to every region and every parameter:
        "batch:rows;heads:cols"        dims separated by `;`, `,`, `|` or spaces; two axes on one dim: "heads:a+b"
        {dim: axis or list of axes}    the same as a map, or as YAML text that begins with `{`
        {region: such a map}           one map per region, where `parameters` counts as a region
    Raises ConfigError with one line for each unknown dim, region or axis, and each axis that splits a dim twice.
    """
    table = _read_layout(layout)
    if not isinstance(table, Mapping):
        raise ConfigError("tensor.layout", layout, "must be dim:axis, or a map", ["batch:rows;heads:cols"])
    named = table if any(isinstance(v, Mapping) for v in table.values()) else dict.fromkeys(_REGIONS, table)
    known = list(axes)
    rules: Rules = {}
    lines: list[str] = []
    for region, region_rules in named.items():
        lines += _violations_of_unknown_names("tensor.layout", [region], "region", _REGIONS)
        rules[region] = {dim: _parse_axis_list(dim, value) for dim, value in (region_rules or {}).items()}
        for dim, names in rules[region].items():
            lines += _violations_of_unknown_names("tensor.layout", [dim], "dim", KNOWN_DIMS)
            if len(set(names)) < len(names):
                entry, legal = f"{dim}:{'+'.join(names)}", [f"{dim}:{'+'.join(dict.fromkeys(names))}"]
                lines.append(format_violation("tensor.layout", entry, "an axis splits a dim once", legal))
            for name in (name for name in names if name not in known):
                legal = closest_values(name, known) or ["tensor.axes.NAME=k makes one"]
                lines.append(format_violation("tensor.layout", f"{dim}:{name}", "no such axis in tensor.axes", legal))
    refuse_all(lines)  # a map shared by all regions repeats its mistakes
    return rules, {"all": rules.pop("parameters", {})}


def _read_layout(layout: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the configuration key `tensor.layout` as a map: a text "dim:axis;dim:axis+axis" becomes dim -> "axis+axis",
    YAML is parsed, a map returned as it is. Raises ConfigError for a malformed text or a dim given twice."""
    if isinstance(layout, str) and layout.lstrip().startswith("{"):
        try:
            layout = yaml.load(layout, _Strict)  # noqa: S506
        except yaml.YAMLError as error:
            raise ConfigError("tensor.layout", layout, f"not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(layout, str):
        return layout
    words = re.sub(r"\s*([:+])\s*", r"\1", layout).replace(";", " ").replace(",", " ").replace("|", " ").split()
    malformed_words = [word for word in words if not re.fullmatch(r"\w+:\w+(\+\w+)*", word)]
    refuse_all(format_violation("tensor.layout", word, "must be dim:axis or dim:axis+axis") for word in malformed_words)
    dims = [word.partition(":")[0] for word in words]
    repeated_dims = [dim for dim in dict.fromkeys(dims) if dims.count(dim) > 1]
    axes = {dim: [a for d, _, a in (w.partition(":") for w in words) if d == dim] for dim in repeated_dims}
    legal = {dim: [f"{dim}:{'+'.join(dict.fromkeys(axis_names))}"] for dim, axis_names in axes.items()}
    refuse_all(format_violation("tensor.layout", dim, "is given twice", legal[dim]) for dim in repeated_dims)
    return dict(word.split(":") for word in words)


def _parse_axis_list(dim: str, value: Any) -> list[str]:
    """Return the mesh axes that the configuration key `tensor.layout` gives for a dim as a list of names: `value` is
    "a+b", a list, or None. Raises ConfigError for anything else."""
    names = value.split("+") if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError("tensor.layout", f"{dim}:{value}", "must be the name of an axis, or a list of names")
    return list(names)


def violations_of_tables(config: Config) -> Iterator[str]:
    """Yield a refusal line for each region, parameter role, dim or axis in the tables of the tensor scheme and the
    branch scheme that is unknown or named twice, and for a table whose scheme has no name of its own."""
    tensor, branch = config.tensor, config.branch
    yield from _violations_of_scheme_names(tensor, branch)
    yield from _violations_of_repeated_names("tensor.order", tensor.order)
    yield from _violations_of_repeated_names("branch.only", branch.only)
    yield from _violations_of_unknown_names("branch.only", branch.only, "region", _REGIONS)
    for key, (entry_name, legal) in _PARTS.items():
        group, name = key.split(".")
        table: Mapping[str, Any] = getattr(getattr(config, group), name)
        yield from _violations_of_unknown_names(key, table, entry_name, legal)
        for part, rules in table.items():
            yield from _violations_of_unknown_names(f"{key}.{part}", rules, "dim", KNOWN_DIMS)
            if group == "branch":
                yield from _violations_of_repeated_names(f"{key}.{part}", rules)
                continue
            for dim, axes in rules.items():
                yield from _violations_of_repeated_names(f"{key}.{part}.{dim}", axes)
    yield from _violations_of_order(tensor)


def _violations_of_order(tensor: Tensor) -> Iterator[str]:
    """Yield a refusal line for each axis that the tables of a tensor scheme name and its `tensor.order` lacks."""
    keys_by_axis: dict[str, list[str]] = {}  # axis -> the keys that name it
    for key in ("regions", "parameters"):
        for part, rules in getattr(tensor, key).items():
            for dim, axes in rules.items():
                for axis in axes:
                    keys_by_axis.setdefault(axis, []).append(f"tensor.{key}.{part}.{dim}")
    complete_order = dict.fromkeys([*(a for a in tensor.order if a in keys_by_axis), *keys_by_axis])
    for axis, keys in keys_by_axis.items() if tensor.order else ():
        if axis not in tensor.order:
            correction = [f"{keys[0]}=[{closest_values(axis, tensor.order)[0]}]"] if len(keys) == 1 else []
            constraint = f"lacks {axis}, an axis of {keys[0]}" + (f" and {len(keys) - 1} more" if keys[1:] else "")
            legal = [*correction, _format_names(complete_order)]
            yield format_violation("tensor.order", _format_names(tensor.order), constraint, legal)


def _format_names(names: Iterable[str]) -> str:
    """Return names of axes or dims as the text that a user types in a configuration: joined by commas."""
    return f"[{','.join(names)}]"


def _violations_of_scheme_names(tensor: Tensor, branch: Branch) -> Iterator[str]:
    """Yield a refusal line if scheme `serial` or `none`, which split nothing, is configured with a table that does."""
    constraint = "a table that splits something needs a name of its own"
    if tensor.scheme == "serial" and (tensor.regions or tensor.parameters or tensor.order):
        yield format_violation("tensor.scheme", tensor.scheme, constraint, ["a line `scheme: NAME` in its file"])
    if branch.kind == "none" and (branch.append or branch.prepend or branch.only):
        yield format_violation("branch.kind", branch.kind, constraint, ["a line `kind: NAME` in its file"])


def _violations_of_unknown_names(key: str, names: Iterable[str], entry: str, legal: Sequence[str]) -> Iterator[str]:
    """Yield a refusal line for each of key `key`'s names not in `legal`; `entry`: kind of name, such as "region"."""
    for name in names:
        if name not in legal:
            yield format_violation(key, name, f"no such {entry}", closest_values(name, legal))


def _violations_of_repeated_names(key: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a refusal line for each name that occurs more than once in `names`, the value of a configuration key."""
    for name in dict.fromkeys(name for name in names if list(names).count(name) > 1):
        yield format_violation(key, name, "named twice; once is enough", [",".join(dict.fromkeys(names))])


class _Strict(yaml.SafeLoader):
    """YAML loader for `tensor.layout` that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Build a map of the YAML of `tensor.layout`; raises YAML's error for a key given twice."""
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


# Keys that the planner chooses, where a configuration has `auto` or -1: they are noted in `plan.search`, and have
# legal values until a plan is chosen.

AUTO = "auto"
# in the order of `plan.search`; tensor and pipeline stand for what their schemes and schedules bring
_LEFT_OPEN = sorted((key for key in KEYS if KEYS[key].left_open), key=lambda key: KEYS[key].left_open)
OPEN_KEYS = [key.removesuffix(".scheme").removesuffix(".kind") for key in _LEFT_OPEN]


def mark_open_keys(config: Config, typed: Collection[str] = ()) -> None:
    """Note in the configuration key plan.search which keys are left open for the planner, and give them legal values.
    With pipeline=auto stages and chunks are open too, unless they are among the keys that the user has `typed`.
    parallel.data=-1, by itself as many replicas as the workers give, is open beside another open key."""
    named = dict.fromkeys(config.plan.search)
    tensor, pipeline = config.tensor, config.pipeline
    if tensor.scheme == AUTO:
        named["tensor"] = None
        tensor.scheme = "serial"
    for axis in dict.fromkeys([*list_tensor_axes(tensor), *(tensor.axes if tensor.scheme == "layout" else ())]):
        if tensor.axes.get(axis) == -1:
            named[f"tensor.axes.{axis}"] = None
            tensor.axes[axis] = 1
    if (is_auto := pipeline.kind == AUTO) or (pipeline.kind == "none" and pipeline.stages == -1):
        named["pipeline"] = None
    for name in ("stages", "chunks"):
        if is_auto and f"pipeline.{name}" not in typed:
            setattr(pipeline, name, -1)
    for key in (key for key in OPEN_KEYS if key in KEYS and key != "parallel.data"):
        least = KEYS[key].choices[0] if KEYS[key].choices else 1
        if attrgetter(key)(config) == (AUTO if isinstance(least, str) else -1):
            named[key] = None
            set_value(config, key, least)
    if is_auto:
        stages = "none" if pipeline.stages == 1 else "1f1b"
        pipeline.kind = stages if pipeline.chunks == 1 else "interleaved"
    if named and config.parallel.data == -1:
        named["parallel.data"] = None
    config.plan.search = [*named]


def violations_of_search(config: Config) -> Iterator[str]:
    """Yield a refusal line for each name in the key plan.search that is no key which a configuration may leave open."""
    for name in config.plan.search:
        if name not in (ALL, *OPEN_KEYS) and not name.startswith("tensor.axes."):
            legal = closest_values(name, (*OPEN_KEYS, ALL))[:3]
            yield format_violation("plan.search", name, "no key that the planner chooses", legal)


def _violations_of_replicas(config: Config) -> Iterator[str]:
    """Yield a refusal line if parallel.data is neither a number of replicas nor -1, for as many as fit."""
    if config.parallel.data == 0 or config.parallel.data < -1:
        yield violation_of_key(config, "parallel.data", KEYS["parallel.data"].constraint, [1, -1])


def violations_of_worker_count(config: Config) -> Iterator[str]:
    """Yield a refusal line, which names the longest axis, if the sizes of all mesh axes of a configuration (replicas,
    stages, tensor, branch) multiply to more than WORKERS; `platform.config.fields` refuses an axis too long by
    itself."""
    sizes = {
        "parallel.data": max(1, config.parallel.data),
        "pipeline.stages": config.pipeline.stages,
        "parallel.context": config.parallel.context,
        **{f"tensor.axes.{name}": size for name, size in config.tensor.axes.items()},
        **{f"branch.axes.{name}": size for name, size in config.branch.axes.items()},
    }
    if (product := prod(sizes.values())) > WORKERS:
        longest = max(sizes, key=lambda key: sizes[key])
        other_workers = product // sizes[longest]
        product_text = " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
        legal = [WORKERS // other_workers] if other_workers <= WORKERS else []
        constraint = f"{product_text} are {product} workers, of which there may be {WORKERS}"
        yield format_violation(longest, sizes[longest], constraint, legal)


def _violations_of_pipeline(config: Config) -> Iterator[str]:
    """Yield a refusal line for each number of stages or chunks that the pipeline schedule cannot have, and for a table
    of a schedule that is missing or not read."""
    p = config.pipeline
    for key, size in (("pipeline.stages", p.stages), ("pipeline.chunks", p.chunks)):
        if p.kind == "none" and size != 1:
            yield violation_of_key(config, key, "pipeline=none has one", [1])
    if p.kind in ONE_CHUNK and p.chunks != 1:
        legal = [1, "pipeline=interleaved", "pipeline=zb_h1"]
        yield violation_of_key(config, "pipeline.chunks", f"pipeline={p.kind} has one chunk per stage", legal)
    if p.kind == "file" and not p.file:
        yield violation_of_key(config, "pipeline.file", NO_TABLE, ["pipeline.file=FILE"])
    elif p.kind != "file" and p.file:
        yield violation_of_key(config, "pipeline.file", "only for pipeline=file", ["pipeline=file", ""])


def forbids_zero(config: Config) -> bool:
    """Return True if by its keys some ranks of a stage alone hold some parameters, beside which ZeRO is not built."""
    return bool(config.branch.only) or config.tensor.vectors != "even"


def _violations_of_zero(config: Config) -> Iterator[str]:
    """Yield a refusal line for a branch beside which ZeRO is not built, and for groups of too few replicas."""
    if config.parallel.zero and config.branch.only:
        reason = f"not built yet beside branch={config.branch.kind}, whose common parameters are on sub-grid 0 alone"
        yield violation_of_key(config, "parallel.zero", reason, [0])
    elif config.parallel.zero and forbids_zero(config):
        reason = f"not built yet beside tensor.vectors={config.tensor.vectors}, which some ranks alone hold"
        yield violation_of_key(config, "parallel.zero", reason, [0])
    group, experts = config.parallel.zero_group, config.parallel.experts
    if config.parallel.zero and 0 < group < experts:
        constraint = f"must be 0 or at least parallel.experts={experts}"
        yield violation_of_key(config, "parallel.zero_group", constraint, [experts, 0])


def _violations_of_bucket_size(config: Config) -> Iterator[str]:
    """Yield a refusal line if `parallel.bucket_mib` is a text other than `auto`."""
    key, size = "parallel.bucket_mib", config.parallel.bucket_mib
    if isinstance(size, str) and size != MESH_RULES_AUTO:
        yield violation_of_key(config, key, KEYS[key].constraint, [MESH_RULES_AUTO, BUCKET_MIB])


def can_have_uneven_experts(config: Config) -> bool:
    """Return True if the keys let ranks have numbers of experts that differ by one: of slots, not of rows."""
    return config.tensor.uneven and config.model.capacity_factor > 0


def expert_axis_sizes(config: Config) -> dict[str, int]:
    """Return the size of each axis of a tensor scheme or branch splitting that divides experts, if it is above 1."""
    tensor, branch = config.tensor, config.branch
    sizes = {**tensor.axes, **branch.axes}
    table = {"axes": branch.axes, "append": branch.append, "prepend": branch.prepend}
    axes = axes_of_experts(tensor.regions, table, config.parallel.tensor_experts)
    return {axis: sizes[axis] for axis in axes if sizes.get(axis, 1) > 1}


def _violations_of_experts(config: Config) -> Iterator[str]:
    """Yield a refusal line for each number that parallel.experts does not divide: of experts, unless their slots may be
    cut unevenly, and of replicas; and one for tensor ranks that cannot divide them."""
    shared, experts, data = config.parallel.experts, config.model.experts, config.parallel.data
    keeps_experts_whole, axis_sizes = config.parallel.tensor_experts == "whole", expert_axis_sizes(config)
    ranks, uneven = prod(axis_sizes.values()), can_have_uneven_experts(config)
    if not experts:
        constraint = "model.experts=0: the model has no experts"
        if shared > 1:
            yield violation_of_key(config, "parallel.experts", constraint, [1])
        if keeps_experts_whole:
            yield violation_of_key(config, "parallel.tensor_experts", constraint, ["split"])
        return
    if keeps_experts_whole and (experts < ranks or experts % ranks and not uneven):
        sizes = " x ".join(f"{axis}={n}" for axis, n in axis_sizes.items())
        constraint = f"{sizes} must divide model.experts={experts}"
        yield violation_of_key(config, "parallel.tensor_experts", constraint, ["split"])
        return
    experts_per_rank, divisor_text = experts // ranks, f" / {'+'.join(axis_sizes)}={ranks}" if axis_sizes else ""
    experts_key = f"model.experts={experts}{divisor_text}"
    for key, number, cut in ((experts_key, experts_per_rank, uneven), (f"parallel.data={data}", data, False)):
        even = number % shared == 0 or cut and shared <= number
        if shared > 1 and number > 0 and not even:
            legal = closest_values(shared, find_divisors(gcd(experts_per_rank, data) if data > 0 else experts_per_rank))
            yield violation_of_key(config, "parallel.experts", f"must divide {key}", legal)
            return


def _violations_of_context(config: Config) -> Iterator[str]:
    """Yield a refusal line for ranks that exchange heads where not all of parallel.context lie in groups of so many."""
    ranks, inner, kind = config.parallel.context, config.parallel.context_heads, config.parallel.context_kind
    if kind not in NESTED and inner:
        yield violation_of_key(config, "parallel.context_heads", f"only for context_kind=nested, not {kind}", [0])
    elif kind in NESTED and (inner < 2 or inner >= ranks or ranks % inner):
        legal = closest_values(inner, [n for n in find_divisors(ranks) if 1 < n < ranks])
        constraint = f"must divide parallel.context={ranks}, and be neither 1 nor all of it"
        yield violation_of_key(config, "parallel.context_heads", constraint, legal or ["parallel.context_kind=auto"])


def sequence_lengths_by_key(config: Config) -> dict[str, list[int]]:
    """Return the lengths of all sequences that a run's ranks of a context share, by the key that sets them."""
    source, phases = config.model.source_length, [phase.length for phase in length_phases(config)]
    ramp = {"train.length_ramp": phases} if config.train.length_ramp else {}
    return {"model.length": [config.model.length], **ramp, **({"model.source_length": [source]} if source else {})}


def legal_context_rounds(config: Config) -> list[int]:
    """Return in how many rounds keys let sequences be dealt to parallel.context; [] if parts lie straight."""
    lengths = (n for lengths in sequence_lengths_by_key(config).values() for n in lengths)
    quotient, remainder = divmod(gcd(*lengths), 2 * config.parallel.context)
    return [] if remainder or not config.parallel.context_balance else find_divisors(quotient)


def _violations_of_context_pieces(config: Config) -> Iterator[str]:
    """Yield a refusal line for a number of pieces that cannot be dealt to each rank of a context."""
    pieces, ranks, key = config.parallel.context_pieces, config.parallel.context, "parallel.context_pieces"
    rounds = legal_context_rounds(config) if ranks > 1 else []
    legal = closest_values(pieces, [2 * n for n in rounds]) or [0]
    if pieces % 2:
        legal_pieces = legal if rounds else [pieces - 1, pieces + 1]
        yield violation_of_key(config, key, "must be even: a rank gets two pieces in each round", legal_pieces)
    elif pieces and not config.parallel.context_balance:
        yield violation_of_key(config, key, "only for parallel.context_balance=true", [0])
    elif pieces and ranks > 1 and pieces // 2 not in rounds:
        blocks = pieces * ranks
        name, n = next((k, n) for k, lengths in sequence_lengths_by_key(config).items() for n in lengths if n % blocks)
        constraint = f"x parallel.context={ranks}, {blocks} pieces, must divide {name}={n}"
        yield violation_of_key(config, key, constraint, legal)


def _violations_of_lent_experts(config: Config) -> Iterator[str]:
    """Yield a refusal line for experts that are lent where none can be: within one group, or with a capacity."""
    lent, shared, key = config.parallel.lent_experts, config.parallel.experts, "parallel.lent_experts"
    axis_sizes = expert_axis_sizes(config)
    if lent and shared < 2:
        yield violation_of_key(config, key, f"parallel.experts={shared}: every replica has all experts", [0])
    elif lent and config.model.capacity_factor:
        reason = f"model.capacity_factor={config.model.capacity_factor}: all experts have equally many slots"
        yield violation_of_key(config, key, reason, [0])
    elif lent and lent > (most := config.model.experts - config.model.experts // shared):
        yield violation_of_key(config, key, f"must be <= {most}, the experts of others", [most])
    elif lent and axis_sizes:
        yield violation_of_key(config, key, f"not built beside experts that {'+'.join(axis_sizes)} splits", [0])


def _violations_of_scheme(config: Config) -> Iterator[str]:
    """Yield a refusal line for a tensor scheme without its table, each size of an axis that it does not declare, and a
    layout that it does not read."""
    tensor, declared = config.tensor, list_tensor_axes(config.tensor)
    if tensor.scheme not in ("serial", "layout") and not (tensor.regions or tensor.parameters):
        yield violation_of_key(config, "tensor.scheme", "a scheme's name without its table; write tensor=NAME")
    elif tensor.scheme != "layout":
        for name, size in tensor.axes.items():
            if name not in declared:
                legal = [*(f"tensor.axes.{n}={size}" for n in closest_values(name, declared)), 1]
                yield format_violation(f"tensor.axes.{name}", size, f"tensor={tensor.scheme} has no such axis", legal)
        if tensor.layout is not None:
            yield violation_of_key(config, "tensor.layout", "only for tensor=layout")


def _violations_of_vectors(config: Config) -> Iterator[str]:
    """Yield a refusal line for vectors on the diagonal of a plane that a tensor scheme has not, or that is no square.
    Sizes that the planner chooses are not judged: if they are no square, vectors lie as ever."""
    tensor, declared = config.tensor, list_tensor_axes(config.tensor)
    if tensor.vectors == "even" or {"tensor", ALL} & {*config.plan.search}:
        return
    sizes = {f"tensor.axes.{axis}": tensor.axes.get(axis, 1) for axis in DIAGONAL}
    if not {*DIAGONAL} <= {*declared}:
        constraint = f"tensor={tensor.scheme} has no plane of axes {' and '.join(DIAGONAL)}"
        yield violation_of_key(config, "tensor.vectors", constraint, ["even", "tensor=3d_literal", "tensor=3d"])
    elif not sizes.keys() & {*config.plan.search} and len({*sizes.values()}) > 1:
        shown, side = (" and ".join(f"{key}={n}" for key, n in sizes.items()), max(sizes.values()))
        legal = ["even", " ".join(f"{key}={side}" for key in sizes)]
        yield violation_of_key(config, "tensor.vectors", f"the plane of {shown} has no diagonal", legal)


def _violations_of_branch(config: Config) -> Iterator[str]:
    """Yield a refusal line for a branch scheme without its table, and for each branch axis that has no scheme or whose
    name a tensor axis has."""
    tensor, branch = config.tensor, config.branch
    if branch.kind != "none" and not (branch.append or branch.prepend):
        yield violation_of_key(config, "branch.kind", "a branch's name without its table; write branch=NAME")
    for name, size in branch.axes.items():
        if branch.kind == "none":
            yield format_violation(f"branch.axes.{name}", size, "branch=none has no axes", [1, "branch=NAME"])
        elif name in tensor.axes or name in list_tensor_axes(tensor):
            yield format_violation(f"branch.axes.{name}", size, f"tensor={tensor.scheme} has an axis {name} already")


def _violations_of_slice_via(config: Config) -> Iterator[str]:
    """Yield a refusal line if branch.slice_via is to replace the all-to-all of a branch that has none."""
    if config.branch.slice_via != "all_to_all" and not config.branch.slices_heads:
        constraint = f"branch={config.branch.kind} has no all-to-all that it would replace"
        yield violation_of_key(config, "branch.slice_via", constraint, ["all_to_all"])


def _violations_of_axis_names(config: Config) -> Iterator[str]:
    """Yield a refusal line for each tensor or branch axis whose name is reserved or no ASCII identifier."""
    for group, axes in (("tensor", config.tensor.axes), ("branch", config.branch.axes)):
        for name, size in axes.items():
            if name in RESERVED:
                yield format_violation(f"{group}.axes.{name}", size, f"the names {', '.join(RESERVED)} are reserved")
            elif not (name.isascii() and name.isidentifier()):
                yield format_violation(f"{group}.axes.{name}", size, "an axis is named by letters, digits and _")


RULES = (
    _violations_of_replicas,
    violations_of_worker_count,
    _violations_of_pipeline,
    _violations_of_scheme,
    _violations_of_vectors,
    violations_of_tables,
    _violations_of_branch,
    _violations_of_slice_via,
    _violations_of_zero,
    _violations_of_bucket_size,
    _violations_of_experts,
    _violations_of_context,
    _violations_of_context_pieces,
    _violations_of_lent_experts,
    _violations_of_axis_names,
    violations_of_search,
)
