"""Price of a training step: the plan's work and collectives in seconds of a hardware, put together by the schedule.

Single operations come first: a matrix product by its shape, kernels by their bytes, a collective by the tier that its
group spans. `queueing_seconds` is the time by which a step takes longer where messages wait for each other on busy
links between stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from platform.plan.generators import SHIPPED, build_paired_table, generate
from platform.plan.layout import Mesh
from platform.plan.operation_plan import EVER, Collective
from platform.plan.plan import Plan
from platform.plan.plan_summary import BUBBLE, COMPUTING, HOST, OPTIMIZER, STAGE, STREAMING, waiting_part_name
from platform.plan.rule import EXCHANGES
from platform.plan.schedule import Action, Kind, Schedule
from platform.plan.scheme import CONTEXT, REPLICAS
from platform.plan.simulate import Simulation, StageMessages, compute_makespan, makespan_over_links, simulate
from platform.predict.hardware import HOST_REACHED, Hardware
from platform.predict.work import EVEN, Execution, Launches, MatrixProduct, Part, PassWork, StepWork

Number = Any  # a number, or an array of numbers
Flag = Any  # True or False, or an array of them

# Tiles in which libraries compute products, rows by columns in units of the hardware's `tile`, and the share that each
# reaches of the speed of the largest: a smaller one reads more of its operands per product. A product takes the best of
# them, either way around.
TILES = ((1, 1 / 2, 1.0), (1 / 2, 1 / 2, 0.95), (1 / 2, 1 / 4, 0.85), (1 / 4, 1 / 4, 0.7))


def tiling_shares(rows: Number, columns: Number, batch: Number, processors: int, tile: float = Hardware.tile) -> Number:
    """Return the shares of the processors' time that go into elements of the results of many products."""
    # tiles at the edges reach beyond it, fewer tiles than processors leave some idle; a last wave is divided further
    best, elements = 0.0, rows * columns * batch
    for tall, wide, share in TILES:
        for height, width in {(tall * tile, wide * tile), (wide * tile, tall * tile)}:
            tiles = np.ceil(rows / height) * np.ceil(columns / width) * batch
            best = np.maximum(best, share * elements / (np.maximum(tiles, processors) * height * width))
    return best


@lru_cache(maxsize=1 << 16)
def tiling_share(rows: int, columns: int, batch: int, processors: int, tile: float = Hardware.tile) -> float:
    """Return the share of the processors' time that goes into elements of a product's result."""
    return float(tiling_shares(rows, columns, batch, processors, tile))


def products_seconds(p: MatrixProduct, hardware: Hardware, precision: str, itemsize: int, tiled: Number) -> Number:
    """Return the seconds of many matrix products, whose sizes are arrays, or of one: of its tiles, which take the share
    `tiled`, and the depth of its sums, and of its bytes beside them."""
    share = tiled * p.inner / (p.inner + hardware.fill)
    computing = p.flops / (hardware.peak_flops(precision) * hardware.reached.products * share)
    return hidden_or_summed_seconds(computing, bytes_seconds(p.elements * itemsize, hardware), hardware)


def product_seconds(p: MatrixProduct, hardware: Hardware, precision: str, itemsize: int) -> float:
    """Return the seconds of a matrix product."""
    if not p.flops:
        return 0.0
    tiled = tiling_share(p.rows, p.columns, p.batch, hardware.processors, hardware.tile)
    return float(products_seconds(p, hardware, precision, itemsize, tiled))


def cast_seconds(p: MatrixProduct, hardware: Hardware) -> Number:
    """Return the seconds in which the first operand of a product is written in 8 bits too, or twice in 4 for products
    in both passes, by the kernel that makes it. Weights are cast once a step, which is not counted."""
    return bytes_seconds(p.batch * p.rows * p.inner, hardware)


def hidden_or_summed_seconds(computing: Number, other: Number, hardware: Hardware) -> Number:
    """Return the seconds of computing and of something `other`, which is hidden where anything is done beside it."""
    return np.maximum(computing, other) if hardware.ahead else computing + other


def bytes_seconds(count: Number, hardware: Hardware) -> Number:
    """Return the seconds in which kernels read and write so many bytes of memory."""
    return count / (hardware.bandwidth * hardware.reached.memory)


