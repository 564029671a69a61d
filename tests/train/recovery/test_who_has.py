"""Which state a re-formed run goes on from, and who takes which seat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from platform.checkpoint.memory_recovery import list_lost_tensors
from platform.train.state_recovery import Formation, MemorySource, find_source
from tests.harness.oracle import configure
from tests.harness.seats import seated

EIGHT = configure(data=8, zero=1, microbatch=1)  # each rank alone has an eighth of the moments
PIPELINE = configure(pipeline="1f1b", stages=2, data=2)  # ranks 0, 1: stage 0; 2, 3: stage 1


def generation(c, seats: list[int], nodes: list[str] | None = None, shared: bool = False) -> Formation:
    return Formation(c, None, nodes or [], seats, ["exp_avg", "exp_avg_sq"], shared)


def test_the_newest_step_that_all_have():
    formed = {1: generation(EIGHT, list(range(10, 18)))}
    source, reasons = find_source({1: 5}, formed, range(10, 17), 7)
    assert source and source.step == 5 and source.generation == 1 and not reasons and not source.gathered
    assert source.kept == list(range(7)) and source.members_of_ranks(source.kept) == list(range(10, 17))


def test_the_generation_before_serves_until_the_new_one_is_whole():
    formed = {1: generation(EIGHT, list(range(8))), 2: generation(PIPELINE, [0, 1, 2, 9])}
    alive = [0, 1, 2, 4, 5, 6]
    source, reasons = find_source({1: 6}, formed, alive, 6)
    assert source and (source.generation, source.step) == (1, 6) and not reasons
    source, reasons = find_source({1: 6, 2: 6}, formed, alive, 6, {(2, 0), (2, 1)})
    assert source and (source.generation, source.step) == (1, 6)
    assert reasons == ["step 6 of generation 2: not all is left of model.position and 50 more"]
    source, reasons = find_source({1: 6, 2: 6}, formed, alive, 6)
    assert source and (source.generation, source.step) == (2, 6) and not reasons
    source, reasons = find_source({1: 7, 2: 6}, formed, alive, 6)
    assert source and (source.generation, source.step) == (1, 7) and not reasons
    assert find_source({}, {2: formed[2]}, range(8), 6) == (None, [])  # long forgotten


def test_nothing_is_whole_where_a_block_is_lost_with_its_copy():
    formed = {1: generation(EIGHT, list(range(8)))}
    source, reasons = find_source({1: 2}, formed, [0, 1, 2, 5, 6, 7], 6)
    assert source is None and [reason.split(":")[0] for reason in reasons] == ["step 2 of generation 1"]
    nodes = ["a"] * 4 + ["b"] * 4
    source, _ = find_source({1: 2}, {1: generation(EIGHT, list(range(8)), nodes)}, range(4), 4)
    assert source and source.step == 2  # a whole node may go


def test_a_rank_that_shares_memory_stands_for_all_of_its_node():
    """Whoever of them is left, with whatever they wrote; but not for the memory of those that are distrusted."""
    formed = {1: generation(EIGHT, list(range(8)), shared=True)}
    source, reasons = find_source({1: 2}, formed, [5], 1)
    assert source and (source.kept, source.gathered, reasons) == ([5], [], [])
    nodes = ["a"] * 4 + ["b"] * 4
    formed = {1: generation(EIGHT, list(range(8)), nodes, shared=True)}
    source, _ = find_source({1: 2}, formed, [2, 3], 2)
    assert source and source.kept == [2, 3]
    compared = configure(data=8, zero=1, microbatch=1)
    compared.train.verify_every = 1
    formed = {1: generation(compared, list(range(8)), shared=True)}
    assert find_source({1: 2}, formed, range(8), 8)[0]
    source, reasons = find_source({1: 2}, formed, range(8), 8, {(1, 3)})
    assert source and 3 not in source.kept and reasons == []  # others have copies of its shards
    source, [reason] = find_source({1: 2}, formed, range(8), 8, {(1, member) for member in range(1, 8)})
    assert source is None and reason.startswith("step 2 of generation 1: not all is left of ")
    replicas = configure(data=2)
    replicas.train.verify_every = 1
    formed = {1: generation(replicas, [0, 1], shared=True)}
    source, _ = find_source({1: 2}, formed, [0, 1], 2, {(1, 0)})
    assert source and source.distrusted == [0] and source.kept == [1]


@pytest.mark.parametrize("size", [7, 6, 5, 4, 3, 1])
def test_few_seats_go_to_those_that_have_everything_or_the_others_pass_it_on(size):
    formed = {1: generation(EIGHT, list(range(8)))}
    source, _ = find_source({1: 2}, formed, range(1, 8), size)
    assert source and len(source.kept) == size and bool(source.gathered) == (size < 4)
    source, held = seated(source, [], size), source.formed.build_memory_map()
    assert len(set(source.seats)) == size and list_lost_tensors(held.state, source.list_surviving_chains(held)) == []
    if source.gathered:
        survived, handed = source.plan_handovers(held)
        assert list_lost_tensors(held.state, survived) == []
        assert {copy.receiver for copy in handed} <= set(map(source.gathered.index, source.kept))
        alone = replace(source, gathered=[])
        assert list_lost_tensors(held.state, alone.list_surviving_chains(held)), (
            "negative control: without passing it on something is lost"
        )


def test_survivors_keep_their_ranks_and_others_fill_the_holes():
    source = MemorySource(1, 2, generation(EIGHT, [10, 11, 12, 13]), kept=[0, 2, 3], gathered=[], survivors=[0, 2, 3])
    four, three = seated(source, [20, 21], 4), seated(source, [], 3)
    assert (four.seats, four.new_rank_by_old) == ([10, 20, 12, 13], {0: 0, 2: 2, 3: 3})
    assert (three.seats, three.new_rank_by_old) == ([10, 13, 12], {0: 0, 2: 2, 3: 1})
