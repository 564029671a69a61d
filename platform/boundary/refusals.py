"""Refusals of a user's mistakes: one line each, with key, value, constraint and the nearest legal values; and the two
places where mistakes surface, command lines and the user's own code.

`run_command` is what every command does before and after its own part: it knows the secrets in its arguments and prints
none; a mistake or a failure is one line, and each has its exit status. `guard_user_code` calls the user's own code,
which may raise anything, exit, or never come back.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import inf
from pathlib import Path
from time import monotonic
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, NoReturn

from platform.boundary import terminal
from platform.boundary.interrupts import describe_missing_package, exit_process
from platform.boundary.redaction import forget_secrets, redact_output, redact_secrets, register_url_secrets
from platform.boundary.terminal import escape_unprintable, is_reader_gone, print_line, print_refusals, refusal_line
from platform.boundary.world_faults import UNAVAILABLE, is_external_fault, walk_causes

NEAREST = "; nearest legal: "  # between a refusal's constraint and its hints
NAMED = 5  # most names that a line calls legal
SHOWN = 300  # most characters of a value in a line for the user


class ConfigError(ValueError):
    """Refusal for a user's mistakes, in the configuration or in the files it names; `violations` holds one line for
    each: key, value, constraint and the nearest legal values."""

    def __init__(
        self, violations: Sequence[str] | str, value: Any = "", constraint: str | None = None, legal: Iterable[Any] = ()
    ):
        """Construct the refusal of a user's mistakes from one line or several, each made printable; or of one key's
        `value` from the arguments of `format_violation`, of which the first is the key."""
        if constraint is not None:
            violations = format_violation(str(violations), value, constraint, legal)
        violation_lines = [violations] if isinstance(violations, str) else violations
        self.violations = [refusal_line(v) for v in violation_lines]
        super().__init__("\n".join(self.violations))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle makes the same refusal of, in another process."""
        return type(self), (self.violations,)


def refuse_all(lines: Iterable[str]) -> None:
    """Raise ConfigError with the lines that refuse a user's mistakes, each once, if there are any."""
    if unique_lines := list(dict.fromkeys(lines)):
        raise ConfigError(unique_lines)


def find_refusal(error: BaseException) -> str:
    """Return the lines of the ConfigError that an exception is or was raised from; "" if none, or with an OSError."""
    if any(isinstance(cause, OSError) for cause in walk_causes(error)):  # a disk or the network may do well elsewhere
        return ""
    return next((str(cause) for cause in walk_causes(error) if isinstance(cause, ConfigError)), "")


def format_violation(key: str, value: Any, constraint: str, legal: Iterable[Any] = ()) -> str:
    """Format the line by which a user's value is refused, printable: "KEY=VALUE: constraint; nearest legal: a, b". A
    value of more than SHOWN (300) characters is cut."""
    value_text, *names = [format_value(value), *(format_value(v) or "''" for v in legal)]
    if len(value_text) > SHOWN:
        value_text = f"{value_text[:SHOWN]}... ({len(value_text)} characters)"
    return escape_unprintable(f"{key}={value_text}: {constraint}" + (f"{NEAREST}{', '.join(names)}" if names else ""))


@contextmanager
def refuse_failures(key: str, value: Any, *failures: type[Exception], why: str = "{}") -> Iterator[None]:
    """Raise ConfigError, for a configuration key's value, in place of `failures` in the context; `why`: its text."""
    try:
        yield
    except failures as error:
        raise ConfigError(format_violation(key, value, why.format(error))) from None


