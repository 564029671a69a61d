"""The events of `journal.jsonl`: one class per kind, and their conversion to and from the journal's lines. A field that
is None by default is left out where it is None. One that a later version adds needs a default, as older journals lack
it; unknown kinds and fields are passed over.

`JournalEvent` enters each kind of event in one table by its word. Words are data that older journals hold: another name
of a class changes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, dataclass_transform

from platform.boundary import schema
from platform.boundary.schema import OpenMap, Span, Text
from platform.monitor import json_records
from platform.monitor.json_records import Number, Seconds, Steps

EVENTS: dict[str, type[JournalEvent]] = {}  # word in the journal -> class


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Registered:
    """Base that makes its subclasses frozen dataclasses, and enters them in EVENTS by their word; a group has none."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    word: ClassVar[str]

    def __init_subclass__(cls, word: str = "") -> None:
        """Make a kind of journal event a frozen dataclass, and enter it in EVENTS by its `word`; groups have none."""
        dataclass(frozen=True, kw_only=True)(cls)
        if word:
            cls.word = word
            EVENTS[word] = cls  # type: ignore[assignment]


class JournalEvent(_Registered):
    """Event of a run, a line of its journal; a line of a kind that this version does not know becomes one without
    further fields. The journal sets `time`, seconds since the epoch, and `generation`, formations of the mesh so
    far."""

    word: ClassVar[str] = "journal_event"  # of a line of an unknown kind
    time: Seconds = 0.0
    generation: Annotated[int, Span(0, 10**9)] = 0

    def own_fields(self) -> dict[str, Any]:
        """Return the fields of a journal's event as plain data, without `time` and `generation`: the fields of its own
        class, then of its groups (Committed, End)."""
        values = json_records.plain_fields(self)
        groups = type(self).__mro__[: -len(JournalEvent.__mro__)]
        return {name: values[name] for group in groups for name in group.__annotations__ if name in values}


class Committed(JournalEvent):
    """Event that also reports committed work: `useful_seconds` of the steps committed since the previous event that
    did."""

    useful_seconds: Seconds | None = None


class End(Committed):
    """Last event of a driver but for its account (Goodput). `step`: the step that its workers have reached; `saved`:
    the step of the newest checkpoint. The steps in between are lost with the workers' memory."""

    step: Steps = 0
    saved: Steps | None = None
    steps_lost: Steps | None = None
    lost_seconds: Seconds | None = None


_WORD = Annotated[str, Text(r"\w{1,40}", "a word")]
_HEAD = Annotated[dict[str, Any], OpenMap((("event", _WORD),), ("time", "generation", "event"))]


class Starting(JournalEvent, word="starting"):
    """A driver has checked all that it can check alone, and starts its workers; `code`: hashes and versions by name;
    `command`: the command line that starts the run; `git`: the commit of its working directory, or None."""

    world_size: int
    cluster: str
    device: str
    code: dict[str, str] | None = None
    command: str | None = None
    git: str | None = None


class TookOver(JournalEvent, word="took_over"):
    """The driver before died without an end after `step`. `steps_lost`: its steps that no checkpoint has."""

    step: Steps
    steps_lost: Steps


class Refused(JournalEvent, word="refused"):
    """The configuration was refused after the journal had been opened; `reasons`: a line per violation."""

    reasons: list[str]


class Changed(JournalEvent, word="changed"):
    """The run goes on under another configuration. `keys`: key that changed -> its value before, and now."""

    keys: dict[str, Any]


class CheckpointRefused(JournalEvent, word="checkpoint_refused"):
    """A checkpoint was passed over: it is corrupt, or of a newer format."""

    directory: str
    reason: str


class Waiting(JournalEvent, word="waiting"):
    """The next generation waits for more members than the ones alive; `reason`: its shortage, in words."""

    alive: int
    reason: str


class Hiring(JournalEvent, word="hiring"):
    """New workers were requested from the cluster; `count` of them."""

    count: int


