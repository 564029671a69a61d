"""One GPU in seven minutes: what is worth knowing first, a line for each part as soon as it is known.

    python -m benchmarks.gpu_day [--seconds 420] [--only peaks,gpt2_124m] [--out build/gpu_day] [--device cpu --tiny]

Each part is a process of its own, which ends by itself or at its limit. Its line has every figure beside the range that
is expected of an H200, or `failed: ` and why, after the figures that were known by then; the next part begins in any
case. OUT/gpu_day.jsonl has the same and more (the longest kernels, products by shape), OUT/gpu_day.log what parts
printed. Parts are in the order of what they are worth; those that no time is left for are named in the end. Let nothing
else run on the GPU, nor on its host. `--tiny`: models so small that a CPU steps them in moments, which shows that every
part runs. What is measured is in `gpu_parts.py`. Ranges: the planner's and a roofline by hand, and one H200's figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEAST = 20.0  # seconds in which a part can start and say something
CHILD = "import json, sys; from benchmarks.gpu_day import compute_part; compute_part(*json.loads(sys.argv[1]))"
LONGEST = 200  # characters of a reason

Range = tuple[float, float]


class Place(NamedTuple):
    """Where a part computes. `folder`: its own, which goes when it ends."""

    device: str
    tiny: bool
    folder: Path


class Part(NamedTuple):
    """A part of the day. `work`: "module:function", called with `arguments` and a Place, which yields figures by name
    as they become known; numbers and texts are printed, the rest is for the JSON alone. `limit`: seconds; `expected`:
    the range of a figure on an H200; `pinned`: whether the ranges hold for the torch that this project pins alone."""

    work: str
    limit: float
    expected: Mapping[str, Range]
    arguments: tuple[Any, ...] = ()
    pinned: bool = False


MODEL = "benchmarks.gpu_parts:measure_model"
PARTS = {
    "peaks": Part("benchmarks.gpu_parts:measure_peaks", 60, {
        "copy_tb_s": (4.1, 4.5), "square_tflops": (740, 830), "gpt2_up_tflops": (500, 680),
        "odd_vocab_times": (1.0, 4.0), "fp8_of_llama_8b_times": (1.5, 1.9), "fp8_of_gpt2_times": (0.8, 1.2),
        "fp8_blocks_of_llama_8b_times": (1.3, 1.8),
        "attention_tflops": (350, 650), "best_over_flash_times": (1.0, 1.8)}),
    "gpt2_124m": Part(MODEL, 110, {
        "ours_ms": (19, 27), "mfu": (0.26, 0.37), "host_ms": (8, 25), "kernels_ms": (18, 20.5),
        "planned_over_allocated": (0.95, 1.1), "plain_ms": (19, 24), "ratio": (0.9, 1.15)}, ("gpt2_124m", True, 12)),
    "gpt2_124m_64": Part(MODEL, 80, {
        "ours_ms": (142, 165), "mfu": (0.35, 0.41), "kernels_ms": (140, 162), "planned_over_allocated": (0.95, 1.1),
        "ratio": (0.95, 1.05)}, ("gpt2_124m_64", True, 5)),
    "numbers": Part("benchmarks.gpu_parts:compare_numbers", 70, {"fp64_equal": (6, 6), "bf16_apart": (0.0, 0.02)}),
    "run": Part("benchmarks.gpu_parts:run_training", 80, {
        "tokens_per_s": (385_000, 450_000), "mfu": (0.33, 0.41), "snapshot_share": (0.0, 0.03),
        "between_share": (0.0, 0.05)}),
    "llama_1b": Part(MODEL, 100, {
        "ours_ms": (105, 140), "mfu": (0.48, 0.6), "planned_over_allocated": (0.95, 1.1), "ratio": (0.95, 1.05)},
        ("llama_1b", True, 5)),
    "llama_8b_8": Part(MODEL, 100, {
        "ours_ms": (240, 290), "mfu": (0.5, 0.6), "planned_over_allocated": (0.95, 1.1)}, ("llama_8b_8", False, 4)),
    "llama_8b_fp8": Part("benchmarks.gpu_parts:compare_precisions", 110, {"times_bf16": (1.1, 1.35)},
                         ("llama_8b_8", "fp8", 4)),
    "host": Part("benchmarks.gpu_parts:measure_host", 70, {"layer_ms": (0.2, 1.5), "beside_layers_ms": (0.5, 6)}),
    "launches": Part("benchmarks.gpu_parts:count_launches", 90, {"gpt": (36, 44), "llama": (27, 36)}, pinned=True),
    "gpt3_1_3b": Part(MODEL, 110, {"mfu": (0.44, 0.52), "ratio": (0.95, 1.02)}, ("gpt3_1_3b", True, 4)),
    "gpt2_350m": Part(MODEL, 90, {"mfu": (0.37, 0.44), "ratio": (0.95, 1.08)}, ("gpt2_350m", True, 5)),
    "failure": Part("benchmarks.gpu_parts:lose_a_rank", 90, {
        "released_s": (0.0, 5.5), "next_step_s": (0.0, 6.5), "steps_lost": (0, 0)}),
}  # fmt: skip


def compute_part(work: str, arguments: Sequence[Any], place: Sequence[Any], path: str) -> None:
    """Compute a part in this process, and keep the figures that it has by now in the file `path`."""
    device, tiny, folder = place
    module, _, function = work.partition(":")
    figures: dict[str, Any] = {}
    for known in getattr(importlib.import_module(module), function)(*arguments, Place(device, tiny, Path(folder))):
        figures |= known
        Path(f"{path}.new").write_text(json.dumps(figures))
        os.replace(f"{path}.new", path)


def run_part(part: Part, device: str, tiny: bool, limit: float, log: Path) -> tuple[dict[str, Any], str]:
    """Run a part in a process of its own for at most `limit` seconds; return its figures, and why it failed or ""."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, log.open("ab") as printed:
        path, begin = Path(folder, "figures.json"), printed.tell()
        words = json.dumps([part.work, part.arguments, [device, tiny, folder], str(path)])
        child = subprocess.Popen([sys.executable, "-c", CHILD, words], cwd=ROOT, stdin=subprocess.DEVNULL,
                                 stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            status: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(child)
        figures = json.loads(path.read_text()) if path.exists() else {}
        return figures, explain_end(status, limit, log.read_bytes()[begin:].decode(errors="replace"))


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a part's process and all that it started and left behind, which would keep the GPU's memory."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def explain_end(status: int | None, limit: float, printed: str) -> str:
    """Return why a part failed, in a line: "" for status 0; None is its limit."""
    if status is None:
        return f"not done after {limit:.0f} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line.strip() for line in printed.splitlines() if line.strip()] or [f"status {status}"]
    # of an error: its first line, which begins with the error's name where a traceback ends
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit|Iteration|Aborted)\b", line)]
    return "" if status == 0 else (errors or lines)[-1][:LONGEST]


