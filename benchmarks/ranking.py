"""Does the predicted order of plans hold? Sixteen plans of one model, predicted after `calibrate` and measured.

    OMP_NUM_THREADS=1 python -m benchmarks.ranking [--cases slow two] [--rounds 3]

Needs root. `slow`: four ranks, a node each, on links that decide; `two`: two ranks that compute on this machine's cores
and have no slow link. The ranks calibrate first, and predictions are made of the file that `python -m platform.plan
calibrate` writes from such timings. Then they step the plans in turn, two steps of each, since a step may wait for what
the one before has left under way; seconds are the median over the second ones of the slowest rank's. Errors, tau and
regret are those of `python -m platform.plan compare`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.nodes.cases import Case
from benchmarks.nodes.measured import seconds
from platform.cluster.calibration_run import TINY
from platform.launch import compose_config
from platform.predict.calibration import Seen, format_hardware_file, hardware_of_rounds, plan_calibration_rounds
from platform.predict.make_plan import make_plan
from platform.predict.measured_runs import MeasuredRun, compare_runs, count_step_flops, format_prediction_errors
from platform.predict.step_price import build_step_work, read_hardware, step_configs
from tests.harness.oracle import configure
from tests.testbed.links import Links, why_not
from tests.testbed.ranks import on_nodes

MODEL = {"d_model": 128, "heads": 4, "length": 128, "vocab": 256, "layers": 4, "precision": "fp32", "tied": False}
SEQUENCES = 16


def plans_of_four() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield sixteen plans of four ranks, by name."""
    for zero in (0, 1, 3):
        yield f"data 4, zero {zero}", {"data": 4, "zero": zero, "microbatch": 4}
    yield "data 4, zero 2, 4 microbatches", {"data": 4, "zero": 2, "microbatch": 1}
    yield "data 4, zero 3, 2 microbatches", {"data": 4, "zero": 3, "microbatch": 2}
    yield "1d, t 4", {"tensor": "1d", "axes": {"t": 4}, "microbatch": 16}
    yield "1d_sp, t 4", {"tensor": "1d_sp", "axes": {"t": 4}, "microbatch": 16}
    yield "1d, t 2, data 2", {"tensor": "1d", "axes": {"t": 2}, "data": 2, "microbatch": 8}
    yield "1d_sp, t 2, data 2", {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "microbatch": 8}
    yield "2d_gather, 2 x 2", {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}, "microbatch": 16}
    yield "3d, 1 x 2 x 2", {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}, "microbatch": 16}
    yield "context 4", {"context": 4, "microbatch": 16}
    yield "1f1b, 4 stages", {"pipeline": "1f1b", "stages": 4, "microbatch": 2}
    yield "1f1b, 2 stages, data 2", {"pipeline": "1f1b", "stages": 2, "data": 2, "microbatch": 2}
    yield "interleaved, 2 stages, 2 chunks, data 2", {
        "pipeline": "interleaved", "stages": 2, "chunks": 2, "data": 2, "microbatch": 2,
    }  # fmt: skip
    yield (
        "1f1b, 2 stages, 1d, t 2",
        {"pipeline": "1f1b", "stages": 2, "tensor": "1d", "axes": {"t": 2}, "microbatch": 4},
    )


