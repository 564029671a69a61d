"""A real Slurm on this machine: a controller and nodes, each in namespaces of its own: `with SlurmNodes(2) as slurm`.

`ctl` has slurmctld and is where commands are typed; `node1` and up have slurmd, a /tmp of their own, and the powers of
one CPU. All share munge's socket, and a folder that a job writes to. Times of Slurm that make people wait (node
time-out, KillWait, life of credentials) are short here. Everything runs as root, and ends with the namespaces.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from tests.testbed.links import ENDS_WITH_US, Links, why_not

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "scancel", "srun")
PACKAGES = "slurmctld slurmd slurm-client munge"  # of Debian and Ubuntu
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
# linuxproc signals all processes below a task, as proctrack/cgroup does with SignalChildrenProcesses; pgid those of its
# process group, which is what other sites' Slurm comes to where Ray has sessions of its own.
TREE, TASKS = "proctrack/linuxproc", "proctrack/pgid"
GRACE = 15  # seconds that a preempted job of the partition `grace` has before Slurm ends it
CONFIG = """
ClusterName=testbed
SlurmctldHost=node0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={home}/munge.socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%h.log
ProctrackType={tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
MpiDefault=none
SlurmdTimeout=8
KillWait={kill_wait}
MinJobAge=3600
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
NodeName=node[1-{nodes}] CPUs=4 RealMemory=16000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@cache
def what_lacks() -> str:
    """Return why there can be no Slurm on this machine, in one line; "" if there can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if missing:
        return f"no Slurm here: {', '.join(missing)} not found (Debian and Ubuntu: apt-get install {PACKAGES})"
    return "no Slurm here: needs root" if os.getuid() else why_not()


class SlurmNodes:
    """Context of a Slurm of `nodes` nodes. `tracking`: its proctrack plugin; `kill_wait`: seconds between SIGTERM and
    SIGKILL. `home`: its files, and those of jobs in `home/work`, seen on all nodes."""

    def __init__(self, nodes: int = 2, tracking: str = TREE, kill_wait: int = 5):
        self._links = Links(nodes=nodes + 1, rate=None)
        self._nodes, self._tracking, self._kill_wait = nodes, tracking, kill_wait
        self._munge: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SlurmNodes:
        self.home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))  # nodes have another /tmp
        self.work = self.home / "work"
        try:
            self.work.mkdir()
            (self.home / "state").mkdir()
            self._links.__enter__()
            values = {"controller": self._links.address(0), "home": self.home, "nodes": self._nodes, "grace": GRACE}
            text = CONFIG.format(**values, tracking=self._tracking, kill_wait=self._kill_wait)
            (self.home / "slurm.conf").write_text(text)
            self._start_munge()
            self._daemon(0, "slurmctld")
            for node in range(1, self._nodes + 1):
                self._serve(node)
            until(lambda: self.typed("sinfo -h -N -p low -o %T").split() == ["idle"] * self._nodes, self.log, 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._links.__exit__()
        if self._munge:
            self._munge.kill()
            self._munge.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def _start_munge(self) -> None:
        key = self.home / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        names = ("socket", "pid-file", "log-file", "seed-file", "key-file")
        files = [f"--{name}={self.home}/munge.{name.partition('-')[0]}" for name in names]
        command = ["munged", "--foreground", "--force", *files]
        self._munge = subprocess.Popen([*ENDS_WITH_US, *command], env={"PATH": PATH}, stderr=subprocess.DEVNULL)
        until((self.home / "munge.socket").exists, self.log, 30)

    def _serve(self, node: int) -> None:
        """Start slurmd on a node that has just been booted."""
        self._links.run(node, ["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp"], check=True)
        self._daemon(node, "slurmd", "-N", f"node{node}")

    def _daemon(self, node: int, *command: str) -> None:
        said = (self.home / f"{command[0]}.{node}.out").open("ab")
        self._links.start(node, [*command, "-D"], env=self.environment, stdout=said, stderr=said, cwd=self.work)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what a user's shell here has."""
        return {"PATH": PATH, "HOME": str(self.work), "USER": "root", "SLURM_CONF": f"{self.home}/slurm.conf"}

    def typed(self, command: str, node: int = 0, **environment: str) -> str:
        """Return what a command says that is typed on a node: by default, the controller's. Raises AssertionError if
        it fails."""
        words = ["bash", "-c", command]
        done = self._links.run(node, words, env={**self.environment, **environment}, cwd=self.work)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, script: str, options: str = "", arguments: str = "", **environment: str) -> int:
        """Submit a script; return the number of its job."""
        (self.work / "job.sbatch").write_text(script)
        return int(self.typed(f"sbatch --parsable {options} job.sbatch {arguments}", **environment))

    def shown(self, job: int, field: str) -> str:
        """Return a field of `scontrol show job`."""
        words = self.typed(f"scontrol show job {job}").split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))

    def lose(self, node: int) -> None:
        """Cut the power of a node."""
        self._links.crash(node)

    def come_back(self, node: int) -> None:
        """Boot a node that was lost."""
        self._links.boot(node)
        self._serve(node)

    def left_in_tmp(self) -> list[str]:
        """Return the folders of Ray in /tmp of all nodes."""
        return [
            path for node in range(1, self._nodes + 1) for path in self.typed("ls -d /tmp/ray-* || true", node).split()
        ]

    def log(self) -> str:
        """Return what jobs and daemons have said, for a test that fails."""
        files = [*self.work.glob("*.out"), *self.home.glob("*.log"), *self.home.glob("*.out")]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-6000:]}" for file in files)


def until(what: Callable[[], object], log: Callable[[], str], seconds: float = 120) -> None:
    """Wait until `what` is so; `seconds` only bound a failing test."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, log()
        time.sleep(0.1)
