"""Jobs in a real Slurm: what its script does where Slurm decides. Nodes run a stand-in for `platform.jobs node`, which
is quick to start; `test_slurm_runs.py` has the real one, with Ray and a run."""

from __future__ import annotations

import re
import time

import pytest

from platform.cluster.crew.signals import _ECHO_SECONDS
from platform.jobs.slurm import render_slurm_job
from tests.harness.commands import QUICK
from tests.testbed.slurm_nodes import SlurmNodes, until, what_lacks

pytestmark = [
    pytest.mark.ray,  # starts as many processes
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(what_lacks()), reason=what_lacks() or "-"),
]

# Stands in for `python -m platform.jobs node SHARED ...`: a node that ends when it is told, and a run.
NODE = """#!/bin/bash
shared=$4 folder=$(mktemp -d /tmp/ray-XXXXXXXX)
trap 'rm -rf $folder' EXIT
echo "$SLURMD_NODENAME $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $*" >>"started.$SLURM_JOB_ID"
if [[ " $* " != *" --run "* ]]; then
  trap 'exit 0' TERM
  while [[ ! -e $shared/end ]]; do sleep 0.1; done
  exit 0
fi
trap 'echo "TERM $(date +%s.%N)" >>"told.$SLURM_JOB_ID"; ending=1' TERM
while [[ ! -e finish.$SLURM_JOB_ID ]]; do
  [[ -e $shared/stop ]] && exit 75
  ((ending && ending++ > 10)) && exit 143
  sleep 0.1
done
"""
TYPED = (
    f"{QUICK} data=synthetic tensor=serial parallel.data=2 job.workers=1 cluster.device=cpu job.interface=link0".split()
)


@pytest.fixture(scope="module")
def slurm():
    with SlurmNodes(2) as nodes:
        tools = nodes.work / "bin"
        tools.mkdir()
        (tools / "python").write_text(NODE)
        (tools / "python").chmod(0o755)
        yield nodes


class Job:
    """A job in `slurm` whose nodes are stand-ins."""

    def __init__(self, slurm, options="", *typed, **environment):
        self.slurm = slurm
        job = ["job.name=a", "checkpoint.url=points", f"job.setup=export PATH={slurm.work}/bin:$PATH", *typed]
        self.id = slurm.submit(render_slurm_job([*TYPED, *job]), options, **environment)

    def started(self):
        path = self.slurm.work / f"started.{self.id}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def until_started(self, times=1):
        until(lambda: len(self.started()) == 2 * times, self.slurm.log)
        return self

    def finish(self):
        (self.slurm.work / f"finish.{self.id}").touch()

    def until_it_is(self, state):
        until(lambda: self.slurm.shown(self.id, "JobState") == state, self.slurm.log)

    def out(self):
        return (self.slurm.work / f"a-{self.id}.out").read_text()

    def shown(self, field):
        return self.slurm.shown(self.id, field)

    def cancel(self):
        self.finish()
        self.slurm.typed(f"scancel {self.id}")


@pytest.mark.parametrize(
    "options, environment",
    [
        ("", {"SBATCH_EXPORT": "NONE"}),
        pytest.param("--export=NONE", {}, marks=pytest.mark.full),
        pytest.param("", {}, marks=pytest.mark.full),
    ],
)
def test_a_job_ends_without_a_killed_node(slurm, options, environment):
    """Its steps have the script's environment: PATH, and the token without which anybody could tell Ray what to run."""
    job = Job(slurm, options, **environment).until_started()
    assert sorted(line[:3] for line in job.started()) == [[f"node{i}", "token", "64"] for i in (1, 2)]
    assert len(slurm.left_in_tmp()) == 2
    began = time.monotonic()
    job.finish()
    job.until_it_is("COMPLETED")
    assert not re.search("Killed|CANCELLED|error: node|Terminated", job.out()), job.out()
    assert not slurm.left_in_tmp() and not list((slurm.work / "runs").glob("*.job-*"))
    assert time.monotonic() - began < 60


