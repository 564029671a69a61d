"""Crew of Ray actors, one per worker, in an embedded Ray on this machine or in the cluster at RAY_ADDRESS."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

from platform.cluster.crew.base.failures import Failure, Member, NoPlaces, WorkerFailed
from platform.cluster.crew.base.job import Assignment, Job, assign, usable_cores
from platform.cluster.crew.base.remote import RemoteCrew
from platform.cluster.crew.launchers.host import serve
from platform.cluster.crew.launchers.ray_session import Embedded, Notices, connect

_LOG = logging.getLogger("platform.cluster")
_PLACEMENT_SECONDS = 60.0  # at least, for Ray to grant resources that were free a moment ago
_TURN_SECONDS = 10.0  # interval of the messages that say what is being waited for
_REASON_SECONDS = 0.3  # for Ray to report how a process ended; the loss of a node it learns only much later


class RayCrew(RemoteCrew):
    """Crew with one actor per member. The initial members are placed on as few machines as possible and numbered by
    machine, within a machine by GPU. A hired member starts wherever Ray finds a place, as soon as there is one."""

    def __init__(self, job: Job, spares: int, *, embedded: bool):
        self._embedded = embedded
        super().__init__(job, spares)

    def _open(self) -> str:
        self._actors: dict[int, Any] = {}  # actors not killed yet, by member number
        self._crowd = 0  # most initial members on one machine; 0 before the start
        self._serving: dict[int, Any] = {}  # each actor's running `serve` call
        self._notices: Notices | None = None
        self._ray: Embedded | None = None
        if self._embedded:
            growth = self.job.config["elastic"]["max_workers"] - self.job.world_size
            self._ray = Embedded(
                max(self._wanted, self.job.world_size) + max(0, growth), gpus=self.job.device == "cuda"
            )
        else:
            connect()
        import ray

        self._notices = Notices()
        self._here = ray.get_runtime_context().get_node_id()
        return "127.0.0.1" if self._embedded else ray.util.get_node_ip_address()

    @property
    def leaving(self) -> Set[int]:
        if self._notices is None or not (nodes := self._notices.nodes):
            return set()
        everybody = self._here in nodes  # the driver's node is draining, and the run ends with it
        return {number for number, member in self.members.items() if everybody or _node_id(member.node) in nodes}

    def _launch(self, numbers: Sequence[int]) -> None:
        if not self._crowd:
            self._launch_together(numbers)
            return
        for number in numbers:
            # Its node is not known yet: threads are sized as if it shared the most crowded initial machine.
            place = assign(self.job, number, local_rank=0, local_world_size=self._crowd, group_rank=0)
            self._serve(number, self._actor(), place)

    def _launch_together(self, numbers: Sequence[int]) -> None:
        import ray

        actors = [self._actor(node) for node in self._nodes(len(numbers))]
        self._actors = dict(zip(numbers, actors, strict=True))
        places = [actor.locate.remote() for actor in actors]
        self._wait(lambda seconds: len(ray.wait(places, num_returns=len(places), timeout=seconds)[0]), len(places))
        found = [self._located(number, place) for number, place in zip(numbers, places, strict=True)]
        machines = list(dict.fromkeys(where["machine"] for where in found))
        order = sorted(range(len(actors)), key=lambda i: (machines.index(found[i]["machine"]), found[i]["gpu"]))
        crowds = [[i for i in order if found[i]["machine"] == machine] for machine in machines]
        self._crowd = max(map(len, crowds))
        for number, i in zip(numbers, order, strict=True):
            machine = machines.index(found[i]["machine"])
            place = assign(
                self.job,
                number,
                local_rank=crowds[machine].index(i),
                local_world_size=len(crowds[machine]),
                group_rank=machine,
                cores=found[i]["cores"],
            )
            self._serve(number, actors[i], place)

    def _nodes(self, size: int) -> list[str]:
        """Return a node for each of `size` actors: as few nodes as possible on which all of them fit together.

        A placement group finds them and is then removed. If the actors stayed in it, Ray would have to find room for
        all places of a lost node together before it could replace any of them.
        """
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        group = placement_group([self._needs()] * size, strategy="PACK")
        try:
            self._wait(lambda seconds: size if group.wait(seconds) else 0, size)
            node_of = placement_group_table(group)["bundles_to_node_id"]
        finally:
            remove_placement_group(group)
        return [node_of[i] for i in range(size)]

    def _needs(self) -> dict[str, float]:
        return {"CPU": 1.0} | ({"GPU": 1.0} if self.job.device == "cuda" else {})

    def _wait(self, ready: Callable[[float], int], size: int) -> None:
        """Poll `ready` (seconds to wait -> how many are ready) until `size` are. A busy machine is slow at this, and
        nodes come and go, so waiting is no error. Raises NoPlaces after the longest of `elastic.wait`, `cluster.wait`
        and _PLACEMENT_SECONDS."""
        wait = max(self.job.config["elastic"]["wait"], self.job.config["cluster"]["wait"], _PLACEMENT_SECONDS)
        deadline = monotonic() + wait
        while (there := ready(min(_TURN_SECONDS, max(0.0, deadline - monotonic())))) < size:
            lack = f"Ray to start {size} times {self._needs()}, {there} of {size} there"
            if monotonic() >= deadline:
                raise NoPlaces(f"waited {wait:.0f} s for {lack}")
            _LOG.info("waiting for %s, up to %.0f s", lack, deadline - monotonic())

    def _located(self, number: int, place: Any) -> dict[str, Any]:
        """Return the answer of `_Actor.locate`. Raises WorkerFailed if the actor died while starting."""
        import ray
        from ray.exceptions import RayError

        try:
            located: dict[str, Any] = ray.get(place)
            return located
        except RayError as error:
            member, name = Member(number, "", 0), f"worker{number}"
            raise WorkerFailed([Failure(member, "died", "start()", _reason(error), name=name)]) from None

    def _actor(self, node: str = "") -> Any:
        """Create an actor on `node`, or wherever Ray finds a place if "" or if the node has none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        gpus = int(self.job.device == "cuda")
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Actor)
        where = NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"
        return actor.options(scheduling_strategy=where).remote()

    def _serve(self, number: int, actor: Any, place: Assignment) -> None:
        self._actors[number] = actor
        self._serving[number] = actor.serve.remote(place, self._board.address, self._board.token(number))

    def _ended(self, number: int, seconds: float) -> str | None:
        import ray
        from ray.exceptions import RayActorError, RayError

        serving = self._serving[number]
        if not ray.wait([serving], timeout=min(seconds, _REASON_SECONDS))[0]:
            return None
        try:
            ray.get(serving)
        except RayActorError as error:
            return _reason(error)
        except RayError as error:
            return str(error)
        return "the actor ended by itself"

    def _kill(self, number: int) -> None:
        import ray

        if not (actor := self._actors.pop(number, None)):
            return  # killed before: its pid may belong to another process by now
        ray.kill(actor, no_restart=True)
        member = self._greeted.get(number)
        if member and _node_id(member.node) == self._here:
            with suppress(ProcessLookupError):  # on the driver's own machine: immediate, which ray.kill is not
                os.kill(member.pid, signal.SIGKILL)

    def _dismiss(self, polite: bool) -> None:
        import ray

        if self._notices:
            self._notices.close()
        if ray.is_initialized():
            for number in list(self._actors):
                self._kill(number)
            ray.shutdown()  # ends an embedded Ray; only disconnects from a cluster
        if self._ray:
            self._ray.close()


class _Actor:
    """Ray actor that runs one member. The driver asks where it runs before it assigns the member a number."""

    def __init__(self) -> None:
        self._name = "worker"

    def __repr__(self) -> str:  # shown in Ray's own messages
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


def _node_id(node: str) -> str:
    """Extract Ray's node id from a member's node, which is HOST/ID."""
    return node.rpartition("/")[2]


def _reason(error: Exception) -> str:
    """Reduce Ray's report of an actor's death to one line, without the identifiers before and the guesses after it."""
    text = " ".join(str(error).split()).partition("Some common causes include")[0]
    text = text[max(0, text.find("The actor is dead because")) :]
    return text.partition(" Worker exit type: SYSTEM_ERROR")[0].strip()  # the rest only repeats that it died
