"""Settings of the user's own code: declared by a dataclass, typed, checked with all other mistakes, completed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from platform.api import (
    key,
    register_documents,
    register_loss,
    register_model,
    register_objective,
    register_optimizer,
    register_pipeline,
    register_schedule,
    register_source,
)
from platform.boundary.refusals import ConfigError
from platform.config.extensions import CHOSEN, bind_settings_object, complete_user_settings, settings_key
from platform.config.fields import Config
from platform.config.identity import run_identity, violations_of_identity
from platform.config.validation import violations_of_configuration
from tests.harness.registries import as_before


@dataclass
class Mine:
    beta: float = key(0.9, "decay", ">= 0 and < 1")
    times: int = 3
    words: list[str] = field(default_factory=list)
    mode: Literal["fast", "slow"] = "fast"
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.times == 13:
            raise ValueError("thirteen\nis unlucky")


@dataclass
class Needed:
    path: str
    deep: dict[str, list[int]] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with as_before():
        yield


def own(*args: Any, settings: Any = None) -> Any:
    raise AssertionError("not called here")


REGISTERED = {
    "model.kind": lambda: register_model("own", own, settings=Mine),
    "data.kind": lambda: register_source("own", own, settings=Mine),
    "documents": lambda: register_documents("own", own, settings=Mine),
    "data.objective": lambda: register_objective("own", own, settings=Mine),
    "train.loss": lambda: register_loss("own", own, settings=Mine),
    "optimizer.kind": lambda: register_optimizer("own", own, 0, settings=Mine),
    "optimizer.schedule": lambda: register_schedule("own", own, settings=Mine),
    "pipeline.kind": lambda: register_pipeline("own", own, settings=Mine),
}


def configured(named: str, values: dict[str, Any]) -> Config:
    config = Config()
    for place, value in ((named, "own"), (settings_key(named), values)):
        group, name = place.split(".")
        setattr(getattr(config, group), name, value)
    return config


def lines(named: str, values: dict[str, Any]) -> list[str]:
    place = settings_key(named)
    return [
        line.removeprefix(f"{place}.")
        for line in violations_of_configuration(configured(named, values))
        if place in line
    ]


@pytest.mark.parametrize("registered", REGISTERED)
def test_every_function_takes_them(registered):
    REGISTERED[registered]()
    named = "data.kind" if registered == "documents" else registered
    assert not lines(named, {"beta": 0.5, "times": 2, "words": ["a"], "mode": "slow", "scale": 2})
    assert lines(named, {"beta": 1.5}) == ["beta=1.5: must be >= 0 and < 1"]
    config = configured(named, {"beta": 0})
    complete_user_settings(config, {})
    completed = config.to_dict()[named.split(".")[0]][settings_key(named).split(".")[1]]
    assert completed == {"beta": 0.0, "times": 3, "words": [], "mode": "fast", "scale": None}
    assert type(completed["beta"]) is float  # as a typed 0.0
    assert bind_settings_object(lambda settings: settings, named, "own", {"times": 4})() == Mine(times=4)
    assert Config.from_dict(config.to_dict()) == config  # as workers get it


def test_every_name_of_a_function_has_settings():
    assert {named for named, _ in REGISTERED.items() if named != "documents"} == set(CHOSEN)


WRONG = {
    "name": ({"bta": 0.5}, "bta=0.5: unknown setting; nearest legal: optimizer.settings.beta, "),
    "type": ({"times": 2.5}, "times=2.5: must be an integer; nearest legal: 3"),
    "flag for a number": ({"beta": True}, "beta=true: must be a number; nearest legal: 0.9"),
    "items": ({"words": [1]}, "words=[1]: must be a list, each of it text; nearest legal: []"),
    "choice": ({"mode": "fats"}, "mode=fats: unknown; nearest legal: fast, slow"),
    "bound": ({"beta": 1}, "beta=1: must be >= 0 and < 1"),
    "none": ({"mode": None}, "mode=None: must be text; nearest legal: fast"),
    "control character": ({"words": ["a\x07"]}, "words.0=a"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case):
    REGISTERED["optimizer.kind"]()
    values, said = WRONG[case]
    [line] = lines("optimizer.kind", values)
    assert line.startswith(said) and "\n" not in line


def test_all_mistakes_come_together_with_those_of_other_keys():
    REGISTERED["optimizer.kind"]()
    REGISTERED["train.loss"]()
    config = configured("optimizer.kind", {"beta": 2, "bta": 1})
    config.train.loss, config.train.loss_settings, config.train.steps = "own", {"times": "x"}, 0
    keys = [line.partition("=")[0] for line in violations_of_configuration(config)]
    assert keys == ["train.steps", "train.loss_settings.times", "optimizer.settings.beta", "optimizer.settings.bta"]


def test_what_the_dataclass_itself_refuses():
    REGISTERED["optimizer.kind"]()
    [line] = violations_of_configuration(configured("optimizer.kind", {"times": 13}))
    expected = "optimizer.settings={'times': 13}: optimizer.kind=own raises ValueError: thirteen is unlucky"
    assert line == expected
    with pytest.raises(ConfigError, match="thirteen"):
        bind_settings_object(own, "optimizer.kind", "own", {"times": 13})


def test_what_must_be_given():
    register_optimizer("own", own, 0, settings=Needed)
    assert lines("optimizer.kind", {"deep": {"a": [1]}}) == ["path=: optimizer.kind=own needs it"]
    assert not lines("optimizer.kind", {"path": "a", "deep": {"a": [1]}})
    assert lines("optimizer.kind", {"path": "a", "deep": {"a": ["1"]}}) == [
        "deep={'a': ['1']}: must be keys with values; nearest legal: {}"
    ]


def test_a_function_without_any():
    register_optimizer("own", own, 0)
    assert lines("optimizer.kind", {"beta": 1}) == ["beta=1: optimizer.kind=own has no settings"]
    register_optimizer("other", own, 0, settings=Mine)
    expected = "beta=1: optimizer.kind=own has no settings; nearest legal: optimizer.kind=other"
    assert lines("optimizer.kind", {"beta": 1}) == [expected]
    assert bind_settings_object(own, "optimizer.kind", "own", {}) is own


def test_settings_of_another_function_are_dropped_only_if_that_is_typed():
    REGISTERED["optimizer.kind"]()
    for typed, left in (
        ({}, {"beta": 0.5}),
        ({"optimizer.kind": "adamw"}, {}),
        ({"optimizer": "adamw"}, {}),
        ({"optimizer.kind": "adamw", "optimizer.settings.beta": 0.5}, {"beta": 0.5}),
    ):
        config = configured("optimizer.kind", {"beta": 0.5})
        config.optimizer.kind = "adamw"
        complete_user_settings(config, typed)
        assert config.optimizer.settings == left, typed


@pytest.mark.parametrize(("kind", "said"), [
    (dict, "its settings are a type, where a dataclass is needed"),
    (Mine(), "its settings are a Mine, where a dataclass is needed"),
    (dataclass(type("Odd", (), {"__annotations__": {"x": set}, "x": None})), "no type of a setting"),
    (dataclass(type("Odd", (), {"__annotations__": {"x": dict[int, str]}, "x": None})), "no type of a setting"),
    (dataclass(type("Odd", (), {"__annotations__": {"x": "Nowhere"}, "x": None})), "a type cannot be read"),
])  # fmt: skip
def test_what_declares_no_settings(kind, said):
    with pytest.raises(ConfigError, match=said):
        register_optimizer("own", own, 0, settings=kind)


def test_a_source_of_a_mixture_has_its_own():
    REGISTERED["data.kind"]()
    config = Config()
    config.data.kind = "mixture"
    config.data.sources = {"a": {"kind": "own", "settings": {"times": 5}}, "b": {"kind": "own"}, "c": {"path": "x"}}
    complete_user_settings(config, {})
    assert [source.get("settings", {}).get("times") for source in config.data.sources.values()] == [5, 3, None]
    config.data.sources["a"]["settings"] = {"times": "many"}
    config.data.sources["c"]["settings"] = {"times": 1}
    violations = [line for line in violations_of_configuration(config) if "settings" in line]
    assert violations == [
        "data.sources.a.settings.times=many: must be an integer; nearest legal: 3",
        "data.sources.c.settings.times=1: data.kind=text has no settings; nearest legal: data.kind=own",
    ]


@pytest.mark.parametrize("registered", [named for named in REGISTERED if named != "documents"])
def test_another_value_is_another_run(registered):
    REGISTERED[registered]()
    config = configured(registered, {"beta": 0.9, "times": 3})
    stored = run_identity(configured(registered, {"beta": 0.5, "times": 3}))
    place = f"{settings_key(registered)}.beta"
    violations = violations_of_identity(stored, config, "run.dir", "run", "holds another run")
    assert not violations_of_identity(run_identity(config), config, "run.dir", "run", "holds another run")
    if registered == "pipeline.kind":  # how it is executed, not what
        assert not violations
        return
    assert violations[1].startswith(f"{place}: 0.5 there, 0.9 here")
    config.resume.allow = [settings_key(registered)]
    free = registered not in ("model.kind", "data.objective")
    assert bool(violations_of_identity(stored, config, "run.dir", "run", "holds another run")) is not free
    assert any("resume.allow" in line for line in violations_of_configuration(config)) is not free
