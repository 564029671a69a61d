"""What runs in which stream of a device, in what order, and where two of them touch the same memory in none.

A step on the card that is not there (`tests.harness.card`) is written down: what every kernel, collective and copy
reads and writes, the events of every stream and who waits for them, the memory that is freed. From these notes `races`
finds every two accesses to one memory, one of them a write, of which neither has to wait for the other; as the notes
are data, it also tells what would race if one of the runtime's waits were not there.

The streams are those of CUDA, NCCL and torch's allocator: a group has a stream of its own, which waits for the current
one when a collective is issued; to wait for a collective makes the current stream wait for its end; the transport holds
the memory of a collective until it is waited for; memory belongs to the stream that it was allocated in, which may use
it again as soon as it is freed, so that to free it is to write to it. Host memory is touched by the host, one more
stream, after which everything is launched. (torch.cuda._sanitizer has the same rules, for CUDA alone.)
"""

from __future__ import annotations

import re
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from linecache import getlines
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import platform
from platform.checkpoint import buffer
from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.runtime import recompute, staged_memory
from platform.runtime.clock import SectionClock
from platform.runtime.communicator import CollectiveHandle, Communicator, SingleRank
from platform.runtime.conversion import PendingConversion
from platform.runtime.tiled_gathers import TiledBucket
from platform.train import trainer as trainer_module
from platform.train.trainer import Trainer
from tests.harness.card import CARD, MODULE, AsOnNccl, alone
from tests.harness.launches import FREE, arguments, is_view

HOST, THREAD, DEFAULT = "host", "thread of the host", "default stream"
STREAMS = buffer._stream_of_copies, recompute._copy_stream, staged_memory._copy_streams  # of the process
POOL = 32  # streams of one priority that torch hands out in turn
PLACES = 2  # innermost functions of the runtime that a report names
ROOT = Path(platform.__path__[0])
ASKS_ONLY = re.compile("new_.*|.*_like")  # of its arguments it reads no more than shape and type
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
# What passes a wait on: the place that waits is the one that calls it
PASSES_ON = {f.__code__ for f in (CollectiveHandle.wait, PendingConversion.wait, PendingConversion.advance_collective)}

Clocks = dict[str, int]  # stream -> the number of its last work that is known to be done


class Site(NamedTuple):
    """A place in the runtime. `call`: the text of what it calls, where that matters; lines may hold several calls."""

    file: str
    line: int
    function: str
    call: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}{self.call and ': '}{self.call}"


class Region(NamedTuple):
    """Bytes [start, stop) of a memory of the host, of which several streams may have a part each."""

    memory: int
    start: int
    stop: int


Memory = int | Region


class Work(NamedTuple):
    """A kernel or a copy in a stream, or what the host does itself."""

    stream: str
    reads: frozenset[Memory]
    writes: frozenset[Memory]
    what: str
    at: tuple[Site, ...]

    def __str__(self) -> str:
        return f"{self.what} in {self.stream} at {_listed(self.at)}"


class Collective(Work):
    """A collective or a message, in the stream of its group."""


class Recorded(NamedTuple):
    """An event at what a stream has been given by now."""

    event: int
    stream: str


class Waited(NamedTuple):
    """A stream, or the host, goes on after an event. `site`: of the runtime; None: by itself."""

    stream: str
    event: int
    site: Site | None


class Held(NamedTuple):
    """Memory that the transport holds until an event is waited for."""

    event: int
    memories: frozenset[Memory]


class Freed(NamedTuple):
    """Memory that nothing refers to any more. `streams`: it belongs to the first, and is not used again before what it
    has been recorded in has ended."""

    memory: int
    streams: tuple[str, ...]
    at: tuple[Site, ...]


class Timed(NamedTuple):
    """The host asks for the time of an event."""

    event: int
    at: tuple[Site, ...]


Note = Work | Recorded | Waited | Held | Freed | Timed


