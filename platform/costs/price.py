"""Price of a training step: the plan's work and collectives in seconds of a hardware, put together by the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from platform.costs.crowded import is_crowded, waited
from platform.costs.machine import Hardware
from platform.costs.parts import BUBBLE, COMPUTING, HOST, OPTIMIZER, STAGE, waiting_for
from platform.costs.seconds import (
    bytes_seconds,
    collective_seconds,
    computing_seconds,
    sent_seconds,
    update_bytes,
    with_hidden,
)
from platform.costs.step_work import EVEN, Execution, Launches, PassWork, StepWork, step_work
from platform.costs.work import Part
from platform.plan.communication.planned import Collective
from platform.plan.core.chunks import RecordableModel
from platform.plan.core.plan import Plan
from platform.plan.schedule.simulate import Simulation, makespan, simulate
from platform.plan.schedule.table import Action, Kind, Schedule

DAY = 86400.0
# Share of its computing by which an interleaved chunk's pass takes longer: stages wait for each other at every
# exchange, of which there are as many times more as a stage has chunks. From two published runs of one model at 280
# microbatches (530B, Narayanan et al. 2021): 163 TFLOP/s with three chunks (table 1), 159 with one (table 2); their
# bubbles and messages alone would make it 168.
LOCKSTEP = 0.03


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: `computing`, waiting for collectives by the names of their axes (`waiting`), and `host`, the
    time by which launching kernels is longer than both. `seconds`: all of it."""

    computing: float = 0.0
    waiting: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of the pass altogether."""
        return self.computing + sum(self.waiting.values()) + self.host

    def __add__(self, other: PassTime) -> PassTime:
        """Return the span of two passes, one after the other."""
        waiting = Counter(self.waiting)
        waiting.update(other.waiting)
        return PassTime(self.computing + other.computing, waiting, self.host + other.host)


@dataclass(frozen=True)
class StepPrice:
    """Predicted seconds of a training step, and of its parts on the stage that paces it: `computing`, `waiting` for
    collectives by the names of their axes, `bubble`, `host` and `optimizer`; they add up to `seconds`. `model_flops`:
    FLOPs of the step without recomputation; `tokens`: tokens of the step; `devices`: number of devices; `peak`: FLOP/s
    of one."""

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

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of the parts of a step, by name."""
        waits = {waiting_for(axes): seconds for axes, seconds in sorted(self.waiting.items(), key=lambda w: -w[1])}
        rest = {BUBBLE: self.bubble, HOST: self.host, OPTIMIZER: self.optimizer}
        return {COMPUTING: self.computing, **waits, **rest}

    @property
    def speed(self) -> float:
        """Return the model FLOP/s of one device."""
        return self.model_flops / (self.seconds * self.devices)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation: the share of its peak speed at which a device trains the model."""
        return self.speed / self.peak

    def days(self, tokens: float) -> float:
        """Return the days of training on so many tokens."""
        return tokens / self.tokens * self.seconds / DAY


def price(plan: Plan, model: RecordableModel, hardware: Hardware, execution: Execution) -> StepPrice:
    """Predict the seconds of a training step of a plan on a hardware. `model`: the plan's."""
    return price_of(step_work(plan, model, execution), hardware)


def price_of(work: StepWork, hardware: Hardware) -> StepPrice:
    """Predict the seconds of a training step from its `work` on a hardware."""
    plan, clock = work.plan, _Clock(work.plan, hardware, work.execution)
    forward, backward, message = _without_messages(work, *clock.spans(work))
    busy = [PassTime() for _ in work.once]
    for stage, there, back in zip(work.stages, forward, backward, strict=True):
        busy[stage] += there + back
    slowest = max(range(len(busy)), key=lambda stage: busy[stage].seconds)
    passes = _makespan(work, forward, backward, busy, slowest)
    after, exposed = _after(work, clock, backward)
    optimizer = max(clock.update(once.masters, work.execution.moments) for once in work.once)
    n, paces = plan.microbatches, busy[slowest]
    waits = Counter({name: n * seconds for name, seconds in paces.waiting.items()})
    waits.update(after)
    crowd = waited(work, hardware, _by_action(forward, backward), message) if message else 0.0
    if crowd:
        waits[STAGE] += crowd  # type: ignore[assignment]
    return StepPrice(
        seconds=passes + crowd + exposed + optimizer,
        computing=n * paces.computing,
        waiting=dict(waits),
        bubble=passes - n * paces.seconds,
        host=n * paces.host,
        optimizer=optimizer,
        model_flops=plan.flops_per_token * plan.tokens_per_step,
        tokens=plan.tokens_per_step,
        devices=plan.mesh.size,
        peak=hardware.peak(plan.precision),
    )


