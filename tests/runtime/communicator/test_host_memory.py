"""Messages in host memory on real processes: which connections there are, and that no wait outlives an abort or the
time to connect."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count

import pytest
import torch

from platform.plan.layout import Mesh
from platform.predict.make_plan import make_plan
from platform.runtime import host_memory
from platform.runtime.communicator import Aborted
from platform.runtime.host_memory import PATIENCE, HostMemory, find_tree_relatives
from platform.runtime.progress import open_sockets
from tests.harness.oracle import configure

RANKS = 8
LARGE = 3_000_000  # bytes: more than a connection's buffers take
FEW = {0: {3}, 3: {0, 5}, 5: {3}}  # who sends to whom
SHORT = timedelta(seconds=0.2)


def on_all(pool, work, ranks: int = RANKS) -> list:
    c = configure(data=ranks, microbatch=1, global_batch=ranks)
    return pool.run(work, c, make_plan(c))


def exchanged(config, plan, communicator):
    """Exchange messages among some ranks, twice. Returns the connections of the tree, those left by the exchanges,
    those of each exchange, and what came."""
    rank, tree, received, most = communicator.rank, open_sockets(), {}, []
    connected = communicator._connect_group

    def watched(*arguments):
        group = connected(*arguments)
        most.append(len(open_sockets().keys() - tree.keys()))
        return group

    communicator._connect_group = watched
    for number in range(2):
        received = {peer: torch.zeros(LARGE + peer, dtype=torch.uint8) for peer in FEW.get(rank, ())}
        sent = [(peer, torch.full((LARGE + rank,), 10 * number + rank, dtype=torch.uint8)) for peer in received]
        communicator.exchange(sent, list(received.items()))
    left = len(open_sockets().keys() - tree.keys())
    known = len(communicator.connections.items() & tree.items())
    return known, left, most, {peer: x.unique().tolist() for peer, x in received.items()}


def test_only_those_who_have_something_for_each_other_are_connected(pool):
    """Each connection is one socket, each group one more that listens; an exchange leaves none behind."""
    for rank, (tree, left, most, received) in enumerate(on_all(pool, exchanged)):
        assert tree == 1 + len(find_tree_relatives(rank, RANKS).peer_ranks) and left == 0
        assert most == [1 + len(FEW[rank]) if rank in FEW else 0] * 2
        assert received == {peer: [10 + peer] for peer in FEW.get(rank, ())}


def told(config, plan, communicator) -> bool:
    """Tell, collect and announce texts of all lengths, some of none."""
    rank, ranks = communicator.rank, range(plan.mesh.world_size)
    for length in (0, 1, 500, 504, 505, 100_000):
        assert communicator.all_gather_texts("é" * (length * (rank % 2))) == ["é" * (length * (r % 2)) for r in ranks]
        assert communicator.broadcast_text("y" * length if rank == 0 else None) == "y" * length
        rows = communicator.collect_numbers(torch.full((1 + length,), float(rank), dtype=torch.float64))
        assert rows is None if rank else torch.equal(rows[:, -1], torch.arange(len(ranks), dtype=torch.float64))
    return True


def test_texts_and_numbers_of_all_ranks(pool, monkeypatch):
    assert all(on_all(pool, told)) and all(on_all(pool, told_in_twos))


def told_in_twos(config, plan, communicator) -> bool:
    """The same in a tree of several levels."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("platform.runtime.host_memory.BRANCHES", 2)
        memory = HostMemory(plan.mesh, communicator.rank, torch.distributed.PrefixStore("twos", communicator._store))
        assert len(memory._relatives.peer_ranks) <= 3
        return told(config, plan, memory)


def ended(wait) -> float:
    """Returns the seconds until `wait`, in a thread, has failed."""
    with pytest.raises(RuntimeError):
        wait()
    return time.perf_counter()


def aborted(config, plan, communicator) -> list[float]:
    """Wait for what nobody sends, in the tree and in an exchange, until `abort`; return the seconds from then on."""
    seconds, other = [], 1 - communicator.rank
    waits = [
        lambda memory: memory.collect_numbers(torch.zeros(1)) if memory.rank == 0 else memory.broadcast_text(),
        lambda memory: memory.exchange([], [(other, torch.zeros(1, dtype=torch.uint8))]),
    ]
    for number, wait in enumerate(waits):
        store = torch.distributed.PrefixStore(f"abort {number}", communicator._store)
        memory = HostMemory(plan.mesh, communicator.rank, store)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(ended, lambda memory=memory, wait=wait: wait(memory))
            time.sleep(0.3)
            assert not waiting.done()
            communicator.barrier()
            known, memory.connections = memory.connections, {}
            memory.abort()  # the negative control: of sockets that it does not know
            communicator.barrier()
            time.sleep(0.1)
            assert not waiting.done()
            communicator.barrier()
            start, memory.connections = time.perf_counter(), known
            memory.abort()
            seconds.append(waiting.result(10) - start)
    return seconds


def test_an_abort_ends_a_wait(pool):
    for seconds in on_all(pool, aborted, 2):
        assert len(seconds) == 2 and max(seconds) < 1  # negative where the other abort came first


def alone(config, plan, communicator) -> list[float]:
    """Connect to a rank that does not connect, to one that is not even there, and each in its turn: one of the two
    waits for the other's call. Returns the seconds."""
    seconds, groups, communicator._gather_up_tree = [], [], lambda *_: torch.zeros(1)
    communicator._broadcast_down_tree = lambda *_: None
    for turn in range(2):
        for idle in (True, False):
            name = f"alone {turn} {idle}"
            groups += [communicator._build_lazy_group(name, SHORT)] if idle and communicator.rank != turn else []
            communicator.barrier()
            if communicator.rank == turn:
                start = time.perf_counter()
                seconds.append(ended(lambda name=name: communicator._connect_group(name, [1 - turn], SHORT)) - start)  # noqa: B023
            communicator.barrier()
    return seconds


def test_who_does_not_come_to_connect_is_waited_for_no_longer_than_that(pool):
    for seconds in on_all(pool, alone, 2):
        assert len(seconds) == 2
        assert SHORT.total_seconds() / 2 < min(seconds) and max(seconds) < PATIENCE * SHORT.total_seconds() + 1


def test_what_connects_during_an_abort_is_not_used(monkeypatch):
    """The abort did not know its sockets."""
    memory, calls = HostMemory.__new__(HostMemory), count()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host_memory, "_send_and_receive_tensors", lambda *_: next(calls) and memory.abort())
        patched.setenv("GLOO_SOCKET_IFNAME", "lo")
        memory.__init__(Mesh.arrange_axes({"data": 1}), 0, torch.distributed.HashStore())
        assert not memory.connections
        with pytest.raises(Aborted):
            memory.connect_peers({0})
        assert len(memory.connections) == 1
