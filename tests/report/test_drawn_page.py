"""What a browser makes of a page: where one is installed, its document is read after the scripts have run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from platform.monitor import events, journal
from platform.report.__main__ import main

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")


def write_run(folder: Path, losses: list[float], validation: list[float], **config: Any) -> Path:
    """Write a run with such losses of its steps, and validation losses of the last of them."""
    folder.mkdir()
    lines = journal.Journal(folder / "journal.jsonl")
    lines.write(events.Starting(world_size=2, cluster="inline", device="cpu", command="python -m x seed=1", git="abc"))
    lines.write(events.Done(step=len(losses), saved=len(losses)))
    lines.close()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "plan.json").write_text(json.dumps({"parameter_count": 1234567}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            row = {"step": step, "loss": loss, "tokens": 10 * step, "step_seconds": 0.5, "predicted_seconds": 0.125}
            row |= {"world_size": 2, "seconds": {"forward": 0.25}, "parts": {"attention": 0.125}}
            if step > len(losses) - len(validation):
                row["val_loss"] = validation[step - len(losses) - 1]
            file.write(json.dumps(row) + "\n")
    return folder


def drawn(page: Path, profile: Path, width: int = 1400) -> str:
    """Return the document of a page after its scripts have run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    command = [str(BROWSER), *options, f"--user-data-dir={profile}", f"--window-size={width},900", f"file://{page}"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return text.partition('<script type="application/json"')[0]


def test_the_page_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [3.0, 2.0, 1.5], [2.5, 2.25], seed=3)
    assert main([str(run)]) == 0
    text = drawn(run / "report.html", tmp_path / "profile")
    assert "cannot be drawn" not in text
    assert "decoder, 2 layers of 64, 1,234,567 parameters, fp32" in text and "git abc" in text
    assert "python -m x seed=1" in text
    loss, *_ = text.partition("Loss, of training and of validation")[2].split("<h3")
    assert "training <span" in loss and "validation <span" in loss  # in one chart
    assert text.count("<h3") and ">Seconds by phase</option>" in text and ">Seconds by part of the slowest" in text
    assert "All along: Workers: 2" in text and "<h3>Workers" not in text  # what never changes is no chart
    assert "Predicted is what the plan costs" in text and 'type="range"' in text and "y: logarithmic" in text
    assert "as usual" not in text


def test_no_tile_of_a_phone_stands_beside_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [3.0, 2.0, 1.5], [2.5], seed=3)
    assert main([str(run)]) == 0
    text = drawn(run / "report.html", tmp_path / "profile", width=500)
    columns = int(text.partition('class="tiles" style="grid-template-columns: repeat(')[2].partition(",")[0])
    tiles = text.partition('class="tiles"')[2].partition("<dl")[0].count("<b>")
    assert columns == 3 and (tiles % columns != 1 or "grid-column: 1 / -1" in text)


def test_runs_of_a_sweep_are_a_table_with_the_best_first(tmp_path: Path) -> None:
    ends = {"a": (0.1, [2.5, 2.25]), "b": (0.2, [1.5, 1.75]), "c": (0.3, [])}
    runs = [
        str(write_run(tmp_path / name, [3.0, 2.0, 4.0], validation, optimizer={"lr": lr}, run={"dir": name}))
        for name, (lr, validation) in ends.items()
    ]
    assert main([*runs, "--output", str(tmp_path / "page.html")]) == 0
    text = drawn(tmp_path / "page.html", tmp_path / "profile")
    head, *rows = text.partition("<table")[2].partition("</table>")[0].split("<tr")[1:]
    assert "optimizer.lr" in head and "best validation loss" in head and "last loss" in head and "run.dir" not in head
    cells = [row.replace("</td>", "|").replace("</span>", "") for row in rows]
    assert [[value in cell for value in ("0.2|", "4.0000|", "1.5000|")] for cell in cells][0] == [True] * 3
    assert "0.1|" in cells[1] and "2.2500|" in cells[1] and "0.3|" in cells[2] and len(cells) == 3


def test_a_curve_is_smoothed_and_its_axis_logarithmic(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [4.0, 2.0, 2.0], [3.0], seed=3)
    assert main([str(run)]) == 0
    text = (run / "report.html").read_text()
    moved = """<script>
    const slider = document.querySelector("#tools input"), [, y] = document.querySelectorAll("#tools select");
    slider.value = 0.5;
    slider.dispatchEvent(new Event("input"));
    y.value = "log";
    y.dispatchEvent(new Event("change"));
    document.title = JSON.stringify([uPlotData, state.log]);
    </script>"""
    kept = "const u = new uPlot({"  # the last chart's data are looked at
    head, meta, tail = text.partition('<meta http-equiv="Content-Security-Policy"')
    assert meta and kept in tail
    tail = tail.partition(">")[2].replace(
        kept, "if (!panel.kind && !globalThis.uPlotData) globalThis.uPlotData = data; " + kept
    )
    tail = tail.replace("function redrawCharts() {", "function redrawCharts() { globalThis.uPlotData = null;", 1)
    page = tmp_path / "moved.html"
    page.write_text((head + tail).replace("</html>", moved + "</html>"))
    title = drawn(page, tmp_path / "profile").partition("<title>")[2].partition("</title>")[0]
    [data, log] = json.loads(title)
    assert log and data[0] == [10, 20, 30]
    assert data[1] == pytest.approx([4, 8 / 3, 16 / 7], abs=1e-6) and data[2] == [4, 2, 2]  # the curve stays behind it
