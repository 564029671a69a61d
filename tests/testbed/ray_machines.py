"""Machines of a real Ray cluster on loopback addresses of this one, each with what starts its Ray again, and faults."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.harness.process_tree import gone, parents
from tests.testbed.ray_nodes import ALIVE, STORE_BYTES

RECONNECT_SECONDS = 20  # after which Ray ends its processes without its control store
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default 15: on a busy machine such a worker would be found hung
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_SECONDS),
    "RAY_memory_monitor_refresh_ms": "0",
    "OMP_NUM_THREADS": "1",
}


def until(what: Callable[[], Any], patience: float, name: str) -> Any:
    """Wait until something is true, and return it. Raises AssertionError with `name` after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (value := what()):
        assert time.monotonic() < deadline, name() if callable(name) else name
        time.sleep(0.1)
    return value


class RayMachines:
    """Context of a head without places and `count` machines with one each. A machine is a shell that starts Ray again
    when that has ended, as both kinds of job do."""

    def __init__(self, count: int, seed: int):
        self._folder = Path(tempfile.mkdtemp(prefix="rm", dir="/tmp"))  # a short name: Ray's sockets are in it
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        self._network = f"127.{50 + seed % 150}.{os.getpid() % 250}"
        self.address = f"{self._network}.1:{port}"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_", "XDG_"))},
            **ENVIRONMENT,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "STEP_SECONDS": "0.1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": self.address,
        }
        self._count, self._machines, self._next = count, dict[int, subprocess.Popen[Any]](), 1

    def __enter__(self) -> RayMachines:
        try:
            for _ in range(self._count + 1):
                self.add()
                self.until_there(len(self._machines))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._machines):
            self.lose(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def numbers(self) -> list[int]:
        """The machines that are there, without the head."""
        return [number for number in self._machines if number != 1]

    def add(self, number: int = 0) -> int:
        """Start a machine, the head (1) first; return its number."""
        number = number or self._next
        self._next = max(self._next, number + 1)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={int(number > 1)}"]
        command += [f"--node-ip-address={self._network}.{number}", f"--object-store-memory={STORE_BYTES}"]
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder}/ray"]
        command += head if number == 1 else [f"--address={self.address}"]
        shell = ["bash", "-c", 'while true; do "$@"; sleep 1; done', "-", *command]
        with (self._folder / f"{number}.log").open("ab") as log:
            self._machines[number] = subprocess.Popen(
                shell, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, cwd=self._folder,
                start_new_session=True,
            )  # fmt: skip
        return number

    def processes(self, number: int, word: str = "") -> list[int]:
        """The processes of a machine whose command has `word`."""
        session = self._machines[number].pid
        return [pid for pid in parents() if _session(pid) == session and word.encode() in _command(pid)]

    def signal(self, number: int, which: int, word: str = "") -> int:
        """Send a signal to the processes of a machine whose command has `word`; return how many there were."""
        pids = self.processes(number, word)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, which)
        return len(pids)

    def lose(self, number: int) -> None:
        """Lose a machine, with everything that runs there."""
        pids = self.processes(number)
        self.signal(number, signal.SIGSTOP)  # nothing there reacts to the end of anything else
        pids += [pid for pid in self.processes(number) if pid not in pids]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._machines.pop(number).wait()
        assert gone(pids)

    def drain(self, number: int) -> None:
        """Tell a machine to go, by the SIGTERM that Slurm and Kubernetes send, and lose it when its Ray has ended."""
        os.kill(self._machines[number].pid, signal.SIGSTOP)  # the shell starts no other
        self.signal(number, signal.SIGTERM, "scripts start --block")

    @contextmanager
    def stopped(self, number: int, word: str, seconds: float) -> Iterator[None]:
        """Stop processes of a machine, leave them so for `seconds` after the block, and let them go on."""
        self.signal(number, signal.SIGSTOP, word)
        try:
            yield
            time.sleep(seconds)
        finally:
            if number in self._machines:
                self.signal(number, signal.SIGCONT, word)

    def until_there(self, count: int) -> None:
        """Wait until Ray knows so many machines as alive."""
        command = [sys.executable, "-c", ALIVE, self.address, str(count), "300"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, cwd=self._folder)
        assert not done.returncode, done.stderr[-2000:]

    def all_free(self) -> bool:
        """Whether no run holds anything of the cluster."""
        code = "import ray; ray.init(logging_level='error'); print(ray.available_resources().get('CPU'), "
        code += "ray.cluster_resources().get('CPU'))"
        done = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True)
        free, known = (done.stdout.split() or ["nothing", done.stderr[-500:]])[-2:]
        print(f"free: {free} of {known}", flush=True)
        return free == known


def _session(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


class Chaos:
    """Strikes a cluster and the run in it, at random by `seed`; `struck`: what has been done."""

    def __init__(self, machines: RayMachines, workers: Callable[[], list[int]], seed: int):
        self._machines, self._workers, self._chance = machines, workers, random.Random(seed)
        self.struck: list[str] = []
        self._most = len(machines.numbers)
        self._kinds = [
            self.kill_worker, self.stop_worker, self.lose_machine, self.stop_machine, self.kill_raylet,
            self.stop_raylet, self.drain_machine, self.stop_store, self.stop_store_and_kill_worker, self.lose_head,
            self.kill_store,
        ]  # fmt: skip

    def strike(self) -> str:
        """Do one thing, each kind once before any comes again; return its name."""
        round_, place = divmod(len(self.struck), len(self._kinds))
        if not place:
            self._chance.shuffle(self._kinds)
        kind = self._kinds[place]
        self.struck.append(kind.__name__)
        kind()
        return kind.__name__

    def _machine(self) -> int:
        return self._chance.choice(self._machines.numbers)

    def _signal_worker(self, which: int) -> int:
        pid = self._chance.choice(self._workers() or [0])
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, which)
        return pid

    def kill_worker(self) -> None:
        self._signal_worker(signal.SIGKILL)

    def stop_worker(self) -> None:
        pid = self._signal_worker(signal.SIGSTOP)
        time.sleep(self._chance.uniform(1, 12))
        with suppress(ProcessLookupError):
            os.kill(pid or 2**22 + 1, signal.SIGCONT)

    def lose_machine(self) -> None:
        self._machines.lose(self._machine())
        time.sleep(self._chance.uniform(0, 8))
        self._machines.add()

    def stop_machine(self) -> None:
        with self._machines.stopped(self._machine(), "", self._chance.uniform(2, 25)):
            pass

    def kill_raylet(self) -> None:
        self._machines.signal(self._machine(), signal.SIGKILL, "/raylet/raylet ")

    def stop_raylet(self) -> None:
        with self._machines.stopped(self._machine(), "/raylet/raylet ", self._chance.uniform(1, 10)):
            pass

    def drain_machine(self) -> None:
        number = self._machine()
        self._machines.add()
        self._machines.drain(number)
        time.sleep(self._chance.uniform(1, 15))
        self._machines.lose(number)

    def stop_store(self) -> None:
        with self._machines.stopped(1, "/gcs/gcs_server", self._chance.uniform(1, 9)):
            pass

    def stop_store_and_kill_worker(self) -> None:
        with self._machines.stopped(1, "/gcs/gcs_server", self._chance.uniform(1, 5)):
            self.kill_worker()

    def kill_store(self) -> None:
        self._machines.signal(1, signal.SIGKILL, "/gcs/gcs_server")

    def lose_head(self) -> None:
        self._machines.lose(1)
        time.sleep(self._chance.uniform(0, 2 * RECONNECT_SECONDS))
        self._machines.add(1)
