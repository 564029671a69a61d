"""Bad links between nodes are named while a run goes on: a slow one, a cut one, a node that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from platform.status.__main__ import status_data
from platform.status.seen_run import read_run_contents
from tests.testbed.ailments import NAMED, PATIENCE, ROOT, SECONDS, TINY, by_command
from tests.testbed.links import Links, why_not

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

NODES, RATE, SLOW = 3, "200mbit", "2mbit"
WIDE = "model.d_model=128 model.vocab=2000 tensor=serial parallel.data=3 train.global_batch=6 elastic.hang_seconds=60"
STRUCK, STEADY = 2, 10  # the node; looks that name it as the first one did


class Spread:
    """A run by torchrun, a worker on each node."""

    def __init__(self, links: Links, folder: Path):
        self.links, self.run_dir, self.log = links, folder / "run", folder / "log"

    def __enter__(self) -> Spread:
        launch = [*TINY, *WIDE.split(), f"run.dir={self.run_dir}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for node in range(NODES):
            run = f"--nnodes={NODES} --node-rank={node} --nproc-per-node=1 --master-addr={Links.address(0)}"
            command = [sys.executable, "-m", "torch.distributed.run", *run.split(), "--master-port=29500"]
            with self.log.open("ab") as log:
                how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.links.start(node, [*command, "-m", "platform.launch", *launch], env=environment, cwd=ROOT, **how)
        return self

    def __exit__(self, *_: object) -> None:
        """The links end what runs on their nodes."""

    def until(self, steps: int) -> None:
        deadline, path = time.monotonic() + PATIENCE, self.run_dir / "metrics.jsonl"
        while not path.exists() or len(path.read_text().splitlines()) < steps:
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def verdict(self, words: str) -> dict[str, Any]:
        """Wait until the run's verdict has these words, and return how the run is."""
        deadline, status = time.monotonic() + 2 * NAMED, {}
        while time.monotonic() < deadline and words not in ((status.get("verdict") or {}).get("line", "")):
            time.sleep(0.5)
            status = status_data(read_run_contents(self.run_dir))
        return status


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[Spread]:
    with Links(nodes=NODES, rate=RATE) as links, Spread(links, tmp_path) as run:
        run.until(6)
        yield run


STRIKES = {  # how -> what is done, words of the verdict
    "a slow link": (lambda links: links.slow(STRUCK, SLOW), f"the network of node{STRUCK} is slow"),
    "a cut link": (lambda links: links.cut(STRUCK), f"the network of node{STRUCK} is cut"),
    "a lost node": (lambda links: links.crash(STRUCK), f"the network of node{STRUCK} is cut"),
}


@pytest.mark.parametrize("how", STRIKES)
def test_the_link_is_named(spread: Spread, how: str):
    strike, words = STRIKES[how]
    assert status_data(read_run_contents(spread.run_dir))["verdict"] is None
    strike(spread.links)
    status = spread.verdict(words)
    assert status["verdict"] and words in status["verdict"]["line"], f"{status}\n{spread.log.read_text()[-2000:]}"
    again, seconds = by_command(spread.run_dir)
    print(f"{how}: {seconds:.2f} s: {again['verdict']['line']}")
    assert words in again["verdict"]["line"] and seconds < SECONDS
    for _ in range(STEADY if how == "a slow link" else 0):  # which lasts
        time.sleep(1.0)
        again = status_data(read_run_contents(spread.run_dir))
        assert f"of node{STRUCK} is slow" in again["verdict"]["line"], again
