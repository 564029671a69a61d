"""SIGKILL of workers while they are asked: by tasks, for prompts, for the sample at the end. The run forms again, asks
again, and has the same numbers and texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from platform.monitor import JsonLines, MetricsLog
from tests.doubles import killer
from tests.harness.commands import QUICK, SMALL, TIMEOUT

COMMAND = (
    "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1 data=text data.path=d.txt data.cache=cache "
    "model.heads=2 train.steps=6 train.global_batch=4 train.microbatch=4 optimizer.warmup_steps=2 elastic.attempts=9 "
    "eval.every=2 eval.batches=1 eval.tasks=[asked] eval.prompts=[a] eval.prompt_tokens=4 monitor.sample=4 "
    "elastic.min_workers=2 extend=[tests.doubles.killer] run.dir=run"
).split()
# In the place of lm-eval: `python -m platform.launch`, whose driver asks what a task would.
LAUNCH = """
import sys
from platform.cluster import driver
from platform.cluster.answer_scores import RunTasks
from platform.launch import main
from platform.train.replies import Choice
class Questions:
    def score_model(self, asked, limit):
        scored = asked.score_continuations([([5 + n, 6, 7], [8, 9 + n]) for n in range(12)])
        written = dict(asked.continue_prompts([[5, 6 + n] for n in range(6)], 5, Choice(300), []))
        ids = [n for text in written.values() for n in text.ids]
        return {"asked": {"sum": sum(s.log_probability for s in scored), "ids": hash(tuple(ids)), "many": len(ids)}}
driver.open_tasks = lambda config: RunTasks(config, Questions())
driver.violations_of_tasks = lambda config: []
sys.exit(main(sys.argv[1:]))
"""
ORDERS = [("score", 2), ("pass", 7), ("continue", 1), ("pass( done)?", 25), ("continue", 4), ("continue done", 1)]


def run(folder: Path, orders: list[tuple[str, int]]) -> tuple[list[tuple], list[str], list[str]]:
    """Of every step its numbers, then the texts, and the calls that failed."""
    folder.mkdir()
    (folder / "d.txt").write_text("a b c a b d a b e\n" * 3000)
    for place, order in enumerate(orders):
        killer.order(folder, place, r"worker\d+", *order)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, QUICK, *SMALL, *COMMAND], cwd=folder, capture_output=True, text=True,
        env=os.environ | {killer.FOLDER: str(folder)}, timeout=TIMEOUT
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert len([*folder.glob(f"*{killer.DONE}")]) == len(orders), done.stdout
    journal = JsonLines.read_objects(folder / "run" / "journal.jsonl")
    rows = [
        tuple(json.dumps(row.get(key)) for key in ("step", "loss", "grad_norm", "val_loss", "task_scores"))
        for row in MetricsLog.read_rows(folder / "run" / "metrics.jsonl")
    ]
    prompted = {event["step"]: event["text"] for event in journal if event["event"] == "sampled"}
    [sample] = re.findall(r"a sample of 4 tokens:\n(.*)\n", done.stdout)
    return rows, [*prompted.values(), sample], [e["method"] for e in journal if e["event"] == "failure"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_workers_die_while_they_are_asked(tmp_path):
    rows, texts, calls = run(tmp_path / "struck", ORDERS)
    wanted, wanted_texts, none = run(tmp_path / "undisturbed", [])
    assert (rows, texts) == (wanted, wanted_texts) and not none
    assert [row[0] for row in rows] == [*"123456"] and rows[1][4] != rows[3][4] != "null" and len(texts) == 4
    assert len(calls) == len(ORDERS) and {"score_texts", "continue_texts"} == {call.partition("(")[0] for call in calls}
