"""Parameter groups: which parameters an optimizer updates alike, and which are matrices to Muon. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from platform.boundary.refusals import closest, violation
from platform.config.fields import Config, Optimizer
from platform.optimizer.optimizers import keeps_groups
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter


def factors_of(o: Optimizer, name: str) -> tuple[float, float]:
    """Return a parameter's factors on (learning rate, weight decay): of the first matching optimizer.groups, else 1."""
    found = next((group for group in o.groups if re.fullmatch(group["match"], name)), {})
    return found.get("lr", 1.0), found.get("weight_decay", 1.0)


def group_parameters(
    o: Optimizer, parameters: Iterable[Parameter], owned: Mapping[str, Any], matrices: Collection[str]
) -> list[dict[str, Any]]:
    """Divide parameters into the groups, as torch's optimizers take them, that share decay and factors, none empty:
    dicts of `params`, their `names`, `weight_decay`, `lr_factor` and `matrix` (True for Muon's matrices). `owned`: name
    -> tensor to update; `matrices`: names of the parameters that Muon updates as whole matrices."""
    found: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for p in sorted((p for p in parameters if p.name in owned), key=lambda p: not p.decay):
        lr, decay = factors_of(o, p.name)
        kind = lr, o.weight_decay * decay if p.decay else 0.0, p.name in matrices
        names = {"params": [], "names": [], "lr_factor": kind[0], "weight_decay": kind[1], "matrix": kind[2]}
        group = found.setdefault(kind, names)
        group["params"].append(owned[p.name])
        group["names"].append(p.name)
    return list(found.values())


def find_matrices(o: Optimizer, plan: Plan) -> list[str]:
    """Return the names of the parameters of two or more dims that Muon updates as whole matrices: all that
    optimizer.matrices matches; by default the weights of layers except the last, which gives logits, and no tables."""
    uses: dict[str, list[bool]] = {}
    for operation in (o.operation for o in plan.operations.values()):
        hidden = operation.kind == "project" and all(spec.region != "logits" for spec in operation.outputs)
        for p in operation.parameters:
            uses.setdefault(p.name, []).append(hidden)
    many = [p.name for p in plan.parameters if _is_matrix(p)]
    if o.matrices:
        return [name for name in many if re.fullmatch(o.matrices, name)]
    return [name for name in many if all(uses.get(name, [False]))]


def find_factored(plan: Plan) -> list[str]:
    """Return the names of the trained matrices whose second moments Adafactor keeps by row and column."""
    return [p.name for p in plan.parameters if _is_matrix(p) and p.decay and p.name not in plan.frozen]


def _is_matrix(p: Parameter) -> bool:
    """Return True if a parameter is a matrix, or one for each expert."""
    return len(p.dims) - p.stacked > 1


def violations_of_patterns(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line for each pattern in optimizer.groups that matches no parameter of the plan, for groups that
    the optimizer does not keep, and for Adafactor or Muon without a matrix to train."""
    o, names = config.optimizer, [p.name for p in plan.parameters]
    for i, group in enumerate(o.groups):
        if not any(re.fullmatch(group["match"], name) for name in names):
            legal = [re.escape(name) for name in closest(group["match"], names)[:3]]
            yield violation(f"optimizer.groups.{i}.match", group["match"], "matches no parameter of the model", legal)
    if o.groups and not keeps_groups(o):
        constraint = f"optimizer.kind={o.kind} does not keep the groups of which it is made, and so not their factors"
        yield violation("optimizer.groups", o.groups, constraint, [[]])
    if o.kind == "adafactor" and not plan.factored:
        yield violation("optimizer.kind", o.kind, "no matrix is trained", ["adamw"])
    if o.kind == "muon" and not plan.matrices:
        yield violation(
            "optimizer.matrices",
            o.matrices,
            "matches no matrix that is trained",
            [""] if o.matrices else ["optimizer=adamw"],
        )
