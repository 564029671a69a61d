"""`python -m platform.status [RUN_DIR|URL]` says how a run is: if something is wrong, first its culprit.

It reads the run directory alone, also while a driver writes it, and changes nothing there. Without an argument it looks
at the run in runs/ that was written last. Exit status: 0 all is well, or the run ended as it should; 1 it needs
attention, and the first line says why; 2 there is no run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from platform.boundary.refusals import ConfigError, build_command_line, run_command
from platform.boundary.schema import map_nested_values
from platform.boundary.terminal import escape_terminal_text
from platform.status.run_facts import ago_text, clock_text, collect_run_facts, list_status_rows
from platform.status.seen_run import RUNS, Look, list_newest_runs, open_run_directory, read_run_contents

WELL, ATTENTION = 0, 1  # exit statuses, beside REFUSED
_WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.status` (default: this process's own); return its exit status."""
    parser = build_command_line("status", __doc__)
    parser.add_argument("run", nargs="?", default="", help=f"run directory, or its URL; default: the newest in {RUNS}/")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--watch", action="store_true", help="print it again every two seconds until the run ends")
    return run_command(parser, _print_status, argv, subject="status")


def _print_status(arguments: argparse.Namespace) -> int:
    """Print the status of a run for `python -m platform.status`; return the exit status."""
    place = arguments.run or next(iter(list_newest_runs()), "")
    if not place:
        raise ConfigError("RUN_DIR", RUNS, "there is no run in it", ["the directory of a run"])
    while True:
        with open_run_directory(place) as directory:
            current_look = read_run_contents(directory, place)
        ended = current_look.evidence.end_event is not None
        if arguments.watch and sys.stdout.isatty():
            print(_CLEAR, end="")
        text = json.dumps(status_data(current_look)) if arguments.json else "\n".join(status_text(current_look))
        print(text, flush=True)
        if not arguments.watch or ended:
            return ATTENTION if current_look.verdict and current_look.verdict.attention else WELL
        time.sleep(_WATCH_SECONDS)


def status_data(look: Look) -> dict[str, Any]:
    """Return a run's status as plain data, all that `status_text` shows, with numbers as numbers."""
    verdict = look.verdict.plain_fields() if look.verdict else None
    attention = bool(verdict and verdict["attention"])
    facts = {"run": look.directory, "attention": attention, "verdict": verdict} | collect_run_facts(look)
    return map_nested_values(facts, float, lambda number: number if isfinite(number) else None)  # JSON has no NaN


def status_text(look: Look) -> Iterator[str]:
    """Yield the lines that show how a run is: first the verdict, if something is wrong, then a table."""
    if verdict := look.verdict:
        width = max(60, shutil.get_terminal_size((120, 24)).columns)
        text = escape_terminal_text(verdict.line)
        yield from textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
        when, now = verdict.since, look.evidence.now
        more = [f"since {clock_text(when)}, {ago_text(now, when)}; {verdict.sure}" if when else verdict.sure]
        more += verdict.details
        if verdict.stack:
            more += ["where it was, the innermost call last:", *(f"  {frame}" for frame in verdict.stack)]
        yield from (escape_terminal_text(f"  {line}") for line in more)
        yield ""
    named = [*list_status_rows(look)]
    width = max(len(name) for name, _ in named)
    yield from (escape_terminal_text(f"{name:{width}}  {value}") for name, value in named)


if __name__ == "__main__":
    sys.exit(main())
