"""The rule of the copies at peers: no loss of one domain loses an element, and the load is even."""

from collections import Counter
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from platform.checkpoint.blocks import LARGEST_ROW, Box, HeldTensor, list_held_tensors
from platform.checkpoint.memory_recovery import is_recoverable, list_unrecoverable_tensors, map_keepers
from platform.checkpoint.snapshots import MemoryMap
from platform.predict.make_plan import make_plan
from tests.checkpoint.moves.test_plans import KINDS, PLANS
from tests.harness.oracle import configure
from tests.harness.storage_job import Job, values

SHAPES = {"a": (13, 6), "b": (5, 4, 7), "c": (31,), "d": (), "e": (3, 17), "f": (9, 2), "g": (1, 1, 23)}
DOMAINS = st.lists(st.integers(0, 3), min_size=1, max_size=7)
ROW = 16


@pytest.fixture
def small_rows(monkeypatch):
    """Small tensors are cut as large ones are."""
    monkeypatch.setattr("platform.checkpoint.blocks.LARGEST_ROW", ROW)


def failing(held: MemoryMap, nodes: Sequence, shared: bool = False, divided: bool = True) -> list:
    """Every rank's domain: on one node its memory or, where it may turn out to be damaged, itself."""
    return list(nodes if len(set(nodes)) > 1 else held.memories if divided or not shared else range(len(nodes)))


MAPS = st.sampled_from([(False, False), (True, False), (True, True)])  # shared, divided


def random_state(seed: int, domains: list[int]) -> list[HeldTensor]:
    return Job.random(values(SHAPES), len(domains), np.random.default_rng(seed)).state


def written(held: MemoryMap, rank: int) -> list:
    """What is in a rank's memory."""
    return [
        *held.parts_to_snapshot(rank),
        *(part for copy in held.copies if copy.receiver == rank for part in copy.tensor_parts),
    ]


def lost_elements(held: MemoryMap, alive: Sequence[int], name: str | None = None) -> int:
    """Element by element: of what is in the memories in which anybody lives."""
    missing = 0
    memories = {held.memories[rank] for rank in alive}
    readable = [part for rank, memory in enumerate(held.memories) if memory in memories for part in written(held, rank)]
    for tensor in held.state:
        covered = np.zeros(tensor.shape, bool)
        everything = Box.whole_tensor(tensor.shape)
        for part in readable:
            if part.tensor.name == tensor.name:
                covered[part.box.relative_slices(everything)] = True
        missing += int((~covered).sum()) if name in (None, tensor.name) else 0
    return missing


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), nodes=DOMAINS, how=MAPS)
def test_any_one_domain_may_be_lost(seed, nodes, how):
    held = MemoryMap(random_state(seed, nodes), nodes, *how)
    domain = failing(held, nodes, *how)
    for copy in held.copies:
        assert domain[copy.sender] != domain[copy.receiver]
        assert copy.sender in copy.chain.holders and len({domain[rank] for rank in copy.chain.holders}) == 1
        own = held.parts_to_snapshot(copy.sender)  # and so it is in its memory to be sent
        assert all(
            any(part.box.intersect_box(o.box) == part.box for o in own if o.tensor is part.tensor)
            for part in copy.tensor_parts
        )
    for gone in set(domain) if len(set(domain)) > 1 else ():
        alive = [rank for rank, home in enumerate(domain) if home != gone]
        assert lost_elements(held, alive) == 0 and list_unrecoverable_tensors(held, alive) == []


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), nodes=DOMAINS, how=MAPS, alive=st.sets(st.integers(0, 6)))
def test_what_is_whole_is_what_has_every_element(seed, nodes, how, alive):
    """After any loss, of several domains too."""
    held = MemoryMap(random_state(seed, nodes), nodes, *how)
    left = sorted(rank for rank in alive if rank < len(nodes))
    for tensor in held.state:
        assert (tensor.name in list_unrecoverable_tensors(held, left)) == (lost_elements(held, left, tensor.name) > 0)
    memories = {held.memories[rank] for rank in left}
    assert is_recoverable(map_keepers(held), memories) == (list_unrecoverable_tensors(held, left) == [])


@given(seed=st.integers(0, 2**32), nodes=DOMAINS)
def test_of_distrusted_ranks_nothing_counts(seed, nodes):
    """As if they had been alone in their memories, and those were gone."""
    held = MemoryMap(random_state(seed, nodes), nodes, True, divided=False)
    apart = MemoryMap(held.state, nodes, False)
    for wrong in range(len(nodes)):
        rest = [rank for rank in range(len(nodes)) if rank != wrong]
        missing = list_unrecoverable_tensors(held, rest, {wrong})
        if len(set(nodes)) > 1:
            assert (
                missing == list_unrecoverable_tensors(apart, rest, {wrong}) == list_unrecoverable_tensors(apart, rest)
            )
        assert is_recoverable(map_keepers(held, {wrong}), {held.memories[rank] for rank in rest}) == (missing == [])


