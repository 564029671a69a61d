"""Command lines of the platform's commands: what they take, and the refusal of what they do not."""

from __future__ import annotations

import argparse
from typing import NoReturn

from platform.boundary.terminal import print_refusals

REFUSED = 2  # exit status


class CommandLine(argparse.ArgumentParser):
    """Parser of the arguments of a command, and of each of its subcommands, that refuses a mistake as all of our
    commands do: in one line, with status 2."""

    def error(self, message: str) -> NoReturn:
        """Print in one line why the arguments are refused, and end the process."""
        module, _, _ = self.prog.removeprefix("python -m platform.").partition(" ")
        print_refusals(module, [f"{message}; {self.prog} --help says what it takes"])
        raise SystemExit(REFUSED)
