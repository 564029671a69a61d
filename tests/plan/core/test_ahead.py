"""In which order parameters are converted ahead of their operations."""

from __future__ import annotations

import pytest

from platform.plan.gather_order import ParameterPrefetcher, find_fetches
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, configure


def planned(gathered="keep", **more):
    return make_plan(
        configure(**{"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}, "gathered": gathered, "tied": False, **more})
    )


def ran(plan, on=True, back=False, again=False, chunk=0, spans=None):
    """What happens when the operations of a chunk, or of some of its `spans`, run in their order: each conversion that
    is started ("start", use), and each use that is due ("use", use)."""
    events = []
    names = {p.name: f.use for stage_chunk in plan.chunks for f in find_fetches(stage_chunk) for p, _ in f.converted}
    names |= {p.name: f.use for f in find_fetches(plan.chunks[chunk]) for p, _ in f.converted}
    ahead = ParameterPrefetcher(plan, lambda p, conversion: events.append(("start", names[p.name], p.name)), on)
    ahead.again = again
    fetches = [
        f for f in find_fetches(plan.chunks[chunk]) if (spans is None or f.span in spans) and (f.again or not back)
    ]
    for f in reversed(fetches) if back else fetches:
        ahead.take_parameters(f.use, back)
        events.append(("use", f.use, ""))
        ahead.start_next_gathers(f.use, back)
    assert ahead.begin_pass() == []
    return fetches, events


def started(events):
    return [name for what, _, name in events if what == "start"]


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, MODELS["t5"], {"data": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("on", [True, False])
def test_each_is_started_once_in_the_order_of_use(more, on):
    plan = planned(**more)
    fetches, events = ran(plan, on)
    assert len(fetches) > 8
    assert started(events) == [p.name for f in fetches for p, _ in f.converted]


def test_up_to_the_next_product_while_one_is_computed():
    fetches, events = ran(planned())
    products = [i for i, f in enumerate(fetches) if f.multiplies]
    assert len(products) == 2 * 4 + 1  # Q, K and V; output; up; down; and the head
    for before, after in zip(products, products[1:], strict=False):
        at = events.index(("use", fetches[before].use, ""))
        following = {p.name for f in fetches[before + 1 : after + 1] for p, _ in f.converted}
        assert {name for _, _, name in events[at + 1 : at + 1 + len(following)]} == following
        assert not following & set(started(events[:at])), "not two products ahead"


def test_nothing_is_ahead_without_overlap():
    _, events = ran(planned(), on=False)
    uses = [use for what, use, _ in events if what == "use"]
    for use in uses:
        at = events.index(("use", use, ""))
        assert {u for what, u, _ in events[:at] if what == "start"} <= set(uses[: uses.index(use) + 1])


@pytest.mark.parametrize(
    ("more", "again"), [({"recompute": "full"}, True), ({"data": 2, "zero": 3}, False)], ids=["recomputed", "zero 3"]
)
def test_nothing_beyond_a_stretch_that_runs_again_or_whose_shards_are_whole(more, again):
    """The weights of a block and no others, although the block before has just run."""
    plan = planned(**more)
    for span in (1, 3):
        fetches, events = ran(plan, again=again, spans=[span])
        own = {p.name for f in fetches for p, _ in f.converted}
        assert set(started(events)) == own and all(name.startswith(f"layers.{span // 2}.") for name in own)


def test_the_backward_pass_begins_with_the_last():
    fetches, events = ran(planned("again"), back=True)
    assert all(f.multiplies for f in fetches) and len(fetches) == 9
    assert started(events) == [p.name for f in reversed(fetches) for p, _ in f.converted]
    first = next(i for i, event in enumerate(events) if event[0] == "use")
    before, then = fetches[-1], fetches[-2]
    assert started(events[:first]) == [p.name for p, _ in before.converted]
    assert started(events[first : first + 1 + len(then.converted)]) == [p.name for p, _ in then.converted]


def test_kept_weights_are_not_converted_in_the_backward_pass():
    assert not any(f.again for f in find_fetches(planned().chunks[0]))


def test_what_was_left_out_is_handed_back():
    plan = planned()
    ahead = ParameterPrefetcher(plan, lambda p, conversion: p.name)
    first = next(find_fetches(plan.chunks[0]))
    ahead.take_parameters(first.use)
    left = ahead.begin_pass()
    assert "layers.0.attention.query" in left and not set(left) & {p.name for p, _ in first.converted}
    assert ahead.begin_pass() == []


def test_panels_and_whole_weights_are_none():
    assert not list(find_fetches(planned(tensor="1d", axes={"t": 2}).chunks[0]))
    assert not any(f.multiplies for f in find_fetches(planned("panels", tensor="2d", axes={"r": 2, "c": 2}).chunks[0]))
