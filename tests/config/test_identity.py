"""What a run's identity is, and what of it `resume.allow` frees."""

import json

import pytest

from platform.config.fields import Config, flatten_config
from platform.config.identity import FREE, FREE_GROUPS, find_differences, run_identity, violations_of_identity
from platform.config.validation import violations_of_configuration


def refused(allow, **changes):
    """What is said of a run of the default configuration when it goes on with these changes."""
    stored, config = run_identity(Config()), Config()
    for key, value in changes.items():
        *group, name = key.split("__")
        setattr(getattr(config, group[0]) if group else config, name, value)
    config.resume.allow = allow
    return violations_of_identity(
        json.loads(json.dumps(stored)), config, "run.dir", "here", "is of another run"
    )  # as it was stored


@pytest.mark.parametrize("allow", [["optimizer.lr", "optimizer.betas"], ["optimizer"]])
def test_an_allowed_key_or_group_may_change(allow):
    changes = {"optimizer__lr": 0.5, "optimizer__betas": [0.9, 0.99]}
    assert refused(allow, **changes) == []
    first, *keys = refused([], **changes)
    assert first == (
        "run.dir=here: is of another run, or go on with resume.allow=[optimizer.betas,optimizer.lr]. What differs:"
    )
    assert keys == ["optimizer.betas: [0.9, 0.95] there, [0.9, 0.99] here", "optimizer.lr: 0.001 there, 0.5 here"]


def test_a_key_that_an_earlier_version_did_not_have_had_its_default():
    stored = run_identity(Config())
    for group, name in (("model", "label_smoothing"), ("data", "validation"), ("optimizer", "min_lr")):
        del stored[group][name]
    config = Config()
    assert violations_of_identity(stored, config, "run.dir", "here", "is of another run") == []
    config.data.validation = 0.5
    _, line = violations_of_identity(stored, config, "run.dir", "here", "is of another run")
    assert line.startswith("data.validation: 0.05 there, 0.5 here")


def test_the_cure_keeps_what_is_allowed_already():
    first, *keys = refused(["optimizer.lr"], optimizer__lr=0.5, model__dropout=0.1)
    assert "resume.allow=[optimizer.lr,model.dropout]" in first and keys == ["model.dropout: 0.0 there, 0.1 here"]


@pytest.mark.parametrize("key", ["model__d_model", "model__length", "seed", "data__validation", "optimizer__kind"])
def test_what_is_fixed_cannot_be_allowed(key):
    first, line = refused(["model", "data", "optimizer"], **{key: 7})
    assert "resume.allow" not in first
    assert line.startswith(key.replace("__", ".")) and "; fixed: " in line


@pytest.mark.parametrize(
    ("key", "reason", "legal"),
    [
        ("optimizr.lr", "no key of a run's identity", "optimizer.lr"), ("train.stop_at", "no key of a run", ""),
        ("model.d_model", "the saved tensors are another model's", "model."), ("data.cache", "no key", "data."),
        ("seed", "some would come twice, some never", ""), ("train.global_batch", "some would come twice", ""),
        ("model.length", "some would come twice", ""), ("optimizer.kind", "another optimizer's", "optimizer."),
    ],
)  # fmt: skip
def test_what_cannot_be_allowed_is_refused_by_name(key, reason, legal):
    config = Config()
    config.resume.allow = ["optimizer", "model.dropout", key]
    (line,) = violations_of_configuration(config)
    assert line.startswith(f"resume.allow={key}: ") and reason in line and f"; nearest legal: {legal}" in line


def test_what_may_change_exists_and_is_of_the_identity():
    config = Config()
    config.data.sources = {"web": {"path": "x"}}
    config.data.settings = config.train.loss_settings = {"x": 1}
    config.optimizer.settings = config.optimizer.schedule_settings = {"x": 1}
    keys = {key.removesuffix(".web.path").removesuffix(".x") for key in find_differences({}, run_identity(config))}
    assert {*FREE} < keys <= flatten_config(config).keys()
    config.resume.allow, config.data.sources = [*FREE, *FREE_GROUPS], {}
    config.data.settings = config.train.loss_settings = {}  # of nothing that is registered
    config.optimizer.settings = config.optimizer.schedule_settings = {}
    assert violations_of_configuration(config) == []


def test_sources_of_a_mixture_may_be_at_other_places():
    config, stored = Config(), Config()
    config.data.sources, stored.data.sources = {"web": {"path": "x", "weight": 1}}, {"web": {"path": "y", "weight": 1}}
    first, line = violations_of_identity(run_identity(stored), config, "run.dir", "d", "holds another run")
    assert "resume.allow=[data.sources]" in first and line == "data.sources.web.path: y there, x here"
    config.resume.allow = ["data.sources"]
    assert violations_of_identity(run_identity(stored), config, "run.dir", "d", "holds another run") == []


def test_differences():
    stored = {"a": {"b": 1, "c": [1]}, "d": 2, "e": None}
    current = {"a": {"b": 1, "c": [2]}, "d": {"x": 1}, "f": {"g": 3}}
    assert find_differences(stored, current) == {"a.c": ([1], [2]), "d": (2, {"x": 1}), "f.g": (None, 3)}
    assert find_differences(stored, stored) == {}
