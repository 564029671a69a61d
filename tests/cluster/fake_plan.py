"""A plan as the driver sees it."""

from dataclasses import dataclass
from unittest.mock import patch

from platform.plan.language.mesh import Mesh


@dataclass(frozen=True)
class FakePlan:
    """`size` data-parallel workers."""

    size: int
    flops_per_token: float = 1e6

    @property
    def mesh(self):
        return Mesh.of({"stage": 1, "data": self.size})

    def describe(self):
        return f"the plan: {self.size} workers"

    def to_dict(self):
        return {"mesh": self.mesh.axes}


def run_fake(config, size, worker):
    """Drive a run of `size` fake workers, whose plan needs no memory."""
    from platform.cluster.driver import run

    with patch("platform.cluster.run.devices.device_of", lambda *_: None):
        return run(config, FakePlan(size), experiment="quick", worker=f"fake_worker:{worker}")
