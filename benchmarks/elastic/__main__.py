"""Recovery beside Ray Train's elastic training and torchft: the same model, the same kill, on four nodes.

    python -m benchmarks.elastic [--systems ours torchft] [--kills worker node] [--trials 5]

Needs root. A replica on each of four nodes of the testbed, which links of 1 Gbit/s join. `worker`: the process of a
node gets SIGKILL, at a random moment; `node`: a node loses its power, so that no connection is closed, and starts anew
after the first step that the others do. Seconds from the kill to the first step that nobody had done before, steps
done again because of it, and seconds until a step of all four, from the kill (`worker`) or the start of the node.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.elastic.systems import SYSTEMS, System
from benchmarks.elastic.work import SAVED, WORKERS, Step
from benchmarks.peers import environment
from tests.testbed.links import Links, why_not

HEAD = ("system", "kill", "trials", "step (s)", "first new step (s): median, longest", "steps done again: median, most",
        "all four again (s): median, longest", "steps done again for it: median, most")  # fmt: skip
VICTIM = 2  # node; the driver's, or whatever leads the peers, is on node 0
SETTLED = 5  # steps of all four before a kill
PATIENCE = 300  # seconds


@dataclass(frozen=True)
class Trial:
    """What one kill has cost: seconds, and steps done again, until the first new step and until all four step again."""

    new: float
    again: int
    whole: float
    again_for_it: int


def until(what: Callable[[], Any]) -> Any:
    """Wait for something to be true; return it. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while not (outcome := what()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {PATIENCE} s")
        time.sleep(0.1)
    return outcome


def settled(system: System) -> list[Step]:
    """Return the steps of a system that has done several with all workers; else []."""
    steps = system.steps()
    last = [step for step in steps if step.formation == steps[-1].formation]
    return steps if len(last) > SETTLED and last[-1].world == WORKERS else []


def again(steps: Sequence[Step]) -> int:
    """Return how many of the steps were done before."""
    return len(steps) - len({step.step for step in steps})


def strike(system: System, links: Links, kill: str, chance: random.Random) -> Trial:
    """Kill once, and wait until all four step again."""
    before = until(lambda: settled(system))
    pid, step_seconds = system.process(VICTIM), seconds_of(before)
    time.sleep(chance.uniform(0, SAVED * step_seconds))
    begin, old = time.time(), before[-1].formation
    if kill == "node":
        system.lose(VICTIM)
    else:
        links.run(VICTIM, ["kill", "-KILL", str(pid)], check=True)
        system.killed(VICTIM)
    known = max(step.step for step in system.steps() if step.time <= begin)

    def after(whole: bool, since: float) -> list[Step]:
        """The steps up to the first new one of another formation, of all four if `whole`; [] if there is none."""
        steps = system.steps()
        late = [step for step in steps if step.time > since and step.formation != old and step.step > known]
        fits = [step for step in late if not whole or step.world == WORKERS]
        return [step for step in steps if step.time <= fits[0].time] if fits else []

    first = until(lambda: after(False, begin))
    back = begin
    if kill == "node":
        back = time.time()
        system.come_back(VICTIM)
    whole = until(lambda: after(True, back))
    return Trial(first[-1].time - begin, again(first) - again(before), whole[-1].time - back,
                 again(whole) - again(first))  # fmt: skip


def seconds_of(steps: Sequence[Step]) -> float:
    """Return the median seconds between two steps of the last formation."""
    ends = [step.time for step in steps if step.formation == steps[-1].formation]
    return median(b - a for a, b in pairwise(ends))


def measure(name: str, kill: str, count: int) -> list[str]:
    """Return the row of a system and a kind of kill."""
    chance, trials = random.Random(name + kill), []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Links(WORKERS, "1gbit") as links:
        with SYSTEMS[name](links, Path(folder)) as system:
            for _ in range(count):
                trials.append(strike(system, links, kill, chance))
                print(f"{name}, {kill}: {trials[-1]}", file=sys.stderr, flush=True)
            usual = seconds_of(until(lambda: settled(system)))

    def both(values: Sequence[float], digits: int) -> str:
        return f"{median(values):.{digits}f}, {max(values):.{digits}f}"

    return [name, kill, str(count), f"{usual:.2f}", both([t.new for t in trials], 2),
            both([t.again for t in trials], 0), both([t.whole for t in trials], 1),
            both([t.again_for_it for t in trials], 0)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--kills", nargs="+", default=["worker", "node"], choices=["worker", "node"])
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name in options.systems:
        package = SYSTEMS[name].package
        if why := package and environment.install(package):
            print(f"| {name} | {why} |")
            continue
        for kill in options.kills:
            try:
                row = measure(name, kill, options.trials)
            except TimeoutError as error:
                row = [name, kill, f"no step that was waited for {error}"]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
