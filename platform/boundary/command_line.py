"""Command lines of the platform's commands: what every command does before and after its own part.

It knows the secrets in its arguments and prints none; a mistake or a failure is one line, and each has its exit status.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

from platform.boundary.redaction import forget_secrets, redact, register_url_secrets, shielded
from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import print_line, print_refusals, print_while_read, reader_left

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 75  # exit status; after STOPPED the same command resumes the run


class CommandLine(argparse.ArgumentParser):
    """Parser of the arguments of a command, and of each of its subcommands, that refuses a mistake as all of our
    commands do: in one line, with status 2."""

    @property
    def command(self) -> str:
        """Return the name NAME of the command line `python -m platform.NAME`, without its subcommand."""
        return self.prog.removeprefix(typed_command("")).partition(" ")[0]

    def error(self, message: str) -> NoReturn:
        """Print in one line on stderr why the command's arguments are refused, and end the process with status 2."""
        print_refusals(self.command, [f"{message}; {self.prog} --help says what it takes"])
        raise SystemExit(REFUSED)


def command_line(name: str, description: str | None) -> CommandLine:
    """Return a parser, without arguments yet, of the command line `python -m platform.NAME`."""
    formatter = argparse.RawDescriptionHelpFormatter
    return CommandLine(prog=typed_command(name), description=description, formatter_class=formatter)


def typed_command(name: str) -> str:
    """Return what a user types here for the command `python -m platform.NAME`: its like, if there is no import hook."""
    return f"python -m elastic_platform {name}" if added_path() else f"python -m platform.{name}"


def added_path() -> str | None:
    """Return the folder of sys.path by which processes without an import hook find this package, if there is one."""
    ending = os.path.join("elastic_platform", "children")
    return next((folder for folder in sys.path if folder.endswith(ending)), None)


@contextmanager
def given_arguments(arguments: Sequence[str] | None) -> Iterator[list[str]]:
    """Yield the command-line arguments: `arguments`, or those given to this process if they are None. Within the
    context the secrets in their URLs are registered, older ones are forgotten, and stdout and stderr print none."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    forget_secrets()
    register_url_secrets(given)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may hold characters that the terminal cannot show
    sys.excepthook = print_uncaught
    with shielded(sys.stdout, sys.stderr):
        yield given


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an error that ends this process on stderr, with its secrets redacted: `sys.excepthook`."""
    print_line(redact("".join(traceback.format_exception(kind, error, trace))).rstrip("\n"), sys.stderr)


def refusal_status(error: ConfigError, subject: str) -> int:
    """Print a command's mistakes on stderr, each as "SUBJECT: violation", and return its exit status, 2."""
    print_refusals(subject, error.violations)
    return REFUSED


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

    def answer() -> int:
        """Parse the arguments and run the command; return its exit status."""
        try:
            parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
            return run(parse(given))
        except ConfigError as error:
            return refusal_status(error, subject or parser.command)
        except failures as error:
            if isinstance(error, BrokenPipeError) and reader_left():
                raise
            print_refusals(parser.command, [error])
            return FAILED

    with given_arguments(arguments) as given:
        return print_while_read(answer)
