"""The driver and 64 workers on two nodes, as benchmarks/control.py has 1,024: every byte is counted."""

from pathlib import Path

import pytest

from platform.cluster import driver
from platform.cluster.crew import remote_crew
from platform.cluster.crew.channel import encode_message
from platform.launch import compose_config
from platform.monitor import JsonLines, MetricsLog
from platform.predict.make_plan import make_plan
from tests.doubles.simulated_crew import SimulatedCrew
from tests.doubles.simulated_worker import LATE_STEP, report

WORKERS, PER_NODE, STEPS, KILLED, HANG = 64, 32, 6, 4, 3.0


def answers(call, step, world_size, told):
    """Bytes that a step brings the driver: one report, and the acknowledgement of everybody else that it has told."""
    own, other = (
        len(encode_message({"answer": call, "value": value})) for value in (report(step, world_size), {"step": step})
    )
    return own + (told - 1) * other


@pytest.mark.parametrize("followed", [WORKERS // 4, 2 * WORKERS])
def test_a_step_of_many_is_one_report_and_a_lost_node_costs_no_step(tmp_path, monkeypatch, followed):
    """Where the others follow rank 0, the driver sends and gets one message."""
    crews = []
    monkeypatch.setattr(remote_crew, "FOLLOWED", followed)
    monkeypatch.setattr(remote_crew, "CALM_SECONDS", HANG)

    def open_crew(kind, job, spares):
        crews.append(SimulatedCrew(job, spares, per_node=PER_NODE))
        return crews[0]

    monkeypatch.setattr(driver, "open_crew", open_crew)
    config = compose_config(
        [
            "experiment=gpt_quick",
            *("tensor=1d", "tensor.axes.t=2", "pipeline=1f1b", "pipeline.stages=2", "parallel.data=16"),
            *("train.global_batch=64", "train.microbatch=2", f"train.steps={STEPS}", "data=synthetic"),
            *("eval.every=0", "monitor.sample=0", "checkpoint.last=false", f"run.dir={tmp_path}/run"),
            *("cluster=processes", "cluster.device=cpu", "elastic.replace=false", f"elastic.hang_seconds={HANG}"),
            f"elastic.faults=[{KILLED}:kill:{WORKERS - 1}]",
        ]
    )
    plan = make_plan(config)
    assert plan.mesh.axes == {"stage": 2, "data": 16, "t": 2}
    assert (
        driver.drive_run(config, plan, experiment="gpt_quick", worker="tests.doubles.simulated_worker:SimulatedWorker")
        == driver.DONE
    )

    steps = [call for call in crews[0].calls if call.method == "step"]
    assert [call.args[0] for call in steps] == [1, 2, 3, 4, 4, 5, 6] and [call.failed for call in steps].index(
        True
    ) == 3
    exact, led, before = 0, followed <= PER_NODE, 0
    for call, size in zip(steps, 4 * [WORKERS] + 3 * [PER_NODE], strict=True):
        step, spent = call.args[0], call.end - call.begin
        told = 1 if led else size
        asked = spent.sent - told * len(
            encode_message({"call": call.number, "method": "lead" if led else "step", "args": call.args})
        )
        if led and size != before:  # a generation's first
            asked -= (size - 1) * len(encode_message({"call": call.number - 1, "method": "follow", "args": []}))
        before = size
        beats, rest = divmod(asked, len(encode_message({"beat": call.number})))
        if step == LATE_STEP:
            assert beats >= size and not rest and spent.received > answers(call.number, step, size, told)
        elif step == LATE_STEP + 1:  # some beats come late too
            assert asked == 0 and spent.received >= answers(call.number, step, size, told)
        elif not call.failed and spent.clock < HANG - 1:
            assert (asked, spent.received) == (0, answers(call.number, step, size, told))
            exact += 1
    assert exact >= 2

    events = JsonLines.read_objects(Path(config.run.dir, "journal.jsonl"))
    [restored] = [event for event in events if event["event"] == "restored"]
    assert (restored["source"], restored["step"]) == ("memory", KILLED - 1)
    released = next(event for event in events if event["event"] == "released")
    assert (sorted(released["lost"]), released["alive"]) == ([*range(PER_NODE, WORKERS)], WORKERS - PER_NODE)
    formed = [event["workers"] for event in events if event["event"] == "formed"]
    assert [len(workers) for workers in formed] == [WORKERS, PER_NODE]
    assert [w["coordinates"] for w in formed[0]] == [plan.mesh.rank_coordinates(rank) for rank in range(WORKERS)]
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    assert [(row["step"], row["world_size"]) for row in rows] == [
        *((step, WORKERS) for step in range(1, KILLED)),
        *((step, PER_NODE) for step in range(KILLED, STEPS + 1)),
    ]
