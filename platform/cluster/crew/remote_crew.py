"""Crew whose members are other processes: ranks, calls, collected answers, and recovery after a member fails.
`MemberRoster` keeps who has started, dialled in, is ready, has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from platform.boundary.schema import Malformed
from platform.boundary.terminal import show_phase
from platform.cluster.crew import channel, job
from platform.cluster.crew.channel import Abort, Answer, Ask, Beat, Call, Dump, Dumped, Hello, Raised, Said, encode_json
from platform.cluster.crew.crew import ByRank, Crew, Launcher, T, Worker, arguments_of_rank, format_call
from platform.cluster.crew.failures import Failure, Member, WorkerFailed
from platform.cluster.crew.heartbeats import BEAT_SECONDS, CALM_SECONDS, CallMonitor, HangWatch
from platform.cluster.crew.job import START, Job, open_tcp_store
from platform.cluster.crew.switchboard import WorkerSwitchboard
from platform.train import replies
from platform.train.replies import prepare_dump_folder, write_dump_summary

_CUT_OFF = "its connection is closed"
_ENDING_SECONDS = 2.0  # for a process to end after its connection has closed
_LOOK_SECONDS = 0.1  # interval of checks on processes that have not dialled in


class MemberRoster:
    """Tracks the worker processes of a crew by member number, and carries messages to and from them.

    Attributes:
        ready: members that are alive and ready.
        starting: numbers of the members that were started and are not ready yet.
        deaths: how members died that were starting or ready.
        unstarted: failures of members that never got ready.
        came: when the first member dialled in, a reading of the monotonic clock.
    """

    def __init__(self, launcher: Launcher, job: Job):
        """Initialise the roster of a crew whose worker processes `launcher` starts for `job`; none is started yet."""
        self.job, self._launcher = job, launcher
        self.ready: dict[int, Member] = {}
        self.starting: set[int] = set()
        self.deaths: dict[int, str] = {}
        self.unstarted: list[Failure] = []
        self._greeted = launcher.greeted
        self.came: float | None = None
        self._hired = 0
        self._looked = 0.0
        self._opened = ExitStack()

    def start_workers(self, size: int) -> None:
        """Open the driver's switchboard, start `size` worker processes, and wait until all of them are ready. Raises
        WorkerFailed if one of them dies or fails to construct its worker."""
        with show_phase("starting workers", size, "workers", lambda: (self.num_arrived, size)):
            self.host = self._launcher.prepare_launch(self.job, size)
            self.board = self._opened.enter_context(closing(WorkerSwitchboard(self.host, self._launcher.key)))
            self.hire_workers(size)
            job.preload_torch()
            while self.starting:
                self.poll_messages(_LOOK_SECONDS)
                if self.unstarted:
                    raise WorkerFailed(self.unstarted)
            self._launcher.clean_up_after_start()

    @property
    def num_arrived(self) -> int:
        """Return how many of the crew's processes have dialled in, ready or not."""
        return self._hired - len(self.starting - self._greeted.keys())

    def hire_workers(self, count: int) -> None:
        """Start `count` more worker processes, under new member numbers, without waiting until they are ready."""
        numbers = range(self._hired, self._hired + count)
        self._hired += count
        self.starting.update(numbers)
        self.board.expect_members(numbers)
        self._launcher.launch_workers(self.job, numbers, self.board)

    def send_message(self, numbers: Collection[int], message: object) -> None:
        """Send one message from the driver to the workers `numbers`, encoded once for all."""
        if numbers:
            frame = channel.encode_message(message)
            for number in numbers:
                self.board.send_frame(number, frame)

    def poll_messages(self, timeout: float) -> list[tuple[int, Said]]:
        """Return the messages that the crew's members have sent, with their numbers, waiting at most `timeout` seconds
        for any.

        Also records the members that dial in, get ready or die.
        """
        said: list[tuple[int, Said]] = []
        if self.starting:
            timeout = min(timeout, _LOOK_SECONDS)
        deadline = monotonic() + _ENDING_SECONDS
        for number, message in self.board.poll_events(max(0.0, timeout)):
            match message:
                case None:
                    self.bury_member(number, self._launcher.describe_exit(number, max(0.0, deadline - monotonic())))
                case Hello():
                    self.came = self.came or monotonic()
                    self._greeted[number] = Member(number, message.node, message.pid, tuple(message.tiers))
                case Answer(answer=call) | Raised(answer=call) if call == START:
                    self._record_start_outcome(number, message)
                case _:
                    said.append((number, message))
        if self.starting and monotonic() > self._looked + _LOOK_SECONDS:
            for number in self.starting - self._greeted.keys():
                if cause := self._launcher.describe_exit(number, 0.0):
                    self.bury_member(number, cause)
            self._looked = monotonic()
        return said

    def _record_start_outcome(self, number: int, message: Said) -> None:
        """Record that a starting member is ready or, if `message` is Raised, that constructing its worker failed."""
        self.starting.discard(number)
        if isinstance(message, Raised):
            self._record_failed_start(number, "failed", message.error)
            self.dispose_member(number)
        else:
            self.ready[number] = self._greeted[number]

    def bury_member(self, number: int, cause: str | None) -> None:
        """Record that a member's process is dead, of `cause` if known; close its connection and kill the process."""
        self.deaths[number] = cause or _CUT_OFF
        if number in self.starting:
            self.starting.remove(number)
            self._record_failed_start(number, "died", self.deaths[number])
        self.dispose_member(number)

    def _record_failed_start(self, number: int, kind: str, cause: str) -> None:
        """Record the failure of a worker process that never got ready. `kind`: died | failed."""
        member, log = self.find_member(number), self.log_path(number)
        self.unstarted.append(Failure(member, kind, "start()", cause, name=f"worker{number}", log=log))

    def dispose_member(self, number: int) -> None:
        """Close the driver's connection to a worker and kill the worker's process; it is no longer in `ready`."""
        self.board.hang_up(number)
        self._launcher.kill_worker(number)
        self.ready.pop(number, None)

    def find_member(self, number: int) -> Member:
        """Return the worker process of this number, alive or not; with node "" and process id 0 if never dialled in."""
        return self._greeted.get(number, Member(number, "", 0))

    def log_path(self, number: int) -> Path | None:
        """Return the path of the output file of member `number`'s worker process, None if it has none."""
        return self._launcher.log_path(self.job, number)

    def close(self, polite: bool) -> None:
        """Close all workers' connections, which ends idle ones; end all processes by `Launcher.end_workers`."""
        self._opened.close()
        self._launcher.end_workers(polite)


