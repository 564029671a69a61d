"""What each overlap of communication with computation gains on a slow link: steps with and without it, in turn.

    OMP_NUM_THREADS=1 python benchmarks/overlap.py [--rates 100mbit 1gbit] [--pairs 15] [--switches KEY ...]

Two ranks, each a node of the testbed (tests/testbed): network namespaces joined by links of a limited rate, which need
root. Every line is a launch of its own, in which the same two processes hold the model twice, with the two values of a
key, and step one after the other in turn. The gain is the median of the paired ratios second / first, with a bootstrap
interval of 95 %; `link` is how long the bytes that a rank sends in a step take at that rate, which is the most that
overlap can hide.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.pairs import Comparison, Seen, compare  # noqa: E402
from benchmarks.peers.rows import Row, configured  # noqa: E402
from platform.config.fields import Config, list_key_fields  # noqa: E402
from platform.plan.step_collectives import communication  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.predict.step_price import file_of_hardware  # noqa: E402
from tests.testbed.links import INTERFACE, Links, bits_per_second, why_not  # noqa: E402

RANKS, PORT, PATIENCE = 2, 29400, 900
PLANS: Mapping[str, Mapping[str, Any]] = {
    "data 2": {"data": RANKS},
    "data 2, zero 1": {"data": RANKS, "zero": 1},
    "data 2, zero 3": {"data": RANKS, "zero": 3},
    "3d, x 2": {"tensor": "3d", "axes": {"x": RANKS, "y": 1, "z": 1}},
}
SWITCHES: Mapping[str, tuple[Any, Any]] = {"parallel.overlap": (True, False), "parallel.bucket_mib": ("auto", 25)}


def switched(c: Config, hardware: str, key: str, value: Any) -> Config:
    """Return the configuration with a key of two levels set, on nodes of a `hardware` that a file describes."""
    c = deepcopy(c)
    c.cluster.hardware = hardware
    group, _, name = key.partition(".")
    setattr(getattr(c, group), name, value)
    return c


def describe_nodes(rate: str, path: Path) -> None:
    """Write the description of a hardware of one CPU core per node, joined by links of a rate."""
    hardware = yaml.safe_load(file_of_hardware("cpu").read_text())
    hardware["node"]["ranks"] = 1
    hardware["network"]["bandwidth"] = bits_per_second(rate) / 8
    path.write_text(yaml.safe_dump(hardware))


def rank_main(
    rank: int, address: str, hardware: str, plan_name: str, key: str, warmup: int, pairs: int, out: Path
) -> None:
    """Step both forms in turn on one rank, and write what it saw to a file."""
    import torch
    import torch.distributed as dist

    from benchmarks.peers.gpt import Recurring
    from benchmarks.peers.pairs import take_turns
    from platform.plan.step_collectives import process_groups
    from platform.runtime.process_groups import ProcessGroups
    from tests.harness.oracle import trainer_of

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    patience = timedelta(seconds=PATIENCE)
    store = dist.TCPStore(address, PORT, RANKS, is_master=rank == 0, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=patience)
    systems = {}
    for value in SWITCHES[key]:
        c = switched(configured(Row("", PLANS[plan_name]), warmup + pairs), hardware, key, value)
        plan = make_plan(c)
        trainer = trainer_of(c, plan, ProcessGroups(plan.mesh, rank, process_groups(plan)), Recurring(c))
        systems[str(value)] = lambda k, trainer=trainer: trainer.step(k).loss
    seen = take_turns(systems, dist.barrier, warmup, pairs)
    out.write_text(json.dumps({name: asdict(one) for name, one in seen.items()}))
    dist.destroy_process_group()


def measure(links: Links, plan_name: str, key: str, warmup: int, pairs: int) -> Comparison:
    """Start one rank on each node, and compare what they saw. Raises RuntimeError with the log of one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        describe_nodes(str(links.rate), hardware := Path(folder, "nodes.yaml"))
        arguments = [links.address(0), str(hardware), plan_name, key, str(warmup), str(pairs)]
        logs = [Path(folder, f"log-{rank}") for rank in range(RANKS)]
        started = []
        for rank, log in enumerate(logs):
            command = [sys.executable, __file__, "--rank", str(rank), *arguments, f"{folder}/{rank}"]
            with log.open("w") as f:
                started.append(links.start(rank, command, stdin=DEVNULL, stdout=f, stderr=f, cwd=ROOT))
        for process, log in zip(started, logs, strict=True):
            if process.wait(PATIENCE):
                raise RuntimeError(log.read_text())
        read = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    return compare([{name: Seen(**seen) for name, seen in one.items()} for one in read])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--switches", nargs="+", default=list(SWITCHES), choices=SWITCHES)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    print("| plan | rate | key | first (ms) | second (ms) | gain | 95 % | link (ms) | losses apart |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for key in args.switches:
        if key not in list_key_fields():
            print(f"| - | - | {key} | this version has no such key |")
            continue
        for rate in args.rates:
            for name in args.plans:
                sent = sum(communication(make_plan(configured(Row("", PLANS[name]), 1))).values()) / RANKS
                with Links(RANKS, rate) as links:
                    comparison = measure(links, name, key, args.warmup, args.pairs)
                on, off = (1000 * seconds for seconds in comparison.seconds)
                low, high = (1 / ratio for ratio in reversed(comparison.interval))
                values = " or ".join(map(str, SWITCHES[key])).lower()
                cells = [name, rate, f"{key}: {values}", f"{on:.0f}", f"{off:.0f}", f"**{1 / comparison.ratio:.3f}**",
                         f"{low:.3f} to {high:.3f}", f"{8000 * sent / bits_per_second(rate):.0f}",
                         f"{comparison.apart:.0e}"]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank, address, hardware, plan_name, key, warmup, pairs, out = sys.argv[2:]
        rank_main(int(rank), address, hardware, plan_name, key, int(warmup), int(pairs), Path(out))
    else:
        main()
