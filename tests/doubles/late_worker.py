"""Workers on CPUs that take snapshots as on GPUs, beside the next step, in memory that they share with nobody."""

from __future__ import annotations

import os
import signal
import time

from platform.checkpoint.snapshots import SharedMemory
from platform.train.worker import Worker

STEP, SECONDS = 4, 3.0


class LateWorker(Worker):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.late, SharedMemory.open_address = True, staticmethod(lambda address: None)  # type: ignore[method-assign]


class AheadWorker(LateWorker):
    """Launches passes of the next step before it reads the numbers of a step, as on GPUs."""

    def step(self, step, *more):
        self.trainer.updates_early = self.trainer.runs_ahead = True
        return super().step(step, *more)


class KilledWorker(AheadWorker):
    """Member 1 is killed when the order of step 4 comes, whose passes are there already."""

    def step(self, step, *more):
        if step == STEP and self.number == 1:
            assert self.trainer._ahead.step == step
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(step, *more)


class DyingWorker(LateWorker):
    """Member 1 is killed in step 4, when it has posted what it sends of step 3 and receives nothing."""

    def step(self, step, *more):
        if step == STEP and self.number == 1:
            group = self.communicator._beside

            def transfer(sent, received):
                assert sent, "there is something to send"
                for peer, x in sent:
                    group.send([x], peer, 0)
                os.kill(os.getpid(), signal.SIGKILL)

            self.communicator.transfer = transfer
        return super().step(step, *more)


class HungWorker(LateWorker):
    """Member 1 hangs in the forward pass of step 4; the thread of each other member, then itself, waits for it."""

    def step(self, step, *more):
        if step == STEP and self.number == 1:
            self.communicator.transfer = lambda *_: time.sleep(1000)
            self.trainer._run_forward_backward = lambda step: time.sleep(1000)
        return super().step(step, *more)


class SlowWorker(LateWorker):
    """Every transfer takes longer than a blocked worker may; nobody is to blame for that."""

    def step(self, step, *more):
        transfer = type(self.communicator).transfer.__get__(self.communicator)

        def slowly(*arguments):
            time.sleep(SECONDS * (step == STEP))
            transfer(*arguments)

        self.communicator.transfer = slowly
        return super().step(step, *more)
