"""Pod of an Indexed Job: `python -m platform.jobs pod`, which every index of the job runs on a node of its own.

The first pod has the supervisor of the run. For each driver it waits until all pods are there, announces a life of the
run, and all start torchrun for it. A pod that was lost comes back as the Job starts it again, under the same index; the
driver, which has gone on without it, saves then and makes way for a life with all. So every pod stays until the run is
over, and ends with the run's own exit status: what ends with 0 before, a Job never starts again.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostname

from platform.boundary.terminal import print_line
from platform.cluster.run import traces
from platform.jobs.allocation import answers, free_port
from platform.jobs.pods.board import Board, TorchrunLife, Word
from platform.jobs.pods.rank import PID, STATUS
from platform.jobs.pods.torch_node import PodOptions, TorchNode
from platform.jobs.retries import TERMINATED
from platform.jobs.supervisor import Supervision, Supervisor, seen
from platform.launch import FAILED, STOPPED

_LOOK_SECONDS = 0.5
_BEAT_SECONDS = 2.0  # between two words of a pod
_LINGER_SECONDS = 15.0  # for torchrun to end once its driver has
_REPORT_SECONDS = 60.0  # between two lines on what is waited for


def run_pod(o: PodOptions, supervision: Supervision) -> int:
    """Run one pod of a job to its end; return its exit status, the run's own, or 143 after a stop signal."""
    return _run_first(o, supervision) if o.index == 0 else _run_other(o, supervision)


class _Lives:
    """Lives of a run, as led by its first pod: the pods of each, and those missing or back meanwhile."""

    def __init__(self, o: PodOptions, board: Board):
        """Continue to count a run's lives (starts of torchrun on all pods) from the newest one on the `board`."""
        self._o, self._board = o, board
        self._others = range(1, o.pods)
        self._token = secrets.token_hex(8)
        self._number = (board.life() or TorchrunLife(0, 1, [])).number
        self.now: TorchrunLife | None = None  # the life that runs

    def missing(self) -> list[int]:
        """Return the indices of the job's pods that could not join torchrun if it were started anew now."""
        there = {index: self._board.there(index) for index in self._others}
        return [index for index, word in there.items() if word is None or word.leaving or word.runs]

    def begin(self) -> TorchrunLife:
        """Announce a new life of the run (torchrun started on all pods anew), with the pods that are there."""
        words = [self._board.there(index) for index in self._others]
        members = [self._token, *(word.token if word else "" for word in words)]
        self.now = life = self._announce(free_port(self._o.address), members)
        return life

    def end(self) -> None:
        """Announce that torchrun's present life is over, by one without members, so that other pods end it."""
        self.now = None
        self._announce(1, [])

    def _announce(self, port: int, members: list[str]) -> TorchrunLife:
        """Announce the run's next life (start of torchrun), with its store's port and its pods, and return it."""
        self._number += 1
        life = TorchrunLife(self._number, port, members)
        self._board.announce(life)
        return life

    def changed(self) -> str:
        """Return in words why torchrun should be started anew on all pods, "" if it should not: a pod of the job is
        leaving, or a lost one has come back and takes no part in the present life."""
        for index in self._others if self.now else ():
            word = self._board.there(index)
            if word and word.leaving:
                return f"pod {index} is told to go"
            if word and self.now and (word.token != self.now.members[index] or self._left(word, self.now)):
                return f"pod {index} is there again"
        return ""

    @staticmethod
    def _left(word: Word, life: TorchrunLife) -> bool:
        """Return True if the pod of this heartbeat joined the `life` and has ended its torchrun since."""
        return word.life == life.number and not word.runs


