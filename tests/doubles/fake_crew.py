"""A crew in this process, of workers that compute nothing and keep the protocol of platform.train.worker.Worker: a
state is the number of updates that it has had, and a snapshot that is not where the driver says it is an error."""

import math
import time
from collections import defaultdict
from dataclasses import replace

from platform.boundary.refusals import find_refusal
from platform.checkpoint.manifest import FileReport
from platform.cluster.crew.crew import ByRank, Crew, arguments_of_rank, format_call
from platform.cluster.crew.failures import Failure, Member, WorkerFailed
from platform.train.environment_proof import describe_environment
from platform.train.replies import (
    METHODS,
    Built,
    Copied,
    Differences,
    Findings,
    Joined,
    Scored,
    SlowRank,
    StepReport,
    Unrestored,
    Written,
)


class Dead(Exception):
    """Of a worker's process, in a call."""


class Hung(Exception):
    """Likewise."""


class FakeWorker:
    def __init__(self, crew, number):
        self.crew, self.number, self.memories, self.state = crew, number, {}, None

    def prove_environment(self, probe):
        mine = describe_environment(self.crew.config, self.crew.job.run_dir, probe)
        return (
            replace(mine, node="afar", code={"platform": "of yesterday"})
            if self.number in self.crew.strangers
            else mine
        )

    def read_clock(self):
        return time.time() + self.crew.late_clocks.get(self.number, 0.0)

    def examine_device(self, thorough):
        self.crew.examined.append(self.number)
        readings = {"gemm": 1e9, "wrong": 0.0, "write": 1e9} | self.crew.findings.get(self.number, {})
        return Findings(readings, dict(self.crew.errors.get(self.number, {})))

    def join_mesh(self, rank, world_size, config, store, generation, stage_of, plan=""):
        assert self.state is None, "it has not left"
        self.rank, self.size, self.generation = rank, world_size, generation
        self.config = config
        return Joined(rank, self.crew.job.coordinates[rank], 1, "n")

    def build_trainer(self, rows, domains, corpus="", reach=None, fresh=True):
        assert isinstance(reach, dict) and isinstance(fresh, bool)
        self.state = 0 if fresh else None  # undefined until it is restored
        self.unheld = None  # the step that it holds during the next one, if the crew does so late
        return Built(42, "cpu", self.crew.memory, ["exp_avg", "exp_avg_sq"])

    def exchange_snapshots(self, source, rank, store, generation):
        assert source.members_of_ranks(source.gathered)[rank] == self.number
        assert source.step in self.memories[source.generation]

    def recover_state(self, source):
        if self.rank in source.new_rank_by_old.values():
            assert source.step in self.memories[source.generation], "it does not have that"
        self.state = source.step
        self.memories[self.generation] = [self.state]

    def restore_checkpoint(self, directory, own):
        self.state = int(directory.split("-")[1])
        if directory in self.crew.corrupt:
            return Unrestored("corrupt", "a bit has flipped")
        self.memories[self.generation] = [self.state]
        return None

    def rehearse_steps(self, step):
        assert self.state == step - 1, "its state is there"
        return self.crew.uncompiled.get(self.number, "")

    def step(self, step, limit, faults):
        assert self.state == step - 1, f"{self.state} updates before step {step}"
        self.forget()
        if self.unheld:
            self.take_snapshot(self.unheld)
        loss = self.crew.losses[step].pop(0) if self.rank == 0 and self.crew.losses[step] else 1.0
        overflowed, c = step in self.crew.overflows, self.config
        skipped = overflowed or not loss <= limit or math.isnan(loss)
        verdict = self.crew.verdicts[step].pop(0) if self.rank == 0 and self.crew.verdicts[step] else Differences()
        for worker in self.crew.seated if self.rank == 0 else []:  # all learn it
            worker.skipped = skipped or bool(verdict)
            if worker.rank in dict(verdict.damaged):
                worker.memories = {}  # nobody may ask for what it has
        if not self.skipped or overflowed or c.train.on_spike == "skip":
            self.state = step
            if c.elastic.snapshot_every and step % c.elastic.snapshot_every == 0:
                self.unheld = step
                if not self.crew.late:
                    self.take_snapshot(step)
        batch = c.train.global_batch
        return StepReport(
            step=step, loss=loss, grad_norm=0.5, lr=1e-3, skipped=skipped, tokens=step * batch,
            samples=((step - 1) * batch, step * batch), step_seconds=0.001, seconds={"checkpoint": 0.0},
            comm_bytes={}, peak_memory_bytes=1, world_size=self.size,
            slow=[SlowRank(rank, 2.0) for rank, w in enumerate(self.crew.seated) if w.number in self.crew.slow],
            differences=verdict, overflowed=overflowed, loss_scale=1024.0 if overflowed else None,
            held=next(reversed(self.memories.get(self.generation, ())), None),
        )  # fmt: skip

    def take_snapshot(self, step):
        assert self.state == step, "it holds the state after its last step"
        self.memories[self.generation] = [*self.memories.get(self.generation, []), step][-2:]
        self.unheld = None

    def forget(self):
        self.memories = {g: held for g, held in self.memories.items() if g == self.generation}

    def copy_state(self):
        return Copied({}, {"state": self.state})

    def write_checkpoint(self, directory):
        self.crew.writes.append(directory)

    def await_checkpoint(self, seconds):
        blocks = FileReport("blocks-00000.bin", 0, [])
        return None if self.crew.stuck or (self.crew.writing and not seconds) else blocks

    def evaluate_splits(self, samples):
        return dict.fromkeys(samples, 2.0)

    def continue_texts(self, texts, tokens, how, ends):
        return [Written([self.state] * tokens, False) for _ in texts.ids]

    def score_texts(self, texts, starts):
        return [Scored(float(self.state), True) for _ in texts.ids]

    def rank_classes(self, texts, classes, temperature):
        return ""

    def open_teacher(self):
        pass

    def leave(self):
        self.state = None


