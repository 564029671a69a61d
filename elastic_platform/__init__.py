"""The package `platform` by a name of its own, for whoever wants no import hook in every interpreter.

Importing this package makes `import platform.launch` work in this process and in all that it starts, without the hook
of `platform/_startup.py`: the folder `children`, which has nothing but a module `platform` in it, comes first on
sys.path and in PYTHONPATH. Where the hook is there, both stay as they are. `elastic_platform.NAME` is the module object
`platform.NAME`, so that no module is there twice.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

HOME, NAME = os.path.split(os.path.dirname(os.path.abspath(__file__)))
CHILDREN = os.path.join(HOME, NAME, "children")


class Alias:
    """Finder and loader of Python's import system that finds the module `platform.NAME` as `elastic_platform.NAME`."""

    def __init__(self, spec: ModuleSpec):
        """Construct the loader of another name for the module of the import spec `spec`."""
        self._spec = spec

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the import spec of `platform.NAME` for the name `elastic_platform.NAME`, None for any other name."""
        package, _, rest = name.partition(".")
        if package != NAME or rest in ("", "__main__"):
            return None
        spec = find_spec(f"platform.{rest}")
        if spec is None:
            return None
        packaged = spec.submodule_search_locations is not None
        return ModuleSpec(name, Alias(spec), origin=spec.origin, is_package=packaged)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name, and return that very object."""
        return import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has run already, its own spec back, which the import system has just replaced."""
        module.__spec__ = self._spec

    def get_code(self, name: str) -> CodeType:
        """Return the module's code, which `python -m elastic_platform.NAME` runs."""
        loader: Any = self._spec.loader
        code: CodeType = loader.get_code(self._spec.name)
        return code


def install() -> None:
    """Install the names of this package in this process: `elastic_platform.NAME` and, if there is no import hook,
    `platform.NAME`, which then holds in the processes that this one starts too."""
    sys.meta_path.insert(0, Alias)
    if "_platform_startup" in sys.modules:  # the hook is in every interpreter
        return
    if CHILDREN not in sys.path:
        sys.path.insert(0, CHILDREN)
    inherited = os.environ.get("PYTHONPATH", "")
    if CHILDREN not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN, inherited]))
    std = sys.modules.get("platform")
    if std is not None and not hasattr(std, "__path__"):  # somebody imported the standard library's module first
        spec = PathFinder.find_spec("platform", [HOME])
        assert spec is not None and spec.submodule_search_locations is not None
        std.__spec__, std.__path__ = spec, spec.submodule_search_locations


install()
