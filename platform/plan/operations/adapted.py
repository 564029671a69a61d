"""Products and lookups with adapted parameters: what adapters (`platform.plan.adapters`) add to the results, in
operations that know nothing of them. `ops.adapters` has them by the name of the parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import groupby
from typing import Any

from platform.plan.model_types import RANK, Adapter, Parameter, Spec
from platform.plan.scheme import ModelMistake


def add_products_of_adapters(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute`, a method of `ProjectOp`, whose results have the products of adapters added. These come first:
    the last product of a recomputed block may be left out, and is to be the large one."""

    @wraps(compute)
    def compute_adapted(self, ops, x, spec, weights, outs, biases=(), counts=None, name=""):
        if not ops.adapters:
            return compute(self, ops, x, spec, weights, outs, biases, counts, name)
        more = _multiply_adapters(ops, x, spec, weights, outs, counts, f"{name}." if name else "")
        results = compute(self, ops, x, spec, weights, outs, biases, counts, name)
        return tuple(y if z is None else ops.pointwise("add", y, z) for y, z in zip(results, more, strict=True))

    return compute_adapted


def _multiply_adapters(
    ops: Any, x: Any, spec: Spec, weights: Sequence[Parameter], outs: Sequence[Spec], counts: Any, use: str
) -> list[Any]:
    """Return for each of the `weights` what its adapter makes of x, as its type in `outs`; None without one. `use`
    begins the names of operations where this is a further use of a weight."""
    by_weight = [ops.adapters.get(w.name) for w in weights]
    adapters: list[Adapter] = [adapter for adapter in by_weight if adapter]
    if not adapters:
        return by_weight
    narrow, hidden = narrow_type(spec, adapters[0].down), dict[str, Any]()
    # a mask is of one layer, though a group has keys and values of all layers of a pipeline stage that cross
    for _, sharing in groupby(adapters, lambda a: a.down.name.split(".")[:-2] if a.dropout else []):
        names = {a.down.name: a.down for a in sharing}
        first = f"{use}{next(iter(names))}"
        dropped = ops.dropout(first, x, spec, adapters[0].dropout)
        products = ops.project(dropped, spec, [*names.values()], [narrow] * len(names), (), counts, first)
        hidden |= zip(names, products, strict=True)
    scaled = [a and ops.scale(hidden[a.down.name], narrow, a.scale) for a in by_weight]
    return [
        a and ops.project(x, narrow, (a.up,), (out,), (), counts, f"{use}{a.up.name}")[0]
        for a, x, out in zip(by_weight, scaled, outs, strict=True)
    ]


def narrow_type(spec: Spec, down: Parameter) -> Spec:
    """Return the type of the product of an activation of type `spec` with `down`. Raises ModelMistake."""
    gone = [d for d in down.dims[down.dims.index(RANK) + 1 :] if d in spec.dims]
    if len(gone) < len(down.dims) - down.num_row_dims:
        raise ModelMistake(down.name, f"an adapter of a product with {spec}, which lacks its inputs")
    dims = (*(d for d in spec.dims if d not in gone), RANK)
    sizes = tuple(pair for pair in spec.sizes if pair[0] in dims)
    return Spec("experts" if "experts" in down.dims else "stream", dims, sizes)


def add_rows_of_adapter(
    look_up: Callable[..., Any], ops: Any, name: str, table: Parameter, tokens: Any, out: Spec
) -> Any:
    """Return the rows that `look_up` of ops gives of a `table` for `tokens`; to an adapted table's, rows of `up` times
    `down` are added."""
    x, adapter = look_up(name, table, tokens, out), ops.adapters.get(table.name)
    if adapter is None:
        return x
    narrow = replace(out, dims=(*(d for d in out.dims if d not in table.dims), RANK))
    rows = ops.scale(ops.lookup(f"{name}.lora_b", adapter.up, tokens, narrow), narrow, adapter.scale)
    return ops.pointwise("add", x, ops.project(rows, narrow, (adapter.down,), (out,), name=f"{name}.lora_a")[0])
