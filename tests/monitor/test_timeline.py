"""The timeline of a run: every action of every rank, in order, and its bubble beside the schedule's."""

import json
import xml.etree.ElementTree as xml
from dataclasses import replace

import pytest

from platform.cluster.driver import drive_run
from platform.monitor import JsonLines, MetricsLog, Timeline
from platform.monitor.timeline import KEPT_STEPS, StepForecast, extract_actions, measure_bubble
from platform.plan.generators import generate
from platform.plan.schedule import COMPUTE, RECEIVES
from platform.plan.simulate import lower_schedule, simulate
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from platform.runtime.clock import SectionClock
from platform.train.replies import RankTimeline
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

SCHEDULE = generate("interleaved", 2, 2, 4)
ROWS = lower_schedule(SCHEDULE)


def spans(schedule, rows, transfer=0.0, ahead=0.0):
    """What clocks would read: each computation waits inside its action, from the end of the one before it."""
    simulated, out = simulate(schedule, transfer=transfer), []
    starts = {(e.stage, e.action): e for e in simulated.timeline}
    for stage, row in enumerate(rows):
        now, own = ahead, []
        for action in row:
            if action.kind in COMPUTE:
                event = starts[stage, action]
                if event.start + ahead > now:
                    own.append(["bubble", now, event.start + ahead])
                own += [["forward", event.start + ahead, event.end + ahead], [str(action), now, event.end + ahead]]
                now = event.end + ahead
            else:
                own.append([str(action), now, now])
        out.append(RankTimeline([*own, ["step", 0.0, now]]))
    return out


def timeline(schedule=SCHEDULE, rows=ROWS):
    return Timeline(
        [schedule], [[row] for row in rows], [f"rank{s}[stage{s}]" for s in range(len(rows))], list(range(len(rows)))
    )


def test_waiting_is_no_computing():
    ran = [
        extract_actions(s, {str(a): a for a in ROWS[s]}, own.sections)
        for s, own in enumerate(spans(SCHEDULE, ROWS, 0.5))
    ]
    computed = [e for events in ran for e in events if e.action.kind in COMPUTE]
    assert set(computed) == set(simulate(SCHEDULE, transfer=0.5).timeline)
    assert [[e.action for e in events] for events in ran] == [list(row) for row in ROWS]


@pytest.mark.parametrize("ahead", [0.0, 3.0])
def test_planned_and_measured_bubble(ahead):
    bubbles = timeline().add_step(1, 0.0, spans(SCHEDULE, ROWS, transfer=0.5, ahead=ahead), {})
    assert bubbles["planned"] == pytest.approx(simulate(SCHEDULE).bubble)
    assert bubbles["measured"] == pytest.approx(simulate(SCHEDULE, transfer=0.5).bubble)
    assert bubbles["measured"] > bubbles["planned"] > 0


def test_one_stage_has_no_bubble_and_is_drawn(tmp_path):
    schedule = generate("1f1b", 1, 1, 3)
    one = timeline(schedule, lower_schedule(schedule))
    assert one.add_step(1, 0.0, spans(schedule, lower_schedule(schedule)), {}) is None
    one.write_files(tmp_path)
    assert (tmp_path / "timeline.svg").read_text().count("<title>") == 3 * 6  # planned, measured, and computed in it


