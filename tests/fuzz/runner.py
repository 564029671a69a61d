"""Run a fuzzer over consecutive seeds and count the cases of every class."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType

SHOWN_SECONDS = 30.0  # between two lines of progress


@dataclass
class Outcome:
    """Counts the cases of every class and keeps the failures as (seed, message)."""

    counts: Counter[str]
    failures: list[tuple[int, str]] = field(default_factory=list)

    def table(self) -> str:
        """Return one line per class, the rarest last."""
        return "\n".join(f"{count:9,}  {name}" for name, count in self.counts.most_common())


def run(
    fuzzer: ModuleType, seed: int, count: int, seconds: float | None = None, keep_going: bool = False, step: int = 1
) -> Outcome:
    """Attempt the cases of seeds `seed`, `seed + step`, ...: `count` of them, fewer where `seconds` are over.

    Raises AssertionError at the first case that fails, naming its seed; with `keep_going` failures are collected.
    """
    outcome, began = Outcome(Counter(dict.fromkeys(fuzzer.CLASSES, 0))), time.monotonic()
    shown = began
    with fuzzer.opened() as attempt:
        for each in range(seed, seed + count * step, step):
            now = time.monotonic()
            if seconds is not None and now > began + seconds:
                break
            if now > shown + SHOWN_SECONDS:
                shown, done = now, sum(outcome.counts.values())
                print(f"{now - began:7.0f} s  {done:,} cases", file=sys.stderr, flush=True)
            try:
                outcome.counts[attempt(each)] += 1
            except Exception as error:
                name = fuzzer.__name__.rpartition(".")[2]
                message = f"python -m tests.fuzz {name} --seed {each} --count 1: {type(error).__name__}: {error}"
                if not keep_going:
                    raise AssertionError(message) from error
                print(message, flush=True)  # now: a run that is stopped must not take it along
                outcome.failures.append((each, message))
    return outcome
