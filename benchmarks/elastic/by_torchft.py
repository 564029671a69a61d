"""torchft's fault tolerant DDP, as its example shows it: a replica group of one rank per node, and a lighthouse.

    python -m benchmarks.elastic.by_torchft lighthouse
    python -m benchmarks.elastic.by_torchft NODE FOLDER

Timeouts are those of its README and of its `train_ddp.py`; see `RESULTS.md`.
"""

from __future__ import annotations

import logging
import sys
import threading
from datetime import timedelta
from pathlib import Path

from benchmarks.elastic.work import batches_of, config, model_of, recorder
from benchmarks.peers import environment
from tests.testbed.links import INTERFACE, Links

LIGHTHOUSE, STORE = 29510, 29500  # ports
LEAST = 2


def lighthouse() -> None:
    """Let replicas find each other, for ever."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"0.0.0.0:{LIGHTHOUSE}", min_replicas=LEAST, join_timeout_ms=10000, quorum_tick_ms=100
    )
    print(server.address(), flush=True)
    threading.Event().wait()


def train(node: int, folder: Path) -> None:
    """Train the replica of a node for ever; what it lacks at the start comes from another one."""
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    from benchmarks.peers.gpt import adamw

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    c, address = config(), Links.address(node)
    inner = model_of(c)
    store = dist.TCPStore(address, STORE, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=5))

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=group,
        min_replica_size=LEAST,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica{node}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{Links.address(0)}:{LIGHTHOUSE}",
        hostname=address,
    )
    model = DistributedDataParallel(manager, inner)
    optimizer = Optimizer(manager, adamw(inner, c))
    batches, record = batches_of(c, node), recorder(folder / "steps")
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        model(*batches(before + 1)).backward()
        optimizer.step()
        if (step := manager.current_step()) > before:
            record(step, manager.num_participants(), f"quorum {manager._quorum_id}")


if __name__ == "__main__":
    import os

    environment.use()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    if sys.argv[1] == "lighthouse":
        lighthouse()
    else:
        train(int(sys.argv[1]), Path(sys.argv[2]))