def simulated(work: StepWork, hardware: Hardware, schedule: Schedule) -> Simulation:
    """Simulate a schedule of the plan's stages with the predicted seconds of its passes on a hardware."""
    clock = _Clock(work.plan, hardware, work.execution)
    return simulate(schedule, _by_action(*clock.spans(work)))


class _Clock:
    """Seconds of a plan's passes and collectives on a hardware, each distinct one computed once."""

    def __init__(self, plan: Plan, hardware: Hardware, execution: Execution):
        """Set the clock for a plan, its execution and a hardware."""
        self.plan, self.hardware, self.overlap, self.narrow = plan, hardware, execution.overlap, execution.narrow
        self.lockstep = 1 + LOCKSTEP if len(plan.chunks) > plan.stages > 1 else 1.0
        self._launched: dict[Collective, float] = {}
        self._computed: dict[int, float] = {}  # by identity of a part
        self._spans: dict[int, tuple[float, Counter[str], Counter[str], int]] = {}  # by identity of a pass's parts

    def launched(self, c: Collective) -> float:
        """Return the seconds of one launch of a collective."""
        if c not in self._launched:
            self._launched[c] = collective_seconds(c, self.plan.mesh, self.hardware, self.plan.itemsize)
        return self._launched[c]

    def by_axes(self, launches: Launches, copy: float = 0.0) -> Counter[str]:
        """Return the seconds of collectives by the names of their axes; `copy`: seconds of copying what a rank sent."""
        out: Counter[str] = Counter()
        for c, n in launches.items():
            name = STAGE if c.op == "send" else "+".join(self.plan.mesh.ordered(c.axes))
            out[name] += n * (self.launched(c) + copy * self.plan.mesh.extent(c.axes))  # type: ignore[assignment]
        return out

    def _parts(self, p: PassWork) -> tuple[float, Counter[str], Counter[str], int]:
        """Return the seconds of computing of a pass's parts; by axes the seconds of collectives in its way, and of
        collectives that go ahead; and the number of its kernels."""
        if id(p.parts) not in self._spans:
            waits, ahead = Counter[Collective](), Counter[Collective]()
            computing, kernels = 0.0, 0
            for part, n in p.parts:
                computing += n * self._computing(part)
                kernels += n * part.kernels
                for c in part.collectives:
                    waits[c] += n
                for c in part.ahead:
                    ahead[c] += n
            self._spans[id(p.parts)] = computing, self.by_axes(waits), self.by_axes(ahead), kernels
        return self._spans[id(p.parts)]

    def _computing(self, part: Part) -> float:
        """Return the seconds for which a part of a pass keeps the device busy."""
        if id(part) not in self._computed:
            size, precision = self.plan.itemsize["compute"], self.plan.precision
            self._computed[id(part)] = computing_seconds(part, self.hardware, precision, size, self.narrow)
        return self._computed[id(part)]

    def span(self, p: PassWork) -> PassTime:
        """Return the span of a pass. Its computation hides collectives of parameters as far as it can, and is slowed by
        them."""
        computing, waiting, hidden, kernels = self._parts(p)
        waiting, hidden = Counter(waiting), Counter(hidden)
        hidden.update(self.by_axes(p.hides))
        waiting.update(self.by_axes(p.fetches, self.hardware.launch))
        waiting.update(self.by_axes(Counter(p.receives)))
        left, slowed = self.hide(hidden, computing)
        waiting.update(left)
        computing = computing * self.lockstep + slowed
        device = computing + sum(waiting.values())
        host = kernels * self.hardware.launch
        return PassTime(computing, waiting, float(with_hidden(device, host, self.hardware)) - device)

    def spans(self, work: StepWork) -> tuple[list[PassTime], list[PassTime]]:
        """Return the spans of the forward and of the backward passes of a step's chunks."""
        forward, backward = [self.span(p) for p in work.forward], [self.span(p) for p in work.backward]
        return in_flight(forward, backward) if work.execution.schedule == "1f1b" else (forward, backward)

    def hide(self, hidden: Counter[str], room: float) -> tuple[dict[str, float], float]:
        """Return the waits left by collectives beside `room` seconds of computation, and by how much they slow it."""
        total, room = sum(hidden.values()), room if self.overlap else 0.0
        left = max(0.0, total - room) / total if total else 0.0
        return {name: left * s for name, s in hidden.items()}, self.hardware.interference * min(total, room)

    def update(self, masters: int, moments: int) -> float:
        """Return the seconds of an update of so many masters."""
        return bytes_seconds(masters * update_bytes(self.plan.itemsize, moments), self.hardware)


