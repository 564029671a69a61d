"""What a command does with its terminal, and at its end."""

import subprocess
import sys


def test_a_quick_exit_does_what_is_registered_and_frees_nothing():
    code = """
import atexit, sys
from platform.boundary.terminal import QuickExit
class Loud:
    def __del__(self):
        print("freed")
at_exit, kept = QuickExit(), Loud()
atexit.register(print, "registered")
at_exit.status = STATUS
print("printed", end=" ")
sys.exit(3)
"""
    for status, shown in ((7, "printed registered\n"), (None, "printed registered\nfreed\n")):
        line = [sys.executable, "-c", code.replace("STATUS", str(status))]
        done = subprocess.run(line, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (3 if status is None else status, shown), done.stderr
