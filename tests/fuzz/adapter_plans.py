"""Random plans of adapters, of whose ranks some die between two plans of a run: the others go on out of memory as one
process would have. A pipeline stage may train nothing, and only workers of such stages may be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from platform.config.fields import Config
from platform.plan.plan import Plan
from tests.fuzz import plans
from tests.fuzz.draw_training import draw_adapters
from tests.fuzz.passages import InMemory

CLASSES = ("all live", "some died", "only idle ones live", "more had to live", "refused")
TRIES = 40  # draws until one is legal, and has two plans of more than one rank


@contextmanager
def opened() -> Iterator[Callable[[int], str]]:
    """Yield `attempt`."""
    with plans.opened(), TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        plans.write_files(Path(folder))
        yield lambda seed: attempt(seed, Path(folder))


def attempt(seed: int, folder: Path) -> str:
    """Draw the case of a seed and check it. Raises AssertionError with the plans where it fails."""
    r = Random(seed)
    for _ in range(TRIES):
        configs, planned = draw(r, folder)
        if planned and planned[0].mesh.world_size > 1 and plans.suits(configs, planned):
            passage = InMemory(r, ("first", "last", "some", "some", "some"))
            try:
                plans.check(r, configs, planned, asks=False, passage=passage)
            except Exception as error:
                described = " then ".join(map(plans.describe, configs))
                raise AssertionError(f"{error!r}; alive {passage.alive}: {described}") from error
            if passage.idle:
                return "only idle ones live"
            return "more had to live" if passage.spared else "some died" if passage.killed else "all live"
    return "refused"


def draw(r: Random, folder: Path) -> tuple[Sequence[Config], Sequence[Plan]]:
    """Draw two plans of a run with adapters; no plans where one is refused."""
    configs = plans.draw(r, "resume", folder)
    if configs[0].model.kind == "two_layer":
        return configs, []
    draw_adapters(r, configs)
    return configs, plans.planned(configs)
