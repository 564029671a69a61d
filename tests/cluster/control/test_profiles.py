"""monitor.profile: torch's traces of chosen ranks and steps, merged into one that viewers read, by the plan's names."""

import json
from copy import deepcopy
from itertools import pairwise

import pytest

from platform.cluster.control.profiles import StepNote, build_predicted_spans, merge_parts, write_step_note
from platform.cluster.driver import drive_run
from platform.monitor import JsonLines
from platform.plan.simulate import lower_schedule
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from platform.train.replies import (
    CollectiveSpan,
    PartHead,
    PartName,
    RankTimeline,
    SectionSpan,
    nest_events,
    select_longest,
    write_part,
)
from tests.harness.oracle import configure
from tests.harness.trace_check import faults, read_trace

SECOND = 10**9


def trained(tmp_path, **more):
    """Train by the keys `more`, and return the run's directory."""
    c = configure(**{"microbatch": 2, "d_model": 16, "vocab": 300, "precision": "fp32"} | more)
    c.run.dir, c.data.kind, c.train.steps = str(tmp_path / "run"), "synthetic", 4
    c.monitor.profile, c.cluster.kind = [2, 3], "processes" if c.pipeline.stages > 1 else "inline"
    if c.pipeline.stages > 1:
        c.monitor.profile_ranks, c.elastic.faults = ["all"], ["3:kill:1:backward"]
        c.elastic.snapshot_every = 1
    assert drive_run(c, make_plan(c), experiment="quick") == 0
    return c


def spans(trace, thread="", pid=1):
    """Return the spans of a process, of its thread of that name."""
    tids = [e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["args"]["name"] == thread]
    own = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
    return [e for e in own if not thread or e["tid"] in tids]


def test_a_run_in_one_process(tmp_path, capsys):
    """The trace has what the plan names, as ranges around torch's operations, as the timeline and as predicted."""
    c = trained(tmp_path)
    [path] = (tmp_path / "run" / "profile").iterdir()
    assert path.name == "steps-2-3.json.gz" and str(path) in capsys.readouterr().out
    trace = read_trace(path)
    assert list(faults(trace)) == [] and trace["otherData"] == {"steps": "2, 3", "events_left_out": "0"}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names[0].startswith("rank0 on ") and names[1:] == ["parts of a step on cpu"]
    planned = [str(action) for action in lower_schedule(build_schedule(c, 1))[0]] * 2
    ranges = [e["name"] for e in spans(trace, "main thread") if e["cat"] == "user_annotation"]
    assert [name for name in ranges if name[0].isdigit()] == planned
    assert {"step", "data", "forward", "backward", "reduce", "optimizer"} <= set(ranges)
    for thread in ("actions", "predicted on cpu"):
        assert [e["name"] for e in spans(trace, thread) if e["name"][0].isdigit()] == planned
    steps = [e for e in spans(trace, "main thread") if e["name"] == "step"]
    products = [e for e in spans(trace) if e["name"] == "aten::mm"]
    inside = [any(step["ts"] <= e["ts"] <= step["ts"] + step["dur"] for step in steps) for e in products]
    assert sum(inside) >= len(inside) - len(steps) > 0, "on one time scale; a step's report has one more product"
    [event] = [e for e in JsonLines.read_objects(tmp_path / "run" / "journal.jsonl") if e["event"] == "profiled"]
    assert (event["steps"], event["ranks"], event["bytes"]) == ([2, 3], 1, path.stat().st_size)


@pytest.mark.full
def test_a_failure_in_the_middle(tmp_path):
    """The step that was done before stays, with the workers that did it; the one that failed is profiled again."""
    trained(tmp_path, pipeline="1f1b", stages=2)
    trace = read_trace(tmp_path / "run" / "profile" / "steps-2-3.json.gz")
    assert list(faults(trace)) == [] and trace["otherData"]["steps"] == "2, 3"
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name.partition(" on ")[0] for name in names[:3]] == ["rank0[stage0]", "rank1[stage1]", "rank0"]
    assert [name.partition(", ")[2] for name in names[:3]] == ["generation 1", "generation 1", "generation 2"]
    for pid, step in enumerate((2, 2, 3), 1):
        assert {e["args"]["step"] for e in spans(trace, "actions", pid) if "step" in e["args"]} == {step}
    for pid, message in ((1, "0SEND_F0"), (2, "1RECV_F0")):
        assert any(e["name"] == message for e in spans(trace, "main thread", pid))


TIMELINE = RankTimeline(
    [SectionSpan("0F0", 0.0, 1.0), SectionSpan("step", 0.0, 2.0)],
    [],
    [CollectiveSpan("reduce head", "all_reduce", "data", 8, 0.5, 1.0, 1.5)],
)


