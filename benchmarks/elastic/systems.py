"""The systems that are compared: how each is started on the nodes, and what it has done so far."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from benchmarks.elastic.work import MICROBATCH, MODEL, SAVED, WORKERS, Step, recorded
from benchmarks.peers import environment
from platform.monitor import JsonLines
from tests.testbed.links import Links
from tests.testbed.ray_nodes import ROOT, RayNodes

FOREVER = 1_000_000  # steps


class System(Protocol):
    """A system that trains on the nodes of `links`, a worker each, and writes into `folder`. `package`: of the peers'
    environment."""

    package: str

    def __init__(self, links: Links, folder: Path): ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def steps(self) -> list[Step]:
        """Return all steps done so far, ordered by time, those done again included: as node 0 has seen them, which is
        never lost."""

    def process(self, node: int) -> int:
        """Return the process, by its id there, that trains on a node."""

    def killed(self, node: int) -> None:
        """Do what starts a worker again that was killed, where the system leaves that to others."""

    def lose(self, node: int) -> None: ...

    def come_back(self, node: int) -> None: ...


class OnRay:
    """What two of the systems have in common: a Ray on the nodes that starts their workers."""

    package = ""

    def __init__(self, links: Links, folder: Path):
        self._links, self._folder, self._nodes = links, folder, RayNodes(links, cpus=1)

    def __enter__(self) -> OnRay:
        self._nodes.__enter__()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.__exit__()

    def killed(self, node: int) -> None:
        pass

    def lose(self, node: int) -> None:
        self._nodes.lose(node)

    def come_back(self, node: int) -> None:
        self._nodes.come_back(node)

    def _start(self) -> None:
        raise NotImplementedError


class Ours(OnRay):
    """This platform, from the command line."""

    def _start(self) -> None:
        model = [f"model.{key}={value}" for key, value in MODEL.items()]
        batch = [f"train.microbatch={MICROBATCH}", f"train.global_batch={MICROBATCH * WORKERS}"]
        rest = (
            f"+experiment=gpt_quick tensor=serial parallel.data={WORKERS} data=synthetic train.steps={FOREVER}"
            f" optimizer.schedule=constant eval.every=0 monitor.sample=0 checkpoint.every={SAVED}"
            " cluster=ray cluster.device=cpu cluster.threads=1 elastic.attempts=1000"
        ).split()
        self._run = self._nodes.launch("run", *rest, *model, *batch)

    def steps(self) -> list[Step]:
        if self._run.process.poll() is not None:
            raise RuntimeError(self._run.log.read_text()[-4000:])
        of_generation: dict[int, list[dict[str, Any]]] = {}
        for row in JsonLines.read_objects(self._run.run_dir / "metrics.jsonl") if self._run.rows else ():
            of_generation.setdefault(row["generation"], []).append(row)
        taken = []
        for first in self._run.of("first_step"):  # it has a time; of the others, rows say how long they took
            ended = first["time"]
            for row in of_generation.get(first["generation"], []):
                ended += row["step_seconds"] if row["step"] > first["step"] else 0
                taken.append(Step(ended, row["step"], row["world_size"], str(row["generation"]), 0, 0))
        return taken

    def process(self, node: int) -> int:
        workers = self._run.of("formed")[-1]["workers"]
        return next(worker["pid"] for worker in workers if worker["node"] == f"node{node}")


class Peer:
    """What the peers have in common: they record each step themselves."""

    _links: Links
    _folder: Path

    def _python(self, node: int, *arguments: str, env: dict[str, str]) -> None:
        """Start a module of this package on a node."""
        self._steps.mkdir(exist_ok=True)
        env = env | {"PYTHONPATH": f"{ROOT}:{environment.FOLDER}", "OMP_NUM_THREADS": "1"}
        with (self._folder / f"log-{node}").open("ab") as log:
            how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": env, "cwd": ROOT}
            self._links.start(node, [sys.executable, "-m", *arguments], **how)

    @property
    def _steps(self) -> Path:
        return self._folder / "steps"

    def steps(self) -> list[Step]:
        return recorded(self._steps, node=0)

    def process(self, node: int) -> int:
        return recorded(self._steps, node)[-1].pid


class RayTrain(Peer, OnRay):
    """Ray Train."""

    package = "ray-train"

    def _start(self) -> None:
        script = "benchmarks.elastic.by_ray_train"
        self._python(0, script, str(self._folder), env=self._nodes.environment)


class Torchft(Peer):
    """torchft, whose replicas something else starts again: here, at once."""

    package = "torchft"
    _SCRIPT = "benchmarks.elastic.by_torchft"

    def __init__(self, links: Links, folder: Path):
        self._links, self._folder = links, folder

    def __enter__(self) -> Torchft:
        self._python(0, self._SCRIPT, "lighthouse", env={})
        for node in range(self._links.nodes):
            self.killed(node)
        return self

    def __exit__(self, *_: object) -> None:
        self._links.crash(*range(self._links.nodes))

    def killed(self, node: int) -> None:
        self._python(node, self._SCRIPT, str(node), str(self._folder), env={})

    def lose(self, node: int) -> None:
        self._links.crash(node)

    def come_back(self, node: int) -> None:
        self._links.boot(node)
        self.killed(node)


SYSTEMS: dict[str, type[System]] = {"ours": Ours, "Ray Train": RayTrain, "torchft": Torchft}
