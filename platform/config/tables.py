"""Validation of scheme tables (conf/tensor, conf/branch and the user's own files), as strict as for typed arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from platform.config.fields import Branch, Config, Tensor, closest, violation
from platform.plan.language.scheme import REGIONS, ROLES

_OF_BRANCHES = (*REGIONS, "parameters")
_PARTS = {  # key -> (what its entries are called, their legal names)
    "tensor.regions": ("region", REGIONS),
    "tensor.parameters": ("role", ("all", *ROLES)),
    "branch.append": ("region", _OF_BRANCHES),
    "branch.prepend": ("region", _OF_BRANCHES),
}


def wrong_tables(config: Config, dims: Sequence[str]) -> Iterator[str]:
    """Yield a line for each region, role, dim or axis that is unknown or named twice; `dims` are the known dims."""
    tensor, branch = config.tensor, config.branch
    yield from _nameless(tensor, branch)
    yield from _repeated("tensor.order", tensor.order)
    yield from _repeated("branch.only", branch.only)
    yield from _unknown("branch.only", branch.only, "region", _OF_BRANCHES)
    for key, (what, legal) in _PARTS.items():
        group, name = key.split(".")
        table: Mapping[str, Any] = getattr(getattr(config, group), name)
        yield from _unknown(key, table, what, legal)
        for part, rules in table.items():
            yield from _unknown(f"{key}.{part}", rules, "dim", dims)
            if group == "branch":
                yield from _repeated(f"{key}.{part}", rules)
                continue
            for dim, axes in rules.items():
                yield from _repeated(f"{key}.{part}.{dim}", axes)
                if tensor.order:
                    yield from _unknown(f"{key}.{part}.{dim}", axes, "axis in tensor.order", tensor.order)


def _nameless(tensor: Tensor, branch: Branch) -> Iterator[str]:
    if tensor.scheme == "serial" and (tensor.regions or tensor.parameters or tensor.order):
        constraint = "a table that splits something needs a name of its own"
        yield violation("tensor.scheme", tensor.scheme, constraint, ["a line `scheme: NAME` in its file"])
    if branch.kind == "none" and (branch.append or branch.prepend or branch.only):
        constraint = "a table that splits something needs a name of its own"
        yield violation("branch.kind", branch.kind, constraint, ["a line `kind: NAME` in its file"])


def _unknown(key: str, names: Iterable[str], what: str, legal: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in legal:
            yield violation(key, name, f"no such {what}", closest(name, legal))


def _repeated(key: str, names: Sequence[str]) -> Iterator[str]:
    for name in dict.fromkeys(name for name in names if list(names).count(name) > 1):
        yield violation(key, name, "named twice; once is enough", [",".join(dict.fromkeys(names))])


class _Strict(yaml.SafeLoader):
    """YAML loader that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return YAML text as plain data. Raises YAMLError, also if a key is given twice."""
    return yaml.load(text, _Strict)  # noqa: S506
