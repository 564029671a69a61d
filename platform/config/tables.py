"""The tables of schemes, conf/tensor and conf/branch and the user's own, judged as strictly as what is typed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from platform.config.fields import Branch, Config, Tensor, closest, violation
from platform.plan.language.scheme import REGIONS, ROLES

_OF_BRANCHES = (*REGIONS, "parameters")
_PARTS = {  # key -> (what it maps, the legal ones)
    "tensor.regions": ("region", REGIONS),
    "tensor.parameters": ("role", ("all", *ROLES)),
    "branch.append": ("region", _OF_BRANCHES),
    "branch.prepend": ("region", _OF_BRANCHES),
}


def wrong_tables(config: Config, dims: Sequence[str]) -> Iterator[str]:
    """One line for each region, role, dim or axis that there is not, or that is named twice. `dims`: the known ones."""
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
    """YAML in which no key comes twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Plain data. Raises YAMLError, also where a key comes twice."""
    return yaml.load(text, _Strict)  # noqa: S506