class NotStarted(JournalEvent, word="not_started"):
    """A requested worker did not start; `number`: the number that it would have had as a member."""

    number: int
    cause: str


class Forming(JournalEvent, word="forming"):
    """A generation begins to form. `plan`: digest of its plan; `reason`: its difference from the configured plan;
    `alive`: members, of which `world_size` get a seat."""

    world_size: int
    mesh: dict[str, int]
    plan: str | None = None
    reason: str
    alive: int


class NotWhole(JournalEvent, word="not_whole"):
    """The snapshots in the memory of surviving workers do not give the whole training state of some step."""

    reason: str


class NotProven(JournalEvent, word="not_proven"):
    """New members (`numbers`) could not be compared with the driver, which could not write probes (`reasons`)."""

    numbers: list[int]
    reasons: list[str]


class Barred(JournalEvent, word="barred"):
    """New members (`numbers`) see other files or run other code than the driver, and get no seat in the mesh."""

    numbers: list[int]
    reasons: list[str]


class Examined(JournalEvent, word="examined"):
    """The doctor has examined members that are new (`numbers`). `unsound`: members that get no seat, for `reasons`, a
    line each; `shared`: findings on most of them, and so held against none."""

    numbers: list[int]
    unsound: list[int]
    reasons: list[str]
    shared: list[str]
    seconds: Seconds


class Formed(JournalEvent, word="formed"):
    """Every rank of the new generation has a member. `workers`: rank, coordinates, process, node and number of each."""

    workers: list[dict[str, Any]]


class Restored(JournalEvent, word="restored"):
    """The training state was recovered: from memory (`source`) or from a checkpoint (`directory`); `step`: the state's
    step."""

    step: Steps
    directory: str | None = None
    source: str | None = None
    seconds: Seconds


class Initialised(JournalEvent, word="initialised"):
    """The run starts from the weights at `weights` (train.init); `differences`: differences of its model from the one
    that they come from, a line each."""

    weights: str
    differences: list[str]
    seconds: Seconds


class RolledBack(JournalEvent, word="rolled_back"):
    """The training state that was recovered is older than the last step done: the steps after it are done again."""

    step: Steps
    steps_lost: Steps
    lost_seconds: Seconds


class Sampled(JournalEvent, word="sampled"):
    """Text that the model makes of one of eval.prompts after a step: a continuation of it, or an answer."""

    step: Steps
    prompt: str
    text: str


class NotScored(JournalEvent, word="not_scored"):
    """The evaluation after a step gives no scores of eval.tasks, for this reason."""

    step: Steps
    reason: str


class LearnedOut(JournalEvent, word="learned_out"):
    """Evaluations say that the run learns no more (eval.patience), and it ends; `best_...`: of the lowest loss."""

    step: Steps
    best_step: Steps
    best_loss: float


class Running(JournalEvent, word="running"):
    """A generation is built and has its state, and begins with `step`. `uncompiled`: reason not to compile, where
    train.compile would have; `blocks`: lines that say which blocks are compiled whole, and why others are not."""

    step: Steps
    parameters_per_worker: int
    uncompiled: str | None = None
    blocks: list[str] | None = None


class FirstStep(JournalEvent, word="first_step"):
    """A generation has committed its first step, with which a recovery is over."""

    step: Steps


class Traffic(JournalEvent, word="traffic"):
    """A step sends so much inside a node and between nodes and larger parts. `rows`: rows of `tier_traffic`."""

    rows: list[dict[str, Any]]


class Injected(JournalEvent, word="injected"):
    """Faults of the configuration key elastic.faults are about to strike in a step, to test recovery."""

    step: Steps
    faults: list[str]


class Undecided(JournalEvent, word="undecided"):
    """Replicas differ before a step, and no majority decides which is right. `tensors`: (ranks that hold it, name)."""

    step: Steps
    tensors: list[Any]


