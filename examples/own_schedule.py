"""A pipeline schedule of your own: a function that returns a table, registered by name, and a run on two stages.

    python examples/own_schedule.py

A schedule says which stage computes which pass of which microbatch in what order; sends and receives are derived. The
table is checked (complete, free of deadlocks) before a process starts. This one is 1F1B whose stages run further ahead:
it keeps more microbatches alive and, where messages are slow, waits less.
"""

from itertools import zip_longest

from platform.api import (
    Action,
    Kind,
    Rows,
    ScheduleError,
    compose,
    generate,
    plan,
    register_pipeline,
    run,
    simulate,
    table,
)


def eager_1f1b(stages: int, chunks: int, microbatches: int) -> Rows:
    """Generate 1F1B of which stage r runs 2 (stages - r) - 1 forward passes before its first backward pass."""
    if chunks != 1:
        raise ScheduleError(f"eager_1f1b has one chunk per stage, not {chunks}")
    rows = []
    for stage in range(stages):
        forwards = [Action(Kind.FORWARD, m, stage) for m in range(microbatches)]
        backwards = [Action(Kind.BACKWARD, m, stage) for m in range(microbatches)]
        warm = min(microbatches, 2 * (stages - stage) - 1)
        pairs = zip_longest(backwards, forwards[warm:])
        rows.append([*forwards[:warm], *(action for pair in pairs for action in pair if action)])
    return rows


register_pipeline("eager_1f1b", eager_1f1b)  # from now on pipeline=eager_1f1b is legal, where this module is imported

SIZES = ["model.layers=2", "model.d_model=32", "model.length=16", "model.vocab=64"]
BATCH = ["train.global_batch=6", "train.microbatch=1"]
COMMON = [*SIZES, *BATCH, "data=synthetic", "train.steps=3", "cluster.device=cpu"]
OWN = ["extend=[own_schedule]", "pipeline=eager_1f1b", "pipeline.stages=2", "cluster=processes", "run.dir=runs/eager"]
SERIAL = ["cluster=inline", "run.dir=runs/eager_serial"]


def main() -> None:
    for name in ("1f1b", "eager_1f1b"):
        schedule = generate(name, 2, 1, 6)
        timings = [simulate(schedule, transfer=delay) for delay in (0.0, 0.5)]
        print(f"{name}: takes {timings[0].makespan:g}, with slow messages {timings[1].makespan:g}")
        print(table(schedule.rows))

    own, serial = compose(*COMMON, *OWN), compose(*COMMON, *SERIAL)
    print("mesh:", plan(own).mesh)
    staged, alone = run(own), run(serial)
    print(f"\n{'step':>4}  {'two stages':>12}  {'one process':>12}")
    for mine, its in zip(staged.metrics, alone.metrics, strict=True):
        print(f"{mine.step:>4}  {mine.loss:>12.6f}  {its.loss:>12.6f}")
        assert abs(mine.loss - its.loss) < 1e-4


if __name__ == "__main__":  # the workers import this file, as `own_schedule` too: extend=[own_schedule]
    main()