def in_flight(forward: list[PassTime], backward: list[PassTime]) -> tuple[list[PassTime], list[PassTime]]:
    """Return the spans of 1F1B's passes, with what messages between stages cost where microbatches are in flight."""
    # The first of p stages has p microbatches under way, each on p - 1 ways there and back, and so waits for
    # (p - 1) / p of a way there and back per microbatch; all others keep its pace, however many messages they get.
    stages, pair = len(forward), _stage_wait(forward) + _stage_wait(backward)
    wait = pair * (stages - 1) / stages / 2
    return tuple(  # type: ignore[return-value]
        [replace(span, waiting={**span.waiting, STAGE: wait}) for span in spans] for spans in (forward, backward)
    )


def _without_messages(
    work: StepWork, forward: list[PassTime], backward: list[PassTime]
) -> tuple[list[PassTime], list[PassTime], float]:
    """Return the spans of the passes, and the seconds of a message between stages, where links are crowded: the spans
    are then without it. Elsewhere a pass waits for its message, and there is none beside."""
    there, back = ([replace(s, waiting={**s.waiting, STAGE: 0.0}) for s in spans] for spans in (forward, backward))
    messages = _stage_wait(forward), _stage_wait(backward)
    passes = sum(span.seconds for span in (*there, *back)) / len(there)
    if not is_crowded(work, passes, sum(messages)):
        return forward, backward, 0.0
    return there, back, max(messages)


def _stage_wait(spans: Sequence[PassTime]) -> float:
    """Return the longest wait for another stage's message in any of the passes."""
    return max(span.waiting.get(STAGE, 0.0) for span in spans)


def _makespan(
    work: StepWork, forward: list[PassTime], backward: list[PassTime], busy: list[PassTime], slowest: int
) -> float:
    """Return the seconds from the first forward to the last backward pass. Under a schedule among EVEN the `slowest`
    stage computes all microbatches without a pause, and waits for one microbatch on its way through a chunk of each
    other stage and back; other schedules are simulated."""
    n, share = work.plan.microbatches, len(busy) / len(forward)
    if work.execution.schedule == "gpipe":  # all forward passes come first
        ways = [span.seconds for span in forward], [span.seconds for span in backward]
        return sum((n - 1) * max(way) + sum(way) for way in ways)
    if work.execution.schedule in EVEN:
        others = sum(span.seconds for stage, span in enumerate(busy) if stage != slowest)
        return n * busy[slowest].seconds + others * share
    assert work.execution.table is not None, "a schedule that is not even comes with its table"
    return makespan(work.execution.table, _by_action(forward, backward))


def _by_action(forward: Sequence[PassTime], backward: Sequence[PassTime]) -> Callable[[int, Action], float]:
    """Return the function that gives the seconds of an action, from the spans of each chunk's passes."""

    there, back = ([span.seconds for span in spans] for spans in (forward, backward))

    def seconds(stage: int, action: Action) -> float:
        """Return the seconds of an action; a backward pass is halved where it is split."""
        if action.kind is Kind.FORWARD:
            return there[action.chunk]
        return back[action.chunk] / (1 if action.kind is Kind.BACKWARD else 2)

    return seconds


def _after(work: StepWork, clock: _Clock, backward: list[PassTime]) -> tuple[dict[str, float], float]:
    """Return the waits by axes after the passes of a step, on the stage that ends last, and by how much they make the
    step longer: for the sums of gradients, as far as the last backward pass does not hide them, and for the gathers of
    updated parameters. A stage ends its passes earlier than the first one by the last backward passes of all stages
    before it."""
    found: list[tuple[dict[str, float], float]] = []
    early = 0.0
    for stage, once in enumerate(work.once):
        first = backward[work.stages.index(stage)]
        reduces = clock.by_axes(once.reduces)
        last = sum(reduces.values()) / max(1, once.buckets)  # of the last bucket, whose gradients come last
        left, _ = clock.hide(reduces, min(first.computing, sum(reduces.values()) - last))
        waiting = Counter(left)
        waiting.update(clock.by_axes(once.updated))
        if once.tied:
            waiting[STAGE] += sent_seconds(once.tied, work.plan.mesh, clock.hardware)  # type: ignore[assignment]
        total = sum(waiting.values())
        scale = max(0.0, total - early) / total if total else 0.0
        found.append(({name: scale * s for name, s in waiting.items()}, scale * total))
        early += first.seconds
    return max(found, key=lambda pair: pair[1])
