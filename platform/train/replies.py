"""Replies of workers to the driver's calls, one dataclass each, which the worker returns and the driver reads; and the
files that workers write for the driver.

- Texts: `AskedTexts` are continued (`Written`) or scored (`Scored`).
- Dump of a crew whose call does not go on: a `Stand` of each worker, and a table of all (`write_dump_summary`).
- Part of a run's profile: written by `write_part`, read by `open_part`.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from platform.boundary import documents, schema
from platform.boundary.documents import open_regular_file
from platform.boundary.local_files import replace_file, replace_text
from platform.boundary.redaction import redact_secrets
from platform.boundary.schema import Count, EntryBounds, Malformed, OneOf, Real, Span
from platform.checkpoint.manifest import FileReport
from platform.monitor.verdict.evidence import wait_text
from platform.runtime.progress import Wait


@dataclass(frozen=True)
class AskedTexts:
    """Texts as token ids: each one's ids in the decoder and, if there is an encoder, its `sources`. `numbers`: indices
    of the texts among all that are asked for; draws depend on them."""

    ids: list[list[Count]]
    sources: list[list[Count]] = field(default_factory=list)
    numbers: list[Count] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """Rule by which tokens are chosen: the likeliest if `temperature` is 0, else one drawn from softmax(logits /
    temperature), restricted to the `top_k` likeliest (0: all) and of these to the fewest that have `top_p` of the
    probability together (Holtzman et al. 2020). `seed`: seed of the draws; `vocab`: ids are below it. `beams`: texts
    that a beam search keeps, 1: none; it finds the one of the largest log-probability / length^`length_penalty`."""

    vocab: Count
    temperature: Real = 0.0
    top_k: Count = 0
    top_p: Real = 1.0
    seed: Count = 0
    beams: Count = 1
    length_penalty: Real = 1.0


@dataclass(frozen=True)
class Written:
    """Continuation of a text: its ids, without the one that ended it, and whether one did. `log_probability`:
    log-probability of the whole, in nats, where a search has found it."""

    ids: list[Count]
    ended: bool
    log_probability: Real | None = None


@dataclass(frozen=True)
class Scored:
    """Log-probability of the end of a text, given its beginning, in nats, and whether each of its tokens is the
    likeliest there."""

    log_probability: Real
    greedy: bool


@dataclass(frozen=True)
class Proof:
    """Environment of a worker or of the driver, equal in all processes of a sound run except for `node`, the host's
    name.

    sees      run.dir, checkpoint.url (if the run saves) and checkpoint.resume (if it names a checkpoint) -> hash of the
              file read there, or why it cannot be read
    code      `platform` and the user's modules -> hash of their source files
    versions  Python, CUDA and libraries -> version
    lacks     train.compile (if it is on) and train.attention_kernel (if it names one) -> what keeps a worker from doing
              as they say, in a line
    """

    node: str
    sees: dict[str, str]
    code: dict[str, str]
    versions: dict[str, str]
    lacks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """Findings of the doctor on a worker. `readings`: check -> measurement; `errors`: check -> why there is none;
    `facts`: name -> text, equal on all workers of a sound cluster."""

    readings: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


class Timing(NamedTuple):
    """Time that a worker has measured: what (`kind`) of which `sizes`, see `platform.train.calibration_rates`."""

    kind: str
    sizes: list[float]
    seconds: float


@dataclass(frozen=True)
class Rates:
    """Measurements of a worker for a description of the hardware: its `device`, that one's `memory` in bytes (0 on a
    CPU) and number of `processors`, and `timings`."""

    device: str
    memory: float
    processors: Count
    timings: list[Timing]


@dataclass(frozen=True)
class Joined:
    """Place of a worker in the generation that it has joined: rank, mesh coordinates (axis -> index), and the
    process."""

    rank: Count
    coordinates: dict[str, Count]
    pid: Count
    node: str


@dataclass(frozen=True)
class Built:
    """Size of the model built on a worker, in parameters, and its device: the name, and `memory` in bytes, None on CPU,
    where workers share the host's. `moments`: the names of the optimizer's. `uncompiled`: what kept the crew from
    compiling, in a line, where train.compile=auto would have; "" otherwise. `shared`: the ranks of each node share the
    memory of their snapshots, the same on all."""

    parameters: Count
    device: str
    memory: Count | None
    moments: list[str]
    uncompiled: str = ""
    shared: bool = False


class SectionSpan(NamedTuple):
    """Span of time that a rank spent in a clock section or a span of the model in a training step, from `start` to
    `end`: seconds since the step's barrier."""

    section: str
    start: float
    end: float


