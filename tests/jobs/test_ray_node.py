"""Ray on a node of a job, with a stand-in for `ray start`: what it is told, where its files are, how it ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster.crew import leftovers
from platform.jobs import ray_node
from platform.jobs.ray_node import (
    HEAD,
    NodeOptions,
    RayNode,
    build_drain_command,
    build_ray_command,
    build_ray_environment,
    run_head,
)
from platform.jobs.supervisor import SupervisorOptions
from tests.harness.process_tree import gone, parents

ROOT = Path(__file__).parents[2]

# Stands in for `ray start --block`: listens as a head, or runs beside one, with a child of its own.
RAY = """
import json, os, socket, subprocess, sys, time
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([options, os.environ.get("NCCL_SOCKET_IFNAME"), os.getpid()]), file=file)
if os.environ.get("FAILS"):
    sys.exit("no head today")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"--node_id={os.getpid():08x}"])
if "head" in options:
    listener = socket.create_server((options["node-ip-address"], int(options["port"])))
time.sleep(600)
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Options of a node on loopback, whose `ray start` is the stand-in; its calls are in `calls`."""
    (tmp_path / "ray.py").write_text(RAY)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    known = ray_node.build_ray_command
    monkeypatch.setattr(
        ray_node, "build_ray_command", lambda *a: [sys.executable, str(tmp_path / "ray.py"), *known(*a)[3:]]
    )
    return NodeOptions(tmp_path / "shared", interface="lo")


def calls(tmp_path):
    path = tmp_path / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    options = NodeOptions(Path("shared"))
    follower = build_ray_command("10.0.0.2", options, "/tmp/ray-x", "10.0.0.1:7001", 0, 8)
    assert follower[:5] == [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    assert {"--address=10.0.0.1:7001", "--num-gpus=8", "--num-cpus=16", "--temp-dir=/tmp/ray-x/ray"} <= {*follower}
    assert not any(word.startswith(("--head", "--port")) for word in follower)
    head = build_ray_command("127.0.0.1", options, "/tmp/ray-x", "", 7001, 0)
    assert {"--head", "--port=7001", "--node-ip-address=127.0.0.1"} <= {*head}
    ports = {word.partition("=")[0]: word.partition("=")[2] for word in head if "port=" in word}
    assert {"6379", "10001", "8265"}.isdisjoint(ports.values())  # Ray's usual ones: another job may have them


def test_ray_s_own_command_takes_it(monkeypatch):
    scripts = pytest.importorskip("ray.scripts.scripts")
    for head in ("", "127.0.0.1:7001"):
        command = build_ray_command("127.0.0.1", NodeOptions(Path("shared")), "/tmp/ray-x", head, 7001, 0)
        scripts.cli.commands["start"].make_context("start", command[4:])
    scripts.cli.commands["drain-node"].make_context("drain-node", build_drain_command("127.0.0.1:7001", "ab", 60)[4:])


def test_collectives_use_the_interface_of_the_address_unless_told_otherwise():
    variables = build_ray_environment("127.0.0.1", {"PATH": "/bin"})
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "lo" and variables["PATH"] == "/bin"
    assert build_ray_environment("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"})["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "NCCL_SOCKET_IFNAME" not in build_ray_environment("203.0.113.7", {})


def test_all_of_ray_ends_with_the_node_and_its_files(node, tmp_path):
    with RayNode(node) as ray:
        assert not ray.is_running
        ray.start_ray(port=ray_node.find_free_port("127.0.0.1"))
        deadline = time.monotonic() + 30
        while len(leftovers.find_processes_of_directory(ray.directory)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        processes, directory = leftovers.find_processes_of_directory(ray.directory), Path(ray.directory)
        assert ray.is_running and len(processes) == 2 and directory.stat().st_mode & 0o777 == 0o700
    assert gone(processes) and not directory.exists()


def test_ray_outlives_a_signal_to_every_process(node):
    """As Slurm may send it: without Ray, nothing could be saved."""
    with RayNode(node) as ray:
        ray.start_ray(port=ray_node.find_free_port("127.0.0.1"))
        deadline = time.monotonic() + 30
        while len(leftovers.find_processes_of_directory(ray.directory)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        processes = leftovers.find_processes_of_directory(ray.directory)
        for process in processes:
            os.kill(process, signal.SIGTERM)
        time.sleep(0.2)
        assert leftovers.find_processes_of_directory(ray.directory) == processes and ray.is_running
    assert gone(processes)


def test_a_head_that_never_starts_ends_the_job(node, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(ConfigError, match="Ray's head does not start on this node"):
        run_head(node, SupervisorOptions(["run.dir=run"]))
    tried = calls(tmp_path)
    assert len(tried) == 3 and len({options["port"] for options, *_ in tried}) > 1  # free ones
    assert "no head today" in capfd.readouterr().err and not (node.shared / HEAD).exists()


def test_a_head_that_ends_is_started_again_and_says_where_and_why(node, tmp_path, capfd):
    node = replace(node, run_dir=tmp_path / "run")
    with RayNode(node) as ray:
        head = ray_node._RayHead(ray, node)
        head.start_head()
        first = head.prepare_environment()["RAY_ADDRESS"]
        assert json.loads((node.shared / HEAD).read_text()) == {"address": first, "run_dir": f"{tmp_path}/run"}
        assert calls(tmp_path)[0][1] == "lo"
        assert (node.shared / HEAD).stat().st_mode & 0o777 == 0o600
        os.kill(calls(tmp_path)[0][2], signal.SIGKILL)
        while ray.is_running:
            time.sleep(0.01)
        Path(ray.directory, "ray.out").write_text("raylet died: no space left\n")
        second = head.prepare_environment()["RAY_ADDRESS"]
        assert second != first and json.loads((node.shared / HEAD).read_text())["address"] == second
    host, said = socket.gethostname(), capfd.readouterr()
    assert f"raylet died: no space left\nnode: {host}: Ray's head has ended, as above" in said.err
    assert f"node: {host}: Ray's head is at {first}" in said.out
    assert "raylet died: no space left" in (tmp_path / "run" / "logs" / f"node-{host}.log").read_text()


FOLLOWER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from platform.jobs import ray_node
known = ray_node.build_ray_command
ray_node.build_ray_command = lambda *a: [sys.executable, {ray!r}, *known(*a)[3:]]
ray_node._AGAIN_SECONDS = 0.1
ray_node.build_drain_command = lambda *what: [sys.executable, "-c", {drain!r}, *map(str, what)]
sys.exit(ray_node.run_worker_node(ray_node.NodeOptions(Path({shared!r}), interface="lo")))
"""


