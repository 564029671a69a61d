"""Calibration of the hardware by workers that are started as for a run: `python -m platform.plan calibrate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from platform.boundary.redaction import known_secrets
from platform.boundary.terminal import print_line
from platform.cluster import resources
from platform.cluster.crew.crew import ByRank, Crew, Worker
from platform.cluster.crew.job import Job
from platform.cluster.crew.launchers import open_crew
from platform.cluster.driver import relay_log
from platform.config.fields import Config
from platform.plan.layout import format_count
from platform.plan.plan import base_precision
from platform.predict import calibration
from platform.predict.calibration import Round, Seen, Timings, format_hardware_file, hardware_of_rounds
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.search import choose_pricing_hardware
from platform.predict.step_price import build_step_work, find_gpu_hardware, step_configs

# Arguments of the configuration that workers measure in: steps of it are all launches, kernels of a few numbers.
TINY = (
    "model.layers=2", "model.d_model=16", "model.heads=2", "model.length=8", "model.vocab=32", "data=synthetic",
    "train.microbatch=1", "eval.every=0",
)  # fmt: skip
SECONDS = 300.0  # without progress, after which a worker hangs


def run_calibration(
    config: Config, workers: int, folder: Path, base_hardware: Hardware | None, tiny: bool = False
) -> str:
    """Start the workers and let them measure; return the text of the file. Raises ConfigError, NoPlaces,
    WorkerFailed."""
    kind = resources.launcher_kind(config.cluster)
    places = resources.await_worker_places(config.cluster, workers, print_line)
    job = Job(config, [{"data": i} for i in range(workers)], places.device, folder, secrets=known_secrets())
    print_line(f"measuring on {format_count(workers, 'worker')} ({kind}, {job.device})")
    with relay_log("platform.cluster", print_line), open_crew(kind, job) as crew:
        nodes = [member.node.partition("/")[0] for _, member in sorted(crew.ready_members_by_number.items())]
        round_replies = []
        for number, one in enumerate(calibration.plan_calibration_rounds(nodes)):
            workers_each, groups = one.ranks_and_groups[:2]
            print_line(f"  {one.tier}: {format_count(groups, 'group')} of {format_count(workers_each, 'worker')}")
            round_replies.append((one, _measure_round(crew, job, one, str(number), tiny)))
    device, memory, processors = round_replies[0][1][0]
    if base_hardware is None:
        base_hardware = (find_gpu_hardware(device) if job.device == "cuda" else None) or choose_pricing_hardware(config)
    seen = Seen(date.today().isoformat(), base_precision(config.precision), device, Counter(nodes), base_hardware.name)
    on_gpu = job.device == "cuda"
    first = replace(base_hardware, ahead=on_gpu, processors=processors, memory=memory or base_hardware.memory)
    steps = [build_step_work(c, make_plan(c)) for c in step_configs(config, on_gpu, tiny)]
    measured = [(one, timings) for one, (_, timings) in round_replies]
    return format_hardware_file(*hardware_of_rounds(first, measured, seen, steps), seen)


def _measure_round(
    crew: Crew, job: Job, calibration_round: Round, name: str, tiny: bool
) -> tuple[tuple[str, float, int], Sequence[Timings]]:
    """Let the workers measure a round together; return the first one's device, with its memory and processors, and the
    timings of each. Raises WorkerFailed."""
    numbers = sorted(crew.ready_members_by_number)
    seats = [numbers[rank] for rank in calibration_round.mesh_ranks]
    crew.assign_ranks(replace(job, coordinates=[{"data": i} for i in range(len(seats))]), seats)
    method = Worker.measure_kernels if calibration_round.tier == "kernels" else Worker.measure_collectives
    ranks = ByRank(range(len(seats)))
    replies = crew.call_ranks(
        method, ranks, list(calibration_round.ranks_and_groups), name, crew.store, tiny, within=SECONDS
    )
    crew.release_members()
    first = replies[0]
    return (first.device, first.memory, first.processors), [its.timings for its in replies]
