"""A stage that fails in the middle of a step, at each kind of action: everybody stops, and the culprit is named."""

from pathlib import Path
from socket import gethostname

import pytest

from platform.cluster.driver import drive_run
from platform.monitor import JsonLines, MetricsLog
from platform.predict.make_plan import make_plan
from platform.runtime import pipeline
from platform.runtime.pipeline import StageFailed
from tests.doubles.failing_worker import STEP, fail_at, injected
from tests.harness.oracle import configure, trainer_of
from tests.harness.process_tree import descendants, gone
from tests.harness.threads import run_threads

# Of the stage in the middle, which has neighbours on both sides, between the first and the last microbatch.
pytestmark = pytest.mark.usefixtures("warm_server")
ACTIONS = {
    "F": "1F2",
    "B": "1B1",
    "I": "1I1",
    "W": "1W1",
    "SEND_F": "1SEND_F2",
    "RECV_F": "1RECV_F2",
    "SEND_B": "1SEND_B1",
    "RECV_B": "1RECV_B1",
}
BY_PROCESSES = [(how, kind) for how in ("exception", "kill") for kind in ACTIONS]
SOME = [("kill", "RECV_B")]


def of_three_stages(kind):
    schedule = "zb_h1" if kind in ("I", "W") else "1f1b"
    return configure(pipeline=schedule, stages=3, microbatch=1, global_batch=5, d_model=16, vocab=300, precision="fp32")


@pytest.mark.parametrize("kind", ACTIONS)
def test_an_exception_releases_all_threads_and_names_the_culprit(kind, monkeypatch):
    c = of_three_stages(kind)
    plan, errors = make_plan(c), {}
    monkeypatch.setattr(pipeline, "_ACTIONS", fail_at(ACTIONS[kind], injected))

    def work(communicator):
        try:
            trainer_of(c, plan, communicator).step(1)
        except Exception as error:
            errors[communicator.rank] = error
            raise

    with pytest.raises(StageFailed) as caught:
        run_threads(plan.mesh, work)
    assert str(caught.value) == f"rank 1 (stage 1) failed at {ACTIONS[kind]}: injected"
    assert isinstance(caught.value.__cause__, ValueError)
    for rank in (0, 2):
        error = str(errors[rank])
        assert error.endswith("another rank failed"), error


def stops(how, kind, tmp_path, monkeypatch, capsys):
    """A run whose stage 1 fails in step 2."""
    c = of_three_stages(kind)
    c.run.dir, c.data.kind, c.cluster.kind = str(tmp_path / "run"), "synthetic", "processes"
    c.elastic.attempts = 1
    monkeypatch.setenv("FAIL", f"{how} {ACTIONS[kind]}")
    before = descendants()
    assert drive_run(c, make_plan(c), experiment="quick", worker="tests.doubles.failing_worker:FailingWorker") == 1
    assert gone(descendants() - before)
    failure = next(e for e in JsonLines.read_objects(Path(c.run.dir, "journal.jsonl")) if e["event"] == "failure")
    assert (failure["rank"], failure["coordinates"]["stage"], failure["method"]) == (1, 1, f"step({STEP})")
    assert [row["step"] for row in MetricsLog.read_rows(Path(c.run.dir, "metrics.jsonl"))] == list(range(1, STEP))
    who = f"rank1[stage1] on {gethostname()}"
    culprit = {
        "exception": f"{who} failed in step({STEP}): platform.runtime.pipeline.StageFailed: rank 1 (stage 1)"
        f" failed at {ACTIONS[kind]}: injected",
        "kill": f"{who} died in step({STEP}): the process was killed by SIGKILL",
    }
    assert culprit[how] in capsys.readouterr().out


@pytest.mark.parametrize(("how", "kind"), SOME)
def test_processes_stop(how, kind, tmp_path, monkeypatch, capsys, record_count):
    record_count("stages that fail (processes)", len(SOME), len(BY_PROCESSES))
    stops(how, kind, tmp_path, monkeypatch, capsys)


@pytest.mark.full
@pytest.mark.parametrize(("how", "kind"), [case for case in BY_PROCESSES if case not in SOME])
def test_processes_stop_at_every_kind_of_action(how, kind, tmp_path, monkeypatch, capsys):
    stops(how, kind, tmp_path, monkeypatch, capsys)
