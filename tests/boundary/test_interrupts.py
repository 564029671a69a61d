"""Ctrl-C and SIGTERM end a command in one line with a status of their own, from its first import on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from platform.boundary.interrupts import COMMANDS, ENDING, STATUS, Interrupted, run_interruptible

# Sends this process a signal as soon as a module is looked for.
SITE = """
import os, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["AT_MODULE"]:
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
sys.meta_path.insert(0, Finder)
"""
IMPORTING = [(command, "platform.boundary.redaction") for command in COMMANDS]
RUNNING = [
    ("generate", "platform.config.composition"),
    ("evaluate", "platform.cluster.answer_scores"),
    ("plan", "hydra"),
]


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [(*case, number) for case in [*IMPORTING, *RUNNING] for number in (signal.SIGINT, signal.SIGTERM)]
    + [(*RUNNING[-1], number) for number in (signal.SIGHUP, signal.SIGXCPU)],
)
def test_a_command_that_is_stopped(command, module, number, tmp_path, root):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    more = {"PYTHONPATH": f"{tmp_path}:{root}", "AT_MODULE": module, "NUMBER": str(int(number))}
    line = [sys.executable, "-m", f"platform.{command}", "x"]
    done = subprocess.run(line, env={**os.environ, **more}, capture_output=True, text=True, timeout=120)
    assert done.returncode == STATUS[number], done.stderr
    assert (done.stdout, done.stderr) == ("", f"stopped by {number.name}; the same command does it anew\n")


LACKS = """
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("hydra", "numpy", "fsspec", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("has_environment", [True, False])
@pytest.mark.parametrize("command", ["launch", "generate", "weights"])
def test_a_command_without_its_packages_says_how_to_come_by_them(command, has_environment, tmp_path, root):
    """As in a fresh checkout, with the python of the system."""
    (tmp_path / "platform").symlink_to(root / "platform")
    (tmp_path / "Makefile").touch()
    if has_environment:
        (tmp_path / ".venv").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LACKS)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{tmp_path}"}
    line = [sys.executable, "-m", f"platform.{command}", "x", "y"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    activate = f"source {tmp_path}/.venv/bin/activate"
    cure = activate if has_environment else f"`make train` in {tmp_path}, then {activate}"
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("No module named '")
    assert done.stderr.endswith(f"': this python, {sys.executable}, is not set up: {cure}\n")


def test_what_was_begun_is_tidied_up_and_handlers_return(capfd):
    before, tidied = [signal.getsignal(number) for number in STATUS], []

    def command() -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            tidied.append(True)
        return 0

    assert run_interruptible(command) == 75 and tidied
    assert [signal.getsignal(number) for number in STATUS] == before
    assert capfd.readouterr().err == "stopped by SIGTERM; the same command does it anew\n"
    assert not issubclass(Interrupted, Exception)


# Sends this process signals once the command has its exit status.
LATE = """
import atexit, os, signal, sys
def late():
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
atexit.register(late)
class AtTheVeryEnd:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGTERM):
        kill(me, number)
sys.last_of_all = AtTheVeryEnd()
"""


@pytest.mark.parametrize("word, status", [("+experiment=gpt_quick", 0), ("x", 2)])
def test_a_signal_after_the_end_does_not_replace_the_status(word, status, tmp_path, root):
    (tmp_path / "sitecustomize.py").write_text(LATE)
    done = subprocess.run(
        [sys.executable, "-m", "platform.plan", word],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, (done.stdout, done.stderr)
    assert "stopped by" not in done.stderr


def test_all_signals_that_end_a_process_are_known():
    """Each of the system's signals in a process of its own that handles none: it ends it, or is none of ours."""
    ends = set()
    for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if not (child := os.fork()):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(0)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        elif os.WIFSIGNALED(status):
            ends.add(number)
    faults = "ABRT BUS FPE ILL SEGV SYS TRAP".split()
    own = {signal.Signals[f"SIG{name}"] for name in [*faults, "ALRM", "PROF", "VTALRM", "RTMIN", "RTMAX"]}
    assert {*ENDING} == ends - own


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_interruptible(lambda: signal.raise_signal(signal.SIGINT) or 7) == 7
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_only_imports_the_package_keeps_its_signals(root):
    code = "import signal, platform.launch; assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