class _Replay:
    """Who has waited for what, after some of the notes."""

    def __init__(self, without: Site | None, borders: dict[int, list[int]]):
        self.found: list[str] = []
        self._borders = borders  # of regions, by memory
        self._without = without
        self._number = count(1)
        self._clocks: dict[str, Clocks] = defaultdict(dict)
        self._events: dict[int, Clocks] = {}
        self._wrote: dict[Any, tuple[int, Work]] = {}  # memory -> the last that wrote to it
        self._read: dict[Any, dict[str, tuple[int, Work]]] = defaultdict(dict)  # and who has read it since, by stream
        self._holds: dict[int, frozenset[Memory]] = {}  # event -> memory held until it is waited for
        self._freed: dict[int, Work] = {}  # memory that is held, but freed otherwise

    def _clock(self, stream: str) -> Clocks:
        """The clock of a stream that is about to be given something by the host, as which it comes after all that the
        host knows."""
        clock = self._clocks[stream]
        _later(clock, self._clocks[HOST])
        return clock

    def take(self, note: Note) -> None:
        match note:
            case Work():
                self._run(note)
            case Recorded(event, stream):
                self._events[event] = dict(self._clock(stream))
            case Waited(stream, event, site) if site is None or site != self._without:
                _later(self._clock(stream), self._events[event])
                self._release(self._holds.pop(event, frozenset()))
            case Held(event, memories):
                self._holds[event] = memories
            case Freed(memory, streams, at):
                owner = " and ".join(streams)
                for stream in streams:
                    _later(self._clocks[owner], self._clock(stream))
                self._freed[memory] = Work(owner, frozenset(), frozenset((memory,)), "free", at)
                self._release((memory,))
            case Timed(event, at):
                known = self._clocks[HOST]
                if any(known.get(stream, 0) < number for stream, number in self._events[event].items()):
                    self.found.append(f"the host asks for a time that it has not waited for at {_listed(at)}")

    def _release(self, memories: Iterable[int]) -> None:
        """Free the memories that are to be freed and that nobody holds."""
        for memory in memories:
            if memory in self._freed and not any(memory in held for held in self._holds.values()):
                self._run(self._freed[memory])

    def _run(self, work: Work) -> None:
        clock, number = self._clock(work.stream), next(self._number)
        clock[work.stream] = number
        read, written = self._divide(work.reads), self._divide(work.writes)
        for memory in read | written:
            if (freed := self._freed.get(memory, work)) is not work:
                self.found.append(f"{work} is given memory that is not there since {freed}")
            earlier = [self._wrote[memory]] if memory in self._wrote else []
            if memory in written:
                earlier += self._read.pop(memory, {}).values()
                self._wrote[memory] = number, work
            else:
                self._read[memory][work.stream] = number, work
            for before, other in earlier:
                if before > clock.get(other.stream, 0):
                    self.found.append(f"{work} does not wait for {other}")

    def _divide(self, memories: frozenset[Memory]) -> set[Any]:
        """The memories, of regions the parts that no region of the notes divides."""
        regions = [m for m in memories if isinstance(m, Region)]
        parts = ((m.memory, at) for m in regions for at in self._borders[m.memory] if m.start <= at < m.stop)
        return {*(m for m in memories if not isinstance(m, Region)), *parts}


def _later(clock: Clocks, known: Clocks) -> None:
    """Advance a clock to what is known of each stream."""
    for stream, number in known.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def races(notes: Sequence[Note], without: Site | None = None) -> list[str]:
    """The accesses of which neither waits for the other, as text. `without`: a site at which nothing is waited for."""
    borders: dict[int, set[int]] = defaultdict(set)
    for memory in (m for note in notes if isinstance(note, Work) for m in note.reads | note.writes):
        if isinstance(memory, Region):
            borders[memory.memory] |= {memory.start, memory.stop}
    replay = _Replay(without, {memory: sorted(some) for memory, some in borders.items()})
    for note in notes:
        replay.take(note)
    return list(dict.fromkeys(replay.found))


