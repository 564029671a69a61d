"""Lines that a run prints for the user: command lines, each of which works when pasted into the shell of the same
directory; and the phases of its start and end with their times, the breakdown that `monitor.timing` asks for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from pathlib import Path
from time import monotonic

from platform.boundary.redaction import REDACTED, redact_secrets
from platform.boundary.refusals import typed_command
from platform.config.fields import Config
from platform.config.groups import RESUME

_LAYOUTS = {"1d": "t", "1d_sp": "t", "3d": "xyz", "2d": "rc", "serial": ""}  # scheme -> axes, best suggestion first
_MOST = 4  # combinations of axis sizes that are tried for one scheme, besides the experiment's own
_PLACES = ("run.dir", "checkpoint.url")  # another layout's run writes to other ones
_SECRET = f"  # {REDACTED} stands for a secret: type it again"


@dataclass(frozen=True)
class Command:
    """Command line that started this run, from which those printed for the user are made. `arguments`: Hydra overrides;
    `config_dir`: the user's own folder of configurations; `workers(arguments)`: the number of workers that a command
    with these arguments would run on, 0 if it would be refused."""

    arguments: Sequence[str] = ()
    config_dir: str | None = None
    workers: Callable[[Sequence[str]], int] = lambda arguments: 0

    def resume_line(self, override: str = "") -> str:
        """Return the command that continues this run: its own, with `override` (KEY=VALUE, or "") for the same key."""
        others = [argument for argument in self.arguments if _argument_key(argument) != _argument_key(override)]
        return self._format_line([*others, override] if override else others)

    def line_with_values(self, typed: Sequence[str]) -> str:
        """Return the command that starts this run with other values: `typed` (KEY=VALUE) in place of its own."""
        return self._format_line(replace_values(self.arguments, typed))

    def suggest_other_layout(self, config: Config, workers: int) -> str:
        """Return a command line that trains the same model on the same data under another tensor scheme, on `workers`
        workers, and so computes the same numbers, in a run directory of its own; "" if no other scheme fits. Suggested
        to the user at the end of a run."""
        present = config.tensor.scheme
        names = ["1d_sp"] * (present == "1d") + [name for name in _LAYOUTS if name != present]
        for name in dict.fromkeys(names):
            moved = list(_arguments_for_scheme(self.arguments, name))
            for axes in islice(_axis_size_overrides(_LAYOUTS[name], prod(config.tensor.axes.values())), _MOST + 1):
                chosen = [*moved, f"tensor={name}", *axes]
                if self.workers(chosen) == workers:
                    return self._format_line(chosen)
        return ""

    def _format_line(self, arguments: Iterable[str]) -> str:
        """Format the run's command line with these arguments for the user's shell, quoted, and with secrets hidden."""
        folder_words = ["--config-dir", self.config_dir] if self.config_dir else []
        words = [*folder_words, *map(_printable_argument, arguments)]
        secret = any(word.endswith(f"={REDACTED}") for word in words)
        return f"{typed_command('launch')} {shlex.join(words)}" + (_SECRET if secret else "")


def replace_values(arguments: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return a run's arguments with others, `typed`, in the place of those for the same keys and groups."""
    keys = {_argument_key(argument) for argument in typed}
    return [*(a for a in arguments if not {_argument_key(a), _argument_key(a).partition(".")[0]} & keys), *typed]


def _argument_key(argument: str) -> str:
    """Return the configuration key of an argument of a run's command line, such as "+train.steps=5"."""
    return argument.partition("=")[0].lstrip("+")


def _printable_argument(argument: str) -> str:
    """Return an argument of a run's command line fit to be printed: if it contains a secret, with a reference to the
    environment variable that the secret came from, else with REDACTED as its value."""
    shown = redact_secrets(argument)
    hidden = REDACTED in shown or "://" in shown
    return argument if shown == argument else f"{argument.partition('=')[0]}={REDACTED}" if hidden else shown


def _arguments_for_scheme(arguments: Iterable[str], name: str) -> Iterator[str]:
    """Yield a run's command-line arguments, changed for a new run under the tensor scheme `name`: without the tensor
    scheme, with "-NAME" appended to run directory and checkpoint URL, and without checkpoint.resume=auto|must, as there
    is nothing to resume yet."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        plain = _argument_key(argument)
        if plain in _PLACES:
            address, mark, query = value.partition("?")
            end = len(address.rstrip("/'\""))
            yield f"{key}={address[:end]}-{name}{address[end:]}{mark}{query}"
        elif plain.partition(".")[0] != "tensor" and (plain != "checkpoint.resume" or value not in RESUME[::2]):
            yield argument


def _axis_size_overrides(axes: str, workers: int) -> Iterator[list[str]]:
    """Yield command-line overrides of the sizes of a tensor scheme's mesh axes, named by the letters of `axes`, whose
    product is `workers`; first [], which keeps the sizes that the experiment configures."""
    yield []
    divisors = [k for k in range(1, workers + 1) if workers % k == 0] if workers < 1 << 16 else [1, workers]
    for sizes in product(divisors, repeat=len(axes)):
        if axes and prod(sizes) == workers:
            yield [f"tensor.axes.{axis}={size}" for axis, size in zip(axes, sizes, strict=True)]


PHASES = {  # in the order in which a run reaches them -> what is done then
    "composed": "the configuration is composed and checked",
    "planned": "the plan is made",
    "starting": "directory, data and checkpoints are checked; the workers start",
    "first_process": "the first worker's process has dialled the driver",
    "ready": "every worker has imported all and is ready",
    "formed": "the workers are a mesh, their process groups open",
    "running": "the model is built, and has its state",
    "first_step": "the first step is committed",
    "last_step": "the last step is committed",
    "ended": "all is saved, and the workers are gone",
}
_EVENTS = {  # of the journal -> phase
    "starting": "starting", "forming": "ready", "formed": "formed", "running": "running", "first_step": "first_step",
}  # fmt: skip


class Phases:
    """Times at which one driver reached each of PHASES for the first time, of "last_step" for the last time.
    `seconds`: phase -> seconds since `start`, a reading of the monotonic clock; by default now."""

    def __init__(self, start: float | None = None):
        """Start to time a run's phases from `start`, a reading of the monotonic clock, by default now."""
        self._start = monotonic() if start is None else start
        self.seconds: dict[str, float] = {}

    def reach_phase(self, phase: str, when: float | None = None) -> None:
        """Record that a phase of the run was reached at `when`, a reading of the monotonic clock, by default now."""
        self.seconds.setdefault(phase, (monotonic() if when is None else when) - self._start)

    def note_event(self, word: str) -> None:
        """Record the phase of the run that an event of its journal begins, if any; `word`: the event's kind."""
        if phase := _EVENTS.get(word):
            self.reach_phase(phase)

    def note_step(self) -> None:
        """Record the time at which the run has committed a training step: the last one, as far as is known."""
        self.seconds["last_step"] = monotonic() - self._start


def monotonic_command_start() -> float:
    """Return when the run's command was started, on the monotonic clock; the time now where /proc does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine's start
        up = float(Path("/proc/uptime").read_text().split()[0])
        return monotonic() - max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return monotonic()


def phase_table(seconds: Mapping[str, float]) -> str:
    """Format the phases that a run reached as a table for the user: how long each took, and when it was over."""
    lines, before = ["   took  until  phase (seconds, since the command)"], 0.0
    for phase, what in PHASES.items():
        if phase in seconds:
            lines.append(f"{seconds[phase] - before:7.2f}{seconds[phase]:7.2f}  {phase}: {what}")
            before = seconds[phase]
    return "\n".join(lines)