class Damaged(JournalEvent, word="damaged"):
    """Ranks hold damaged values, from which their replicas differ. `ranks`: (rank, names of its tensors) of each."""

    step: Steps
    ranks: list[Any]


class Checkpoint(Committed, word="checkpoint"):
    """A checkpoint is complete on storage. `directory`: its name there; `seconds`: taken by the save."""

    step: Steps
    directory: str
    bytes: int
    seconds: Seconds


class CheckpointFailed(Committed, word="checkpoint_failed"):
    """An attempt at a checkpoint failed; `again`: another attempt follows."""

    step: Steps
    directory: str
    attempt: int
    reason: str
    again: bool


class CheckpointPruneFailed(Committed, word="checkpoint_prune_failed"):
    """Older checkpoints could not be deleted after a new one was saved."""

    step: Steps
    reason: str


class Superseded(Committed, word="superseded"):
    """Another driver has taken over the run's checkpoints, so that this one stops."""

    step: Steps
    reason: str


class Slow(JournalEvent, word="slow"):
    """A worker has been slow for some steps. `ratio`: its own work over its stage's median, mostly in `section`."""

    number: int
    rank: int
    node: str
    ratio: float
    section: str | None = None


class Notice(JournalEvent, word="notice"):
    """The cluster has announced that it will take members (`numbers`) away."""

    numbers: list[int]


class Failure(Committed, word="failure"):
    """A call of a method failed on a member, which ends the generation. `kind`: class of the failure; `step`: not done;
    `seen`: other ranks' waits; `stack`: the member's frames; `dump`: the folder of all ranks' stands."""

    number: int
    rank: int | None
    coordinates: dict[str, int]
    node: str
    method: str
    kind: str
    cause: str
    log: str | None
    step: Steps
    seen: list[str] | None = None
    stack: list[str] | None = None
    dump: str | None = None


class Reforming(Committed, word="reforming"):
    """A generation ends without a failure, so that another mesh can form; `reason`: its purpose."""

    reason: str
    step: Steps


class Released(JournalEvent, word="released"):
    """The workers have left their generation: `lost` died, `alive` can join the next. Without fields: at the end."""

    lost: list[int] | None = None
    alive: int | None = None
    seconds: Seconds | None = None


class Done(End, word="done"):
    """The run has done its last step, and saved it where it was to be saved."""


class Unsaved(End, word="unsaved"):
    """The last step is done and could not be saved."""


class Drained(End, word="drained"):
    """A stop was requested (`signal`: its cause), and the run can be resumed: it was saved, or no step was done."""

    signal: str


class Stopped(End, word="stopped"):
    """A stop was requested (`signal`: its cause), and steps were done of which none is saved."""

    signal: str


class NoPlaces(End, word="no_places"):
    """The cluster had too few places for the workers of the run."""

    cause: str


class ClusterLost(End, word="cluster_lost"):
    """The cluster was of no use to the run any more; `cause`: the sign of that."""

    cause: str


class GaveUp(End, word="gave_up"):
    """An error ended the run; `cause`: its message."""

    cause: str


class Goodput(JournalEvent, word="goodput"):
    """Cost of failures of one driver, or of several in a row that drove the same run; see `monitor.goodput`.

    `failures`: number of worker failures; `transitions`: generations formed without a failure; `steps_lost`: committed,
    but redone or given up; `recoveries`: seconds from the detection of a failure to the end of the first new step, of
    each failure that a step followed; `seconds`: time of the drivers, without the time between them; `goodput`: the
    useful share of these; `restarts`: drivers that died without an end and have a successor; `restart_seconds`: total
    time from the start of such successors to their first new step.
    """

    failures: int
    transitions: int
    steps_lost: Steps
    recoveries: list[float]
    seconds: Seconds
    useful_seconds: Seconds
    goodput: float
    restarts: int = 0
    restart_seconds: Seconds = 0.0


