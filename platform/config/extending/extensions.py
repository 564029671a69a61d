"""Loading of the user's own code: the driver and every worker import the modules named in `extend=[my_module]`.

While it is imported, such a module may call the `register_*` functions of `platform.api`. Tensor schemes are
configuration files, which `--config-dir` adds.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

from platform.boundary.own_code import OwnCodeError, own_code
from platform.boundary.refusals import ConfigError, violation
from platform.config.extending.moved_imports import find_moved


def load_extensions(modules: Sequence[str]) -> list[str]:
    """Import the user's modules that `extend` names, which register models, sources and the like; return one refusal
    line for each that cannot be imported. It names the new import where a module uses a path of before."""
    lines = []
    for name in modules:
        try:
            with own_code(f"extend={name}"):
                importlib.import_module(name)
        except OwnCodeError as error:
            if found := find_moved(error.__cause__):
                lines.append(violation("extend", name, f"{found[0]}, which has moved", [found[1]]))
                continue
            lines.append(violation("extend", name, f"cannot be imported ({str(error).removeprefix('raises ')})"))
    return lines


@contextmanager
def refusing_exits() -> Iterator[None]:
    """Raise ConfigError in place of a SystemExit, or anything else that is no Exception, from the user's own code."""
    try:
        with own_code("extend", (Exception,), inf):
            yield
    except OwnCodeError as error:
        raise ConfigError(f"extend: code of your own {error}") from error
