"""The rule of the copies at peers: no loss of one domain loses an element, and the load is even."""

from collections import Counter
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.placement import LARGEST_ROW, HeldTensor, group_by_holders, planned_tensors
from platform.checkpoint.in_memory.copies import Copy, copies, kept_bytes
from platform.checkpoint.in_memory.recover import is_recoverable, keepers, lost_to
from platform.planning.make_plan import make_plan
from tests.checkpoint.moves.test_plans import KINDS, PLANS
from tests.harness.oracle import configure
from tests.harness.storage_job import Job, values

SHAPES = {"a": (13, 6), "b": (5, 4, 7), "c": (31,), "d": (), "e": (3, 17), "f": (9, 2), "g": (1, 1, 23)}
DOMAINS = st.lists(st.integers(0, 3), min_size=1, max_size=7)
ROW = 16


@pytest.fixture
def small_rows(monkeypatch):
    """Small tensors are cut as large ones are."""
    monkeypatch.setattr("platform.checkpoint.blocks.placement.LARGEST_BLOCK", 64)
    monkeypatch.setattr("platform.checkpoint.blocks.placement.LARGEST_ROW", ROW)


def homes(domains: list[int]) -> list[int]:
    return domains if len(set(domains)) > 1 else list(range(len(domains)))


def random_state(seed: int, domains: list[int]) -> list[HeldTensor]:
    return Job.random(values(SHAPES), len(domains), np.random.default_rng(seed)).state


def lost_elements(state: list[HeldTensor], kept: list[Copy], alive: list[int]) -> int:
    """Element by element."""
    missing = 0
    for tensor in state:
        found = np.zeros(tensor.shape, bool)
        everything = Box.whole(tensor.shape)
        boxes = [box for box, ranks in tensor.holders.items() if set(ranks) & set(alive)]
        boxes += [part.box for part, _, at in kept if part.tensor.name == tensor.name and at in alive]
        for box in boxes:
            found[box.within(everything)] = True
        missing += int((~found).sum())
    return missing


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), domains=DOMAINS)
def test_any_one_domain_may_be_lost(seed, domains):
    state, home = random_state(seed, domains), homes(domains)
    kept = copies(state, domains)
    for part, sender, receiver in kept:
        assert home[sender] != home[receiver]
        [block] = [b for b in part.tensor.holders if b.overlap(part.box) == part.box]
        assert sender in part.tensor.holders[block] and len({home[r] for r in part.tensor.holders[block]}) == 1
    for gone in set(home) if len(domains) > 1 else ():
        alive = [rank for rank, h in enumerate(home) if h != gone]
        assert lost_elements(state, kept, alive) == 0 and lost_to(state, kept, alive) == []


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), domains=DOMAINS, alive=st.sets(st.integers(0, 6)))
def test_what_is_whole_is_what_has_every_element(seed, domains, alive):
    """After any loss, of several domains too."""
    state = random_state(seed, domains)
    kept = copies(state, domains)
    left = sorted(rank for rank in alive if rank < len(domains))
    for tensor in state:
        assert (tensor.name in lost_to(state, kept, left)) == (lost_elements([tensor], kept, left) > 0)
    assert is_recoverable(keepers(state, kept), set(left)) == (lost_to(state, kept, left) == [])


def balanced(state: list[HeldTensor], domains: list[int], row: int) -> None:
    home = homes(domains)
    kept = copies(state, domains)
    ranks, exclusive, sent = Counter(home), Counter(), Counter()
    for group, blocks in group_by_holders(state).items():
        if len({home[rank] for rank in group}) == 1:
            size = sum(block.nbytes for block in blocks)
            exclusive[home[group[0]]] += size
            for rank in group:
                sent[rank] += size / len(group)
    if len(ranks) < 2:
        assert kept == []
        return
    least = max(sum(exclusive.values()) / len(domains), *(exclusive[h] / (len(domains) - ranks[h]) for h in ranks))
    received, given = Counter(), Counter()
    for part, sender, receiver in kept:
        received[receiver] += part.nbytes
        given[sender] += part.nbytes
    groups = len(group_by_holders(state))
    for rank in range(len(domains)):
        assert received[rank] <= least + 1 + row, "no rule gives the fullest rank less than `least`"
        assert abs(given[rank] - sent[rank]) <= groups * row, "holders take turns as senders"
        assert kept_bytes(state, kept, rank)["copies"] == 2 * received[rank]


@pytest.mark.usefixtures("small_rows")
def test_the_load_is_even():
    @settings(max_examples=60)
    @given(seed=st.integers(0, 2**32), domains=DOMAINS)
    def check(seed, domains):
        balanced(random_state(seed, domains), domains, ROW)

    check()


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "serial"])
def test_every_plan_survives_the_loss_of_a_worker_and_of_a_node(plan):
    made = make_plan(configure(layers=4, **PLANS[plan]))
    state = [held for kind, dtype in KINDS.items() for held in planned_tensors(made, kind, dtype)]
    size = made.mesh.size
    for domains in ([0] * size, [rank * 2 // size for rank in range(size)], [rank % 2 for rank in range(size)]):
        home = homes(domains)
        kept = copies(state, domains)
        for gone in set(home):
            assert lost_to(state, kept, [rank for rank in range(size) if home[rank] != gone]) == []
        balanced(state, domains, LARGEST_ROW)


@pytest.mark.usefixtures("small_rows")
def test_replicas_elsewhere_need_no_copy_and_lonely_blocks_do():
    boxes = [Box((0,), (8,)), Box((8,), (8,))]
    held = HeldTensor("w", "float32", (16,), {boxes[0]: (0, 2), boxes[1]: (1, 3)})
    assert copies([held], ["a", "a", "b", "b"]) == []
    assert {(c.sender, c.receiver) for c in copies([held], ["a", "b", "a", "b"])} == {(0, 1), (2, 3), (1, 0), (3, 2)}
    assert copies([held], ["a"] * 4) == []  # one node: each rank by itself, and each block on two
    assert copies([HeldTensor("w", "float32", (16,), {Box.whole((16,)): (0,)})], ["a"]) == []


def test_negative_control_without_copies_or_with_a_wrong_one_something_is_lost():
    boxes = [Box((4 * rank,), (4,)) for rank in range(4)]
    held = [HeldTensor("w", "float32", (16,), {box: (rank,) for rank, box in zip(count(), boxes, strict=False)})]
    domains = ["a", "a", "b", "b"]
    kept = copies(held, domains)
    assert lost_elements(held, kept, [2, 3]) == 0 and lost_to(held, kept, [2, 3]) == []
    assert lost_elements(held, [], [2, 3]) == 8 and lost_to(held, [], [2, 3]) == ["w"]
    assert lost_to(held, [], [0, 1, 2, 3]) == []
    here = [copy._replace(receiver=copy.receiver ^ 2) for copy in kept]  # in the sender's domain
    assert lost_elements(held, here, [2, 3]) == 8 and lost_to(held, here, [2, 3]) == ["w"]