# Stands in for `ray drain-node`: Ray ends on the node that it names, here by the number of its process.
DRAIN = """
import json, os, signal, sys
json.dump(sys.argv[1:], open("{told}", "w"))
os.kill(int(sys.argv[2], 16), signal.SIGKILL)
"""


def follower(node, tmp_path):
    drain = DRAIN.format(told=tmp_path / "drained")
    return FOLLOWER.format(root=str(ROOT), ray=str(tmp_path / "ray.py"), shared=str(node.shared), drain=drain)


def test_a_node_joins_the_head_follows_it_to_another_address_and_goes_when_told(node, tmp_path):
    code = follower(node, tmp_path)
    node.shared.mkdir()
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            for number, address in enumerate(("127.0.0.1:7001", "127.0.0.1:7002")):
                (node.shared / HEAD).write_text(json.dumps({"address": address}))
                deadline = time.monotonic() + 60
                while len(calls(tmp_path)) <= number:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.02)
                assert calls(tmp_path)[number][0]["address"] == address
            first, second = (pid for _, _, pid in calls(tmp_path))
            assert gone([first]) and second in parents()
            process.send_signal(signal.SIGUSR1)  # is for the head
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0 and gone([second])
            assert json.loads((tmp_path / "drained").read_text()) == ["127.0.0.1:7002", f"{second:08x}", "60"]
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["a file", "no directory"])
def test_a_node_hears_that_the_job_is_over(node, tmp_path, how):
    """Else Slurm kills it in the end: its Ray's files stay, and its log reads like a failure."""
    code = follower(node, tmp_path)
    node.shared.mkdir()
    (node.shared / HEAD).write_text(json.dumps({"address": "127.0.0.1:7001"}))
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            deadline = time.monotonic() + 60
            while not calls(tmp_path):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            [(options, _, ray)] = calls(tmp_path)
            (node.shared / ray_node.END).touch() if how == "a file" else shutil.rmtree(node.shared)
            assert process.wait(60) == 0 and gone([ray])
            assert not Path(options["temp-dir"]).parent.exists()
        finally:
            process.kill()


def test_what_cleans_up_outlives_a_signal_to_every_process(node):
    """As some schedulers send it."""
    with RayNode(node) as ray:
        mine = lambda: [pid for pid, above in parents().items() if above == os.getpid()]  # noqa: E731
        while not (pids := [pid for pid in mine() if ray.directory in _command(pid)]):
            time.sleep(0.01)  # its command line shows a moment after it has begun
        [cleaner] = pids
        while not int(_status(cleaner).split()[1], 16) >> signal.SIGTERM - 1 & 1:  # it has come so far as to ignore it
            time.sleep(0.01)
        os.kill(cleaner, signal.SIGTERM)
        directory = Path(ray.directory)
    assert not directory.exists()


def _command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def _status(pid):
    return next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
