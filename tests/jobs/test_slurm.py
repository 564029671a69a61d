"""Scripts for Slurm, run to their end in bash with stand-ins for its commands on PATH, and read by shellcheck."""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.jobs.__main__ import main
from platform.jobs.slurm import render_slurm_job
from platform.launch import compose_config
from tests.jobs.examples import EXAMPLES, JOBS, written

SCRIPTS = [name for name in EXAMPLES if name.startswith("slurm/")]
TYPED = "+experiment=one_gpu data=text data.path=/data/corpus checkpoint.url=/data/checkpoints".split()
NODES = [*TYPED, "parallel.data=8", "job.workers=2"]  # on four nodes
VARIANTS = {
    "typed": ["job.gpu_type=h100"],
    "gres": ["job.gpu_type=h100", "job.request=gres"],
    "shared": ["job.shared=true", "job.memory=64"],
    "pyxis": ["job.runtime=pyxis", "job.image=registry/image:1", "job.mounts=/scratch"],
    "apptainer": ["job.runtime=apptainer", "job.image=image.sif", "job.mounts=[/scratch,/a b:/c]"],
    "network": ["job.interface=ib0", "job.ip=6"],
    "site": [
        "job.partition=gpu",
        "job.account=a1",
        "job.options=[--qos=a,--reservation=x]",
        "job.setup=module load x",
    ],
    "secrets": ["monitor=[wandb,mlflow,trackio]", "job.secrets=[AWS_SECRET_ACCESS_KEY=~/.secrets/aws,A=/b/c]"],
    "odd": ["run.dir=/data/my runs/a", "train.steps=7", "job.retries=3", "job.time=1:00:00"],
}

RECORD = '#!/bin/bash\nprintf "%s\\n" "$(printf "%q " "${0##*/}" "$@")" >>"$CALLS"\n'
STANDINS = {
    "srun": RECORD + 'echo "auth=$RAY_AUTH_MODE/$RAY_AUTH_TOKEN cpus=$SRUN_CPUS_PER_TASK" >>"$CALLS"\n'
    '[[ " $* " == *" --run "* ]] && eval "$RUN" || sleep 0.1\n',
    "scontrol": RECORD
    + 'case "$1 $2" in "show hostnames") printf "%s\\n" $HOSTS ;; "show config") echo "KillWait  = 30 sec" ;; esac\n',
    "squeue": "#!/bin/bash\nset -- $HOSTS\necho $#\n",
}


@cache
def script(*more):
    return render_slurm_job([*NODES, *more])


