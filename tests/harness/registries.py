"""What a user's module registers in this process, taken back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from platform.config import fields
from platform.config.extensions import OWN_SETTINGS
from platform.config.fields import LOSS_OF, OBJECTIVES, WEIGHTED
from platform.data import objectives
from platform.model.losses import LOSSES
from platform.optimizer.learning_rate import SCHEDULES
from platform.optimizer.optimizers import OPTIMIZERS

TABLES = (
    *(LOSSES, LOSS_OF, OBJECTIVES, objectives.OBJECTIVES, fields.KEYS),
    *(OWN_SETTINGS, SCHEDULES, OPTIMIZERS),
)


@contextmanager
def as_before(*modules: str) -> Iterator[None]:
    """Take back what is registered of objectives, losses, optimizers and their settings within the context; forget
    `modules` of the user's, before it too, as other tests import some of the same names."""
    before, weighted = [dict(table) for table in TABLES], set(WEIGHTED)
    for name in modules:
        sys.modules.pop(name, None)
    try:
        yield
    finally:
        for table, was in zip(TABLES, before, strict=True):
            table.clear()
            table.update(was)
        WEIGHTED.intersection_update(weighted)
        for name in modules:
            sys.modules.pop(name, None)