class CollectiveSpan(NamedTuple):
    """Collective of a training step on one rank: what it is called, its operation and axes (joined by "+"), the bytes
    that its group moves, and its `start`, when the rank began to wait for it (`wanted`), and its `end`: seconds since
    the step's barrier."""

    name: str
    op: str
    axes: str
    bytes: Count
    start: float
    wanted: float
    end: float


@dataclass(frozen=True)
class RankTimeline:
    """Record of a rank's training step, empty unless monitor.timeline is set: the sections of its clock, ordered by
    end; the spans of the model that it computed, where weights are gathered span by span (ZeRO-3); its collectives, in
    order of launch."""

    sections: list[SectionSpan] = field(default_factory=list)
    spans: list[SectionSpan] = field(default_factory=list)
    collectives: list[CollectiveSpan] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return True if a worker's reply has a timeline of its step, with records: all lie in clock sections."""
        return bool(self.sections)


class SlowRank(NamedTuple):
    """Rank whose own work in a training step takes `ratio` times the median of its pipeline stage, mostly more of it in
    the section `section`."""

    rank: Count
    ratio: float
    section: str = ""


# Of a worker: processors that its process keeps busy, and the share of time in which its GPU is at work; bytes that are
# resident, and in use on its GPU; watts; degrees Celsius; the share of time in which its main thread could run and had
# no processor, and the threads that compute in it. `platform.train.gauges` reads them.
GAUGES = ("cpu", "gpu", "memory", "device_memory", "power", "temperature", "delayed", "threads")


class RankRange(NamedTuple):
    """Range of a number over the ranks of a step: the least, the median and the most, and the ranks that have the
    least and the most."""

    least: Real
    median: Real
    most: Real
    least_rank: Count
    most_rank: Count


class Damage(NamedTuple):
    """Tensor (KIND.PARAMETER) of a rank that is not what its replicas hold, and so was corrupted in memory."""

    rank: Count
    tensor: str


class Dispute(NamedTuple):
    """Tensor (KIND.PARAMETER) that replicas, at these ranks, hold differently, when it is unknown which of them are
    right."""

    ranks: list[Count]
    tensor: str


