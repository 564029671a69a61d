"""A served page: whoever looks sees what a run writes, whoever was cut off goes on, and nobody else is answered."""

from __future__ import annotations

import http.client
import itertools
import json
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from platform.monitor import events, journal
from platform.report.__main__ import main
from platform.report.page_data import WatchedRun
from platform.report.page_server import LivePage, PageServer


def add_rows(run: Path, *steps: int, **more: Any) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "loss": step / 4, "tokens": 10 * step, "step_seconds": 36.0} | more
            file.write(json.dumps(row) + "\n")


def add_event(run: Path, event: events.JournalEvent) -> None:
    lines = journal.Journal(run / "journal.jsonl")
    lines.write(event)
    lines.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    add_event(tmp_path, events.Starting(world_size=1, cluster="inline", device="cpu"))
    add_rows(tmp_path, 1, 2, 3)
    return tmp_path


@pytest.fixture
def page(run: Path) -> LivePage:
    return LivePage([WatchedRun(run)])


def change_of(page: LivePage) -> str:
    return page.current_page_data()["change"]


def test_new_rows_come_as_rows(page: LivePage, run: Path) -> None:
    news = page.wait_for_changes(change_of(page))
    add_rows(run, 4, 5)
    page.look_once()
    number, kind, data = next(news)
    assert kind == "rows" and number == change_of(page)
    [rows] = data["rows"]
    assert rows["grid"] == {"step": [4, 5], "tokens": [40, 50], "hours": [0.04, 0.05]}
    assert rows["of"]["train/loss"] == [1.0, 1.25]
    assert data["states"][0]["tiles"][0][1] == "5"


def test_a_rollback_takes_rows_back(page: LivePage, run: Path) -> None:
    news = page.wait_for_changes(change_of(page))
    add_rows(run, 4)
    page.look_once()
    add_rows(run, 2, 3, loss="NaN")
    page.look_once()
    _, kind, data = next(news)  # of two changes at once
    assert (kind, data["rows"][0]["grid"]["step"], data["rows"][0]["of"]["train/loss"]) == (
        "rows",
        [2, 3],
        [None, None],
    )


@pytest.mark.parametrize("more", [{"val_loss": 3.0}, {"lr": 0.5}, {"comm_bytes": {"send/stage": 7}}])
def test_what_charts_do_not_have_yet_comes_as_a_page(page: LivePage, run: Path, more: dict[str, Any]) -> None:
    news = page.wait_for_changes(change_of(page))
    add_rows(run, 4, **more)
    page.look_once()
    _, kind, data = next(news)
    assert kind == "page" and data["runs"][0]["curves"]["grids"][0]["step"] == [1, 2, 3, 4]


def test_an_event_comes_as_a_page(page: LivePage, run: Path) -> None:
    news = page.wait_for_changes(change_of(page))
    add_event(run, events.Done(step=3, saved=3))
    page.look_once()
    _, kind, data = next(news)
    assert kind == "page" and data["live"] and data["runs"][0]["state"]["tone"] == "good"


