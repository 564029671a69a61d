"""The day of one GPU: each part gives a line and a row of JSON, whatever it does, and the next one runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import PARTS, Part, Place, spend_day

DOUBLES = "tests.doubles.day_parts"
IN_RANGE = {"low": (0.5, 1.5), "high": (0.5, 1.5)}
STOPPED = """
import sys
from benchmarks import gpu_day
gpu_day.PARTS = {"hangs": gpu_day.Part("tests.doubles.day_parts:hang", 60, {}, (sys.argv[1] + "/hung",))}
sys.argv[1:] = ["--out", sys.argv[1]]
sys.exit(gpu_day.main())
"""
GPU_ALONE = {"planned_over_allocated", "fp8_blocks_of_llama_8b_times"}  # figures that a CPU has not
CHEAP = ("peaks", "gpt2_124m", "llama_1b", "llama_8b_8", "llama_8b_fp8", "numbers", "host", "launches")


def double(name: str, limit: float = 60, arguments: tuple = (), **more) -> Part:
    return Part(f"{DOUBLES}:{name}", limit, IN_RANGE, arguments, **more)


def rows_of(out: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in (out / "gpu_day.jsonl").read_text().splitlines()]
    return {row["part"]: row for row in rows}


def ended(pid: int) -> bool:
    """Return True once a process has ended, or is a zombie that nobody reads."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_every_part_has_a_line_and_a_row_however_it_ends(tmp_path, capsys):
    parts = {
        "good": double("measure_all", arguments=(1.0, 2000.0)),
        "raises": double("raise_late"),
        "hangs": double("hang", 2.0, (str(tmp_path / "hung"),)),
        "litters": double("leave_child", arguments=(str(tmp_path / "left"),)),
        "crashes": double("crash"),
        "leaves": double("leave"),
        "missing": double("no_such_function"),
        "last": double("measure_all", arguments=(0.25, 1.0)),
    }
    failures, late = spend_day(parts, "cuda", False, 300, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert (failures, late) == (5, []) and len(lines) == len(parts)
    told = {line.partition(" ")[0]: re.sub(r"^\w+ \(\d+ s\): ", "", line) for line in lines}
    inside = "low 1 (expected 0.5 to 1.5)"
    assert told == {
        "good": f"{inside}, high 2,000 (expected 0.5 to 1.5: above), device cuda",
        "raises": f"{inside}, failed: ValueError: no such kernel",
        "hangs": f"{inside}, failed: not done after 2 s",
        "litters": f"{inside}, high - (expected 0.5 to 1.5)",
        "crashes": "failed: ended by SIGSEGV",
        "leaves": "failed: status 3",
        "missing": "failed: AttributeError: module 'tests.doubles.day_parts' has no attribute 'no_such_function'",
        "last": "low 0.25 (expected 0.5 to 1.5: below), high 1 (expected 0.5 to 1.5), device cuda",
    }
    rows = rows_of(tmp_path)
    assert list(rows) == list(parts)
    assert rows["good"]["figures"] == {"low": 1.0, "high": 2000.0, "device": "cuda", "listed": [1, 2]}
    assert rows["raises"]["failed"] == "ValueError: no such kernel" and rows["good"]["failed"] == ""
    assert "a line that is not a figure" in (tmp_path / "gpu_day.log").read_text()
    assert all(ended(int((tmp_path / name).read_text())) for name in ("hung", "left"))


def test_parts_that_no_time_is_left_for_are_named(tmp_path, capsys):
    parts = {"first": double("measure_all", arguments=(1, 1)), "second": double("measure_all", arguments=(1, 1))}
    assert spend_day(parts, "cpu", True, gpu_day.LEAST - 1, tmp_path) == (0, ["first", "second"])
    assert capsys.readouterr().out == "" and not (tmp_path / "gpu_day.jsonl").exists()


def test_a_part_of_the_pinned_torch_is_skipped_under_another(tmp_path, capsys, monkeypatch):
    pinned = re.search(r"^torch==(\S+)$", Path(gpu_day.ROOT, "requirements.txt").read_text(), re.M)[1]
    parts = {"exact": double("measure_all", arguments=(1, 1), pinned=True)}
    for installed, skips in ((f"{pinned}+cu132", False), ("2.11.0+cu130", True)):
        monkeypatch.setattr(gpu_day, "version", lambda name, installed=installed: installed)
        assert spend_day(parts, "cpu", True, 300, tmp_path) == (0, [])
        said = f"skipped: needs torch {pinned}, which this project pins; 2.11.0 is installed"
        assert capsys.readouterr().out.endswith(f"(0 s): {said}\n") == skips
        assert bool(rows_of(tmp_path)["exact"]["skipped"]) == skips


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchmarks.gpu_day", *arguments], cwd=gpu_day.ROOT, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


def test_the_command_prints_figures_of_the_device_and_keeps_more(tmp_path):
    command = run_command("--device", "cpu", "--tiny", "--only", "peaks", "--out", str(tmp_path))
    assert command.returncode == 0, command.stdout + command.stderr
    assert re.fullmatch(r"peaks \(\d+ s\): torch \S+, name cpu, .*square_tflops \S+ \(expected 740 to 830\), .*\n",
                        command.stdout)  # fmt: skip
    figures = rows_of(tmp_path)["peaks"]["figures"]
    assert figures["products"]["gpt2 up"]["bf16"] == figures["gpt2_up_tflops"]


def test_a_part_ends_with_the_command(tmp_path):
    """Its process would keep the GPU's memory."""
    words = [sys.executable, "-c", STOPPED, str(tmp_path)]
    with subprocess.Popen(words, cwd=gpu_day.ROOT) as command:
        while not (pid := tmp_path / "hung").exists() or not pid.read_text():
            time.sleep(0.05)
        command.terminate()
        assert command.wait(30) == 143
    assert ended(int(pid.read_text()))


def test_a_part_that_is_not_there_is_refused(tmp_path):
    command = run_command("--only", "peaks,peak", "--out", str(tmp_path / "out"))
    assert command.returncode == 2 and "--only=peak: parts are peaks, gpt2_124m" in command.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CHEAP)