@pytest.mark.full
def test_a_stop_by_hand_saves_and_is_not_requeued(slurm):
    job = Job(slurm).until_started()
    assert f"'scancel --batch --signal=USR2 {job.id}' saves and ends" in job.out()  # KillWait is less than a save takes
    slurm.typed(f"scancel --batch --signal=USR2 {job.id}")
    job.until_it_is("FAILED")
    assert (job.shown("ExitCode"), job.shown("Restarts")) == ("75:0", "0") and not slurm.left_in_tmp()


@pytest.mark.full
@pytest.mark.parametrize("limit", [False, True], ids=["by hand", "near its limit"])
def test_usr1_requeues(slurm, limit):
    job = Job(slurm, "--time=1 --signal=B:USR1@10" if limit else "").until_started()
    if not limit:
        slurm.typed(f"scancel --batch --signal=USR1 {job.id}")
    until(lambda: job.shown("Restarts") == "1", slurm.log)
    assert "Killed" not in job.out() and not slurm.left_in_tmp()
    job.cancel()


def test_scancel_reaches_the_run(slurm):
    job = Job(slurm).until_started()
    slurm.typed(f"scancel {job.id}")
    job.until_it_is("CANCELLED")
    until(lambda: not slurm.left_in_tmp(), slurm.log)
    assert (slurm.work / f"told.{job.id}").read_text().startswith("TERM") and "Killed" not in job.out()


@pytest.mark.full
def test_a_preempted_job_is_requeued_by_slurm(slurm):
    job = Job(slurm).until_started()
    other = Job(slurm, "--partition=high").until_started()
    until(lambda: job.shown("Restarts") == "1", slurm.log)
    told = [float(line.split()[1]) for line in (slurm.work / f"told.{job.id}").read_text().splitlines()]
    assert max(told) - min(told) < _ECHO_SECONDS  # Slurm says it twice: a driver takes that for one signal
    job.cancel()
    other.finish()
    other.until_it_is("COMPLETED")


@pytest.mark.full
def test_each_task_of_an_array_is_a_run_of_its_own(slurm):
    before = {*slurm.work.glob("started.*")}
    Job(slurm, "--array=3-4")

    def told():
        """The lines of both tasks, one after the other: each is let go as soon as both of its nodes are there."""
        started = [path.read_text().splitlines() for path in {*slurm.work.glob("started.*")} - before]
        for path in {*slurm.work.glob("started.*")} - before:
            if len(path.read_text().splitlines()) == 2:
                (slurm.work / path.name.replace("started", "finish")).touch()
        return started if [len(lines) for lines in started] == [2, 2] else []

    until(told, slurm.log)
    runs = [dict(word.split("=", 1) for word in line.split() if "=" in word) for two in told() for line in two]
    own = {(run["run.dir"], run["checkpoint.url"]) for run in runs if "run.dir" in run}
    assert own == {(f"runs/a/{i}", f"points/{i}") for i in (3, 4)}


@pytest.mark.full
def test_the_first_node_is_lost(slurm):
    """Slurm takes it away from a job with --no-kill, and leaves the rest running: without a script."""
    job = Job(slurm).until_started()
    slurm.lose(1)
    until(lambda: job.shown("Restarts") == "1", slurm.log)
    slurm.come_back(1)
    job.until_started(times=2)
    assert "node node1 was lost" in job.out()
    job.finish()
    job.until_it_is("COMPLETED")


@pytest.mark.full
def test_another_node_is_lost_and_never_given_back(slurm):
    job = Job(slurm).until_started()
    slurm.lose(2)
    until(lambda: "nodes left: 1, and the run wants 2" in job.out(), slurm.log, 240)
    slurm.come_back(2)
    assert (job.shown("NodeList"), job.shown("Restarts"), job.shown("JobState")) == ("node1", "0", "RUNNING")
    slurm.typed(f"scancel --batch --signal=USR1 {job.id}")
    until(lambda: len(job.started()) == 4, slurm.log)
    job.finish()
    job.until_it_is("COMPLETED")
