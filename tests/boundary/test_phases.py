"""What takes long is shown while it lasts: as a bar on a terminal, in lines in a log; and nothing of it on stdout."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading

from platform.boundary import terminal
from platform.boundary.terminal import LongPhase, show_phase

LONG = """
import os, sys, time
from platform.boundary import terminal
from platform.boundary.terminal import print_line, show_phase
terminal.LOG_SILENCE = float(os.environ.get("LOG_SILENCE", terminal.LOG_SILENCE))
with show_phase("counting", 8, "sheep") as shown:
    for sheep in shown.iterate_parts(range(8)):
        time.sleep(0.3)
        if sheep == 5:
            print_line("said meanwhile")
print_line("result")
"""


def begun(**more: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """A command with a long phase, whose output is two pipes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_PROGRESS", "NO_COLOR")} | more
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", LONG], env=environment, text=True, **pipes), environment


def on_a_terminal(environment: dict[str, str]) -> str:
    """What the command writes on a terminal of 60 columns."""
    main, other = pty.openpty()
    size = {"TERM": "xterm-256color", "COLUMNS": "60", "LINES": "20"}
    streams = {"stdin": other, "stdout": other, "stderr": other}
    with subprocess.Popen([sys.executable, "-c", LONG], env=environment | size, **streams):
        os.close(other)
        written = b""
        while True:
            try:
                if not (part := os.read(main, 1 << 16)):
                    break
            except OSError:  # its other end is closed
                break
            written += part
    os.close(main)
    return written.decode()


def test_a_long_phase_is_shown_on_a_terminal_and_in_a_log():
    """And, as a negative control, nothing of it where the user wants none: what takes long is silent then."""
    log, environment = begun(LOG_SILENCE="1")
    seldom, _ = begun()
    silent, _ = begun(NO_PROGRESS="1")
    seen = on_a_terminal(environment)
    out, err = log.communicate(timeout=60)
    assert out == "said meanwhile\nresult\n"
    lines = err.splitlines()
    assert re.fullmatch(r"counting: [1-7] of 8 sheep, \d+ s left", lines[0]) and len(lines) <= 5
    assert re.fullmatch(r"counting: took \d+ s", lines[-1]) and "\x1b" not in err
    assert seldom.communicate(timeout=60) == ("said meanwhile\nresult\n", ""), "a log has no line on three seconds"
    assert silent.communicate(timeout=60) == ("said meanwhile\nresult\n", "")

    shown = [re.sub(r"\x1b\[[\d;]*m", "", part) for part in seen.split("\r\x1b[2K")]
    bars = [part for part in shown if part.startswith("counting ━")]
    assert len(bars) >= 3 and all(len(bar) < 60 and "\n" not in bar for bar in bars)
    assert all(re.search(r" [1-8] of 8 sheep, \d+ s( left)?$", bar) for bar in bars), bars
    assert "said meanwhile\r\n" in shown and shown[-1] == "result\r\n"


def test_a_log_gets_lines_at_intervals_that_double():
    one = LongPhase("counting", began=0.0)
    due = [second / 10 for second in range(20_000) if one.claim_log_line(second / 10)]
    assert due == [10, 20, 40, 80, 160, 320, 640, 1240, 1840]


def test_how_far_a_phase_is():
    assert LongPhase("a", began=0.0).describe_progress(12.0) == "12 s"
    assert LongPhase("a", 4, "workers", began=0.0).describe_progress(12.0) == "0 of 4 workers, 12 s"
    assert (
        LongPhase("a", 4, "workers", began=0.0, look=lambda: (3, 4)).describe_progress(12.0)
        == "3 of 4 workers, 4 s left"
    )
    assert LongPhase("a", 2e9, "B", 5e8, began=0.0).describe_progress(100.0) == "0.5 of 2.0 GB, 5 min 0 s left"
    assert LongPhase("a", 0, "characters", 1500, began=0.0).describe_progress(2.0) == "1,500 characters, 2 s"


def test_other_threads_and_short_phases_are_not_shown(monkeypatch, capsys):
    monkeypatch.delenv("NO_PROGRESS")
    monkeypatch.setattr(terminal, "SILENCE", 0.0)

    def work() -> None:
        with show_phase("hidden"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    monkeypatch.setattr(terminal, "SILENCE", 60.0)
    with show_phase("short"), show_phase("shorter"):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_page_says_when_a_log_has_its_lines(root):
    """It said 1, 2, 4 and 8 seconds."""
    one, lines = LongPhase("counting"), []
    for second in range(700):
        lines += [second] if one.claim_log_line(one.began + second) else []
    assert lines[:4] == [10, 20, 40, 80]
    assert "a line after 10, 20, 40, 80 seconds" in (root / "docs" / "watching.md").read_text()