class _TorchrunDriver:
    """Driver of a run as the supervisor sees it: waits for all pods, then runs torchrun on the first one, whose rank 0
    is the driver."""

    def __init__(self, node: TorchNode, lives: _Lives, o: PodOptions, run_dir: Path, launch: Sequence[str]):
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
        if self._gather():
            life = self._lives.begin()
            self._node.start(self._o.address, life.port, life.number, self._launch)
            self._attend()
        status, begun = self._node.number(STATUS), self._node.number(PID) is not None
        self._node.end()
        self._lives.end()
        if status is None:
            status = -signal.SIGKILL if begun else STOPPED
        if status == FAILED and seen(traces.bereaved, self._run_dir, False):
            status = STOPPED
        self._status = status
        return status

    def _gather(self) -> bool:
        """Wait until all of the job's pods are there; return False if the job was signalled to stop meanwhile."""
        due = time.monotonic() + _BEAT_SECONDS
        while missing := self._lives.missing():
            if self._signal:
                return False
            if time.monotonic() > due:
                print_line(f"pod 0 on {gethostname()}: waiting for {_named(missing)}, of {self._o.pods} pods")
                due = time.monotonic() + _REPORT_SECONDS
            time.sleep(_LOOK_SECONDS)
        return not self._signal

    def _attend(self) -> None:
        """Wait until torchrun and the driver in it have ended, and pass signals on to the driver."""
        until = None
        while self._node.runs and (until is None or time.monotonic() < until):
            process = self._node.number(PID)
            if self._signal and self._node.number(STATUS) is None:
                if process is None:
                    return  # nothing is done yet
                with suppress(ProcessLookupError):
                    os.kill(process, self._signal)
                self._signal = 0
            if until is None and self._node.number(STATUS) is not None:
                until = time.monotonic() + _LINGER_SECONDS
            time.sleep(_LOOK_SECONDS / 5)


def _named(indices: Sequence[int]) -> str:
    """Return the pods with these indices in words: at most 8 by number, then how many more."""
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"pod{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices[:8]))}{more}"


def _run_first(o: PodOptions, supervision: Supervision) -> int:
    """Run the supervisor of a run and torchrun in the job's first pod; announce the end, unless the pod restarts."""
    board = Board(o.shared)
    if (status := board.ended()) is not None:  # this pod was lost when all was done
        return status
    lives, over = _Lives(o, board), threading.Event()
    with TorchNode(o, supervision.run_dir) as node:

        def start(launch: Sequence[str], environment: Mapping[str, str]) -> _TorchrunDriver:
            """Prepare a driver that torchrun on all pods starts, for the supervisor, which waits for its end."""
            return _TorchrunDriver(node, lives, o, supervision.run_dir, launch)

        supervisor = Supervisor(supervision, start=start)
        watch = threading.Thread(target=_watch, args=(lives, supervisor, over), daemon=True)
        watch.start()
        try:
            status = supervisor.run()
        finally:
            over.set()
            watch.join()
    if status != TERMINATED:
        board.end(status)
    return status


def _watch(lives: _Lives, supervisor: Supervisor, over: threading.Event) -> None:
    """Replace the driver when a new start of torchrun would get pods back, or a pod is leaving."""
    reported: TorchrunLife | None = None
    while not over.wait(_LOOK_SECONDS):
        life = lives.now
        if life and life is not reported and (why := lives.changed()):
            reported = life
            print_line(f"pod 0 on {gethostname()}: {why}: the run saves, and goes on with all pods")
            supervisor.replace_driver()


def _run_other(o: PodOptions, supervision: Supervision) -> int:
    """Run torchrun in another pod than the first, at each start that has this pod, until the run or the pod ends."""
    board, going, said = Board(o.shared), threading.Event(), 0.0
    word = Word(secrets.token_hex(8))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: going.set())
    with TorchNode(o, supervision.run_dir) as node:
        while (status := board.ended()) is None:
            life = board.life()
            if life and node.runs and life.number > word.life:
                node.end()  # that life is over, or its first pod was lost
            elif life and life.number > word.life and o.index < len(life.members) and not going.is_set():
                # until its store answers, the first pod's name may be that of a lost one
                if life.members[o.index] == word.token and answers(
                    o.first, life.port
                ):  # till then the name may be a lost pod's
                    node.start(o.first, life.port, life.number, supervision.launch)
                    word = replace(word, life=life.number)
            new = replace(word, runs=node.runs, leaving=going.is_set())
            if new != word or time.monotonic() > said + _BEAT_SECONDS:
                word, said = replace(new, beat=word.beat + 1), time.monotonic()
                with suppress(OSError):  # of shared storage: the next word tries again
                    board.say(o.index, word)
            if word.leaving and not word.runs:
                return TERMINATED
            time.sleep(_LOOK_SECONDS)
    return status
