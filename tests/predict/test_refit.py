"""A hardware is refitted to the measured parts of steps: what took longer is found, and nothing else."""

import pytest

from platform.launch import compose_config
from platform.plan.plan_summary import fold_into_measured_parts
from platform.predict.calibration import fit_slowdowns
from platform.predict.make_plan import make_plan
from platform.predict.price import price_work
from platform.predict.step_price import build_step_work, read_hardware

CPU = read_hardware("cpu")
SIZES = ["+experiment=gpt_quick", "tensor=1d", "tensor.axes.t=2", "parallel.data=2"]


@pytest.mark.parametrize(
    "times",
    [
        {"device": 1.0, "node": 1.0, "network": 1.0},
        {"device": 1.5, "node": 1.0, "network": 1.0},
        {"device": 1.0, "node": 6.0, "network": 1.0},
        {"device": 0.7, "node": 0.5, "network": 1.0},
    ],
)
def test_what_took_longer_is_found(times):
    config = compose_config(SIZES)
    work = build_step_work(config, make_plan(config))
    measured = fold_into_measured_parts(price_work(work, CPU.slow_down(times)).seconds_by_part)
    slowdowns = fit_slowdowns(work, CPU, measured)
    assert slowdowns["network"] == pytest.approx(1.0), "nothing of this run goes there"
    assert {name: slowdowns[name] for name in ("device", "node")} == pytest.approx(
        {name: times[name] for name in ("device", "node")}, rel=0.08
    )


def test_twice_the_time_for_everything_is_twice_the_step():
    config = compose_config(SIZES)
    work = build_step_work(config, make_plan(config))
    slow = CPU.slow_down({"device": 2.0, "node": 2.0, "network": 2.0})
    assert price_work(work, slow).seconds == pytest.approx(2 * price_work(work, CPU).seconds)
