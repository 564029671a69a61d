"""What a snapshot sends to other nodes is predicted to the byte, and how often there is time for it follows."""

from __future__ import annotations

from collections import Counter

import pytest

from platform.launch import compose, prepare
from platform.plan.__main__ import main
from platform.planning.make_plan import make_plan
from platform.planning.snapshot_price import leaving_bytes, settle_interval, snapshot_price
from platform.train.step.training_state import State
from tests.harness.memories import opened, take
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

LAYOUTS = {
    "replicas": {"data": 4},
    "zero 1": {"data": 4, "zero": 1},
    "zero 3 x 1d": {"data": 2, "zero": 3, "tensor": "1d", "axes": {"t": 2}},
    "stages": {"pipeline": "1f1b", "stages": 2, "layers": 2, "tensor": "1d", "axes": {"t": 2}},
    "odd nodes": {"data": 3, "zero": 1, "microbatch": 1, "global_batch": 3},
}


def sent(c, plan, per_node: int) -> int:
    """The most bytes that the ranks of one node really send to others for a snapshot."""
    leaving = Counter[int]()

    def work(communicator):
        state = State(trainer_of(c, plan, communicator))
        nodes = [str(rank // per_node) for rank in range(plan.mesh.size)]
        memory = opened(state.held, nodes, communicator)

        def transfer(outgoing, received):
            assert all(nodes[peer] != nodes[communicator.rank] for peer, _ in outgoing)
            leaving[communicator.rank // per_node] += sum(x.nbytes for _, x in outgoing)
            communicator.transfer(outgoing, received)

        take(memory, 1, state.blocks(), state.values(), transfer)

    run_threads(plan.mesh, work)
    return max(leaving.values())


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [*((name, "adamw") for name in LAYOUTS), ("zero 1", "muon"), ("zero 1", "adafactor"), ("stages", "adafactor")],
)
def test_the_bytes_of_a_plan_are_those_that_are_sent(layout, optimizer):
    c = configure(**LAYOUTS[layout])
    c.optimizer.kind, c.train.ema = optimizer, 0.9 if layout == "stages" else 0.0
    plan = make_plan(c)
    found = leaving_bytes(c, plan, 2)
    assert found == sent(c, plan, 2) and (found > 0) == (layout != "replicas")
    assert leaving_bytes(c, plan, plan.mesh.size) == 0, "one node has no other"


@pytest.mark.parametrize(
    ("changes", "leaving", "interval"),
    [
        ([], 130.8, 1),
        (["cluster.network=3"], 130.8, 3),  # 349 s in three steps of 170
        (["cluster.network=3", "cluster.gpu=H100"], 130.8, 7),  # which are shorter there
        (["cluster.network=3", "cluster.gpu="], 130.8, 1),  # of a length that nobody knows
        (["cluster.network=3", "cluster.device=cpu"], 130.8, 1),
        (["cluster.network=3", "parallel.data=8", "parallel.zero=1"], 16.35, 3),
        (["cluster.network=3", "parallel.data=8"], 0.0, 1),  # another node has it anyway
    ],
)
def test_an_interval_is_the_least_that_there_is_time_for(changes, leaving, interval):
    c = compose(["+experiment=gpt175b", "elastic.snapshot_every=auto", *changes])
    plan = make_plan(c)
    price = snapshot_price(c, plan, 8)
    assert price.bytes / 1e9 == pytest.approx(leaving, abs=0.1)
    if price.step:
        assert price.seconds <= interval * price.step and (interval == 1 or price.seconds > (interval - 1) * price.step)
    settle_interval(c, plan, 8)
    assert c.elastic.snapshot_every == c.elastic.interval == interval
    c.elastic.snapshot_every = 5
    settle_interval(c, plan, 8)
    assert c.elastic.interval == 5, "who says how often is obeyed"


def test_a_run_settles_it_and_a_plan_shows_it(capsys):
    c = compose(["+experiment=gpt_quick", "elastic.snapshot_every=auto"])
    plan, lines = prepare(c, [])
    assert plan and not lines and c.elastic.interval == 1
    assert main(["+experiment=gpt175b", "elastic.snapshot_every=auto", "cluster.network=3"]) == 0
    shown = capsys.readouterr().out
    assert "  a snapshot  131 GB   349 s at cluster.network=3 Gbit/s, beside 3 steps of 170 s" in shown
    assert "  a step      43.6 GB  with elastic.snapshot_every=3" in shown
    assert main(["+experiment=gpt175b", "elastic.snapshot_every=0"]) == 0
    assert "a snapshot" not in capsys.readouterr().out
