import math

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import resources
from platform.cluster.crew.failures import NoPlaces, NotThere
from platform.cluster.resources import Supply, await_worker_places, count_available_workers
from platform.cluster.shown_commands import Command
from platform.config.fields import Config
from platform.config.groups import Cluster
from platform.launch import compose_config
from platform.predict.remedies import Device


@pytest.fixture
def supply(monkeypatch):
    def set_supply(*supplies):
        left = list(supplies)
        monkeypatch.setattr(resources, "_measure_supply", lambda *_: left.pop(0) if len(left) > 1 else left[0])

    return set_supply


@pytest.fixture
def said():
    return []


@pytest.mark.parametrize(("gpus", "device"), [(4, "cuda"), (3, "cpu"), (0, "cpu")])
def test_auto_takes_gpus_only_for_everybody_and_says_so(supply, said, gpus, device):
    supply(Supply(gpus, 2, "on this machine"))
    assert await_worker_places(Cluster(), 4, said.append).device == device
    assert said == [f"device: {device} ({gpus} GPUs on this machine)"]


def test_too_few_gpus(supply, said):
    supply(Supply(1, 2, "on this machine"))
    with pytest.raises(ConfigError, match="cluster.device=cuda: needs 8 GPUs, 1 there"):
        await_worker_places(Cluster(device="cuda"), 8, said.append)


def test_local_workers_are_logical_but_a_crowd_is_warned_of(supply, said):
    supply(Supply(0, 2, "on this machine"))
    assert await_worker_places(Cluster(device="cpu"), 8, said.append).device == "cpu"
    assert said == ["device: cpu"]
    assert await_worker_places(Cluster(device="cpu"), 9, said.append).device == "cpu"
    assert said[-1] == "warning: 9 workers share 2 cores: this will be slow"


def test_a_cluster_needs_a_cpu_per_worker(supply, said):
    supply(Supply(0, 3, "free in the Ray cluster", shared=True))
    with pytest.raises(ConfigError, match="cluster=ray: needs 4 CPUs, 3 there"):
        await_worker_places(Cluster(kind="ray"), 4, said.append)


def test_waiting_for_more(supply, said, monkeypatch):
    monkeypatch.setattr(resources, "sleep", lambda seconds: None)
    few, enough = Supply(0, 3, "free", shared=True), Supply(0, 4, "free", shared=True)
    supply(few, few, enough)
    assert await_worker_places(Cluster(kind="ray", wait=100), 4, said.append).device == "cpu"
    assert said == ["waiting for 4 CPUs, 3 of 4 there (free), up to 100 s", "device: cpu (0 GPUs free)"]


def test_inline_is_a_world_of_one(said):
    with pytest.raises(ConfigError, match="cluster=inline: .* 2 workers; nearest legal: cluster=processes"):
        await_worker_places(Cluster(kind="inline"), 2, said.append)
    assert await_worker_places(Cluster(kind="inline", device="cpu"), 1, said.append).device == "cpu"


def test_torchrun_decides_the_size(said, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert count_available_workers(Cluster(kind="inline")) == 2
    assert await_worker_places(Cluster(device="cpu"), 2, said.append).device == "cpu"
    with pytest.raises(ConfigError, match="this plan has 4 workers, and torchrun has started 2"):
        await_worker_places(Cluster(device="cpu"), 4, said.append)


def test_available_workers(supply):
    supply(Supply(3, 16, "there"))
    assert count_available_workers(Cluster()) == count_available_workers(Cluster(device="cuda")) == 3
    assert count_available_workers(Cluster(device="cpu")) == 16
    assert count_available_workers(Cluster(kind="inline")) == 1
    supply(Supply(0, 16, "there"))
    assert count_available_workers(Cluster()) == 16


def test_a_driver_without_files_for_all_says_so_before_any_starts(said, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 1024))
    raised = []
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: raised.append(limits))
    assert await_worker_places(Cluster(kind="processes", device="cpu"), 298, said.append).device == "cpu"
    assert raised[0] == (1024, 1024)  # the soft limit is raised to the hard one
    reason = "cluster=processes: 299 workers need 1025 open files in the driver, .* is 1024"
    with pytest.raises(ConfigError, match=reason):
        await_worker_places(Cluster(kind="processes", device="cpu"), 299, said.append)