def reason_to_skip(part: Part) -> str:
    """Return why a part cannot say anything here, or "": its ranges hold for the torch that is pinned alone."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M)
    assert pinned
    try:
        installed = version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "torch is not installed"
    if part.pinned and installed != pinned[1]:
        return f"needs torch {pinned[1]}, which this project pins; {installed} is installed"
    return ""


def format_figure(name: str, value: float | str, expected: Range | None, judged: bool) -> str:
    """Return a figure as it is printed, with its range and, where it is `judged`, on which side of that it lies."""
    text = value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if expected is None or isinstance(value, str):
        return f"{name} {text}"
    low, high = expected
    side = ": below" if value < low else ": above" if value > high else ""
    return f"{name} {text} (expected {low:,g} to {high:,g}{side if judged else ''})"


def describe_part(row: Mapping[str, Any], judged: bool) -> str:
    """Return the line of a part from its row of JSON. `judged`: whether the ranges are meant for this device."""
    figures, expected = row["figures"], row["expected"]
    shown = [format_figure(name, value, expected.get(name), judged) for name, value in figures.items()
             if isinstance(value, int | float | str)]  # fmt: skip
    if not row["failed"]:  # what a part could not measure is told too
        shown += [f"{name} - (expected {low:,g} to {high:,g})" for name, (low, high) in expected.items()
                  if name not in figures and not row["skipped"]]  # fmt: skip
    ends = [f"{word}: {row[word]}" for word in ("failed", "skipped") if row[word]]
    return " ".join(f"{row['part']} ({row['seconds']:.0f} s): {', '.join(shown + ends)}".split())


def spend_day(parts: Mapping[str, Part], device: str, tiny: bool, seconds: float, out: Path) -> tuple[int, list[str]]:
    """Run parts one after another for so many seconds, and print and keep the line of each; return how many failed, and
    the names of those that no time was left for."""
    out.mkdir(parents=True, exist_ok=True)
    end, failures, late = time.monotonic() + seconds, 0, []
    for name, part in parts.items():
        if (left := end - time.monotonic()) < LEAST:
            late.append(name)
            continue
        begin, figures, failed = time.monotonic(), {}, ""
        if not (skipped := reason_to_skip(part)):
            figures, failed = run_part(part, device, tiny, min(left, part.limit), out / "gpu_day.log")
        row = {"part": name, "seconds": round(time.monotonic() - begin, 1), "device": device, "tiny": tiny,
               "figures": figures, "expected": dict(part.expected), "failed": failed, "skipped": skipped}  # fmt: skip
        with (out / "gpu_day.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        print(describe_part(row, judged=device == "cuda" and not tiny), flush=True)
        failures += bool(failed)
    return failures, late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420, help="for all parts together")
    parser.add_argument("--only", default="", help=f"names, with commas, of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_day"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="models that a CPU steps in moments")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only={','.join(unknown)}: parts are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and with it the part under way
    chosen = {name: PARTS[name] for name in names}
    failures, late = spend_day(chosen, arguments.device, arguments.tiny, arguments.seconds, arguments.out)
    if late:
        print(f"no time left for: --only {','.join(late)}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