SUSPENSE_SECONDS = (0.0, 0.5, 2.0)  # to wait for a likelier culprit, indexed by `Failure.innocence`
LEAVE_SECONDS = 5.0  # without progress in any member that is to leave its call and groups; then those left are killed
DUMP_SECONDS = 2.0  # for members to write where they stand, before the driver acts
CLOSE_SECONDS = 10.0  # for the members to close by themselves; then they are killed
FOLLOWED = 64  # ranks from which rank 0 passes the order to take a step on to the others, instead of the driver


class RemoteCrew(Crew):
    """Implements ranks, calls, failures and release of a crew whose members are other processes, over the switchboard;
    `launcher` starts and ends the processes."""

    elastic = True

    def __init__(self, launcher: Launcher, job: Job, spares: int = 0):
        """Start a worker process per rank of `job` and `spares` more (fewer if negative) by `launcher`, and wait until
        all are ready; close the crew if that fails. Raises WorkerFailed."""
        self.job, self.can_hire, self._launcher = job, launcher.can_hire, launcher
        self._silence, self.outlook = job.config.elastic.hang_seconds, CallMonitor()
        self._roster = MemberRoster(launcher, job)
        self.unstarted = self._roster.unstarted
        self._ranks: dict[int, int] = {}  # member number -> rank, in order
        self._unread: list[tuple[int, Said]] = []  # what members said while nothing was asked
        self._hung: set[int] = set()  # members to blame for a hang; `release_members` kills them
        self._failures: dict[int, Failure] = {}  # of this generation
        self._call = START
        self._followed = 0  # number of the call `follow` that the ranks but 0 are in; 0 if they are not
        self._oldest = START  # of the calls whose failure is one of the call under way
        self._dumped: Path | None = None  # the folder in which workers have written where they stood
        self._polite = True  # True while the members can be expected to answer
        self._closed = False
        self._rendezvous: Any = None  # the store of this generation
        try:
            with self._kill_on_close():
                self._roster.start_workers(job.world_size + spares)
        except BaseException:
            self.close()
            raise
        self.came = self._roster.came

    @property
    def ready_members_by_number(self) -> Mapping[int, Member]:
        self._unread += self._roster.poll_messages(0.0)
        return MappingProxyType(dict(sorted(self._roster.ready.items())))

    @property
    def lost(self) -> str:  # type: ignore[override]
        return self._launcher.lost

    @property
    def leaving_members(self) -> Set[int]:
        return self._launcher.find_leaving_members(self.ready_members_by_number)

    @property
    def starting_members(self) -> Set[int]:
        self._unread += self._roster.poll_messages(0.0)
        return frozenset(self._roster.starting)

    def hire_workers(self, count: int) -> None:
        self._roster.hire_workers(count)

    def dismiss_members(self, numbers: Set[int]) -> None:
        assert not numbers & self._ranks.keys()
        for number in numbers:
            self._roster.dispose_member(number)

    def assign_ranks(self, job: Job, numbers: Sequence[int]) -> None:
        """Give members their ranks as `Crew.assign_ranks` says, and open the TCPStore for their process groups."""
        assert not self._ranks and len(set(numbers)) == len(numbers) == job.world_size
        self.job = self._roster.job = job
        self._ranks = {number: rank for rank, number in enumerate(numbers)}
        for number in self._ranks.keys() - self._roster.ready.keys():
            self._roster.deaths[number] = "it was gone before the generation began"
        self._rendezvous = open_tcp_store(self._roster.host)
        self.store = self._rendezvous.host, self._rendezvous.port

    def call_ranks(self, method: Callable[..., T], *args: Any, within: float = inf) -> list[T]:
        self._end_step_following()
        self._send_call(word := str(method), args)
        values = self._gather_results(word, format_call(word, args), within, self._ranks)
        return [values[number] for number in self._ranks]

    def lead_step(self, step: int, *args: Any, within: float = inf) -> Any:
        """Run a step on all ranks as `Crew.lead_step` says. In a large world the driver sends the order to rank 0
        alone, which passes it on (`Worker.follow`), so that its cost to the driver does not grow with the ranks."""
        first, *others = self._ranks
        if len(self._ranks) < FOLLOWED:
            return self.call_ranks(Worker.step, step, *args, within=within)[0]
        if not self._followed:
            self._roster.send_message(others, self._next_call(Worker.follow))
            self._followed = self._oldest = self._call
        self._roster.send_message([first], self._next_call(Worker.lead, (step, *args)))
        word = str(Worker.step)
        return self._gather_results(word, format_call(word, (step,)), within, [first])[first]

    def _end_step_following(self) -> None:
        """Order rank 0 to end `Worker.follow` on the other ranks, if they are in it, so that they take calls again."""
        if self._followed:
            self._roster.send_message([next(iter(self._ranks))], self._next_call(Worker.let_go))
        self._oldest, self._followed = self._followed or self._call + 1, 0

    def release_members(self) -> list[Failure]:
        """End this generation of workers as `Crew.release_members` says: abort their calls, kill members that do not
        leave."""
        if self._followed and not (self._failures or self._dead_workers):
            with suppress(WorkerFailed):  # which `leave` meets too
                self.call_ranks(Worker.confirm_idle, within=LEAVE_SECONDS)  # in which they wait for each other no more
        self._followed = 0
        self._polite = True
        with self._kill_on_close():
            self._rendezvous = None  # frees members that wait in the store for a lost rank
            ready = self._roster.ready
            for number in self._hung & ready.keys():
                self._roster.dispose_member(number)
            lost = [failure for number, failure in self._failures.items() if number not in ready]
            left = self._ranks.keys() & ready.keys()
            self._roster.send_message(left, Abort())
            self._roster.send_message(left, self._next_call(Worker.leave))
            answered = self._collect_answers(left, LEAVE_SECONDS, beats=True)
            for number in left - self._dead_workers.keys():
                answer = answered.get(number)
                if answer is None:
                    why = f"it has not left in {LEAVE_SECONDS:.0f} s"
                    lost.append(self._build_failure(number, "hung", "leave()", why))
                elif isinstance(answer, Raised):
                    lost.append(self._build_failure(number, "failed", "leave()", answer.error))
                else:
                    continue
                self._roster.dispose_member(number)
            known = {failure.member.number for failure in lost}
            dead = ((n, why) for n, why in self._dead_workers.items() if n not in known)
            lost += [self._build_failure(n, "died", "release()", why) for n, why in dead]
            self._ranks, self._hung, self._failures, self._unread = {}, set(), {}, []
        return lost

    def close(self) -> None:
        """End all worker processes of the crew: let them end by themselves if none has failed, and kill the ones that
        do not."""
        if self._closed:
            return
        self._closed = True
        polite, self._polite = self._polite, False
        try:
            if polite:
                self._end_step_following()
                ready = set(self._roster.ready)
                self._roster.send_message(ready, self._next_call(Worker.close))
                polite = self._collect_answers(ready, CLOSE_SECONDS).keys() == ready and not self._roster.starting
        finally:
            self._rendezvous = None
            self._roster.close(polite)

    # calls and answers

    @property
    def _dead_workers(self) -> dict[int, str]:
        """Return the workers with a rank whose process is dead, by member number, each with how it died."""
        return {number: cause for number, cause in self._roster.deaths.items() if number in self._ranks}

    def _next_call(self, method: object, args: Sequence[object] = ()) -> Call:
        """Count one more call of the driver on its workers, and return the message that orders it."""
        self._call += 1
        return Call(self._call, str(method), list(args))

    def _send_call(self, method: str, args: tuple[Any, ...]) -> None:
        """Send a call to every seated member, with its own values of `ByRank` arguments; shared values are encoded
        once."""
        if not any(isinstance(a, ByRank) for a in args):
            return self._roster.send_message(self._ranks, self._next_call(method, args))
        head = encode_json(self._next_call(method)).removesuffix(b"]}")
        texts: dict[int, bytes] = {}  # by identity: a value that several ranks get is encoded once
        for number, rank in self._ranks.items():
            rank_arguments = arguments_of_rank(args, rank)
            for value in rank_arguments:
                if id(value) not in texts:
                    texts[id(value)] = encode_json(value)
            arguments_text = b",".join(texts[id(value)] for value in rank_arguments)
            self._roster.board.send_frame(number, channel.frame_payload(head + arguments_text + b"]}"))

    def _gather_results(self, method: str, call: str, within: float, answering: Collection[int]) -> dict[int, Any]:
        """Collect the results of the call just sent from the members `answering`, by number. `call`: the call as
        `format_call` formats it. Raises WorkerFailed if any seated member dies, makes no progress for `within` seconds,
        or raises; in the last case only after SUSPENSE_SECONDS, so that a likelier culprit is heard too."""
        values: dict[int, Any] = {}
        failures, roster = self._failures, self._roster
        silence = min(within, max(self._silence, CALM_SECONDS))
        pending, deadline, watch = set(self._ranks), inf, HangWatch(within, monotonic(), silence)
        self.outlook.begin_call(method, call, self._ranks, dict(roster.ready), pending)
        with self._kill_on_close(), self.outlook:
            while len(values) < len(answering):
                gone = self._dead_workers
                for number in gone.keys() - failures.keys():
                    failures[number] = self._build_failure(number, "died", call, gone[number])
                hung, self._hung = watch.find_hung(pending, monotonic())
                if hung:
                    self._dumped = self._dump_worker_stacks(call, pending - watch.silent_workers)
                failures |= {number: self._build_failure(number, "hung", call, cause) for number, cause in hung.items()}
                if hung or gone or monotonic() >= deadline:
                    raise WorkerFailed(list(failures.values()))
                roster.send_message(watch.workers_to_ask(pending, monotonic()), Ask(self._call))
                roster.send_message(self.outlook.workers_to_ask(pending, now := monotonic()), Ask(self._call))
                seconds = min(watch.seconds_to_wait(now), self.outlook.seconds_to_wait(now), deadline - now)
                for number, message in self._receive_messages(seconds):
                    match message:
                        case Beat():
                            self._note_heartbeat(number, message, watch)
                        case Raised(answer=known) if number in pending and known >= self._oldest:
                            failure = self._build_failure(number, "failed", call, message.error)
                            failure = replace(failure, refusal=message.refusal, of_world=message.of_world)
                            failures[number] = failure
                            deadline = min(deadline, monotonic() + SUSPENSE_SECONDS[failure.innocence])
                            pending.remove(number)
                        case Answer(answer=self._call) if number in pending:
                            try:
                                values[number] = replies.read_reply(method, self._ranks[number], message.value)
                            except Malformed:
                                roster.bury_member(number, "what it answers is no answer")
                                continue  # stays pending, and is now dead
                            watch.note_answer(monotonic())
                            pending.remove(number)
                if failures and not pending:
                    raise WorkerFailed(list(failures.values()))
        return values

    def _note_heartbeat(self, number: int, message: Beat, watch: HangWatch) -> None:
        """Record a worker's heartbeat for `watch`, unless it is one of an earlier call, and for the outlook."""
        current, now = message.beat == self._call, monotonic()
        self.outlook.note_heartbeat(number, message.progress, now, current)
        if current:
            watch.note_heartbeat(number, message.progress, now)

    def _receive_messages(self, seconds: float) -> list[tuple[int, Said]]:
        """Return the workers' messages, as (member number, message); wait up to `seconds` if there is none yet."""
        unread, self._unread = self._unread, []
        return unread + self._roster.poll_messages(0.0 if unread else seconds)

    def _collect_answers(
        self, numbers: Collection[int], seconds: float, beats: bool = False
    ) -> dict[int, Answer | Raised]:
        """Collect the answers to the call sent last, `leave` or `close`, from those members of `numbers` that are
        alive, by number; members that die or do not answer in time are missing. Stops when none has answered for
        `seconds`; with `beats`, progress that a heartbeat shows counts too."""
        answers: dict[int, Answer | Raised] = {}
        pending, deadline, ask = set(numbers), monotonic() + seconds, monotonic() + BEAT_SECONDS
        while (pending := pending & self._roster.ready.keys()) and monotonic() < deadline:
            if beats and monotonic() >= ask:
                self._roster.send_message(pending, Ask(self._call))
                ask = monotonic() + BEAT_SECONDS
            for number, message in self._roster.poll_messages(min(deadline, ask if beats else inf) - monotonic()):
                match message:
                    case Answer(answer=self._call) | Raised(answer=self._call):
                        answers[number] = message
                        pending.discard(number)
                        deadline = monotonic() + seconds
                    case Beat(beat=self._call):
                        deadline = max(deadline, monotonic() + seconds - message.progress.seconds)
        return answers

    @contextmanager
    def _kill_on_close(self) -> Iterator[None]:
        """Let `close` kill the worker processes, not ask them to end, during the block, and ever after if it raises."""
        before, self._polite = self._polite, False
        yield
        self._polite = before

    def _build_failure(self, number: int, kind: str, call: str, cause: str) -> Failure:
        """Return the failure of the seated worker `number` in `call`, with its rank, readable name and log file."""
        rank, member = self._ranks[number], self._roster.find_member(number)
        name, coordinates = self.job.rank_name(rank), dict(self.job.coordinates[rank])
        seen, stack = (
            self.outlook.describe_other_workers(number),
            self.outlook.last_stack(number) if kind == "hung" else [],
        )
        log = self._roster.log_path(number)
        dump = self._dumped if kind == "hung" else None
        return Failure(member, kind, call, cause, rank, name, coordinates, log, seen=seen, stack=stack, dump=dump)

    def _dump_worker_stacks(self, call: str, numbers: Set[int]) -> Path | None:
        """Let the workers `numbers`, which still answer, write where they stand in a call that does not go on; return
        the folder, None if there is nothing in it."""
        if not self.job.config.monitor.dump:
            return None
        folder = prepare_dump_folder(self.job.run_dir, call)
        self._roster.send_message(numbers, Dump(folder.name))
        left, deadline = set(numbers), monotonic() + DUMP_SECONDS
        while (left := left & self._roster.ready.keys()) and monotonic() < deadline:
            for number, message in self._roster.poll_messages(deadline - monotonic()):
                if isinstance(message, Dumped) and message.dumped == folder.name:
                    left.discard(number)
                else:
                    self._unread.append((number, message))
        names = {rank: self.job.rank_name(rank) for rank in self._ranks.values()}
        return folder if write_dump_summary(folder, names) else None
