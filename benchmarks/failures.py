"""How soon the driver knows that a worker was killed, survivors are released, and a new generation has formed.

    python benchmarks/failures.py [--workers 8] [--trials 20] [--seed 0]

Workers run gloo all-reduces without end; one of them, at random, gets SIGKILL from outside. A spare takes its place,
and a new one is hired. All times are from the signal on, but `formed`, which is the new generation's own.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from platform.cluster.crew.crew import ByRank, Crew  # noqa: E402
from platform.cluster.crew.failures import WorkerFailed  # noqa: E402
from platform.cluster.crew.job import Job  # noqa: E402
from platform.cluster.crew.launchers import open_crew  # noqa: E402
from platform.config.fields import Config  # noqa: E402


def trial(crew: Crew, job: Job, numbers: list[int], generation: int, victim: int) -> dict[str, float]:
    """Seconds of each phase; `numbers` is left with the survivors."""
    crew.hire_workers(1)
    began = time.perf_counter()
    crew.assign_ranks(job, numbers)
    size = job.world_size
    crew.call_ranks("form", ByRank(range(size)), size, job.config, crew.store, generation, [])
    formed = time.perf_counter() - began
    while crew.starting_members:  # it would take the processor from those that are measured
        time.sleep(0.05)
    killed = 0.0

    def kill() -> None:
        nonlocal killed
        time.sleep(random.uniform(0.1, 0.3))
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)

    pid = crew.ready_members_by_number[victim].pid
    threading.Thread(target=kill).start()
    try:
        crew.call_ranks("turns")
    except WorkerFailed as error:
        known = time.perf_counter() - killed
        assert error.culprit.member.number == victim and error.culprit.kind == "died", error
    lost = crew.release_members()
    released = time.perf_counter() - killed
    assert [failure.member.number for failure in lost] == [victim], lost
    return {"known": known, "released": released, "formed": formed}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--workers", type=int, default=8)
    arguments.add_argument("--trials", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    random.seed(options.seed)
    coordinates = [{"data": rank} for rank in range(options.workers)]
    phases: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Config(), coordinates, "cpu", Path(directory), "tests.doubles.gloo_worker:GlooWorker")
        with open_crew("processes", job) as crew:
            for generation in range(1, options.trials + 1):
                numbers = sorted(crew.ready_members_by_number)[: options.workers]
                phases.append(trial(crew, job, numbers, generation, random.choice(numbers)))
    for phase in phases[0]:
        seconds = sorted(f[phase] for f in phases)
        p99 = seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
        print(f"{phase:9} p50 {statistics.median(seconds):.3f} s   p99 {p99:.3f} s   of {len(seconds)}")


if __name__ == "__main__":
    main()
