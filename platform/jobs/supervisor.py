"""Supervisor of a run's driver inside a job: starts `python -m platform.launch`, passes signals on to it, and starts
the same command again where the rule of `retries` says so.

It imports neither torch nor Ray, keeps nothing in memory that is not in the run directory, and is the same on
Kubernetes (the entry point of a RayJob, or the first pod of an Indexed Job) and on Slurm (beside the head of Ray).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, Any, Protocol, TypeVar

from platform.boundary import schema
from platform.boundary.interrupts import ENDING, restore_handlers
from platform.boundary.refusals import ConfigError, refuse_failures
from platform.boundary.schema import Malformed, OpenMap, Span, Text
from platform.boundary.terminal import print_line
from platform.cluster import run_directory
from platform.cluster.crew.leftovers import block_sigterm
from platform.cluster.crew.ray_session import ray_job_config
from platform.cluster.crew.signals import REASON
from platform.cluster.run_directory import lock_or_read_owner
from platform.launch import DONE, FAILED, REFUSED, STOPPED, UNAVAILABLE
from platform.monitor import json_records
from platform.monitor.json_records import JsonLines, Seconds, Steps

# The retry rule of jobs, said once for Kubernetes and Slurm: which end of a driver is followed by another one.
#
# A driver is one process of `python -m platform.launch`. `drivers.jsonl` in the run directory has a line when one
# starts and one when it has ended, written by the supervisor beside it; a start without an end is a driver that was
# lost with its node, and its supervisor too.
#
# | how a driver ends | then | costs a retry |
# |---|---|---|
# | 0, done; 1, it gave up; 2, refused before the run had done a step | the job ends with that status | |
# | 69, a fault of the world; 2, refused though the same command has done steps | the same command again | yes |
# | 75, after SIGTERM or when the job's time is over | the job ends; it can be continued | |
# | 75 otherwise | the same command again | unless steps were done |
# | by a signal; 1 without having recorded an end | the same command again | yes |
# | with its node | the scheduler brings the job back, then as above | yes |

DRIVERS = "drivers.jsonl"  # in the run directory
STARTED, ENDED, CLOSED = "started", "ended", "closed"
TERMINATED = 128 + signal.SIGTERM  # exit status of a job that was told to end, and has saved
_WORD = Annotated[str, Text(f"{STARTED}|{ENDED}|{CLOSED}", "started, ended or closed")]
_STATUS = Annotated[int, Span(-64, 255)]
_KEYS = (("event", _WORD), ("time", Seconds), ("step", Steps), ("status", _STATUS))
_LINE = Annotated[dict[str, Any], OpenMap(_KEYS, ("event", "time"))]


@dataclass(frozen=True)
class DriverEnd:
    """End of one driver. `status`: status of its process, negative for the number of a signal; `recorded`: its journal
    has an end of it; `advanced`: the run has a step more than when it started; `asked`: the stop signal that this job
    got, 0 for none; `over`: the job's time is over; `has_steps`: drivers of this job have done steps."""

    status: int
    recorded: bool = True
    advanced: bool = False
    asked: int = 0
    over: bool = False
    has_steps: bool = False

    @property
    def is_lost(self) -> bool:
        """Return True if the job's driver was killed: by a signal, or by a library that left no time to record it."""
        killed = self.status < 0 or self.status > 128
        return killed or (self.status not in (DONE, REFUSED, STOPPED, UNAVAILABLE) and not self.recorded)

    @property
    def met_world_fault(self) -> bool:
        """Return True if the world kept a job's driver from its work: so it said, or it refused what worked before."""
        return self.status == UNAVAILABLE or (self.status == REFUSED and self.has_steps and not self.advanced)

    @property
    def costs_retry(self) -> bool:
        """Return True if starting the driver again after this end costs one of the job's retries."""
        return self.is_lost or self.met_world_fault or (self.status == STOPPED and not self.advanced)


