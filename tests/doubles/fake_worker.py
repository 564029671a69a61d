"""Workers with the interface of platform.train.worker.Worker that compute nothing and fail on request."""

import json
import math
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from platform.checkpoint.manifest import FileReport
from platform.config.fields import SentConfig
from platform.runtime.progress import PROGRESS
from platform.train.replies import AskedTexts, Built, Copied, Joined, StepReport, Taken, Written


def faults_again():
    """The pages that the kernel gives this process anew for memory that it has just freed: 96 MB, 24,576 pages."""
    pieces = lambda: [b"x" * (24 << 20) for _ in range(4)]  # noqa: E731
    pieces()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class FakeWorker:
    """Also keeps a collective's habit: on `step`, every rank waits for the others in the driver's store."""

    def __init__(self, config, number, *, device, run_dir, threads):
        self.number, self.run_dir = number, Path(run_dir)
        self.device, self.threads, self.config = device, threads, config

    def prove_environment(self, probe):
        from platform.train.environment_proof import describe_environment

        return describe_environment(self.config, self.run_dir, probe)

    def join_mesh(self, rank, world_size, config: SentConfig, store, generation, stage_of, plan=""):
        self.rank, self.world_size, self.config = rank, world_size, config
        tcp = TCPStore(store[0], store[1], is_master=False)
        self.store = PrefixStore(f"generation/{generation}", tcp)
        self._meet("form")
        return Joined(rank, {"data": rank}, os.getpid(), socket.gethostname())

    def build_trainer(self, rows, domains=(), corpus="", reach=None, fresh=True):
        return Built(42, "cpu", None, ["exp_avg", "exp_avg_sq"])

    def step(self, step, limit=math.inf, faults=()):
        """As of all ranks together."""
        self._meet(f"step {step}")
        first = (step - 1) * 4
        report = StepReport(
            step=step,
            loss=1.0 / step,
            grad_norm=0.5,
            lr=1e-3,
            skipped=False,
            tokens=step * 4 * self.config.model.length,
            samples=(first, first + 4),
            step_seconds=0.001,
            seconds={"forward": 0.25, "data": 0.0, "checkpoint": 0.0},
            comm_bytes={"all_reduce/data": 21},
            peak_memory_bytes=101,
            world_size=self.world_size,
            slow=[],
            held=None if step % (self.config.elastic.snapshot_every or step + 1) else step,
        )
        return report if self.rank == 0 else Taken(step)

    def evaluate_splits(self, samples):
        return dict.fromkeys(samples, 2.0)

    def copy_state(self):
        return Copied({}, {})

    def write_checkpoint(self, directory):
        folder = Path(self.config.run.dir, "checkpoints", directory)
        folder.mkdir(exist_ok=True, parents=True)
        (folder / f"blocks-{self.rank:05}.bin").touch()

    def await_checkpoint(self, seconds):
        return FileReport(f"blocks-{self.rank:05}.bin", 0, [])

    def restore_checkpoint(self, directory, own):
        return None

    def continue_texts(self, texts: AskedTexts, tokens, how, ends):
        return [Written([1] * tokens, False) for _ in texts.ids]

    def abort(self):
        pass

    def leave(self):
        self.store = None

    def close(self):
        print("closed", flush=True)

    # what only the tests call

    def place(self):
        names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS"]
        place = {name: os.environ.get(name) for name in names}
        return place | {"pid": os.getpid(), "number": self.number, "threads": self.threads, "faults": faults_again()}

    def add(self, a, b):
        os.write(1, b"from below Python\n")
        return a + b + self.rank

    def fail(self, rank):
        """`rank` fails; the others hang as in a collective."""
        if self.rank == rank:
            raise ValueError(f"boom on {rank}")
        self._meet("nowhere")

    def hang(self, rank):
        """`rank` hangs by itself; the others wait for it."""
        if self.rank == rank:
            time.sleep(1000)
        self._meet("nowhere")

    def dawdle(self, rank):
        """`rank` takes long, in small pieces; the others wait for it."""
        if self.rank == rank:
            for i in range(20):
                PROGRESS.enter_section(f"piece {i}")
                time.sleep(0.1)
        self._meet("dawdle")

    def stop(self, rank):
        """`rank` is stopped as a whole; the others wait for it."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        self._meet("nowhere")

    def lose(self, rank):
        """`rank` dies a moment after the others have noticed that it is gone."""
        if self.rank == rank:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    def _meet(self, where):
        self.store.set(f"{where}/{self.rank}", b"")
        everybody = [
            *(f"{where}/{rank}" for rank in range(self.world_size)),
            *(["never"] if where == "nowhere" else []),
        ]
        with PROGRESS.mark_waiting("meeting"):
            self.store.wait(everybody)


class Prints(FakeWorker):
    """At any time, and much, through Python and below it."""

    def join_mesh(self, rank, *args):
        return Joined(rank, {}, os.getpid(), "here")

    def speak(self):
        for stream in (sys.stdout, sys.stderr):
            print("x" * 10000, file=stream, flush=True)
        os.system("echo from below Python")
        return "spoken"


class Slow(FakeWorker):
    """Each step takes a while, and says so."""

    def step(self, step, *args):
        (self.run_dir / f"rank-{self.rank}-in-step").write_text(json.dumps({"step": step, "pid": os.getpid()}))
        time.sleep(0.2)
        return super().step(step, *args)


class FailsInStep3(FakeWorker):
    """Rank 1 fails in step 3, while the others wait for it."""

    def step(self, step, *args):
        if step == 3 and self.rank == 1:
            raise ValueError("boom")
        return super().step(step, *args)


class KilledInStep3(FakeWorker):
    """Member 1 is, while the others wait for it."""

    def step(self, step, *args):
        if step == 3 and self.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(step, *args)


class FailsInStep1(FakeWorker):
    def step(self, step, *args):
        raise ValueError("boom")


class FailsToStart(FakeWorker):
    def __init__(self, config, number, **keywords):
        if number == 1:
            raise MemoryError("no room")
        super().__init__(config, number, **keywords)


class OnAnotherNode(FakeWorker):
    """Rank 1 has another disk than the driver, and another checkout."""

    def prove_environment(self, probe):
        if self.number == 0:
            return super().prove_environment(probe)
        self.run_dir = self.run_dir / "of-another-node"
        self.config.run.dir = str(self.run_dir)
        proof = super().prove_environment(probe)
        return replace(proof, node="n2", code={"platform": "0123"})
