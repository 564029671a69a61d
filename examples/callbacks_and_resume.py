"""A run from Python: composed, planned, watched by callbacks, stopped halfway by one of them, and resumed.

    python examples/callbacks_and_resume.py

It is the same run that `python -m platform.launch` makes: the same files in the run directory, the same numbers, and
either continues what the other began.
"""

import shutil

from platform.api import Callbacks, ConfigError, compose, plan, resume, run

SIZES = ["model.layers=1", "model.d_model=32", "model.length=16", "model.vocab=300"]
TEXT = ["data=text", f"data.path={__file__}", "data.validation=0", "data.cache=runs/cache"]  # it learns this file
BATCH = ["train.steps=6", "train.global_batch=4", "optimizer.lr=0.02", "monitor.every=100"]
HERE = ["cluster=inline", "cluster.device=cpu", "run.dir=runs/from_python"]


class Enough(Exception):
    """Raised by a callback to end a run."""


def until(last: int):
    def on_step(row: dict) -> None:  # a row of metrics.jsonl
        print(f"    step {row.step}: loss {row.loss:.4f}, {row.step_seconds * 1000:.0f} ms")
        if row.step == last:
            raise Enough(f"step {last} is enough for today")

    return on_step


def main() -> None:
    shutil.rmtree("runs/from_python", ignore_errors=True)
    try:
        compose("train.steps=0", "model.heads=5")
    except ConfigError as error:  # before any process starts, every mistake at once
        print("refused:", *error.violations, sep="\n    ")

    config = compose(*SIZES, *TEXT, *BATCH, *HERE)
    print("parameters:", plan(config).parameter_count)

    events: list[str] = []
    watched = Callbacks(on_step=until(3), on_event=lambda event: events.append(event.word))
    try:
        run(config, watched)
    except Enough as reason:  # the run saved a checkpoint and ended before `run` raised this
        print("ended:", reason)
    print("events:", " ".join(events))

    result = resume("runs/from_python", callbacks=Callbacks(on_step=until(99)))
    print(f"{result.outcome}: {len(result.metrics)} steps, the last with loss {result.loss:.4f}, in {result.directory}")
    assert result.outcome == "done" and [row.step for row in result.metrics] == [1, 2, 3, 4, 5, 6]


if __name__ == "__main__":
    main()
