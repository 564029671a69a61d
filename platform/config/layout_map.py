"""Maps from tensor dims to mesh axes: the parser of `tensor.layout`, the axes that a scheme declares, and validation of
scheme tables (conf/tensor, conf/branch and the user's own files), as strict as for typed arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from platform.boundary.refusals import ConfigError, closest, refuse_all, violation
from platform.config.fields import Branch, Config, Tensor
from platform.config.groups.mesh_group import Rules
from platform.plan.language.layout import DIMS
from platform.plan.language.scheme import REGIONS, ROLES

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


def axes_of(tensor: Tensor) -> list[str]:
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
        raise ConfigError(violation("tensor.layout", layout, "must be dim:axis, or a map", ["batch:rows;heads:cols"]))
    named = table if any(isinstance(v, Mapping) for v in table.values()) else dict.fromkeys(_REGIONS, table)
    known = list(axes)
    rules: Rules = {}
    lines: list[str] = []
    for region, part in named.items():
        lines += _unknown("tensor.layout", [region], "region", _REGIONS)
        rules[region] = {dim: _axis_list(dim, value) for dim, value in (part or {}).items()}
        for dim, names in rules[region].items():
            lines += _unknown("tensor.layout", [dim], "dim", KNOWN_DIMS)
            if len(set(names)) < len(names):
                legal = [f"{dim}:{'+'.join(dict.fromkeys(names))}"]
                lines.append(violation("tensor.layout", f"{dim}:{'+'.join(names)}", "an axis splits a dim once", legal))
            for name in (name for name in names if name not in known):
                legal = closest(name, known) or ["tensor.axes.NAME=k makes one"]
                lines.append(violation("tensor.layout", f"{dim}:{name}", "no such axis in tensor.axes", legal))
    refuse_all(lines)  # a map shared by all regions repeats its mistakes
    return rules, {"all": rules.pop("parameters", {})}


def _read_layout(layout: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the configuration key `tensor.layout` as a map: a text "dim:axis;dim:axis+axis" becomes dim -> "axis+axis",
    YAML is parsed, a map returned as it is. Raises ConfigError for a malformed text or a dim given twice."""
    if isinstance(layout, str) and layout.lstrip().startswith("{"):
        try:
            layout = yaml.load(layout, _Strict)  # noqa: S506
        except yaml.YAMLError as error:
            raise ConfigError(violation("tensor.layout", layout, f"not YAML ({str(error).splitlines()[0]})")) from None
    if not isinstance(layout, str):
        return layout
    words = re.sub(r"\s*([:+])\s*", r"\1", layout).replace(";", " ").replace(",", " ").replace("|", " ").split()
    wrong = [word for word in words if not re.fullmatch(r"\w+:\w+(\+\w+)*", word)]
    refuse_all(violation("tensor.layout", word, "must be dim:axis or dim:axis+axis") for word in wrong)
    dims = [word.partition(":")[0] for word in words]
    if twice := [dim for dim in dict.fromkeys(dims) if dims.count(dim) > 1]:
        axes = {dim: [a for d, _, a in (w.partition(":") for w in words) if d == dim] for dim in twice}
        legal = {dim: [f"{dim}:{'+'.join(dict.fromkeys(found))}"] for dim, found in axes.items()}
        raise ConfigError([violation("tensor.layout", dim, "is given twice", legal[dim]) for dim in twice])
    return dict(word.split(":") for word in words)


def _axis_list(dim: str, value: Any) -> list[str]:
    """Return the mesh axes that the configuration key `tensor.layout` gives for a dim as a list of names: `value` is
    "a+b", a list, or None. Raises ConfigError for anything else."""
    names = value.split("+") if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            violation("tensor.layout", f"{dim}:{value}", "must be the name of an axis, or a list of names")
        )
    return list(names)


def violations_of_tables(config: Config) -> Iterator[str]:
    """Yield a refusal line for each region, parameter role, dim or axis in the tables of the tensor scheme and the
    branch scheme that is unknown or named twice, and for a table whose scheme has no name of its own."""
    tensor, branch = config.tensor, config.branch
    yield from _nameless(tensor, branch)
    yield from _repeated("tensor.order", tensor.order)
    yield from _repeated("branch.only", branch.only)
    yield from _unknown("branch.only", branch.only, "region", _REGIONS)
    for key, (what, legal) in _PARTS.items():
        group, name = key.split(".")
        table: Mapping[str, Any] = getattr(getattr(config, group), name)
        yield from _unknown(key, table, what, legal)
        for part, rules in table.items():
            yield from _unknown(f"{key}.{part}", rules, "dim", KNOWN_DIMS)
            if group == "branch":
                yield from _repeated(f"{key}.{part}", rules)
                continue
            for dim, axes in rules.items():
                yield from _repeated(f"{key}.{part}.{dim}", axes)
    yield from _unordered(tensor)


def _unordered(tensor: Tensor) -> Iterator[str]:
    """Yield a refusal line for each axis that the tables of a tensor scheme name and its `tensor.order` lacks."""
    places: dict[str, list[str]] = {}  # axis -> the keys that name it
    for key in ("regions", "parameters"):
        for part, rules in getattr(tensor, key).items():
            for dim, axes in rules.items():
                for axis in axes:
                    places.setdefault(axis, []).append(f"tensor.{key}.{part}.{dim}")
    whole = [*(a for a in tensor.order if a in places), *(a for a in places if a not in tensor.order)]
    for axis, keys in places.items() if tensor.order else ():
        if axis not in tensor.order:
            other = [f"{keys[0]}=[{closest(axis, tensor.order)[0]}]"] if len(keys) == 1 else []
            constraint = f"lacks {axis}, an axis of {keys[0]}" + (f" and {len(keys) - 1} more" if keys[1:] else "")
            yield violation("tensor.order", _listed(tensor.order), constraint, [*other, _listed(whole)])


def _listed(names: Iterable[str]) -> str:
    """Return names of axes or dims as the text that a user types in a configuration: joined by commas."""
    return f"[{','.join(names)}]"


def _nameless(tensor: Tensor, branch: Branch) -> Iterator[str]:
    """Yield a refusal line if scheme `serial` or `none`, which split nothing, is configured with a table that does."""
    constraint = "a table that splits something needs a name of its own"
    if tensor.scheme == "serial" and (tensor.regions or tensor.parameters or tensor.order):
        yield violation("tensor.scheme", tensor.scheme, constraint, ["a line `scheme: NAME` in its file"])
    if branch.kind == "none" and (branch.append or branch.prepend or branch.only):
        yield violation("branch.kind", branch.kind, constraint, ["a line `kind: NAME` in its file"])


def _unknown(key: str, names: Iterable[str], what: str, legal: Sequence[str]) -> Iterator[str]:
    """Yield a refusal line for each of configuration key `key`'s names not in `legal`; `what`: such as "region"."""
    for name in names:
        if name not in legal:
            yield violation(key, name, f"no such {what}", closest(name, legal))


def _repeated(key: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a refusal line for each name that occurs more than once in `names`, the value of a configuration key."""
    for name in dict.fromkeys(name for name in names if list(names).count(name) > 1):
        yield violation(key, name, "named twice; once is enough", [",".join(dict.fromkeys(names))])


class _Strict(yaml.SafeLoader):
    """YAML loader for `tensor.layout` that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Build a map of the YAML of `tensor.layout`; raises YAML's error for a key given twice."""
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