def decide_job_status(end: DriverEnd, spent: int, retries: int, elsewhere: bool) -> int | None:
    """Return the exit status with which a job ends after this `end` of its driver; None if the same command is started
    again at once. `spent`: retries spent, this end's included; `retries`: retries allowed; `elsewhere`: True if the
    scheduler starts a job again that ends with status 75."""
    if end.asked in END_JOB:
        return DONE if end.status == DONE else TERMINATED
    if end.is_lost or end.met_world_fault or end.status == STOPPED:
        if spent > retries:
            return FAILED
        return STOPPED if end.over or end.asked or (end.status == STOPPED and elsewhere) else None
    return end.status if end.status in (DONE, REFUSED) else FAILED


def count_spent_retries(lines: Iterable[dict[str, Any]]) -> int:
    """Count the retries that a job has spent, from the lines of drivers.jsonl since a job last ended there: drivers
    that were lost, or stopped without a step."""
    count, running = 0, False
    for line in lines:
        if line["event"] == STARTED:
            count += running  # the one before has no end: it was lost with its supervisor
            running = True
        elif line["event"] == ENDED:
            count += bool(line.get("costs"))
            running = False
        else:
            count, running = 0, False
    return count + running


def find_job_start_step(lines: Iterable[dict[str, Any]]) -> int | None:
    """Return the step after which a job's first driver began, from the lines of drivers.jsonl; None if none did."""
    first: int | None = None
    for line in lines:
        if line["event"] == CLOSED:
            first = None
        elif first is None and line["event"] == STARTED:
            first = line.get("step", 0)
    return first


def read_drivers(run_dir: Path) -> list[dict[str, Any]]:
    """Read the supervisor's lines in a job's drivers.jsonl, [] if there is none. Raises Malformed, OSError."""
    try:
        return list(json_records.read_lines(run_dir / DRIVERS, lambda line: schema.parse_value(_LINE, line)))
    except (FileNotFoundError, NotADirectoryError):
        return []


LOCK = "supervisor.lock"  # in the run directory
LAUNCHER = (sys.executable, "-m", "platform.launch")
END_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # others stop it to be continued
_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # seconds before the same command, for each retry that is spent; at most
_STOPPING_SECONDS = 30.0  # for Ray to end this process, once it was asked to stop the Ray job
_Seen = TypeVar("_Seen")


@dataclass(frozen=True)
class SupervisorOptions:
    """Options of a supervisor. `launch`: arguments of `platform.launch`; `retries`: drivers that may be lost;
    `time_limit`: seconds that the job has, None for no limit; `elsewhere`: the scheduler starts a job again that ends
    with 75; `notice`: seconds that a node is given to leave, which may be this one."""

    launch: Sequence[str]
    retries: int = 10
    time_limit: float | None = None
    elsewhere: bool = False
    notice: float = 0.0

    @property
    def run_dir(self) -> Path:
        """Return the run directory, which the next driver must find. Raises ConfigError if no argument names it."""
        named = [word.partition("=")[2] for word in self.launch if word.lstrip("+").startswith("run.dir=")]
        if not named or not named[-1]:
            raise ConfigError("run.dir", "", "must be given to a supervised run", ["run.dir=DIRECTORY"])
        return Path(named[-1].strip("'\"")).expanduser()


class Driver(Protocol):
    """Driver of a run that was started: a process, or what stands for one."""

    def poll(self) -> int | None:
        """Return the exit status of a run's driver process, None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Send a run's driver process the signal `number`."""

    def wait(self) -> int:
        """Wait for the end of a run's driver process; return its exit status, negative for the number of a signal."""


def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> Driver:
    """Start a driver as a process of its own, with arguments of `platform.launch`, that does not hear SIGTERM."""
    with block_sigterm():
        return subprocess.Popen([*LAUNCHER, *arguments], env=environment)


