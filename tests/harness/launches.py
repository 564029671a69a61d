"""What torch's operations launch on a device, and the bytes that a launch reads and writes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

# launch nothing: they make, name or describe tensors
FREE = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "detach", "lift_fresh", "set_"}
WRITE_FIRST = {"copy_", "_foreach_copy_", "zero_"}  # do not read their first argument


def moved(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """The bytes that an operation of torch with the result `out` reads and writes; None if it starts no kernel."""
    name = function.overloadpacket.__name__
    if name in FREE or is_view(function):
        return None
    taken = args[name in WRITE_FIRST :], {k: x for k, x in kwargs.items() if k != "out"}
    return sum(touched(x) for x in tree_leaves((taken, out)) if isinstance(x, Tensor))


def launched(function: Any, args: tuple[Any, ...]) -> int:
    """How many kernels an operation launches: on a GPU torch takes lists of tensors of several types one by one, but
    for copies of one type into another."""
    name = function.overloadpacket.__name__
    if not name.startswith("_foreach_"):
        return 1
    types = [{x.dtype for x in tree_leaves(given) if isinstance(x, Tensor)} for given in args]
    together = max(map(len, types)) == 1 if name == "_foreach_copy_" else len(set().union(*types)) == 1
    return 1 if together else len(args[0])


def is_view(function: Any) -> bool:
    """Whether it returns an alias of its input that it does not write to."""
    returned = function._schema.returns
    return any(r.alias_info and not r.alias_info.is_write for r in returned) or function.is_view


def touched(x: Tensor) -> int:
    """The bytes of a tensor that a kernel reads or writes: what is expanded is one element."""
    elements = 1
    for n, stride in zip(x.shape, x.stride(), strict=True):
        elements *= n if stride or n == 0 else 1
    return elements * x.element_size()
