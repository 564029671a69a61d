"""Text that a run asks of its model: by which keys, of which model, and in which process groups its ranks give it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from platform.boundary.refusals import ConfigError, violation
from platform.config.fields import Config
from platform.model import build_model
from platform.plan.core.passes import HEAD, pass_groups
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import process_groups
from platform.plan.language.mistakes import ModelMistake
from platform.plan.operations.legality import IllegalPlan


def asking_keys(config: Config) -> dict[str, tuple[Any, Any]]:
    """Map each configuration key by which a run asks its model for text to (first request, value that turns it off)."""
    found: dict[str, tuple[Any, Any]] = {"monitor.sample": (tokens, 0)} if (tokens := config.monitor.sample) else {}
    lists = {"eval.prompts": config.eval.prompts, "eval.tasks": config.eval.tasks}
    return found | {key: (asked[0], []) for key, asked in lists.items() if asked}


def answering_model(config: Config, source: int = 0) -> Any:
    """Build the model of a run as passes of generation run it: with the beginning of each sequence and positions as
    inputs, as if sequences were documents. `source`: tokens that its encoder reads, 0: as configured. Raises
    ConfigError for a model that writes no text from left to right, part by part up to its head."""
    c = config.model
    capacity = c.capacity_factor and float(c.experts)  # a slot for every token of a source
    length = source or c.source_length or c.length
    found = build_model(replace(c, within_documents=True, source_length=length, capacity_factor=capacity))
    if HEAD in getattr(found, "units", ()) and getattr(found, "causal", True):
        return found
    raise ConfigError(violation("model.kind", c.kind, "generates no text", ["decoder", "encoder_decoder"]))


def groups_of(config: Config, plan: Plan) -> list[tuple[str, ...]]:
    """Return the mesh axes of the process groups that a run's plan needs: for steps and, if any, text generation."""
    found = {*process_groups(plan)}
    if asking_keys(config):
        found |= pass_groups(plan, answering_model(config))
    return sorted(found, key=lambda axes: (len(axes), axes))


def violations_of_asking(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line for each configuration key that asks text of a model that generates none: a model that reads
    in both directions, or a user's model whose generation cannot be planned."""
    asked = asking_keys(config)
    try:
        if asked:
            pass_groups(plan, answering_model(config))
    except (ConfigError, ModelMistake, IllegalPlan, KeyError) as error:
        why = f"model.kind={config.model.kind} generates no text"
        why += f": {error.reason}" if isinstance(error, ModelMistake) else ""
        for key, (value, nothing) in asked.items():
            yield violation(key, value, why, [nothing])