def waits(notes: Sequence[Note]) -> dict[Site, int]:
    """The places in the runtime at which something is waited for, and how often."""
    counts: dict[Site, int] = defaultdict(int)
    for note in notes:
        if isinstance(note, Waited) and note.site:
            counts[note.site] += 1
    return counts


def shared(notes: Sequence[Note]) -> list[str]:
    """What runs in the stream of a group, and so holds up the collectives of all its members, as text."""
    groups = {note.stream: note for note in notes if isinstance(note, Collective)}
    others = [note for note in notes if isinstance(note, Work) and not isinstance(note, Collective)]
    return [f"{work} is in the way of {groups[work.stream]}" for work in others if work.stream in groups]


class Stream:
    """torch.cuda.Stream: the next one of the pool of its priority."""

    def __init__(self, recorder: Recorder, name: str):
        self._recorder, self.name = recorder, name

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._recorder)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._recorder.wait(self.name, event.number)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """torch.cuda.Event."""

    def __init__(self, recorder: Recorder, enable_timing: bool = False, blocking: bool = False):
        self._recorder, self._timing, self.number = recorder, enable_timing, -1

    def record(self, stream: Stream | None = None) -> None:
        self.number = self._recorder.record((stream or self._recorder.current_stream()).name)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._recorder.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._recorder.wait(self._recorder.host, self.number)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Event) -> float:
        assert self._timing and end._timing
        for event in (self, end):
            self._recorder.timed(event.number)
        return 1.0


