"""Rules that refuse the keys of group optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from platform.boundary.refusals import violation
from platform.boundary.schema import fits
from platform.config.fields import Config
from platform.plan.language.numbers import count_of


def _optimizer(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the optimizer's configuration: numbers, patterns, parameter groups."""
    o = config.optimizer
    if len(o.betas) != 2:
        yield violation("optimizer.betas", o.betas, "must be two numbers", [[0.9, 0.95]])
    if o.kind == "sgd" and o.nesterov and not o.momentum:
        yield violation("optimizer.nesterov", True, "optimizer.momentum=0: there is none to look ahead", [False])
    if o.schedule == "wsd" and o.decay_steps > (most := config.train.steps - o.warmup_steps):
        yield violation(
            "optimizer.decay_steps", o.decay_steps, f"after warm-up come {count_of(most, 'update')}", [most]
        )
    if o.schedule == "cosine_restarts" and o.cycles > (most := max(1, config.train.steps - o.warmup_steps)):
        yield violation("optimizer.cycles", o.cycles, f"after warm-up come {count_of(most, 'update')}", [most])
    yield from _violations_of_pattern("optimizer.matrices", o.matrices)
    for i, group in enumerate(o.groups):
        where = f"optimizer.groups.{i}"
        if "match" not in group or (unknown := sorted(group.keys() - {"match", "lr", "weight_decay"})):
            what = f"no {', '.join(unknown)}" if "match" in group else "a regular expression of names"
            yield violation(where, group, f"needs match, {what}", ["{match: embedding, lr: 0.1, weight_decay: 0}"])
            continue
        yield from _violations_of_pattern(f"{where}.match", group["match"])
        for name in group.keys() - {"match"}:
            value = group[name]
            if not fits(value, float) or not 0 <= value <= 1e6:
                yield violation(f"{where}.{name}", value, "must be a factor, 0 to 1,000,000", [1])


def _violations_of_pattern(key: str, pattern: object) -> Iterator[str]:
    """Yield a refusal line if the value of a key is no regular expression."""
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        yield violation(key, pattern, f"must be a regular expression: {error}")


RULES = (_optimizer,)
