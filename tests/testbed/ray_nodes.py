"""A private Ray over the nodes of `links`, and runs in it as a user starts them, on node 0."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from platform.monitor import JsonLines, MetricsLog
from tests.testbed.links import Links

ROOT = Path(__file__).parents[2]
PORT = 6379
PATIENCE = 300  # seconds, for what takes ten on an idle machine
STORE_BYTES = 80 << 20  # of Ray's object store on each node; no tensor goes through it
QUICK = {  # a lost node is known as such within seconds, not half a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


class RayNodes:
    """Context of Ray on all nodes of `links`, `cpus` workers each; node 0 is its head. Every process there has the same
    token, and finds this checkout.

    A node has a home and a folder for temporary files of its own (`own_homes`; else all have one home), at the same
    path on all nodes; `shared` is a folder that all of them see alike. `labels`: of each node, for Ray.
    """

    def __init__(self, links: Links, cpus: int = 2, labels: Sequence[Mapping[str, str]] = (), own_homes: bool = False):
        self.links, self._cpus, self._labels, self._own_homes = links, cpus, labels, own_homes
        self._ray: dict[int, subprocess.Popen[Any]] = {}
        self._token = secrets.token_hex(32)

    def __enter__(self) -> RayNodes:
        self._folder = Path(tempfile.mkdtemp(prefix="tb", dir="/tmp"))  # a short name: Ray's sockets are in it
        self.shared = self._folder / "shared"
        self.shared.mkdir()
        try:
            self.join(*range(self.links.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.links.crash(*self._ray)
        shutil.rmtree(self._folder)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process on the nodes."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_", "NCCL_", "XDG_"))}
        return inherited | QUICK | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_ADDRESS": f"{self.links.address(0)}:{PORT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_niceness": "0",  # by default 15: on a busy machine such a worker would be found hung
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60",
            "HOME": str(self._folder / "home"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def home(self, node: int) -> Path:
        """Return where this machine sees the home of a node."""
        return self._folder / (f"home{node}" if self._own_homes else "home0")

    def join(self, *nodes: int) -> None:
        """Start Ray on nodes; the head's comes first. Returns when all of it is there."""
        for node in sorted(nodes):
            self._mount(
                node, {self._folder / "home": self.home(node), self._folder / "ray": self._folder / f"ray{node}"}
            )
            self._ray[node] = self._start_ray(node)
            if node == 0:
                self.until_there(1)
        self.until_there(len(self._ray))

    def lose(self, node: int) -> None:
        """Lose a node, with everything that runs there."""
        del self._ray[node]
        self.links.crash(node)

    def come_back(self, node: int) -> None:
        """Start a node that was lost anew, with Ray."""
        self.links.boot(node)
        self.join(node)

    def tell_to_go(self, node: int) -> None:
        """Send a node's Ray, and what would start it again, the SIGTERM that Slurm and Kubernetes send: it is
        drained."""
        self.links.run(node, ["pkill", "-TERM", "-f", "ray.scripts.scripts start"], check=True)

    def launch(self, name: str, *arguments: str, node: int = 0) -> Launched:
        """Start `python -m platform.launch` on a node with these arguments, in the run directory `shared/NAME`."""
        run_dir = self.shared / name
        command = [sys.executable, "-m", "platform.launch", *arguments, f"run.dir={run_dir}"]
        log = run_dir.with_suffix(".log")
        with log.open("ab") as file:
            how = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "cwd": ROOT, "env": self.environment}
            return Launched(self.links, self.links.start(node, command, **how), run_dir, log)

    def _mount(self, node: int, folders: Mapping[Path, Path]) -> None:
        """Let a node see its own folder at each path, and shared memory of its own."""
        for place, own in folders.items():
            place.mkdir(exist_ok=True)
            own.mkdir(exist_ok=True)
            self.links.run(node, ["mount", "--bind", str(own), str(place)], check=True)
        self.links.run(node, ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)

    def _start_ray(self, node: int) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={self._cpus}"]
        command += [f"--node-ip-address={self.links.address(node)}", f"--object-store-memory={STORE_BYTES}"]
        if node == 0:
            command += ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder / 'ray'}"]
        else:
            command += [f"--address={self.links.address(0)}:{PORT}"]
        if self._labels:
            command += ["--labels", ",".join(f"{key}={value}" for key, value in self._labels[node].items())]
        if node:  # as in the Slurm job: who was cut off for long ends its Ray, and something starts it again
            command = ["bash", "-c", 'until "$@"; do sleep 1; done', "-", *command]
        with (self._folder / f"ray-{node}.log").open("ab") as log:
            return self.links.start(
                node, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, cwd=self._folder
            )

    def until_there(self, count: int) -> None:
        """Wait until Ray knows so many nodes as alive."""
        command = [sys.executable, "-c", ALIVE, self.environment["RAY_ADDRESS"], str(count), str(PATIENCE)]
        done = self.links.run(0, command, env=self.environment)
        if done.returncode:
            logs = "\n".join(path.read_text()[-2000:] for path in self._folder.glob("ray-*.log"))
            raise RuntimeError(f"{done.stderr[-2000:]}\n{logs}")


ALIVE = """
import sys, time
from ray._raylet import GcsClient
address, count, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + patience
while True:
    try:
        if sum(node.state == 0 for node in GcsClient(address=address).get_all_node_info().values()) == count:
            break
    except Exception:
        if time.monotonic() > deadline:
            raise
    assert time.monotonic() < deadline, "Ray's nodes are not there"
    time.sleep(0.2)
"""


class Launched:
    """A run that was started on node 0, and the records that it writes."""

    def __init__(self, links: Links, process: subprocess.Popen[Any], run_dir: Path, log: Path):
        self._links, self.process, self.run_dir, self.log = links, process, run_dir, log

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        return MetricsLog.read_rows(path) if path.exists() else []

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of journal.jsonl so far."""
        path = self.run_dir / "journal.jsonl"
        return JsonLines.read_objects(path) if path.exists() else []

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        return [event for event in self.events if event["event"] == kind]

    def until(self, what: Callable[[], Any], patience: float = PATIENCE) -> Any:
        """Wait for something of this run to be true, and return it. Raises AssertionError with the end of what the run
        has said if it ends before, or is not in time."""
        deadline = time.monotonic() + patience
        while not (reached := what()):
            ended = self.process.poll()
            if reached := what():
                break
            assert ended is None and time.monotonic() < deadline, f"status {ended}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.1)
        return reached

    def ended(self, patience: float = PATIENCE) -> int:
        """Wait for the end of the run, and return its status."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done\n{self.log.read_text()[-4000:]}") from None

    def signal(self, number: int) -> None:
        """Send a signal to the driver."""
        self._links.signal(self.process, number)
