"""`python -m platform.plan calibrate --output FILE.yaml [--workers N] [key=value ...]` measures a machine or cluster.

It starts workers as a run would and writes what they measure in about a minute as a description of the hardware, for
`python -m platform.plan --hardware FILE.yaml`: products by shape, memory, the host's time for a kernel, and each kind
of collective inside a node and between nodes. Ranks on a CPU share its cores: give as many workers as the run will
have. What is not measured comes from `--like`.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from platform.boundary.command_line import DONE, FAILED, command_line, run_command
from platform.boundary.redaction import known_secrets
from platform.boundary.refusals import ConfigError, as_refusal, violation
from platform.boundary.terminal import print_line, print_refusals
from platform.cluster.crew.base.crew import ByRank, Crew
from platform.cluster.crew.base.failures import NoPlaces, WorkerFailed
from platform.cluster.crew.base.job import Job
from platform.cluster.crew.base.signals import Stopped, StopSignals
from platform.cluster.crew.launchers import torchrun
from platform.config.fields import Config
from platform.costs.machine import Hardware
from platform.doctor import folder_of_workers
from platform.launch import compose
from platform.plan.language.numbers import count_of
from platform.planning.calibration import Round, Seen, Timings, as_file, hardware_of_rounds, rounds, step_configs
from platform.planning.make_plan import make_plan
from platform.planning.search.chosen import usual_hardware
from platform.planning.step_price import hardware_named, read_hardware, work_of

# A model whose steps are all launches: kernels of a few numbers.
TINY = (
    "model.layers=2", "model.d_model=16", "model.heads=2", "model.length=8", "model.vocab=32", "data=synthetic",
    "train.microbatch=1", "eval.every=0",
)  # fmt: skip
FOLDER = "calibrate"  # in the run directory, with the workers' logs; they stay if a worker fails
SECONDS = 300.0  # without progress, after which a worker hangs


def main(argv: Sequence[str]) -> int:
    """Run the command line `python -m platform.plan calibrate`; return its exit status."""
    parser = command_line("plan calibrate", __doc__)
    parser.add_argument("overrides", nargs="*", help="where and in what to measure: cluster=..., precision=...")
    parser.add_argument("--output", required=True, metavar="FILE.yaml", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="although it exists")
    parser.add_argument("--workers", type=int, help="how many measure at once (default: as many as there is room for)")
    parser.add_argument("--like", help="hardware that says what is not measured (default: this device's, or cpu)")
    parser.add_argument("--config-dir", help="the user's own configuration files")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # sizes that say nothing, for tests
    return run_command(parser, _answer, argv, subject="calibrate", failures=(NoPlaces,))


def _answer(given: argparse.Namespace) -> int:
    """Measure, for the command line, and write the file; return the exit status."""
    from platform.cluster.run.resources import available_workers

    output = Path(given.output)
    _refuse_output(output, given.overwrite)
    like = read_hardware(given.like) if given.like else None
    config = compose([*TINY, *given.overrides], given.config_dir)
    workers = max(1, available_workers(config.cluster)) if given.workers is None else given.workers
    if workers < 1:
        raise ConfigError(violation("--workers", workers, "must be at least 1"))
    config.parallel.data, config.train.global_batch = workers, workers
    if torchrun.is_follower():
        torchrun.follow(Path(config.run.dir) / FOLDER)
        return DONE
    try:
        with StopSignals(), folder_of_workers(config, FOLDER) as folder:
            text = _measured(config, workers, folder, like, given.tiny)
    except WorkerFailed as error:
        print_refusals("calibrate", [f"{error}; its log: {error.culprit.log}"])
        return FAILED
    except Stopped as error:
        print_refusals("calibrate", [f"{error}: nothing is written"])
        return FAILED
    finally:
        if torchrun.present():
            torchrun.dismiss()
    with as_refusal("--output", output, OSError, why="cannot be written: {.strerror}"):
        output.write_text(text)
    print_line(f"{text}written: {output}; `python -m platform.plan ... --hardware {output}` predicts steps here")
    return DONE


def _refuse_output(output: Path, overwrite: bool) -> None:
    """Raise ConfigError for a file that cannot be written, or is not to be, before anything is measured."""
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(violation("--output", output, "must end in .yaml", [output.with_suffix(".yaml")]))
    if output.exists() and not overwrite:
        raise ConfigError(violation("--output", output, "exists; --overwrite replaces it"))
    place = output if output.exists() else output.parent
    if not os.access(place, os.W_OK):
        why = "is not writable" if place.exists() else f"the folder {place} does not exist"
        raise ConfigError(violation("--output", output, why))


def _measured(config: Config, workers: int, folder: Path, like: Hardware | None, tiny: bool) -> str:
    """Start the workers and let them measure; return the text of the file. Raises ConfigError, NoPlaces,
    WorkerFailed."""
    from platform.cluster.crew.open import open_crew
    from platform.cluster.driver import relay_log
    from platform.cluster.run import resources

    kind = resources.crew_kind(config.cluster)
    places = resources.reserve_workers(config.cluster, workers, print_line)
    job = Job(config, [{"data": i} for i in range(workers)], places.device, folder, secrets=known_secrets())
    print_line(f"measuring on {count_of(workers, 'worker')} ({kind}, {job.device})")
    with relay_log("platform.cluster", print_line), open_crew(kind, job) as crew:
        nodes = [crew.members[number].node.partition("/")[0] for number in sorted(crew.members)]
        found = []
        for number, one in enumerate(rounds(nodes)):
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
