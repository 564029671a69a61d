"""A crew of Ray actors: one per worker, in an embedded Ray on this machine or in the cluster at RAY_ADDRESS."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.cluster.crew import Outcome, RemoteCrew, arguments
from platform.cluster.host import Answer, Host
from platform.cluster.job import Assignment, Job, assign, usable_cores
from platform.cluster.rendezvous import Rendezvous
from platform.config import ConfigError, violation

_CONNECT_SECONDS = 2.0
_PLACEMENT_SECONDS = 60.0  # for resources that were free a moment ago
_OBJECT_STORE_BYTES = 100 << 20  # no tensor travels through it; shared memory is for the workers


class RayCrew(RemoteCrew):
    """One actor per rank in a placement group; ranks are grouped by machine, and on a machine ordered by GPU."""

    def __init__(self, job: Job, *, embedded: bool):
        self._embedded = embedded
        super().__init__(job)

    def _start(self) -> None:
        self._actors: list[Any] = []
        self._calls: dict[Any, int] = {}  # object reference of a running call -> rank
        self._group: Any = None
        self._temporary: str | None = None
        if self._embedded:
            self._temporary = _short_temporary_directory()
            start_local(self._temporary, self.job)
        else:
            connect()
        import ray

        self._rendezvous = Rendezvous("127.0.0.1" if self._embedded else ray.util.get_node_ip_address())
        self.store = self._rendezvous.address
        places = self._create_actors()
        self._rendezvous.start()
        for actor, place in zip(self._actors, places, strict=True):
            self._calls[actor.start.remote(place, self.job.name(place.rank))] = place.rank

    def _create_actors(self) -> list[Assignment]:
        """Fills `_actors` in rank order, which is known only when every actor has said where it is."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        size, gpus = self.job.world_size, int(self.job.device == "cuda")
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if gpus else {})
        self._group = placement_group([bundle] * size, strategy="PACK")
        if not self._group.wait(_PLACEMENT_SECONDS):
            raise ConfigError(f"cluster: Ray found no place for {size} times {bundle} in {_PLACEMENT_SECONDS:.0f} s")
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Actor)
        self._actors = [
            actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, i)).remote()
            for i in range(size)
        ]
        found = ray.get([a.locate.remote() for a in self._actors])
        machines = list(dict.fromkeys(where["machine"] for where in found))
        order = sorted(range(size), key=lambda i: (machines.index(found[i]["machine"]), found[i]["gpu"]))
        self._actors = [self._actors[i] for i in order]
        members = {m: [rank for rank, i in enumerate(order) if found[i]["machine"] == m] for m in machines}
        return [
            assign(
                self.job,
                rank,
                local_rank=members[machine].index(rank),
                local_world_size=len(members[machine]),
                group_rank=machines.index(machine),
                store=self.store,
                cores=found[i]["cores"],
            )
            for rank, i in enumerate(order)
            for machine in [found[i]["machine"]]
        ]

    def _send(self, method: str, args: tuple[Any, ...]) -> None:
        self._calls = {
            actor.call.remote(method, arguments(args, rank)): rank for rank, actor in enumerate(self._actors)
        }

    def _receive(self, pending: Set[int], timeout: float) -> list[Outcome]:
        import ray
        from ray.exceptions import RayActorError, RayError

        waiting = [call for call, rank in self._calls.items() if rank in pending]
        outcomes = []
        for call in ray.wait(waiting, num_returns=1, timeout=timeout)[0]:
            rank = self._calls[call]
            try:
                outcomes.append(Outcome(rank, **ray.get(call)))
            except RayActorError as error:
                outcomes.append(Outcome(rank, error=_reason(error), died=True))
            except RayError as error:
                outcomes.append(Outcome(rank, error=str(error)))
        return outcomes

    def _dismiss(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()  # an embedded Ray ends; a cluster is only left
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _Actor:
    """A Host in a Ray worker process. Where it runs is asked before its rank is decided."""

    def __init__(self) -> None:
        self._name = "worker"
        self._host: Host | None = None

    def __repr__(self) -> str:  # Ray's own messages show it
        return self._name

    def locate(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        first = gpus[0] if gpus else "0"
        return {"machine": context.get_node_id(), "gpu": (len(first), first), "cores": usable_cores()}

    def start(self, place: Assignment, name: str) -> Answer:
        self._name = name
        self._host = Host(place)
        return self._host.start()

    def call(self, method: str, args: list[Any]) -> Answer:
        assert self._host is not None
        return self._host.call(method, args)


def start_local(directory: str, job: Job) -> None:
    """Starts an embedded Ray with its files in `directory`: nobody else's cluster is joined, nothing is reported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _init(
        address="local",
        _temp_dir=directory,
        num_cpus=job.world_size,  # workers are logical: more of them than cores is slow and legal
        num_gpus=job.world_size if job.device == "cuda" else 0,
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
