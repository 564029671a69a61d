"""Turns of two passes of a rank, a forward and a backward pass: each goes on while the other waits for an exchange.

Two threads of the host have one baton. A pass gives it away where it would wait for an all-to-all that it has launched,
and gets it back when the other one does so, or ends. So one thread alone runs at a time, no state of the rank is shared
at once, and the order of all launches follows from the passes: alike on all ranks that run the same ones, as
collectives demand. Kernels of the other pass lie between launch and wait in the device's one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import torch

SwapState = Callable[[Any], Any]  # puts a pass's state in place, of a new one None; returns that of the one before


class PassAbandoned(RuntimeError):
    """End of a pass whose partner failed, which says why."""


class PassTurns:
    """Turns of two passes, number 0 and number 1, of which number 0 begins. `swap_state`: exchanges what the rank keeps
    of the pass under way for what it keeps of the other."""

    def __init__(self, swap_state: SwapState):
        """Give the first turn to pass number 0."""
        self._swap_state, self._state = swap_state, None  # of the pass that has no turn
        self._turns, self._now = (threading.Semaphore(0), threading.Semaphore(0)), 0
        self._ended, self._failed = [False, False], False

    def run_both(self, first: Callable[[], None], second: Callable[[], None], helper: Executor) -> None:
        """Run two passes in turns, the second one in the thread of `helper`, until both have ended. Raises what either
        raises; the other one is then abandoned at its next exchange."""
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        future = helper.submit(self._run_second, second, stream)
        try:
            first()
        except PassAbandoned:
            pass  # the future says why
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end_pass(0)
            error = future.exception()
            if self._now:
                self._hand_over(0)  # whose state stays
        if error:
            raise error

    def _run_second(self, second: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
        """Run the second pass from its first turn on, in the first one's `stream` of the device."""
        try:
            self._await_turn(1)
            if stream is None:
                return second()
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                second()
        except PassAbandoned:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end_pass(1)

    def yield_turn(self) -> None:
        """Let the other pass run, if it has not ended, until it yields or ends. Raises PassAbandoned if it failed."""
        own = self._now
        if not self._ended[1 - own]:
            self._hand_over(1 - own)
            self._await_turn(own)
        elif self._failed:
            raise PassAbandoned

    def _await_turn(self, number: int) -> None:
        """Wait until a pass has its turn. Raises PassAbandoned if the other one failed."""
        self._turns[number].acquire()
        if self._failed:
            raise PassAbandoned

    def _hand_over(self, number: int) -> None:
        """Give the turn to the pass `number`, with the state that the rank kept of it."""
        self._state, self._now = self._swap_state(self._state), number
        self._turns[number].release()

    def _end_pass(self, number: int) -> None:
        """End a pass, and let the other one run to its end, unless it runs anyway, as this one was interrupted."""
        self._ended[number] = True
        if self._now == number and not self._ended[1 - number]:
            self._hand_over(1 - number)
