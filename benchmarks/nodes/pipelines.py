"""Interleaved against 1F1B on slow links: eight stages, a node each, whose computations sleep, so that these cores do
not matter. Interleaving halves the bubble and doubles what crosses the links, so that the rate decides.

Planned: the schedule simulated with messages that take their bytes over the rate, and share links.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from platform.plan.schedule import Kind
from platform.plan.simulate import StageMessages, makespan_over_links
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from platform.predict.tier_traffic import NetworkTiers, tier_traffic
from tests.harness.oracle import configure
from tests.testbed.links import Links, bits_per_second
from tests.testbed.ranks import on_nodes

HEAD = ("schedule", "rate", "busiest: planned, counted (MB)", "message (s)", "simulated (s)", "step (s)",
        "of the first", "simulated", "off")  # fmt: skip
RATES = ("25mbit", "100mbit", "1gbit")
STAGES = 8
FORWARD = 0.08  # seconds of a stage; its backward pass takes twice as long
CHUNKS = {"1f1b": 1, "interleaved": 2}


def variant(kind: str) -> Mapping[str, Any]:
    """Return the arguments of `configure` for one schedule; a message has 256 KiB, four times what a link lets
    through at once after a pause."""
    return {"pipeline": kind, "stages": STAGES, "chunks": CHUNKS[kind], "layers": 2 * STAGES, "d_model": 64, "heads": 2,
            "length": 256, "microbatch": 4, "global_batch": 64, "precision": "fp32", "tied": False}  # fmt: skip


def steps(rank: int, rounds: int) -> dict[str, list[Mapping[str, float]]]:
    """Run the schedules in turn on this stage; return by schedule its `seconds` and the bytes that its node has sent
    `out`, of every step but the first. Runs on the nodes."""
    import torch.distributed as dist

    from benchmarks.pipeline import sleeping_stage
    from tests.testbed.ranks import communicator, wire

    step = {}
    for kind, v in CHUNKS.items():
        config = configure(**variant(kind))
        plan = make_plan(config)
        step[kind] = sleeping_stage(config, plan, communicator(kind, plan, rank), FORWARD / v)
    measured: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in CHUNKS}
    for k in range(rounds + 1):
        for kind in CHUNKS if k % 2 else reversed(CHUNKS):
            dist.barrier()
            before, begin = wire().out, time.perf_counter()
            step[kind]()
            seconds = time.perf_counter() - begin
            dist.barrier()
            if k:
                measured[kind].append({"seconds": seconds, "out": wire().out - before})
    return measured


def rows(rate: str, rounds: int) -> Iterator[list[str]]:
    """Yield a row per schedule."""
    with Links(STAGES, rate) as links:
        ranks = on_nodes(links, range(STAGES), "benchmarks.nodes.pipelines:steps", rounds, urgent=True)
    base = (0.0, 0.0)
    for kind, v in CHUNKS.items():
        config = configure(**variant(kind))
        size = config.model.length * config.model.d_model * config.train.microbatch * 4
        message = 8 * size / bits_per_second(rate)
        times = {Kind.FORWARD: FORWARD / v, Kind.BACKWARD: 2 * FORWARD / v}
        messages = StageMessages(lambda source, sink, took=message: took, early=True)  # as gloo's receives are posted
        planned = makespan_over_links(
            messages, build_schedule(config, 1), lambda stage, action, times=times: times[action.kind]
        )
        of_each = zip(*(rank[kind] for rank in ranks), strict=True)
        took = statistics.median(max(stage["seconds"] for stage in step) for step in of_each)
        busiest = tier_traffic(make_plan(config), NetworkTiers.build_tiers({"node": 1}, STAGES))[-1].busiest or 0
        counted = max(rank[kind][-1]["out"] for rank in ranks)
        base = base if any(base) else (took, planned)
        ratio, expected = took / base[0], planned / base[1]
        yield [kind, rate, f"{busiest / 1e6:.2f}, {counted / 1e6:.2f}", f"{message:.4f}", f"{planned:.3f}",
               f"{took:.3f}", f"{ratio:.3f}", f"{expected:.3f}", f"{ratio / expected - 1:+.1%}"]  # fmt: skip