def test_nothing_is_written_before_the_first_step(tmp_path):
    timeline().write_files(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_trace_has_every_span_of_the_last_steps_on_one_time_scale(tmp_path):
    every, own = timeline(), spans(SCHEDULE, ROWS)
    for step in range(1, KEPT_STEPS + 3):
        every.add_step(step, 100.0 * step, own, {})
    every.write_files(tmp_path)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank0[stage0]", 1: "rank1[stage1]"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == KEPT_STEPS * sum(len(rank.sections) for rank in own)
    steps = [(e["ts"], e["args"]["step"]) for e in slices if e["name"] == "step" and e["pid"] == 0]
    assert steps == [(100e6 * k, k + 3) for k in range(KEPT_STEPS)]
    [b] = [e for e in slices if e["name"] == "3B1" and 0 <= e["ts"] < 100e6]
    assert (b["pid"], b["cat"], b["args"]) == (1, "compute", {"chunk": 3, "microbatch": 1})
    assert {e["cat"] for e in slices} == {"compute", "send", "receive", "wait", "step"}


def test_the_picture_shows_the_plan_beside_the_run(tmp_path):
    last = timeline()
    last.add_step(7, 0.0, spans(SCHEDULE, ROWS, 0.5), {})
    last.write_files(tmp_path)
    texts = [t.text for t in xml.parse(tmp_path / "timeline.svg").iter("{http://www.w3.org/2000/svg}text")]
    planned, measured = (f"{simulate(SCHEDULE, transfer=t).bubble:.1%}" for t in (0.0, 0.5))
    assert f"planned: interleaved, bubble {planned}" in texts
    assert f"measured: step 7, bubble {measured}" in texts


def test_predicted_parts_of_a_step_lie_beside_measured_ones(tmp_path):
    """On a process of their own in the trace, from the step's beginning on; and the schedule in predicted seconds."""
    last, predicted, measured = timeline(), {"computing": 2.0, "bubble": 0.0, "optimizer": 1.0}, {"computing": 3.0}
    last.forecast = StepForecast("moon", predicted, simulate)
    for step in (7, 8):
        last.add_step(step, 100.0 * step, spans(SCHEDULE, ROWS, 0.5), measured)
    last.write_files(tmp_path)
    events = [e for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if e["pid"] == 2]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["parts of a step on moon", "predicted", "measured"]
    bars = [(e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    of_one = [(0, "computing", 0.0, 2.0), (0, "optimizer", 2.0, 1.0), (1, "computing", 0.0, 3.0)]
    assert bars == of_one + [(thread, name, 100.0 + start, length) for thread, name, start, length in of_one]
    title = f"predicted on moon: bubble {simulate(SCHEDULE).bubble:.1%}"
    assert title in (tmp_path / "timeline.svg").read_text()


def test_a_clock_reads_every_section_and_what_is_inside_it():
    clock = SectionClock()
    with clock.time_section("outer"):
        with clock.time_section("inner"):
            pass
        with clock.time_section("inner"):
            pass
    seconds, _, (a, b, outer), *_ = clock.take_section_times()
    assert [name for name, _, _ in (a, b, outer)] == ["inner", "inner", "outer"]
    assert 0.0 == outer[1] <= a[1] <= a[2] <= b[1] <= b[2] <= outer[2]
    assert seconds["outer"] + seconds["inner"] == pytest.approx(outer[2])
    assert clock.take_section_times() == ({}, {}, [], [], [])


@pytest.mark.parametrize("kind", ["none", "zb_h1"])
def test_ranks_report_what_they_ran_when_asked(kind):
    stages = 1 if kind == "none" else 2
    c = configure("1d", {"t": 2}, pipeline=kind, stages=stages, microbatch=2, d_model=16)
    plan, schedule = make_plan(c), build_schedule(c, 1)
    c.monitor.timeline = True
    rows = lower_schedule(schedule)
    reports = run_threads(plan.mesh, lambda communicator: trainer_of(c, plan, communicator).step(1))
    assert all(r.comm_bytes == s.comm_bytes for r, s in zip(reports, silent(c, plan), strict=True))
    for rank, report in enumerate(reports):
        stage = plan.mesh.rank_coordinates(rank)["stage"]
        names = [name for name, _, _ in report.timeline.sections]
        assert [name for name in names if name[0].isdigit()] == [str(a) for a in rows[stage]]
        assert {"forward", "backward", "reduce", "optimizer", "exposed_comm"} <= set(names) and names[-1] == "step"
        assert report.timeline.sections[-1].start == 0.0
        ran = extract_actions(stage, {str(a): a for a in rows[stage]}, report.timeline.sections)
        assert all(a.end <= b.start for a, b in zip(ran, ran[1:], strict=False))
        assert measure_bubble([ran]) >= 0


def silent(c, plan):
    """Reports of ranks that are not asked."""
    quiet = replace(c, monitor=replace(c.monitor, timeline=False))
    reports = run_threads(plan.mesh, lambda communicator: trainer_of(quiet, plan, communicator).step(1))
    assert all(report.timeline == RankTimeline() for report in reports)
    return reports


def test_a_run_by_processes(tmp_path, capsys):
    c = configure(pipeline="1f1b", stages=2, microbatch=2, d_model=16, vocab=300, precision="fp32")
    c.run.dir, c.data.kind, c.cluster.kind = str(tmp_path / "run"), "synthetic", "processes"
    c.monitor.timeline, c.train.steps = True, 12
    assert drive_run(c, make_plan(c), experiment="quick") == 0
    rows = MetricsLog.read_rows(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 12
    for row in rows:  # 4 microbatches on 2 stages
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"])
        assert row["bubble"]["planned"] == pytest.approx(1 / 4) and row["bubble"]["measured"] > 0
    events = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    for rank, row in enumerate(lower_schedule(build_schedule(c, 1))):
        own = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        ran = [e["name"] for e in own if "microbatch" in e["args"]]
        assert sorted(ran) == sorted([str(a) for a in row] * 12)
        others = {str(a) for a in row if a.kind not in RECEIVES}  # receives are posted early
        assert [name for name in ran if name in others] == [str(a) for a in row if str(a) in others] * 12
        assert sum(e["name"] == "step" for e in own) == 12
    assert "planned: 1f1b, bubble 25.0%" in (tmp_path / "run" / "timeline.svg").read_text()
    journal = {event["event"]: event for event in JsonLines.read_objects(tmp_path / "run" / "journal.jsonl")}
    predicted, measured = journal["predicted_step"], journal["measured_step"]
    assert predicted["hardware"] == "cpu" and sum(predicted["parts"].values()) == pytest.approx(predicted["seconds"])
    assert {row.get("predicted_seconds") for row in rows} == {None, predicted["seconds"]}, "None of the first step"
    assert measured["steps"] == 11 and measured["seconds"] == pytest.approx(sum(measured["parts"].values()))
    assert predicted["parts"].keys() <= measured["parts"].keys(), "what is predicted is measured"
    out = capsys.readouterr().out
    assert "a step on cpu, measured in 11 steps" in out and "times as long as predicted" in out
