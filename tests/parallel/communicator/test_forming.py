"""What forming a generation costs on thousands of GPUs, counted without one: calls of the whole world, and bytes
through the store."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from platform.cluster.crew.base.job import GLOO_ENVIRONMENT
from platform.launch import compose
from platform.parallel.communicator import torch_distributed
from platform.parallel.communicator.torch_distributed import ProcessGroups, connect_timeout, disjoint
from platform.plan.core.step_collectives import communicators, process_groups
from platform.planning.make_plan import make_plan

TRILLION = [
    "model=gpt_1t", "pipeline.stages=64", "pipeline.chunks=2", "parallel.data=6", "train.global_batch=3072",
    "train.microbatch=1",
]  # fmt: skip
SIZES = {128: [], 1024: ["parallel.data=8"], 3072: TRILLION}


class CountedDist(SimpleNamespace):
    """In place of torch.distributed with NCCL: makes groups of nothing, and counts the calls that all ranks make."""

    def __init__(self):
        self.calls, self.rank = 0, 0
        c10d = SimpleNamespace(_set_pg_timeout=lambda *_: None)
        super().__init__(get_backend=lambda: "nccl", group=SimpleNamespace(WORLD=object()), distributed_c10d=c10d)

    def new_group(self, backend, timeout):
        self.calls += 1
        return object()

    def split_group(self, split_ranks, timeout):
        self.calls += 1
        members = [rank for ranks in split_ranks for rank in ranks]
        assert len(members) == len({*members}), "a rank is in two groups of one split"
        return next((tuple(ranks) for ranks in split_ranks if self.rank in ranks), None)


@pytest.mark.parametrize("ranks", SIZES)
def test_calls_of_the_whole_world_do_not_grow_with_it(ranks, monkeypatch):
    """Each is a collective of all ranks, one after the other: of a group each they were 281, 2,369 and 7,089."""
    plan = make_plan(compose(["+experiment=gpt175b", *SIZES[ranks]]))
    assert plan.mesh.size == ranks
    monkeypatch.setattr(torch_distributed, "dist", CountedDist())
    for rank in (0, ranks // 2, ranks - 1):
        torch_distributed.dist.rank, torch_distributed.dist.calls = rank, 0
        start = time.process_time()
        groups = ProcessGroups(plan.mesh, rank, process_groups(plan), neighbours=plan.neighbours)
        assert torch_distributed.dist.calls <= len(plan.mesh.axes) + 6
        assert time.process_time() - start < 60  # listing them took minutes
        stage = groups.coordinates["stage"]
        lines = [group for group in groups._lines.values() if group]
        world = torch_distributed.dist.group.WORLD
        assert communicators(plan, stage) == (len({world, *groups._groups.values()}), len(lines))
        for ways, group in groups._lines.items():
            if stage in ways:
                ends = {groups.mesh.rank({**groups.coordinates, "stage": end}) for end in ways}
                assert {*group} == ends
            else:
                assert group is None
        for axes in process_groups(plan):
            if groups._groups[axes] is not torch_distributed.dist.group.WORLD:
                assert groups._groups[axes] == groups.mesh.group(rank, axes)


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
    assert len(disjoint(chain)) == 2 and len(disjoint(sorted([*chain, (0, 63)]))) == 2
    assert len(disjoint([(0, 1), (0, 2), (1, 2)])) == 3
    star = [(0, i) for i in range(1, 5)]  # tied parameters on many stages
    assert len(disjoint(star)) == 4
    assert sorted(pair for pairs in disjoint(chain) for pair in pairs) == chain


def test_a_large_world_has_longer_to_connect():
    assert 4 <= connect_timeout(2).total_seconds() < 5 and connect_timeout(3072).total_seconds() > 60


COUNTED = """
import os, sys, threading
from datetime import timedelta
import torch.distributed as dist
held, count = dist.HashStore(), [0]
class Counting(dist.Store):
    def set(self, key, value): held.set(key, value)
    def get(self, key):
        value = held.get(key)
        count[0] += len(value)
        return value
    def wait(self, keys, timeout=None): held.wait(keys, timedelta(seconds=60))
    def add(self, key, n): return held.add(key, n)
    def check(self, keys): return held.check(keys)
store, ranks, groups = Counting(), int(sys.argv[1]), []
def make(rank):
    groups.append(dist.ProcessGroupGloo(dist.PrefixStore("world", store), rank, ranks, timedelta(seconds=60)))
threads = [threading.Thread(target=make, args=(rank,)) for rank in range(ranks)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(groups) == ranks
print(count[0] // ranks, flush=True)
os._exit(0)
"""


def bytes_per_rank(ranks: int, environment: dict[str, str]) -> int:
    """Return the bytes that each of so many ranks reads in the store while a group of gloo forms."""
    there = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [sys.executable, "-c", COUNTED, str(ranks)]
    return int(subprocess.run(command, env=there, check=True, capture_output=True, text=True).stdout)


def test_bytes_through_the_store_grow_with_the_ranks_and_not_with_their_square():
    few, many = (bytes_per_rank(n, GLOO_ENVIRONMENT) for n in (8, 32))
    assert many == 4 * few
    assert bytes_per_rank(32, {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "0"}) > 2 * many  # the negative control
