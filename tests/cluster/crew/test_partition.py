"""Two Ray nodes in two network namespaces, cut apart for so long that Ray gives one of them up, and joined again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = ("ip", "bash")
SECONDS = 240  # for what takes ten on an idle machine
LINK = "pn0", "pn1"
SPACE = "platform-partition"
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=2", "--block"]


def can_make_namespaces():
    if os.geteuid() or not all(map(shutil.which, NEEDED)):
        return False
    added = subprocess.run(["ip", "netns", "add", SPACE], capture_output=True)
    return not subprocess.run(["ip", "netns", "del", SPACE], capture_output=True).returncode and not added.returncode


pytestmark = [
    pytest.mark.ray,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and iproute2, to make network namespaces"),
]


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_networks():
    """10.78.0.1 here, 10.78.0.2 in a namespace of its own."""
    ip("netns", "add", SPACE)
    try:
        ip("link", "add", LINK[0], "type", "veth", "peer", "name", LINK[1], "netns", SPACE)
        ip("addr", "add", "10.78.0.1/24", "dev", LINK[0])
        ip("link", "set", LINK[0], "up")
        for words in (f"addr add 10.78.0.2/24 dev {LINK[1]}", f"link set {LINK[1]} up", "link set lo up"):
            ip("-n", SPACE, *words.split())
        yield
    finally:
        ip("netns", "del", SPACE)


@contextmanager
def process(command, log, **environment):
    """In a group of its own, which ends with the block."""
    with open(log, "wb") as out:
        started = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True, cwd=ROOT
        )
    try:
        yield started
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(started.pid, number)
            with suppress(subprocess.TimeoutExpired):
                started.wait(10)


def until(what, log):
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.5)


def test_after_a_healed_partition_the_mesh_grows_back(tmp_path, monkeypatch):
    """As in the Slurm job the node's Ray is started again when it fails, and that is all it takes."""
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "4",
        "PYTHONPATH": str(ROOT),
    }.items():
        monkeypatch.setenv(name, value)
    run, log = tmp_path / "run", tmp_path / "train.log"
    sizes = (
        "model.layers=1 model.d_model=32 model.length=16 model.vocab=300 eval.every=0 monitor.sample=0 data=synthetic"
    )
    batch = "tensor=serial parallel.data=4 train.global_batch=8 train.microbatch=2 train.steps=1000000"
    others = f"cluster=ray cluster.device=cpu cluster.wait=200 elastic.hang_seconds=6 run.dir={run}"
    train = [sys.executable, "-m", "platform.launch", "+experiment=gpt_quick", *f"{sizes} {batch} {others}".split()]
    short = Path("/tmp") / f"pn{os.getpid()}"  # sockets have short names

    def world():
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        return json.loads(lines[-1])["world_size"] if lines else 0

    with ExitStack() as opened:
        opened.callback(shutil.rmtree, short, ignore_errors=True)
        opened.enter_context(two_networks())
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", LINK[0])
        head = [*RAY, "--head", "--node-ip-address=10.78.0.1", "--port=6397", f"--temp-dir={short}"]
        opened.enter_context(process([*head, "--include-dashboard=false"], tmp_path / "head.log"))
        again = ["ip", "netns", "exec", SPACE, "bash", "-c", 'until "$@"; do sleep 1; done', "-"]
        node = [*again, *RAY, "--address=10.78.0.1:6397", "--node-ip-address=10.78.0.2"]
        opened.enter_context(process(node, tmp_path / "node.log", GLOO_SOCKET_IFNAME=LINK[1]))
        training = opened.enter_context(process(train, log, RAY_ADDRESS="10.78.0.1:6397"))
        until(lambda: world() == 4, log)
        ip("link", "set", LINK[0], "down")
        until(lambda: world() == 2, log)
        time.sleep(20)  # until Ray has given the node up
        ip("link", "set", LINK[0], "up")
        until(lambda: world() == 4, log)
        assert training.poll() is None
