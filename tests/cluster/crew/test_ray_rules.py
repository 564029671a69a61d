"""What is decided about Ray without one: demands, selectors, runtime environments."""

import doctest
import json
import sys

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster.crew import ray_session
from platform.cluster.crew.ray_actors import LEASE_SECONDS, Bundle, DemandLedger, Hysteresis
from platform.cluster.crew.ray_session import build_runtime_env, matches_labels, ray_job_config
from platform.launch import compose_config

CPU, GPU = Bundle({"CPU": 1.0}, {}), Bundle({"CPU": 1.0, "GPU": 1.0}, {"zone": "a"})


@pytest.mark.parametrize(
    "story",
    [
        [(0, 4, 4), (1, 8, 8), (2, 8, 8)],  # up at once
        [(0, 8, 8), (1, 4, 8), (60, 4, 8), (61, 4, 4)],  # down after it has lasted
        [(0, 8, 8), (1, 0, 8), (30, 8, 8), (90, 4, 8), (149, 4, 8), (150, 4, 4)],  # lost workers are hired again
        [(0, 8, 8), (1, 2, 8), (30, 5, 8), (61, 3, 5)],  # to the highest of what was wanted meanwhile
        [(0, 8, 8), (1, 4, 8), (100, 4, 4), (101, 0, 4), (161, 0, 0)],
    ],
)
def test_a_demand_falls_slowly_and_rises_at_once(story):
    hysteresis = Hysteresis(60.0)
    assert [hysteresis.follow_demand(wanted, now) for now, wanted, _ in story] == [value for _, _, value in story]


def test_the_ledger_adds_up_and_forgets_who_does_not_renew():
    ledger = DemandLedger()
    ledger.record_demand("b", 1, GPU, 0.0)
    ledger.record_demand("a", 2, CPU, 50.0)
    assert ledger.total_bundles(60.0) == [CPU, CPU, GPU]
    ledger.record_demand("a", 1, CPU, 60.0)
    assert ledger.total_bundles(LEASE_SECONDS + 1) == [CPU]  # of the killed driver nothing stays
    ledger.record_demand("a", 0, CPU, 70.0)
    ledger.record_demand("unknown", 0, CPU, 70.0)
    assert ledger.total_bundles(70.0) == []


def test_the_example():
    assert doctest.testmod(ray_session).failed == 0


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [("a", {"a"}), ("!a", {"b", "c", None}), ("in(a, b)", {"a", "b"}), ("!in(a,b)", {"c", None})],
)
def test_selectors(selector, chosen):
    nodes = {zone: {"zone": zone} if zone else {} for zone in ("a", "b", "c", None)}
    assert {zone for zone, labels in nodes.items() if matches_labels({"zone": selector}, labels)} == chosen


def test_workers_of_a_package_that_is_not_installed_find_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    root = str(ray_session.Path(ray_session.__file__).parents[3])
    assert build_runtime_env({}, {}, installed=True) == {}
    assert build_runtime_env({}, {}, installed=False) == {"env_vars": {"PYTHONPATH": f"{root}:/mine"}}
    own = {"env_vars": {"PYTHONPATH": "/theirs", "A": "1"}, "pip": ["x"]}
    assert build_runtime_env(own, {}, installed=False) == {
        "env_vars": {"PYTHONPATH": f"{root}:/theirs", "A": "1"}, "pip": ["x"],
    }  # fmt: skip
    assert own["env_vars"]["PYTHONPATH"] == "/theirs"
    children = f"{root}/elastic_platform/children"  # not all of site-packages before the standard library
    monkeypatch.setattr(sys, "path", [children, *sys.path])
    assert build_runtime_env({}, {}, installed=False) == {"env_vars": {"PYTHONPATH": f"{children}:/mine"}}


