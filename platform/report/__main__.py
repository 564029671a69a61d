"""`python -m platform.report RUN_DIR [RUN_DIR ...]` writes one HTML page on a run, or on several beside each other.

The page needs no network and no account: what a run learned, how fast, where its time and its bytes went, what failed
and what that cost. The run may go on meanwhile.
Exit status: 0 written; 1 it could not be written; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from platform.boundary.command_line import DONE, command_line, run_command
from platform.boundary.refusals import ConfigError, violation
from platform.boundary.terminal import print_line
from platform.report.page import page_html
from platform.report.page_data import WatchedRun, page_data


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.report`; return its exit status."""
    parser = command_line("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directories, compared if several")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="default: report.html in the first RUN_DIR")
    return run_command(parser, _answer, arguments, failures=(OSError,))


def _answer(given: argparse.Namespace) -> int:
    """Write the page that the command line asks for; return the exit status."""
    missing = [run for run in given.runs if not run.is_dir()]
    if missing:
        raise ConfigError([violation("RUN_DIR", run, "is no directory") for run in missing])
    runs = [WatchedRun(run.resolve()) for run in given.runs]
    for run in runs:
        run.look()
    text = page_html(page_data(runs))
    output = given.output or given.runs[0] / "report.html"
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(output)
    print_line(f"{output}: {len(text.encode()) / 1e6:.2f} MB")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
