"""What torch's operations launch on a device, and the bytes that a launch reads and writes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

# launch nothing: they make, name or describe tensors
FREE = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "detach", "lift_fresh", "set_"}
# write what they write without reading it, as all write `out`
OVERWRITE = {"copy_", "_foreach_copy_", "zero_", "fill_", "scatter_"}
# What only the elements are read or written of that an index names: as many as the result has, or `src`
INDEXED = {"gather": "self", "index_select": "self", "embedding": "weight", "scatter_": "self"}
# What only a kernel that is given the other reads and writes: fused updates keep the gradients that they have divided
WRITTEN_WITH = {"grads": "grad_scale"}


def moved(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """The bytes that an operation of torch with the result `out` reads and writes; None if it starts no kernel."""
    name = function.overloadpacket.__name__
    if name in FREE or is_view(function):
        return None
    named, written = arguments(function, args, kwargs)
    written -= {n for n, other in WRITTEN_WITH.items() if named.get(other) is None}
    unread = {n for n in written if n == "out" or name in OVERWRITE}
    if name in INDEXED:
        named[INDEXED[name]] = named.get("src", out)
    results = out if not any(r.alias_info for r in function._schema.returns) else ()
    read = [x for n, x in named.items() if n not in unread]
    return sum(touched(x) for x in tree_leaves((read, [named[n] for n in written], results)) if isinstance(x, Tensor))


def arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The arguments of a call by their names, and the names of those that it writes to, by its schema."""
    schema = function._schema
    named = {a.name: x for a, x in zip(schema.arguments, args, strict=False)} | kwargs
    return named, {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write and a.name in named}


def launched(function: Any, args: tuple[Any, ...]) -> int:
    """How many kernels an operation launches: on a GPU torch takes lists of tensors of several types one by one, but
    for copies of one type into another."""
    name = function.overloadpacket.__name__
    if not name.startswith("_foreach_"):
        return 1
    types = [{x.dtype for x in tree_leaves(argument) if isinstance(x, Tensor)} for argument in args]
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
