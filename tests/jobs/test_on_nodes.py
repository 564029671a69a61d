"""Jobs run to their end on nodes that are really there: two Rays of their own on this machine.

Slurm's commands are stand-ins that start a process for every node; a pod's is what starts the entry point of a RayJob.
All else is real: scripts, supervisor, Ray, workers, checkpoints; and the numbers are those of a run alone.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from platform.jobs.kubernetes import render_kubernetes_job
from platform.jobs.slurm import render_slurm_job
from tests.harness.commands import QUICK, SMALL, command
from tests.harness.process_tree import descendants, gone
from tests.harness.ray_machines import private_cluster
from tests.harness.slurm import SlurmJob, until
from tests.harness.watched import Watched

DOUBLES = str(Path(__file__).parents[1] / "doubles")
pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(3600)]

RUN = [
    *(QUICK, *SMALL, "data=synthetic", "precision=fp64", "model.dropout=0.1", "optimizer.warmup_steps=2"),
    *("train.steps=100000", "checkpoint.every=4", "cluster.device=cpu", "elastic.wait=120"),
]
LIMIT = 900  # seconds: only bounds a failing test, on a machine that may be busy
TWO = ["tensor=serial", "parallel.data=2", "job.workers=1", "extend=[slow_steps]"]
SLOW = {
    "STEP_SECONDS": "0.3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join((DOUBLES, os.environ["PYTHONPATH"])),
}


@pytest.fixture(autouse=True)
def lone_modules(monkeypatch):
    """A module of the user's own, without a package around it: a manifest carries packages whole."""
    monkeypatch.syspath_prepend(DOUBLES)


def alike(actual: list[tuple], folder: Path) -> bool:
    """Every step once and in order, with the numbers of one worker that nobody disturbs."""
    folder.mkdir()
    alone = [*RUN, "tensor=serial", "parallel.data=1", "cluster=inline", "run.dir=run"]
    done = command(*alone, f"train.stop_at={actual[-1][0]}", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = Watched(folder / "run").numbers()
    assert [row[:2] for row in actual] == [row[:2] for row in wanted]
    return all(have[2:] == pytest.approx(want[2:], rel=1e-9, abs=0) for have, want in zip(actual, wanted, strict=True))


def of(process: subprocess.Popen[bytes], *words: bytes) -> list[int]:
    """The processes below this one whose command has all of these words."""
    pids = []
    for pid in descendants(process.pid):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        pids += [pid] * all(word in line for word in words)
    return pids


def test_a_slurm_job_is_requeued_and_survives_its_driver_its_head_and_its_nodes(tmp_path):
    """Two nodes. Stopped near its limit, requeued; the driver is killed; Ray's head is killed; a node is told to go;
    the first node is lost, requeued by Slurm; done."""
    run = Watched(tmp_path / "run")
    typed = [*RUN, *TWO, "checkpoint.url=run/checkpoints", "run.dir=run", "job.interface=lo"]
    job = SlurmJob(tmp_path, render_slurm_job(typed), ["node1", "node2"], **SLOW)

    def steps(count: int, process: subprocess.Popen[bytes]) -> None:
        last = run.step + count
        until(lambda: run.step >= last, process, job.out)

    with job.started() as process:
        steps(3, process)
        assert {row["world_size"] for row in run.rows()} == {2}
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT) == 75 and job.requeued, job.out()
    stopped = run.step
    with job.started() as process:
        steps(3, process)
        [driver] = of(process, b"platform.launch")
        os.kill(driver, signal.SIGKILL)
        steps(3, process)
        [head] = of(process, b"gcs_server")
        os.kill(head, signal.SIGKILL)
        steps(8, process)
        assert "it is started again" in job.out()
        [other] = [pid for pid in of(process, b"platform.jobs") if job.tasks().get(pid) == "node2"]
        os.kill(other, signal.SIGTERM)
        until(lambda: run.rows()[-1]["world_size"] == 1, process, job.out)
        inside = descendants(process.pid)
        job.lose_first_node(process)  # nobody had time for anything
        deadline = time.monotonic() + LIMIT
        while not job.requeued:  # by the other node, which has heard nothing any more
            assert time.monotonic() < deadline, job.out()
            time.sleep(0.5)
        job.end(process)
        assert gone(inside, seconds=30)
    last = run.step + 4
    (tmp_path / "job.sbatch").write_text(render_slurm_job([*typed, f"train.stop_at={last}"]))
    with job.started() as process:
        assert process.wait(LIMIT) == 0, job.out()
    statuses = run.ends()
    assert statuses[0] == 75 and -signal.SIGKILL in statuses and statuses[-1] == 0, statuses
    assert not list(tmp_path.glob("run.job-*")) and stopped < last
    cost = run.cost()
    # the killed driver; the head took a worker along, and its driver was told to go; with the first node the cluster
    # went, which its driver still wrote down or did not
    assert cost.restarts >= 1 and 2 <= cost.restarts + cost.failures <= 3, cost
    assert alike(run.numbers(), tmp_path / "alone")


