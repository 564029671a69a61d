"""What the control of many workers costs the driver: forming, steps, the loss of a node, re-forming.

    OMP_NUM_THREADS=1 python benchmarks/control.py [--workers 512 1024] [--per-node 128] [--zero 0]

The driver is the real one, with the plan of gpt175b for so many workers (tensor 8 x stages 16 x data). The workers
speak the control protocol through the platform's own host, and compute nothing; those of a node are threads of one
process. In one step everybody is late, and the driver asks for beats. Then a node is killed; the run goes on with the
others. CPU is that of all threads of the driver's process, from the start of one step to the start of the next.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

from platform.cluster import driver  # noqa: E402
from platform.config.fields import Config  # noqa: E402
from platform.launch import compose_config  # noqa: E402
from platform.monitor import JsonLines  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from tests.doubles import simulated_worker  # noqa: E402
from tests.doubles.simulated_crew import Call, SimulatedCrew  # noqa: E402

STEPS, KILLED = 30, 16
REPLICA = 128  # workers of gpt175b
CPU_MS = 20.0  # of the driver, per step of 1,024 workers: the goal
WORKER_BYTES = 64  # that a further worker may add to what the driver gets in a step


def configured(workers: int, per_node: int, zero: int, directory: str) -> Config:
    if workers % REPLICA:
        raise SystemExit(f"--workers {workers}: gpt175b takes a multiple of {REPLICA}")
    return compose_config(
        [
            "experiment=gpt175b",
            f"parallel.data={workers // REPLICA}",
            f"parallel.zero={zero}",
            f"train.steps={STEPS}",
            "cluster=processes",
            "cluster.device=cpu",
            "cluster.memory=warn",  # nothing is allocated
            "data=synthetic",
            "eval.every=0",
            "checkpoint.last=false",
            "monitor.sample=0",
            f"run.dir={directory}/run",
            "elastic.replace=false",
            f"elastic.faults=[{KILLED}:kill:{per_node}]",
            "elastic.hang_seconds=3",
        ]
    )


def steps(calls: list[Call], first: int, last: int) -> list[tuple[float, float, int, int]]:
    """(wall ms, CPU ms, bytes sent, bytes received) of each of these steps, all until the next one begins."""
    begins = {call.args[0]: call.begin for call in calls if call.method == "step"}  # the last time that it was done
    spent = [begins[step + 1] - begins[step] for step in range(first, last + 1)]
    return [(1e3 * s.clock, 1e3 * s.cpu, s.sent, s.received) for s in spent]


def measure(workers: int, per_node: int, zero: int) -> tuple[float, float]:
    """Prints; returns a step's CPU in ms and the bytes that it brings the driver."""
    crews: list[SimulatedCrew] = []

    def open_crew(kind: str, job: object, spares: int) -> SimulatedCrew:
        begin, cpu = time.monotonic(), time.process_time()
        crews.append(SimulatedCrew(job, spares, per_node=per_node))
        told = f"ready: {time.monotonic() - begin:.2f} s after the start, {time.process_time() - cpu:.2f} s of CPU"
        print(f"{workers} workers on {workers // per_node} nodes {told}", file=sys.stderr)
        return crews[-1]

    driver.open_crew = open_crew
    with tempfile.TemporaryDirectory() as directory:
        config = configured(workers, per_node, zero, directory)
        begin = time.perf_counter()
        plan = make_plan(config)
        print(f"plan: {time.perf_counter() - begin:.2f} s, {plan.mesh}")
        worker = "tests.doubles.simulated_worker:SimulatedWorker"
        with open(f"{directory}/said", "w") as said, redirect_stdout(said):
            status = driver.drive_run(config, plan, experiment="gpt175b", worker=worker)
        assert status == driver.DONE, status
        run = Path(config.run.dir)
        events = JsonLines.read_objects(run / "journal.jsonl")
        struck = float((run / "struck").read_text())
    calls = crews[0].calls

    def at(event: str, generation: int) -> float:
        return next(e["time"] for e in events if e["event"] == event and e["generation"] == generation)

    formed = [call for call in calls if call.method == "form"]
    assert [e["event"] for e in events].count("formed") == len(formed) == 2
    for generation in (1, 2):
        print(f"forming {generation}: {at('running', generation) - at('forming', generation):.2f} s", end="")
        for method in ("prove", "form", "build", "recover"):
            for c in calls:
                if c.method == method and (c.begin.clock > struck) == (generation == 2):
                    spent = c.end - c.begin
                    print(f"; {method} {spent.clock:.2f} s, CPU {spent.cpu:.2f} s, {spent.sent / 1e6:.2f} MB", end="")
        print()
    per_step = steps(calls, simulated_worker.LATE_STEP + 2, KILLED - 2)
    wall, cpu, sent, received = (statistics.median(column) for column in zip(*per_step, strict=True))
    share = cpu / wall / (os.cpu_count() or 1)
    told = f"({share:.0%} of the cores); bytes out {sent:.0f}, in {received:.0f}"
    print(f"step: {wall:.1f} ms, {cpu:.1f} ms of driver CPU {told}")
    [late] = steps(calls, simulated_worker.LATE_STEP, simulated_worker.LATE_STEP)
    print(f"late step: {late[0]:.0f} ms, {late[1]:.1f} ms of driver CPU with beats; bytes out {late[2]}, in {late[3]}")
    [failed] = [call for call in calls if call.failed]
    released = next(e for e in events if e["event"] == "released")
    assert len(released["lost"]) == per_node and released["alive"] == workers - per_node, released
    known, seconds = failed.end.clock - struck, released["seconds"]
    print(f"node lost: known {known:.3f} s after SIGKILL, others released in {seconds:.3f} s")
    first = next(c for c in calls if c.method == "step" and c.begin.clock > failed.end.clock)
    print(f"first step with {workers - per_node} workers begins {first.begin.clock - struck:.2f} s after SIGKILL")
    [restored] = [e for e in events if e["event"] == "restored"]
    assert (restored["source"], restored["step"]) == ("memory", KILLED - 1), restored
    return cpu, received


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--workers", type=int, nargs="+", default=[512, 1024])
    arguments.add_argument("--per-node", type=int, default=128)
    arguments.add_argument("--zero", type=int, default=0)
    options = arguments.parse_args()
    costs = {workers: measure(workers, options.per_node, options.zero) for workers in sorted(options.workers)}
    (few, (_, least)), (many, (cpu, most)) = list(costs.items())[0], list(costs.items())[-1]
    if few < many:
        each = (most - least) / (many - few)
        print(f"a further worker brings the driver {each:.1f} bytes per step")
        assert each <= WORKER_BYTES, each
    print(f"driver CPU per step of {many} workers: {cpu:.1f} ms; the goal for 1,024 is {CPU_MS:.0f} ms")


if __name__ == "__main__":
    main()
