"""Streams beside sources that are tokenised first: seconds to the first step, seconds of a step, tokens on disk.

    OMP_NUM_THREADS=1 python benchmarks/streaming.py --megabytes 200

Two processes train the same small model on the same records, with a tokenizer that exists: with `data.streaming`
and without, each with a cache of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from platform.config.fields import Data  # noqa: E402
from platform.data.text_sources import find_stdlib_files  # noqa: E402
from platform.monitor import JsonLines, MetricsLog  # noqa: E402

MODEL = "model.layers=2 model.d_model=64 model.heads=4 model.length=256 model.vocab=4096 model.d_ff=256".split()
RUN = "cluster=processes tensor=serial parallel.data=2 train.global_batch=64 eval.every=0 monitor.sample=0".split()
BLOCK = 4_000_000


def written(file: Path, megabytes: int) -> None:
    """Write records of text of the standard library, each text with a line of its own in front, until there are so many
    bytes of them."""
    texts, size, turn = [f.read_text(errors="ignore") for f in find_stdlib_files(Data())], 0, 0
    with file.open("w") as out:
        while size < megabytes * 1_000_000:
            size += out.write(json.dumps({"text": f"# copy {turn}\n{texts[turn % len(texts)]}"}) + "\n")
            turn += 1


def launched(folder: Path, name: str, steps: int, *more: str) -> dict[str, float]:
    """Train by command; return what the table shows of the run."""
    settings = ["data=text", "data.path=text.jsonl", f"data.cache={name}-cache", "data.validation=0", f"run.dir={name}"]
    command = [sys.executable, "-m", "platform.launch", "+experiment=gpt_quick", *MODEL, *RUN, *settings, *more]
    start = time.time()
    subprocess.run([*command, f"train.steps={steps}"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    [first] = [e["time"] for e in JsonLines.read_objects(folder / name / "journal.jsonl") if e["event"] == "first_step"]
    rows = MetricsLog.read_rows(folder / name / "metrics.jsonl")
    seconds = [row["step_seconds"] for row in rows[5:] or rows]
    files = [path.stat().st_size for path in (folder / f"{name}-cache").rglob("*.bin")]
    return {
        "first step, s": first - start,
        "median step, s": median(seconds),
        "longest step, s": max(seconds),
        "MB of tokens": sum(files) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        written(folder / "text.jsonl", options.megabytes)
        streamed = ["data.streaming=true", f"data.block={BLOCK}"]
        launched(folder, "tokenizer", 1, *streamed)
        [tokenizer] = (folder / "tokenizer-cache").glob("*/tokenizer.json")
        runs = {
            name: launched(folder, name.replace(" ", "-"), options.steps, f"data.tokenizer={tokenizer}", *more)
            for name, more in {"tokenised first": [], "streamed": streamed}.items()
        }
    columns = list(runs["streamed"])
    print(f"| {options.megabytes} MB of text, {options.steps} steps | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, row in runs.items():
        print(f"| {name} | {' | '.join(f'{row[column]:.2f}' for column in columns)} |")


if __name__ == "__main__":
    main()
