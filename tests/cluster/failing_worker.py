"""A worker that fails in the middle of a step, at one action of its row."""

import os
import signal

from platform.parallel.pipeline import Pipeline
from platform.train.worker import Worker

STEP = 2


def injected():
    raise ValueError("injected")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES = {"exception": injected, "kill": kill}


def fail_at(action, failure):
    """What `Pipeline.__post_init__` becomes so that the rank that has the action fails where it would run it."""
    made = Pipeline.__post_init__

    def post_init(self):
        made(self)
        self._actions = {kind: lambda a, run=run: failure() if str(a) == action else run(a)
                         for kind, run in self._actions.items()}  # fmt: skip

    return post_init


class FailingWorker(Worker):
    """Fails in step 2 as $FAIL says: "kill 1SEND_F2"."""

    def step(self, step, *more):
        if step == STEP:
            how, action = os.environ["FAIL"].split()
            Pipeline.__post_init__ = fail_at(action, FAILURES[how])
        return super().step(step, *more)


class KilledWorker(Worker):
    """Member 1 is killed in step 2, where the others wait for its gradients."""

    def step(self, step, *more):
        if step == STEP and self.number == 1:
            self.trainer._forward_backward = lambda step: kill()
        return super().step(step, *more)