def entrypoint(*typed: str, mount: Path) -> str:
    text = render_kubernetes_job([*RUN, *TWO, *typed, "job.image=i", "job.claim=c", f"job.mount={mount}"])
    [job] = [document for document in yaml.safe_load_all(text) if document["kind"] == "RayJob"]
    return job["spec"]["entrypoint"]


def as_a_pod_does(entry: str, folder: Path, address: str) -> subprocess.Popen[bytes]:
    """Start an entry point as the head's pod does: by a shell, in a session of its own, told where Ray is."""
    out = (folder / "out").open("ab")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {**os.environ, **SLOW, "RAY_ADDRESS": address, "PATH": path}
    return subprocess.Popen(
        entry, shell=True, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
    )


def test_a_rayjob_survives_its_driver_and_the_node_of_its_head(tmp_path):
    """The same entry point in two clusters: in the first the driver is killed, and then everything."""
    mount = tmp_path / "shared"
    run = Watched(mount / "runs" / "gpt-quick")
    entry = entrypoint(f"checkpoint.url={mount}/checkpoints", mount=mount)
    out = lambda: (tmp_path / "out").read_text()  # noqa: E731
    with private_cluster(head_cpus=0, **SLOW) as cluster:
        cluster.add_node(num_cpus=2)
        process = as_a_pod_does(entry, tmp_path, cluster.address)
        until(lambda: run.step >= 2, process, out)
        [driver] = of(process, b"platform.launch")
        os.kill(driver, signal.SIGKILL)  # before the first checkpoint
        until(lambda: run.step >= 6, process, out)
        inside = {process.pid, *descendants(process.pid)}
        os.killpg(process.pid, signal.SIGKILL)  # with the node, and the cluster after it
        process.wait()
    assert gone(inside, seconds=30)
    last = run.step + 3
    with private_cluster(head_cpus=0, **SLOW) as cluster:  # what backoffLimit makes
        cluster.add_node(num_cpus=2)
        process = as_a_pod_does(f"{entry} train.stop_at={last}", tmp_path, cluster.address)
        assert process.wait(LIMIT) == 0, out()
    assert run.ends() == [-signal.SIGKILL, 0] and run.cost().restarts == 2
    assert "2 of 10 retries are spent" in out()
    assert alike(run.numbers(), tmp_path / "alone")


def test_a_check_of_two_nodes_tells_what_it_has_proven(tmp_path):
    typed = "+experiment=cluster_check job.nodes=2 job.workers=1 cluster.device=cpu job.interface=lo run.dir=run"
    small = [*SMALL, "checkpoint.url=run/checkpoints", "train.steps=60", "optimizer.warmup_steps=10"]
    job = SlurmJob(
        tmp_path, render_slurm_job([*shlex.split(typed), *small, "checkpoint.every=20"]), ["node1", "node2"], **SLOW
    )
    with job.started() as process:
        assert process.wait(LIMIT) == 0, job.out()
    assert "this cluster is ready" in job.out() and "2 of 2 workers" in job.out()
    assert json.loads((tmp_path / "run" / "drivers.jsonl").read_text().splitlines()[-1])["event"] == "closed"
