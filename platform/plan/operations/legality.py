"""Legality of a plan: one message per violation, with the nearest legal values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from platform.plan.communication.planner import Planner
from platform.plan.language.layout import UNEVEN
from platform.plan.language.numbers import divisors
from platform.plan.language.ops import Operation, Spec
from platform.plan.language.scheme import REPLICAS

_ELSEWHERE = "on another axis, or on none"
KEYS = {"batch": "train.microbatch", "length": "model.length", "memory_length": "model.length"}


class IllegalPlan(ValueError):
    """Error for layouts, sizes or stages under which a model cannot be executed. `violations` has one line each."""

    def __init__(self, violations: Sequence[str]):
        """Construct the error from one line for each violation of the plan."""
        self.violations = list(violations)
        super().__init__("\n".join(self.violations))


def violations(planner: Planner, operations: Sequence[Operation], microbatch: int) -> list[str]:
    """Check the tensors of a model's operations under a scheme before these are planned: return one message per axis
    that would split two dims of a tensor and per dim that its axes do not divide, with the places and the nearest legal
    values. `microbatch`: sequences per microbatch and replica."""
    alike = list({o.anonymous: o for o in operations}.values())  # which are legal in nearly all plans
    if len(alike) < len(operations) and not violations(planner, alike, microbatch):
        return []
    clashes: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)  # (axis, dim, dim) -> operations
    splits: dict[tuple[str, int, tuple[str, ...]], dict[str, None]] = defaultdict(dict)  # (dim, size, axes) -> regions
    for o in operations:
        for t in (*o.inputs, *o.outputs):
            layout = planner.layout(t)
            if clash := layout.conflict():
                clashes[clash][f"{o.kind} {o.name}: {t if isinstance(t, Spec) else ' '.join(t.dims)}"] = None
            sizes = {**planner.sizes_of(t), "batch": microbatch}
            for d, axes in {**layout, **planner.picked(t)}.items():
                splits[d, sizes[d], axes][t.region if isinstance(t, Spec) else "parameters"] = None
    lines = [_clash(*clash, list(found)) for clash, found in clashes.items()]
    for (d, size, axes), regions in splits.items():
        if line := _indivisible(planner, d, size, axes, list(regions)):
            lines.append(line)
    return lines


def illegal_operation(o: Operation, error: ValueError) -> str:
    """Return the message that `o` cannot be planned, by the `error` of its plan: the iteration space of an operation of
    legal tensors can still be illegal."""
    return f"tensor: illegal layout: in {o.kind} {o.name}, {error}; legal: one of them {_ELSEWHERE}"


def _clash(axis: str, first: str, second: str, found: Sequence[str]) -> str:
    """Return the message that `axis` would split both dims `first` and `second` of the tensors described in `found`."""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"tensor: illegal layout: axis {axis} would split both {first} and {second} in {found[0]}{more};"
        f" legal: {first} or {second} {_ELSEWHERE}"
    )


def _indivisible(planner: Planner, d: str, size: int, axes: Sequence[str], found: Sequence[str]) -> str | None:
    """Return the message that `axes` do not divide dim `d` of global size `size` in the regions `found`, with the
    nearest legal sizes of both, or None if they do or cut it unevenly. Replicas always divide batch; vocab is padded
    where it is not cut unevenly."""
    axes = [a for a in axes if d != "batch" or a not in REPLICAS]
    n = planner.mesh.extent(axes)
    if size % n == 0 or (d == "vocab" and not planner.scheme.uneven) or (planner.uneven(d) and size >= n):
        return None
    own = d in ("length", "memory_length") and size != planner.sizes[d]
    key = "model.source_length" if own else KEYS.get(d, f"model.{d}")
    given = " x ".join(f"{planner.scheme.key(a)}={planner.mesh.axes[a]}" for a in axes)
    sizes = " or ".join(str(k) for k in _legal_sizes(planner, d, size, n) if k)
    either = f"{key}={sizes}, or " if sizes else ""
    either += "tensor.uneven=true, or " if d in UNEVEN and size >= n and not planner.scheme.uneven else ""
    return (
        f"{key}={size} is not divisible by {given} ({', '.join(found)});"
        f" nearest legal: {either}{', or '.join(_legal_extents(planner, size, axes))}"
    )


def _legal_extents(planner: Planner, size: int, axes: Sequence[str]) -> list[str]:
    """Return hints on `axes`, whose product does not divide `size`: per axis the extents next below and next above that
    divide it beside the others, or the product's extents if a change of one axis cannot."""
    n, hints = planner.mesh.extent(axes), []
    for a in axes:
        own = planner.mesh.axes[a]
        if size % (n // own) == 0:
            hints.append(f"{planner.scheme.key(a)}={_nearest_divisors(size // (n // own), own)}")
    product = " x ".join(planner.scheme.key(a) for a in axes)
    return hints or [f"{product}={_nearest_divisors(size, n)}"]


def _nearest_divisors(size: int, n: int) -> str:
    """Return the divisors of `size` next below and next above n, which is none, as "2 or 4"."""
    below, above = [k for k in divisors(size) if k < n], [k for k in divisors(size) if k > n]
    return " or ".join(map(str, [*below[-1:], *above[:1]]))


def _legal_sizes(planner: Planner, d: str, size: int, n: int) -> list[int]:
    """Return the sizes of dim `d` next below and next above `size` that n ranks divide, 0 for none: multiples of n; for
    heads, which share d_model, only divisors of it."""
    if d == "heads":
        legal = [k for k in divisors(planner.sizes["d_model"]) if k % n == 0 and k <= 2 * max(size, n)]
        return [max((k for k in legal if k < size), default=0), min((k for k in legal if k > size), default=0)]
    return [size // n * n, size // n * n + n]  # `size` itself is no multiple
