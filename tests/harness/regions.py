"""The compiled regions of a run: which functions it calls, with which tensors, seen on a card that is not there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from platform.config.fields import Config
from platform.parallel import parallel_ops
from tests.harness.ahead import Call, call_of
from tests.harness.card import alone
from tests.harness.oracle import validation_loss


def calls_of(c: Config, ranks: Sequence[int]) -> dict[Call, None]:
    """The calls, each once, of a step and an evaluation on some ranks that compile."""
    found: dict[Call, None] = {}

    def region(function):
        def run(*arguments):
            found[call_of(function, arguments)] = None
            return function(*arguments)

        return run

    c.train.compile = "on"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_ops, "region", region)
        for rank in ranks:
            with alone(c, rank, []) as trainer:
                trainer.step(1)
                validation_loss(trainer)
    return found
