"""Launcher of Ray actors, one per worker, in an embedded Ray on this machine or in the cluster at RAY_ADDRESS: the part
in the driver, and the host of the actors in the process beside it (`ray_process`).

In a cluster an actor's process is the worker. On this machine it has the worker forked (`forked_workers`), because four
processes that import torch take seconds longer than one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from random import uniform
from time import monotonic, sleep
from typing import Any, NamedTuple

from platform.boundary.terminal import show_phase
from platform.cluster.crew import job as rendezvous
from platform.cluster.crew import ray_session
from platform.cluster.crew.crew import Launcher
from platform.cluster.crew.failures import Failure, Member, NoPlaces, WorkerFailed
from platform.cluster.crew.forked_workers import ForkServer, order_worker
from platform.cluster.crew.job import Assignment, Job, assign_worker, local_tiers, usable_cores
from platform.cluster.crew.ray_process import close_ray_process, share_ray_process
from platform.cluster.crew.ray_session import DrainWatcher, EmbeddedRay, join_cluster, list_free_nodes, matches_labels
from platform.cluster.crew.switchboard import WorkerSwitchboard
from platform.cluster.crew.worker_host import serve_worker
from platform.plan.layout import format_count

# Demand of runs on the autoscaler of their Ray cluster, so that it starts machines for workers before there are any.
#
# Ray keeps one request for the whole cluster, a new one replaces it, and it outlives its driver. So one actor of the
# cluster, the desk, takes the demand of every run, asks for all of it together, and forgets a run that does not renew
# its demand. The desk ends with the last run.

LEASE_SECONDS = 90.0  # after which a demand that is not renewed is dropped
_RENEW_SECONDS = 10.0
HOLD_SECONDS = 120.0  # for which a demand is held up that has fallen: lost workers are hired again within seconds
_NAME, _NAMESPACE = "autoscaler-desk", "elastic-platform"


class Bundle(NamedTuple):
    """Resources that a worker needs together, by Ray's names, and labels that its node must have."""

    needs: dict[str, float]
    labels: dict[str, str]


