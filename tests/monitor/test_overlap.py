"""What a timeline shows beside computing: under ZeRO-3, that weights are gathered while the layer before computes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from collections import Counter
from itertools import pairwise

import pytest

from platform.monitor import Timeline
from platform.monitor.timeline import split_lanes
from platform.plan.operation_plan import collective_label
from platform.plan.simulate import lower_schedule
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure, trainer_of

LAYERS = [f"layers.{i}" for i in range(3)]
SPANS = ["embedding, position", *LAYERS, "norm, embedding"]


def configured(overlap):
    c = configure(data=2, zero=3, microbatch=2, global_batch=8, layers=len(LAYERS))
    c.monitor.timeline, c.parallel.overlap = True, overlap
    return c


def second_step(c, plan, communicator):
    """What a rank reports of a step, and the bytes that it counted."""
    trainer = trainer_of(c, plan, communicator)
    trainer.step(1)
    report = trainer.step(2)
    return report.timeline, report.comm_bytes


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def taken(request, pool):
    """(whether parallel.overlap is set, configuration, plan, what the ranks, processes on gloo, report)."""
    c = configured(request.param)
    return request.param, c, (plan := make_plan(c)), pool.run(second_step, c, plan)


def test_every_span_of_the_model_is_there(taken):
    _, _, plan, ranks = taken
    both = [f"forward {name}" for name in SPANS] + [f"backward {name}" for name in reversed(SPANS)]
    for timeline, _ in ranks:
        assert [span.section for span in timeline.spans] == both * plan.microbatches
        assert all(a.end <= b.start for a, b in pairwise(timeline.spans))


def test_gathers_begin_before_the_span_before_has_computed(taken):
    """And without parallel.overlap, the control, none of them does."""
    overlap, _, plan, ranks = taken
    for timeline, _ in ranks:
        early = []
        for before, span in pairwise(timeline.spans):
            way, name = span.section.split(" ", 1)
            if name in LAYERS:
                [gather] = [
                    g for g in timeline.collectives if g.name == f"gather {name}" and before.start < g.end <= span.start
                ]
                early.append(gather.start < before.end)
        assert early == [overlap] * 2 * len(LAYERS) * plan.microbatches


def test_reductions_begin_before_the_backward_pass_has_ended(taken):
    overlap, _, plan, ranks = taken
    for timeline, _ in ranks:
        computed = [span for span in timeline.spans if span.section.startswith("backward")]
        reduced = [r for r in timeline.collectives if r.name in {f"reduce {name}" for name in LAYERS}]
        under = [any(span.start < r.start < span.end for span in computed) for r in reduced]
        assert len(reduced) == len(LAYERS) * plan.microbatches
        assert any(under) == overlap


def test_every_counted_byte_is_shown(taken):
    _, _, _, ranks = taken
    for rank, (timeline, moved) in enumerate(ranks):
        shown: Counter[str] = Counter()
        for c in timeline.collectives:
            shown[collective_label(c.op, [c.axes])] += c.bytes
            assert 0.0 <= c.start <= c.wanted <= c.end <= timeline.sections[-1].end
        assert moved == ({} if rank else shown), "the first of a group counts"


def test_the_trace_shows_collectives_in_rows_of_their_own(taken, tmp_path):
    _, c, _, ranks = taken
    schedule = build_schedule(c, 2)
    timeline = Timeline([schedule], [[row] for row in lower_schedule(schedule)], ["rank0", "rank1"], [0, 0])
    timeline.add_step(2, 100.0, [timings for timings, _ in ranks], {})
    timeline.write_files(tmp_path)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    for rank, (timings, _) in enumerate(ranks):
        own = [e for e in events if e["pid"] == rank]
        threads = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
        shown = [e for e in own if e.get("cat") == "communication"]
        assert {threads[e["tid"]].split()[0] for e in shown} == {"communication"}
        assert {threads[e["tid"]] for e in own if e.get("cat") == "model"} == {"model"}
        assert sorted((e["name"], e["args"]["bytes"]) for e in shown) == sorted(
            (c.name, c.bytes) for c in timings.collectives
        )
        for thread in {e["tid"] for e in shown}:
            row = [(e["ts"], e["ts"] + e["dur"]) for e in shown if e["tid"] == thread]
            assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(row)), "what overlaps cannot be drawn in one row"
            for wait in (e for e in own if e.get("tid") == thread and e["name"] == "wait"):
                assert any(a <= wait["ts"] and wait["ts"] + wait["dur"] <= b + 1e-3 for a, b in row)
    texts = [t.text for t in xml.parse(tmp_path / "timeline.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {"compute", "communication", "gather", "reduce", "waits for it"} <= set(texts)


def test_as_few_lanes_as_are_needed():
    flights = [(name, "all_gather", "data", 8, start, end, end) for name, start, end in
               [("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 2.0, 4.0), ("d", 3.0, 5.0), ("e", 3.5, 6.0)]]  # fmt: skip
    assert [[flight[0] for flight in lane] for lane in split_lanes(flights)] == [["a", "c"], ["b", "d"], ["e"]]
