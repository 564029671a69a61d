"""Runs over several nodes with a Ray of their own, from the command line: who sits where, and what happens to nodes.

What a run gives is compared with the same command in one process, without any sharding: `same_as_alone`.
"""

from __future__ import annotations

import signal
import sys
import time

import pytest

from platform.launch import compose_config
from platform.predict.make_plan import make_plan
from platform.predict.tier_traffic import NetworkTiers, tier_traffic
from tests.testbed.links import Links, why_not
from tests.testbed.ray_nodes import RayNodes
from tests.testbed.runs import CLUSTER, SMALL, lost_steps, same_as_alone, seats, stopped, world

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

NODES, CPUS = 4, 2
RACKS = ("a", "b", "a", "b")  # of the nodes: not in the order of their numbers
WHOLE = "tensor=1d tensor.axes.t=2 parallel.data=4 train.microbatch=1".split()  # all places of the four nodes
HALF = "tensor=1d tensor.axes.t=2 parallel.data=2".split()


@pytest.fixture(scope="module")
def nodes():
    """Four nodes of two workers, in two racks, whose homes are their own."""
    with Links(nodes=NODES, rate="1gbit") as links:
        labels = [{"rack": rack} for rack in RACKS]
        with RayNodes(links, CPUS, labels, own_homes=True) as nodes:
            yield nodes


@pytest.fixture
def start(nodes, request):
    """Starts a run that ends with the test, if it has not ended by itself."""
    runs = []

    def launch(*arguments):
        run = nodes.launch(request.node.name, *SMALL, *CLUSTER, *arguments)
        runs.append(run)
        return run

    yield launch
    for run in runs:
        if run.process.poll() is None:
            run.signal(signal.SIGKILL)
            run.process.wait()


def test_tensor_axes_are_inside_nodes_and_stages_across_racks(nodes, start, tmp_path):
    """The rack's label decides, not the node's number; and the plan counts what crosses what."""
    layout = "tensor=1d tensor.axes.t=2 parallel.data=2 pipeline=1f1b pipeline.stages=2 train.microbatch=1".split()
    run = start(*layout)
    world(run, 8)
    [formed] = run.of("formed")
    on = seats(formed)
    racks = [RACKS[int(name.removeprefix("node"))] for name in on]
    assert [on[i] == on[i + 1] for i in range(0, 8, 2)] == [True] * 4 and len(set(on)) == 4
    assert sorted({tuple(racks[:4]), tuple(racks[4:])}) == [("a",) * 4, ("b",) * 4]
    [traffic] = run.until(lambda: run.of("traffic"))
    plan = make_plan(compose_config([*SMALL, *layout]))
    planned = tier_traffic(plan, NetworkTiers.build_tiers({"node": 2, "rack": 4}, 8))
    assert traffic["rows"] == [vars(row) for row in planned]
    assert [row.tier for row in planned] == ["inside a node", "between nodes", "between racks"]
    assert "between racks" in run.log.read_text()
    same_as_alone(stopped(run), tmp_path)


def test_two_nodes_of_one_rack_are_enough(nodes, start, tmp_path):
    run = start(*HALF)
    world(run, 4)
    [formed] = run.of("formed")
    on = seats(formed)
    assert on[0] == on[1] != on[2] == on[3]
    assert len({RACKS[int(name.removeprefix("node"))] for name in set(on)}) == 1
    same_as_alone(stopped(run), tmp_path)


def test_a_node_is_lost_and_comes_back(nodes, start, tmp_path):
    """Power is cut: no connection is closed. At most one step is done again, and the mesh grows back."""
    run = start(*WHOLE)
    before = len(world(run, 8))
    nodes.lose(3)
    smaller = len(world(run, 6, before))
    nodes.come_back(3)
    world(run, 8, smaller)
    assert lost_steps(run) <= 1
    last = run.of("formed")[-1]
    on = seats(last)
    assert [on[i] == on[i + 1] for i in range(0, 8, 2)] == [True] * 4
    same_as_alone(stopped(run), tmp_path)