class FakeCrew(Crew):
    """`script`: call, step(3) or build -> what happens in it, one each time: {number: Dead | Hung | an exception},
    or a function of the crew that returns that or None."""

    elastic, store = True, ("nowhere", 0)

    def __init__(self, job, spares, script, nodes=1):
        self.job, self.config, self._nodes = job, job.config, nodes
        self._script = {call: list(happens) for call, happens in script.items()}
        self.workers, self.seated, self._going, self.unstarted = {}, [], set(), []
        self.findings, self.errors, self.late_clocks, self.examined = {}, {}, {}, []  # by number; of the doctor
        self.strangers, self.slow, self.corrupt, self.writes, self.calls = set(), set(), set(), [], []
        self.losses, self.verdicts = defaultdict(list), defaultdict(list)  # by step, one for each attempt
        self.overflows, self.uncompiled = set(), {}  # steps; by number, what it cannot compile and why
        self.memory, self.writing, self.stuck, self.late = None, False, False, False
        self.can_hire, self.ready, self._hired, self._starting, self.released = True, True, 0, [], 0
        self.hire_workers(job.world_size + spares)

    @property
    def ready_members_by_number(self):
        return {n: Member(n, f"n{n % self._nodes}", 1000 + n) for n in sorted(self.workers)}

    @property
    def leaving_members(self):
        return self._going & self.workers.keys()

    @property
    def starting_members(self):
        if self.ready:
            self.arrive()
        return set(self._starting)

    def dismiss_members(self, numbers):
        assert not numbers & set(self.numbers), "it has a seat"
        for number in sorted(numbers):
            self.calls.append((f"dismiss({number})", math.inf))
            del self.workers[number]

    def hire_workers(self, count):
        self._starting += range(self._hired, self._hired + count)
        self._hired += count
        if self.ready:
            self.arrive()

    def arrive(self, count=None):
        """So many of those that start get ready."""
        arrivals, self._starting = self._starting[:count], self._starting[len(self._starting[:count]) :]
        self.workers |= {number: FakeWorker(self, number) for number in arrivals}

    def assign_ranks(self, job, numbers):
        assert not self.seated and len(set(numbers)) == len(numbers) == job.world_size
        self.job, self.seated = job, [self.workers[n] for n in numbers]

    def call_ranks(self, method, *args, within=math.inf):
        name = format_call(method, args) if method == "step" else method
        self.calls.append((name, within))
        happens = (self._script.get(name) or [{}]).pop(0)
        if callable(happens):
            happens = happens(self) or {}
        failures = [self._failure(n, error, name) for n, error in happens.items() if n in self.numbers]
        if failures:
            for worker in self.seated if method == "step" else []:
                worker.forget()
            raise WorkerFailed(failures)
        assert not any(isinstance(a, ByRank) and len(a) != len(self.seated) for a in args)
        return [
            getattr(w, METHODS.get(method, method))(*arguments_of_rank(args, rank))
            for rank, w in enumerate(self.seated)
        ]

    @property
    def numbers(self):
        return [w.number for w in self.seated]

    def _failure(self, number, error, name):
        rank = self.numbers.index(number)
        kind = {Dead: "died", Hung: "hung"}.get(error, "failed")
        if kind != "failed":
            self.lose(number)
        cause = "Killed" if error is Dead else "no sign of life" if error is Hung else repr(error)
        at = self.job.coordinates[rank]
        refusal = find_refusal(error) if isinstance(error, BaseException) else ""
        return Failure(Member(number, "n", 1), kind, name, cause, rank, self.job.rank_name(rank), at, refusal=refusal)

    def lose(self, *numbers):
        for number in numbers:
            self.workers.pop(number, None)

    def give_notice(self, *numbers):
        self._going |= set(numbers)

    def release_members(self):
        gone = [w.number for w in self.seated if w.number not in self.workers]
        for worker in self.seated:
            worker.leave()
        self.seated, self.released = [], self.released + 1
        return [Failure(Member(n, "n", 1), "died", "", "") for n in gone]

    def close(self):
        pass
