"""`python -m platform.report RUN_DIR [RUN_DIR ...]` writes one HTML page on a run, or on several beside each other.

The page needs no network and no account: what a run learned, how fast, where its time and its bytes went, what failed
and what that cost. The run may go on meanwhile.
`--serve` keeps it up to date in a browser instead, on this machine alone unless --host says otherwise.
Exit status: 0 written; 1 it could not be served; 2 the command line is wrong, or its file cannot be written.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from platform.boundary.documents import printable_line
from platform.boundary.local_files import ReplacedFile, may_be_replaced
from platform.boundary.refusals import DONE, ConfigError, build_command_line, format_violation, run_command
from platform.boundary.terminal import print_line, show_phase
from platform.report.page import page_html
from platform.report.page_data import WatchedRun, collect_page_data

PORT = 8600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.report`; return its exit status."""
    parser = build_command_line("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directories, compared if several")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="default: report.html in the first RUN_DIR")
    serve_help = f"serve it, at http://127.0.0.1:{PORT}/"
    parser.add_argument("--serve", type=_parse_port, nargs="?", const=PORT, metavar="PORT", help=serve_help)
    parser.add_argument("--host", default="127.0.0.1", help="with --serve: address to serve it at")
    return run_command(parser, _write_or_serve_page, arguments, failures=(OSError,))


def _parse_port(text: str) -> int:
    """Parse the port at which a page is served. Raises ArgumentTypeError unless it is one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 (any) to 65535, not {text!a}")
    return int(text)


def _serve_runs(runs: Sequence[WatchedRun], host: str, port: int) -> int:
    """Serve a live page of runs until this process is asked to end; return the exit status."""
    from platform.report.page_server import LivePage, PageServer, serve_page

    try:
        if not host:  # as of a variable that is not set: it would be every address
            raise OSError("it is empty")
        server = PageServer(host, port, LivePage(runs))
    except (OSError, ValueError, TypeError) as error:
        if getattr(error, "errno", None) not in (errno.EADDRINUSE, errno.EACCES):
            reason = f"is no address of this machine: {printable_line(error)}"
            raise ConfigError("--host", host, reason, ["127.0.0.1"]) from None
        nearest = [f"--serve {port + 1}", "--serve 0"] if port < 65535 else ["--serve 0"]
        fault = format_violation("--serve", f"{host}:{port}", f"cannot be used: {printable_line(error)}", nearest)
        raise ConfigError([fault]) from None
    print_line(f"http://{server.address}/ until Ctrl-C")
    serve_page(server)
    return DONE


def _write_or_serve_page(arguments: argparse.Namespace) -> int:
    """Write the page that the command line asks for; return the exit status."""
    missing = [run for run in arguments.runs if not run.is_dir()]
    if missing:
        raise ConfigError([format_violation("RUN_DIR", run, "is no directory") for run in missing])
    runs = [WatchedRun(run.resolve()) for run in arguments.runs]
    if arguments.serve is not None:
        return _serve_runs(runs, arguments.host, arguments.serve)
    output = arguments.output or arguments.runs[0] / "report.html"
    if not arguments.output and not may_be_replaced(output):
        # in the directory of anybody: what it leads to was not asked for
        raise ConfigError("--output", output, "is no regular file", ["--output FILE.html"])
    page_file = ReplacedFile(output, "--output")
    with show_phase("reading the run" if len(runs) == 1 else "reading the runs"):
        for run in runs:
            run.read_run_news()
        text = page_html(collect_page_data(runs))
    page_file.write(text)
    print_line(f"{output}: {len(text.encode()) / 1e6:.2f} MB")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
