"""Server of a page whose runs go on: the page itself, and server-sent events with their news.

Events, as JSON: `page`, all data anew; `rows`, the newest rows of metrics of each run; `state`, the headlines. Each has
a number, with which a browser that was cut off goes on.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from platform.report.page import content_policy, page_html
from platform.report.page_data import WatchedRun, collect_page_data, new_rows, run_headlines

_PERIOD = 1.0  # seconds between looks at the metrics,
_FULL = 10.0  # and at most between looks at all else
_BEAT = 15.0  # seconds after which a silent stream sends something, to find out whether it is still read
_KEPT = 256  # newest changes that a browser can miss and catch up with
_MOST_ROWS = 500  # of a change: more are sent as a page
_STREAMS = 32  # browsers at once
_HEAD = 10.0  # seconds that the head of a question may take to come


class LivePage:
    """Data of a served page of runs, and its changes; `watch_runs_forever` watches them in its own thread."""

    def __init__(self, runs: Sequence[WatchedRun]):
        """Look at the runs for the first time."""
        self._runs, self._changed = runs, threading.Condition()
        self._session = secrets.token_hex(4)  # numbers of another server's changes mean nothing here
        self._number, self._changes = 0, deque[tuple[list[int], str]](maxlen=_KEPT)  # (rows that hold, kind)
        self._looked = 0.0
        self._files = [run.change_signature() for run in runs]
        self._states = self._refresh_all_runs()

    def current_page_data(self) -> dict[str, Any]:
        """Return the data of the page now, with the number of the last change in it."""
        with self._changed:
            return collect_page_data(self._runs, live=True) | {"change": f"{self._session}-{self._number}"}

    def watch_runs_forever(self) -> None:
        """Look at the runs again and again, and note each change."""
        while True:
            time.sleep(_PERIOD)
            self.look_once()

    def look_once(self) -> None:
        """Look at the runs, and note a change: kind `page` if more than metrics has changed, `rows` or `state`."""
        with self._changed:
            self._note_change()

    def _note_change(self) -> None:
        """Look at the runs under the lock, and note a change."""
        before = [len(run.columns.steps) for run in self._runs]
        known = [set(run.columns.column_names) for run in self._runs]
        kept = [run.read_new_metrics() for run in self._runs]
        counts = zip(self._runs, kept, before, strict=True)
        kind = "rows" * any(k < b or len(run.columns.steps) > b for run, k, b in counts)
        if kind and any(set(run.columns.column_names) != names for run, names in zip(self._runs, known, strict=True)):
            kind = "page"
        files = [run.change_signature() for run in self._runs]
        if files != self._files or time.monotonic() - self._looked > _FULL:
            states, kind = self._refresh_all_runs(), "page" if files != self._files else kind
            kind = kind or ("state" if states != self._states else "")
            self._files, self._states = files, states
        if kind:
            self._number += 1
            self._changes.append((kept, kind))
            self._changed.notify_all()

    def wait_for_changes(self, change: str) -> Iterator[tuple[str, str, Any]]:
        """Yield the changes after `change`, each as (its number, kind, data), as they come; ("", "", None) if there was
        none for a while."""
        session, _, number = change.partition("-")
        with self._changed:
            known = session == self._session and re.fullmatch("[0-9]{1,9}", number)
            seen = int(number) if known and 0 <= self._number - int(number) <= len(self._changes) else -1
        while True:
            with self._changed:
                if seen == self._number:
                    self._changed.wait(_BEAT)
                missed = list(self._changes)[-(self._number - seen) :] if 0 <= seen < self._number else []
                missed_change = ("", "", None) if seen == self._number else self._summarise_changes(missed)
                seen = self._number
            yield missed_change

    def _refresh_all_runs(self) -> list[Any]:
        """Look at all files of the runs; return their headlines."""
        for run in self._runs:
            run.read_run_news()
        self._looked = time.monotonic()
        return run_headlines(self._runs)

    def _summarise_changes(self, missed: Sequence[tuple[list[int], str]]) -> tuple[str, str, Any]:
        """Return as one change what a browser has missed; all data if nothing is known of it."""
        number, kinds = f"{self._session}-{self._number}", {kind for _, kind in missed}
        if missed and "page" not in kinds:
            states = run_headlines(self._runs)
            if "rows" not in kinds:
                return number, "state", {"states": states}
            firsts = [min(kept) for kept in zip(*(kept for kept, _ in missed), strict=True)]
            rows = [new_rows(run.columns, first, _MOST_ROWS) for run, first in zip(self._runs, firsts, strict=True)]
            if None not in rows:
                return number, "rows", {"states": states, "rows": rows}
        return number, "page", collect_page_data(self._runs, live=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers a browser that looks at a live page."""

    server_version, sys_version, timeout = "platform.report", "", 30
    server: PageServer

    def setup(self) -> None:
        """Wait for the question of a browser, unless its head comes too slowly."""
        super().setup()
        self._deadline = threading.Timer(_HEAD, self._cut_off)
        self._deadline.daemon = True
        self._deadline.start()

    def _cut_off(self) -> None:
        """End the connection of a browser that takes too long."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Send the page, or the stream of its changes, to a browser that has the token."""
        self._deadline.cancel()
        place, _, query = self.path.partition("?")
        token, slash, path = place.removeprefix("/").partition("/")
        if not self.server.is_allowed_host(
            self.headers.get("Host", "")
        ):  # a page of elsewhere, under a name that it chose
            self.send_error(HTTPStatus.FORBIDDEN, "this page is served under its own address alone")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "the address has a token, which the command prints")
        elif slash and not path:
            text = page_html(self.server.page.current_page_data()).encode()
            self._send_head("text/html; charset=utf-8", length=len(text))
            self.wfile.write(text)
        elif path == "events":
            self._stream_changes(self.headers.get("Last-Event-ID") or query.removeprefix("change="))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_head(self, kind: str, length: int | None = None) -> None:
        """Send the head of an answer to a browser."""
        self.send_response(HTTPStatus.OK)
        more = {"Content-Length": str(length)} if length is not None else {"Connection": "close"}
        fixed = {"Content-Security-Policy": content_policy(live=True), "X-Content-Type-Options": "nosniff"}
        fixed |= {"X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        for name, value in {"Content-Type": kind, **fixed, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream_changes(self, change: str) -> None:
        """Send changes of the page to a browser until it leaves."""
        if not self.server.streams.acquire(blocking=False):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, f"{_STREAMS} browsers are looking")
            return
        try:
            self.close_connection = True
            self._send_head("text/event-stream")
            for number, kind, data in self.server.page.wait_for_changes(change):
                text = json.dumps(data, allow_nan=False, separators=(",", ":"))
                self.wfile.write((f"id: {number}\nevent: {kind}\ndata: {text}\n\n" if kind else ":\n\n").encode())
                self.wfile.flush()
        except OSError:
            return  # it has left
        finally:
            self.server.streams.release()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing of an answer to a browser."""


class PageServer(ThreadingHTTPServer):
    """Server of a live page of runs."""

    daemon_threads = True

    def __init__(self, host: str, port: int, page: LivePage):
        """Listen at an address; raises OSError if it cannot be used."""
        self.page, self.streams = page, threading.Semaphore(_STREAMS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.token = secrets.token_urlsafe(16)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/{self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing where a browser has left in the middle of a question; else the error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def is_allowed_host(self, name: str) -> bool:
        """Return True if a browser asked for the page under a name that is its own: on loopback, one of loopback."""
        host = name.rpartition(":")[0] if not name.endswith("]") and ":" in name else name
        return not _is_loopback(str(self.server_address[0])) or _is_loopback(host.strip("[]"))


def _is_loopback(host: str) -> bool:
    """Return True for a name or address by which a page's server is reached on its own machine, however spelled."""
    with suppress(ValueError):
        address = ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return host.lower().removesuffix(".") == "localhost"


def serve_page(server: PageServer) -> None:
    """Serve a live page of runs until this process is asked to end."""
    threading.Thread(target=server.page.watch_runs_forever, daemon=True).start()
    with server:
        server.serve_forever()