@pytest.mark.parametrize("job", [{"working_dir": "gcs://x.zip"}, {"py_modules": []}, {"env_vars": {"PYTHONPATH": "."}}])
def test_a_job_that_brings_the_code_is_left_alone(job):
    assert build_runtime_env({"env_vars": {"A": "1"}}, job, installed=False) == {"env_vars": {"A": "1"}}


def test_what_the_job_says_too_is_refused_as_ray_would_but_by_name(monkeypatch):
    own, job = {"pip": ["x"], "env_vars": {"A": "1", "B": "2"}}, {"pip": ["y"], "env_vars": {"B": "3"}}
    with pytest.raises(ConfigError) as refused:
        build_runtime_env(own, job, installed=True)
    reason = "the Ray job has one of its own; leave one out, or set RAY_OVERRIDE_JOB_RUNTIME_ENV=1"
    assert refused.value.violations == [
        f"cluster.runtime_env.env_vars.B=...: {reason}", f"cluster.runtime_env.pip=...: {reason}",
    ]  # fmt: skip
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    assert build_runtime_env(own, job, installed=True) == own


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}}), {"working_dir": "gcs://x.zip"}),
        ('{"metadata": {}}', {}), ('{"runtime_env": null}', {}), ("{", {}), ("[]", {}), (None, {}),
    ],
)  # fmt: skip
def test_a_job_tells_its_environment(told, expected):
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR as NAME  # noqa: N812

    assert (ray_job_config({NAME: told} if told else {}).get("runtime_env") or {}) == expected


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("cluster=processes cluster.labels.zone=a", "cluster.labels={'zone': 'a'}: only cluster=ray reads it"),
        ("cluster=local cluster.placement=spread", "cluster.placement=spread: only cluster=ray reads it"),
        ("cluster=ray cluster.placement=strict_spread", "cluster.placement=strict_spread: unknown; nearest legal: "),
        (
            "cluster=ray cluster.runtime_env.pipp=[x]",
            "cluster.runtime_env.pipp=['x']: unknown key; nearest legal: cluster.runtime_env.pip",
        ),
        ("cluster=ray cluster.autoscale=true cluster.wait=9", "cluster.device=auto: cluster.autoscale=true must know"),
        (
            "cluster=ray cluster.autoscale=true cluster.device=cpu",
            "cluster.wait=0.0: cluster.autoscale=true needs time",
        ),
        ("cluster=ray cluster.labels.zone=in(a", "cluster.labels.zone=in(a: must be name: value, !value, in(a,b)"),
    ],
)
def test_mistakes(typed, said):
    with pytest.raises(ConfigError) as refused:
        compose_config(["+experiment=gpt_quick", *typed.split()])
    assert [line for line in refused.value.violations if line.startswith(said)], refused.value.violations


def test_labels_are_typed_as_ray_writes_them():
    typed = ["cluster.labels={ray.io/accelerator-type: H100}", "cluster.labels.zone=!in(a,b)"]
    cluster = compose_config(["+experiment=gpt_quick", "cluster=ray", *typed]).cluster
    assert cluster.labels == {"ray.io/accelerator-type": "H100", "zone": "!in(a,b)"}


def test_what_an_experiment_sets_for_ray_is_dropped_elsewhere(tmp_path):
    (tmp_path / "experiment").mkdir()
    cluster = "{labels: {zone: a}, placement: spread, runtime_env: {pip: [x]}}"
    text = f"# @package _global_\ndefaults:\n  - gpt_quick\n  - override /cluster: ray\ncluster: {cluster}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    on_ray = compose_config(["+experiment=mine"], str(tmp_path)).cluster
    assert (on_ray.labels, on_ray.placement, on_ray.runtime_env) == ({"zone": "a"}, "spread", {"pip": ["x"]})
    on_processes = compose_config(["+experiment=mine", "cluster=processes"], str(tmp_path)).cluster
    assert (on_processes.labels, on_processes.placement, on_processes.runtime_env) == ({}, "pack", {})