def computing_seconds(
    part: Part, hardware: Hardware, precision: str, itemsize: int, narrow_precision: str = ""
) -> float:
    """Return the seconds for which a part of a pass keeps the device busy, without its collectives. `narrow_precision`:
    the precision of fewer bits in which products of layers' weights are computed, if it is another than the plan's."""
    products = 0.0
    for p in part.products:
        if narrow_precision and p.narrows:
            products += product_seconds(p, hardware, narrow_precision, 1) + cast_seconds(p, hardware)
        else:
            products += product_seconds(p, hardware, precision, itemsize)
    fused = part.fused / (hardware.peak_flops(precision) * hardware.reached.attention)
    return products + fused + bytes_seconds(part.bytes, hardware)


CALL = 1.4e-6  # seconds of the host for a Python call: its cores differ less than what a launch costs them


def host_seconds(kernels: Number, calls: Number, hardware: Hardware) -> Number:
    """Return the seconds in which the host launches kernels by so many Python calls; a CPU's launches have theirs."""
    return kernels * hardware.launch + calls * CALL * hardware.ahead


def count_group_ranks(mesh: Mesh, axes: Sequence[str], ranks: int) -> tuple[int, int]:
    """Return how many ranks of a group along `axes` share its first one's node, of so many `ranks`, and its size."""
    group = mesh.group_of_rank(0, mesh.order_axes(axes))
    return bisect_left(group, ranks), len(group)


def collective_seconds(c: Collective, mesh: Mesh, hardware: Hardware, itemsize: Mapping[str, int]) -> float:
    """Return the seconds of one launch of a collective. Ranks of a node share the links that join it to others, as all
    of its groups along the same axes are under way at once."""
    axes = mesh.order_axes(c.axes)
    if not axes:
        return 0.0
    size = c.elements * {**EVER, **itemsize}[c.dtype]
    if c.op == "send":
        return send_seconds(size, mesh, hardware)
    node_ranks, n = count_group_ranks(mesh, axes, hardware.ranks)
    return float(group_seconds(c.op, size, n, node_ranks, hardware))