def test_a_short_cut_is_no_failure(nodes, start, tmp_path):
    run = start(*WHOLE)
    before = len(world(run, 8))
    nodes.links.cut(2)
    time.sleep(2)
    nodes.links.heal(2)
    run.until(lambda: len(run.rows) > before + 3)
    assert not run.of("failure")
    same_as_alone(stopped(run), tmp_path)


def test_a_partition_heals_and_the_mesh_grows_back(nodes, start, tmp_path):
    """It lasts until Ray has given the node up: then that ends its Ray as soon as it hears so."""
    run = start(*WHOLE)
    before = len(world(run, 8))
    nodes.links.cut(2)
    smaller = len(world(run, 6, before))
    nodes.until_there(NODES - 1)
    nodes.links.heal(2)
    world(run, 8, smaller)
    assert lost_steps(run) <= 1
    same_as_alone(stopped(run), tmp_path)


def test_a_node_is_told_to_go(nodes, start, tmp_path):
    """Nothing fails, and no step is done twice."""
    run = start(*WHOLE)
    before = len(world(run, 8))
    nodes.tell_to_go(1)
    smaller = len(world(run, 6, before))
    assert run.of("notice") and not run.of("failure") and not lost_steps(run)
    nodes.until_there(NODES - 1)
    nodes.lose(1)
    nodes.come_back(1)
    world(run, 8, smaller)
    same_as_alone(stopped(run), tmp_path)


def test_a_slow_node_is_reported_and_replaced_by_a_spare(nodes, start, tmp_path):
    """A worker that is stopped six sevenths of the time, so briefly that it is while it works, not while it waits."""
    run = start(*HALF, "elastic.spares=2", "elastic.replace_slow=true", "elastic.max_workers=4")
    world(run, 4)
    [formed] = run.of("formed")
    slow = formed["workers"][2]
    number = int(slow["node"].removeprefix("node"))
    limp = nodes.links.start(number, [sys.executable, "-S", "-c", LIMP, str(slow["pid"])])
    [told] = run.until(lambda: run.of("slow")[:1])
    assert (told["number"], told["node"].split("/")[0]) == (slow["number"], slow["node"])
    again = run.until(lambda: run.of("formed")[1:])[0]
    assert slow["number"] not in [worker["number"] for worker in again["workers"]]
    limp.kill()
    run.until(lambda: run.rows[-1]["generation"] >= 2)
    assert not run.of("failure") and not lost_steps(run)
    same_as_alone(stopped(run), tmp_path)


LIMP = """
import os, signal, sys, time
while True:
    for number, seconds in ((signal.SIGSTOP, 0.03), (signal.SIGCONT, 0.005)):
        os.kill(int(sys.argv[1]), number)
        time.sleep(seconds)
"""


def test_homes_are_apart_and_the_text_is_tokenised_once(nodes, start, tmp_path):
    """Where only node 0 has the text. The tokens of all others are those that its driver has put into the run
    directory."""
    text = nodes.home(0) / "text"
    text.mkdir(exist_ok=True)
    for i in range(8):
        (text / f"{i}.txt").write_text(
            f"document {i}: " + " ".join(f"{i * k} wolves and {k} sheep" for k in range(300))
        )
    seen = nodes.environment["HOME"]
    run = start(*WHOLE, "data=text", f"data.path={seen}/text", "data.validation=0")
    world(run, 8)
    rows = stopped(run)
    caches = [sorted((nodes.home(node) / ".cache" / "elastic-platform").glob("*")) for node in range(NODES)]
    assert len(caches[0]) == 1 and caches[1:] == [[]] * 3
    [shared] = (run.run_dir / "corpus").iterdir()
    assert shared.name == caches[0][0].name
    overrides = ["data=text", f"data.path={text}", "data.validation=0", f"data.cache={tmp_path / 'cache'}"]
    same_as_alone(rows, tmp_path, *overrides)
