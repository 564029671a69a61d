"""Import hook that makes `import platform` find this package before the standard library's module, from any directory.

The build installs this file as the top-level module `_platform_startup`; a one-line .pth runs it at every interpreter
start, so it must stay cheap: it only puts a finder in front of `sys.meta_path`, which acts on no name but `platform`.
"""

import sys


class PlatformFirst:
    """Finder of Python's import system that finds `platform` in the first folder of sys.path that has this package."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the import spec of this package for the name `platform`, None for any other name or if it is
        nowhere."""
        if name != "platform":
            return None
        from importlib.machinery import PathFinder  # imported here to keep interpreter start cheap
        from os.path import isfile, join

        for entry in sys.path:
            if isfile(join(entry, "platform", "launch.py")):  # launch.py identifies our package
                return PathFinder.find_spec(name, [entry])
        return None


def install():
    """Install this package's import hook: put its finder in front of sys.meta_path; extend the standard library's
    `platform`, if it is imported already, with this package's submodules."""
    sys.meta_path.insert(0, PlatformFirst)
    std = sys.modules.get("platform")
    if std is not None and not hasattr(std, "__path__"):  # another .pth imported it first
        spec = PlatformFirst.find_spec("platform")
        if spec is not None:
            std.__spec__, std.__path__ = spec, spec.submodule_search_locations
