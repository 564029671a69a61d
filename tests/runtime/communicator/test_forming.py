"""What forming a generation costs on thousands of GPUs, counted without one: calls of the whole world, and bytes
through the store."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from socket import gethostname
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch.distributed as dist

from platform.cluster.crew.job import GLOO_ENVIRONMENT
from platform.launch import compose_config
from platform.plan.step_collectives import count_communicators, process_groups
from platform.predict.make_plan import make_plan
from platform.runtime import host_memory
from platform.runtime import process_groups as torch_distributed
from platform.runtime.host_memory import BRANCHES, connect_timeout, find_tree_relatives
from platform.runtime.process_groups import ProcessGroups, divide_disjoint_pairs

TRILLION = [
    "model=gpt_1t", "pipeline.stages=64", "pipeline.chunks=2", "parallel.data=6", "train.global_batch=3072",
    "train.microbatch=1",
]  # fmt: skip
SIZES = {128: [], 1024: ["parallel.data=8"], 3072: TRILLION}


class NoMessages:
    """A group of gloo without connections: whatever is sent or received is done."""

    _Options, create_default_device = SimpleNamespace, staticmethod(lambda lazy_init: None)

    def __init__(self, *_):
        pass

    def send(self, *_):
        return SimpleNamespace(wait=lambda timeout: None)

    recv = send


class CountedDist(SimpleNamespace):
    """In place of torch.distributed with NCCL: makes groups of nothing, and counts the calls that all ranks make."""

    def __init__(self):
        self.calls, self.rank = 0, 0
        c10d = SimpleNamespace(_set_pg_timeout=lambda *_: None, _get_default_store=lambda: None)
        super().__init__(get_backend=lambda: "nccl", group=SimpleNamespace(WORLD=object()), distributed_c10d=c10d)
        self.ProcessGroupGloo, self.PrefixStore = NoMessages, lambda name, store: store

    def split_group(self, split_ranks, timeout):
        self.calls += 1
        members = [rank for ranks in split_ranks for rank in ranks]
        assert len(members) == len({*members}), "a rank is in two groups of one split"
        return next((tuple(ranks) for ranks in split_ranks if self.rank in ranks), None)


@pytest.mark.parametrize("ranks", SIZES)
def test_calls_of_the_whole_world_do_not_grow_with_it(ranks, monkeypatch):
    """Each is a collective of all ranks, one after the other: of a group each they were 281, 2,369 and 7,089."""
    plan = make_plan(compose_config(["+experiment=gpt175b", *SIZES[ranks]]))
    assert plan.mesh.world_size == ranks
    counts = CountedDist()
    for module in (host_memory, torch_distributed):
        monkeypatch.setattr(module, "dist", counts)
    for rank in (0, ranks // 2, ranks - 1):
        counts.rank, counts.calls = rank, 0
        start = time.process_time()
        groups = ProcessGroups(plan.mesh, rank, process_groups(plan), neighbours=plan.neighbour_stages)
        assert counts.calls <= len(plan.mesh.axes) + 5
        assert time.process_time() - start < 60  # listing them took minutes
        stage = groups.coordinates["stage"]
        lines = [group for group in groups._lines.values() if group]
        world = counts.group.WORLD
        assert count_communicators(plan)[stage] == (len({world, *groups._groups.values()}), len(lines))
        for ways, group in groups._lines.items():
            if stage in ways:
                ends = {groups.mesh.find_rank({**groups.coordinates, "stage": end}) for end in ways}
                assert {*group} == ends
            else:
                assert group is None
        for axes in process_groups(plan):
            if groups._groups[axes] is not world:
                assert groups._groups[axes] == groups.mesh.group_of_rank(rank, axes)


def test_torch_takes_what_it_is_given():
    """The real functions, of which a CPU build has no NCCL to run them with."""
    timeout = connect_timeout(2)
    inspect.signature(dist.split_group).bind(split_ranks=[[0, 1]], timeout=timeout)
    inspect.signature(dist.init_process_group).bind(
        "nccl", store=None, rank=0, world_size=2, timeout=timeout, device_id=None, pg_options=None
    )
    assert callable(dist.ProcessGroup.abort) and callable(dist.distributed_c10d._abort_process_group)


def test_pairs_that_share_nobody_are_made_together():
    chain = [(i, i + 1) for i in range(63)]
    assert len(divide_disjoint_pairs(chain)) == 2 and len(divide_disjoint_pairs(sorted([*chain, (0, 63)]))) == 2
    assert len(divide_disjoint_pairs([(0, 1), (0, 2), (1, 2)])) == 3
    star = [(0, i) for i in range(1, 5)]  # tied parameters on many stages
    assert len(divide_disjoint_pairs(star)) == 4
    assert sorted(pair for pairs in divide_disjoint_pairs(chain) for pair in pairs) == chain


def test_a_large_world_has_longer_to_connect():
    assert 4 <= connect_timeout(2).total_seconds() < 5 and connect_timeout(3072).total_seconds() > 60


COUNTED = """
import os, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
from platform.runtime.host_memory import HostMemory
from platform.runtime.progress import open_sockets
from platform.plan.layout import Mesh
held, lock, read, written = dist.HashStore(), threading.Lock(), [0], [0]
def add(total, value):
    with lock: total[0] += len(value)
    return value
