"""`elastic-platform COMMAND [arguments]` is `python -m platform.COMMAND [arguments]`, with or without the import hook.

`python -m elastic_platform COMMAND` is the same.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

from elastic_platform import CHILDREN

OTHERS = ("monitor.sinks",)  # which a run prints; it is no command of which signals make one line


def main() -> int:
    """Run the command that this process's first argument names, on the others; return its exit status."""
    from platform.boundary.interrupts import COMMANDS, exit_on_signal
    from platform.boundary.terminal import QuickExit

    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(f"usage: elastic-platform COMMAND [arguments]\n\ncommands: {', '.join(COMMANDS)}; each has a --help")
        return 0
    if name in COMMANDS:
        exit_on_signal()
    elif name not in OTHERS:
        return _refuse(name)
    _see_working_directory()
    spec = find_spec(f"platform.{name}")
    assert spec is not None
    packaged = spec.submodule_search_locations is not None
    module = import_module(f"platform.{name}.__main__" if packaged else f"platform.{name}")
    sys.argv[:2] = [str(module.__file__)]
    is_quick = name in ("launch", "tune")  # as each is by `python -m`
    return QuickExit().run(module.main) if is_quick else int(module.main())


def _refuse(name: str) -> int:
    """Print in one line on stderr that `name` is no command, and return the exit status of a mistake."""
    from platform.boundary.interrupts import COMMANDS
    from platform.boundary.refusals import REFUSED, closest_values
    from platform.boundary.terminal import print_refusals

    wrong = f"{name}: no command" if name else "it needs a command"
    print_refusals("elastic-platform", [f"{wrong}; nearest legal: {', '.join(closest_values(name, COMMANDS))}"])
    return REFUSED


def _see_working_directory() -> None:
    """Let the working directory's modules be found, as `python -m` does, for `extend=[my_module]`."""
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & {*sys.path}:
        sys.path.insert(sys.path[:1] == [CHILDREN], here)


if __name__ == "__main__":
    sys.exit(main())
