"""Adapters of low rank (LoRA, Hu et al. 2021): the product of x with an adapted matrix W [rows, columns] gets beside it
`scale` times the product of x with `down` [rank, columns] and then with `up` [rows, rank].

A model says nothing of them. Its parameters get two more for each adapted one (`build_adapters`), and where it
multiplies by that (`platform.plan.operations.adapted`), its list of operations gets two small products and a sum. So
the communication rule lays them out: `down` as what it contracts, `up` as what it adds, and the dim `rank` is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod, sqrt

from platform.plan.model_types import RANK, Adapter, Parameter

UNMATCHED = (
    "length",
    "positions",
    "segments",
    "buckets",
)  # first dims of tables that no product or lookup of ids reads


@dataclass(frozen=True)
class AdapterRule:
    """Rule by which a model gets adapters: their `rank`, the `scale` of their products and the `dropout` of their
    inputs. `targets`: the last parts of the names of adapted weights, or patterns of these."""

    rank: int
    scale: float
    dropout: float
    targets: tuple[str, ...]

    def match_targets(self, parameters: Iterable[Parameter]) -> dict[str, list[str]]:
        """Return by target the names of the `parameters` that it matches and that can have an adapter."""
        names = [p.name for p in parameters if can_adapt(p)]
        return {t: [n for n in names if fnmatchcase(n, t) or fnmatchcase(n, f"*.{t}")] for t in self.targets}


def list_target_words(parameters: Iterable[Parameter]) -> list[str]:
    """Return the shortest words that name weights which can have an adapter, such as `attention.query`."""
    names = [p.name.split(".") for p in parameters if can_adapt(p)]
    return list(
        dict.fromkeys(
            ".".join(parts[next((i + 1 for i, x in enumerate(parts) if x.isdigit()), 0) :]) for parts in names
        )
    )


def can_adapt(p: Parameter) -> bool:
    """Return True if a parameter is a matrix of products or a table that ids look up, and no router."""
    routes = p.role == "vector" and p.dims[0] == "experts"
    return p.decay and p.init == "normal" and len(p.dims) > 1 and p.dims[0] not in UNMATCHED and not routes


def can_quantise(p: Parameter) -> bool:
    """Return True if QLoRA keeps a frozen parameter in 4 bits: a matrix of a layer, as bitsandbytes does."""
    return can_adapt(p) and "vocab" not in p.dims


def build_adapters(
    parameters: Sequence[Parameter], names: Iterable[str], rule: AdapterRule, sizes: Mapping[str, int]
) -> dict[str, Adapter]:
    """Return the adapter of each parameter among `names`, by its name. `sizes`: global, of the model's dims. `down`
    starts as PEFT's does, uniform within 1 / sqrt(columns), and `up` at 0, so that the model starts as it is."""
    chosen, adapters = {*names}, dict[str, Adapter]()
    for p in (p for p in parameters if p.name in chosen):
        stack, rows = p.num_stack_dims, p.num_row_dims
        first, outputs, inputs = p.dims[:stack], p.dims[stack:rows], p.dims[rows:]
        columns = prod({**sizes, **dict(p.sizes)}[d] for d in inputs)

        def declare(part: str, dims: tuple[str, ...], init: str, std: float = 0.0, p: Parameter = p) -> Parameter:
            """Return one matrix of the adapter of parameter `p`, laid out along d_model as the stream is."""
            role = "vector" if "d_model" in dims and not p.num_stack_dims else "in"
            kept = tuple(pair for pair in p.sizes if pair[0] in dims)
            return Parameter(f"{p.name}.{part}", dims, role, init, std, True, (*kept, (RANK, rule.rank)))

        down = declare("lora_a", (*first, RANK, *inputs), "uniform", 1 / sqrt(3 * columns))
        up = declare("lora_b", (*first, *outputs, RANK), "zeros")
        adapters[p.name] = Adapter(down, up, rule.scale, rule.dropout)
    return adapters


def list_adapter_parameters(adapters: Mapping[str, Adapter]) -> tuple[Parameter, ...]:
    """Return the matrices of a model's adapters, in its order."""
    return tuple(p for adapter in adapters.values() for p in (adapter.down, adapter.up))


def adapter_sizes(adapters: Mapping[str, Adapter]) -> dict[str, int]:
    """Return the size of the dim that adapters add to a model's; {} without any."""
    return dict([(RANK, dict(a.down.sizes)[RANK]) for a in adapters.values()][:1])
