"""One run of 2,000 steps to which everything happens: its curve and samples are those of one process left alone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.testbed.links import Links, why_not
from tests.testbed.ray_nodes import Launched, RayNodes
from tests.testbed.runs import CLUSTER, SMALL, lost_steps, same_as_alone, stopped, world

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

STEPS, SAVED = 2000, 50  # steps between two checkpoints
MODEL = "model.layers=1 train.steps=2000".split()
LAYOUT_1D = "tensor=1d tensor.axes.t=2 parallel.data=4".split()
LAYOUT_3D = "tensor=3d tensor.axes.x=2 tensor.axes.y=2 tensor.axes.z=2 parallel.data=1 train.microbatch=8".split()


def text_of(folder: Path) -> list[str]:
    """Arguments for a text that can be learnt, written into `folder`."""
    folder.mkdir()
    for i in range(8):
        sheep = " ".join(f"{i * k} wolves and {k} sheep" for k in range(300))
        (folder / f"{i}.txt").write_text(f"document {i}: {sheep}")
    return ["data=text", f"data.path={folder}", "data.validation=0"]


def at(run: Launched, step: int) -> int:
    """Waits until a step is done; the number of rows so far."""
    return run.until(lambda: (rows := run.rows) and rows[-1]["step"] >= step and len(rows))


def test_two_thousand_steps(tmp_path):
    with Links(nodes=4, rate="1gbit") as links, RayNodes(links, cpus=2) as nodes:
        text = text_of(nodes.shared / "text")
        fixed = [*SMALL, *CLUSTER, *MODEL, *text, f"checkpoint.every={SAVED}"]

        run = nodes.launch("run", *fixed, *LAYOUT_1D)
        for step, node in ((150, 3), (400, 2)):
            before = at(run, step)
            nodes.lose(node)
            smaller = len(world(run, 6, before))
            nodes.come_back(node)
            world(run, 8, smaller)
        at(run, 700)
        stopped(run)
        assert lost_steps(run) <= 2, "a lost node costs a step at most"

        run = nodes.launch("run", *fixed, *LAYOUT_3D)
        [changed] = run.until(lambda: run.of("changed"))
        assert changed["keys"]["tensor.scheme"] == ["1d", "3d"]
        before = at(run, 1000)
        links.cut(1)
        smaller = run.until(lambda: any(row["world_size"] < 8 for row in run.rows[before:]) and len(run.rows))
        nodes.until_there(3)
        links.heal(1)
        world(run, 8, smaller)
        at(run, 1500)
        assert lost_steps(run) <= 3
        run.signal(signal.SIGKILL)
        run.process.wait()

        last = nodes.launch("run", *fixed, *LAYOUT_3D)
        assert last.ended(1500) == 0
        [took_over] = last.of("took_over")[-1:]
        assert 0 < took_over["steps_lost"] < 2 * SAVED  # the newest checkpoint may have been under way
        meshes = [event["mesh"] for event in last.of("forming")]
        assert {"t": 2, "data": 4}.items() <= meshes[0].items()
        assert {"x": 2, "y": 2, "z": 2}.items() <= meshes[-1].items()
        rows = last.rows
        assert len(rows) == STEPS and rows[-1]["loss"] < 0.5 * rows[0]["loss"]
        same_as_alone(rows, tmp_path, *MODEL, *text)