def test_a_driver_that_dies_comes_at_the_next_look(run: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (run / "driver.lock").write_text(f"process {driver.pid} on {socket.gethostname()}")
    page = LivePage([WatchedRun(run)])
    news = page.wait_for_changes(change_of(page))
    driver.kill()
    driver.wait()
    page.look_once()
    _, kind, data = next(news)
    assert kind == "page" and "the driver died" in json.dumps(data["runs"][0]["state"])


def test_without_a_change_there_is_no_news(page: LivePage, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.report.page_server._BEAT", 0.01)
    news = page.wait_for_changes(change_of(page))
    page.look_once()
    assert next(news) == ("", "", None)


@pytest.mark.parametrize("change", ["", "x", "other-0", "{session}-99", "{session}-x", "{session}--1"])
def test_a_browser_of_another_server_gets_a_page(page: LivePage, change: str) -> None:
    session = change_of(page).partition("-")[0]
    assert next(page.wait_for_changes(change.replace("{session}", session)))[1] == "page"


@pytest.fixture
def server(page: LivePage) -> Iterator[PageServer]:
    page_server = PageServer("127.0.0.1", 0, page)
    thread = threading.Thread(target=page_server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield page_server
    page_server.shutdown()
    page_server.server_close()
    thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=5)
    connection.request(method, path.replace("TOKEN", server.token), headers=headers)
    return connection.getresponse()


def test_the_page_is_served_with_its_policy(server: PageServer) -> None:
    answer = ask(server, "/TOKEN/")
    text = answer.read().decode()
    assert answer.status == 200 and '"live":true' in text and "connect-src 'self'" in text
    assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Frame-Options"] == "DENY" and answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path, method, host, status",
    [
        ("/TOKEN/", "GET", "localhost:80", 200),
        ("/TOKEN/", "GET", "LOCALHOST.", 200),
        ("/TOKEN/", "GET", "[::1]:80", 200),
        ("/TOKEN/", "GET", "[0:0:0:0:0:0:0:1]", 200),
        ("/TOKEN/", "GET", "[::ffff:127.0.0.1]:1", 200),
        ("/TOKEN/", "GET", "127.0.0.2:8600", 200),
        ("/TOKEN/", "GET", "evil.example", 403),
        ("/TOKEN/", "GET", "0.0.0.0", 403),
        ("/TOKEN/", "GET", "", 403),
        ("/TOKEN/events", "GET", "127.0.0.1.evil.example:8600", 403),
        ("/", "GET", "localhost", 403),
        ("/TOKEN", "GET", "localhost", 404),
        ("/events", "GET", "localhost", 403),
        ("/TOKENx/", "GET", "localhost", 403),
        (f"/{'x' * 9000}/", "GET", "localhost", 403),
        ("/%e9/", "GET", "localhost", 403),
        ("/TOKEN/../journal.jsonl", "GET", "localhost", 404),
        ("/TOKEN/journal.jsonl", "GET", "localhost", 404),
        ("/TOKEN/", "POST", "localhost", 501),
    ],
)
def test_nothing_else_is_answered(server: PageServer, path: str, method: str, host: str, status: int) -> None:
    assert ask(server, path, method, Host=host).status == status


def test_a_browser_that_leaves_in_the_middle_is_no_error(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(server.server_address[:2], timeout=5) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets the connection
        gone.sendall(b"GET / HT")
    assert ask(server, "/TOKEN/").status == 200
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(5)
    assert capfd.readouterr().err == ""


def test_changes_are_streamed(server: PageServer, run: Path) -> None:
    answer = ask(server, f"/TOKEN/events?change={change_of(server.page)}")
    assert answer.headers["Content-Type"] == "text/event-stream"
    add_rows(run, 4)
    server.page.look_once()
    number, kind, data, end = (answer.readline().decode() for _ in range(4))
    assert (number, kind, end) == (f"id: {change_of(server.page)}\n", "event: rows\n", "\n")
    assert json.loads(data.removeprefix("data: "))["rows"][0]["grid"]["step"] == [4]
    again = ask(server, "/TOKEN/events", **{"Last-Event-ID": "gone-1"})
    again.readline()
    assert again.readline() == b"event: page\n"


@pytest.mark.parametrize("bound", ["127.0.0.1", "127.0.0.2", "::1"])
def test_whatever_loopback_it_is_served_at_it_knows_its_own_names(page: LivePage, bound: str) -> None:
    try:
        server = PageServer(bound, 0, page)
    except OSError:
        pytest.skip(f"there is no {bound} here")
    with server:
        assert (
            server.is_allowed_host("localhost:1")
            and server.is_allowed_host("[::1]")
            and server.is_allowed_host("127.0.0.1:1")
        )
        assert not server.is_allowed_host("evil.example:1") and not server.is_allowed_host("localhost.evil.example")


def test_a_head_that_comes_slowly_is_not_waited_for(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.report.page_server._HEAD", 0.2)
    before = set(threading.enumerate())
    with socket.create_connection(server.server_address[:2], timeout=10) as slow:
        with suppress(OSError):
            for byte in itertools.repeat(b"G"):
                slow.sendall(byte)
                time.sleep(0.05)
                if select.select([slow], [], [], 0)[0]:
                    break
        with suppress(ConnectionError):
            slow.recv(1 << 16)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
    monkeypatch.undo()
    assert ask(server, "/TOKEN/").status == 200


@pytest.mark.parametrize("host", ["", "no-such-host.invalid", "\udcff", "192.0.2.1", "a" * 70])
def test_a_host_that_cannot_be(run: Path, capfd: pytest.CaptureFixture[str], host: str) -> None:
    assert main([str(run), "--serve", "0", "--host", host]) in (2, 69)  # a name that nobody knows now may come
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("report: --host=") and line.endswith("nearest legal: 127.0.0.1")


@pytest.mark.parametrize(
    "port, says", [("x", "must be a port"), ("70000", "must be a port"), ("taken", "nearest legal")]
)
def test_a_port_that_cannot_be(
    server: PageServer, run: Path, capfd: pytest.CaptureFixture[str], port: str, says: str
) -> None:
    argument = port.replace("taken", str(server.server_address[1]))
    try:
        status = main([str(run), "--serve", argument])
    except SystemExit as end:
        status = end.code
    assert status == 2 and says in capfd.readouterr().err
