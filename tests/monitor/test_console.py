import io
import math

import pytest

from platform.monitor.monitor import Console, _format_duration
from tests.harness.metrics_rows import row


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(stream: io.StringIO, total_steps: int = 30, every: int = 10, seconds_per_step: float = 2.0) -> Console:
    ticks = iter(range(10**6))
    return Console(stream, total_steps=total_steps, every=every, clock=lambda: next(ticks) * seconds_per_step)


def test_plain_lines_are_aligned_and_hold_the_columns() -> None:
    out = io.StringIO()
    shown = console(out)
    for step in range(1, 31):
        shown.show_step(row(step, mfu=None if step < 21 else 0.417))
    shown.close()
    header, *lines = out.getvalue().splitlines()
    assert header.split("  ")[-1] == "time left"
    assert [line.split()[0] for line in lines] == ["1", "10", "20", "30"]
    assert len({len(line) for line in [header, *lines]}) == 1 and len(header) < 80
    assert lines[1].split() == ["10", f"{row(10).loss:.4f}", "0.333", "3.00e-03", "20,480", "~", "4", "0m40s"]
    assert lines[3].split()[5:] == ["41.7%", "4", "0m00s"]
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def test_throughput_is_the_mean_since_the_last_line() -> None:
    out = io.StringIO()
    shown = console(out, every=3)
    shown.show_step(row(1))
    shown.show_step(row(2, tokens_per_second=1000.0, step_seconds=3.0))
    shown.show_step(row(3, tokens_per_second=5000.0, step_seconds=1.0))
    assert out.getvalue().splitlines()[-1].split()[4] == "2,000"


def test_validation_loss_has_its_own_line_at_any_step() -> None:
    out = io.StringIO()
    shown = console(out)
    shown.show_step(row(1))
    shown.show_step(row(7, val_loss=6.54321))
    line = out.getvalue().splitlines()[-1]
    assert line.split() == ["7", "6.5432", "validation", "loss"]


def test_scores_of_tasks_have_a_line_and_many_are_counted() -> None:
    out = io.StringIO()
    shown = console(out)
    shown.show_step(row(7, task_scores={"mmlu/acc": 0.25, "mmlu/acc_norm": 0.5}))
    shown.show_step(row(8, task_scores={f"part{i}/acc": i / 100 for i in range(60)}))
    few, many = [line for line in out.getvalue().splitlines() if "tasks" in line]
    assert few == "      7  tasks  mmlu/acc 0.2500  mmlu/acc_norm 0.5000"
    assert many.startswith("      8  tasks  part0/acc 0.0000  part1") and many.endswith("part5/acc 0.0500  and 54 more")


def test_the_header_comes_back_about_once_a_screen() -> None:
    out = io.StringIO()
    shown = console(out, total_steps=60, every=1)
    for step in range(1, 61):
        shown.show_step(row(step))
    lines = out.getvalue().splitlines()
    assert [i for i, line in enumerate(lines) if "grad norm" in line] == [0, 26, 52]


def test_a_terminal_has_one_status_line_that_is_erased_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    shown = console(out)
    for step in (1, 2):
        shown.show_step(row(step))
    assert out.getvalue().endswith("\r\x1b[2Kstep 2/30  loss 6.8775  20,480 tokens/s  0m56s left")
    shown.say("worker 3 is gone")
    shown.close()
    assert out.getvalue().endswith("\r\x1b[2Kworker 3 is gone\n\r\x1b[2K")
    monkeypatch.setenv("COLUMNS", "20")
    shown.show_step(row(3))
    assert out.getvalue().endswith("\r\x1b[2Kstep 3/30  loss 6.5")  # a status that wraps could not be erased


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    console(out).show_step(row(1))
    assert "\x1b" not in out.getvalue()


def test_time_left_starts_afresh_after_a_rollback_and_nan_is_shown() -> None:
    out = io.StringIO()
    shown = console(out, every=1)
    for step in (1, 2, 3, 2):
        shown.show_step(row(step, loss=math.nan))
    assert [line.split()[-1] for line in out.getvalue().splitlines()[1:]] == ["~", "0m56s", "0m54s", "~"]
    assert "nan" in out.getvalue()


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0m00s"), (59.6, "1m00s"), (3599, "59m59s"), (7500, "2h05m"), (273600, "3d04h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert _format_duration(seconds) == text
