"""Lines that a run prints for the user: command lines, each of which works when pasted into the shell of the same
directory; and the phases of its start and end with their times, the breakdown that `monitor.timing` asks for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from platform.boundary.redaction import REDACTED, redact_secrets
from platform.boundary.refusals import ConfigError, typed_command
from platform.config.fields import Config
from platform.config.identity import HORIZON, find_checkpoint_url

if TYPE_CHECKING:
    from platform.data.tokenizer import Vocabulary

_SECRET = f"  # {REDACTED} stands for a secret: type it again"


@dataclass(frozen=True)
class Command:
    """Command line that started this run, from which those printed for the user are made. `arguments`: Hydra overrides;
    `config_dir`: the user's own folder of configurations; `alone`: it is the only run of its command."""

    arguments: Sequence[str] = ()
    config_dir: str | None = None
    alone: bool = True

    def resume_line(self, override: str = "") -> str:
        """Return the command that continues this run: its own, with `override` (KEY=VALUE, or "") for the same key."""
        others = [argument for argument in self.arguments if _argument_key(argument) != _argument_key(override)]
        return self._format_line([*others, override] if override else others)

    def format_with_overrides(self, overrides: Sequence[str]) -> str:
        """Return the shown command that starts this run with `overrides` (KEY=VALUE) in place of its own values."""
        return self._format_line(replace_overrides(self.arguments, overrides))

    def _format_line(self, arguments: Iterable[str]) -> str:
        """Format the shown command with these arguments for the user's shell, quoted, and with secrets hidden."""
        folder_words = ["--config-dir", self.config_dir] if self.config_dir else []
        words = [*folder_words, *map(_printable_argument, arguments)]
        secret = any(word.endswith(f"={REDACTED}") for word in words)
        return f"{_typed_launcher()} {shlex.join(words)}" + (_SECRET if secret else "")


def _typed_launcher() -> str:
    """Return the beginning of a shown command: torchrun's, if it has started all workers on this machine."""
    processes, on_this_machine = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not on_this_machine or processes != on_this_machine:
        return typed_command("launch")
    return f"torchrun --nproc-per-node {on_this_machine} {typed_command('launch').removeprefix('python ')}"


def replace_overrides(arguments: Sequence[str], replacements: Sequence[str]) -> list[str]:
    """Return a shown command's arguments with `replacements` in the place of those for the same keys and groups."""
    keys = {_argument_key(argument) for argument in replacements}
    return [*(a for a in arguments if not {_argument_key(a), _argument_key(a).partition(".")[0]} & keys), *replacements]


def _argument_key(argument: str) -> str:
    """Return the key that an argument of a run's shown command is for, such as "+train.steps=5"."""
    return argument.partition("=")[0].lstrip("+")


def _printable_argument(argument: str) -> str:
    """Return an argument of a shown command fit to be printed: if it contains a secret, with a reference to the
    environment variable that the secret came from, else with REDACTED as its value."""
    shown = redact_secrets(argument)
    hidden = REDACTED in shown or "://" in shown
    return argument if shown == argument else f"{argument.partition('=')[0]}={REDACTED}" if hidden else shown


DRAWN = ["--temperature", "0.8", "--top-p", "0.9"]  # a small model's likeliest tokens repeat themselves
WRITING = ("decoder", "encoder_decoder")  # model.kind that `platform.generate` asks


def list_next_commands(config: Config, command: Command, vocabulary: Vocabulary | None, go_on: str = "") -> list[str]:
    """Return the command lines that a user may want next, after a finished run under `command`, each with what it does
    behind it. `vocabulary`: its tokenizer; `go_on`: override that its resumption needs, or ""."""
    from platform.weights.tensor_names import choose_family

    run_dir, c = _shorten_path(config.run.dir), config.checkpoint
    storage = _shorten_path(find_checkpoint_url(config))
    lines = [f"report {shlex.quote(run_dir)}  # the run as a page"]
    saves = c.last or bool(config.train.stop_at)
    if saves and redact_secrets(storage) == storage:
        with suppress(ConfigError):
            choose_family(config.model)
            lines.insert(0, f"weights export {shlex.join([storage, f'{run_dir}/transformers'])}  # for transformers")
        if vocabulary and config.model.kind in WRITING:
            data, prompt = config.data, "def" if config.data.kind == "stdlib" else "The"
            if data.kind != "preferences" and (data.validation or data.validation_path):
                lines.insert(0, f"evaluate {shlex.quote(run_dir)}  # its loss on what was held out")
            chats = data.kind in ("instructions", "preferences") and vocabulary.has_chat
            flags = ["--chat"] if chats else DRAWN if config.model.kind == "decoder" else []
            lines.insert(0, f"generate {shlex.join([run_dir, prompt, *flags])}  # ask it for text")
    lines = [f"{typed_command(name)} {rest}" for name, _, rest in (line.partition(" ") for line in lines)]
    if saves:
        allowed = ",".join(dict.fromkeys([*config.resume.allow, HORIZON]))
        longer = [f"train.steps={2 * config.train.steps}", f"resume.allow=[{allowed}]"]
        typed = [f"run.dir={run_dir}", *(["train.stop_at=0"] if config.train.stop_at else longer)]
        lines.append(f"{command.format_with_overrides([*typed, *filter(None, [go_on])])}  # train on")
    return lines


def _shorten_path(path: str) -> str:
    """Return a path as a shown command has it in this directory, if that is shorter; a URL as it is."""
    return path if "://" in path else min(path, os.path.relpath(path), key=len)


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


class PhaseTimes:
    """Times at which one driver reached each of PHASES for the first time, of "last_step" for the last time.
    `seconds`: phase -> seconds since `start`, a reading of the monotonic clock; by default now."""

    def __init__(self, start: float | None = None):
        """Start to time a driver's phases from `start`, a reading of the monotonic clock, by default now."""
        self._start = monotonic() if start is None else start
        self.seconds: dict[str, float] = {}

    def reach_phase(self, phase: str, when: float | None = None) -> None:
        """Record that a driver's phase was reached at `when`, a reading of the monotonic clock, by default now."""
        self.seconds.setdefault(phase, (monotonic() if when is None else when) - self._start)

    def note_event(self, word: str) -> None:
        """Record the driver's phase that an event of its journal begins, if any; `word`: the event's kind."""
        if phase := _EVENTS.get(word):
            self.reach_phase(phase)

    def note_last_step(self) -> None:
        """Record the time at which the driver has committed a step: the last one, as far as is known."""
        self.seconds["last_step"] = monotonic() - self._start


def monotonic_command_start() -> float:
    """Return when the driver's process was started, on the monotonic clock; the time now where /proc does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine's start
        up = float(Path("/proc/uptime").read_text().split()[0])
        return monotonic() - max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return monotonic()


def phase_table(seconds: Mapping[str, float]) -> str:
    """Format the phases of a driver's start and end as a table: how long each took, and when it was over."""
    lines, before = ["   took  until  phase (seconds, since the command)"], 0.0
    for phase, what in PHASES.items():
        if phase in seconds:
            lines.append(f"{seconds[phase] - before:7.2f}{seconds[phase]:7.2f}  {phase}: {what}")
            before = seconds[phase]
    return "\n".join(lines)
