"""Parser for `tensor.layout`, a user's own map from tensor dims to mesh axes, and the axes that a scheme declares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from platform.config.fields import ConfigError, Rules, Tensor, closest, violation
from platform.config.tables import read_yaml
from platform.plan.language.layout import DIMS
from platform.plan.language.scheme import REGIONS

KNOWN_DIMS = list(DIMS)  # tensor dims that tensor.layout may name


def allow_dims(names: Iterable[str]) -> None:
    """Add the dims of a model that a user registers."""
    KNOWN_DIMS.extend(name for name in names if name not in KNOWN_DIMS)


def axes_of(tensor: Tensor) -> list[str]:
    """Return the axes that the chosen scheme declares, outer to inner: `tensor.order`, else those in its tables."""
    return tensor.order or _mentioned(tensor)


def _mentioned(tensor: Tensor) -> list[str]:
    tables = [*tensor.regions.values(), *tensor.parameters.values()]
    return list(dict.fromkeys(a for table in tables for axes in table.values() for a in axes))


def parse_layout(layout: str | Mapping[str, Any], axes: Iterable[str]) -> tuple[Rules, Rules]:
    """Return the rules (regions, parameters) of a user's own layout over the mesh axes `axes`.

    `layout` has one of three forms; the first two apply to every region and every parameter:
        "batch:rows;heads:cols"        dims separated by `;`, `,`, `|` or spaces; two axes on one dim: "heads:a+b"
        {dim: axis or list of axes}    the same as a map, or as YAML text that begins with `{`
        {region: such a map}           one map per region, where `parameters` counts as a region
    Raises ConfigError with one line for each unknown dim, region or axis, and each axis that splits a dim twice.
    """
    table = _read_layout(layout)
    if not isinstance(table, Mapping):
        raise ConfigError(violation("tensor.layout", layout, "must be dim:axis, or a map", ["batch:rows;heads:cols"]))
    regions = (*REGIONS, "parameters")
    named = table if any(isinstance(v, Mapping) for v in table.values()) else dict.fromkeys(regions, table)
    known = list(axes)
    rules: Rules = {}
    lines = []
    for region, part in named.items():
        if region not in regions:
            lines.append(violation("tensor.layout", region, "no such region", closest(region, regions)))
        rules[region] = {dim: _axis_list(dim, value) for dim, value in (part or {}).items()}
        for dim, names in rules[region].items():
            if dim not in KNOWN_DIMS:
                lines.append(violation("tensor.layout", dim, "no such dim", closest(dim, KNOWN_DIMS)))
            if len(set(names)) < len(names):
                legal = [f"{dim}:{'+'.join(dict.fromkeys(names))}"]
                lines.append(violation("tensor.layout", f"{dim}:{'+'.join(names)}", "an axis splits a dim once", legal))
            for name in (name for name in names if name not in known):
                legal = closest(name, known) or ["tensor.axes.NAME=k makes one"]
                lines.append(violation("tensor.layout", f"{dim}:{name}", "no such axis in tensor.axes", legal))
    if lines:
        raise ConfigError(list(dict.fromkeys(lines)))  # a map shared by all regions repeats its mistakes
    return rules, {"all": rules.pop("parameters", {})}


def _read_layout(layout: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(layout, str) and layout.lstrip().startswith("{"):
        import yaml

        try:
            layout = read_yaml(layout)
        except yaml.YAMLError as error:
            raise ConfigError(violation("tensor.layout", layout, f"not YAML ({str(error).splitlines()[0]})")) from None
    if not isinstance(layout, str):
        return layout
    words = re.sub(r"\s*([:+])\s*", r"\1", layout).replace(";", " ").replace(",", " ").replace("|", " ").split()
    if wrong := [word for word in words if not re.fullmatch(r"\w+:\w+(\+\w+)*", word)]:
        lines = [violation("tensor.layout", word, "must be dim:axis or dim:axis+axis") for word in wrong]
        raise ConfigError(lines)
    dims = [word.partition(":")[0] for word in words]
    if twice := [dim for dim in dict.fromkeys(dims) if dims.count(dim) > 1]:
        axes = {dim: [a for d, _, a in (w.partition(":") for w in words) if d == dim] for dim in twice}
        legal = {dim: [f"{dim}:{'+'.join(dict.fromkeys(found))}"] for dim, found in axes.items()}
        raise ConfigError([violation("tensor.layout", dim, "is given twice", legal[dim]) for dim in twice])
    return dict(word.split(":") for word in words)


def _axis_list(dim: str, value: Any) -> list[str]:
    names = value.split("+") if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            violation("tensor.layout", f"{dim}:{value}", "must be the name of an axis, or a list of names")
        )
    return list(names)
