"""An extension that makes steps last as long as a test needs to do something to the run:
`extend=[tests.doubles.slow_steps]`, with seconds in the environment variable STEP_SECONDS."""

from __future__ import annotations

import os
import time
from functools import wraps
from typing import Any

from platform.train.worker import Worker

_step = Worker.step


@wraps(_step)  # the host reads the types of a call's arguments from the method
def _slow(self: Worker, *args: Any, **kwargs: Any) -> Any:
    time.sleep(float(os.environ["STEP_SECONDS"]))
    return _step(self, *args, **kwargs)


Worker.step = _slow  # type: ignore[method-assign]