def part(directory, step, generation, rank, left, name="op"):
    """Write a part with one event, a second after the barrier, and the driver's note."""
    event = {"ph": "X", "tid": 100, "ts": SECOND, "dur": SECOND // 2, "name": name, "cat": "cpu_op"}
    head = PartHead(left, 0, {"100": "main thread"}, TIMELINE, 1)
    write_part(PartName(step, generation, rank).file_path(directory), head, [event])
    write_step_note(
        directory, step, generation, StepNote(["a on n0", "b on n1"], ["n0", "n1"], [0, 0], {"computing": 1.0})
    )


def merged(directory):
    """Merge the parts of a directory; return the trace, without a fault."""
    merge_parts(directory, path := directory / "merged.json.gz")
    assert list(faults(trace := read_trace(path))) == []
    return trace


def test_clocks_of_machines_are_aligned_by_the_barriers(tmp_path):
    """Seven seconds apart, and one barrier was left late by a rank: the median of the steps counts."""
    for step, late in ((1, 0), (2, 0), (3, SECOND)):
        part(tmp_path, step, 1, 0, 10 * SECOND * step)
        part(tmp_path, step, 1, 1, 10 * SECOND * step + 7 * SECOND + late)
    trace = merged(tmp_path)
    first, second = ([e["ts"] for e in spans(trace, "main thread", pid)] for pid in (1, 2))
    assert [b - a for a, b in zip(first, second, strict=True)] == [0, 0, 1e6]
    assert [b - a for a, b in pairwise(first)] == [10e6, 10e6]


def test_a_step_that_is_done_again_replaces(tmp_path):
    part(tmp_path, 1, 1, 0, 10 * SECOND, "first")
    part(tmp_path, 2, 1, 0, 20 * SECOND, "gone")
    part(tmp_path, 2, 1, 1, 20 * SECOND, "gone")
    part(tmp_path, 2, 2, 0, 30 * SECOND, "again")
    (tmp_path / "profile" / "parts" / "step-9.rank-1.json.gz").write_text("no part")
    trace = merged(tmp_path)
    assert [e["name"] for pid in (1, 2) for e in spans(trace, "main thread", pid)] == ["first", "again"]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["a on n0, generation 1", "a on n0, generation 2", "parts of a step"]


def test_nothing_is_merged_without_parts(tmp_path):
    assert merge_parts(tmp_path, tmp_path / "merged.json.gz") is None and not [*tmp_path.iterdir()]


def test_spans_that_cross_get_rows_of_their_own():
    times = [(0, 10), (2, 5), (4, 5), (6, 7), (12, 3)]
    events = [{"ph": "X", "tid": 7, "ts": start, "dur": length} for start, length in times]
    threads = {"7": "main thread"}
    rows = [(e["tid"], e["ts"], e["dur"]) for e in nest_events(events, threads)]
    beside = 7 + 10**6
    assert rows == [(7, 0, 10), (7, 2, 5), (7, 4, 3), (beside, 6, 7), (7, 12, 3)], "rounded by up to two nanoseconds"
    assert threads == {"7": "main thread", str(beside): "main thread, beside"}


def test_the_shortest_events_are_left_out_of_what_is_too_much():
    events = [{"cat": "cpu_op", "dur": n} for n in (3, 1, 2)] + [{"cat": "user_annotation", "dur": 0}]
    assert select_longest(events, 2) == ([events[0], events[3]], 2)
    assert select_longest(events, 4) == (events, 0)


def test_a_predicted_step_ends_with_its_reduction_and_update():
    predicted = build_predicted_spans(
        [("0F0", 0.0, 1.0), ("0B0", 1.0, 3.0)], 3.0, {"computing": 3.5, "optimizer": 0.5}, "optimizer"
    )
    assert predicted == [("step", 0, 4), ("0F0", 0, 1), ("0B0", 1, 3), ("reduce", 3, 3.5), ("optimizer", 3.5, 4)]


def test_the_check_finds_what_a_viewer_would_not_show(tmp_path):
    """The negative control of `faults`: one change of a good trace each."""
    part(tmp_path, 1, 1, 0, 10 * SECOND)
    good = merged(tmp_path)
    last = next(i for i, e in reversed([*enumerate(good["traceEvents"])]) if e["ph"] == "X")

    def spoiled(**fields):
        trace = deepcopy(good)
        trace["traceEvents"][last] |= fields
        return list(faults(trace))

    assert spoiled(ts=-5.0) and spoiled(pid=9) and spoiled(tid=9) and spoiled(pid="n0") and spoiled(dur=None)
    arrow = {"ph": "s", "pid": 1, "tid": 100, "ts": 9e9, "name": "fwdbwd", "cat": "fwdbwd", "id": 1}
    assert list(faults(json.loads(json.dumps(good)) | {"traceEvents": [*good["traceEvents"], arrow]}))
