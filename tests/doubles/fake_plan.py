"""Plans for drivers whose workers are fake: of data-parallel workers of a tiny model."""

from functools import cache
from unittest.mock import patch

from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure


@cache
def fake_plan(size):
    """Return a plan of `size` data-parallel workers."""
    tiny = {"layers": 1, "d_model": 8, "heads": 1, "length": 4, "vocab": 8}
    return make_plan(configure(data=size, microbatch=1, global_batch=size, **tiny))


def run_fake(config, size, worker):
    """Drive a run of `size` fake workers, whose plan needs no memory, and is not that of their configuration."""
    from platform.cluster import driver
    from platform.cluster.driver import drive_run

    unplanned = patch.object(driver, "violations_of_text_requests", lambda *_: [])
    with unplanned, patch("platform.cluster.resources.find_worker_device", lambda *_: None):
        return drive_run(config, fake_plan(size), experiment="quick", worker=f"tests.doubles.fake_worker:{worker}")
