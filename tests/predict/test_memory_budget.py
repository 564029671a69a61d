"""What a worker may hold, and what a job asks for, is by the state that the configured optimizer keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from platform.jobs.job_options import JobOptions
from platform.jobs.planned_run import compute_job_size
from platform.launch import compose_config
from platform.predict.footprint import CONTEXT, GROUP, LINE, ROUNDING
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import MemoryForecast, predict_footprints
from platform.predict.remedies import Device, violation_of_memory
from platform.predict.replan import MemoryBudget
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import configure, trainer_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"kind": "sgd"},
    "sgd without momentum": {"kind": "sgd", "momentum": 0.0},
    "lion": {"kind": "lion"},
    "muon": {"kind": "muon"},
}


@pytest.mark.parametrize("frozen", [[], ["embedding*"]], ids=["all", "some frozen"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_what_the_optimizer_keeps(name, frozen):
    """To the byte: counted in the state of torch after a step."""
    c = configure(layers=1, global_batch=4)
    c.train.freeze = frozen
    for key, value in OPTIMIZERS[name].items():
        setattr(c.optimizer, key, value)
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh))
    trainer.step(1)
    kept = [x for held in trainer.optimizer.state.values() for x in held.values() if isinstance(x, torch.Tensor)]
    state = sum(x.nbytes for x in kept if x.dim())  # not the number of the step
    weights = plan.parameter_count * 8
    assert compute_job_size(c, plan, JobOptions()).state == weights + state
    budget = MemoryBudget(c, 1.0)
    budget.memory = 2 * weights + state
    assert budget.may_hold_config(c)
    budget.memory -= 1
    assert not budget.may_hold_config(c)


def test_a_gpu_has_room_for_its_own_libraries():
    """Every worker of gpt175b is in its group along t, in the world, and in two lines to each neighbour of the ring."""
    c = compose_config(["+experiment=gpt175b"])
    plan = make_plan(c)
    footprints = predict_footprints(c, plan)
    for stage, f in enumerate(footprints):
        neighbours = sum(stage in pair for pair in plan.neighbour_stages)
        tensors = f.total_bytes - f.reserved
        assert f.reserved == CONTEXT + 2 * GROUP + 2 * neighbours * LINE + round(ROUNDING * tensors)
    most = max(footprints, key=lambda f: f.total_bytes)
    assert MemoryForecast(c, plan).exceeds_memory(most.total_bytes - 1) and not MemoryForecast(c, plan).exceeds_memory(
        most.total_bytes
    )
    assert not violation_of_memory(c, plan, Device(most.total_bytes, "it"))
    line = violation_of_memory(c, plan, Device(most.total_bytes - most.reserved + 1, "it"))  # tensors alone would fit
    assert f"reserved {most.reserved / 1e9:.3g}" in line
    on_cpus = compose_config(["+experiment=gpt_quick", "cluster.device=cpu"])
    assert all(f.reserved == 0 for f in predict_footprints(on_cpus, make_plan(on_cpus)))
