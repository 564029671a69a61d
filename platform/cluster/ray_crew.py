"""A crew of Ray actors: one per worker, in an embedded Ray on this machine or in the cluster at RAY_ADDRESS."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from platform.cluster.host import serve
from platform.cluster.job import Assignment, Job, assign, usable_cores
from platform.cluster.remote import RemoteCrew
from platform.config import ConfigError, violation

_CONNECT_SECONDS = 2.0
_PLACEMENT_SECONDS = 60.0  # for resources that were free a moment ago
_OBJECT_STORE_BYTES = 100 << 20  # no tensor travels through it; shared memory is for the workers


class RayCrew(RemoteCrew):
    """One actor per member. Those of the start are a placement group, numbered by machine, and on a machine by GPU.

    A hired one takes the bundle of one that is gone; where no bundle is free, Ray places it where it can.
    """

    def __init__(self, job: Job, spares: int, *, embedded: bool):
        self._embedded = embedded
        super().__init__(job, spares)

    def _open(self) -> str:
        self._actors: dict[int, Any] = {}
        self._serving: dict[int, Any] = {}  # what each actor does until it ends
        self._bundles: dict[int, int] = {}  # of the group, by those that live
        self._group: Any = None
        self._size = 0  # of the group
        self._temporary: str | None = None
        if self._embedded:
            self._temporary = _short_temporary_directory()
            start_local(self._temporary, self.job, self._wanted)
        else:
            connect()
        import ray

        self._here = ray.get_runtime_context().get_node_id()
        return "127.0.0.1" if self._embedded else ray.util.get_node_ip_address()

    def _launch(self, numbers: Sequence[int]) -> None:
        if self._group is None:
            self._start_group(len(numbers))
            return
        for number in numbers:
            free = set(range(self._size)) - set(self._bundles.values())
            actor = self._actor(min(free) if free else None)
            if free:
                self._bundles[number] = min(free)
            # Where it will be is not known yet: it has the threads of those that were there first.
            place = assign(self.job, number, local_rank=0, local_world_size=self._crowd, group_rank=0)
            self._serve(number, actor, place)

    def _start_group(self, size: int) -> None:
        import ray
        from ray.util.placement_group import placement_group

        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if self.job.device == "cuda" else {})
        self._group, self._size = placement_group([bundle] * size, strategy="PACK"), size
        if not self._group.wait(_PLACEMENT_SECONDS):
            raise ConfigError(f"cluster: Ray found no place for {size} times {bundle} in {_PLACEMENT_SECONDS:.0f} s")
        actors = [self._actor(i) for i in range(size)]
        try:
            found = ray.get([a.locate.remote() for a in actors])
        finally:
            self._actors = dict(enumerate(actors))
        machines = list(dict.fromkeys(where["machine"] for where in found))
        order = sorted(range(size), key=lambda i: (machines.index(found[i]["machine"]), found[i]["gpu"]))
        crowds = [[i for i in order if found[i]["machine"] == machine] for machine in machines]
        self._crowd = max(map(len, crowds))
        for number, i in enumerate(order):
            machine = machines.index(found[i]["machine"])
            place = assign(
                self.job,
                number,
                local_rank=crowds[machine].index(i),
                local_world_size=len(crowds[machine]),
                group_rank=machine,
                cores=found[i]["cores"],
            )
            self._bundles[number] = i
            self._serve(number, actors[i], place)

    def _actor(self, bundle: int | None) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus = int(self.job.device == "cuda")
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Actor)
        where = PlacementGroupSchedulingStrategy(self._group, bundle) if bundle is not None else "DEFAULT"
        return actor.options(scheduling_strategy=where).remote()

    def _serve(self, number: int, actor: Any, place: Assignment) -> None:
        self._actors[number] = actor
        self._serving[number] = actor.serve.remote(place, self._board.address, self._board.token)

    def _ended(self, number: int, seconds: float) -> str | None:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError

        try:
            ray.get(self._serving[number], timeout=seconds)
        except GetTimeoutError:
            return None
        except RayActorError as error:
            return _reason(error)
        except RayError as error:
            return str(error)
        return "the actor ended by itself"

    def _kill(self, number: int) -> None:
        import ray

        self._bundles.pop(number, None)
        ray.kill(self._actors[number], no_restart=True)
        member = self._greeted.get(number)
        if member and member.node.endswith(self._here):
            with suppress(ProcessLookupError):  # at once, where that is possible
                os.kill(member.pid, signal.SIGKILL)

    def _dismiss(self, polite: bool) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            for number in self._actors:
                self._kill(number)
            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()  # an embedded Ray ends; a cluster is only left
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _Actor:
    """A member in a Ray worker process. Where it runs is asked before it has a number."""

    def __init__(self) -> None:
        self._name = "worker"

    def __repr__(self) -> str:  # Ray's own messages show it
        return self._name

    def locate(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        first = gpus[0] if gpus else "0"
        return {"machine": context.get_node_id(), "gpu": (len(first), first), "cores": usable_cores()}

    def serve(self, place: Assignment, address: tuple[str, int], token: str) -> None:
        import ray

        self._name = f"worker{place.number}"
        node = f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()}"
        serve(replace(place, node=node), address, token)


def start_local(directory: str, job: Job, size: int) -> None:
    """Starts an embedded Ray with its files in `directory`: nobody else's cluster is joined, nothing is reported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _init(
        address="local",
        _temp_dir=directory,
        num_cpus=size,  # workers are logical: more of them than cores is slow and legal
        num_gpus=size if job.device == "cuda" else 0,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _system_config={"worker_niceness": 0},  # Ray's default of 15 starves workers beside anything else
    )


def connect() -> None:
    """Joins the cluster at RAY_ADDRESS, or the one on this machine. Raises ConfigError where there is none."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        _knock(address)
        _init(address=address)
    except (OSError, RayError) as error:
        reason = str(error).strip().partition("\n")[0]
        constraint = f"no Ray cluster at RAY_ADDRESS={address} ({reason}); start one with `ray start --head`"
        raise ConfigError(violation("cluster", "ray", constraint, ["cluster=local"])) from None


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT: Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def free_resources() -> dict[str, float]:
    """What the joined cluster has free: {"CPU": ..., "GPU": ...}."""
    import ray

    return ray.available_resources()


def _init(**arguments: Any) -> None:
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # `uv run` would rebuild the environment per worker
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=_runtime_env(), **arguments)
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Ray puts its own there


def _runtime_env() -> dict[str, Any] | None:
    """What makes workers find this package where it is not installed; see platform/_startup.py."""
    if "_platform_startup" in sys.modules:
        return None
    root = str(Path(__file__).parents[2])
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}}


def _short_temporary_directory() -> str:
    """Ray puts Unix sockets there, whose path may have 107 characters: a long TMPDIR would not do."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    return tempfile.mkdtemp(prefix="ray-")


def _reason(error: Exception) -> str:
    """Ray's account of an actor's death in one line, without the identifiers before and the guesses after it."""
    text = " ".join(str(error).split()).partition("Some common causes include")[0]
    return text[max(0, text.find("The actor is dead because")) :].strip()
