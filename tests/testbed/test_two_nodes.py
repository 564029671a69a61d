"""A run over two nodes with a Ray of their own loses one of them: the cheapest of what test_runs.py tries."""

from __future__ import annotations

import pytest

from tests.testbed.links import Links, why_not
from tests.testbed.ray_nodes import RayNodes
from tests.testbed.runs import CLUSTER, SMALL, lost_steps, same_as_alone, seats, stopped, world

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


def test_a_node_is_lost(tmp_path):
    """Power is cut: no connection is closed."""
    with Links(nodes=2, rate="1gbit") as links, RayNodes(links, cpus=1) as nodes:
        run = nodes.launch("run", *SMALL, *CLUSTER, "model.layers=1", "tensor=serial", "parallel.data=2")
        before = len(world(run, 2))
        nodes.lose(1)
        world(run, 1, before)
        assert [sorted(seats(event)) for event in run.of("formed")] == [["node0", "node1"], ["node0"]]
        assert lost_steps(run) <= 1
        same_as_alone(stopped(run), tmp_path, "model.layers=1")