@dataclass(frozen=True)
class Differences:
    """Outcome of a comparison of replicas' weights and optimizer state before an update; false if all agree."""

    damaged: list[Damage] = field(default_factory=list)
    undecided: list[Dispute] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return True if replicas of weights or optimizer state differ on any ranks."""
        return bool(self.damaged or self.undecided)


@dataclass(frozen=True)
class Taken:
    """Acknowledgement of a training step by a rank other than 0; the report of rank 0 covers all ranks."""

    step: Count
    timeline: RankTimeline = field(default_factory=RankTimeline)


@dataclass
class StepReport:
    """Report of a training step: a rank's own, or the report of all ranks that `platform.train.step_report`
    combines on rank 0.

    If `skipped`, nothing was updated: the loss or the gradient norm is not finite, the loss is too high, or replicas
    differ. `overflowed`: True if the loss scale was too large, and has fallen. `seconds`: seconds by clock section;
    `waits`: a rank's own of waiting for collectives, by their axes; `parts`: combined, of the parts of the step
    (`platform.plan.plan_summary`) on the stage that computes longest; `comm_bytes`: bytes by collective.
    `layer_gradients`, `layer_activations`: sizes by layer, where monitor.layers asks for them: a rank's own sums of
    squares; combined, the norm of the gradient, and the root mean square of the layer's output.
    `routed`: tokens that chose each expert, in all layers, and then tokens that each took; [] without experts.
    `losses_ahead`: means by depth of multi-token prediction. `gauges`: a rank's own, by GAUGES; `workers`: combined,
    the ranges of gauges and of bandwidths by tier, "bandwidth/TIER".
    """

    step: Count
    loss: Real
    grad_norm: Real
    lr: Real
    skipped: bool
    tokens: Count  # of the run so far
    samples: tuple[Count, Count]  # the first of this step, and the first of the next one
    step_seconds: float
    seconds: dict[str, float]
    comm_bytes: dict[str, Count]
    peak_memory_bytes: Count
    world_size: Annotated[int, Span(1, 1 << 53)]
    slow: list[SlowRank]
    overflowed: bool = False
    loss_scale: Real | None = None  # of this step; None unless it computed in fp16
    differences: Differences = field(default_factory=Differences)
    timeline: RankTimeline = field(default_factory=RankTimeline)
    layer_gradients: dict[str, Real] = field(default_factory=dict)
    layer_activations: dict[str, Real] = field(default_factory=dict)
    routed: list[Count] = field(default_factory=list)
    losses_ahead: list[Real] = field(default_factory=list)
    waits: dict[str, Real] = field(default_factory=dict)
    parts: dict[str, Real] = field(default_factory=dict)
    gauges: dict[str, Real] = field(default_factory=dict)
    workers: dict[str, RankRange] = field(default_factory=dict)
    held: Count | None = None  # the newest step whose state all ranks hold in memory; None if there is none


@dataclass(frozen=True)
class Copied:
    """Answer of a rank that has copied its share of the training state to host memory, ready to be written. `tensors`:
    name -> global shape, on rank 0 alone; `values`: all that is no tensor, from `RankTrainingState.read_values`."""

    tensors: dict[str, list[Count]]
    values: dict[str, Any]


@dataclass(frozen=True)
class PartWritten:
    """Part of a run's profile that a rank has written: its number of `events`, how many were `cut`, and its bytes; or
    `why` there is none."""

    events: Count
    cut: Count
    bytes: Count
    why: str = ""


@dataclass(frozen=True)
class Unwritten:
    """Reason why the checkpoint storage did not take a rank's share of a checkpoint, which is no failure of the
    worker."""

    error: str


@dataclass(frozen=True)
class Unrestored:
    """Reason why a checkpoint was not restored. `fault`: its data is corrupt, this run refused it, or the storage
    failed."""

    fault: Annotated[str, OneOf(("corrupt", "refused", "failed"), "fault")]
    reason: str


# Calls of the driver: method of `platform.train.worker.Worker` -> its word on the wire and in journals, and its reply
_CALLS: dict[str, tuple[str, Any]] = {
    "prove_environment": ("prove", Proof),
    "read_clock": ("read_clock", float),
    "examine_device": ("examine", Findings),
    "examine_connection": ("examine_connection", Findings),
    "measure_kernels": ("measure_kernels", Rates),
    "measure_collectives": ("measure_collectives", Rates),
    "join_mesh": ("form", Joined),
    "build_trainer": ("build", Built),
    "exchange_snapshots": ("gather", Any),
    "recover_state": ("recover", Any),
    "restore_checkpoint": ("restore", Unrestored | None),
    "load_initial_weights": ("begin", Unrestored | None),
    "rehearse_steps": ("rehearse", str),
    "step": ("step", Taken),
    "lead": ("lead", Any),
    "follow": ("follow", Any),
    "let_go": ("let_go", Any),
    "confirm_idle": ("rest", Any),
    "take_snapshot": ("hold", Any),
    "copy_state": ("snapshot", Copied),
    "write_checkpoint": ("write", Any),
    "await_checkpoint": ("written", FileReport | Unwritten | None),
    "take_references": ("take_references", Any),
    "rank_classes": ("rank_classes", str),
    "open_teacher": ("open_teacher", Any),
    "evaluate_splits": ("evaluate", dict[str, Real]),
    "measure_loss": ("measure_pairs", dict[str, dict[str, Real]]),
    "begin_profile": ("begin_profile", str),
    "end_profile": ("end_profile", PartWritten | None),
    "continue_texts": ("continue_texts", list[Written]),
    "score_texts": ("score_texts", list[Scored]),
    "leave": ("leave", Any),
    "close": ("close", Any),
}
WORDS = {method: word for method, (word, _) in _CALLS.items()}
METHODS = {word: method for method, word in WORDS.items()}


def read_reply(word: str, rank: int, value: object) -> Any:
    """Read a worker's reply to the driver's call by that word, from `rank`, as its declared type. Raises Malformed."""
    kind = _CALLS[METHODS[word]][1] if word in METHODS else Any
    return schema.parse_value(StepReport if word == "step" and rank == 0 else kind, value)


DUMP = "dump"  # folder in a run directory
KEPT = 10  # dumps of a run, the newest
SUMMARY = "summary.txt"


@dataclass(frozen=True)
class Stand:
    """Stand of a worker at `time`, in seconds since the epoch. `sections`: the clock sections that it is in, the
    innermost last; for `seconds` it has been there, `waiting` for other ranks or not; `wait`: the collective or message
    that it waits for; `launched`: collectives and messages so far, by their axes or peer; `records`: backends of which
    torch has records of collectives."""

    time: float
    rank: Count
    number: Count
    generation: Count
    node: str
    pid: Count
    call: str
    sections: Annotated[list[str], EntryBounds(0, 64)]
    waiting: bool
    seconds: float
    wait: Wait | None = None
    launched: dict[str, Count] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)


def dump_file_path(folder: Path, rank: int) -> Path:
    """Return the path of a worker's file in the folder of a dump, with its rank's stand."""
    return folder / f"rank-{rank}.json"


def prepare_dump_folder(run_dir: Path, call: str) -> Path:
    """Return the folder of the workers' next dump in a run directory, named by time and `call`; delete the oldest."""
    dumps = sorted(path for path in (run_dir / DUMP).glob("*-*") if path.is_dir() and not path.is_symlink())
    for old in dumps[: max(0, len(dumps) - KEPT + 1)]:
        shutil.rmtree(old, ignore_errors=True)
    words = "-".join(re.findall(r"[0-9a-z]+", call.lower()))[:40]
    return run_dir / DUMP / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{words}"


