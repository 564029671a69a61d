"""Validation of a whole configuration: each value by itself (`platform.config.fields`), then rules that relate keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

from platform.config import layout_rules, run_rules, training_rules
from platform.config.extensions import violations_of_user_code_settings
from platform.config.fields import Config, violations_of_types, violations_of_values
from platform.config.identity import violations_of_allowances

RULES = (
    *training_rules.MODEL_RULES,
    *layout_rules.RULES,
    *run_rules.RULES,
    *training_rules.TRAIN_RULES,
    *training_rules.OPTIMIZER_RULES,
    *training_rules.DATA_RULES,
)


def violations_of_configuration(config: Config) -> list[str]:
    """Return one refusal line per mistake in a configuration; [] if there is none.

    Reads no file, device or cluster. A rule ends where it reads a key that is already wrong by itself.
    """
    violations_by_key = violations_of_values(config)
    lines = [line for lines in violations_by_key.values() for line in lines]
    if violations_of_types(config):
        return lines
    related = _violations_of_rules(_SoundConfig(config, violations_by_key))
    return [*lines, *related, *violations_of_allowances(config), *violations_of_user_code_settings(config)]


class _WrongByItself(Exception):
    """Signals that a rule reads a key whose value is refused already."""


class _SoundConfig:
    """A configuration, or a group of its keys, as rules read it: raises _WrongByItself at the keys `wrong`."""

    def __init__(self, keys: Any, refused_keys: Collection[str], prefix: str = ""):
        """Wrap a configuration or group of keys: a rule that reads one of `refused_keys` ends there."""
        self._part, self._wrong, self._prefix = keys, refused_keys, prefix

    def __getattr__(self, name: str) -> Any:
        """Return a configuration key's value, or a group of keys wrapped alike; a key already refused ends the rule."""
        if (key := f"{self._prefix}{name}") in self._wrong:
            raise _WrongByItself(key)
        value = getattr(self._part, name)
        return _SoundConfig(value, self._wrong, f"{name}.") if is_dataclass(value) else value


def _violations_of_rules(config: Any) -> Iterator[str]:
    """Yield a refusal line for each way in which a configuration breaks the rules that relate keys."""
    for rule in RULES:
        with suppress(_WrongByItself):
            yield from rule(config)
