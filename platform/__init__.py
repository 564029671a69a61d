"""Python's own `platform` module with our submodules beside it; define nothing here.

Importing this package replaces it in `sys.modules` by the standard library's module object, given a `__path__`
that holds our directory: `platform.system()` keeps working for everybody, and `platform.launch` is found.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from os.path import dirname, join

_file = join(dirname(sys.modules["os"].__file__ or ""), "platform.py")
_spec = spec_from_file_location("platform", _file, submodule_search_locations=list(__path__))
assert _spec is not None and _spec.loader is not None
_std = sys.modules[__name__] = module_from_spec(_spec)
_spec.loader.exec_module(_std)  # uses the standard library's cached .pyc