@given(seed=st.integers(0, 2**32), nodes=DOMAINS)
def test_ranks_that_share_memory_divide_what_they_hold_alike(seed, nodes):
    """Each byte is written once per node that has it; apart, once per rank."""
    state = random_state(seed, nodes)
    shared, apart = MemoryMap(state, nodes, True), MemoryMap(state, nodes, False)
    per_node = sum(
        box.num_elements * t.itemsize * len({nodes[rank] for rank in ranks})
        for t in state
        for box, ranks in t.holders.items()
    )
    per_rank = sum(box.num_elements * t.itemsize * len(ranks) for t in state for box, ranks in t.holders.items())
    ranks = range(len(nodes))
    assert sum(part.nbytes for rank in ranks for part in shared.parts_to_snapshot(rank)) == per_node
    assert sum(part.nbytes for rank in ranks for part in apart.parts_to_snapshot(rank)) == per_rank


def balanced(state: list[HeldTensor], nodes: list[int], row: int, shared: bool) -> None:
    held = MemoryMap(state, nodes, shared)
    home = failing(held, nodes)
    ranks, exclusive, sent = Counter(home), Counter(), Counter()
    for chain in held.chains:
        if len({home[rank] for rank in chain.holders}) == 1:
            exclusive[home[chain.holders[0]]] += chain.nbytes
            for rank in chain.holders:
                sent[rank] += chain.nbytes / len(chain.holders)
    if len(ranks) < 2:
        assert held.copies == []
        return
    least = max(sum(exclusive.values()) / len(nodes), *(exclusive[h] / (len(nodes) - ranks[h]) for h in ranks))
    received, by_sender = Counter(), Counter()
    for copy in held.copies:
        assert copy.nbytes == sum(part.nbytes for part in copy.tensor_parts)
        received[copy.receiver] += copy.nbytes
        by_sender[copy.sender] += copy.nbytes
    for rank in range(len(nodes)):
        assert received[rank] <= least + 1 + row, "no rule gives the fullest rank less than `least`"
        assert abs(by_sender[rank] - sent[rank]) <= len(held.chains) * row, "holders take turns as senders"


@pytest.mark.usefixtures("small_rows")
def test_the_load_is_even():
    @settings(max_examples=60)
    @given(seed=st.integers(0, 2**32), nodes=DOMAINS, shared=st.booleans())
    def check(seed, nodes, shared):
        balanced(random_state(seed, nodes), nodes, ROW, shared)

    check()


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "serial"])
def test_every_plan_survives_the_loss_of_a_worker_and_of_a_node(plan):
    planned = make_plan(configure(layers=4, **PLANS[plan]))
    state = [held for kind, dtype in KINDS.items() for held in list_held_tensors(planned, kind, dtype)]
    size = planned.mesh.world_size
    for nodes in ([0] * size, [rank * 2 // size for rank in range(size)], [rank % 2 for rank in range(size)]):
        for shared in (False, True):
            held = MemoryMap(state, nodes, shared)
            home = failing(held, nodes)
            for gone in set(home) if len(set(home)) > 1 else ():
                assert list_unrecoverable_tensors(held, [rank for rank in range(size) if home[rank] != gone]) == []
            if shared:
                one_each = {node: nodes.index(node) for node in nodes}.values()
                assert list_unrecoverable_tensors(held, one_each) == [], (
                    "of each node's workers all but one may be lost"
                )
            balanced(state, nodes, LARGEST_ROW, shared)


def ways(state: list[HeldTensor], nodes: list[str], shared: bool = False) -> set[tuple[int, int]]:
    return {(copy.sender, copy.receiver) for copy in MemoryMap(state, nodes, shared).copies}


@pytest.mark.usefixtures("small_rows")
def test_replicas_elsewhere_need_no_copy_and_lonely_blocks_do():
    boxes = [Box((0,), (8,)), Box((8,), (8,))]
    held = HeldTensor("w", "float32", (16,), {boxes[0]: (0, 2), boxes[1]: (1, 3)})
    assert ways([held], ["a", "a", "b", "b"]) == set()
    assert ways([held], ["a", "b", "a", "b"]) == {(0, 1), (2, 3), (1, 0), (3, 2)}
    assert ways([held], ["a"] * 4) == set()  # one node: each rank by itself, and each block on two
    assert ways([HeldTensor("w", "float32", (16,), {Box.whole_tensor((16,)): (0,)})], ["a"]) == set()
    lonely = HeldTensor("w", "float32", (16,), {boxes[0]: (0,), boxes[1]: (1,)})
    assert ways([lonely], ["a", "a"]) == {(0, 1), (1, 0)} and ways([lonely], ["a", "a"], shared=True) == set()


def test_negative_control_without_copies_or_with_a_wrong_one_something_is_lost():
    boxes = [Box((4 * rank,), (4,)) for rank in range(4)]
    state = [HeldTensor("w", "float32", (16,), {box: (rank,) for rank, box in zip(count(), boxes, strict=False)})]
    for shared in (False, True):
        held = MemoryMap(state, ["a", "a", "b", "b"], shared)
        assert lost_elements(held, [2, 3]) == 0 and list_unrecoverable_tensors(held, [2, 3]) == []
        copies = held.copies
        held.copies = [copy._replace(receiver=copy.receiver ^ 2) for copy in copies]  # in the sender's domain
        assert lost_elements(held, [2, 3]) == 8 and list_unrecoverable_tensors(held, [2, 3]) == ["w"]
        held.copies = []
        assert lost_elements(held, [2, 3]) == 8 and list_unrecoverable_tensors(held, [2, 3]) == ["w"]
        assert list_unrecoverable_tensors(held, [0, 1, 2, 3]) == []
