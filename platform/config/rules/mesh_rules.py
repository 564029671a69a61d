"""Rules that refuse the keys of groups parallel, tensor, branch and pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

from platform.boundary.refusals import closest, violation
from platform.config.bounds import KEYS
from platform.config.fields import Branch, Config
from platform.config.groups.execution_group import AUTO
from platform.config.key import WORKERS, refused
from platform.config.layout_map import axes_of, violations_of_tables
from platform.config.ramps.length_ramp import phases_of
from platform.config.rules.left_open import violations_of_search
from platform.plan.core.buckets import BUCKET_MIB
from platform.plan.language.numbers import divisors
from platform.plan.language.scheme import NESTED, RESERVED, axes_of_experts
from platform.plan.schedule.generators import NO_TABLE, ONE_CHUNK


def _replicas(config: Config) -> Iterator[str]:
    """Yield a refusal line if parallel.data is neither a number of replicas nor -1, for as many as fit."""
    if config.parallel.data == 0 or config.parallel.data < -1:
        yield refused(config, "parallel.data", KEYS["parallel.data"].constraint, [1, -1])


def too_many_workers(config: Config) -> Iterator[str]:
    """Yield a refusal line, which names the longest axis, if the sizes of all mesh axes of a configuration (replicas,
    stages, tensor, branch) multiply to more than WORKERS; `platform.config.bounds` refuses an axis too long by
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
        rest = product // sizes[longest]
        what = " x ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
        legal = [WORKERS // rest] if rest <= WORKERS else []
        constraint = f"{what} are {product} workers, of which there may be {WORKERS}"
        yield violation(longest, sizes[longest], constraint, legal)


def _pipeline(config: Config) -> Iterator[str]:
    """Yield a refusal line for each number of stages or chunks that the pipeline schedule cannot have, and for a table
    of a schedule that is missing or not read."""
    p = config.pipeline
    for key, size in (("pipeline.stages", p.stages), ("pipeline.chunks", p.chunks)):
        if p.kind == "none" and size != 1:
            yield refused(config, key, "pipeline=none has one", [1])
    if p.kind in ONE_CHUNK and p.chunks != 1:
        legal = [1, "pipeline=interleaved", "pipeline=zb_h1"]
        yield refused(config, "pipeline.chunks", f"pipeline={p.kind} has one chunk per stage", legal)
    if p.kind == "file" and not p.file:
        yield refused(config, "pipeline.file", NO_TABLE, ["pipeline.file=FILE"])
    elif p.kind != "file" and p.file:
        yield refused(config, "pipeline.file", "only for pipeline=file", ["pipeline=file", ""])


def _zero(config: Config) -> Iterator[str]:
    """Yield a refusal line for a branch beside which ZeRO is not built, and for groups of too few replicas."""
    if config.parallel.zero and config.branch.only:
        reason = f"not built yet beside branch={config.branch.kind}, whose common parameters are on sub-grid 0 alone"
        yield refused(config, "parallel.zero", reason, [0])
    group, experts = config.parallel.zero_group, config.parallel.experts
    if config.parallel.zero and 0 < group < experts:
        yield refused(config, "parallel.zero_group", f"must be 0 or at least parallel.experts={experts}", [experts, 0])


def _bucket_size(config: Config) -> Iterator[str]:
    """Yield a refusal line if `parallel.bucket_mib` is a text other than `auto`."""
    key, size = "parallel.bucket_mib", config.parallel.bucket_mib
    if isinstance(size, str) and size != AUTO:
        yield refused(config, key, KEYS[key].constraint, [AUTO, BUCKET_MIB])


def cuts_experts(config: Config) -> bool:
    """Return True if ranks may have numbers of experts that differ by one: of slots, not of rows."""
    return config.tensor.uneven and config.model.capacity_factor > 0


def ranks_of_experts(config: Config) -> dict[str, int]:
    """Return the size of each axis of a tensor scheme or branch splitting that divides experts, if it is above 1."""
    tensor, branch = config.tensor, config.branch
    sizes = {**tensor.axes, **branch.axes}
    table = {"axes": branch.axes, "append": branch.append, "prepend": branch.prepend}
    axes = axes_of_experts(tensor.regions, table, config.parallel.tensor_experts)
    return {axis: sizes[axis] for axis in axes if sizes.get(axis, 1) > 1}


def _experts(config: Config) -> Iterator[str]:
    """Yield a refusal line for each number that parallel.experts does not divide: of experts, unless their slots may be
    cut unevenly, and of replicas; and one for tensor ranks that cannot divide them."""
    shared, experts, data = config.parallel.experts, config.model.experts, config.parallel.data
    whole, inside = config.parallel.tensor_experts == "whole", ranks_of_experts(config)
    ranks, uneven = prod(inside.values()), cuts_experts(config)
    if not experts:
        if shared > 1:
            yield refused(config, "parallel.experts", "model.experts=0: the model has no experts", [1])
        if whole:
            yield refused(config, "parallel.tensor_experts", "model.experts=0: the model has no experts", ["split"])
        return
    if whole and (experts < ranks or experts % ranks and not uneven):
        sizes = " x ".join(f"{axis}={n}" for axis, n in inside.items())
        yield refused(config, "parallel.tensor_experts", f"{sizes} must divide model.experts={experts}", ["split"])
        return
    each, of = experts // ranks, f" / {'+'.join(inside)}={ranks}" if inside else ""
    for key, number, cut in ((f"model.experts={experts}{of}", each, uneven), (f"parallel.data={data}", data, False)):
        even = number % shared == 0 or cut and shared <= number
        if shared > 1 and number > 0 and not even:
            legal = closest(shared, divisors(gcd(each, data) if data > 0 else each))
            yield refused(config, "parallel.experts", f"must divide {key}", legal)
            return


def _context(config: Config) -> Iterator[str]:
    """Yield a refusal line for ranks that exchange heads where not all of parallel.context lie in groups of so many."""
    ranks, inner, kind = config.parallel.context, config.parallel.context_heads, config.parallel.context_kind
    if kind not in NESTED and inner:
        yield refused(config, "parallel.context_heads", f"only for context_kind=nested, not {kind}", [0])
    elif kind in NESTED and (inner < 2 or inner >= ranks or ranks % inner):
        legal = closest(inner, [n for n in divisors(ranks) if 1 < n < ranks])
        constraint = f"must divide parallel.context={ranks}, and be neither 1 nor all of it"
        yield refused(config, "parallel.context_heads", constraint, legal or ["context_kind=auto"])


def lengths_of(config: Config) -> dict[str, list[int]]:
    """Return the lengths of all sequences that a run's ranks of a context share, by the key that sets them."""
    source, phases = config.model.source_length, [phase.length for phase in phases_of(config)]
    ramp = {"train.length_ramp": phases} if config.train.length_ramp else {}
    return {"model.length": [config.model.length], **ramp, **({"model.source_length": [source]} if source else {})}


def rounds_of_context(config: Config) -> list[int]:
    """Return in how many rounds sequences can be dealt to a run's ranks of a context; [] if parts lie straight."""
    whole, rest = divmod(gcd(*(n for found in lengths_of(config).values() for n in found)), 2 * config.parallel.context)
    return [] if rest or not config.parallel.context_balance else divisors(whole)


def _pieces(config: Config) -> Iterator[str]:
    """Yield a refusal line for a number of pieces that cannot be dealt to each rank of a context."""
    pieces, ranks, key = config.parallel.context_pieces, config.parallel.context, "parallel.context_pieces"
    rounds = rounds_of_context(config) if ranks > 1 else []
    legal = closest(pieces, [2 * n for n in rounds]) or [0]
    if pieces % 2:
        near = legal if rounds else [pieces - 1, pieces + 1]
        yield refused(config, key, "must be even: a rank gets two pieces in each round", near)
    elif pieces and not config.parallel.context_balance:
        yield refused(config, key, "only for parallel.context_balance=true", [0])
    elif pieces and ranks > 1 and pieces // 2 not in rounds:
        blocks = pieces * ranks
        name, n = next((k, n) for k, found in lengths_of(config).items() for n in found if n % blocks)
        yield refused(config, key, f"x parallel.context={ranks}, {blocks} pieces, must divide {name}={n}", legal)


def _lent(config: Config) -> Iterator[str]:
    """Yield a refusal line for experts that are lent where none can be: within one group, or with a capacity."""
    lent, shared, key = config.parallel.lent_experts, config.parallel.experts, "parallel.lent_experts"
    inside = ranks_of_experts(config)
    if lent and shared < 2:
        yield refused(config, key, f"parallel.experts={shared}: every replica has all experts", [0])
    elif lent and config.model.capacity_factor:
        reason = f"model.capacity_factor={config.model.capacity_factor}: all experts have equally many slots"
        yield refused(config, key, reason, [0])
    elif lent and lent > (most := config.model.experts - config.model.experts // shared):
        yield refused(config, key, f"must be <= {most}, the experts of others", [most])
    elif lent and inside:
        yield refused(config, key, f"not built beside experts that {'+'.join(inside)} splits", [0])


def _scheme(config: Config) -> Iterator[str]:
    """Yield a refusal line for a tensor scheme without its table, each size of an axis that it does not declare, and a
    layout that it does not read."""
    tensor, declared = config.tensor, axes_of(config.tensor)
    if tensor.scheme not in ("serial", "layout") and not (tensor.regions or tensor.parameters):
        yield refused(config, "tensor.scheme", "a scheme's name without its table; write tensor=NAME")
    elif tensor.scheme != "layout":
        for name, size in tensor.axes.items():
            if name not in declared:
                legal = [*(f"tensor.axes.{n}={size}" for n in closest(name, declared)), 1]
                yield violation(f"tensor.axes.{name}", size, f"tensor={tensor.scheme} has no such axis", legal)
        if tensor.layout is not None:
            yield refused(config, "tensor.layout", "only for tensor=layout")


def _branch(config: Config) -> Iterator[str]:
    """Yield a refusal line for a branch scheme without its table, and for each branch axis that has no scheme or whose
    name a tensor axis has."""
    tensor, branch = config.tensor, config.branch
    if branch.kind != "none" and not (branch.append or branch.prepend):
        yield refused(config, "branch.kind", "a branch's name without its table; write branch=NAME")
    for name, size in branch.axes.items():
        if branch.kind == "none":
            yield violation(f"branch.axes.{name}", size, "branch=none has no axes", [1, "branch=NAME"])
        elif name in tensor.axes or name in axes_of(tensor):
            yield violation(f"branch.axes.{name}", size, f"tensor={tensor.scheme} has an axis {name} already")


def _slice_via(config: Config) -> Iterator[str]:
    """Yield a refusal line if branch.slice_via is to replace the all-to-all of a branch that has none."""
    if config.branch.slice_via != "all_to_all" and not slices_heads(config.branch):
        constraint = f"branch={config.branch.kind} has no all-to-all that it would replace"
        yield refused(config, "branch.slice_via", constraint, ["all_to_all"])


def slices_heads(branch: Branch) -> bool:
    """Return True if a configured branch scheme splits the batch in region `attention` and other dims in `core`, the
    attention itself: it then slices heads by all-to-all, the collective that `branch.slice_via` may replace."""
    return "core" in branch.append and "batch" in branch.append.get("attention", ())


def _axis_names(config: Config) -> Iterator[str]:
    """Yield a refusal line for each tensor or branch axis whose name is reserved or no ASCII identifier."""
    for group, axes in (("tensor", config.tensor.axes), ("branch", config.branch.axes)):
        for name, size in axes.items():
            if name in RESERVED:
                yield violation(f"{group}.axes.{name}", size, f"the names {', '.join(RESERVED)} are reserved")
            elif not (name.isascii() and name.isidentifier()):
                yield violation(f"{group}.axes.{name}", size, "an axis is named by letters, digits and _")


RULES = (
    _replicas,
    too_many_workers,
    _pipeline,
    _scheme,
    violations_of_tables,
    _branch,
    _slice_via,
    _zero,
    _bucket_size,
    _experts,
    _context,
    _pieces,
    _lent,
    _axis_names,
    violations_of_search,
)
