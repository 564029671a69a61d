"""Recoveries that are wrong on purpose: what the comparison of a run with an undisturbed one must find."""

import torch

from platform.train.state_recovery import MemorySource
from platform.train.worker import Worker


class StaleWorker(Worker):
    """Recovers the step before the one that it is asked for."""

    def recover_state(self, source: MemorySource):
        for memory in self.memories.values():
            for snapshot in memory._places.values():
                snapshot._step += torch.tensor([1, 0])
        super().recover_state(source)


class ForgetfulWorker(Worker):
    """Recovers the parameters without the optimizer's moments."""

    def recover_state(self, source: MemorySource):
        super().recover_state(source)
        for state in self.trainer.optimizer.state.values():
            state["exp_avg"].zero_()
