import subprocess
import sys
from time import monotonic

from platform.cluster import shown_commands
from platform.cluster.shown_commands import PHASES, PhaseTimes
from platform.monitor import events


def test_every_phase_has_a_field_and_every_event_of_one_exists():
    assert list(events.Timing(**dict.fromkeys(PHASES, 1.0)).own_fields()) == list(PHASES)
    assert (
        shown_commands._EVENTS.keys() <= events.EVENTS.keys() and set(shown_commands._EVENTS.values()) <= PHASES.keys()
    )


def test_the_first_time_counts_and_of_the_last_step_the_last(monkeypatch):
    clock = iter(range(100, 200))
    monkeypatch.setattr(shown_commands, "monotonic", lambda: float(next(clock)))
    times = PhaseTimes(99.0)
    times.reach_phase("composed")
    times.reach_phase("first_process", 100.5)
    for word in ("forming", "formed", "running", "first_step", "failure", "forming", "formed"):
        times.note_event(word)  # the clock is read again, and what is known stays
    times.note_last_step()
    times.note_last_step()
    assert times.seconds == {
        "composed": 1.0, "first_process": 1.5, "ready": 2.0, "formed": 3.0, "running": 4.0, "first_step": 5.0,
        "last_step": 9.0,
    }  # fmt: skip
    shown = shown_commands.phase_table(times.seconds).splitlines()
    assert [line.split()[:3] for line in shown[1:3]] == [
        ["1.00", "1.00", "composed:"],
        ["0.50", "1.50", "first_process:"],
    ]
    assert shown[-1].split()[:3] == ["4.00", "9.00", "last_step:"]


def test_a_command_starts_with_its_process():
    code = (
        "import time; time.sleep(0.5); from platform.cluster.shown_commands import monotonic_command_start; "
        "print(monotonic_command_start())"
    )
    before = monotonic()  # Linux has one such clock for all processes
    start = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert before - 0.05 <= start and monotonic() - start > 0.45, "the kernel counts in hundredths"