def test_spares_never_block_a_start(supply, said):
    supply(Supply(0, 5, "free", shared=True))
    assert await_worker_places(Cluster(kind="ray"), 4, said.append, 4) == ("cpu", 5, math.inf)
    assert said[0] == "1 of 4 spares find a place now (free); the others are called for"
    supply(Supply(4, 2, "on this machine"))
    assert await_worker_places(Cluster(kind="processes", device="cuda"), 4, said.append, 4) == ("cuda", 4, 4)


def test_who_waits_is_told_how_many_are_there_and_may_try_again(supply, said, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(resources, "monotonic", lambda: next(clock))
    monkeypatch.setattr(resources, "sleep", lambda seconds: None)
    three, four = Supply(0, 3, "free", shared=True), Supply(0, 4, "free", shared=True)
    supply(three, three, four)
    with pytest.raises(NoPlaces, match=r"waited 10 s for 5 CPUs, 4 of 5 there \(free\)"):
        await_worker_places(Cluster(kind="ray", wait=10), 5, said.append)
    assert said == [f"waiting for 5 CPUs, {n} of 5 there (free), up to 10 s" for n in (3, 4)]


def test_a_start_is_smaller_only_where_min_workers_says_so(supply, said):
    supply(Supply(0, 3, "free", shared=True))
    assert await_worker_places(Cluster(kind="ray"), 8, said.append, 2, least=2) == ("cpu", 3, math.inf)
    assert (
        said[0]
        == "cluster=ray: needs 8 CPUs, 3 there (free): starts with 3, as elastic.min_workers=2 allows, and grows"
    )
    with pytest.raises(ConfigError, match="needs 8 CPUs, 3 there"):
        await_worker_places(Cluster(kind="ray"), 8, said.append, least=4)
    supply(Supply(3, 16, "on this machine"))
    assert await_worker_places(Cluster(kind="processes"), 8, said.append, least=2) == ("cuda", 3, 3)
    assert await_worker_places(Cluster(kind="processes"), 8, said.append, least=4) == ("cpu", 8, math.inf)


@pytest.mark.parametrize(
    ("kind", "steps", "status"), [("ray", 0, NotThere), ("ray", 4, NoPlaces), ("local", 4, NotThere)]
)
def test_a_cluster_that_a_run_has_worked_in_is_no_mistake(monkeypatch, kind, steps, status):
    """The head or places that are not there now: 2 is for what the user can mend, 75 for what may come back."""
    config = Config()
    config.cluster.kind = kind
    monkeypatch.setattr(resources, "find_last_step", lambda folder: steps)
    for error in (NotThere("cluster", "ray", "no Ray cluster"), resources.TooFewGpus("cluster: needs 2 GPUs")):
        with pytest.raises(status), resources.expect_cluster(config):
            raise error
    with pytest.raises(ConfigError, match="a mistake"), resources.expect_cluster(config):
        raise ConfigError("a mistake")


def test_places_that_are_lacking_may_come(supply, said):
    supply(Supply(0, 3, "free", shared=True))
    with pytest.raises(NotThere, match="needs 4 CPUs, 3 there"):
        await_worker_places(Cluster(kind="ray"), 4, said.append)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_plan_for_gpus_that_are_not_there_is_no_cure(supply, said, monkeypatch, gpus):
    """A run of one process, which has room for one worker, was told the best plan for 1 GPU on a machine without."""
    supply(Supply(gpus, 2, "on this machine"))
    config = compose_config(["+experiment=one_gpu", "cluster.kind=processes"])
    asked = []
    monkeypatch.setattr(
        resources, "_suggest_best_plan", lambda _, command, workers, device: asked.append(workers) or "!"
    )
    monkeypatch.setattr(resources, "find_worker_device", lambda *_: Device(80e9, "a GPU"))
    monkeypatch.setattr(resources, "count_available_workers", lambda _: 1)
    with pytest.raises(ConfigError, match="cluster.device=cuda: needs 2 GPUs"):
        resources.reserve_or_suggest(config, Command([]), 2, said.append)
    assert asked == [1] * gpus
