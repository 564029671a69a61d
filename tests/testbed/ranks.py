"""Ranks on the nodes of the testbed, without Ray and without a driver, forked from one process that has torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.testbed.links import INTERFACE, Links

if TYPE_CHECKING:
    from platform.plan.plan import Plan
    from platform.runtime.communicator import Communicator

ROOT = Path(__file__).parents[2]
PATIENCE = 900  # seconds
URGENT = -15  # niceness
AUTOGROUP = Path("/proc/self/autogroup")  # of all of a session: between sessions the kernel goes by it alone
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG


class Wire(NamedTuple):
    """Bytes that the interfaces of a rank's node have carried so far: between its own ranks, to and from other
    nodes."""

    inside: int
    out: int
    into: int


def on_nodes(links: Links, nodes: Sequence[int], work: str, *arguments: Any, urgent: bool = False) -> list[Any]:
    """Run `work`, "module:function", on a rank per entry of `nodes`, the node that it is on, as function(rank,
    *arguments) in a gloo world; return the results by rank. Arguments and results are JSON. `urgent`: the ranks go
    before other processes of this machine. Raises RuntimeError with what the first rank that failed has said."""
    spec = {
        "networks": [links.network(node) for node in nodes],
        "host": links.address(nodes[0]),
        "work": work,
        "arguments": arguments,
        "urgent": urgent,
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(spec),
        text=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE,
        start_new_session=urgent,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[:8000])  # the first to fail speaks first
    return [json.loads(line) for line in done.stdout.splitlines()]


def wire() -> Wire:
    """Return what this process's node has carried so far."""
    carried = {}
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        carried[name.strip()] = [int(numbers.split()[i]) for i in (8, 0)]
    return Wire(carried["lo"][0], *carried[INTERFACE])


def measure_steps(
    rank: int, variants: Mapping[str, Mapping[str, Any]], rounds: int, warmup: int = 1, before: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Train the plans of several configurations (`tests.harness.oracle.configure`) in turn, a step each, on this rank;
    return by variant its `seconds`, seconds of `cpu`, `loss`, `collectives` (`CollectiveSpan`), and the bytes that its
    node has carried, as `Wire` names them, of every step after the first `warmup`. So many steps are done right
    `before` each: a step may wait for what the one before it has left under way."""
    import torch
    import torch.distributed as dist

    from platform.predict.choose_schedule import build_schedule
    from platform.predict.make_plan import make_plan
    from tests.harness.oracle import configure, trainer_of

    torch.set_num_threads(1)
    step: dict[str, Callable[[int], Any]] = {}
    for name, how in variants.items():
        c = configure(**how)
        c.monitor.timeline = True
        plan = make_plan(c, stage_of=build_schedule(c, c.parallel.data).placement)
        step[name] = trainer_of(c, plan, communicator(name, plan, rank)).step
    measurements: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for k in range(1, warmup + rounds + 1):
        for name in variants if k % 2 else reversed(variants):
            last = k * (1 + before)
            dist.barrier()  # not between steps: it would wait for what is under way, with them
            for number in range(last - before, last):
                step[name](number)
            at, cpu, begin = wire(), time.process_time(), time.perf_counter()
            report = step[name](last)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            dist.barrier()
            after = wire()
            if k > warmup:
                carried = Wire(*(b - a for a, b in zip(at, after, strict=True)))
                seen = {"seconds": seconds, "cpu": cpu, "loss": report.loss, "collectives": report.timeline.collectives}
                measurements[name].append({**seen, **carried._asdict()})
    return measurements


def communicator(name: str, plan: Plan, rank: int) -> Communicator:
    """Connect a rank for a plan, one of several in this process: `name` keeps apart what they say in their store."""
    from platform.plan.step_collectives import process_groups
    from platform.runtime import host_memory
    from platform.runtime.process_groups import ProcessGroups

    class Named(ProcessGroups):
        def _group(self, group: str, timeout: timedelta) -> Any:
            return super()._build_lazy_group(f"{name}/{group}", timeout)

    host_memory.CONNECT = timedelta(seconds=PATIENCE)  # nobody is to be found missing here
    groups = Named(plan.mesh, rank, process_groups(plan), "cpu", plan.neighbour_stages)
    groups.open_stage_connections(plan.neighbour_stages)
    return groups


def _main() -> int:
    spec = json.load(sys.stdin)
    import torch  # noqa: F401  before the ranks are forked: each would take seconds

    import_module("tests.harness.oracle")
    module, _, function = spec["work"].partition(":")
    work = getattr(import_module(module), function)
    if spec["urgent"] and AUTOGROUP.exists():
        AUTOGROUP.write_text(str(URGENT))
    pipes = []
    for rank in range(len(spec["networks"])):
        reading, writing = os.pipe()
        if not os.fork():
            os._exit(_rank(rank, spec, work, writing))
        os.close(writing)
        pipes.append(os.fdopen(reading))
    answers = [pipe.read() for pipe in pipes]
    statuses = [os.wait()[1] for _ in pipes]
    print("\n".join(answers))
    return int(any(statuses))


def _rank(rank: int, spec: Mapping[str, Any], work: Callable[..., Any], writing: int) -> int:
    """Do the work of one rank in this process, which was forked for it; return its exit status."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PARENT_DEATH, signal.SIGKILL)
        network = os.open(spec["networks"][rank], os.O_RDONLY)
        if libc.setns(network, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(network)
        if spec["urgent"]:
            os.setpriority(os.PRIO_PROCESS, 0, URGENT)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        import torch.distributed as dist

        patience, size = timedelta(seconds=PATIENCE), len(spec["networks"])
        store = dist.TCPStore(spec["host"], 29400, size, is_master=rank == 0, timeout=patience)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
        result = work(rank, *spec["arguments"])
        dist.barrier()
        os.write(writing, json.dumps(result).encode())
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
