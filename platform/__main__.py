"""Entry point of `python -m platform`, which prints what the standard library's module prints."""

import runpy

import platform

runpy.run_path(platform.__file__, run_name="__main__")
