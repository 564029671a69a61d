"""Plans of several ranks over NCCL, all on one GPU, against one process on the CPU in fp64."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Aborted, Communicator
from tests.harness.oracle import MODELS, Result, compute, configure, examine, on_host
from tests.harness.pool import Pool

pytestmark = pytest.mark.gpu
PLANS = {
    "t 2": configure("1d", {"t": 2}),
    "data 2 zero 1, t 2 sp": configure("1d_sp", {"t": 2}, data=2, zero=1, microbatch=2),
    "data 2 zero 3": configure(data=2, zero=3, microbatch=2),
    "data 3 zero 2": configure(data=3, zero=2, microbatch=2, global_batch=12),
    "interleaved 2 x 2, t 2": configure("1d", {"t": 2}, pipeline="interleaved", stages=2, chunks=2, layers=4,
                                        microbatch=2),
    "zb_h1 of 3 stages": configure(pipeline="zb_h1", stages=3, layers=3, microbatch=1),
    "2d": configure("2d", {"r": 2, "c": 2}),
    "3d": configure("3d", {"x": 1, "y": 2, "z": 2}, **MODELS["llama"]),
    "dsp_csub, data 2": configure(branch="dsp_csub", branch_axes={"g": 2}, data=2, microbatch=2),
    "t5, 1f1b": configure("1d", {"t": 2}, pipeline="1f1b", stages=2, microbatch=2, **MODELS["t5"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    pool = Pool(4, 90.0, "cuda")
    yield pool
    pool.close()


def whole_step(c: Config, plan: Plan, communicator: Communicator) -> Result:
    return on_host(compute(c, plan, communicator))


@pytest.mark.parametrize("name", PLANS)
def test_ranks_on_nccl_compute_what_one_process_does(name, ranks, capsys):
    c, begin = PLANS[name], time.monotonic()
    plan = make_plan(c)
    results = ranks.run(whole_step, c, plan)
    with capsys.disabled():
        print(f"\n{name}: {plan.mesh.world_size} ranks, {time.monotonic() - begin:.1f} s", end="")
    examine(c, plan, results)


def hang(c: Config, plan: Plan, communicator: Communicator) -> tuple[str, float]:
    """Wait in two groups for rank 0, which never comes, until a thread aborts; return what was raised, and after how
    many seconds."""
    if communicator.rank == 0:
        time.sleep(3.0)
        communicator.abort()
        return "", 0.0
    x = torch.ones(1 << 20, device=communicator.device)
    handles = [communicator.launch("all_reduce", x.clone(), axes) for axes in (("data",), ("t",), ("data", "t"))]
    took: list[float] = []

    def end() -> None:
        begin = time.monotonic()
        communicator.abort()
        took.append(time.monotonic() - begin)

    timer = threading.Timer(1.0, end)
    timer.start()
    try:
        for handle in handles:
            communicator.read_numbers(handle.wait()[:1])
        said = "nothing"
    except (Aborted, RuntimeError) as error:
        said = type(error).__name__
    timer.join()
    return said, took[0]


def test_an_abort_ends_all_groups_and_the_process_forms_anew(ranks, capsys):
    c = configure("1d", {"t": 2}, data=2, microbatch=2)
    outcomes = ranks.run(hang, c, make_plan(c))
    with capsys.disabled():
        print(f"\naborts: {outcomes}", end="")
    assert all(said == "Aborted" and seconds < 5 for said, seconds in outcomes[1:])
    c = PLANS["t 2"]
    plan = make_plan(c)
    examine(c, plan, ranks.run(whole_step, c, plan))
