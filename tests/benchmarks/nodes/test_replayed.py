"""What is planned on slow links: the bytes of launches on the busiest link, and what computation hides of a message."""

from __future__ import annotations

import pytest

from benchmarks.nodes.replayed import bytes_on_link, cases, replay
from platform.plan.operation_plan import traffic_bytes
from platform.plan.step_collectives import collectives_by_stage
from platform.train.replies import CollectiveSpan


@pytest.mark.parametrize("case", {case.name: case for case in cases()}.values(), ids=lambda case: case.name)
def test_launches_carry_what_the_plan_says(case):
    """All launches of a step together load the busiest link as the plan does, and a message more does not."""
    for name in case.variants:
        plan = case.plan(name)
        spans = [
            CollectiveSpan("", c.op, "+".join(c.axes), launches * traffic_bytes(c, plan.mesh, plan.itemsize)
                           // len(plan.mesh.list_groups(c.axes)), 0.0, 0.0, 0.0)
            for _, c, launches, _ in collectives_by_stage(plan)
        ]  # fmt: skip
        on_link, planned = bytes_on_link(case, name), case.traffic(name)[-1].busiest
        assert sum(map(on_link, spans)) == planned
        crossing = next(span for span in spans if on_link(span))
        assert sum(map(on_link, [*spans, crossing])) > planned


def span(start: float, wanted: float, end: float) -> CollectiveSpan:
    return CollectiveSpan("", "rotate", "context", 1, start, wanted, end)


@pytest.mark.parametrize(
    ("spans", "link", "step"),
    [
        ([span(1, 1, 1)], 2, 12),  # waited for at once: all of it is exposed
        ([span(1, 4, 4)], 2, 10),  # behind computation
        ([span(1, 4, 4)], 5, 12),  # behind as much of it as there is
        ([span(1, 4, 6)], 2, 10),  # the wait was for another rank
        ([span(1, 1, 1), span(1, 1, 1)], 2, 14),  # one link, one after the other
        ([span(1, 4, 4), span(2, 5, 5)], 3, 12),  # the second begins when the first is through
        ([span(1, 1, 1), span(2, 4, 4)], 2, 12),  # what is launched later is later by the first wait
    ],
)
def test_computation_hides_what_is_launched_before_it(spans, link, step):
    assert replay(spans, 10.0, lambda _: float(link)) == step
