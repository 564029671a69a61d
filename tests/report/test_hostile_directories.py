"""Whatever stands in a run directory in the place of a run's file, who looks at the run gets an answer: each command in
a line or with the rest of the run, never waiting, with a bounded amount of memory, never by a traceback."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from platform.monitor.sinks.__main__ import main as sinks
from platform.plan.__main__ import main as plan
from platform.report.__main__ import main as report
from platform.status.__main__ import main as status
from tests.report.test_page_data import KEPT

FILES = ("config.yaml", "plan.json", "journal.jsonl", "metrics.jsonl", "live.json", "driver.lock", "timeline.svg")


def put(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "dangling":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "huge":
            with path.open("wb") as file:
                file.truncate(512 << 20)
        case "deep":
            path.write_text("[" * 5000)
        case "types":
            row = {"step": 1, "loss": "x", "seconds": [[]], "tokens": {}, "val_loss": True, "samples": [0, 10**15]}
            path.write_text(json.dumps(row) + "\n")
        case "numbers":
            path.write_text('{"step": 1, "loss": NaN, "tokens": 1e999, "seconds": {"a": -Infinity}}\n')
        case "strings":  # as a run writes what is not finite
            path.write_text('{"step": 1, "loss": "NaN", "step_seconds": "Infinity", "val_loss": "-Infinity"}\n')


KINDS = ("pipe", "device", "folder", "dangling", "loop", "huge", "deep", "types", "numbers", "strings")


@pytest.fixture
def bounded() -> Iterator[None]:
    """Keeps what is read without a bound from taking the machine's memory."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as file:
        [used] = [int(line.split()[1]) << 10 for line in file if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, (used + (400 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("kind", KINDS)
def test_looks(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in FILES:
        run = shutil.copytree(KEPT, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
        put(run / name, kind)
        assert report([str(run)]) == 0, name
        assert status([str(run)]) in (0, 1, 2), name
        capsys.readouterr()
        assert status([str(run), "--json"]) in (0, 1, 2), name
        if text := capsys.readouterr().out:
            json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        if name == "config.yaml":
            assert sinks([str(run), "tensorboard"]) in (0, 1, 2)
            assert len(capsys.readouterr().err.splitlines()) <= 2
        shutil.rmtree(run)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_hardware(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "t.csv", kind)
    put(tmp_path / "h.yaml", kind)
    assert plan(["compare", str(tmp_path / "t.csv")]) == 2
    assert plan(["+experiment=gpt_quick", "--hardware", str(tmp_path / "h.yaml")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_directory_whose_name_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe2\x80\xae"))
    shutil.copytree(KEPT, run, ignore=shutil.ignore_patterns("checkpoints"))
    assert report([str(run)]) == 0 and (run / "report.html").stat().st_size > 50_000
    assert "\u202e" not in capsys.readouterr().out
