"""The user's own code: modules that are loaded, and settings of the functions that they register.

The driver and every worker import the modules named in `extend=[my_module]`. While it is imported, such a module may
call the `register_*` functions of `platform.api`. Tensor schemes are configuration files, which `--config-dir` adds.

The fields of a dataclass that is registered beside a function are keys of a run. They are set in a map beside the key
that names the function: `optimizer.settings` beside `optimizer.kind`, and `optimizer.schedule_settings` beside
`optimizer.schedule`. A field may be declared by `platform.config.key.key`, which gives it bounds or choices; its type
alone is checked otherwise.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import partial, reduce
from math import inf
from operator import attrgetter, or_
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from platform.boundary import refusals
from platform.boundary.refusals import ConfigError, OwnCodeError, format_violation, guard_user_code, refuse_all
from platform.boundary.schema import LARGEST, fits_type
from platform.config import fields as config_fields
from platform.config.fields import KEYS, Config, allow_choice, describe_value, violations_of_value
from platform.config.key import WORDS, Key, describe_type
from platform.config.key import key as declare_key
from platform.config.moved_imports import find_moved
from platform.plan.model_types import DISTILL, PAIR_LOSSES


@dataclass
class PairSettings:
    """Settings of a loss of pairs of answers."""

    beta: float = declare_key(0.1, "how much a pair's margin counts; orpo: the weight of its odds", "> 0")
    margin: float = declare_key(0.0, "train.loss=simpo: the margin that is wanted, times beta", ">= 0")


# (key, registered name) -> dataclass of its settings
OWN_SETTINGS: dict[tuple[str, str], type] = {("train.loss", name): PairSettings for name in PAIR_LOSSES}
OWN_SETTINGS["train.loss", DISTILL] = config_fields.DistillSettings
# keys by which a configuration chooses a function; the groups of Config have fields for its settings
_NAMES = "model.kind data.kind data.objective train.loss optimizer.kind optimizer.schedule pipeline.kind"
CHOSEN: dict[str, Callable[[Config], str]] = {  # key -> name of the function that a configuration chooses
    **{key: attrgetter(key) for key in _NAMES.split()},
    **{"data.objective": config_fields.training_objective_name, "train.loss": config_fields.training_loss_name},
}
_ANY = Key("", most=LARGEST)  # of a setting that declares no more than its type


class Setting(NamedTuple):
    """Field of a dataclass of settings: its type, its legal values, and its default (MISSING if it has none)."""

    hint: Any
    legal: Key
    default: Any


class _ChosenSettings(NamedTuple):
    """Settings in a configuration: the key that holds them, and the key and name of the function that they are of."""

    place: str
    key: str
    name: str
    values: dict[str, Any]


def settings_key(key: str) -> str:
    """Return the key that holds the settings of a user's function which the value of `key` names.

    >>> settings_key("optimizer.kind"), settings_key("optimizer.schedule")
    ('optimizer.settings', 'optimizer.schedule_settings')
    """
    group, name = key.split(".")
    return f"{group}.settings" if name == "kind" else f"{group}.{name}_settings"


def register_own_function(key: str, name: str, settings: type | None, *functions: Any) -> None:
    """Add `name`, of a user's function, to the legal values of a configuration key, as
    `platform.config.fields.allow_choice` does, with the dataclass of its settings, if it has some. Raises ConfigError
    for settings that are no dataclass of plain values."""
    allow_choice(key, name, *functions)
    OWN_SETTINGS.pop((key, name), None)
    if settings is None:
        return
    if not (isinstance(settings, type) and is_dataclass(settings)):
        raise ConfigError(key, name, f"its settings are {describe_value(settings)}, where a dataclass is needed")
    for field, setting in _read_declared_settings(settings).items():
        if not _is_yaml_type(setting.hint):
            constraint = "no type of a setting: text, numbers, true or false, choices, lists and maps of texts are"
            raise ConfigError(f"{settings_key(key)}.{field}", setting.hint, constraint)
    OWN_SETTINGS[key, name] = settings


def bind_settings_object(
    function: Callable[..., Any], key: str, name: str, values: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the user's function registered as `name` with its argument `settings` given: `values`, from a
    configuration, and defaults. Raises ConfigError for illegal settings."""
    if (kind := OWN_SETTINGS.get((key, name))) is None:
        return function
    refuse_all(_violations_of_chosen_settings(_ChosenSettings(settings_key(key), key, name, dict(values))))
    return partial(function, settings=_construct_settings(kind, values))


def complete_user_settings(config: Config, typed: Mapping[str, Any]) -> None:
    """Give every setting of the user's own code its value in a configuration, in place, the default where there is
    none. Settings that a file made for another function than the one that is `typed` are dropped."""
    for source in config.data.sources.values():
        if isinstance(source, dict) and ("data.kind", source.get("kind")) in OWN_SETTINGS:
            source.setdefault("settings", {})
    for place, key, name, values in _find_chosen_settings(config):
        kind = OWN_SETTINGS.get((key, name))
        known = {} if kind is None else _read_declared_settings(kind)
        is_placed = any(f"{typed_key}.".startswith(f"{place}.") for typed_key in typed)
        is_other_function = typed.keys() & {key, key.split(".")[0]} and not is_placed
        default_values = {n: setting.default for n, setting in known.items() if setting.default is not MISSING}
        complete_values = default_values | {n: v for n, v in values.items() if n in known or not is_other_function}
        values.clear()
        values.update({n: _convert_value(known[n].hint, v) if n in known else v for n, v in complete_values.items()})


def violations_of_user_code_settings(config: Config) -> Iterator[str]:
    """Yield a refusal line per mistake in the settings of the user's own code: unknown, of another type, out of bounds,
    not given, or refused by the dataclass itself."""
    for chosen_settings in _find_chosen_settings(config):
        yield from _violations_of_chosen_settings(chosen_settings)


