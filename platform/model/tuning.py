"""Adapters that a configuration asks for (`tune`), of the weights of one model."""

from __future__ import annotations

from math import sqrt
from typing import Any

from platform.boundary.refusals import format_violation, refuse_all
from platform.config.fields import Model
from platform.config.groups import Tune
from platform.plan.adapters import AdapterRule, build_adapters, list_target_words
from platform.plan.model_types import Adapter


def find_adapters(config: Model, tune: Tune, model: Any) -> dict[str, Adapter]:
    """Return the adapters that `tune` asks for, by the name of what they adapt. `model`: built of `config`. Raises
    ConfigError for a target that matches nothing, for a table of several uses, and for a dropout of experts' rows."""
    parameters = model.parameters()
    if tune.kind == "none":
        return {}
    scale = tune.alpha / (sqrt(tune.rank) if tune.rslora else tune.rank)
    rule = AdapterRule(tune.rank, scale, tune.dropout, tuple(tune.targets))
    matches, words = rule.match_targets(parameters), list_target_words(parameters)
    names = {name: None for matched in matches.values() for name in matched}
    lines = []
    if config.tied or config.kind == "encoder_decoder":
        words = [word for word in words if word != "embedding"]
        if "embedding" in names:
            reason = "the table has several uses (model.tied, two stacks), and an adapter is of one"
            lines.append(format_violation("tune.targets", "embedding", reason, words))
    vain = [target for target, matched in matches.items() if not matched]
    lines += [format_violation("tune.targets", t, "matches no weight that can have an adapter", words) for t in vain]
    if tune.dropout and any(p.name in names and p.num_stack_dims for p in parameters):
        lines.append(format_violation("tune.dropout", tune.dropout, "adapters of experts drop nothing", [0.0]))
    refuse_all(lines)
    return build_adapters(parameters, names, rule, model.sizes)
