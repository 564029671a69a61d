"""How many threads a worker has, and how they wait for each other: by key, variable, affinity and quota."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from platform.cluster.crew import job as jobs
from platform.cluster.crew.job import Job, assign_worker, read_cpu_quota, share_cores
from platform.config.fields import Config

V1 = {"cpu.cfs_quota_us": "{}", "cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("cores", "quota", "workers", "variable", "threads"),
    [
        (8, inf, 1, "", 8),
        (8, inf, 2, "", 4),
        (8, inf, 3, "", 2),
        (2, inf, 4, "", 1),
        (64, 2.0, 1, "", 2),
        (64, 2.5, 1, "", 2),  # a third thread would be throttled
        (64, 0.5, 1, "", 1),
        (64, 8.0, 4, "", 2),
        (4, 16.0, 1, "", 4),
        (64, inf, 2, "1", 1),
        (2, 1.0, 2, "3", 3),  # the user knows better
        (8, inf, 2, "3,2", 3),
        (8, inf, 2, " 3 ", 3),
        (8, inf, 2, "0", 4),
        (8, inf, 2, "-1", 4),
        (8, inf, 2, "many", 4),
        (8, inf, 2, "99999", 4096),
    ],
)
def test_threads_of_a_worker(cores, quota, workers, variable, threads):
    assert share_cores(cores, quota, workers, variable) == threads


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("", {}, inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),  # in a container, which sees its own group as the top
        ("0::/\n", {"cpu.max": "max 100000\n"}, inf),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),  # of the slice around it
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 50000"}, 1.0),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "800000 100000"}, 1.0),
        ("4:cpu,cpuacct:/a\n0::/\n", {"unified/cpu.max": "300000 100000"}, 3.0),
        ("1:cpu:/\n0::/\n", {f"cpu/{n}": text.format(-1) for n, text in V1.items()}, inf),
        ("1:cpu:/a\n", {f"cpu/a/{n}": text.format(50000) for n, text in V1.items()}, 0.5),
        ("4:cpu,cpuacct:/a\n", {f"cpu,cpuacct/a/{n}": text.format(250000) for n, text in V1.items()}, 2.5),
        ("4:cpu,cpuacct:/docker/7\n", {f"cpu/{n}": text.format(250000) for n, text in V1.items()}, 2.5),
        ("3:cpuset:/a\n", {f"cpuset/a/{n}": text.format(250000) for n, text in V1.items()}, inf),
        ("0::/\n", {"cpu.max": "150000 0"}, inf),
        ("what is this\n0::\n", {"cpu.max": "\xff \xb2"}, inf),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, groups, files, quota):
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    assert read_cpu_quota(tmp_path) == quota


def test_a_worker_gets_what_key_variable_and_quota_say(monkeypatch):
    """Before, OMP_NUM_THREADS was overwritten without a word, and a quota not seen."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(jobs, "read_cpu_quota", lambda: 4.0)

    def threads(key: int = 0) -> int:
        config = Config()
        config.cluster.threads = key
        job = Job(config, [{"data": 0}, {"data": 1}], "cpu", Path("runs"))
        assignment = assign_worker(job, 0, local_rank=0, local_world_size=2, group_rank=0)
        assert assignment.environment["OMP_NUM_THREADS"] == str(assignment.threads)
        return assignment.threads

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (threads(), threads(5)) == (3, 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (threads(), threads(5)) == (2, 5)


@pytest.mark.parametrize(
    ("own", "told"), [({}, "300"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_a_command_sets_how_threads_wait_before_torch_is_there(own, told, tmp_path):
    """A run in one process, `cluster=inline`, loads torch's library in the command, to read a model's description."""
    code = "import os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    as_command = "import sys; sys.orig_argv = ['python', '-m', 'platform.launch']; sys.argv = ['-m']"
    program = f"{as_command}; import platform; {code}"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment | own, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == [told, "False"]
