"""A run as a service sees it: its directory, to which rows and events are added while it is followed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from platform.config.fields import Config
from platform.monitor.sinks.alerts import SinkRun
from platform.monitor.sinks.follower import RunFollower, lock_service
from platform.monitor.sinks.sink_process import SINKS
from tests.harness.happenings import EXAMPLES
from tests.harness.metrics_rows import line


class ARun:
    """Directory of an invented run, whose loss at a step tells in which attempt the step was trained: 7 + attempt /
    100."""

    def __init__(self, path: Path, **monitor: Any):
        path.mkdir(exist_ok=True)
        config = Config()
        vars(config.monitor).update(monitor)
        self.path, self.config, self.monitor = path, config.to_dict(), vars(config.monitor)
        (path / "sinks").mkdir(exist_ok=True)

    def train(self, *steps: int, attempt: int = 1, **changes: Any) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.writelines(json.dumps(line(step, loss=7 + attempt / 100, **changes)) + "\n" for step in steps)

    def happen(self, event: str, **fields: Any) -> None:
        head = {"time": time.time(), "generation": 1, "event": event}
        with open(self.path / "journal.jsonl", "a") as file:
            file.write(json.dumps(head | EXAMPLES[event] | fields) + "\n")

    def saved(self, step: int) -> None:
        self.happen("checkpoint", step=step, directory=f"step-{step}")

    def followed(self, name: str) -> RunFollower:
        """A process of its own would do this; the caller closes it, or leaves it as a crash does."""
        with lock_service(self.path, name):
            return RunFollower(name, SinkRun(self.path, self.config, self.monitor), SINKS[name].open)

    def state(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / "sinks" / f"{name}.json").read_text())["state"]


def rewound_twice(run: ARun, name: str) -> None:
    """Train 9 steps under two drivers, the first of which dies: steps 3 and 4 are trained twice by one driver, with
    the service told in between, 6 by two drivers."""
    follower = run.followed(name)
    run.happen("starting")
    run.train(1, 2)
    run.saved(2)
    run.train(3, 4)
    follower.catch_up()
    run.happen("failure")
    run.happen("rolled_back", step=2)
    run.train(3, 4, 5, attempt=2)
    run.happen("first_step", step=3)
    run.saved(5)
    run.train(6, attempt=2)
    follower.catch_up()  # and is killed
    run.happen("starting")
    run.happen("restored", step=5, directory="step-5", source=None)
    again = run.followed(name)
    run.train(6, 7, 8, 9, attempt=3)
    run.happen("done", step=9)
    again.close(0)


# step -> loss: each step as it was trained last
ONCE = [(step, 7 + attempt / 100) for step, attempt in enumerate((1, 1, 2, 2, 2, 3, 3, 3, 3), 1)]


def rounded(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, round(value, 6)) for step, value in points]
