"""A worker that signals strike while its generation forms, as a file in the run directory says."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from platform.runtime import process_groups
from platform.runtime.host_memory import HostMemory
from platform.runtime.process_groups import ProcessGroups
from platform.train.worker import Worker

FILE = "strikes.json"
PLACES = {  # parts of a formation, in order -> the function that does it
    "meet": (process_groups, "meet_ranks"),
    "join": (process_groups, "join_default_group"),
    "split": (ProcessGroups, "_create_groups"),
    "connect": (HostMemory, "_connect_group"),
    "build": (Worker, "build_trainer"),
}


class StruckWorker(Worker):
    """FILE has a row for each strike: a generation, a rank, a place, the number of a signal, and the seconds after the
    beginning of the place. Each is done once, and leaves a file `struck-*`."""

    strikes: tuple[dict[str, Any], ...] = ()

    @wraps(Worker.join_mesh)  # the arguments' types
    def join_mesh(self, rank, world_size, config, store, generation, *arguments, **named):
        rows = json.loads((self.run_dir / FILE).read_text())
        self.strikes = [row for row in rows if (row["generation"], row["rank"]) == (generation, rank)]
        for place, (owner, name) in PLACES.items():
            function = getattr(owner, name)
            setattr(owner, name, self._strike_within(place, getattr(function, "unstruck", function)))
        return super().join_mesh(rank, world_size, config, store, generation, *arguments, **named)

    def _strike_within(self, place, function):
        @wraps(function)
        def struck(*arguments, **named):
            for row in self.strikes:
                if row["place"] == place:
                    self._strike(row)
            return function(*arguments, **named)

        struck.unstruck = function
        return struck

    def _strike(self, row):
        with suppress(FileExistsError):
            Path(self.run_dir, f"struck-{row['generation']}-{row['rank']}-{row['place']}").touch(exist_ok=False)
            if row["seconds"]:
                threading.Timer(row["seconds"], os.kill, (os.getpid(), row["signal"])).start()
            else:
                os.kill(os.getpid(), row["signal"])


def draw_strikes(chance: random.Random, count: int, ranks: int, first: int = 2) -> list[dict[str, Any]]:
    """Rows for so many generations, one after the other; one in four is of two ranks, one in four stops its process."""
    places = [place for place in PLACES if ranks > 2 or place != "split"]  # two ranks are one group
    rows = []
    for generation in range(first, first + count):
        struck = chance.sample(range(ranks), 2 if chance.random() < 0.25 else 1)
        for rank in struck if generation > first else [0]:  # there is a rank 0 in all of them
            stops = chance.random() < 0.25
            rows.append({
                "generation": generation, "rank": rank, "place": chance.choice(places),
                "signal": signal.SIGSTOP if stops else signal.SIGKILL,
                "seconds": chance.choice([0, 0, 0.001, 0.01, 0.1]),
            })  # fmt: skip
    return rows