class Timing(JournalEvent, word="timing"):
    """Seconds from the start of a driver's command to each phase of its start and end, as `monitor.timing` asks;
    `platform.cluster.shown_commands.PHASES` describes each. Phases that it has not reached, or that another command
    reached for it, are left out."""

    composed: Seconds | None = None
    planned: Seconds | None = None
    starting: Seconds | None = None
    first_process: Seconds | None = None
    ready: Seconds | None = None
    formed: Seconds | None = None
    running: Seconds | None = None
    first_step: Seconds | None = None
    last_step: Seconds | None = None
    ended: Seconds | None = None


def event_to_plain(event: JournalEvent) -> dict[str, Any]:
    """Return an event of a run as the plain data of its line in journal.jsonl."""
    return {"time": event.time, "generation": event.generation, "event": event.word} | event.own_fields()


def build_event(event: str, **fields: Any) -> JournalEvent:
    """Build an event from the word that names its kind in journal.jsonl, such as "checkpoint", and its fields."""
    return EVENTS[event](**fields)


def parse_event(line: dict[str, Any]) -> JournalEvent:
    """Build an event from its line in journal.jsonl. Raises Malformed if a field is missing or of a wrong type."""
    head = schema.parse_value(_HEAD, line)
    kind = EVENTS.get(head["event"], JournalEvent)
    return schema.parse_value(kind, {name: line[name] for name in kind.__dataclass_fields__ if name in line})


def read_events(path: Path | str) -> Iterator[JournalEvent]:
    """Yield the events in a run's journal.jsonl, which may be in use. Raises Malformed, naming the line; OSError."""
    return json_records.read_lines(path, parse_event)


def last_driver_events(journal: Sequence[JournalEvent]) -> Sequence[JournalEvent]:
    """Return the events of the last driver in a run's journal, all events if no start is recorded."""
    return journal[max((i for i, event in enumerate(journal) if isinstance(event, Starting)), default=0) :]


def last_error_line(error: str) -> str:
    """Return the last line, which names it, of the error in a journal's event of a failure."""
    return error.strip().rpartition("\n")[2].strip()


class PredictedStep(JournalEvent, word="predicted_step"):
    """Seconds that a full step of this generation should take on a `hardware`, and its `parts` as clocks show them."""

    hardware: str
    seconds: Seconds
    parts: dict[str, Seconds]


class Replanning(JournalEvent, word="replanning"):
    """Steps left their prediction (elastic.replan): a typical one of `measured` seconds is `times` as long as described
    by device, node and network. By that, steps take `now` seconds, and under the plan `chosen` `then`; `gain`: seconds
    of all steps left; `cost`: seconds of re-forming; `reforms`: True if it pays."""

    step: Steps
    predicted: Seconds
    measured: Seconds
    times: dict[str, float]
    chosen: str
    now: Seconds
    then: Seconds
    gain: Seconds
    cost: Seconds
    reforms: bool


class MeasuredStep(JournalEvent, word="measured_step"):
    """Parts of a typical step of the last generation, in seconds, from so many `steps`."""

    steps: Steps
    seconds: Seconds
    parts: dict[str, Seconds]


class Profiled(JournalEvent, word="profiled"):
    """The trace of profiled steps is written: its file and bytes, the steps in it, and the number of ranks."""

    file: str
    steps: list[int]
    ranks: int
    bytes: int


class Spike(JournalEvent, word="spike"):
    """A step's loss or gradient norm is not finite or above `limit`; `policy`: the value of train.on_spike that is
    followed; `attempt`: number of this try of the step, from 1."""

    step: Steps
    loss: Number
    grad_norm: Number
    limit: Number
    policy: str
    attempt: int

    @property
    def number_text(self) -> str:
        """Return which number this event of the journal calls a spike, and its value: "a loss of nan"."""
        of_loss = not isfinite(self.loss) or isfinite(self.grad_norm)
        return f"a loss of {self.loss:g}" if of_loss else f"a gradient norm of {self.grad_norm:g}"
