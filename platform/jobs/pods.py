"""Pod of an Indexed Job: `python -m platform.jobs pod`, which every index of the job runs on a node of its own.

The first pod has the supervisor of the run. For each driver it waits until all pods are there, announces a life of the
run on the `PodBoard`, and all start torchrun for it (`TorchNode`), whose output is kept in the run directory. A pod
that was lost comes back as the Job starts it again, under the same index; the driver, which has gone on without it,
saves then and makes way for a life with all. So every pod stays until the run is over, and ends with the run's own exit
status: what ends with 0 before, a Job never starts again."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import IO, Annotated, TypeVar

from platform.boundary import documents, schema
from platform.boundary.interrupts import ENDING
from platform.boundary.local_files import replace_text
from platform.boundary.schema import Malformed, Span
from platform.boundary.terminal import print_line
from platform.cluster import run_directory
from platform.cluster.crew import leftovers
from platform.jobs.job_state import NodeLog
from platform.jobs.rank import PID, STATUS
from platform.jobs.ray_node import find_free_port, is_listening
from platform.jobs.supervisor import END_JOB, TERMINATED, DriverSupervisor, SupervisorOptions, read_or_default
from platform.launch import FAILED, STOPPED

# Board on which the pods of a job report to each other: small files in a folder that all of them see.
#
# The first pod announces lives of the run, one per driver, and that the run is over; every other pod writes heartbeats.
# All clocks are a reader's own: a pod is there while its heartbeat changes.

_LIFE, _END = "life.json", "end.json"
_PORTS = (1 << 16) - 1
_SILENCE = 60.0  # seconds without a new word after which a pod counts as gone; shared storage may be slow to tell
_Said = TypeVar("_Said")
_Count = Annotated[int, Span(0, 1 << 53)]
_Status = dict[str, Annotated[int, Span(0, 255)]]  # of the run, as its only value, in the file that ends a job


@dataclass(frozen=True)
class TorchrunLife:
    """Life of the run: one driver, with one torchrun on every pod. `number`: counts from 1 over all first pods of the
    job; `port`: port of torchrun's store on the first pod; `members`: the tokens of the pods that take part, by
    index."""

    number: _Count
    port: Annotated[int, Span(1, _PORTS)]
    members: list[str]


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of a pod. `token`: random id, drawn when its process began; `beat`: number of heartbeats so far;
    `life`: the number of the last life that it joined, 0 for none; `runs`: its torchrun of that life runs; `leaving`:
    it has a stop signal."""

    token: str
    beat: _Count = 0
    life: _Count = 0
    runs: bool = False
    leaving: bool = False


class PodBoard:
    """Reads and writes the files of a job's board; a file that is missing or broken reads as None."""

    def __init__(self, folder: Path):
        """Open the board, a folder of files by which a job's pods speak to each other, no heartbeat read yet."""
        self._folder = folder
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # the newest word of each pod, and when it was new

    def announce_life(self, life: TorchrunLife) -> None:
        """Write a life of the run (a driver with torchrun on all pods) to the board, for the other pods to join."""
        self._write_file(_LIFE, life)

    def read_life(self) -> TorchrunLife | None:
        """Return the newest life of the run (a driver with torchrun on all pods) on the board; None before any."""
        return self._read_file(TorchrunLife, _LIFE)

    def announce_end(self, status: int) -> None:
        """Write to the board that the job is over, with this exit status, as its first pod."""
        self._write_file(_END, {"status": status})

    def read_end_status(self) -> int | None:
        """Return the exit status with which the job is over by the board, None while it is not."""
        return (self._read_file(_Status, _END) or {}).get("status")

    def write_heartbeat(self, index: int, heartbeat: Heartbeat) -> None:
        """Write a heartbeat, `heartbeat`, of the job's pod number `index` to the board."""
        self._write_file(f"pod-{index}.json", heartbeat)

    def read_heartbeat(self, index: int) -> Heartbeat | None:
        """Return the newest heartbeat of the job's pod number `index`; None if the pod counts as gone, as it has
        written no heartbeat, or none that is new for _SILENCE seconds. A heartbeat from before the first look may be a
        dead pod's."""
        heartbeat, now = self._read_file(Heartbeat, f"pod-{index}.json"), time.monotonic()
        last_heartbeat, since = self._heard.get(index, (heartbeat, -_SILENCE))
        if heartbeat is None:
            return last_heartbeat if last_heartbeat and now < since + _SILENCE else None
        if heartbeat != last_heartbeat:
            since = now
        self._heard[index] = heartbeat, since
        return heartbeat if now < since + _SILENCE else None

    def _write_file(self, name: str, content: object) -> None:
        """Write a file of the pods' board in one step, for this user alone."""
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        replace_text(self._folder / name, json.dumps(content, default=schema.encode_fields), 0o600)

    def _read_file(self, kind: type[_Said], name: str) -> _Said | None:
        """Read a file of the pods' board as a `kind`, None if it is missing or broken."""
        try:
            return schema.parse_value(kind, documents.read_json_file(self._folder / name))
        except (OSError, Malformed):
            return None


