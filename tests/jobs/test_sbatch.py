"""`train.sbatch` run to its end in bash, with stand-ins for Slurm's, Ray's and Python's commands on PATH."""

import math
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "jobs" / "slurm" / "train.sbatch"
OPTIONS = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.+))?$", SCRIPT.read_text(), re.M))

RECORD = '#!/bin/bash\nprintf "%s\\n" "$(printf "%q " "${0##*/}" "$@")" >>"$CALLS"\n'
AGAIN = r"until\ \"\$@\"\;\ do\ sleep\ 10\;\ done"  # as %q has it
AUTH = 'echo "auth=$RAY_AUTH_MODE/$RAY_AUTH_TOKEN" >>"$CALLS"\n'
STANDINS = {
    "srun": RECORD + 'while [[ $1 == --* ]]; do shift; done\n"$@"\n',
    "ray": RECORD + AUTH + 'echo "drain=$RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" >>"$CALLS"\n',
    "scontrol": RECORD,
    "hostname": "#!/bin/bash\necho 10.0.0.1 172.17.0.1\n",
    "python": RECORD + AUTH + 'echo "RAY_ADDRESS=$RAY_ADDRESS" >>"$CALLS"\neval "$LAUNCHER"\n',
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on the first of four nodes."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in STANDINS.items():
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    return {
        "PATH": f"{stand_ins}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "READY": str(tmp_path / "ready"),
        "LAUNCHER": "exit 0",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": OPTIONS["job-name"],
        "SLURM_NNODES": "4",
        "SLURM_CPUS_PER_TASK": OPTIONS["cpus-per-task"],
        "SLURM_GPUS_PER_NODE": OPTIONS["gpus-per-node"],
        "SLURMD_NODENAME": "node07",
    }


def run(job: dict[str, str], *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and the commands that were called."""
    done = subprocess.run(["bash", str(SCRIPT), *arguments], env=job, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, calls(job)


def calls(job: dict[str, str]) -> list[str]:
    return [line.strip() for line in Path(job["CALLS"]).read_text().splitlines()]


def test_it_is_sound_bash_and_asks_for_what_a_resumable_job_needs() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    head = SCRIPT.read_text().partition("\nset -")[0].splitlines()
    assert all(not line or line.startswith("#") for line in head)  # Slurm stops reading options at the first command
    assert {"requeue", "exclusive", "signal", "time", "no-kill"} <= OPTIONS.keys()
    assert OPTIONS["signal"].startswith("B:USR1@") and OPTIONS["open-mode"] == "append"
    assert OPTIONS["ntasks-per-node"] == "1"


def test_ray_starts_on_every_node_and_the_launcher_once(job: dict[str, str]) -> None:
    status, called = run(job, "seed=7", "data.path=/a b")
    assert status == 0
    head, workers = sorted((call for call in called if call.startswith("srun")), key=lambda call: "--exclude" in call)
    resources = f"--num-cpus={OPTIONS['cpus-per-task']} --num-gpus={OPTIONS['gpus-per-node']} --block"
    assert head == (
        "srun --nodes=1 --ntasks=1 --nodelist=node07 "
        f"ray start --head --node-ip-address=10.0.0.1 --port=6379 {resources}"
    )
    assert workers == (
        "srun --nodes=3 --ntasks=3 --exclude=node07 --kill-on-bad-exit=0 --no-kill --wait=0 "
        f"bash -c {AGAIN} - ray start --address=10.0.0.1:6379 {resources}"
    )
    [launch] = [call for call in called if call.startswith("python")]
    assert shlex.split(launch) == [
        *"python -m platform.launch +experiment=gpt175b cluster=ray cluster.wait=600".split(),
        *"pipeline.stages=4 elastic.spares=0 run.dir=runs/gpt175b-4711 seed=7".split(),
        "data.path=/a b",
    ]
    assert "RAY_ADDRESS=10.0.0.1:6379" in called
    assert {call for call in called if call.startswith("drain=")} == {"drain=60"}
    assert not any(call.startswith("scontrol") for call in called)


def test_ray_and_the_launcher_share_a_token_that_no_other_job_has(job: dict[str, str]) -> None:
    def tokens() -> set[str]:
        return {call for call in run(job)[1] if call.startswith("auth=")}

    [first], both = tokens(), tokens()
    assert re.fullmatch("auth=token/[0-9a-f]{64}", first) and len(both) == 2  # the calls of two jobs, in one file


def test_one_node_starts_one_ray(job: dict[str, str]) -> None:
    _, called = run(job | {"SLURM_NNODES": "1"})
    assert len([call for call in called if call.startswith("srun")]) == 1


@pytest.mark.parametrize("spare_nodes", [0, 1])
def test_the_launch_line_composes_and_fills_the_allocation(job: dict[str, str], spare_nodes: int) -> None:
    from platform.launch import compose

    _, called = run(job | {"SPARE_NODES": str(spare_nodes)}, "seed=7", "run.dir=elsewhere")
    [launch] = [call for call in called if call.startswith("python")]
    config = compose(shlex.split(launch)[3:])
    assert (config.cluster.kind, Path(config.run.dir).name, config.seed) == ("ray", "elsewhere", 7)
    world = config.parallel.data * math.prod(config.tensor.axes.values()) * config.pipeline.stages
    gpus = int(OPTIONS["gpus-per-node"])
    assert (world, config.elastic.spares) == ((4 - spare_nodes) * gpus, spare_nodes * gpus)


@pytest.mark.parametrize("status, requeued", [(0, False), (75, True), (1, False), (2, False)])
def test_only_a_resumable_stop_is_requeued(job: dict[str, str], status: int, requeued: bool) -> None:
    returned, called = run(job | {"LAUNCHER": f"exit {status}"})
    assert returned == status
    assert ("scontrol requeue 4711" in called) == requeued


@pytest.mark.parametrize("sent, requeued", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_reaches_the_launcher_and_its_status_comes_back(
    job: dict[str, str], sent: signal.Signals, requeued: bool
) -> None:
    """USR1 is the time limit; TERM is scancel, which must not bring the job back."""
    launcher = f'trap "sleep 0.3; exit 75" {sent.name[3:]}; touch "$READY"; while :; do sleep 0.05; done'
    process = subprocess.Popen(["bash", str(SCRIPT)], env=job | {"LAUNCHER": launcher}, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not os.path.exists(job["READY"]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.wait(60) == 75
    assert ("scontrol requeue 4711" in calls(job)) == requeued
