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
from platform.cluster.crew.crew import ByRank, Crew
from platform.cluster.crew.job import Job
from platform.cluster.crew.launchers import open_crew
from platform.cluster.driver import relay_log
from platform.config.fields import Config
from platform.plan.layout import count_of
from platform.predict.calibration import Round, Seen, Timings, as_file, calibration_rounds, hardware_of_rounds
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.search import usual_hardware
from platform.predict.step_price import hardware_named, step_configs, work_of

# Arguments of the configuration that workers measure in: steps of it are all launches, kernels of a few numbers.
TINY = (
    "model.layers=2", "model.d_model=16", "model.heads=2", "model.length=8", "model.vocab=32", "data=synthetic",
    "train.microbatch=1", "eval.every=0",
)  # fmt: skip
SECONDS = 300.0  # without progress, after which a worker hangs


def calibration(config: Config, workers: int, folder: Path, like: Hardware | None, tiny: bool = False) -> str:
    """Start the workers and let them measure; return the text of the file. Raises ConfigError, NoPlaces,
    WorkerFailed."""
    kind = resources.crew_kind(config.cluster)
    places = resources.reserve_workers(config.cluster, workers, print_line)
    job = Job(config, [{"data": i} for i in range(workers)], places.device, folder, secrets=known_secrets())
    print_line(f"measuring on {count_of(workers, 'worker')} ({kind}, {job.device})")
    with relay_log("platform.cluster", print_line), open_crew(kind, job) as crew:
        nodes = [crew.members[number].node.partition("/")[0] for number in sorted(crew.members)]
        found = []
        for number, one in enumerate(calibration_rounds(nodes)):
            print_line(f"  {one.tier}: {count_of(one.shape[1], 'group')} of {count_of(one.shape[0], 'worker')}")
            found.append((one, _of_round(crew, job, one, str(number), tiny)))
    device, memory, processors = found[0][1][0]
    if like is None:
        like = (hardware_named(device) if job.device == "cuda" else None) or usual_hardware(config)
    seen = Seen(date.today().isoformat(), config.precision, device, Counter(nodes), like.name)
    on_gpu = job.device == "cuda"
    first = replace(like, ahead=on_gpu, processors=processors, memory=memory or like.memory)
    steps = [work_of(c, make_plan(c)) for c in step_configs(config, on_gpu, tiny)]
    measured = [(one, timings) for one, (_, timings) in found]
    return as_file(*hardware_of_rounds(first, measured, seen, steps), seen)


def _of_round(
    crew: Crew, job: Job, one: Round, name: str, tiny: bool
) -> tuple[tuple[str, float, int], Sequence[Timings]]:
    """Let the workers measure a round together; return the first one's device, with its memory and processors, and the
    timings of each. Raises WorkerFailed."""
    numbers = sorted(crew.members)
    seats = [numbers[rank] for rank in one.seats]
    crew.seat(replace(job, coordinates=[{"data": i} for i in range(len(seats))]), seats)
    method = "measure_kernels" if one.tier == "kernels" else "measure_collectives"
    ranks = ByRank(range(len(seats)))
    found = crew.call(method, ranks, list(one.shape), name, crew.store, tiny, within=SECONDS)
    crew.release()
    first = found[0]
    return (first.device, first.memory, first.processors), [its.timings for its in found]