@pytest.fixture
def job(tmp_path):
    """The environment of a batch script on the first of four nodes; `RUN` is what the run does."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in STANDINS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "HOSTS": "node07 node08 node09 node10",
        "RUN": "exit 0",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[07-10]",
        "HOME": str(tmp_path),
        "FOLDER": str(tmp_path),
    }


def start(job, text, *arguments):
    (Path(job["FOLDER"]) / "job.sbatch").write_text(text)
    command = ["bash", "job.sbatch", *arguments]
    return subprocess.Popen(command, cwd=job["FOLDER"], env=job, stderr=subprocess.PIPE, text=True)


def run(job, text, *arguments):
    """Exit status, and the commands that were called, as words."""
    process = start(job, text, *arguments)
    error = process.communicate(timeout=60)[1]
    assert error == ""
    return process.returncode, calls(job)


def calls(job):
    return [shlex.split(line) for line in Path(job["CALLS"]).read_text().splitlines()]


def the_run(called):
    [command] = [call for call in called if call[0] == "srun" and "--run" in call]
    return command


def options(text):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.+))?$", text, re.M))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * ("gpt175b" in name)) for name in SCRIPTS]
)
def test_the_examples_are_what_their_commands_write(name):
    assert (JOBS / name).read_text() == written(name), "python -m tests.jobs.examples writes them"


def tool(name):
    """The path of a development tool: on PATH, or beside Python."""
    binary = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if not binary:
        pytest.skip(f"needs {name} (pip install {name}-py)")
    return binary


def test_shellcheck_has_nothing_to_say(tmp_path):
    checker = tool("shellcheck")
    scripts = [JOBS / name for name in SCRIPTS]
    for variant, more in VARIANTS.items():
        scripts.append(tmp_path / f"{variant}.sbatch")
        scripts[-1].write_text(script(*more))
    done = subprocess.run([checker, *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (tmp_path / "wrong.sbatch").write_text("#!/bin/bash\nrm -rf $1\n")
    assert subprocess.run([checker, str(tmp_path / "wrong.sbatch")], capture_output=True).returncode


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_asks_for_what_a_resumable_job_needs(name):
    text = (JOBS / name).read_text()
    head = text.partition("\nset -")[0].splitlines()
    assert all(not line or line.startswith("#") for line in head)  # Slurm stops reading options at the first command
    asked = options(text)
    assert {"requeue", "signal", "time", "no-kill", "mem", "cpus-per-task"} <= asked.keys()
    assert asked["signal"].startswith("B:USR1@") and asked["open-mode"] == "append" and asked["ntasks-per-node"] == "1"
    assert "ray stop" not in text


@pytest.mark.parametrize(
    "variant, asked",
    [
        ("typed", {"gpus-per-node": "h100:2", "exclusive": "", "mem": "0"}),
        ("gres", {"gres": "gpu:h100:2"}),
        ("shared", {"mem": "64G", "gpus-per-node": "2"}),
        ("site", {"partition": "gpu", "account": "a1", "qos": "a", "reservation": "x"}),
        ("odd", {"time": "1:00:00"}),
    ],
)
def test_options_of_a_site(variant, asked):
    directives = options(script(*VARIANTS[variant]))
    assert directives == directives | {"nodes": "4"} | asked
    assert ("exclusive" in directives) == (variant != "shared")


SERVICES = {  # file below ~/.secrets -> variable
    "wandb/api-key": "WANDB_API_KEY",
    "mlflow/tracking-uri": "MLFLOW_TRACKING_URI",
    "mlflow/token": "MLFLOW_TRACKING_TOKEN",
    "trackio/space-id": "TRACKIO_SPACE_ID",
    "trackio/token": "HF_TOKEN",
}
SENT = "monitor=[wandb,mlflow,trackio]"
SAYS = "".join(f"echo {name}=${{{name}-none}};" for name in [*SERVICES.values(), "MINE"])


def secret_file(job, name, text, mode=0o600):
    path = Path(job["HOME"]) / ".secrets" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def ran_with(job, text):
    """Exit status of a job, and the variables that its run has."""
    process = start(job | {"RUN": f"{{ {SAYS} }} >>$HOME/run"}, text)
    process.communicate(timeout=60)
    return process.returncode, (Path(job["HOME"]) / "run").read_text().split() if process.returncode == 0 else []


def test_what_is_secret_of_services_comes_from_files_that_slurm_never_sees(job, tmp_path):
    for number, name in enumerate(SERVICES):
        secret_file(job, name, f"hidden-{number}" + "\n" * (number % 2))
    secret_file(job, "mine", "hidden-mine")
    text = script(SENT, "job.setup=exec 2>$HOME/log; set -x", "job.secrets=[MINE=~/.secrets/mine]")
    status, lines = ran_with(job, text)
    assert status == 0 and lines[-1] == "MINE=hidden-mine"
    assert lines[:-1] == [f"{name}=hidden-{number}" for number, name in enumerate(SERVICES.values())]
    log = (tmp_path / "log").read_text()
    assert "secret WANDB_API_KEY" in log, "the trace of the script is what it is looked for in"
    seen = [text, (tmp_path / "calls").read_text(), log]
    assert not any("hidden" in content for content in seen)


def test_secrets_may_be_missing_brought_along_or_read_by_others(job, tmp_path, capfd):
    secret_file(job, "wandb/api-key", "from-file")
    secret_file(job, "mlflow/token", "from-file", mode=0o644)
    secret_file(job, "mine", "from-file")
    brought = job | {"WANDB_API_KEY": "brought", "MINE": "brought"}
    status, lines = ran_with(brought, script(SENT, "job.secrets=[MINE=~/.secrets/mine]"))
    named = dict(line.split("=") for line in lines)
    assert status == 0 and (named["WANDB_API_KEY"], named["MINE"]) == ("brought", "from-file")
    assert (named["MLFLOW_TRACKING_TOKEN"], named["HF_TOKEN"]) == ("from-file", "none")
    said = capfd.readouterr().out
    assert said.count("others can read") == 1 and f"chmod 600 {tmp_path}/.secrets/mlflow/token" in said
    (tmp_path / ".secrets" / "mine").unlink()
    assert ran_with(job, script("job.secrets=[MINE=~/.secrets/mine]"))[0] == 2
    assert ".secrets" not in script()


def test_a_job_without_gpus_asks_for_none():
    text = render_slurm_job(["+experiment=cluster_check", "job.nodes=2", "job.workers=4", "checkpoint.url=/data/a"])
    assert not {"gres", "gpus-per-node"} & options(text).keys() and options(text)["cpus-per-task"] == "4"
    assert "parallel.data=8" in text


def test_ray_is_on_every_node_and_the_run_on_the_first(job):
    status, called = run(job, script(), "seed=7", "data.path=/a b")
    assert status == 0
    [others, listener] = sorted(
        (call for call in called if "--exclude=node07" in call), key=lambda call: "--overlap" in call
    )
    first = the_run(called)
    step = "srun --export=ALL --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --no-kill --wait=0".split()
    node = "python -m platform.jobs node runs/one-gpu.job-4711".split()
    assert others == [*step, "--nodes=3", "--ntasks=3", "--exclude=node07", *node, others[-1]]
    place = first.index("--run")
    assert first[:place] == [
        *step, "--nodes=1", "--ntasks=1", "--nodelist=node07", *node, others[-1], "--peer=node08", "--retries=10",
    ]  # fmt: skip
    assert listener[:-4] == [*others[: others.index("python")], "--overlap", "--cpus-per-task=1", "bash"]
    assert listener[-2:] == [node[-1], "node07"]
    assert others[-1].startswith("--drain=") and first[-2:] == ["seed=7", "data.path=/a b"]  # typed last, it wins
    config = compose_config(first[place + 1 :])
    assert (config.cluster.kind, config.seed, config.data.path) == ("ray", 7, "/a b")
    assert config.parallel.data * math.prod(config.tensor.axes.values()) * config.pipeline.stages == 4 * 2
    assert config.elastic.min_workers == 4 and config.run.time_margin + 60 == int(
        options(script())["signal"].partition("@")[2]
    )
    assert not any(call[:2] == ["scontrol", "requeue"] for call in called)
    assert not list(Path(job["FOLDER"]).glob("runs/*.job-*"))  # what the nodes shared is gone


def test_one_node_starts_one_step(job):
    _, called = run(job | {"HOSTS": "node07"}, script())
    assert len([call for call in called if call[0] == "srun"]) == 1 and "--peer=" in the_run(called)


def test_what_an_earlier_life_left_is_not_taken_for_this_one_s(job):
    stale = Path(job["FOLDER"], "runs", "one-gpu.job-4711")
    stale.mkdir(parents=True)
    (stale / "stop").touch()
    status, _ = run(job | {"RUN": "test ! -e runs/one-gpu.job-4711/stop; exit $((3 * $?))"}, script())
    assert status == 0


def test_containers(job):
    status, called = run(job, script(*VARIANTS["pyxis"]))
    words, folder = the_run(called), job["FOLDER"]
    assert "--container-image=registry/image:1" in words and f"--container-workdir={folder}" in words
    mounts = f"{folder}:{folder},/data/corpus:/data/corpus,/data/checkpoints:/data/checkpoints,/scratch:/scratch"
    assert f"--container-mounts={mounts}" in words
    _, called = run(job, script(*VARIANTS["apptainer"]))
    words = [call for call in called if "--run" in call][-1]
    place = words.index("apptainer")
    assert words[place : place + 7] == ["apptainer", "exec", "--nv", "--pwd", folder, "--bind", folder]
    assert words[words.index("/a b:/c") + 1 :][:2] == ["image.sif", "python"]


def test_the_network_of_a_site(job):
    _, called = run(job, script(*VARIANTS["network"]))
    assert all({"--interface=ib0", "--ip=6"} <= {*call} for call in called if "python" in call)


def test_ray_has_a_token_that_no_other_job_has(job):
    def tokens():
        return {call[0] for call in run(job, render_slurm_job(TYPED))[1] if call[0].startswith("auth=")}

    [first], both = tokens(), tokens()
    assert re.fullmatch("auth=token/[0-9a-f]{64}", first) and len(both) == 2  # the calls of two jobs, in one file


@pytest.mark.parametrize("status, requeued", [(0, False), (75, True), (1, False), (2, False), (143, False)])
def test_only_what_goes_on_is_requeued(job, status, requeued):
    returned, called = run(job | {"RUN": f"exit {status}"}, script())
    assert returned == status
    assert (["scontrol", "requeue", "4711"] in called) == requeued


@pytest.mark.parametrize(
    "state, requeued",
    [
        ("JobState=RUNNING PreemptTime=2026-01-02T03:04:05", True),  # within the grace: Slurm leaves it to the job
        ("JobState=RUNNING PreemptEligibleTime=2026-01-02T03:04:05 PreemptTime=None", False),
        ("JobState=COMPLETING PreemptTime=2026-01-02T03:04:05", False),  # Slurm requeues it
    ],
)
def test_who_has_saved_before_the_end_of_a_preemption_asks_for_a_requeue(job, state, requeued):
    tool = Path(job["FOLDER"], "bin", "scontrol")
    tool.write_text(tool.read_text().replace("esac", f'"show job") echo "JobId=4711 {state} StartTime=x" ;; esac'))
    returned, called = run(job | {"RUN": "exit 143"}, script())
    assert returned == 143 and (["scontrol", "requeue", "4711"] in called) == requeued


def test_each_task_of_an_array_has_directories_of_its_own(job):
    """Also where a path wants quotes; what is typed still wins."""
    _, called = run(job | {"SLURM_ARRAY_TASK_ID": "7"}, script("checkpoint.url=/data/my points"), "seed=7")
    words = the_run(called)
    assert words[-3:] == ["run.dir=runs/one-gpu/7", "checkpoint.url=/data/my points/7", "seed=7"]
    assert words[words.index("node") + 1] == "runs/one-gpu/7.job-4711"


def test_a_job_outside_of_slurm_says_what_it_lacks(job):
    del job["SLURM_JOB_ID"]
    process = start(job, render_slurm_job(TYPED))
    assert "this script is for sbatch" in process.communicate(timeout=60)[1] and process.returncode


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_near_its_limit_a_job_asks_the_run_to_stop_and_waits(job, sent):
    """USR1 leaves a file, which the run's node looks for; USR2 does, and keeps the job from being requeued; TERM comes
    to all steps anyway, and what is cancelled while it starts, and ends with 75, stays cancelled."""
    shared = "runs/one-gpu.job-4711"
    wait = f'while [[ ! -e {shared}/stop && ! -e "$FOLDER/told" ]]; do sleep 0.02; done'
    process = start(job | {"RUN": f'touch "$FOLDER/ready"; {wait}; sleep 0.2; exit 75'}, script())
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{job['FOLDER']}/ready"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(sent)
    if sent == signal.SIGTERM:
        time.sleep(0.2)
        assert process.poll() is None and not os.path.exists(f"{job['FOLDER']}/{shared}/stop")
        Path(job["FOLDER"], "told").touch()
    assert process.wait(60) == 75
    assert (["scontrol", "requeue", "4711"] in calls(job)) == (sent == signal.SIGUSR1)


def test_a_job_at_its_limit_is_requeued_though_slurm_ends_it(job):
    """TERM follows USR1, while the run still saves."""
    stop = "runs/one-gpu.job-4711/stop"
    wait = f'touch "$FOLDER/ready"; while [[ ! -e {stop} || ! -e "$FOLDER/told" ]]; do sleep 0.02; done'
    process = start(job | {"RUN": f"{wait}; exit 75"}, script())
    for number, seen in ((signal.SIGUSR1, "ready"), (signal.SIGTERM, stop)):
        deadline = time.monotonic() + 60
        while not Path(job["FOLDER"], seen).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
    time.sleep(0.2)
    Path(job["FOLDER"], "told").touch()
    assert process.wait(60) == 75 and ["scontrol", "requeue", "4711"] in calls(job)


@pytest.mark.parametrize("sent, asked", [(signal.SIGUSR1, "scontrol requeue"), (signal.SIGUSR2, "scancel")])
def test_whose_first_node_dies_as_it_saves_is_requeued_only_if_it_is_to_go_on(job, sent, asked):
    """A job that was told to save and end leaves the word where the other nodes look: its script is gone."""
    folder, shared = Path(job["FOLDER"]), Path(job["FOLDER"], "runs/one-gpu.job-4711")
    [listen] = re.findall(r"^  listen='$(.*?)^    done'$", script(), re.M | re.S)
    process = start(
        job | {"RUN": f'touch "$FOLDER/ready"; while [[ ! -e {shared}/end ]]; do /bin/sleep 0.1; done'}, script()
    )
    for wanted, number in ((folder / "ready", sent), (shared / "stop", signal.SIGKILL)):
        deadline = time.monotonic() + 60
        while not wanted.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
    process.wait(60)
    for name in ("scancel", "sleep"):  # all that passes is time
        stub = (
            STANDINS["srun"].partition("echo")[0] + f'touch "{shared}/end"\n' if name == "scancel" else "#!/bin/bash\n"
        )
        (folder / "bin" / name).write_text(stub)
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin/scontrol").write_text(STANDINS["scontrol"] + f'[[ $1 != requeue ]] || touch "{shared}/end"\n')
    living = job | {"HOSTS": "node08 node09", "SLURMD_NODENAME": "node08"}
    subprocess.run(["bash", "-c", f"{listen}done", shared, "node07"], env=living, cwd=folder, timeout=60, check=True)
    last = [call for call in calls(job) if call[0] == "scancel" or call[:2] == ["scontrol", "requeue"]]
    assert last == [[*asked.split(), "4711"]]


@pytest.mark.parametrize("kill_wait, warned", [(30, True), (600, False), ("", False)])
def test_who_is_killed_before_it_can_save_is_told(job, kill_wait, warned):
    """By scancel, after Slurm's KillWait; what a save takes follows from the plan."""
    tool = Path(job["FOLDER"], "bin", "scontrol")
    tool.write_text(tool.read_text().replace("= 30 sec", f"= {kill_wait} sec"))
    process = start(job, script())
    process.communicate(timeout=60)
    done = subprocess.run(["bash", "job.sbatch"], cwd=job["FOLDER"], env=job, capture_output=True, text=True)
    assert ("'scancel --batch --signal=USR2 4711' saves and ends" in done.stdout) == warned


@pytest.mark.parametrize("typed, seconds", [("1", 60), ("6:00", 360), ("0:04:59", 299), ("0-0:04", 240)])
def test_a_time_too_short_for_start_and_end_is_refused(typed, seconds):
    """As Slurm reads it: 6:00 are minutes. USR1 would come before the first step, again and again."""
    small = ["+experiment=cluster_check", "job.nodes=2", "job.workers=1", "checkpoint.url=/data/a"]
    if seconds >= 300:
        assert options(render_slurm_job([*small, f"job.time={typed}"]))["time"] == typed
        return
    with pytest.raises(ConfigError, match="start take 300 s; nearest legal: 0:05:00"):
        render_slurm_job([*small, f"job.time={typed}"])


def test_a_script_that_is_written_says_how_it_is_submitted(tmp_path, capsys):
    small = ["+experiment=cluster_check", "job.nodes=2", "job.workers=1", "checkpoint.url=/data/a"]
    assert main(["slurm", *small, "--output", str(tmp_path / "my job.sbatch")]) == 0
    [line] = capsys.readouterr().out.splitlines()
    file = tmp_path / "my job.sbatch"
    assert line == f"wrote {file}: 2 nodes of 1 CPU worker; submit it: sbatch '{file}'"
