"""Prices of a run's safety, from the time between failures; all of it is pure.

A snapshot and a checkpoint: what they send, for how long they hold up a run, and how often either should be made. A
failure (`failure_price`): the seconds in which a mesh forms, in which a run goes on after a failure, and the steps that
it does again.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, inf, sqrt
from pathlib import Path
from statistics import median
from typing import NamedTuple

from platform.boundary.schema import Malformed
from platform.checkpoint.blocks import list_held_states, list_held_tensors
from platform.config.fields import Config
from platform.config.groups import AUTO
from platform.config.key import format_duration
from platform.optimizer.optimizers import count_offloaded_numbers, count_states_per_element, count_stored_numbers
from platform.plan.accelerators import dense_bf16_peak
from platform.plan.plan import Plan
from platform.plan.plan_summary import format_seconds
from platform.plan.step_collectives import count_communicators, matrix_sides
from platform.predict.footprint import checkpoint_bytes
from platform.predict.hardware import HOST_REACHED, Hardware, StorageRates
from platform.predict.memory_budget import device_kind
from platform.predict.price import bytes_seconds
from platform.predict.step_price import step_price

NODE = 8  # workers of a node, as long as nobody says otherwise
USED = 0.5  # of a GPU's peak speed, at most: no step is estimated too long
HOUR = 3600.0
WORKER_HOURS = 50_000.0  # between failures of one worker: 419 in 54 days of 16,384 GPUs (Llama 3, 2024, table 5)


class SnapshotPrice(NamedTuple):
    """Price of one snapshot in memory: `bytes` that leave the node which sends most, the `seconds` that takes at
    cluster.network, and seconds of the training `step` beside it, at least, None where the GPU's speed is not known;
    `copy`: seconds in which a GPU's state reaches host memory beside a step; `cost`: seconds by which it makes a step
    longer; `usual`: seconds of a step, 0 where unknown; `mean`: seconds between failures, 0 where unknown."""

    bytes: int
    seconds: float
    step: float | None
    copy: float = 0.0
    cost: float = 0.0
    usual: float = 0.0
    mean: float = 0.0

    @property
    def interval_steps(self) -> int:
        """Return the steps between snapshots: as few as transfers have time for, or as failures make best."""
        fewest = ceil(max(self.seconds, self.copy) / self.step) if self.step else 1
        return max(1, fewest, int(best_interval(self.cost, self.mean) / self.usual) if self.usual else 1)


class CheckpointPrice(NamedTuple):
    """Price of one checkpoint: its `bytes`, and the bytes of its `largest` file, one of each worker; seconds for
    which the run stands (`stall`), until it is on storage (`saving`), and to read it (`reading`), 0 where unknown;
    `mean`: seconds between failures."""

    bytes: int
    largest: int
    stall: float
    saving: float
    reading: float
    mean: float

    @property
    def interval_seconds(self) -> float:
        """Return the seconds to plan between checkpoints: the best, and no fewer than one takes to be written."""
        return max(1.0, self.saving, best_interval(self.stall, self.mean))


class MeasuredCosts(NamedTuple):
    """Costs in seconds that a run has measured on so many workers, 0 where it has not: of a `step`; of a `snapshot`, by
    which it makes a step longer; of a checkpoint, for which the run stands (`stall`), and until it is written
    (`saving`)."""

    step: float = 0.0
    snapshot: float = 0.0
    stall: float = 0.0
    saving: float = 0.0


def read_measured_costs(run_dir: Path, workers: int) -> MeasuredCosts:
    """Return the costs that the run in a directory measured in its last steps on so many workers; without a readable
    journal or metrics, none."""
    from platform.monitor import events, json_records  # planning a run without one has no time to import these
    from platform.monitor.json_records import JOURNAL, METRICS
    from platform.monitor.metrics import validate_row

    try:
        rows = json_records.read_last_lines(run_dir / METRICS, validate_row)
        journal = json_records.read_last_lines(run_dir / JOURNAL, events.parse_event)
        rows = [row for row in rows if row.get("world_size") == workers]
        saves = [event for event in journal if isinstance(event, events.Checkpoint)]
    except (OSError, Malformed):
        return MeasuredCosts()
    measured = {row["step"]: row for row in rows if isinstance(row.get("parts"), dict)}
    after = [measured[save.step + 1] for save in saves if save.step + 1 in measured]
    snapshots = [row["parts"].get("snapshot", 0.0) for row in measured.values()]
    stalls = [max(0.0, row["seconds"]["checkpoint"] - row["parts"].get("snapshot", 0.0)) for row in after]
    return MeasuredCosts(
        step=_median_seconds([row["step_seconds"] for row in measured.values()]),
        snapshot=_median_seconds([seconds for seconds in snapshots if seconds > 0]),
        stall=_median_seconds(stalls),
        saving=_median_seconds([save.seconds for save in saves]),
    )


def _median_seconds(seconds: list[float]) -> float:
    """Return the median of a cost's measured seconds, by which a run's safety is priced; 0 without any."""
    return median(seconds) if seconds else 0.0


class Known(NamedTuple):
    """Facts that are known of a run's costs before it starts: its kind of `device` (cpu | cuda), its `hardware`, if a
    file describes it, and its `own` costs, if it has measured any."""

    device: str
    hardware: Hardware | None
    own: MeasuredCosts = MeasuredCosts()


def best_interval(cost: float, seconds_between_failures: float) -> float:
    """Return the seconds between snapshots that cost so many each at which least time is lost, where failures, each
    losing half of an interval, are `seconds_between_failures` seconds apart (Young 1974, Daly 2006)."""
    return sqrt(2 * cost * seconds_between_failures)


def snapshot_price(config: Config, plan: Plan, per_node: int, known: Known | None = None) -> SnapshotPrice:
    """Predict what a snapshot costs a run under `plan`, of whose consecutive ranks `per_node` are on a node; its cost
    and the best interval too where enough is `known`."""
    count = count_bytes_leaving_node(config, plan, per_node)
    peak = dense_bf16_peak(config.cluster.gpu) if device_kind(config) == "cuda" else None
    least = peak and plan.flops_per_token * plan.tokens_per_step / (plan.mesh.world_size * peak * USED)
    sent, mean = count * 8 / (config.cluster.network * 1e9), config.elastic.mean_hours_between_failures * HOUR
    if not known:
        return SnapshotPrice(count, sent, least)
    places = ({**plan.mesh.rank_coordinates(0), "stage": stage} for stage in range(plan.num_stages))
    masters = max(plan.stage_part(at["stage"]).count_masters_of_rank(at) for at in places)
    numbers = 1 + count_stored_numbers(config) - (count_offloaded_numbers(config) if known.device != "cpu" else 0)
    copied = _copy_seconds(masters * numbers * plan.itemsize["master"], known)  # what is not in host memory anyway
    beside = 0.0 if known.device == "cpu" else copied  # a GPU goes on beside it
    if not (known.hardware and mean):
        return SnapshotPrice(count, sent, least, beside)
    usual = known.own.step or step_price(config, plan, known.hardware).seconds
    longer = copied + sent if known.device == "cpu" else known.hardware.interference * copied
    return SnapshotPrice(count, sent, least, beside, known.own.snapshot or longer, usual, mean)


def checkpoint_price(config: Config, plan: Plan, known: Known) -> CheckpointPrice:
    """Predict what a checkpoint costs a run under `plan`, from the facts that are `known`."""
    mean = config.elastic.mean_hours_between_failures or WORKER_HOURS / plan.mesh.world_size
    moments = count_states_per_element(config)
    state = checkpoint_bytes(plan, moments)
    share = state / plan.mesh.world_size
    parts = (plan.stage_part(stage) for stage in range(plan.num_stages))
    largest = max(checkpoint_bytes(part, moments) for part in parts) * plan.num_stages / plan.mesh.world_size
    storage = known.hardware.storage if known.hardware else StorageRates(inf, inf)
    return CheckpointPrice(
        bytes=state,
        largest=ceil(largest),
        stall=known.own.stall or _copy_seconds(share, known),
        saving=known.own.saving or state / storage.write,
        reading=state / storage.read,
        mean=mean * HOUR,
    )


def _copy_seconds(count: float, known: Known) -> float:
    """Return the seconds in which a worker copies so many bytes of its state to host memory."""
    if known.hardware and known.device == "cpu":
        return bytes_seconds(2 * count, known.hardware)
    return count / ((known.hardware.host if known.hardware else Hardware.host) * HOST_REACHED)


def count_bytes_leaving_node(config: Config, plan: Plan, per_node: int) -> int:
    """Predict, from a plan, the most bytes of a snapshot that leave a node of `per_node` consecutive ranks: the masters
    and moments that no rank of another node holds, once each. They are 0 where there is one node."""
    last_replica = {**plan.mesh.rank_coordinates(0), "data": plan.mesh.axes["data"] - 1}
    if plan.mesh.world_size <= per_node or (not plan.zero and plan.mesh.find_rank(last_replica) >= per_node):
        return 0  # one node, or whole replicas on several
    state_numbers, lonely = count_stored_numbers(config), Counter[int]()
    trained = {p.name for p in plan.parameters if p.name not in plan.frozen}
    rows = {p.name: sum(matrix_sides(plan, p)) for p in plan.parameters if p.name in plan.factored}
    for held in (*list_held_tensors(plan, "model", "float32"), *list_held_states(plan, "float32")):
        name = held.name.removeprefix("model.")
        less = name in plan.matrices or name in plan.factored
        numbers = 1 + state_numbers - less if name in trained else int(not plan.adapters)
        nodes_by_box = {box: {rank // per_node for rank in ranks} for box, ranks in held.holders.items()}
        parts = [(box.num_elements * numbers, nodes) for box, nodes in nodes_by_box.items()]
        parts += [(rows[name], set().union(*(nodes for _, nodes in parts)))] if name in rows else []
        for elements, nodes in parts:
            if len(nodes) == 1:
                lonely[nodes.pop()] += int(elements * plan.itemsize["master"])
    return max(lonely.values(), default=0)


def settle_intervals(config: Config, plan: Plan, per_node: int, known: Known) -> list[str]:
    """Settle elastic.snapshot_every=auto and checkpoint.every=auto of a configuration, in place, so that all workers do
    alike; return a line for each, with the reason."""
    lines = []
    if config.elastic.snapshot_every == AUTO:
        price = snapshot_price(config, plan, per_node, known)
        config.elastic.snapshot_every = price.interval_steps
        lines.append(f"elastic.snapshot_every={price.interval_steps}: {_reason_of_snapshots(price, known.own)}")
    if config.checkpoint.every == AUTO:
        saved = checkpoint_price(config, plan, known)
        config.checkpoint.every = format_duration(saved.interval_seconds)
        lines.append(f"checkpoint.every={config.checkpoint.every}: {_reason_of_checkpoints(config, saved, known.own)}")
    return lines


def _reason_of_checkpoints(config: Config, price: CheckpointPrice, costs: MeasuredCosts) -> str:
    """Return why checkpoints are made as often as their predicted price says, for the user."""
    reason = f"one holds up the run for {_format_interval(price.stall, price.mean, bool(costs.stall))}"
    if price.interval_seconds == price.saving:
        reason += f"; but one takes {format_seconds(price.saving)} to write"
    if not config.elastic.mean_hours_between_failures:
        reason += f" (elastic.mean_hours_between_failures=0: {WORKER_HOURS:,.0f} for each worker)"
    return reason


def _format_interval(cost: float, mean: float, measured: bool) -> str:
    """Return a cost, the time between failures and the best interval that follows, for the user."""
    how, best, hours = "measured" if measured else "predicted", format_duration(best_interval(cost, mean)), mean / HOUR
    often = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
    return f"{format_seconds(cost)}, as {how}, and workers fail every {often} h: least is lost by one every {best}"


def _reason_of_snapshots(price: SnapshotPrice, costs: MeasuredCosts) -> str:
    """Return why snapshots are made as often as their predicted price says, for the user."""
    if price.usual and price.interval_steps == int(best_interval(price.cost, price.mean) / price.usual):
        steps = f", steps of {format_seconds(price.usual)}"
        return f"one makes its step longer by {_format_interval(price.cost, price.mean, bool(costs.snapshot))}{steps}"
    if price.interval_steps > 1:
        seconds, where = max((price.seconds, "other nodes"), (price.copy, "host memory"))
        return f"one takes {format_seconds(seconds)} to reach {where}, a step at least {price.step:.3g} s"
    return "there is time for one in every step"


# Seconds of the driver and its workers beside NCCL, for a mesh and for each worker of it: from a failure to the next
# step, 0.5 s of 8 workers and 4.5 s of 1,024, measured on one machine (benchmarks/RESULTS.md).
MESH, WORKER = 0.5, 0.004
JOINING = 0.5  # seconds in which NCCL connects the ranks of one communicator: an estimate, until it is measured


class FailurePrice(NamedTuple):
    """Price of a failure: seconds of the `formation` of a mesh whose workers are each in so many `communicators`, and
    of the `recovery`, from a failure known to the next step; `steps` that are done again, on average, None where
    nothing is in memory and the run goes on from its last checkpoint."""

    formation: float
    communicators: int
    recovery: float
    steps: float | None


def failure_price(config: Config, plan: Plan, snapshot: SnapshotPrice, every: int) -> FailurePrice:
    """Predict what a lost worker costs a run under `plan`, with a `snapshot` after `every` steps; without any if 0."""
    cuda, most = device_kind(config) == "cuda", max(sum(pair) for pair in count_communicators(plan))
    formation = MESH + WORKER * plan.mesh.world_size + (JOINING * most if cuda else 0.0)
    steps = every / 2 + (1.0 if cuda else 0.0) if every else None  # on a GPU the copy goes on beside the next step
    # a peer sends what the lost node alone had back as fast as it came
    return FailurePrice(formation, most, formation + (snapshot.seconds if every else 0.0), steps)
