"""Which state a re-formed run goes on from, and who takes which seat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from platform.checkpoint.in_memory.recover import lost
from platform.train.recovery.source import Formation, Source, find_source
from tests.harness.oracle import configure
from tests.harness.seats import seated

EIGHT = configure(data=8, zero=1, microbatch=1)  # each rank alone has an eighth of the moments
PIPELINE = configure(pipeline="1f1b", stages=2, data=2)  # ranks 0, 1: stage 0; 2, 3: stage 1


def generation(c, seats: list[int], domains: list[str] | None = None) -> Formation:
    return Formation(c, None, domains or [], seats, ["exp_avg", "exp_avg_sq"])


def everybody(members, *steps: int) -> dict[int, list]:
    return {member: [(1, list(steps))] for member in members}


def test_the_newest_step_that_all_have():
    formed = {1: generation(EIGHT, list(range(10, 18)))}
    source, reasons = find_source(everybody(range(10, 17), 4, 5), formed, 7)
    assert source and source.step == 5 and source.generation == 1 and not reasons and not source.gathered
    assert source.kept == list(range(7)) and source.members(source.kept) == list(range(10, 17))


def test_a_step_that_some_do_not_have_is_given_up():
    """Member 17 is gone, and 11 and 12 had not come to hold step 5."""
    formed = {1: generation(EIGHT, list(range(10, 18)))}
    held = {**everybody(range(10, 17), 4, 5), 11: [(1, [3, 4])], 12: [(1, [3, 4])]}
    source, [reason] = find_source(held, formed, 7)
    assert source and source.step == 4
    assert reason == "step 5 of generation 1: not all is left of model.embedding and 11 more"


def test_the_generation_before_serves_until_the_new_one_is_whole():
    formed = {1: generation(EIGHT, list(range(8))), 2: generation(PIPELINE, [0, 1, 2, 9])}
    held = {m: [(1, [6])] for m in (0, 1, 2, 4, 5, 6)}
    source, reasons = find_source({**held, 2: [(1, [6]), (2, [6])]}, formed, 6)
    assert source and (source.generation, source.step) == (1, 6) and len(reasons) == 1
    source, reasons = find_source({**held, **{m: [(1, [6]), (2, [6])] for m in (0, 2)}}, formed, 6)
    assert source and (source.generation, source.step) == (2, 6) and not reasons
    assert find_source({m: [(1, [6])] for m in range(8)}, {2: formed[2]}, 6) == (None, [])  # long forgotten


def test_nothing_is_whole_where_a_block_is_lost_with_its_copy():
    formed = {1: generation(EIGHT, list(range(8)))}
    source, reasons = find_source(everybody([0, 1, 2, 5, 6, 7], 1, 2), formed, 6)
    assert source is None and [reason.split(":")[0] for reason in reasons] == [
        "step 2 of generation 1",
        "step 1 of generation 1",
    ]
    nodes = ["a"] * 4 + ["b"] * 4
    source, _ = find_source(everybody(range(4), 1, 2), {1: generation(EIGHT, list(range(8)), nodes)}, 4)
    assert source and source.step == 2  # a whole node may go


@pytest.mark.parametrize("size", [7, 6, 5, 4, 3, 1])
def test_few_seats_go_to_those_that_have_everything_or_the_others_pass_it_on(size):
    formed = {1: generation(EIGHT, list(range(8)))}
    source, _ = find_source(everybody(range(1, 8), 2), formed, size)
    assert source and len(source.kept) == size and bool(source.gathered) == (size < 4)
    source = seated(source, [], size)
    assert len(set(source.seats)) == size and lost(source.holders()) == []
    if source.gathered:
        survived, handed = source.gathering()
        assert lost(survived) == [] and {r for _, _, r in handed} <= set(map(source.gathered.index, source.kept))
        alone = replace(source, gathered=[])
        assert lost(alone.holders()), "negative control: without passing it on something is lost"


def test_survivors_keep_their_ranks_and_others_fill_the_holes():
    source = Source(1, 2, generation(EIGHT, [10, 11, 12, 13]), kept=[0, 2, 3], gathered=[], survivors=[0, 2, 3])
    four, three = seated(source, [20, 21], 4), seated(source, [], 3)
    assert (four.seats, four.ranks) == ([10, 20, 12, 13], {0: 0, 2: 2, 3: 3})
    assert (three.seats, three.ranks) == ([10, 13, 12], {0: 0, 2: 2, 3: 1})