@dataclass(frozen=True)
class PodOptions:
    """Options of a pod. `shared`: folder of the job's board; `index`: number of this pod, one of `pods` with `workers`
    each; `first`: host name of the first pod; `address`: address of this pod; `drain`: seconds that its workers are
    given to end."""

    shared: Path
    index: int
    pods: int
    workers: int
    first: str
    address: str
    drain: int = 60


def build_torch_command(
    o: PodOptions, address: str, port: int, life: int, folder: str, launch: Sequence[str]
) -> list[str]:
    """Return the command of torchrun on one pod, for a start (life) of it whose store is at `address` and `port`. It
    never starts a worker again by itself (--max-restarts): the driver goes on without it, and the next life has it
    back. Every line of a worker gets its rank and node before it; the lines of rank 0 are the run's own."""
    shown = [f"{local}:3" for local in range(o.workers) if o.index or local]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={o.pods}", f"--node-rank={o.index}", f"--nproc-per-node={o.workers}"),
        *("--rdzv-backend=static", f"--rdzv-id={life}", f"--master-addr={address}", f"--master-port={port}"),
        *("--max-restarts=0", f"--shutdown-timeout={o.drain}", f"--log-dir={folder}/torchrun"),
        *([f"--tee={','.join(shown)}"] if shown else []),
        *("-m", "platform.jobs.rank", folder, *launch),
    ]