class DriverSupervisor:
    """Runs drivers one after the other until the rule says that the job ends. `environment`: gives, before each driver,
    variables for it beside this process's own (Ray's address, which may change); `start`: starts one with arguments and
    an environment."""

    def __init__(
        self,
        supervision: SupervisorOptions,
        environment: Callable[[], Mapping[str, str]] = dict,
        pause: float = _PAUSE,
        start: Callable[[Sequence[str], Mapping[str, str]], Driver] = start_process,
    ):
        """Construct the supervisor of a job from its options; `pause`: seconds before another driver, per spent
        retry."""
        self._o, self._environment, self._pause, self._start = supervision, environment, pause, start
        self._end = None if supervision.time_limit is None else time.monotonic() + supervision.time_limit
        self._driver: Driver | None = None
        self._asked = 0
        self._replacing = False  # the present driver is asked to make way for another one here

    def run(self) -> int:
        """Run a job's drivers, one after the other, to its end; return its exit status: one of the launcher's, or 143
        after SIGTERM. Raises ConfigError if there is no run directory to write to, or another job has it."""
        run_dir = self._o.run_dir
        with ExitStack() as opened:
            self._reason = Path(opened.enter_context(TemporaryDirectory(prefix="supervisor-")), "reason")
            os.environ[REASON] = str(self._reason)  # which the driver inherits, however it is started
            opened.callback(os.environ.pop, REASON, None)
            old_handlers: dict[int, Any] = {n: signal.signal(n, self.note_stop_signal) for n in ENDING}
            opened.callback(restore_handlers, old_handlers)
            with refuse_failures("run.dir", run_dir, OSError, Malformed, why="cannot be used ({})"):
                run_dir.mkdir(0o700, parents=True, exist_ok=True)
                lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                opened.callback(os.close, lock)
                if owner := lock_or_read_owner(lock):  # before anything is counted: its driver is not lost
                    raise ConfigError("run.dir", run_dir, f"has a job already, supervised by {owner}")
                record = JsonLines(run_dir / DRIVERS)
                opened.callback(record.close)
                lines = read_drivers(run_dir)
            status = self._run_drivers(run_dir, record, count_spent_retries(lines), find_job_start_step(lines))
            if status != STOPPED or not self._o.elsewhere:
                record.append({"event": CLOSED, "time": time.time(), "status": status})
            return status

    def note_stop_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal that asks this job to stop, and pass it on to the driver; of a scheduler's signals, only the
        first: a second one would end the driver before it has saved, and Slurm's preemption sends two."""
        first, self._asked = not (self._asked or self._replacing), number
        if first or number == signal.SIGINT:
            self._signal_driver(number)

    def _signal_driver(self, number: int, reason: str = "") -> None:
        """Ask the driver, if it runs, to stop: by a signal that it hears (`block_sigterm`), and a file with the reason,
        by default the signal `number`, which the job was sent."""
        if self._driver is not None and self._driver.poll() is None:
            with suppress(OSError):
                self._reason.write_text(reason or f"{signal.Signals(number).name} to its job")
            self._driver.send_signal(signal.SIGUSR1 if number == signal.SIGTERM else number)

    def stop_driver_for_restart(self) -> None:
        """Ask the driver, once, to save and stop, so that another one goes on here: what it stands on is lost."""
        if not self._replacing and self._driver is not None and self._driver.poll() is None:
            self._replacing = True
            self._signal_driver(signal.SIGUSR1, "its supervisor, for another driver to go on")

    def _run_drivers(self, run_dir: Path, record: JsonLines, used: int, first: int | None) -> int:
        """Run one driver of the job after the other; return the status with which the job ends. `used`: retries so
        far; `first`: the step after which the job began, None if it begins now."""
        if used > self._o.retries:
            return self._report_spent_retries(used)
        if used:
            print_line(f"supervisor: {used} of {self._o.retries} retries are spent")
        while True:
            before = read_or_default(run_directory.find_last_step, run_dir, 0)
            record.append({"event": STARTED, "time": time.time(), "step": before})
            first = before if first is None else first
            status = self._run_one_driver()
            after = read_or_default(run_directory.find_last_step, run_dir, 0)
            over = self._end is not None and time.monotonic() >= self._end
            recorded = read_or_default(run_directory.find_dead_driver_step, run_dir, None) is None
            end = DriverEnd(status, recorded, after > before, self._asked, over, after > first)
            used += end.costs_retry
            line = {"event": ENDED, "time": time.time(), "step": after, "status": status, "costs": end.costs_retry}
            record.append(line)
            final = decide_job_status(end, used, self._o.retries, self._o.elsewhere and not self._replacing)
            if final is not None:
                return self._report_spent_retries(used) if used > self._o.retries and end.costs_retry else final
            ending = "was lost" if end.is_lost else "was kept from its work" if end.met_world_fault else "stopped"
            again = f"the same command again ({used} of {self._o.retries} retries spent)"
            print_line(f"supervisor: the driver {ending} with status {status} after step {after}: {again}")
            pause = max(min(_LONGEST_PAUSE, self._pause * used), self._seconds_until_nodes_leave(run_dir, status))
            wait_until(lambda: self._asked, pause, 0.1)
            if self._asked:
                return TERMINATED if self._asked in END_JOB else STOPPED

    def _run_one_driver(self) -> int:
        """Run one driver process of the job to its end; return its exit status."""
        arguments = [*self._o.launch, *self._resume_override(self._o.run_dir)]
        if self._end is not None:
            arguments.append(f"run.time_limit={max(1, int(self._end - time.monotonic()))}")
        environment = {**os.environ, **self._environment()}
        self._replacing = False
        self._reason.unlink(missing_ok=True)
        self._driver = self._start(arguments, environment)
        if self._asked:  # while it was starting
            self._signal_driver(self._asked)
        return self._driver.wait()

    def _seconds_until_nodes_leave(self, run_dir: Path, status: int) -> float:
        """Return the seconds to wait until leaving nodes are gone, as another driver on them would stop too."""
        is_leaving = status == STOPPED and read_or_default(run_directory.is_ended_by_preemption, run_dir, False)
        return self._o.notice if is_leaving else 0.0

    def _resume_override(self, run_dir: Path) -> list[str]:
        """Return ["checkpoint.resume=never"] if the last driver was lost before its first checkpoint, else []."""
        chosen = any(word.lstrip("+").startswith("checkpoint.resume=") for word in self._o.launch)
        starts_over = not chosen and read_or_default(run_directory.has_steps_but_no_checkpoint, run_dir, False)
        return ["checkpoint.resume=never"] if starts_over else []

    def _report_spent_retries(self, used: int) -> int:
        """Print that all of the job's retries are spent; return the job's exit status."""
        most, more = self._o.retries, "the same job goes on once more when it is submitted again"
        print_line(f"supervisor: {used} retries are spent, and {most} are allowed: the job ends; {more}", sys.stderr)
        return FAILED