@contextmanager
def rephrase_refusals(change: Callable[[str], str]) -> Iterator[None]:
    """Apply `change` to each line that refuses a user's mistake, in a ConfigError raised within the context."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*map(change, error.violations)]) from None


def find_refused_key(line: str) -> str:
    """Return the key that a refusal line is about, with which it begins, or the word in its place."""
    return re.split("[=: ]", line, maxsplit=1)[0]


def format_value(value: Any) -> str:
    """Return a refused or legal value as a refusal line has it, as a user writes it: true and false in lower case."""
    try:
        return str(value).lower() if isinstance(value, bool) else str(value)
    except (ValueError, RecursionError):  # integers of thousands of digits
        return f"a very large {type(value).__name__}"


def closest_values(value: Any, legal: Iterable[Any]) -> list[Any]:
    """Return the legal values for a refusal line, nearest to the refused `value` first: three integers, or five names;
    of more names that begin with it, these are the nearest."""
    values = list(legal)
    if all(type(v) is int for v in (value, *values)):
        return sorted(values, key=lambda v: (abs(v - value), v))[:3]
    names = {str(v): v for v in values}
    longer = [name for name in names if str(value) and name.startswith(str(value))]
    similar = get_close_matches(str(value), names, n=3, cutoff=0.5)
    return [names[n] for n in dict.fromkeys([*longer, *similar, *names])][:NAMED]


DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 75  # exit status; after STOPPED the same command resumes the run


class CommandLine(argparse.ArgumentParser):
    """Parser of the arguments of a command, and of each of its subcommands, that refuses a mistake as all of our
    commands do: in one line, with status 2."""

    @property
    def command_name(self) -> str:
        """Return the name NAME of the command line `python -m platform.NAME`, without its subcommand."""
        return self.prog.removeprefix(typed_command("")).partition(" ")[0]

    def error(self, message: str) -> NoReturn:
        """Print in one line on stderr why the command's arguments are refused, and end the process with status 2."""
        print_refusals(self.command_name, [f"{message}; {self.prog} --help says what it takes"])
        raise SystemExit(REFUSED)


def build_command_line(name: str, description: str | None) -> CommandLine:
    """Return a parser, without arguments yet, of the command line `python -m platform.NAME`."""
    formatter = argparse.RawDescriptionHelpFormatter
    return CommandLine(prog=typed_command(name), description=description, formatter_class=formatter)


def typed_command(name: str) -> str:
    """Return what a user types here for the command `python -m platform.NAME`: its like, if there is no import hook."""
    return f"python -m elastic_platform {name}" if added_path() else f"python -m platform.{name}"


def added_path() -> str | None:
    """Return the folder of sys.path by which a user's Python finds this package without an import hook, else None."""
    ending = os.path.join("elastic_platform", "children")
    return next((folder for folder in sys.path if folder.endswith(ending)), None)


