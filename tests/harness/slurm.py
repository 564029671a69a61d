"""A Slurm of stand-ins on this machine: `srun` really starts a process for every node of a step, a job is run as its
batch script says, told to stop by a signal to that script alone, and started again when it asks to be requeued.

It does what a real one was seen to do (tests/testbed/test_slurm_nodes.py, where there is one): a lost node is taken
away from the job and never given back, and if it was the first one, with the script, the rest goes on running; steps
have no environment after `sbatch --export=NONE` unless they say otherwise.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# All steps of a job: a process for each node that the options leave, whose end has the worst status.
SRUN = """#!{python}
import os, signal, subprocess, sys
options, words = dict(), sys.argv[1:]
while words and words[0].startswith("--"):
    name, _, value = words.pop(0)[2:].partition("=")
    options[name] = value
hosts = os.environ["HOSTS"].split()
chosen = options["nodelist"].split(",") if "nodelist" in options else [h for h in hosts if h != options.get("exclude")]
assert int(options["nodes"]) == len(chosen) == int(options["ntasks"]), (options, chosen)
given = os.environ if options.get("export") == "ALL" or os.environ.get("SLURM_EXPORT_ENV") != "NONE" else {{}}
tasks = [
    subprocess.Popen(words, env={{**given, "SLURMD_NODENAME": host, "SLURM_NODEID": str(hosts.index(host))}})
    for host in chosen
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
with open(os.environ["STATE"] + "/tasks", "a") as file:
    file.writelines(f"{{task.pid}} {{host}}\\n" for task, host in zip(tasks, chosen))
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show config") echo "KillWait = 30 sec" ;;
  "show job") echo "JobId=$4 JobState=RUNNING PreemptTime=None" ;;
  "show hostnames") tr , '\\n' <<<"$3" ;;
  requeue*) touch "$STATE/requeue" ;;
esac
"""
SQUEUE = """#!/bin/bash
read -ra left < <(cat "$STATE/left")
if [[ $* == *%D* ]]; then echo ${#left[@]}; else (IFS=,; echo "${left[*]}"); fi
"""


class SlurmJob:
    """One job: `script` run with Slurm's variables for nodes named `hosts`, in `folder`. `environment`: of the batch
    script beside this process's own."""

    def __init__(self, folder: Path, script: str, hosts: list[str], **environment: str):
        self.folder, self.state, self.hosts = folder, folder / "slurm", hosts
        tools = self.state / "bin"
        tools.mkdir(parents=True)
        for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL, "squeue": SQUEUE}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        (folder / "job.sbatch").write_text(script)
        self.restarts = 0
        self.environment = {
            **os.environ,
            "PATH": f"{tools}:{os.path.dirname(sys.executable)}:/usr/bin:/bin",
            "HOSTS": " ".join(hosts),
            "STATE": str(self.state),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": ",".join(hosts),
            "SLURM_EXPORT_ENV": "NONE",
            "SLURM_CPUS_PER_TASK": re.findall(r"^#SBATCH --cpus-per-task=(\d+)$", script, re.M)[0],
            **environment,
        }

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """One life of the job, from its start, or a requeue, to the end of its batch script, with `arguments` after its
        name; then Slurm ends what is left of its steps."""
        (self.state / "requeue").unlink(missing_ok=True)
        (self.state / "left").write_text(" ".join(self.hosts))
        environment = {**self.environment, "SLURM_RESTART_COUNT": str(self.restarts)}
        with (self.folder / "out").open("ab") as out:
            process = subprocess.Popen(
                ["bash", "job.sbatch", *arguments],
                cwd=self.folder,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            self.end(process)
        self.restarts += 1

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End a life as Slurm does, in the end: SIGKILL to everything that it started."""
        process.kill()
        process.wait()
        for pid in self.tasks():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        (self.state / "tasks").unlink(missing_ok=True)

    def lose_first_node(self, process: subprocess.Popen[bytes]) -> None:
        """Lose the first node: the script and what runs there; the tasks of other nodes stay."""
        lost = [process.pid, *(pid for pid, host in self.tasks().items() if host == self.hosts[0])]
        (self.state / "left").write_text(" ".join(self.hosts[1:]))
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def tasks(self) -> dict[int, str]:
        """Process id -> node, of the tasks of this life's steps."""
        path = self.state / "tasks"
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(pid): node for pid, node in (line.split() for line in lines)}

    @property
    def requeued(self) -> bool:
        return (self.state / "requeue").exists()

    def out(self) -> str:
        return (self.folder / "out").read_text()


def until(
    what: Callable[[], bool], process: subprocess.Popen[bytes], out: Callable[[], str], seconds: float = 600
) -> None:
    """Wait until `what` is so, while `process` runs; `seconds` only bound a failing test."""
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, out()
        assert time.monotonic() < deadline, out()
        time.sleep(0.1)