def flatten_own_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the user's own code that a configuration has, by their keys."""
    return {f"{part.place}.{n}": v for part in _find_chosen_settings(config) for n, v in part.values.items()}


def _find_chosen_settings(config: Config) -> Iterator[_ChosenSettings]:
    """Yield the settings of the user's own code in a configuration: one map for each function that it may name."""
    for key, chosen in CHOSEN.items():
        settings_place = settings_key(key)
        yield _ChosenSettings(settings_place, key, chosen(config), attrgetter(settings_place)(config))
    for name, source in config.data.sources.items():
        if isinstance(source, dict) and isinstance(kind := source.get("kind", "text"), str):
            if isinstance(values := source.get("settings", {}), dict):
                yield _ChosenSettings(f"data.sources.{name}.settings", "data.kind", kind, values)


def _violations_of_chosen_settings(chosen_settings: _ChosenSettings) -> Iterator[str]:
    """Yield a refusal line per mistake in the settings of one function of the user's own code."""
    place, key, name, values = chosen_settings
    if name not in KEYS[key].choices:  # refused already
        return
    if (kind := OWN_SETTINGS.get((key, name))) is None:
        for field, value in values.items():
            own_kinds = {n: own_kind for (k, n), own_kind in OWN_SETTINGS.items() if k == key}
            legal = [f"{key}={n}" for n, own_kind in own_kinds.items() if field in _read_declared_settings(own_kind)]
            yield format_violation(f"{place}.{field}", value, f"{key}={name} has no settings", legal)
        return
    known = _read_declared_settings(kind)
    missing = [field for field, setting in known.items() if setting.default is MISSING and field not in values]
    lines = [line for field, value in values.items() for line in _violations_of_field(place, field, value, known)]
    lines += [format_violation(f"{place}.{field}", "", f"{key}={name} needs it") for field in missing]
    yield from lines
    if lines:
        return
    try:
        with guard_user_code(place):
            _construct_settings(kind, values)
    except OwnCodeError as error:
        yield format_violation(place, values, f"{key}={name} {error}")


def _violations_of_field(place: str, field: str, value: Any, known: Mapping[str, Setting]) -> Iterator[str]:
    """Yield a refusal line per mistake in the value of one setting of the user's own code."""
    where = f"{place}.{field}"
    if (setting := known.get(field)) is None:
        legal = [f"{place}.{name}" for name in refusals.closest_values(field, known)[:3]]
        yield format_violation(where, value, "unknown setting", legal)
    elif not fits_type(value, setting.hint):
        default = [] if setting.default is MISSING else ["null" if setting.default is None else setting.default]
        yield format_violation(where, value, f"must be {describe_type(setting.hint)}", default)
    elif not any(violations_of_value(where, value, _ANY)):  # refused with the whole map
        yield from violations_of_value(where, value, setting.legal)


def _read_declared_settings(kind: type) -> dict[str, Setting]:
    """Return the settings that a user's dataclass declares, by name. Raises ConfigError for an unreadable type."""
    with refusals.refuse_failures("settings", kind.__name__, Exception, why="a type cannot be read ({})"):
        hints = get_type_hints(kind)
    return {f.name: _build_setting(f, hints[f.name]) for f in fields(kind) if f.init}


def _build_setting(f: Field[Any], hint: Any) -> Setting:
    """Return the setting that a field of a user's dataclass declares, by its type and, if it has one, its `Key`."""
    legal: Key = f.metadata.get("key") or _ANY
    if get_origin(hint) is Literal:
        legal, hint = replace(legal, choices=get_args(hint)), reduce(or_, map(type, get_args(hint)))
    default = f.default if f.default_factory is MISSING else f.default_factory()
    return Setting(hint, legal, default)


def _is_yaml_type(hint: Any) -> bool:
    """Return True if a setting of the user's code may have this type: one that YAML writes and our own keys have."""
    inner = get_args(hint)
    if get_origin(hint) in (list, Union, UnionType):
        return all(map(_is_yaml_type, inner))
    return _is_yaml_type(inner[1]) and inner[0] is str if get_origin(hint) is dict else hint in WORDS


def _convert_value(hint: Any, value: Any) -> Any:
    """Return the value of a setting of the user's code, an integer as a float where the setting's type is float."""
    return float(value) if hint is float and type(value) is int else value


def _construct_settings(kind: type, values: Mapping[str, Any]) -> Any:
    """Construct the user's dataclass of settings from the values of a configuration."""
    known = _read_declared_settings(kind)
    return kind(**{name: _convert_value(known[name].hint, value) for name, value in values.items()})


def import_user_modules(modules: Sequence[str]) -> list[str]:
    """Import the user's modules that `extend` names, which register models, sources and the like; return one refusal
    line for each that cannot be imported. It names the new import where a module uses a path of before."""
    lines = []
    for name in (name for name in modules if re.fullmatch(KEYS["extend"].pattern, name)):  # others are refused by it
        try:
            with guard_user_code(f"extend={name}"):
                importlib.import_module(name)
        except OwnCodeError as error:
            if moved := find_moved(error.__cause__):
                lines.append(format_violation("extend", name, f"{moved[0]}, which has moved", [moved[1]]))
                continue
            reason = str(error).removeprefix("raises ") + refusals.describe_place(error.__cause__)
            lines.append(format_violation("extend", name, f"cannot be imported ({reason})"))
    return lines


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Raise ConfigError in place of a SystemExit, or anything else that is no Exception, from the user's own code."""
    try:
        with guard_user_code("extend", (Exception,), inf):
            yield
    except OwnCodeError as error:
        raise ConfigError(f"extend: code of your own {error}") from error