def plans_of_two() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield sixteen plans of two ranks, by name."""
    for zero, microbatch in ((0, 8), (0, 2), (1, 8), (2, 4), (3, 8), (3, 1)):
        yield f"data 2, zero {zero}, microbatches of {microbatch}", {"data": 2, "zero": zero, "microbatch": microbatch}
    yield "data 2, recompute", {"data": 2, "microbatch": 8, "recompute": "full"}
    for scheme in ("1d", "1d_sp"):
        for microbatch in (16, 2):
            yield f"{scheme}, microbatches of {microbatch}", {
                "tensor": scheme, "axes": {"t": 2}, "microbatch": microbatch,
            }  # fmt: skip
    yield "2d_gather, 2 x 1", {"tensor": "2d_gather", "axes": {"r": 2, "c": 1}, "microbatch": 16}
    yield "2d_gather, 1 x 2", {"tensor": "2d_gather", "axes": {"r": 1, "c": 2}, "microbatch": 16}
    yield "context 2", {"context": 2, "microbatch": 16}
    for microbatch in (4, 1):
        yield f"1f1b, microbatches of {microbatch}", {"pipeline": "1f1b", "stages": 2, "microbatch": microbatch}


def cases() -> Mapping[str, Case]:
    """Return the cases by name."""
    shape = {**MODEL, "global_batch": SEQUENCES}
    return {
        name: Case(name, rate, per_node, {plan: {**shape, **how} for plan, how in plans}, ranks)
        for name, rate, per_node, ranks, plans in (
            ("slow", "40mbit", 1, 4, plans_of_four()),
            ("two", "", 2, 2, plans_of_two()),
        )
    }


def calibrate_and_step(
    rank: int, address: tuple[str, int], nodes: Sequence[str], variants: Mapping[str, Mapping[str, Any]], count: int
) -> tuple[list[Any], Any]:
    """Measure the rates of this rank and its links, as workers do for `calibrate`, then `count` steps of all plans;
    return both. Runs on the nodes."""
    import torch
    import torch.distributed as dist

    from platform.runtime.process_groups import join_default_group, meet_ranks
    from platform.train.calibration_rates import connect_groups, measure_collective_rates, measure_kernel_rates
    from tests.testbed.ranks import measure_steps

    torch.set_num_threads(1)
    dist.destroy_process_group()
    timings = []
    for number, one in enumerate(plan_calibration_rounds(nodes)):
        communicator = connect_groups(
            one.mesh_ranks.index(rank), one.ranks_and_groups, str(number), (address[0], address[1]), "cpu"
        )
        if one.tier == "kernels":
            measured = measure_kernel_rates(communicator, compose_config([*TINY]), False)
        else:
            measured = measure_collective_rates(communicator, False)
        communicator.barrier()
        communicator.close()
        timings.append(measured.timings)
    join_default_group(meet_ranks(len(nodes), (address[0], address[1]), "steps"), rank, len(nodes), "cpu")
    return timings, measure_steps(rank, variants, count, before=1)


def run(case: Case, count: int) -> tuple[list[Any], dict[str, Any]]:
    """Calibrate and measure a case; return the timings of each rank by round, and steps of each rank by variant."""
    seats = [rank // case.per_node for rank in range(case.ranks)]
    with Links(case.nodes, case.rate or None) as links:
        address, nodes = (links.address(0), 29400), [f"node{seat}" for seat in seats]
        work = "benchmarks.ranking:calibrate_and_step"
        ranks = on_nodes(links, seats, work, address, nodes, case.variants, count, urgent=True)
    steps = {name: [rank[1][name] for rank in ranks] for name in case.variants}
    return [rank[0] for rank in ranks], steps


def hardware_text(case: Case, timings: Sequence[Any]) -> str:
    """Return the text of the file that `calibrate` would write on the nodes of a case."""
    nodes = [f"node{rank // case.per_node}" for rank in range(case.ranks)]
    seen = Seen(date.today().isoformat(), "fp32", "cpu", {node: nodes.count(node) for node in nodes}, "cpu")
    by_round = [(one, [rank[i] for rank in timings]) for i, one in enumerate(plan_calibration_rounds(nodes))]
    steps = [build_step_work(c, make_plan(c)) for c in step_configs(compose_config([*TINY]), False, False)]
    return format_hardware_file(*hardware_of_rounds(read_hardware("cpu"), by_round, seen, steps), seen)


def measured_runs(case: Case, hardware: str, steps: Mapping[str, Any]) -> list[MeasuredRun]:
    """Return the measured runs of a case, as if read from a table, the fastest first."""
    runs = []
    for name, how in case.variants.items():
        plan, machine = case.plan(name), read_hardware(hardware)
        work, took = build_step_work(configure(**how), plan), seconds(steps[name])
        runs.append(MeasuredRun(name, {}, work, machine, took, count_step_flops(plan, False)))
    return sorted(runs, key=lambda run: run.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*cases()])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in options.cases:
        case = cases()[name]
        timings, steps = run(case, options.rounds)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"{name}.yaml")
            file.write_text(hardware_text(case, timings))
            runs = measured_runs(case, str(file), steps)
            print(
                "\n".join(["", file.read_text(), *format_prediction_errors(compare_runs(runs, [False] * len(runs)))]),
                flush=True,
            )


if __name__ == "__main__":
    main()