class Recorder(TorchDispatchMode):
    """Notes what is launched while it is entered, and stands for what torch.cuda has of streams and events.

    `notes`: in the order of the host. `high`: the streams of groups are of high priority, and so from another pool than
    all others."""

    def __init__(self, high: bool = True):
        super().__init__()
        self.notes: list[Note] = []
        self.high = high
        self.host = HOST  # or its thread, whose work is noted now
        self.groups: dict[Any, str] = {}  # process group -> its stream
        self._made = {priority: count() for priority in (0, -1)}
        self._events = count()
        self._memories: dict[int, tuple[Any, int]] = {}  # address of a storage -> what tells of its end, its number
        self._numbers = count()
        self._streams: dict[int, list[str]] = {}  # memory -> streams that it belongs to
        self._ended: deque[Freed] = deque()  # not noted yet
        self._here = threading.local()

    # what torch.cuda has

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Let torch.cuda and torch.card have these streams and events, and the runtime's clock use them."""
        named = {
            "Stream": self.new_stream, "Event": partial(Event, self), "stream": self.stream,
            "current_stream": self.current_stream, "default_stream": lambda device=None: Stream(self, DEFAULT),
            "synchronize": self.synchronize,
        }  # fmt: skip
        for name, value in named.items():
            patch.setattr(torch.cuda, name, value)
            patch.setattr(MODULE, name, value, raising=False)
        patch.setattr(
            torch.Tensor, "record_stream", lambda x, stream: self._streams[self._memory(x)].append(stream.name)
        )
        patch.setattr(torch.Tensor, "data_ptr", lambda x: self.address(x))
        patch.setattr(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        patch.setattr(
            trainer_module, "SectionClock", lambda device, detailed=False: SectionClock("cuda", detailed=detailed)
        )

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, f"stream {next(self._made[priority]) % POOL} of priority {priority}")

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(self, getattr(self._here, "stream", DEFAULT))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream().name, stream.name
        try:
            yield
        finally:
            self._here.stream = before

    def synchronize(self, device: Any = None) -> None:
        for stream in {note.stream for note in self.notes if isinstance(note, Work | Recorded)} - {HOST}:
            self._note(Waited(HOST, self.record(stream), None))

    # events and waits

    def record(self, stream: str) -> int:
        """The number of a new event in a stream."""
        self._note(Recorded(event := next(self._events), stream))
        return event

    def wait(self, stream: str, event: int) -> None:
        """The runtime waits, at the place that is found here."""
        sites = (_site(frame, _call(frame)) for frame in _frames() if frame.f_code not in PASSES_ON)
        self._note(Waited(stream, event, next(sites, None)))

    def timed(self, event: int) -> None:
        self._note(Timed(event, _places()))

    def launch(self, group: Any, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Callable[[], None]:
        """Issue a collective or a message in the stream of a group; return the function that waits for it."""
        if group not in self.groups:
            self.groups[group] = self.new_stream(priority=-self.high).name
        stream, read, written = self.groups[group], self._all(reads), self._all(writes)
        self._note(Waited(stream, self.record(self.current_stream().name), None))
        self._note(Collective(stream, read, written, what, _places()))
        done = self.record(stream)
        self._note(Held(done, read | written))
        return lambda: self.wait(self.current_stream().name, done)

    def to_host(self, x: Tensor) -> None:
        """The host reads a tensor on the device, and waits for that."""
        self._note(Work(self.current_stream().name, self._all([x]), frozenset(), "read", _places()))
        self._synchronised()

    def on_host(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """The host reads and writes its own memory."""
        self._note(Work(self.host, self._all(reads), self._all(writes), what, _places()))

    def beside(self, do: Callable[[], object]) -> Callable[[], None]:
        """Let a thread of the host `do` something, as early as it can; return the function that waits for it."""
        self.host = THREAD
        do()
        self.host, done = HOST, self.record(THREAD)
        return lambda: self._note(Waited(HOST, done, None))

    def _synchronised(self) -> None:
        """The host waits for the current stream."""
        self._note(Waited(HOST, self.record(self.current_stream().name), None))

    def _note(self, note: Note) -> None:
        while self._ended:
            self.notes.append(self._ended.popleft())
        self.notes.append(note)

    # memory

    def address(self, x: Tensor) -> int:
        """Tensor.data_ptr: an address in the memory of a tensor, as if all of them had some."""
        return (self._memory(x) << 48) + x.storage_offset() * x.element_size()

    def _memory(self, x: Tensor, stream: str = DEFAULT) -> int:
        """The number of the memory of a tensor, which belongs to `stream` if this is the first that is seen of it."""
        storage = x.untyped_storage()
        if storage._cdata not in self._memories:
            self._allocated(storage, stream if x.device == CARD else HOST)
        return self._memories[storage._cdata][1]

    def _all(self, tensors: Iterable[Tensor], stream: str = DEFAULT) -> frozenset[Memory]:
        return frozenset(self._touched(x, stream) for x in tensors if x.numel())

    def _touched(self, x: Tensor, stream: str) -> Memory:
        """The memory of a tensor on the card, or its region in the host's."""
        number = self._memory(x, stream)
        if x.device == CARD:
            return number
        at, size = (n * x.element_size() for n in (x.storage_offset(), x.numel()))
        return Region(number, at, at + size) if x.is_contiguous() else Region(number, 0, x.untyped_storage().nbytes())

    def _allocated(self, storage: torch.UntypedStorage, stream: str) -> None:
        address, number = storage._cdata, next(self._numbers)
        self._memories[address] = ref(storage, lambda _: self._end(address, number)), number
        self._streams[number] = [stream]

    def _end(self, address: int, number: int) -> None:
        """A storage is no more. Called at any time, also while something is noted."""
        self._free(number)
        if self._memories[address][1] == number:
            del self._memories[address]

    def _free(self, number: int) -> None:
        streams = self._streams.pop(number, (HOST,))
        if streams[0] != HOST:
            self._ended.append(Freed(number, tuple(streams), _places()))

    def _resizing(self, resize: Any) -> Any:
        """UntypedStorage.resize_: memory is freed, and other memory is allocated."""

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if known := self._memories.get(storage._cdata):
                self._free(known[1])
                if size:
                    self._allocated(storage, self.current_stream().name)
            return resize(storage, size)

        return resized

    # kernels

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function.namespace not in ("prim", "c10d"):
            self._launched(function, args, kwargs, out)
        return out

    def _launched(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note a kernel, with what it reads and writes by its schema."""
        name, (asked, written) = function.overloadpacket.__name__, arguments(function, args, kwargs)
        named = {n: [x for x in tree_leaves(x) if isinstance(x, Tensor)] for n, x in asked.items()}
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        touched = [x for tensors in named.values() for x in tensors] + results
        stream = self.current_stream().name
        if name in FREE or is_view(function) or not touched:
            self._all(results, stream)
            return
        on_card = any(x.device == CARD for x in touched)
        if on_card and name not in COPIES:  # numbers of the host are arguments of a kernel
            named = {n: [x for x in tensors if x.device == CARD] for n, tensors in named.items()}
        inputs = self._all(x for tensors in named.values() for x in tensors)
        writes = self._all(x for n in written for x in named[n]) | (self._all(results, stream) - inputs)
        reads = frozenset() if ASKS_ONLY.fullmatch(name) else inputs - writes
        self._note(Work(stream if on_card else self.host, reads, writes, name, _places()))
        if on_card and any(x.device != CARD for x in touched) and not asked.get("non_blocking"):
            self._synchronised()


def _frames() -> Iterator[FrameType]:
    """The functions of the runtime that run now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if frame.f_code.co_filename.startswith(str(ROOT)):
            yield frame
        frame = frame.f_back


def _site(frame: FrameType, call: str = "") -> Site:
    code = frame.f_code
    return Site(str(Path(code.co_filename).relative_to(ROOT)), frame.f_lineno, code.co_qualname, call)


def _call(frame: FrameType) -> str:
    """The text of the call that a function is in."""
    first, last, begin, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    lines = getlines(frame.f_code.co_filename)[first - 1 : last]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join("".join(lines).split())


def _places() -> tuple[Site, ...]:
    """The innermost functions of the runtime that run now."""
    return tuple(map(_site, islice(_frames(), PLACES)))


def _listed(sites: Sequence[Site]) -> str:
    return " < ".join(map(str, sites)) or "no function of the runtime, as in torch's own backward pass"


class OnStreams(AsOnNccl):
    """Groups of which each has a stream on the card; messages have a group for each pair of ranks and direction."""

    def __init__(self, recorder: Recorder, plan: Plan, rank: int):
        super().__init__(plan, rank)
        self._recorder = recorder

    def _start_collective(self, op, x, out, axes, group, reduce, root):
        super()._start_collective(op, x, out, axes, group, reduce, root)
        sends = op == "broadcast" and group[root] == self.rank
        return self._recorder.launch(self._groups[axes], op, [x], [] if sends else [out])

    def _start_all_to_allv(self, x, out, sent, received, axes):
        super()._start_all_to_allv(x, out, sent, received, axes)
        return self._recorder.launch(self._groups[axes], "all_to_allv", [x], [out])

    def _start_send(self, x, peer):
        super()._start_send(x, peer)
        return self._recorder.launch((self.rank, peer), "send", [x], [])

    def _start_receive(self, out, peer):
        super()._start_receive(out, peer)
        return self._recorder.launch((peer, self.rank), "receive", [], [out])

    def transfer(self, sent, received):
        self._recorder.on_host("transfer", [x for _, x in sent], [out for _, out in received])


@contextmanager
def recorded(c: Config, rank: int, recorder: Recorder) -> Iterator[Trainer]:
    """The trainer of one rank on the card, whose streams are noted."""

    def communicator(plan: Plan, rank: int) -> Communicator:
        return SingleRank(plan.mesh, CARD) if plan.mesh.world_size == 1 else OnStreams(recorder, plan, rank)

    for streams in STREAMS:
        streams.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        recorder.stand_in(patch)
        with alone(c, rank, [], communicator) as trainer, recorder, pytest.MonkeyPatch.context() as within:
            read = Communicator.read_numbers

            def noted(self: Communicator, x: Tensor) -> list[float]:
                recorder.to_host(x)
                return read(self, x)

            within.setattr(Communicator, "read_numbers", noted)
            for bucket in trainer.weights.buckets:
                if isinstance(bucket, TiledBucket):
                    bucket.start_maxima()  # as what would give the trainer its weights does
            yield trainer
    for streams in STREAMS:
        streams.cache_clear()
