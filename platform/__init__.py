"""Commands that users type, a file each, and `api`, which offers them to Python. `launch` composes the configuration of
a job, plans and trains it; `tune` chooses how a model is tuned, and
launches that; `generate` and `evaluate` ask a trained model; `doctor` examines the workers of a run.

Define nothing here: this package extends Python's own `platform` module with its submodules. Importing it replaces it
in `sys.modules` with the standard library's module object, whose `__path__` is set to this directory:
`platform.system()` keeps working for all other code, and `platform.launch` can be imported. Its `__spec__` stays this
package's, so that tools which look for the package by its spec (import-linter) find it. `__init__.pyi` says the same to
type checkers.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from os.path import dirname, join

_file = join(dirname(sys.modules["os"].__file__ or ""), "platform.py")
_spec = spec_from_file_location("platform", _file, submodule_search_locations=list(__path__))
assert _spec is not None and _spec.loader is not None
_std = sys.modules[__name__] = module_from_spec(_spec)
_spec.loader.exec_module(_std)  # loads the standard library's cached .pyc
_std.__spec__ = __spec__

if sys.argv[:1] == ["-m"]:  # `python -m platform.NAME` looks for its module
    import platform.boundary.interrupts

    platform.boundary.interrupts.watch_imports()
