"""What compiled regions become on GPUs, on a machine without one: `python -m benchmarks.ahead [RUN...]`.

Prints for each region of the shipped experiments, at each shape of its largest tensor: the kernels that a call launches
(with those of its backward pass, if autograd follows it), the most registers of a thread and bytes that it spills in
any configuration, and the bytes that are read and written per element. sm_90 / sm_100 where they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.harness.ahead import TARGETS, Call, Compiled, compilers, lacking
from tests.harness.regions import RUNS, calls_of

HEAD = ["region", "largest tensor", "runs", "kernels", "registers", "spilled", "bytes per element"]


def row(builds: list[Compiled], runs: list[str]) -> list[str]:
    """Return the cells of a call, compiled for each target."""
    counts = [
        [str(len(build.kernels)) for build in builds],
        [str(build.most("registers")) for build in builds],
        [str(build.most("spilled")) for build in builds],
        [f"{build.per_element:.2f}" for build in builds],
    ]
    call = builds[0].call
    return [call.title, str(call.largest), ", ".join(runs), *(" / ".join(dict.fromkeys(cells)) for cells in counts)]


def main() -> None:
    """Print the table of the runs that are named, or of all."""
    if reason := lacking():
        raise SystemExit(reason)
    runs: dict[Call, list[str]] = {}
    for run in sys.argv[1:] or RUNS:
        for call in calls_of(run):
            runs.setdefault(call, []).append(run)
    for cells in (HEAD, ["---"] * len(HEAD)):
        print(f"| {' | '.join(cells)} |")
    with TemporaryDirectory() as folder, compilers(Path(folder)) as compiled:
        for call in sorted(runs, key=lambda call: (call.title, str(call.largest))):
            cells = row([compiled(call, target) for target in TARGETS], runs[call])
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