def send_seconds(size: float, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds in which a stage sends so many bytes to the next."""
    node_ranks, _ = count_group_ranks(mesh, ("stage",), hardware.ranks)
    return float(message_seconds(size, node_ranks > 1, hardware))


def message_seconds(size: Number, inside: Flag, hardware: Hardware) -> Number:
    """Return the seconds of a message of `size` bytes `inside` a node, or between nodes: of one, or of many."""
    node, network, reached = hardware.node.kind_link("send"), hardware.network.kind_link("send"), hardware.reached
    near = node.latency + size / (node.bandwidth * reached.node)
    return np.where(inside, near, network.latency + size / (network.bandwidth * reached.network))


def group_seconds(
    op: str, size: Number, n: Number, node_ranks: Number, hardware: Hardware, leaves: float = 1.0, lands: float = 1.0
) -> Number:
    """Return the seconds of a collective of n ranks, `node_ranks` of which share a node, on an input of `size` bytes:
    of one group, or of many at once; 0 for groups of one rank. `leaves`: share of an exchange's bytes for other nodes
    that is sent there, each once; `lands`: bytes that ranks of a node send each other by the usual ones."""
    node, network = hardware.node.kind_link(op), hardware.network.kind_link(op)
    inside, outside = node.bandwidth * hardware.reached.node, network.bandwidth * hardware.reached.network
    across, others = node_ranks < n, np.maximum(n - 1, 1)
    # a ring leaves each node once, over the adapters of all of the group's ranks there
    ring = np.where(across, np.minimum(inside, np.minimum(node_ranks, hardware.adapters) * outside), inside)
    nodes, far = np.ceil(n / node_ranks), network.hop / node.hop
    steps = np.where(across, nodes * (node_ranks - 1) + (nodes - 1) * far, n - 1)
    tree = np.log2(node_ranks) + np.where(across, np.log2(nodes) * far, 0.0)

    def ring_seconds(turns: float, moved: Number) -> Number:
        """Return the seconds of `turns` times around the ring with `moved` bytes over each link, or down a tree."""
        by_ring = moved / ring + turns * steps * node.hop
        by_tree = 1.15 * moved / ring * n / others + 2 * turns * tree * node.hop
        return np.minimum(by_ring, by_tree)

    match op:
        case "all_reduce":
            seconds = ring_seconds(2, 2 * (n - 1) / n * size)
        case "all_gather":
            seconds = ring_seconds(1, (n - 1) * size)
        case "reduce_scatter":
            seconds = ring_seconds(1, (n - 1) / n * size)
        case "all_to_all" | "all_to_allv":
            total = size * n / others if op == "all_to_allv" else size
            between = np.where(across, leaves * (n - node_ranks) / n * total / outside, 0.0)
            hops = (node_ranks - 1) * node.hop + (n - node_ranks) * network.hop
            seconds = np.maximum(lands * (node_ranks - 1) / n * total / inside, between) + hops
        case "rotate":
            seconds = size / np.where(across, outside, inside)
        case "scatter" | "gather":
            seconds = (n - 1) * size / ring
        case _:  # broadcast, reduce
            seconds = size / ring + tree * node.hop
    return np.where(n > 1, np.where(across, network.latency, node.latency) + seconds, 0.0)


def update_bytes(itemsize: Mapping[str, int], moments: float) -> float:
    """Return the bytes that an update reads and writes per element, with so many `moments` beside each master."""
    # gradients are read for their norm, then read and cleared; masters and moments read and written; copies written
    wide, narrow = itemsize["master"], itemsize["compute"]
    return wide * (3 + 2 * (1 + moments)) + (narrow if narrow != wide else 0)


def streaming_seconds(streamed: Number, update: Number, hardware: Hardware) -> Number:
    """Return the seconds by which an update of `update` seconds takes longer, as `streamed` bytes come from host memory
    through two buffers, and leave for it at the same time: while one is updated, only the other one moves."""
    link = streamed / (hardware.host * HOST_REACHED)
    return np.maximum(0.0, link - update / 2) * hardware.ahead


CROWDED = 0.05  # of a chunk's passes: a way there and back that takes less waits for no other one
ALTERNATING = ("none", "1f1b", "gpipe")  # schedules that a closed form knows with their messages


def is_crowded(work: StepWork, passes: float, messages: float) -> bool:
    """Return True if `messages` of a chunk and microbatch may queue on links beside other `passes` of its stage."""
    at_once = work.execution.schedule not in ALTERNATING and not work.execution.system.stands_by
    return at_once and messages > CROWDED * passes


def _sends_ahead(work: StepWork) -> bool:
    """Return True if messages between stages go beside their passes, of which an interleaved schedule has enough."""
    return work.execution.schedule == "interleaved" and work.execution.system.sends_ahead


ActionSeconds = Callable[[int, Action], float]  # (stage, action) -> seconds


def queueing_seconds(work: StepWork, hardware: Hardware, seconds: ActionSeconds, message: float) -> float:
    """Return by how much messages, each of `message` seconds alone on its link, make a step longer where they share
    links. Three rounds of all stages are simulated, and more rounds follow from them; if messages go ahead, a step
    waits for one microbatch alone. `seconds`: a function of (stage, action)."""
    if _sends_ahead(work):
        return 2 * (len(work.plan.chunks) - 1) * message
    links = build_stage_links(work.plan.mesh, hardware)
    messages = StageMessages(lambda source, sink: message, links, early=not hardware.ahead)

    def extra_seconds(schedule: Schedule) -> float:
        """Return by how much messages make a schedule's step longer."""
        return makespan_over_links(messages, schedule, seconds) - compute_makespan(schedule, seconds)

    stages, chunks, n = work.plan.num_stages, len(work.plan.chunks) // work.plan.num_stages, work.plan.microbatches
    if (kind := work.execution.schedule) not in SHIPPED:
        assert work.execution.table is not None, "a schedule of the user's comes with its table"
        return extra_seconds(work.execution.table)
    generator = build_paired_table if work.plan.pairs_passes else None
    if n <= 3 * stages:
        return extra_seconds(generate(kind, stages, chunks, n, generator))
    two, three = (extra_seconds(generate(kind, stages, chunks, rounds * stages, generator)) for rounds in (2, 3))
    return three + (three - two) * (n / stages - 3)


def build_stage_links(mesh: Mesh, hardware: Hardware) -> Callable[[int], Hashable]:
    """Return the function that names the link of a stage: its own adapters', or its node's, whose ranks share fewer."""
    ranks = mesh.world_size // mesh.axes["stage"]
    if hardware.adapters >= hardware.ranks or ranks >= hardware.ranks:
        return lambda stage: stage
    return lambda stage: stage * ranks // hardware.ranks


DAY = 86400.0
# Share of its computing by which an interleaved chunk's pass takes longer: stages wait for each other at every
# exchange, of which there are as many times more as a stage has chunks. From two published runs of one model at 280
# microbatches (530B, Narayanan et al. 2021): 163 TFLOP/s with three chunks (table 1), 159 with one (table 2); their
# bubbles and messages alone would make it 168.
LOCKSTEP = 0.03


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: `computing`, waiting for collectives by the names of their axes (`waiting`), and `host`, the
    time by which launching kernels is longer than both. `seconds`: all of it. `hidden`: seconds of collectives beside
    the computing. `launching`: seconds in which the host launches it all; `exchanges`: seconds of tokens on their way
    to experts and back, part of the waiting, by the names of their axes."""

    computing: float = 0.0
    waiting: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0
    hidden: float = 0.0
    launching: float = 0.0
    exchanges: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return the seconds of the pass altogether."""
        return self.computing + sum(self.waiting.values()) + self.host

    def __add__(self, other: PassTime) -> PassTime:
        """Return the span of two passes, one after the other."""
        waiting = Counter(self.waiting)
        waiting.update(other.waiting)
        both = (self.computing + other.computing, waiting, self.host + other.host, self.hidden + other.hidden)
        return PassTime(*both, self.launching + other.launching)

    def scale(self, share: float) -> PassTime:
        """Return the span of a share of a pass, but for what it hides."""
        waiting = {name: share * seconds for name, seconds in self.waiting.items()}
        return PassTime(share * self.computing, waiting, share * self.host, self.hidden, share * self.launching)

    def hide_exchanges(self, other: PassTime, hardware: Hardware) -> PassTime:
        """Return the span of a pass whose exchanges of experts are under way while an `other` pass computes."""
        total = sum(self.exchanges.values())
        hidden = min(total, other.computing)
        hidden_by_axes = {name: seconds * hidden / total for name, seconds in self.exchanges.items() if total}
        waiting = {name: seconds - hidden_by_axes.get(name, 0.0) for name, seconds in self.waiting.items()}
        computing = self.computing + hardware.interference * hidden
        device = computing + sum(waiting.values())
        host = max(self.host, float(hidden_or_summed_seconds(device, self.launching, hardware)) - device)
        return PassTime(computing, waiting, host, self.hidden + hidden, self.launching)


Spans = list[PassTime]  # of the passes of each chunk, or of each stage


@dataclass(frozen=True)
class StepPrice:
    """Predicted seconds of a training step, and of its parts on the stage that paces it: `computing`, `waiting` for
    collectives by the names of their axes, `bubble`, `host`, `optimizer`, and `streaming` of states from and to host
    memory beside it; they add up to `seconds`. `model_flops`:
    FLOPs of the step without recomputation; `tokens`: tokens of the step; `devices`: number of devices; `peak`: FLOP/s
    of one; `hidden`: seconds of collectives beside computing, which are no part of it."""

    seconds: float
    computing: float
    waiting: Mapping[str, float]
    bubble: float
    host: float
    optimizer: float
    model_flops: float
    tokens: int
    devices: int
    peak: float
    hidden: float = 0.0
    streaming: float = 0.0

    @property
    def seconds_by_part(self) -> dict[str, float]:
        """Return the seconds of the parts of a step, by name."""
        longest_first = sorted(self.waiting.items(), key=lambda wait: -wait[1])
        waits = {waiting_part_name(axes): seconds for axes, seconds in longest_first}
        others = {BUBBLE: self.bubble, HOST: self.host, OPTIMIZER: self.optimizer, STREAMING: self.streaming}
        return {COMPUTING: self.computing, **waits, **others}

    @property
    def device_flops(self) -> float:
        """Return the model FLOP/s of one device."""
        return self.model_flops / (self.seconds * self.devices)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation: the share of its peak speed at which a device trains the model."""
        return self.device_flops / self.peak

    def training_days(self, tokens: float) -> float:
        """Return the days of training on so many tokens."""
        return tokens / self.tokens * self.seconds / DAY


def price_work(work: StepWork, hardware: Hardware) -> StepPrice:
    """Predict the seconds of a training step from its `work` on a hardware."""
    plan, clock = work.plan, _PassPricer(work.plan, hardware, work.execution)
    forward, backward, message = _separate_messages(work, *clock.pass_times(work))
    busy = _sum_by_stage(work, forward, backward)
    slowest = max(range(len(busy)), key=lambda stage: busy[stage].seconds)
    action_seconds = _build_action_seconds(forward, backward, hardware)
    passes = _predict_makespan(work, forward, backward, busy, slowest, action_seconds)
    ends = _price_step_ends(work, clock, forward, backward)
    masters = max(once.masters for once in work.once)
    optimizer = clock.update_seconds(masters, work.execution.moments)
    streaming = float(streaming_seconds(masters * work.execution.streamed, optimizer, hardware))
    n, paces = plan.microbatches, busy[slowest]
    if plan.pairs_passes:
        paces = _blend_pairs(work, slowest, paces, _sum_by_stage(work, *_pair_spans(forward, backward, hardware)))
    waits = Counter({name: n * seconds for name, seconds in paces.waiting.items()})
    waits.update(ends.waiting)
    crowd = queueing_seconds(work, hardware, action_seconds, message) if message else 0.0
    if crowd:
        waits[STAGE] += crowd  # type: ignore[assignment]
    return StepPrice(
        seconds=passes + crowd + ends.seconds + optimizer + streaming,
        computing=n * paces.computing + ends.computing,
        waiting=dict(waits),
        bubble=passes - n * paces.seconds,
        host=n * paces.host,
        optimizer=optimizer,
        model_flops=plan.flops_per_token * plan.tokens_per_step,
        tokens=plan.tokens_per_step,
        devices=plan.mesh.world_size,
        peak=hardware.peak_flops(plan.precision),
        hidden=n * paces.hidden + ends.hidden,
        streaming=streaming,
    )


def simulate_schedule(work: StepWork, hardware: Hardware, schedule: Schedule) -> Simulation:
    """Simulate a schedule of the plan's stages with the predicted seconds of its passes on a hardware."""
    clock = _PassPricer(work.plan, hardware, work.execution)
    return simulate(schedule, _build_action_seconds(*clock.pass_times(work), hardware))


def _sum_by_stage(work: StepWork, forward: Spans, backward: Spans) -> Spans:
    """Return by stage the span of the passes of its chunks over one microbatch."""
    busy = [PassTime() for _ in work.once]
    for stage, forward_time, backward_time in zip(work.stages, forward, backward, strict=True):
        busy[stage] += forward_time + backward_time
    return busy


def _pair_spans(forward: Spans, backward: Spans, hardware: Hardware) -> tuple[Spans, Spans]:
    """Return the spans of the chunks' passes in pairs, each of which hides exchanges of the other."""
    both = list(zip(forward, backward, strict=True))
    return [f.hide_exchanges(b, hardware) for f, b in both], [b.hide_exchanges(f, hardware) for f, b in both]


def _blend_pairs(work: StepWork, stage: int, alone: PassTime, in_pairs: Spans) -> PassTime:
    """Return the mean span of a stage's passes over a microbatch, of which some are in pairs, as its row has them."""
    assert work.execution.table is not None, "passes in pairs come with their table"
    row = work.execution.table.rows[stage]
    share = sum(action.paired for action in row) / len(row)
    hidden = alone.hidden + share * (in_pairs[stage].hidden - alone.hidden)
    return replace(alone.scale(1 - share) + in_pairs[stage].scale(share), hidden=hidden)


class _PartSums(NamedTuple):
    """Sums over a pass's parts: seconds of `computing`, and of collectives `under` its products; by the names of axes
    seconds of collectives in its way (`waiting`), exchanges of experts included, of these `exchanges`, and of gathers
    that go `ahead`; numbers of `kernels`, and of counts that its host `reads`."""

    computing: float
    waiting: Counter[str]
    ahead: Counter[str]
    under: float
    kernels: int
    reads: int
    exchanges: Counter[str]


class _PassPricer:
    """Seconds of a plan's passes and collectives on a hardware, each distinct one computed once."""

    def __init__(self, plan: Plan, hardware: Hardware, execution: Execution):
        """Set the clock for a plan, its execution and a hardware."""
        self.plan, self.hardware, self.overlap = plan, hardware, execution.overlap
        self.narrow = execution.narrow if execution.narrow in hardware.peaks else ""
        if plan.quantisation:  # a plan of this project, where other systems' have none
            self.narrow = hardware.choose_narrow(plan.quantisation, plan.precision)
        self.system, self.unsplit = execution.system, {STAGE, *REPLICAS, *CONTEXT}
        waits = len(plan.chunks) > plan.num_stages > 1 and not self.system.sends_ahead
        self.lockstep = 1 + LOCKSTEP if waits else 1.0
        self._launched: dict[Collective, float] = {}
        self._computed: dict[int, float] = {}  # by identity of a part
        self._spans: dict[int, _PartSums] = {}  # by identity of a pass's parts

    def price_collective(self, c: Collective) -> float:
        """Return the seconds of one launch of a collective."""
        if c not in self._launched:
            self._launched[c] = self._rows_seconds(c) if c.op == "all_to_allv" else self._collective_seconds(c)
        return self._launched[c]

    def _collective_seconds(self, c: Collective) -> float:
        """Return the seconds of a collective of the plan."""
        return collective_seconds(c, self.plan.mesh, self.hardware, self.plan.itemsize)

    def _rows_seconds(self, c: Collective) -> float:
        """Return the seconds in which tokens go to their experts, as the system sends them."""
        node_ranks, n = count_group_ranks(self.plan.mesh, c.axes, self.hardware.ranks)
        size = c.elements * self.plan.itemsize[c.dtype]
        if not self.system.rows_by_node:
            return float(group_seconds(c.op, size, n, node_ranks, self.hardware))
        copies, nodes = self.plan.sizes.get("rows", 1), n / node_ranks
        leaves, lands = (places * (1 - (1 - 1 / places) ** copies) / copies for places in (ceil(nodes), n))
        return float(group_seconds(c.op, size, n, node_ranks, self.hardware, leaves, lands * nodes))

    def sum_by_axes(self, launches: Launches, copy: float = 0.0) -> Counter[str]:
        """Return the seconds of collectives by the names of their axes; `copy`: seconds of copying what a rank sent."""
        seconds_by_axes: Counter[str] = Counter()
        for c, n in launches.items():
            name = STAGE if c.op == "send" else "+".join(self.plan.mesh.order_axes(c.axes))
            seconds_by_axes[name] += n * (self.price_collective(c) + copy * self.plan.mesh.count_ranks(c.axes))  # type: ignore[assignment]
        return seconds_by_axes

    def _sum_parts(self, p: PassWork) -> _PartSums:
        """Return the sums over the parts of a pass, added up once."""
        if id(p.parts) not in self._spans:
            waits, ahead = Counter[Collective](), Counter[Collective]()
            computing, kernels, under, exposed = 0.0, 0, 0.0, Counter[str]()
            for part, n in p.parts:
                for c, products, share in part.beside:
                    waited, hidden = self._divide_by_parts(c, products, share)
                    exposed["+".join(self.plan.mesh.order_axes(c.axes))] += n * waited  # type: ignore[assignment]
                    under += n * hidden
                computing += n * self._computing_seconds(part)
                kernels += n * part.kernels
                for c in part.collectives:
                    waits[c] += n
                for c in part.ahead:
                    ahead[c] += n
            reads = sum(n for c, n in waits.items() if c.dtype == "integers")
            exposed.update(self.sum_by_axes(waits))
            exchanges = Counter({c: n for c, n in waits.items() if c.op in EXCHANGES and c.dtype == "compute"})
            of_experts = self.sum_by_axes(Counter({c: n for c, n in exchanges.items() if "expert" in c.axes}))
            sums = computing, exposed, self.sum_by_axes(ahead), under, kernels, reads, of_experts
            self._spans[id(p.parts)] = _PartSums(*sums)
        return self._spans[id(p.parts)]

    def _divide_by_parts(self, c: Collective, products: Sequence[MatrixProduct], share: float) -> tuple[float, float]:
        """Return the seconds of a collective that a rank waits for, and its hidden ones: a `share`, under products."""
        seconds, size = self.price_collective(c), self.plan.itemsize["compute"]
        multiplying = computing_seconds(Part(tuple(products)), self.hardware, self.plan.precision, size, self.narrow)
        hidden = min(seconds, multiplying) * share if self.overlap else 0.0
        return seconds - hidden, hidden

    def _computing_seconds(self, part: Part) -> float:
        """Return the seconds for which a part of a pass keeps the device busy."""
        if id(part) not in self._computed:
            size, precision = self.plan.itemsize["compute"], self.plan.precision
            self._computed[id(part)] = computing_seconds(part, self.hardware, precision, size, self.narrow)
        return self._computed[id(part)]

    def pass_time(self, p: PassWork) -> PassTime:
        """Return the span of a pass. Its computation hides collectives of parameters as far as it can, and is slowed by
        them."""
        computing, waiting, hidden, under, kernels, reads, exchanges = self._sum_parts(p)
        waiting, hidden = Counter(waiting), Counter(hidden)
        if self.system.overlaps_experts:
            hidden.update({name: waiting.pop(name) for name in [*waiting] if "expert" in name.split("+")})
        hidden.update(self.sum_by_axes(p.hides))
        waiting.update(self.sum_by_axes(p.fetches, self.hardware.launch))
        waiting.update(self.sum_by_axes(Counter(p.receives)))
        for name in (name for name in waiting if self.unsplit.isdisjoint(name.split("+"))):
            waiting[name] *= self.system.tensor_exposed  # type: ignore[assignment]
        exposed_waits, slowed = self.exposed_waits_and_slowdown(hidden, computing)
        waiting.update(exposed_waits)
        beside = under + sum(hidden.values()) - sum(exposed_waits.values())
        computing = computing * self.lockstep + slowed + self.hardware.interference * under
        device = computing + sum(waiting.values())
        host = host_seconds(kernels, p.calls, self.hardware)
        behind = float(hidden_or_summed_seconds(device, host, self.hardware)) - device + reads * self.system.read_wait
        return PassTime(computing, waiting, behind, beside, host, {} if self.system.overlaps_experts else exchanges)

    def pass_times(self, work: StepWork) -> tuple[Spans, Spans]:
        """Return the spans of the forward and of the backward passes of a step's chunks."""
        forward, backward = [self.pass_time(p) for p in work.forward], [self.pass_time(p) for p in work.backward]
        return add_message_waits(forward, backward) if work.execution.schedule == "1f1b" else (forward, backward)

    def exposed_waits_and_slowdown(
        self, hidden: Counter[str], available_seconds: float
    ) -> tuple[dict[str, float], float]:
        """Return the waits left by collectives beside `available_seconds` seconds of computation, and by how much they
        slow it."""
        total, available_seconds = sum(hidden.values()), available_seconds if self.overlap else 0.0
        exposed_share = max(0.0, total - available_seconds) / total if total else 0.0
        return {name: exposed_share * s for name, s in hidden.items()}, self.hardware.interference * min(
            total, available_seconds
        )

    def update_seconds(self, masters: int, moments: float) -> float:
        """Return the seconds of an update of so many masters."""
        return bytes_seconds(masters * update_bytes(self.plan.itemsize, moments), self.hardware)


def add_message_waits(forward: Spans, backward: Spans) -> tuple[Spans, Spans]:
    """Return the spans of 1F1B's passes, with what messages between stages cost where microbatches are in flight."""
    # The first of p stages has p microbatches under way, each on p - 1 ways there and back, and so waits for
    # (p - 1) / p of a way there and back per microbatch; all others keep its pace, however many messages they get.
    stages, pair = len(forward), _longest_stage_wait(forward) + _longest_stage_wait(backward)
    wait = pair * (stages - 1) / stages / 2
    return tuple(  # type: ignore[return-value]
        [replace(span, waiting={**span.waiting, STAGE: wait}) for span in spans] for spans in (forward, backward)
    )


def _separate_messages(work: StepWork, forward: Spans, backward: Spans) -> tuple[Spans, Spans, float]:
    """Return the spans of the passes, and the seconds of a message between stages, where links are crowded: the spans
    are then without it. Elsewhere a pass waits for its message, and there is none beside."""
    quiet_forward = [replace(s, waiting={**s.waiting, STAGE: 0.0}) for s in forward]
    quiet_backward = [replace(s, waiting={**s.waiting, STAGE: 0.0}) for s in backward]
    messages = _longest_stage_wait(forward), _longest_stage_wait(backward)
    passes = sum(span.seconds for span in (*quiet_forward, *quiet_backward)) / len(quiet_forward)
    if not (_sends_ahead(work) or is_crowded(work, passes, sum(messages))):
        return forward, backward, 0.0
    return quiet_forward, quiet_backward, max(messages)


def _longest_stage_wait(spans: Sequence[PassTime]) -> float:
    """Return the longest wait for another stage's message in any of the passes."""
    return max(span.waiting.get(STAGE, 0.0) for span in spans)


def _predict_makespan(
    work: StepWork, forward: Spans, backward: Spans, busy: Spans, slowest: int, action_seconds: ActionSeconds
) -> float:
    """Return the seconds from the first forward to the last backward pass. Under a schedule among EVEN the `slowest`
    stage computes all microbatches without a pause, and waits for one microbatch on its way through a chunk of each
    other stage and back; other schedules, and passes in pairs, are simulated."""
    n, share = work.plan.microbatches, len(busy) / len(forward)
    if work.execution.schedule == "gpipe":  # all forward passes come first
        ways = [span.seconds for span in forward], [span.seconds for span in backward]
        return sum((n - 1) * max(way) + sum(way) for way in ways)
    if work.execution.schedule in EVEN and not work.plan.pairs_passes:
        others = sum(span.seconds for stage, span in enumerate(busy) if stage != slowest)
        return n * busy[slowest].seconds + others * share
    assert work.execution.table is not None, "a schedule that is not even comes with its table"
    return compute_makespan(work.execution.table, action_seconds)


def _build_action_seconds(forward: Spans, backward: Spans, hardware: Hardware) -> ActionSeconds:
    """Return the function that gives the seconds of an action, from the spans of each chunk's passes."""

    def seconds_by_kind(forward: Spans, backward: Spans) -> dict[Kind, list[float]]:
        """Return the seconds of each chunk's passes by their kind."""
        both = tuple([span.seconds for span in spans] for spans in (forward, backward))
        halves = [seconds / 2 for seconds in both[1]]
        return {Kind.FORWARD: both[0], Kind.BACKWARD: both[1], Kind.INPUT: halves, Kind.WEIGHT: halves}

    # by whether they run in pairs
    by_kind = seconds_by_kind(forward, backward), seconds_by_kind(*_pair_spans(forward, backward, hardware))

    def action_seconds(stage: int, action: Action) -> float:
        """Return the seconds of an action; a backward pass is halved where it is split."""
        return by_kind[action.paired][action.kind][action.chunk]

    return action_seconds


def beside_passes_seconds(total: Number, buckets: Number, chunks: Number, stages: Number, each: Number) -> Number:
    """Return for how many of the `total` seconds passes of `each` seconds hide sums of a stage's gradients."""
    # Nothing hides the last bucket; a chunk's last pass hides sums of that chunk, and as many passes of each later
    # chunk as there are stages hide sums of all chunks before. Gathers of updated parameters, before a step, are alike.
    beside_others = np.minimum(total * (1 - 1 / chunks) + each, ((chunks - 1) * stages + 1) * each)
    return np.minimum(total * (1 - 1 / np.maximum(1, buckets)), beside_others)


def _price_step_ends(work: StepWork, clock: _PassPricer, forward: Spans, backward: Spans) -> PassTime:
    """Return the time by which collectives before and after all passes make a step longer: gathers of updated
    parameters and sums of gradients, as far as passes do not hide them, and the slow-down of passes that do. A stage
    begins later than stages before it, and ends earlier; the slowest one counts."""
    stages, altogether = work.plan.num_stages, PassTime()
    for passes, is_end in ((forward, False), (backward, True)):
        spans, early = list[PassTime](), 0.0
        for stage, once in enumerate(work.once):
            first = passes[work.stages.index(stage)]
            moved = clock.sum_by_axes(once.reduces if is_end else once.updated)
            each, total = first.computing if clock.overlap else 0.0, sum(moved.values())
            beside = float(beside_passes_seconds(total, once.buckets, work.stages.count(stage), stages, each))
            waiting = Counter({name: seconds * (1 - beside / total) for name, seconds in moved.items() if total})
            if is_end:
                waiting.update(clock.sum_by_axes(once.matrices))
                if once.tied:
                    waiting[STAGE] += send_seconds(once.tied, work.plan.mesh, clock.hardware)  # type: ignore[assignment]
            span = PassTime(clock.hardware.interference * beside, waiting, hidden=beside)
            spans.append(span.scale(max(0.0, 1 - early / span.seconds) if span.seconds else 0.0))
            early += first.seconds
        altogether += max(spans, key=lambda span: span.seconds)
    return altogether