@contextmanager
def shield_arguments(arguments: Sequence[str] | None) -> Iterator[list[str]]:
    """Yield the command-line arguments: `arguments`, or those given to this process if they are None. Within the
    context the secrets in their URLs are registered, older ones are forgotten, and stdout and stderr print none."""
    command_arguments = list(sys.argv[1:] if arguments is None else arguments)
    forget_secrets()
    register_url_secrets(command_arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may hold characters that the terminal cannot show
    sys.excepthook = print_uncaught_error
    with redact_output(sys.stdout, sys.stderr):
        yield command_arguments


def print_uncaught_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print on stderr why an error ends this process, by default its traceback, without secrets: `sys.excepthook`."""
    text = describe_missing_package(error) or "".join(traceback.format_exception(kind, error, trace))
    print_line(redact_secrets(text).rstrip("\n"), sys.stderr)


def report_refusal(error: ConfigError, subject: str) -> int:
    """Print a command's mistakes on stderr, each as "SUBJECT: violation", and return its exit status: 2, or
    UNAVAILABLE (69) where the world is at fault (`is_external_fault`)."""
    print_refusals(subject, error.violations)
    return UNAVAILABLE if is_external_fault(error) else REFUSED


def run_command(
    parser: CommandLine,
    run: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None,
    *,
    subject: str = "",
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Run a command with its parsed command-line arguments (`arguments`; None: this process's) and return its exit
    status, also when it ends early: by a signal, a closed pipe at its output, a ConfigError (REFUSED, 2), or one of the
    exceptions `failures` (FAILED, 1). Errors are printed on stderr in lines that begin with the command's name.
    `subject`: beginning of the lines of a ConfigError instead."""

    def parse_and_run() -> int:
        """Parse the arguments and run the command; return its exit status."""
        try:
            parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
            return run(parse(command_arguments))
        except ConfigError as error:
            return report_refusal(error, subject or parser.command_name)
        except failures as error:
            if isinstance(error, BrokenPipeError) and is_reader_gone():
                raise
            print_refusals(parser.command_name, [error])
            return FAILED

    with shield_arguments(arguments) as command_arguments:
        return terminal.run_printing_command(parse_and_run)


REPORT_AFTER = 10.0  # seconds of one call after which a warning says that it still runs
QUICK = 300.0  # seconds that an import, or a function that computes, may take
READING = 3600.0  # and one that reads documents or finds files, which may fetch them first
logger = logging.getLogger(__name__)


class OwnCodeError(Exception):
    """Reports that code of the user's own failed; its text says how, in one line."""


class _Hangs(BaseException):
    """Ends code of the user's own that does not come back; no Exception, so that this code does not catch it."""


def describe_error(error: BaseException) -> str:
    """Return an exception of guarded user code as one line, such as "ValueError: no"; its text may itself fail."""
    name = type(error).__name__
    try:
        return " ".join(f"{name}: {error}".split())
    except BaseException:
        return f"{name}, whose text raises an error too"


def is_stop_signal(error: BaseException) -> bool:
    """Return True if an exception raised while guarded user code ran is a stop signal, and no error of that code."""
    if isinstance(error, KeyboardInterrupt):  # of Ctrl-C, unless another handler takes note of that
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not isinstance(error, Exception | _Hangs) and type(error).__module__.startswith("platform.")


@contextmanager
def guard_user_code(
    code_name: str, unchanged: tuple[type[Exception], ...] = (), limit: float = QUICK
) -> Iterator[None]:
    """Guard user code: raise OwnCodeError in place of any exception that the user's own code `code_name`, such as
    "extend=my_module", raises within the context, SystemExit and a call of os._exit too; errors of the types
    `unchanged`, and stop signals, pass. In the main thread a warning after REPORT_AFTER seconds says that the code
    still runs, and where; the code is ended after `limit` seconds."""
    try:
        with refuse_process_end(), _limit_user_code_time(code_name, limit):
            yield
    except unchanged:
        raise
    except _Hangs as error:
        raise OwnCodeError(f"does not come back: ended after {limit:g} s{describe_place(error)}") from None
    except BaseException as error:
        if is_stop_signal(error):
            raise
        raise OwnCodeError(f"raises {describe_error(error)}") from error


_guarded = threading.local()  # `process`: the one that the user's own code must not end, 0 for none


def _exit_unless_guarded(status: int) -> NoReturn:
    """End this process as os._exit does, in whose place it stands; raise SystemExit in guarded user code instead."""
    if getattr(_guarded, "process", 0) == os.getpid():  # a fork is that code's own; here nobody would say a word
        raise SystemExit(f"os._exit({status})")
    exit_process(status)


@contextmanager
def refuse_process_end() -> Iterator[None]:
    """Raise SystemExit where guarded user code calls os._exit, in this process and thread, within the context."""
    before = getattr(_guarded, "process", 0)
    _guarded.process, os._exit = os.getpid(), _exit_unless_guarded
    try:
        yield
    finally:
        _guarded.process = before


@contextmanager
def _limit_user_code_time(code_name: str, limit: float) -> Iterator[None]:
    """Raise _Hangs in guarded user code, called `code_name`, once the context has lasted `limit` seconds, after
    warnings that it still runs; do nothing outside of the main thread, or where another handler of SIGALRM is set."""
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    if not free or limit == inf:
        yield
        return
    end = monotonic() + limit

    def ring_alarm(_: int, frame: FrameType | None) -> None:
        """Raise _Hangs if guarded user code has used up its time; else warn that it still runs, and where."""
        if (seconds_left := end - monotonic()) <= 0:
            raise _Hangs
        position = f", at {_frame_file_name(frame)}:{frame.f_lineno}" if frame else ""
        remark = "%s: still runs after %.3g s%s; it is ended after %g s"
        logger.warning(remark, code_name, limit - seconds_left, position, limit)
        signal.setitimer(signal.ITIMER_REAL, seconds_left)

    signal.signal(signal.SIGALRM, ring_alarm)
    signal.setitimer(signal.ITIMER_REAL, min(REPORT_AFTER, limit))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def describe_place(error: BaseException | None) -> str:
    """Return where an error interrupted guarded user code, as ", at my_module.py:3"; "" if none had begun."""
    frames = walk_tb(error.__traceback__) if error else ()
    ours = ("platform", "importlib")
    users = [
        (_frame_file_name(f), n) for f, n in frames if f.f_globals.get("__name__", "").partition(".")[0] not in ours
    ]
    return "".join(f", at {name}:{line}" for name, line in users[-1:])


def _frame_file_name(frame: FrameType) -> str:
    """Return the file name, without folders, of a stack frame, for messages on where guarded user code runs."""
    return Path(frame.f_code.co_filename).name
