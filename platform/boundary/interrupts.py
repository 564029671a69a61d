"""Signals that end a command, from the moment on that it begins to import: one line, and a status of its own.

`platform/__init__.py` imports this module first of all in a command, so it imports nothing that takes time. A run,
which has something to save, handles the signals itself (`platform.cluster.crew.signals`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

# Signals whose default action does not end a process, that nobody can handle, that report a fault of the process
# itself, that Python makes an OSError of, or that are a process's own alarms.
_OTHERS = "CHLD CONT URG WINCH TSTP TTIN TTOU  KILL STOP  ABRT BUS FPE ILL SEGV SYS TRAP  PIPE XFSZ  ALRM PROF VTALRM"
# Signals by which somebody ends a process: a terminal that closes sends SIGHUP, a batch system SIGXCPU or SIGUSR2.
_OTHER_NUMBERS = {signal.Signals[f"SIG{name}"] for name in _OTHERS.split()}
ENDING = tuple(number for number in signal.Signals if number < signal.SIGRTMIN and number not in _OTHER_NUMBERS)
STATUS = dict.fromkeys(ENDING, 75) | {signal.SIGINT: 130}  # exit status
COMMANDS = tuple("launch tune generate evaluate doctor plan checkpoint weights data jobs report status".split())
# How often a thread of torch's CPU library (libgomp) looks for the others before it sleeps, which the library reads as
# it is loaded: about as long as it takes to sleep and wake. By itself it looks 300,000 times, for milliseconds, and on
# a busy machine these are taken from the very thread that it waits for. The waiting policy is another name for it.
SPINNING, SPINS, POLICY = "GOMP_SPINCOUNT", "300", "OMP_WAIT_POLICY"
exit_process = os._exit  # `platform.boundary.refusals.refuse_process_end` replaces os._exit, for the user's own code
Handler = Callable[[int, FrameType | None], Any]
_is_command = False  # this process was started as one of COMMANDS


class Interrupted(BaseException):
    """Reports that a command was asked to end, by the signal of this number. Like KeyboardInterrupt it is no
    Exception."""

    def __init__(self, number: int):
        """Construct the exception for a command that the signal `number` of ENDING ends: message and status."""
        super().__init__(f"stopped by {signal.Signals(number).name}; the same command does it anew")
        self.status = STATUS[signal.Signals(number)]


def watch_imports() -> None:
    """Let a signal end this process at once, in one line on stderr, while the command that it runs is imported."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    if module and module[0].removeprefix("platform.") in COMMANDS and module[0].startswith("platform."):
        exit_on_signal()


def exit_on_signal() -> None:
    """Let a signal of ENDING end this process while it imports; set how torch's threads in it wait."""
    global _is_command
    _is_command = True
    if POLICY not in os.environ:
        os.environ.setdefault(SPINNING, SPINS)
    _install_handler(_exit_command)
    sys.excepthook = _report_missing_package


def _report_missing_package(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print to stderr the error that ends a process as it imports: a line for a missing package, else the traceback."""
    if line := describe_missing_package(error):
        _print_stderr_line(line)
    else:
        sys.__excepthook__(kind, error, trace)


def describe_missing_package(error: BaseException) -> str:
    """Return the line for the user of a command that ends because a package is not installed, with what installs it; ""
    for any other error."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "platform").partition(".")[0] == "platform":
        return ""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    is_set_up, is_checkout = (os.path.exists(os.path.join(root, name)) for name in (".venv", "Makefile"))
    activate = f"source {root}/.venv/bin/activate"
    cure = activate if is_set_up else f"`make train` in {root}, then {activate}"
    cure = cure if is_checkout else f"{sys.executable} -m pip install elastic-platform"
    return f"{error}: this python, {sys.executable}, is not set up: {cure}"


def run_interruptible(command: Callable[[], int]) -> int:
    """Run a command and return its exit status. The first signal of ENDING raises Interrupted in it, so that it tidies
    up, and is reported in one line on stderr; a second one ends the process at once. Only the main thread handles
    signals."""
    if threading.current_thread() is not threading.main_thread():
        return command()
    old_handlers = _install_handler(_raise_interrupted)
    try:
        return command()
    except Interrupted as interrupted:
        _print_stderr_line(str(interrupted))
        return interrupted.status
    finally:
        restore_handlers(old_handlers)


def restore_handlers(old_handlers: Mapping[int, Any]) -> None:
    """Restore the signal handlers `old_handlers` (number -> handler); in a command, ignore these signals instead."""
    # A command has its exit status, which a late signal would replace, such as Slurm's after GraceTime: Python itself
    # gives the signals back to the system in its last moments, which kills.
    for number, handler in old_handlers.items():
        signal.signal(number, signal.SIG_IGN if _is_command else handler)


@contextmanager
def keep_handlers() -> Iterator[None]:
    """Restore handlers of signals of ENDING after the block, in which a command handles them too."""
    is_main = threading.current_thread() is threading.main_thread()
    old_handlers = {number: signal.getsignal(number) for number in ENDING if is_main}
    yield
    for number, handler in old_handlers.items():
        signal.signal(number, handler)


def _install_handler(handler: Handler) -> dict[int, Any]:
    """Handle the signals that end a command, ENDING, by `handler`, unless they are ignored, as under nohup;
    return signal number -> handler before, of the changed ones. A forked child handles them as the system does."""
    old_handlers: dict[int, Any] = {number: signal.getsignal(number) for number in STATUS}
    own_process = os.getpid()

    def dispatch_signal(number: int, frame: FrameType | None) -> None:
        """Pass a signal that ends a command to `handler`; in a forked child, to the system's default."""
        if os.getpid() != own_process:  # a fork, which is no command
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            handler(number, frame)

    kept = (signal.SIG_IGN, None)
    changed = {number: handler for number, handler in old_handlers.items() if handler not in kept}
    for number in changed:
        signal.signal(number, dispatch_signal)
    return changed


def _exit_command(number: int, _: FrameType | None) -> None:
    """Print on stderr which signal interrupts a command, and exit the process at once with its status."""
    interrupted = Interrupted(number)
    _print_stderr_line(str(interrupted))
    exit_process(interrupted.status)


def _raise_interrupted(number: int, _: FrameType | None) -> None:
    """Raise Interrupted in a command for its first signal, and let a second signal exit the process at once."""
    _install_handler(_exit_command)
    raise Interrupted(number)


def _print_stderr_line(line: str) -> None:
    """Print a line to stderr, safely within the handler of a signal that ends a command."""
    try:
        os.write(2, f"{line}\n".encode())  # not print(), which the signal may have interrupted
    except OSError:
        pass
