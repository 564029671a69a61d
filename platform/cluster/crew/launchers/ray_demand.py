"""Demand of runs on the autoscaler of their Ray cluster, so that it starts machines for workers before there are any.

Ray keeps one request for the whole cluster, a new one replaces it, and it outlives its driver. So one actor of the
cluster, the desk, takes the demand of every run, asks for all of it together, and forgets a run that does not renew its
demand. The desk ends with the last run.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NamedTuple

LEASE_SECONDS = 90.0  # after which a demand that is not renewed is dropped
_RENEW_SECONDS = 10.0
HOLD_SECONDS = 120.0  # for which a demand is held up that has fallen: lost workers are hired again within seconds
_NAME, _NAMESPACE = "autoscaler-desk", "elastic-platform"
_LOG = logging.getLogger("platform.cluster")


class Bundle(NamedTuple):
    """Resources that a worker needs together, by Ray's names, and labels that its node must have."""

    needs: dict[str, float]
    labels: dict[str, str]


def bundle_of(device: str, labels: Mapping[str, str]) -> Bundle:
    """Return the Ray bundle of a worker on a `device`, cpu | cuda: one CPU, for cuda also one GPU, and `labels`."""
    return Bundle({"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {}), dict(labels))


class Hysteresis:
    """Number that follows another one up at once, and down only once that has been lower for `seconds`. Times are
    readings of one clock."""

    def __init__(self, seconds: float):
        """Start at no wanted workers. `seconds`: time for which a higher number is kept after it has fallen."""
        self._seconds = seconds
        self._last = 0
        self._before: list[tuple[int, float]] = []  # earlier numbers, and until when each was followed

    def follow(self, wanted: int, now: float) -> int:
        """Return the workers to ask Ray's autoscaler for: the highest number `wanted` in the `seconds` before `now`."""
        earlier = [*self._before, (self._last, now)]
        self._last, self._before = wanted, [pair for pair in earlier if pair[1] > now - self._seconds]
        return max(wanted, *(number for number, _ in self._before))


class DemandLedger:
    """Demands of all runs: run -> how many of which bundle, and until when."""

    def __init__(self) -> None:
        """Initialise a ledger without any run's demand on the autoscaler."""
        self._of: dict[str, tuple[int, Bundle, float]] = {}

    def book(self, run: str, count: int, bundle: Bundle, now: float) -> None:
        """Record that a run needs `count` Ray bundles, in place of its last demand, for LEASE_SECONDS; 0 ends it."""
        self._of[run] = count, bundle, now + LEASE_SECONDS if count else now

    def total(self, now: float) -> list[Bundle]:
        """Return the Ray bundles that all runs need together; forget runs whose demand was not renewed by `now`."""
        self._of = {run: demand for run, demand in self._of.items() if demand[2] > now}
        return [bundle for run in sorted(self._of) for count, bundle, _ in [self._of[run]] for _ in range(count)]


class Desk:
    """Actor that passes the demands of all runs of its cluster on to the autoscaler."""

    def __init__(self) -> None:
        """Start the Ray actor that sums all runs' demands on the autoscaler, and a thread that drops expired ones."""
        self._ledger, self._lock, self._asked = DemandLedger(), threading.Lock(), list[Bundle]()
        threading.Thread(target=self._watch, daemon=True).start()

    def book(self, run: str, count: int, bundle: Bundle) -> int:
        """Record a run's demand for `count` workers by `DemandLedger.book`; return the number of all runs' bundles."""
        with self._lock:
            self._ledger.book(run, count, bundle, monotonic())
        return self._pass_on()

    def _pass_on(self) -> int:
        """Ask Ray's autoscaler for the bundles that all runs need now, if these have changed; return their number."""
        with self._lock:
            total = self._ledger.total(monotonic())
            if total != self._asked:
                request(total)
                self._asked = total
            return len(total)

    def _watch(self) -> None:
        """Drop the demands of runs that do not renew them; end this Ray actor once no run needs any worker."""
        while True:
            sleep(_RENEW_SECONDS)
            with suppress(Exception):  # Ray does not answer: the next turn tries again
                if not self._pass_on():
                    os._exit(0)


def request(bundles: list[Bundle]) -> None:
    """Ask the joined Ray cluster's autoscaler to hold room for workers' `bundles`, in place of the last request."""
    from ray.autoscaler.sdk import request_resources

    labels = [bundle.labels for bundle in bundles]
    request_resources(
        bundles=[bundle.needs for bundle in bundles], bundle_label_selectors=labels if any(labels) else None
    )


class Demand:
    """Demand of this process's run for workers that each need a `bundle`. `count`: function that returns how many it
    wants now, called again and again by a thread, until `close`."""

    def __init__(self, bundle: Bundle, count: Callable[[], int]):
        """Start the thread that keeps Ray's autoscaler informed of the workers that this run wants, by `count()`."""
        self._bundle, self._count, self._hysteresis = bundle, count, Hysteresis(HOLD_SECONDS)
        self._run = f"{socket.gethostname()}/{os.getpid()}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="demand", daemon=True)
        self._thread.start()

    def close(self, *, withdraw: bool = True) -> None:
        """Stop renewing this run's demand on Ray's autoscaler; if `withdraw`, end it now: else it holds until it
        expires, or is taken up by another Demand of this process. Call it before ray.shutdown()."""
        self._closed.set()
        self._thread.join()
        if withdraw:
            with suppress(Exception):
                import ray

                ray.get(self._desk().book.remote(self._run, 0, self._bundle), timeout=_RENEW_SECONDS)

    def _renew(self) -> None:
        """Send the Ray actor of all demands the number of workers that this run wants, smoothed by `Hysteresis`, every
        _RENEW_SECONDS until `close`."""
        while True:
            try:
                count = self._hysteresis.follow(self._count(), monotonic())
                self._desk().book.remote(self._run, count, self._bundle)
            except Exception as error:  # the cluster's head is restarting, or gone: the crew finds that out by itself
                _LOG.debug("the autoscaler is not asked: %s", error)
            if self._closed.wait(_RENEW_SECONDS):
                return

    @staticmethod
    def _desk() -> Any:
        """Return the Ray cluster's `Desk`, the actor that takes all runs' demands, started if there is none."""
        import ray

        options: Mapping[str, Any] = {
            "name": _NAME, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True,
            "num_cpus": 0, "max_restarts": -1,
        }  # fmt: skip
        return ray.remote(Desk).options(**options).remote()