def read_or_default(read: Callable[[Path], _Seen], run_dir: Path, otherwise: _Seen) -> _Seen:
    """Return what `read` finds in a job's run directory; `otherwise` if its files cannot be read."""
    try:
        return read(run_dir)
    except (OSError, Malformed):
        return otherwise


def wait_until(done: Callable[[], object], seconds: float = inf, every: float = 0.5) -> None:
    """Wait inside a job until `done`, for at most `seconds`; look whether it is once in `every` seconds."""
    deadline = time.monotonic() + seconds
    while not done() and (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(every, remaining))


def end_ray_job(status: int, environment: Mapping[str, str] = os.environ) -> None:
    """Stop the Ray job that this process is the entry point of, if it is one and its status is not 0: KubeRay starts
    the whole RayJob again, with all of its nodes, where an entry point fails, and does not where the job is stopped.
    Only the loss of the entry point itself, with its node, is a failure to KubeRay."""
    job = find_ray_job(environment)
    if status in (DONE, TERMINATED) or not job:  # terminated: it is being stopped
        return
    print_line(f"supervisor: status {status}, which no other cluster would change: this RayJob ends as STOPPED")
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", "--no-wait", job]
    try:
        subprocess.run(command, timeout=_STOPPING_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print_line(f"supervisor: the Ray job could not be stopped ({error})", sys.stderr)
        return
    time.sleep(_STOPPING_SECONDS)  # Ray sends SIGTERM


def find_ray_job(environment: Mapping[str, str]) -> str:
    """Return the submission id of this job in Ray, whose entry point has this environment, "" if there is none."""
    return str(ray_job_config(environment).get("metadata", {}).get("job_submission_id", ""))