class Counting(dist.Store):
    def set(self, key, value): held.set(key, add(written, value))
    def get(self, key): return add(read, held.get(key))
    def wait(self, keys, timeout=None): held.wait(keys, timedelta(seconds=60))
    def add(self, key, n): return held.add(key, n)
    def check(self, keys): return held.check(keys)
mesh, store, groups = Mesh.arrange_axes({"data": int(sys.argv[2])}), Counting(), {}
def tree(rank):
    groups[rank] = memory = HostMemory(mesh, rank, store)
    rows = memory.collect_numbers(torch.tensor([rank, 2.0 * rank], dtype=torch.float64))
    assert rank or rows.tolist() == [[r, 2.0 * r] for r in range(mesh.world_size)]
    assert memory.all_gather_texts("x" * rank) == ["x" * r for r in range(mesh.world_size)]
    assert memory.broadcast_text("z" * 9999 if rank == 0 else None) == "z" * 9999
    assert memory.broadcast_text("é" if rank == 0 else None) == "é"
def full(rank):
    groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("world", store), rank, mesh.world_size, timedelta(seconds=60))
before = open_sockets()
threads = [threading.Thread(target=globals()[sys.argv[1]], args=(rank,)) for rank in range(mesh.world_size)]
threading.excepthook = lambda failure: (sys.__excepthook__(*failure[:3]), os._exit(1))
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(groups) == mesh.world_size
print(read[0], written[0], len(open_sockets().keys() - before.keys()), flush=True)
os._exit(0)
"""


class Formed(NamedTuple):
    """What the group in host memory takes of all ranks together: bytes read in the store, bytes written, sockets."""

    read: int
    written: int
    sockets: int


def counted(how: str, ranks: int, environment: dict[str, str] = GLOO_ENVIRONMENT) -> Formed:
    """Form a group of so many threads along a `tree`, with all collectives, or a `full` mesh as gloo does; count."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [sys.executable, "-c", COUNTED, how, str(ranks)]
    return Formed(*map(int, subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout.split()))


def planned(how: str, ranks: int) -> Formed:
    """What `counted` finds where each rank's record is of RECORD bytes."""
    peers = [len(find_tree_relatives(rank, ranks).peer_ranks) if how == "tree" else ranks - 1 for rank in range(ranks)]
    reads = sum(peers) if how == "tree" else ranks**2  # gloo reads its own record too
    return Formed(RECORD * reads, RECORD * ranks, sum(peers) + ranks)


RECORD = 152 + len(gethostname())  # bytes, of the machine's name and an address


@pytest.mark.parametrize(("how", "ranks"), [("tree", 8), ("tree", 96), ("full", 8), ("full", 24)])
def test_what_host_memory_takes_of_the_store_and_in_sockets(how, ranks):
    assert counted(how, ranks) == planned(how, ranks)


def test_it_grows_with_the_ranks_and_not_with_their_square():
    """As gloo's own groups do, and with their cube unless the ranks stand for the connections."""
    for ranks in SIZES:
        tree, full = planned("tree", ranks), planned("full", ranks)
        assert tree.read + tree.written < 3 * ranks * RECORD and tree.sockets < 3 * ranks
        assert full.read == ranks**2 * RECORD and full.sockets == ranks**2
        assert max(len(find_tree_relatives(rank, ranks).peer_ranks) for rank in range(ranks)) <= 17
    few, many = (counted("full", n, {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "0"}).read for n in (8, 16))
    assert many > 4.5 * few


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 100, 3072, 4369, 4370])
def test_a_tree_has_a_place_for_every_rank(size):
    places = [find_tree_relatives(rank, size) for rank in range(size)]
    assert sorted(child for at in places for child in at.child_ranks) == [*range(1, size)]
    for rank, at in enumerate(places):
        assert len(at.child_ranks) <= BRANCHES and all(places[child].parent == rank for child in at.child_ranks)
        below = [rank, *(one for branch in at.branches for one in branch)]
        assert below == [*range(rank, rank + at.subtree_size)]
        assert [places[branch[0]].subtree_size for branch in at.branches] == [*map(len, at.branches)]
