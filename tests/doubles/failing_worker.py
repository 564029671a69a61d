"""A worker that fails in the middle of a step, at one action of its row."""

import os
import signal

from platform.runtime import pipeline
from platform.train.worker import Worker

STEP = 2


def injected():
    raise ValueError("injected")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES = {"exception": injected, "kill": kill}


def fail_at(action, failure):
    """Return what `pipeline._ACTIONS` becomes so that the rank that has the action fails where it would run it."""

    def failing(run):
        return lambda rows, step: failure() if step.name == action else run(rows, step)

    return {kind: failing(run) for kind, run in pipeline._ACTIONS.items()}


class FailingWorker(Worker):
    """Fails in step 2 as $FAIL says: "kill 1SEND_F2"."""

    def step(self, step, *more):
        if step == STEP:
            how, action = os.environ["FAIL"].split()
            pipeline._ACTIONS = fail_at(action, FAILURES[how])
        return super().step(step, *more)


class KilledWorker(Worker):
    """Member 1 is killed in step 2, where the others wait for its gradients."""

    def step(self, step, *more):
        if step == STEP and self.number == 1:
            self.trainer._run_forward_backward = lambda step: kill()
        return super().step(step, *more)