def worker_bundle(device: str, labels: Mapping[str, str]) -> Bundle:
    """Return the Ray bundle of a worker on a `device`, cpu | cuda: one CPU, for cuda also one GPU, and `labels`."""
    return Bundle({"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {}), dict(labels))


class Hysteresis:
    """Counter that rises immediately and falls only after `seconds` below its value, by readings of one clock."""

    def __init__(self, seconds: float):
        """Start at no wanted workers. `seconds`: time for which a higher number is kept after it has fallen."""
        self._seconds = seconds
        self._last = 0
        self._before: list[tuple[int, float]] = []  # earlier numbers, and until when each was followed

    def follow_demand(self, demand: int, now: float) -> int:
        """Return the workers to ask Ray's autoscaler for: the highest number `demand` in the `seconds` before `now`."""
        earlier = [*self._before, (self._last, now)]
        self._last, self._before = demand, [pair for pair in earlier if pair[1] > now - self._seconds]
        return max(demand, *(number for number, _ in self._before))


class DemandLedger:
    """Demands of all runs: run -> how many of which bundle, and until when."""

    def __init__(self) -> None:
        """Initialise a ledger without any run's demand on the autoscaler."""
        self._of: dict[str, tuple[int, Bundle, float]] = {}

    def record_demand(self, run: str, count: int, bundle: Bundle, now: float) -> None:
        """Record that a run needs `count` Ray bundles, in place of its last demand, for LEASE_SECONDS; 0 ends it."""
        self._of[run] = count, bundle, now + LEASE_SECONDS if count else now

    def total_bundles(self, now: float) -> list[Bundle]:
        """Return the Ray bundles that all runs need together; forget runs whose demand was not renewed by `now`."""
        self._of = {run: demand for run, demand in self._of.items() if demand[2] > now}
        return [bundle for run in sorted(self._of) for count, bundle, _ in [self._of[run]] for _ in range(count)]


class AutoscalerDemands:
    """Actor that passes the demands of all runs of its cluster on to the autoscaler."""

    def __init__(self) -> None:
        """Start the Ray actor that sums all runs' demands on the autoscaler, and a thread that drops expired ones."""
        self._ledger, self._lock, self._asked = DemandLedger(), threading.Lock(), list[Bundle]()
        threading.Thread(target=self._drop_expired_demands, daemon=True).start()

    def book(self, run: str, count: int, bundle: Bundle) -> int:
        """Record a run's demand for `count` workers by `DemandLedger.record_demand`; return all runs' bundles."""
        with self._lock:
            self._ledger.record_demand(run, count, bundle, monotonic())
        return self._request_all_bundles()

    def _request_all_bundles(self) -> int:
        """Ask Ray's autoscaler for the bundles that all runs need now, if these have changed; return their number."""
        with self._lock:
            total = self._ledger.total_bundles(monotonic())
            if total != self._asked:
                request_bundles(total)
                self._asked = total
            return len(total)

    def _drop_expired_demands(self) -> None:
        """Drop the demands of runs that do not renew them; end this Ray actor once no run needs any worker."""
        while True:
            sleep(_RENEW_SECONDS)
            with suppress(Exception):  # Ray does not answer: the next turn tries again
                if not self._request_all_bundles():
                    os._exit(0)


def request_bundles(bundles: list[Bundle]) -> None:
    """Ask the joined Ray cluster's autoscaler to hold room for workers' `bundles`, in place of the last request."""
    from ray.autoscaler.sdk import request_resources

    needs, labels = [bundle.needs for bundle in bundles], [bundle.labels for bundle in bundles]
    request_resources(bundles=needs, bundle_label_selectors=labels if any(labels) else None)


class Demand:
    """Demand of this process's run for workers that each need a `bundle`. `count`: function that returns how many it
    wants now, called again and again by a thread, until `close`."""

    def __init__(self, bundle: Bundle, count: Callable[[], int]):
        """Start the thread that keeps Ray's autoscaler informed of the workers that this run wants, by `count()`."""
        self._bundle, self._count, self._hysteresis = bundle, count, Hysteresis(HOLD_SECONDS)
        self._run = f"{socket.gethostname()}/{os.getpid()}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_demand, name="demand", daemon=True)
        self._thread.start()

    def close(self, *, withdraw: bool = True) -> None:
        """Stop renewing this run's demand on Ray's autoscaler; if `withdraw`, end it now: else it holds until it
        expires, or is taken up by another Demand of this process. Call it before ray.shutdown()."""
        self._closed.set()
        self._thread.join()
        if withdraw:
            with suppress(Exception):
                import ray

                ray.get(self._find_demand_actor().book.remote(self._run, 0, self._bundle), timeout=_RENEW_SECONDS)

    def _renew_demand(self) -> None:
        """Send the Ray actor of all demands the number of workers that this run wants, smoothed by `Hysteresis`, every
        _RENEW_SECONDS until `close`."""
        while True:
            try:
                count = self._hysteresis.follow_demand(self._count(), monotonic())
                self._find_demand_actor().book.remote(self._run, count, self._bundle)
            except Exception as error:  # the cluster's head is restarting, or gone: the crew finds that out by itself
                _LOG.debug("the autoscaler is not asked: %s", error)
            if self._closed.wait(_RENEW_SECONDS):
                return

    @staticmethod
    def _find_demand_actor() -> Any:
        """Return the Ray cluster's `AutoscalerDemands`, which takes all runs' demands, started if there is none."""
        import ray

        options: Mapping[str, Any] = {
            "name": _NAME, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True,
            "num_cpus": 0, "max_restarts": -1,
        }  # fmt: skip
        return ray.remote(AutoscalerDemands).options(**options).remote()


_LOG = logging.getLogger("platform.cluster")
_START_SECONDS = 20.0  # for initial workers to start in the places that Ray has chosen; longer from try to try
_PLACEMENT_SECONDS = 60.0  # at least, for Ray to grant resources that were free a moment ago
_TURN_SECONDS = 10.0  # interval of the messages that say what is being waited for
_REASON_SECONDS = 0.3  # for Ray to report how a process ended; the loss of a node it learns only much later


class _Location(NamedTuple):
    """Location of a worker's actor: its machine's Ray id and CPU cores, and its GPU, in an order by number."""

    machine: str
    gpu: tuple[int, str]
    cores: int


class RayActors(Launcher):
    """Starts one actor per member, on nodes with cluster.labels. The initial members are placed as cluster.placement
    says, and numbered by machine, within a machine by GPU. A hired member starts wherever Ray finds a place, as soon as
    there is one; under placement=strict_pack on the machine of the others. All of Ray is in a process beside this one,
    which only the start waits for."""

    def __init__(self, *, embedded: bool):
        """Initialise a launcher of workers as Ray actors. `embedded`: in a Ray of our own on this machine, else in the
        cluster at RAY_ADDRESS."""
        super().__init__()
        self._embedded = embedded
        self._actors: set[int] = set()  # numbers of the members whose actors are not killed yet
        self._started = False  # the initial members are
        self._ray = share_ray_process(unjoined=embedded)
        self._forks: ForkServer | None = None
        self._path = ""  # where actors order workers of `_forks`

    def prepare_launch(self, job: Job, size: int) -> str:
        """Start or join the crew's Ray cluster; return the address of this machine that its nodes can reach."""
        if self._embedded:
            assignment = assign_worker(job, -1, local_rank=0, local_world_size=job.world_size, group_rank=0)
            self._forks = ForkServer(assignment)
        with show_phase("starting Ray" if self._embedded else "joining Ray"):
            host, self._here, address, self._path = self._ray.ask("prepare", job, size, self._embedded)
        self._ray.watch_cluster(address)
        if self._forks:
            self._forks.listen_for_orders(self._path)
        return str(host)

    @property
    def lost(self) -> str:  # type: ignore[override]
        return self._ray.lost

    def find_leaving_members(self, members: Mapping[int, Member]) -> Set[int]:
        if not (nodes := self._ray.leaving):
            return frozenset()
        everybody = self._here in nodes  # the driver's node is draining, and the run ends with it
        return {number for number, member in members.items() if everybody or _node_id(member.node) in nodes}

    def launch_workers(self, job: Job, numbers: Sequence[int], board: WorkerSwitchboard) -> None:
        """Start Ray actors for the workers `numbers`: the initial ones together, and wait until they run; hired ones
        where Ray has a place, without waiting."""
        tokens = {number: board.member_token(number) for number in numbers}
        required = self._find_required_node(job)
        self._actors.update(numbers)
        if self._started:
            self._ray.order("hire_workers", job, tokens, board.address, required)
            return
        launching = self._ray.order("launch_workers", job, tokens, board.address)
        with show_phase("waiting for Ray's actors"):
            rendezvous.preload_torch()  # while they start
            launching.result()
        self._started = True

    def _find_required_node(self, job: Job) -> str:
        """Return the Ray node where a hired worker must start: the others' under strict_pack, else "" for any."""
        living = [member.node for number, member in self.greeted.items() if number in self._actors]
        return _node_id(living[0]) if living and job.config.cluster.placement == "strict_pack" else ""

    def describe_exit(self, number: int, seconds: float) -> str | None:
        """Return how a worker's Ray actor ended, as Ray says of its `serve` call; None if no end is known in time."""
        return self._ray.await_exit(number, min(seconds, _REASON_SECONDS))

    def kill_worker(self, number: int) -> None:
        """Kill a worker's Ray actor, and its process if that is on this machine, where it takes no time."""
        if number not in self._actors:
            return  # killed before: its pid may belong to another process by now
        self._actors.remove(number)
        self._ray.order("kill_worker", number)
        member = self.greeted.get(number)
        if member and _node_id(member.node) == self._here:
            with suppress(ProcessLookupError):  # on the driver's own machine: immediate, which ray.kill is not
                os.kill(member.pid, signal.SIGKILL)

    def end_workers(self, polite: bool) -> None:
        """Kill all workers' Ray actors, and leave the Ray cluster, or end it if it is this run's own."""
        for number in list(self._actors):
            self.kill_worker(number)
        close_ray_process(polite=polite)
        if self._forks:
            self._forks.close()


class ActorHost:
    """All that a run does with Ray, in the process beside the driver, which orders these calls by name
    (`ray_process`)."""

    def __init__(self, send: Callable[..., None]):
        """Initialise the host of a run's actors; it has joined no Ray yet. `send`: sends news to the driver."""
        self._send = send
        self._actors: dict[int, Any] = {}  # actors not killed yet, by member number
        self._serving: dict[int, Any] = {}  # each actor's running `serve` call
        self._crowd = 0  # most initial members on one machine; 0 before the start
        self._notices: DrainWatcher | None = None
        self._ray: EmbeddedRay | None = None
        self._path = ""
        self._demand: Demand | None = None  # on the autoscaler

    join = staticmethod(join_cluster)
    free_resources = staticmethod(ray_session.free_resources)
    list_accelerators = staticmethod(ray_session.list_accelerators)

    def hold_demand(self, bundle: Bundle, count: int) -> None:
        """Ask the cluster's autoscaler for `count` times a `bundle`, until `drop_demand`."""
        self._demand = Demand(bundle, lambda: count)

    def drop_demand(self, withdraw: bool) -> None:
        """End the demand on the cluster's autoscaler, as `Demand.close` does."""
        if self._demand:
            self._demand.close(withdraw=withdraw)
            self._demand = None

    def prepare(self, job: Job, size: int, embedded: bool) -> tuple[str, str, str, str]:
        """Start or join the crew's Ray; return the address of this machine that its nodes can reach, the id of its
        node, the address of the control store, and the path at which actors order workers, "" for none."""
        if embedded:
            growth = max(0, job.config.elastic.max_workers - job.world_size)
            self._ray = EmbeddedRay(max(size, job.world_size) + growth, gpus=job.device == "cuda")
            self._path = f"{self._ray.directory}/forks"
        else:
            join_cluster(job.config.cluster)
            if job.config.cluster.autoscale:
                self._demand = Demand(_job_bundle(job), lambda: len(self._actors) or size)
        import ray

        self._notices = DrainWatcher(lambda nodes: self._send("leaving", nodes))
        context = ray.get_runtime_context()
        host = "127.0.0.1" if embedded else ray.util.get_node_ip_address()
        return host, context.get_node_id(), context.gcs_address, self._path

    def launch_workers(self, job: Job, tokens: Mapping[int, str], address: tuple[str, int]) -> None:
        """Start the initial members' actors where cluster.placement wants them, wait until all of them run, and number
        them by machine, within a machine by GPU. `tokens`: secrets of the members, by number. Raises NoPlaces as
        `_await_workers`, WorkerFailed as `_resolve_location` does."""
        numbers, size = list(tokens), len(tokens)
        location_refs = self._create_initial_actors(job, numbers)
        refs_by_number = zip(numbers, location_refs, strict=True)
        locations = [_resolve_location(number, location_ref) for number, location_ref in refs_by_number]
        actors = list(self._actors.values())
        machines = list(dict.fromkeys(where.machine for where in locations))
        order = sorted(range(size), key=lambda i: (machines.index(locations[i].machine), locations[i].gpu))
        crowds = [[i for i in order if locations[i].machine == machine] for machine in machines]
        self._crowd = max(map(len, crowds))
        for number, i in zip(numbers, order, strict=True):
            machine = machines.index(locations[i].machine)
            crowd = crowds[machine]
            where = {"local_rank": crowd.index(i), "local_world_size": len(crowd), "group_rank": machine}
            assignment = assign_worker(job, number, **where, cores=locations[i].cores)
            self._start_serving(actors[i], assignment, address, tokens[number])

    def _create_initial_actors(self, job: Job, numbers: Sequence[int]) -> list[Any]:
        """Create the initial members' actors, and return Ray's references to where each runs, once all do. Ray has
        chosen their places by then and does not hold them, so that another run may have been faster: where they do not
        start in time, all are killed and placed anew, and none waits in a place that another run lacks."""
        import ray

        size, deadline = len(numbers), monotonic() + _max_start_seconds(job)
        for attempt in count():
            actors = [_create_actor(job, node) for node in _choose_nodes(job, size)]
            self._actors = dict(zip(numbers, actors, strict=True))
            refs = [actor.locate.remote() for actor in actors]
            patience = min(_START_SECONDS * 2**attempt * uniform(1, 2), deadline - monotonic())
            if len(ray.wait(refs, num_returns=size, timeout=max(0.0, patience))[0]) == size:
                return refs
            for number in numbers:
                self.kill_worker(number)
            if monotonic() >= deadline:
                raise NoPlaces(
                    f"waited {_max_start_seconds(job):.0f} s for Ray to start {format_count(size, 'worker')}"
                )
            _LOG.info("%s did not start in %.0f s: placed anew", format_count(size, "worker"), patience)
        raise AssertionError

    def hire_workers(self, job: Job, tokens: Mapping[int, str], address: tuple[str, int], node: str) -> None:
        """Start actors of more members where Ray finds a place, on `node` if that is not "". `tokens`: secrets of the
        members, by number."""
        for number, token in tokens.items():
            # Its node is not known yet: threads are sized as if it shared the most crowded initial machine.
            assignment = assign_worker(job, number, local_rank=0, local_world_size=self._crowd, group_rank=0)
            try:
                self._start_serving(_create_actor(job, node), assignment, address, token)
            except Exception as error:  # as if it had died
                self._send("ended", number, f"Ray does not start it: {' '.join(str(error).split())}")

    def _start_serving(self, actor: Any, assignment: Assignment, address: tuple[str, int], token: str) -> None:
        """Order a Ray actor to serve the worker of `assignment`, which dials the driver at `address`, and to send news
        of its end."""
        number = assignment.number
        self._actors[number] = actor
        self._serving[number] = serving = actor.serve.remote(assignment, address, token, self._path)
        serving.future().add_done_callback(partial(self._report_actor_end, number))

    def _report_actor_end(self, number: int, ending: Future[str]) -> None:
        """Send news of how a worker's actor ended, as Ray says of its `serve` call, in a thread of Ray's."""
        from ray.exceptions import RayActorError

        error = ending.exception()
        text = _death_reason(error) if isinstance(error, RayActorError) else str(error or ending.result())
        self._serving.pop(number, None)
        self._send("ended", number, text)

    def kill_worker(self, number: int) -> None:
        """Kill a worker's Ray actor."""
        import ray

        if actor := self._actors.pop(number, None):
            ray.kill(actor, no_restart=True)

    def end(self) -> None:
        """Kill all workers' Ray actors, and leave the Ray cluster, or end it if it is this run's own."""
        import ray

        self.drop_demand(withdraw=True)
        if self._notices:
            self._notices.close()
        if ray.is_initialized():
            for number in list(self._actors):
                self.kill_worker(number)
            if not self._ray:
                ray.shutdown()  # only disconnects from a cluster
        if self._ray:
            self._ray.close()


class _Actor:
    """Ray actor that holds the place of one member, and runs its worker. The driver asks where it runs before it
    assigns the member a number."""

    def __init__(self) -> None:
        """Initialise the Ray actor of a worker whose member number is not known yet."""
        self._name = "worker"

    def __repr__(self) -> str:  # shown in Ray's own messages
        """Return the worker's name, which Ray shows in its own messages about this actor."""
        return self._name

    def locate(self) -> _Location:
        """Return where the Ray actor of a worker runs: node, GPU and usable CPU cores."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        first = gpus[0] if gpus else "0"
        return _Location(context.get_node_id(), (len(first), first), usable_cores())

    def serve(self, assignment: Assignment, address: tuple[str, int], token: str, forks: str) -> str:
        """Serve the member of `assignment` until the driver closes its connection, in this process or, if `forks` is
        the address of a fork server, in a process that it forks, which dies with this one. Return how that ended, as a
        phrase for the user."""
        import ray

        self._name = f"worker{assignment.number}"
        context: Any = ray.get_runtime_context()
        tiers = local_tiers(assignment.config.cluster.tiers, context.get_node_labels())
        assignment = replace(assignment, node=f"{socket.gethostname()}/{context.get_node_id()}", tiers=tiers)
        if forks:
            return order_worker(forks, assignment, address, token).describe_exit(None) or ""
        serve_worker(assignment, address, token)
        return "the actor ended by itself"


def _choose_nodes(job: Job, size: int) -> list[str]:
    """Return a Ray node id for each of the `size` workers of `job`, as cluster.placement and cluster.labels choose the
    nodes on which all of them fit together; packed, in the innermost of cluster.tiers that has room for all. Raises
    NoPlaces as `_await_workers` does.

    A placement group finds them and is then removed. If the actors stayed in it, Ray would have to find room for all
    places of a lost node together before it could replace any of them. It has a bundle for each worker: one for each
    node would wait for a whole node where others have room, and Ray places thousands within seconds.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    bundle, strategy = _job_bundle(job), job.config.cluster.placement.upper()
    labels = bundle.labels
    if strategy == "PACK":
        nodes = [node for node in list_free_nodes(bundle.needs) if matches_labels(labels, node[0])]
        labels = find_smallest_tier(job.config.cluster.tiers, nodes, size) | labels
    chosen: dict[str, Any] = {"bundle_label_selector": [labels] * size} if labels else {}
    group = placement_group([bundle.needs] * size, strategy=strategy, **chosen)
    try:
        _await_workers(job, lambda seconds: size if group.wait(seconds) else 0, size)
        node_of = placement_group_table(group)["bundles_to_node_id"]
    finally:
        remove_placement_group(group)
    return [node_of[i] for i in range(size)]


def _job_bundle(job: Job) -> Bundle:
    """Return the Ray resources and node labels that each worker of `job` needs."""
    return worker_bundle(job.device, job.config.cluster.labels)


def find_smallest_tier(tiers: list[str], nodes: Sequence[tuple[Mapping[str, str], int]], size: int) -> dict[str, str]:
    """Return the labels of the smallest part of the cluster with room for `size` workers: an innermost one of `tiers`,
    names of labels from outer to inner; {} for the whole cluster. `nodes`: the labels of each, and how many workers it
    has room for."""
    for depth in range(len(tiers), 0, -1):
        room: Counter[tuple[tuple[str, str], ...]] = Counter()
        for labels, places in nodes:
            room[tuple((name, labels[name]) for name in tiers[:depth] if name in labels)] += places
        fits = [(places, where) for where, places in room.items() if where and places >= size]
        if fits:
            return dict(min(fits)[1])
    return {}


def _max_start_seconds(job: Job) -> float:
    """Return the seconds that a run waits for Ray to start its initial workers."""
    return max(job.config.elastic.wait, job.config.cluster.wait, _PLACEMENT_SECONDS)


def _await_workers(job: Job, ready: Callable[[float], int], size: int) -> None:
    """Wait for Ray to start `size` workers of `job`: poll `ready` (seconds to wait -> how many are ready) until `size`
    are. A busy machine is slow at this, and nodes come and go, so waiting is no error. Raises NoPlaces after the
    longest of `elastic.wait`, `cluster.wait` and _PLACEMENT_SECONDS."""
    wait = _max_start_seconds(job)
    deadline = monotonic() + wait
    while (ready_count := ready(min(_TURN_SECONDS, max(0.0, deadline - monotonic())))) < size:
        bundle, cluster = _job_bundle(job), job.config.cluster
        where = f" on nodes with {bundle.labels}" if bundle.labels else ""
        where += ", all on one node" if cluster.placement == "strict_pack" else ""
        lack = f"Ray to start {format_count(size, 'time')} {bundle.needs}{where}, {ready_count} of {size} there"
        if monotonic() >= deadline:
            raise NoPlaces(f"waited {wait:.0f} s for {lack}")
        _LOG.info("waiting for %s, up to %.0f s", lack, deadline - monotonic())


def _resolve_location(number: int, location: Any) -> _Location:
    """Return where the Ray actor of worker `number` runs, given `location`, Ray's reference to the result of its
    `locate`. Raises WorkerFailed if the actor died while starting."""
    import ray
    from ray.exceptions import RayError

    try:
        located: _Location = ray.get(location)
        return located
    except RayError as error:
        member, name = Member(number, "", 0), f"worker{number}"
        raise WorkerFailed([Failure(member, "died", "start()", _death_reason(error), name=name)]) from None


def _create_actor(job: Job, node: str = "") -> Any:
    """Create the Ray actor of one worker of `job` on the Ray node `node`; wherever Ray finds a place if `node` is "",
    or has no room and cluster.placement does not insist."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    bundle, placement = _job_bundle(job), job.config.cluster.placement
    cpus, gpus = bundle.needs["CPU"], bundle.needs.get("GPU", 0)
    actor: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Actor)
    where = "SPREAD" if placement == "spread" else "DEFAULT"
    strategy = NodeAffinitySchedulingStrategy(node, soft=placement != "strict_pack") if node else where
    chosen = {"label_selector": bundle.labels} if bundle.labels else {}
    return actor.options(scheduling_strategy=strategy, **chosen).remote()


def _node_id(node: str) -> str:
    """Extract Ray's node id from a member's node, HOST/ID, as its actor reports it to the driver."""
    return node.rpartition("/")[2]


def _death_reason(error: Exception) -> str:
    """Reduce Ray's report of a worker actor's death to one line, without identifiers before and guesses after it."""
    text = " ".join(str(error).split()).partition("Some common causes include")[0]
    text = text[max(0, text.find("The actor is dead because")) :]
    return text.partition(" Worker exit type: SYSTEM_ERROR")[0].strip()  # the rest only repeats that it died