def write_dump_summary(folder: Path, names: Mapping[int, str]) -> int:
    """Write a table of the workers' stands in a dump; return the number of them. `names`: the ranks' names."""
    rows = []
    for rank, name in sorted(names.items()):
        try:
            raw = documents.read_bytes(dump_file_path(folder, rank))
            rows.append((name, *_format_dump_row(schema.parse_value(Stand, documents.parse_json(raw)))))
        except (OSError, Malformed):
            rows.append((name, "", "no answer", "", ""))
    count = sum(bool(row[1]) for row in rows)
    if count:
        table = [("rank", "since", "in", "waits for", "launched"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        replace_text(folder / SUMMARY, "".join(f"{line}\n" for line in lines))
    return count


def _format_dump_row(stand: Stand) -> tuple[str, str, str, str]:
    """Return the cells of a worker's stand in a dump: its seconds, its place, its wait, and its launches."""
    sections = " > ".join([stand.call, *stand.sections])
    wait = stand.wait
    waits = f"{wait_text(wait)}, number {wait.number}" if wait else "other ranks" if stand.waiting else ""
    launched = ", ".join(f"{number} over {axes}" for axes, number in stand.launched.items())
    return f"{stand.seconds:.1f} s", sections, waits, launched


# Part of a run's profile: the work of one rank in one training step, as its worker writes it and its driver merges it.
#
# A file of JSON lines, compressed: the part's head, then its trace events in order of time, in the Trace Event Format,
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, but times are whole nanoseconds since
# the rank left the barrier with which the step began.

PROFILE = "profile"  # folder in a run directory
PARTS = "parts"  # in that one
MOST_EVENTS = 200_000  # of a rank's step; beyond it the shortest are left out
# of an event's arguments
_OMITTED = {"External id", "Record function id", "Ev Idx", "Fwd thread id", "Sequence number"}
_RANGES = ("user_annotation", "gpu_user_annotation")  # categories of the plan's names, which are never left out
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")  # categories of a device's streams
_FLOWS = ("ac2g", "fwdbwd")  # arrows: from a launch to its kernel, from a forward operation to its gradient
FIRST_THREAD = 100  # number of a rank's first thread in a part
FIRST_STREAM = 1000  # of its device's stream 0
_BESIDE = 10**6  # from a thread to its next row
_ROUNDED = 2  # nanoseconds, to which an export rounds
STEP = "step"  # section of the clock around all others

Event = dict[str, Any]


class PartName(NamedTuple):
    """Name of a part of a profile: the training step, the generation of workers that took it, and the rank."""

    step: int
    generation: int
    rank: int

    def file_path(self, run_dir: Path) -> Path:
        """Return the path of the worker's file in a run directory with this part of a profile."""
        return run_dir / PROFILE / PARTS / f"step-{self.step}.generation-{self.generation}.rank-{self.rank}.json.gz"

    @classmethod
    def parse(cls, path: Path) -> PartName | None:
        """Return the name of the part of a profile in a worker's file, None if the file is not called like one."""
        try:
            words_by_name = dict(word.split("-", 1) for word in path.name.removesuffix(".json.gz").split("."))
            name = cls(int(words_by_name["step"]), int(words_by_name["generation"]), int(words_by_name["rank"]))
        except (ValueError, KeyError):
            return None
        return name if name.file_path(path.parents[2]).name == path.name else None


@dataclass(frozen=True)
class PartHead:
    """Head of a part of a profile. `left`: when the rank left the step's barrier, in nanoseconds since the epoch, by
    its machine's clock; `began`: nanoseconds after that, when its timeline begins; `threads`: names of the threads and
    streams of its events, by number; `events`: their number, and `cut`, the number of events left out."""

    left: Annotated[int, Span(0, 1 << 63)]
    began: int
    threads: dict[str, str]
    timeline: RankTimeline = field(default_factory=RankTimeline)
    events: Count = 0
    cut: Count = 0


def build_part(trace: Mapping[str, Any], left: int, timeline: RankTimeline) -> tuple[PartHead, list[Event]]:
    """Return head and events of a rank's part of a profile, from the trace that torch's profiler exported."""
    kept_events, cut = select_longest([e for e in trace["traceEvents"] if _belongs_in_profile(e)])
    base = trace.get("baseTimeNanoseconds", 0) - left
    step_event = next((e for e in kept_events if e["name"] == STEP and e["cat"] == _RANGES[0]), None)
    numbers: dict[Any, int] = {step_event["tid"]: FIRST_THREAD} if step_event else {}
    threads = {str(_thread_number(e, numbers)): _thread_name(e, numbers) for e in kept_events if e["ph"] == "X"}
    events = [_convert_event(e, base, _thread_number(e, numbers)) for e in kept_events]
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    events = [e for e in nest_events(events, threads) if str(e["tid"]) in threads]
    began = next((e["ts"] for e in events if e["name"] == STEP and e["cat"] == _RANGES[0]), 0)
    return PartHead(left, began, threads, timeline, len(events), cut), events


def select_longest(events: Sequence[Event], most: int = MOST_EVENTS) -> tuple[list[Event], int]:
    """Return the `most` longest events of a worker's profile, ranges of the plan first, and the number of others."""
    cut = len(events) - most
    if cut <= 0:
        return list(events), 0
    order = sorted(range(len(events)), key=lambda i: (events[i].get("cat") in _RANGES, events[i].get("dur", 0.0)))
    dropped = set(order[:cut])
    return [event for i, event in enumerate(events) if i not in dropped], cut


def nest_events(events: Iterable[Event], threads: dict[str, str]) -> Iterator[Event]:
    """Yield the events of a worker's part of a profile, ordered by their beginning, such that all events of a thread
    lie inside or beside each other, as viewers need it: one that crosses another moves to a further row of its thread,
    which `threads` gets."""
    rows: dict[int, list[list[int]]] = {}  # thread -> per row the ends of the open events, the innermost last
    for event in events:
        if event["ph"] == "X":
            thread, start, end = event["tid"], event["ts"], event["ts"] + event["dur"]
            stacks = rows.setdefault(thread, [[]])
            for stack in stacks:
                while stack and stack[-1] <= start:
                    stack.pop()
            row = next((i for i, stack in enumerate(stacks) if not stack or end <= stack[-1] + _ROUNDED), len(stacks))
            if row == len(stacks):
                stacks.append([])
            if row:
                event["tid"] = thread + row * _BESIDE
                threads[str(event["tid"])] = f"{threads[str(thread)]}, beside"
            if stacks[row]:
                end = min(end, stacks[row][-1])
                event["dur"] = end - start
            stacks[row].append(end)
        yield event


def _belongs_in_profile(event: Event) -> bool:
    """Return True if an event that torch's profiler exported belongs into a profile: spans and arrows of threads."""
    if event["ph"] == "X":
        return isinstance(event["pid"], int) and event["dur"] >= 0
    return event["ph"] in ("s", "f") and event["cat"] in _FLOWS


def _thread_number(event: Event, numbers: dict[Any, int]) -> int:
    """Return the number of a thread, or stream, in a worker's part of a profile; `numbers`: threads' numbers so far."""
    if _is_on_device(event):
        return FIRST_STREAM + int(event["tid"])
    return numbers.setdefault(event["tid"], FIRST_THREAD + len(numbers))


def _thread_name(event: Event, numbers: Mapping[Any, int]) -> str:
    """Return the name of a thread or stream in a worker's part of a profile, by an exported event."""
    if _is_on_device(event):
        return f"stream {event['tid']}"
    number = numbers[event["tid"]] - FIRST_THREAD
    return f"thread {number + 1}" if number else "main thread"


def _is_on_device(event: Event) -> bool:
    """Return True if an exported event happened on a device, whose numbers are small, and not in a thread."""
    cat, phase = event.get("cat", ""), event.get("ph")
    return cat in ("kernel", "gpu_user_annotation") or cat.startswith("gpu_mem") or (cat == "ac2g" and phase == "f")


def _convert_event(event: Event, base: int, thread: int) -> Event:
    """Return an event as a worker's profile has it. `base`: nanoseconds from the step's barrier to the export's 0."""
    start = base + round(event["ts"] * 1e3)
    converted = {"ph": event["ph"], "tid": thread, "ts": start, "name": event["name"], "cat": event["cat"]}
    if event["ph"] != "X":
        return converted | {key: event[key] for key in ("id", "bp") if key in event}
    args = {key: value for key, value in event.get("args", {}).items() if key not in _OMITTED}
    return converted | {"dur": round(event["dur"] * 1e3)} | ({"args": args} if args else {})


def write_part(path: Path, head: PartHead, events: Iterable[Event]) -> int:
    """Write a worker's part of a profile, without secrets, in one step; return the bytes of the file. Raises
    OSError."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=4, mtime=0) as file:
        for line in (asdict(head), *events):
            file.write(json.dumps(redact_secrets(line), separators=(",", ":")).encode() + b"\n")
    replace_file(path, [raw := buffer.getvalue()])
    return len(raw)


@contextmanager
def open_part(path: Path) -> Iterator[tuple[PartHead, Iterator[Event]]]:
    """Open a worker's file of a part of a profile: its head and its events. Raises Malformed, OSError."""
    with open_regular_file(path) as raw, gzip.open(raw) as file:
        lines = (_parse_line(line) for line in file)
        head = next(lines, None)
        if head is None:
            raise Malformed(f"{path.name} is empty")
        yield schema.parse_value(PartHead, head), lines


def _parse_line(line: bytes) -> Event:
    """Return the JSON object in a line of a worker's file of a part of a profile. Raises Malformed."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise Malformed("a line of a profile's part is no JSON object")
    return record
