"""Real workers, some of them sick, under the doctor: those are named, the others are sound, also on a busy machine."""

import subprocess
import sys
from dataclasses import replace

import pytest

from platform.cluster.control import examination
from platform.cluster.control.examination import examine_members
from platform.cluster.crew.launchers import open_crew
from platform.train.health import groups_by_check, judge_workers

pytestmark = pytest.mark.usefixtures("warm_server")
SICK = "tests.doubles.sick_worker:SickWorker"


@pytest.fixture
def busy():
    """More processes than cores, that compute and move memory, and nothing else."""
    work = "import array\na = array.array('d', range(1 << 20))\nwhile True: b = a[:]; a = b"
    burners = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(3)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


def examine_crew(job, size, thorough, times=1):
    """The last of so many examinations in a row, or the first in which anybody is bad."""
    with open_crew("processes", job(size, SICK)) as crew:
        for _ in range(times):
            outcome = examine_members(crew, job(size), sorted(crew.ready_members_by_number), thorough=thorough)
            if outcome.bad:
                break
        assert not list(crew.job.run_dir.rglob(".doctor-*"))
    return {number: list(why) for number, why in outcome.bad.items()}, outcome


def test_each_kind_of_illness_is_named(job, monkeypatch):
    monkeypatch.setenv("SICK", "0:products 1:storage 2:clock 3:wrong 4:forgetful")
    bad, outcome = examine_crew(job, 6, thorough=False)
    assert bad == {0: ["gemm"], 1: ["write"], 2: ["clock"], 3: ["wrong"], 4: ["read"]} and not outcome.shared
    assert outcome.describe_symptoms(1) == "write: OSError: [Errno 28] No space left on device"
    assert outcome.describe_symptoms(2).startswith("clock: 1") and outcome.describe_symptoms(2).endswith(
        "s, where 1 s is the most"
    )
    assert set(outcome.findings[5].readings) == {"gemm", "wrong", "memory", "write", "read", "clock"}


@pytest.mark.full
def test_a_slow_link_is_the_one_that_is_slow_with_every_partner(job, monkeypatch):
    monkeypatch.setenv("SICK", "1:link")
    bad, outcome = examine_crew(job, 4, thorough=True)
    assert bad == {1: ["link"]} and not outcome.shared
    assert "where its peers have" in outcome.describe_symptoms(1)


def test_workers_of_a_node_are_measured_together(job, monkeypatch):
    """As GPUs are, with one partner too, in a quick look."""
    monkeypatch.setattr(examination, "groups_by_check", lambda nodes, *_: groups_by_check(nodes, 1, True))
    outcome = examine_crew(job, 3, thorough=True)[1]
    assert not outcome.bad and all("node" in one.readings for one in outcome.findings.values())
    assert ["link" in outcome.findings[number].readings for number in range(3)].count(True) == 2


@pytest.mark.full
def test_a_quick_look_does_not_blame_the_partner_of_a_slow_link(job, monkeypatch):
    """With one partner both look slow: then all are measured with several. Here workers on CPUs stand for GPUs."""
    monkeypatch.setenv("SICK", "1:link")
    monkeypatch.setattr(examination, "judge_workers", lambda findings, _: judge_workers(findings, "cpu"))
    monkeypatch.setattr(examination, "groups_by_check", lambda nodes, n, _: groups_by_check(nodes, n, False))
    with open_crew("processes", job(4, SICK)) as crew:
        on_gpus = replace(job(4), device="cuda")
        outcome = examine_members(crew, on_gpus, sorted(crew.ready_members_by_number), thorough=False)
        assert {n: list(why) for n, why in outcome.bad.items()} == {1: ["link"]} and not outcome.shared
        monkeypatch.setattr(examination, "PARTNERS", 1)
        outcome = examine_members(crew, on_gpus, sorted(crew.ready_members_by_number), thorough=False)
        assert outcome.bad.keys() == {1, 2}, "negative control"


def test_a_busy_machine_makes_nobody_sick(job, busy):
    bad, outcome = examine_crew(job, 4, thorough=False)
    assert bad == {} and not outcome.shared


@pytest.mark.full
def test_a_busy_machine_makes_nobody_sick_in_a_thorough_look_either(job, busy):
    for thorough in (False, True):
        bad, outcome = examine_crew(job, 4, thorough=thorough, times=5)
        assert bad == {} and not outcome.shared


def test_one_worker_alone_has_no_peers(job):
    with open_crew("inline", job(1, SICK)) as crew:
        outcome = examine_members(crew, job(1), [0], thorough=True)
    assert outcome.bad == {} and not outcome.shared and "link" not in outcome.findings[0].readings
