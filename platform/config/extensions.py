"""The user's own code without a fork: `extend=[my_module]` is imported by the driver and by every worker.

What such a module may call while it is imported: `platform.model.register_model`,
`platform.data.sources.register_source`, `platform.optimizer.optimizers.register_optimizer`,
`platform.optimizer.learning_rate.register_schedule` and `platform.planning.choose_schedule.register_pipeline`. Tensor
schemes, like every other configuration file, go by --config-dir.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from platform.config.fields import violation


def load_extensions(modules: Sequence[str]) -> list[str]:
    """Imports the modules; one line for each that cannot be."""
    lines = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # it is the user's code: anything may go wrong
            reason = f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
            lines.append(violation("extend", name, reason))
    return lines
