"""Loading of the user's own code: the driver and every worker import the modules named in `extend=[my_module]`.

While it is imported, such a module may call `platform.model.register_model`, `platform.model.losses.register_loss`,
`platform.data.sources.register_source` and `register_documents`, `platform.data.objectives.register_objective`,
`platform.optimizer.optimizers.register_optimizer`, `platform.optimizer.learning_rate.register_schedule` and
`platform.planning.choose_schedule.register_pipeline`. Tensor schemes are configuration files, which `--config-dir`
adds.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from platform.config.fields import violation


def load_extensions(modules: Sequence[str]) -> list[str]:
    """Import the user's modules that `extend` names, which register models, sources and the like; return one refusal
    line for each that cannot be imported."""
    lines = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # user code may raise anything
            reason = f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
            lines.append(violation("extend", name, reason))
    return lines
