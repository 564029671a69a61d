"""Code of the user's own: whatever it raises is an error of its own, and what never comes back is ended."""

import re
import signal
import subprocess
import sys
import time

import pytest

from platform.boundary.refusals import OwnCodeError, guard_user_code
from platform.cluster.crew.signals import Stopped


class Odd(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit(0)


RAISED = {
    "raises SystemExit: 0": SystemExit(0),
    "raises SystemExit: bye": SystemExit("bye"),
    "raises GeneratorExit:": GeneratorExit(),
    "raises Odd: a b": Odd("a\nb"),
    "raises Unprintable, whose text raises an error too": Unprintable(),
    "raises ValueError: no": ValueError("no"),
}


@pytest.mark.parametrize("text", RAISED)
def test_whatever_is_raised_is_an_error_in_one_line(text):
    with pytest.raises(OwnCodeError) as error, guard_user_code("mine"):
        raise RAISED[text]
    assert str(error.value) == text


@pytest.mark.parametrize("error", [Stopped("SIGTERM"), KeyboardInterrupt()])
def test_a_stop_passes(error):
    with pytest.raises(type(error)), guard_user_code("mine"):
        raise error


def test_an_interrupt_of_its_own_is_none_of_ours():
    previous = signal.signal(signal.SIGINT, lambda *_: None)  # as while a run is planned
    try:
        with pytest.raises(OwnCodeError, match="raises KeyboardInterrupt"), guard_user_code("mine"):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def test_errors_that_are_named_pass_unchanged():
    with pytest.raises(OSError, match="disk"), guard_user_code("mine", (OSError,)):
        raise OSError("disk")


HANGS = """
import logging, time
from platform.boundary import refusals as own_code
own_code.REPORT_AFTER = 0.2
def loop():
    while True:
        try:
            {body}
        except Exception:
            pass
with own_code.guard_user_code("extend=mine", limit=0.6):
    loop()
"""


@pytest.mark.parametrize("body", ["pass", "time.sleep(1000)"])
def test_what_never_comes_back_is_told_and_ended(body, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS.format(body=body))
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "hangs.py")], capture_output=True, text=True, timeout=120, check=False
    )
    assert time.monotonic() - start < 100 and done.returncode == 1
    assert re.search(r"extend=mine: still runs after 0\.\d+ s, at hangs\.py:\d+;", done.stderr)
    assert "OwnCodeError: does not come back: ended after 0.6 s, at hangs.py:" in done.stderr


ENDS = """
import os, threading
from platform.boundary import refusals as own_code
with own_code.guard_user_code("extend=mine"):
    if not (child := os.fork()):
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3, "a fork of the user's own ends as it likes"
try:
    with own_code.guard_user_code("extend=mine"), own_code.guard_user_code("data.kind=mine"):
        os._exit(0)
except own_code.OwnCodeError as error:
    assert str(error).endswith("raises SystemExit: os._exit(0)"), error
with own_code.guard_user_code("extend=mine"):
    threading.Thread(target=lambda: os._exit(7)).start()  # such as one that finds its driver gone
    threading.Event().wait(30)
"""


def test_only_the_guarded_code_itself_cannot_end_the_process(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    done = subprocess.run([sys.executable, str(tmp_path / "ends.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