def test_a_part_knows_the_figures_that_are_expected(name, tmp_path):
    from benchmarks import gpu_parts

    part, figures = PARTS[name], {}
    module, _, function = part.work.partition(":")
    assert module == gpu_parts.__name__
    for known in getattr(gpu_parts, function)(*part.arguments, Place("cpu", True, tmp_path)):
        figures |= json.loads(json.dumps(known, allow_nan=False))
    assert part.expected.keys() <= figures.keys() | GPU_ALONE
    assert all(math.isfinite(figures[name]) for name in part.expected.keys() & figures.keys())


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in PARTS if name not in CHEAP])
def test_a_dear_part_knows_the_figures_that_are_expected(name, tmp_path, capsys):
    assert spend_day({name: PARTS[name]._replace(limit=240)}, "cpu", True, 240, tmp_path) == (0, [])
    figures = rows_of(tmp_path)[name]["figures"]
    assert PARTS[name].expected.keys() <= figures.keys() | GPU_ALONE
    assert f"{name} (" in capsys.readouterr().out


def test_parts_have_ranges_and_limits():
    assert all(low <= high for part in PARTS.values() for low, high in part.expected.values())
    assert all(part.limit <= 120 and part.expected for part in PARTS.values())


def test_a_failure_is_timed_from_its_fault(tmp_path):
    from benchmarks.gpu_parts import failure_times

    events = [("formed", 1), ("first_step", 2), ("injected", 10), ("failure", 11), ("released", 12.5),
              ("rolled_back", 13), ("first_step", 14.25), ("first_step", 30)]  # fmt: skip
    rows = [{"event": event, "time": when, "steps_lost": 2} for event, when in events]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = failure_times(tmp_path / "journal.jsonl")
    assert times == {"released_s": 2.5, "next_step_s": 4.25, "steps_lost": 2}
