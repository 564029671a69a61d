"""Proofs of a cluster by a finished run (`cluster.check`), read from the run's records. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from platform.monitor import events
from platform.monitor.events import JournalEvent
from platform.plan.layout import count_of
from platform.plan.plan_summary import human

_FEWER = 0.9  # of the loss at the start: a run on text that learns gets below it


class Finding(NamedTuple):
    """Proof that a run was to give. `text`: evidence for or against it."""

    what: str
    proven: bool
    text: str


def proofs_of_cluster(
    journal: Sequence[JournalEvent], rows: Sequence[Mapping[str, Any]], verified: str
) -> list[Finding]:
    """Judge from the records of a finished run what it has proven of its cluster (cluster.check): a Finding per proof.
    `journal`: its events; `rows`: its rows of metrics; `verified`: why its newest checkpoint could not be read back, ""
    if it could."""
    wanted = max((e.world_size for e in journal if isinstance(e, events.Starting)), default=0)
    formed = [e.workers for e in journal if isinstance(e, events.Formed)]
    largest = max(formed, key=len, default=[])
    return [
        _nodes(largest, wanted),
        _storage(journal),
        _collectives(rows, len(largest)),
        _text(rows),
        _checkpoints(journal, verified),
        _failures(journal),
    ]


def _nodes(workers: Sequence[Mapping[str, Any]], wanted: int) -> Finding:
    """Return the finding of a cluster check that all `wanted` workers joined, with their number on each node."""
    nodes = Counter(str(worker.get("node", "?")).partition("/")[0] for worker in workers)
    each = ", ".join(f"{node} {count}" for node, count in sorted(nodes.items()))
    text = f"{len(workers)} of {count_of(wanted, 'worker')}, on {count_of(len(nodes), 'node')}: {each}"
    return Finding("all joined", len(workers) == wanted > 0, text)


def _storage(journal: Sequence[JournalEvent]) -> Finding:
    """Return the finding of a cluster check on shared storage: every worker has read a file that the driver wrote."""
    reasons = [reason for e in journal if isinstance(e, events.Barred | events.NotProven) for reason in e.reasons]
    text = reasons[0] if reasons else "each worker read what the driver wrote to run directory and checkpoint storage"
    return Finding("shared storage", not reasons, text)


def _collectives(rows: Sequence[Mapping[str, Any]], workers: int) -> Finding:
    """Return the finding of a cluster check that the run's collectives ran, and their bytes; `rows`: its metrics."""
    moved: Counter[str] = Counter()
    for row in rows:
        moved.update(row.get("comm_bytes") or {})
    each = ", ".join(f"{name} {human(count).strip()}B" for name, count in sorted(moved.items()) if count)
    text = each or ("one worker has nobody to talk to" if workers == 1 else "none ran")
    return Finding("collectives", bool(each) or workers == 1, text)


def _text(rows: Sequence[Mapping[str, Any]]) -> Finding:
    """Return the finding of a cluster check that the run learned, as it does only if every gradient arrives: the median
    of its last losses is below 0.9 times the first. `rows`: its rows of metrics."""
    few = max(1, len(rows) // 20)
    losses = [row["loss"] for row in rows]
    if len(losses) < 2:
        return Finding("training", False, count_of(len(losses), "step"))
    first, last = losses[0], median(losses[-few:])
    speed = median(row.get("step_seconds") or 0.0 for row in rows)
    text = f"{count_of(len(rows), 'step')} of {speed:.3g} s; loss {first:.3f} -> {last:.3f}"
    return Finding("training", last < _FEWER * first, text)


def _checkpoints(journal: Sequence[JournalEvent], verified: str) -> Finding:
    """Return the finding of a cluster check that checkpoints were saved and the newest was read back, with the bytes
    per second of the last save. `verified`: why it could not be read back, "" if it could."""
    saved = [e for e in journal if isinstance(e, events.Checkpoint)]
    if not saved or verified:
        return Finding("checkpoints", False, verified or "none was saved")
    newest = saved[-1]
    rate = newest.bytes / newest.seconds if newest.seconds else 0.0
    text = f"{len(saved)} saved, the last in {newest.seconds:.2g} s ({human(rate).strip()}B/s); all of it read back"
    return Finding("checkpoints", True, text)


def _failures(journal: Sequence[JournalEvent]) -> Finding:
    """Return the finding of a cluster check that no worker failed, even if the run survived: it lists the failures."""
    found = [f"rank {e.rank} {e.kind} on {e.node}" for e in journal if isinstance(e, events.Failure)]
    return Finding("no failures", not found, ", ".join(found) or "none")


def cluster_report(found: Sequence[Finding]) -> str:
    """Format the findings of a cluster check as lines for people, and whether the cluster is ready."""
    lines = [f"  {'proven' if f.proven else 'NOT   '}  {f.what:<14}  {f.text}" for f in found]
    missing = sum(not f.proven for f in found)
    end = f"this cluster is not ready: {missing} not proven" if missing else "this cluster is ready"
    return "\n".join(["what this run has proven of its cluster", *lines, end])
