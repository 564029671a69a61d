"""Messages in host memory beside a step: connections between those alone who send, and a way to end a wait in them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from platform.predict.make_plan import make_plan
from platform.runtime.progress import open_sockets
from tests.harness.oracle import configure

LARGE = 3_000_000  # bytes: more than a connection's buffers take
PEERS = {0: {1}, 1: {0, 2}, 2: {1, 3}, 3: {2}}  # a chain


def passed_on(config, plan, communicator) -> tuple[int, list[list[int]], list[list[int]]]:
    """Connect to both neighbours; send and receive in a thread while this one is in collectives. Returns the
    connections, what came from each neighbour, and the sums of the collectives."""
    rank, before, known = communicator.rank, open_sockets(), communicator.connections
    communicator.connect_peers(PEERS[rank])
    new = communicator.connections.items() - known.items()
    assert new == open_sockets().items() - before.items()
    connections = len(new)
    sent = [(peer, torch.full((LARGE,), 10 * rank + peer, dtype=torch.uint8)) for peer in PEERS[rank]]
    received = [(peer, torch.zeros(LARGE, dtype=torch.uint8)) for peer in PEERS[rank]]
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(communicator.transfer, sent, received)
        sums = [communicator.launch("all_reduce", torch.tensor([float(rank + i)]), ("data",)).wait() for i in range(20)]
        beside.result()
    return connections, [x.unique().tolist() for _, x in received], [x.tolist() for x in sums]


def interrupted(config, plan, communicator) -> tuple[bool, str, float, float]:
    """Wait in a thread for what nobody sends until `abort`: returns whether it waited till then, how and in how many
    seconds it ended, and the sum of a collective after that."""
    communicator.connect_peers({1 - communicator.rank})
    ended = []

    def receive():
        try:
            communicator.transfer([], [(1 - communicator.rank, torch.zeros(1, dtype=torch.uint8))])
        except RuntimeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    time.sleep(0.3)
    waited = thread.is_alive()
    communicator.barrier()
    start = time.perf_counter()
    communicator.abort()
    thread.join(10)
    seconds = time.perf_counter() - start
    [total] = communicator.launch("all_reduce", torch.ones(1), ("data",)).wait().tolist()
    return waited, *ended, seconds, total


def dealt(config, plan, communicator) -> tuple[list[int], list[int]]:
    """Exchange rows of uneven sizes, some of them none, and then parts of one size, each named by its two ends."""
    rank, n = communicator.rank, plan.mesh.world_size
    sent, received = ([(i * rank + (i if way else rank)) % 3 for i in range(n)] for way in (True, False))
    rows = torch.cat([torch.full((size, 2), 10.0 * rank + i) for i, size in enumerate(sent)])
    one = communicator.launch_all_to_allv(rows, sent, received, ("data",))
    other = communicator.launch("all_to_all", torch.arange(float(n)) + 10 * rank, ("data",))
    return one.wait()[:, 0].tolist(), other.wait().tolist()


def test_rows_of_any_number_come_in_the_order_of_their_ranks(pool):
    """Two exchanges are under way at once; where there is no row, nothing is sent."""
    c = configure(data=4, microbatch=1, global_batch=4)
    for rank, (rows, parts) in enumerate(pool.run(dealt, c, make_plan(c))):
        assert rows == [10 * i + rank for i in range(4) for _ in range((i * rank + rank) % 3)]
        assert parts == [10 * i + rank for i in range(4)]


def test_only_those_who_send_to_each_other_are_connected(pool):
    """One socket for each, and one that listens; what is sent is what comes, while collectives run."""
    c = configure(data=4, microbatch=1, global_batch=4)
    for rank, (connections, received, sums) in enumerate(pool.run(passed_on, c, make_plan(c))):
        assert connections == 1 + len(PEERS[rank])
        assert received == [[10 * peer + rank] for peer in PEERS[rank]]
        assert sums == [[float(6 + 4 * i)] for i in range(20)]


def test_an_abort_ends_a_wait(pool):
    c = configure(data=2, microbatch=1, global_batch=2)
    for waited, error, seconds, total in pool.run(interrupted, c, make_plan(c)):
        assert waited and "by peer" in error and seconds < 1
        assert total == 2, "only what `connect_peers` connected is shut down: the pool has formed the other groups"
