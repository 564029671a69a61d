"""Values of all kinds set on every field of a Config by Python code: a plan is made, or ConfigError says each in a
line."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from copy import deepcopy
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from platform import api
from platform.api import Config, ConfigError
from platform.cluster import driver
from platform.config.fields import KEYS, list_key_fields, violations_of_types

SMALL = ["data=synthetic", "model.layers=1", "model.d_model=16", "model.heads=2", "model.length=8", "model.vocab=32",
         "train.global_batch=4", "train.microbatch=2", "train.steps=1", "optimizer.warmup_steps=0", "eval.every=0",
         "cluster=inline", "cluster.device=cpu", "run.dir=run", "tensor=serial", "parallel.data=1"]  # fmt: skip


class Hostile:
    """A value whose methods fail."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


class Text(str):
    """A text that YAML does not write as one."""


LOOP: list[Any] = []
LOOP.append(LOOP)
KNOT: dict[str, Any] = {}
KNOT["a"] = KNOT
PLAIN = [None, True, False, -1, 0, 1, 10**30, 10**5000, -(10**5000), 2**63, 1.5, -0.5, 1e308, 1e-300, math.nan,
         math.inf, -math.inf, "", "x", "a\x1b[31m", "a\nb", "\ud800", "\0", "x" * 20_000, "${seed}", "???",
         [], [1], ["x"], [None], [[["x"]]], ["\ud800"], LOOP, {}, {"a": "x"}, {"a": None}, {"a": {"b": ["x"]}},
         {"a": 1}, {"\x1b": {}}, {"a.b": {"path": "x"}}, KNOT]  # fmt: skip
STRANGE = [b"x", {1: 2}, {None: None}, Path("x"), (1, 2), {1}, object(), Hostile(), len, int, Text("x"),
           np.float64(0.5), np.int64(2), np.zeros(3), threading.Lock(), (i for i in ()), ..., 1j,
           {"a": Hostile()}, [Hostile()], Config()]  # fmt: skip


@pytest.fixture(scope="module")
def small_config() -> Config:
    return api.compose(*SMALL)


def refused(door: Callable[..., Any], *arguments: Any, **named: Any) -> list[str]:
    """The lines of a refusal; none if there is no refusal."""
    try:
        door(*arguments, **named)
    except ConfigError as error:
        assert error.violations and all(line.isprintable() for line in error.violations), error.violations
        return error.violations
    return []


def drawn(key: str, part: int) -> list[tuple[int, Any]]:
    """One of `part` of the values for a key, by chance but ever the same, with their numbers."""
    values = list(enumerate([*STRANGE, *PLAIN]))
    return sorted(random.Random(key).sample(values, len(values) // part), key=itemgetter(0))


@pytest.mark.parametrize("part", [5, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("group", ["", *Config.__dataclass_fields__])
def test_a_value_of_any_kind_for_every_key(small_config, group, part, monkeypatch, tmp_path):
    """None raises anything else, and what has another type is never accepted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "drive_run", lambda *arguments, **named: 0)
    keys = Config.__dataclass_fields__ if not group else [k for k in KEYS if k.partition(".")[0] == group and "." in k]
    for key in keys:
        for number, value in drawn(key, part):
            config = deepcopy(small_config)
            place, _, name = key.rpartition(".")
            setattr(getattr(config, place) if place else config, name, value)
            wrong = key in violations_of_types(config)
            assert wrong or number >= len(STRANGE), key
            lines = refused(api.plan, config)
            if wrong:
                assert any(line.startswith(f"{key}=") for line in lines), (key, number, lines)
                assert refused(api.run, config) == lines
            elif type(value) is int and key.startswith("model."):  # the largest plans take seconds
                continue
            else:
                assert lines == [] or refused(api.run, config), (key, number)


def test_what_is_no_key(small_config):
    config = deepcopy(small_config)
    config.steps, config.train.step, config.model, config.seed = 3, 4, None, "a"
    lines = refused(api.plan, config)
    assert [line.partition("=")[0] for line in lines] == ["seed", "train.step", "model", "steps"]
    assert lines[1] == "train.step=4: unknown key; nearest legal: train.steps, train.stop_at, train.global_batch"
    del config.run
    assert any(line.startswith("run=None: must be a Run") for line in refused(api.plan, config))


def test_every_key_has_a_type_that_is_said():
    for key, field in list_key_fields().items():
        config = Config()
        group, _, name = key.rpartition(".")
        setattr(getattr(config, group) if group else config, name, Hostile())
        assert list(violations_of_types(config)) == [key], field


@pytest.mark.parametrize("workers", ["x", -1, 0, 10**30, True, 1.0, Hostile()], ids=lambda value: type(value).__name__)
def test_a_number_of_workers(small_config, workers):
    for data in (1, -1):
        config = deepcopy(small_config)
        config.parallel.data = data
        assert refused(api.plan, config, workers)[-1].startswith("workers="), data


@pytest.mark.parametrize(
    "value", [None, 5, b"x", [], {}, Hostile(), Path("x"), True], ids=lambda value: type(value).__name__
)
def test_every_door(small_config, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(api.compose, value)[0].startswith("overrides=")
    assert refused(api.compose, experiment=value)[0].startswith("experiment=")
    assert refused(api.plan, value)[0].startswith("config=")
    assert refused(api.run, value)[0].startswith("config=")
    assert refused(api.resume, ".", value)[0].startswith("overrides=")
    assert value is None or refused(api.run, small_config, value)[-1].startswith("callbacks=")
    if not isinstance(value, Path):
        assert refused(api.resume, value)[0].startswith("run_dir=")
        assert value is None or refused(api.compose, config_dir=value)[0].startswith("config_dir=")


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 9000, ""])
def test_paths_of_any_characters(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(api.resume, path)
    assert refused(api.compose, config_dir=path)