class TorchNode(leftovers.MarkedPrograms):
    """torchrun on this node, at most one at a time; a context that ends its processes and removes its files."""

    def __init__(self, options: PodOptions, run_dir: Path):
        """Prepare to run torchrun on this pod; nothing is started before the context is entered."""
        super().__init__()
        self._options, self._log = options, NodeLog(run_dir)
        self._reader: threading.Thread | None = None

    def start_torchrun(self, address: str, port: int, life: int, launch: Sequence[str]) -> None:
        """Start torchrun on this pod for a new life of the run, as `build_torch_command` says."""
        self.end()
        for name in (PID, STATUS):
            Path(self.directory, name).unlink(missing_ok=True)
        prefix = f"[rank${{rank}} {gethostname()}] "
        environment = {**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": prefix, "PYTHONUNBUFFERED": "1"}
        command = build_torch_command(self._options, address, port, life, self.directory, launch)
        torchrun = self.start_main_program(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert torchrun.stdout
        self._reader = threading.Thread(target=self._copy_output, args=(torchrun.stdout,), daemon=True)
        self._reader.start()

    def _copy_output(self, output: IO[bytes]) -> None:
        """Print what torchrun and its workers print on this pod, and copy it to the run directory."""
        with output:
            for line in output:
                with suppress(OSError):  # nobody listens
                    os.write(1, line)
                self._log.append_text(line)

    def read_number(self, name: str) -> int | None:
        """Return the number that the driver on this pod has left in its file PID or STATUS, None before it has."""
        with suppress(OSError, ValueError):
            return int(Path(self.directory, name).read_text())
        return None

    def end(self) -> None:
        """End torchrun on this pod at once, with all that it has started, and read the rest of its output."""
        super().end()
        if self._reader:
            self._reader.join(1.0)
            self._reader = None


_LOOK_SECONDS = 0.5
_BEAT_SECONDS = 2.0  # between two words of a pod
_LINGER_SECONDS = 15.0  # for torchrun to end once its driver has
_REPORT_SECONDS = 60.0  # between two lines on what is waited for


def run_pod(o: PodOptions, supervision: SupervisorOptions) -> int:
    """Run one pod of a job to its end; return its exit status, the run's own, or 143 after a stop signal."""
    return _run_first_pod(o, supervision) if o.index == 0 else _run_other_pod(o, supervision)


class _TorchrunLives:
    """Lives of a run, as led by its first pod: the pods of each, and those missing or back meanwhile."""

    def __init__(self, o: PodOptions, board: PodBoard):
        """Continue to count a run's lives (starts of torchrun on all pods) from the newest one on the `board`."""
        self._o, self._board = o, board
        self._others = range(1, o.pods)
        self._token = secrets.token_hex(8)
        self._number = (board.read_life() or TorchrunLife(0, 1, [])).number
        self.now: TorchrunLife | None = None  # the life that runs

    def find_missing_pods(self) -> list[int]:
        """Return the indices of the job's pods that could not join torchrun if it were started anew now."""
        heartbeats = {index: self._board.read_heartbeat(index) for index in self._others}
        return [i for i, beat in heartbeats.items() if beat is None or beat.leaving or beat.runs]

    def begin_life(self) -> TorchrunLife:
        """Announce a new life of the run (torchrun started on all pods anew), with the pods that are there."""
        heartbeats = [self._board.read_heartbeat(index) for index in self._others]
        members = [self._token, *(heartbeat.token if heartbeat else "" for heartbeat in heartbeats)]
        self.now = life = self._announce_life(find_free_port(self._o.address), members)
        return life

    def announce_end_of_life(self) -> None:
        """Announce that torchrun's present life is over, by one without members, so that other pods end it."""
        self.now = None
        self._announce_life(1, [])

    def _announce_life(self, port: int, members: list[str]) -> TorchrunLife:
        """Announce the run's next life (start of torchrun), with its store's port and its pods, and return it."""
        self._number += 1
        life = TorchrunLife(self._number, port, members)
        self._board.announce_life(life)
        return life

    def find_restart_reason(self) -> str:
        """Return in words why torchrun should be started anew on all pods, "" if it should not: a pod of the job is
        leaving, or a lost one has come back and takes no part in the present life."""
        for index in self._others if self.now else ():
            heartbeat = self._board.read_heartbeat(index)
            if heartbeat and heartbeat.leaving:
                return f"pod {index} is told to go"
            life = self.now
            if heartbeat and life and (heartbeat.token != life.members[index] or self._has_left(heartbeat, life)):
                return f"pod {index} is there again"
        return ""

    @staticmethod
    def _has_left(heartbeat: Heartbeat, life: TorchrunLife) -> bool:
        """Return True if the pod of this heartbeat joined the `life` and has ended its torchrun since."""
        return heartbeat.life == life.number and not heartbeat.runs


class _TorchrunDriver:
    """Driver of a run as the supervisor sees it: waits for all pods, then runs torchrun on the first one, whose rank 0
    is the driver."""

    def __init__(self, node: TorchNode, lives: _TorchrunLives, o: PodOptions, run_dir: Path, launch: Sequence[str]):
        """Prepare the driver that torchrun on all pods, by arguments `launch`, will have as its rank 0."""
        self._node, self._lives, self._o, self._run_dir, self._launch = node, lives, o, run_dir, launch
        self._signal = 0  # to be sent to the driver
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status of the driver that torchrun has started, None while it runs."""
        return self._status

    def send_signal(self, number: int) -> None:
        """Set the signal to send to the driver once torchrun has started it; a start-up before that ends."""
        self._signal = number

    def wait(self) -> int:
        """Run torchrun on all pods until its driver has ended; return the driver's status. One that gave up as workers
        had died counts as stopped: the next start of torchrun has their pods again."""
        if self._wait_for_pods():
            life = self._lives.begin_life()
            self._node.start_torchrun(self._o.address, life.port, life.number, self._launch)
            self._attend_driver()
        status, begun = self._node.read_number(STATUS), self._node.read_number(PID) is not None
        self._node.end()
        self._lives.announce_end_of_life()
        if status is None:
            status = -signal.SIGKILL if begun else STOPPED
        if status == FAILED and read_or_default(run_directory.gave_up_on_dead_worker, self._run_dir, False):
            status = STOPPED
        self._status = status
        return status

    def _wait_for_pods(self) -> bool:
        """Wait until all of the job's pods are there; return False if the job was signalled to stop meanwhile."""
        due = time.monotonic() + _BEAT_SECONDS
        while missing := self._lives.find_missing_pods():
            if self._signal:
                return False
            if time.monotonic() > due:
                print_line(f"pod 0 on {gethostname()}: waiting for {_describe_pods(missing)}, of {self._o.pods} pods")
                due = time.monotonic() + _REPORT_SECONDS
            time.sleep(_LOOK_SECONDS)
        return not self._signal

    def _attend_driver(self) -> None:
        """Wait until torchrun and the driver in it have ended, and pass signals on to the driver."""
        until = None
        while self._node.is_running and (until is None or time.monotonic() < until):
            process = self._node.read_number(PID)
            if self._signal and self._node.read_number(STATUS) is None:
                if process is None:
                    return  # nothing is done yet
                with suppress(ProcessLookupError):
                    os.kill(process, self._signal)
                self._signal = 0
            if until is None and self._node.read_number(STATUS) is not None:
                until = time.monotonic() + _LINGER_SECONDS
            time.sleep(_LOOK_SECONDS / 5)


def _describe_pods(indices: Sequence[int]) -> str:
    """Return the pods with these indices in words: at most 8 by number, then how many more."""
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"pod{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices[:8]))}{more}"


def _run_first_pod(o: PodOptions, supervision: SupervisorOptions) -> int:
    """Run the supervisor of a run and torchrun in the job's first pod; announce the end, unless the pod restarts."""
    board = PodBoard(o.shared)
    if (status := board.read_end_status()) is not None:  # this pod was lost when all was done
        return status
    lives, over = _TorchrunLives(o, board), threading.Event()
    with TorchNode(o, supervision.run_dir) as node:

        def start_driver(launch: Sequence[str], environment: Mapping[str, str]) -> _TorchrunDriver:
            """Prepare a driver that torchrun on all pods starts, for the supervisor, which waits for its end."""
            return _TorchrunDriver(node, lives, o, supervision.run_dir, launch)

        supervisor = DriverSupervisor(supervision, start=start_driver)
        watch = threading.Thread(target=_watch_lives, args=(lives, supervisor, over), daemon=True)
        watch.start()
        try:
            status = supervisor.run()
        finally:
            over.set()
            watch.join()
    if status != TERMINATED:
        board.announce_end(status)
    return status


def _watch_lives(lives: _TorchrunLives, supervisor: DriverSupervisor, over: threading.Event) -> None:
    """Replace the driver when a new start of torchrun would get pods back, or a pod is leaving."""
    reported: TorchrunLife | None = None
    while not over.wait(_LOOK_SECONDS):
        life = lives.now
        if life and life is not reported and (why := lives.find_restart_reason()):
            reported = life
            print_line(f"pod 0 on {gethostname()}: {why}: the run saves, and goes on with all pods")
            supervisor.stop_driver_for_restart()


def _run_other_pod(o: PodOptions, supervision: SupervisorOptions) -> int:
    """Run torchrun in another pod than the first, at each start that has this pod, until the run or the pod ends."""
    board, going, last_beat = PodBoard(o.shared), threading.Event(), 0.0
    heartbeat = Heartbeat(secrets.token_hex(8))
    for number in ENDING:
        signal.signal(number, (lambda *_: going.set()) if number in END_JOB else signal.SIG_IGN)
    with TorchNode(o, supervision.run_dir) as node:
        while (status := board.read_end_status()) is None:
            life = board.read_life()
            if life and node.is_running and life.number > heartbeat.life:
                node.end()  # that life is over, or its first pod was lost
            elif life and life.number > heartbeat.life and o.index < len(life.members) and not going.is_set():
                # until its store answers, the first pod's name may be that of a lost one
                if life.members[o.index] == heartbeat.token and is_listening(o.first, life.port):
                    node.start_torchrun(o.first, life.port, life.number, supervision.launch)
                    heartbeat = replace(heartbeat, life=life.number)
            new = replace(heartbeat, runs=node.is_running, leaving=going.is_set())
            if new != heartbeat or time.monotonic() > last_beat + _BEAT_SECONDS:
                heartbeat, last_beat = replace(new, beat=heartbeat.beat + 1), time.monotonic()
                with suppress(OSError):  # of shared storage: the next word tries again
                    board.write_heartbeat(o.index, heartbeat)
            if heartbeat.leaving and not heartbeat.runs:
                return TERMINATED
            time.sleep(_LOOK_SECONDS)
    return status
