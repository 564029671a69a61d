"""The commands that a run prints: they are run as printed, in the place where they were printed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from platform.boundary.redaction import HIDDEN, redact
from platform.config.fields import RESUME, Config

_LAYOUTS = {"1d": "t", "1d_sp": "t", "3d": "xyz", "2d": "rc", "serial": ""}  # to go on with, the likeliest first
_MOST = 4  # sizes of one scheme's axes that are tried
_PLACES = ("run.dir", "checkpoint.url")  # another layout's run needs its own
_SECRET = f"  # {HIDDEN} stands for a secret: type it again"


@dataclass(frozen=True)
class Command:
    """What was typed for one run. `workers`: how many a command with other arguments would run on, 0 where it would
    be refused."""

    arguments: Sequence[str] = ()
    config_dir: str | None = None
    workers: Callable[[Sequence[str]], int] = lambda arguments: 0

    def again(self, override: str = "") -> str:
        """The same command, with an override in the place of its like: what continues the run."""
        return self._line([*_without(self.arguments, [_key(override)]), *filter(None, [override])])

    def other_layout(self, config: Config, workers: int) -> str:
        """The same numbers from another layout on as many workers, in a run of its own: what this platform is for.
        "" where there is none."""
        present = config.tensor.scheme
        names = ["1d_sp"] * (present == "1d") + [name for name in _LAYOUTS if name != present]
        for name in dict.fromkeys(names):
            moved = list(_moved(self.arguments, name))
            for axes in islice(_sizes(_LAYOUTS[name], prod(config.tensor.axes.values())), _MOST + 1):
                chosen = [*moved, f"tensor={name}", *axes]
                if self.workers(chosen) == workers:
                    return self._line(chosen)
        return ""

    def _line(self, arguments: Iterable[str]) -> str:
        own = ["--config-dir", self.config_dir] if self.config_dir else []
        words = [*own, *map(_shown, arguments)]
        secret = any(word.endswith(f"={HIDDEN}") for word in words)
        return f"python -m platform.launch {shlex.join(words)}" + (_SECRET if secret else "")


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+")


def _without(arguments: Iterable[str], keys: Iterable[str]) -> list[str]:
    return [a for a in arguments if _key(a) not in keys]


def _shown(argument: str) -> str:
    """An argument without its secret: what the environment has is taken from there again, the rest is hidden."""
    shown = redact(argument)
    hidden = HIDDEN in shown or "://" in shown
    return argument if shown == argument else f"{argument.partition('=')[0]}={HIDDEN}" if hidden else shown


def _moved(arguments: Iterable[str], name: str) -> Iterator[str]:
    """The arguments without a tensor scheme, for a run in places of its own, where there is nothing to resume yet."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        plain = _key(argument)
        if plain in _PLACES:
            address, mark, query = value.partition("?")
            end = len(address.rstrip("/'\""))
            yield f"{key}={address[:end]}-{name}{address[end:]}{mark}{query}"
        elif plain.partition(".")[0] != "tensor" and (plain != "checkpoint.resume" or value not in RESUME[::2]):
            yield argument


def _sizes(axes: str, workers: int) -> Iterator[list[str]]:
    """Overrides for axes whose product is so many workers; first none, which leaves the sizes to the experiment."""
    yield []
    divisors = [k for k in range(1, workers + 1) if workers % k == 0] if workers < 1 << 16 else [1, workers]
    for sizes in product(divisors, repeat=len(axes)):
        if axes and prod(sizes) == workers:
            yield [f"tensor.axes.{axis}={size}" for axis, size in zip(axes, sizes, strict=True)]
