"""Module `platform` of a process that has no import hook, found before the standard library's by PYTHONPATH.

It gives its name to the package `platform` that lies beside `elastic_platform`, which extends the standard library's
module as everywhere (`platform/__init__.py`). It needs no other module of ours: it may be imported before site-packages
are all on sys.path.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import abspath, dirname

_spec = PathFinder.find_spec("platform", [dirname(dirname(dirname(abspath(__file__))))])
assert _spec is not None and _spec.loader is not None
sys.modules["platform"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["platform"])  # it puts the standard library's module in its own place

if __name__ == "__main__":  # `python -m platform`
    import runpy

    runpy.run_module("platform", run_name="__main__", alter_sys=True)
