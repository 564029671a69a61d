"""Mistakes of a user that show only in a step: every worker would make them again, so that the run ends at once."""

import pytest

from platform.monitor import JsonLines
from tests.harness.commands import QUICK, SMALL, warm_command

RUN = [QUICK, *SMALL, "model.heads=2", "train.steps=40", "train.global_batch=4", "data=synthetic",
       "optimizer.warmup_steps=0", "extend=[late]", "data.objective=late", "checkpoint.every=1", "run.dir=run",
       *"cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1".split()]  # fmt: skip
OWN = """
from platform.api import *
from platform.data.objectives import Causal
class Late(Causal):
    asked = 0
    def batch(self, stream, index, keys):
        made = super().batch(stream, index, keys)
        Late.asked += 1
        if Late.asked > 20:
            MISTAKE
        return made
register_objective("late", lambda shape: Late(shape.length, shape.special))
"""
MISTAKES = {  # the line that makes it -> what is said, once; and how often the step is tried
    "made['tokens'][0, 3] = 300": ("has 300 in 'tokens', at place 3: legal are 0 to 299, and -1 for padding", 1),
    "made['labels'][0, 3] = -1": ("15 labels, and predicted says 16", 1),
    "open('/nowhere')": ("No such file or directory", 3),  # as where a file system goes away: elsewhere it may be there
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_step_ends_the_run_of_several_workers(tmp_path, mistake):
    (tmp_path / "late.py").write_text(OWN.replace("MISTAKE", mistake))
    done = warm_command(*RUN, cwd=tmp_path)
    reason, times = MISTAKES[mistake]
    journal = JsonLines.read_objects(tmp_path / "run" / "journal.jsonl")
    [end] = [event for event in journal if event["event"] == "gave_up"]
    out = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in out, out
    assert reason in end["cause"] and end["step"] >= end["saved"] > 0
    assert len([event for event in journal if event["event"] == "failure"]) == (times if times > 1 else 0)
    if times == 1:
        [line] = [line for line in out.splitlines() if reason in line]
        assert line.startswith("data.objective=late: sample"), line
    assert f"the same command continues after step {end['saved']}" in out
