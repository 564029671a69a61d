"""A bit that flips in one worker's memory: the run ends as one in which none did, and says whose memory it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from platform.monitor import JsonLines, MetricsLog
from tests.harness.commands import QUICK, SMALL, TIMEOUT

COMMAND = (
    "cluster=processes tensor=serial parallel.data=2 data=synthetic train.steps=3 train.verify_every=1 "
    "monitor.sample=0 eval.every=0"
).split()


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1])
def test_a_flipped_bit_leaves_no_trace(tmp_path, zero):
    def losses(name, *more):
        line = [sys.executable, "-m", "platform.launch", QUICK, *SMALL, *COMMAND, f"parallel.zero={zero}"]
        line += [f"run.dir={name}", *more]
        done = subprocess.run(line, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = MetricsLog.read_rows(tmp_path / name / "metrics.jsonl")
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], done.stdout

    actual, said = losses("flipped", "elastic.faults=[3:flip:1]")
    expected, _ = losses("undisturbed")
    assert actual == expected
    journal = JsonLines.read_objects(tmp_path / "flipped" / "journal.jsonl")
    [failure] = [e for e in journal if e["event"] == "failure"]
    assert (failure["rank"], failure["kind"], failure["step"]) == (1, "damaged", 3)
    assert re.search(r"rank1\[data1\] on \S+ damaged in step\(3\)", said), said
    assert [e["source"] for e in journal if e["event"] == "restored"] == ["memory"]
