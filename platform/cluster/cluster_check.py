"""Proofs of a cluster by a finished run (`cluster.check`), read from the run's records. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from platform.monitor import events
from platform.monitor.events import JournalEvent
from platform.plan.layout import format_count
from platform.plan.plan_summary import format_number

_Row = Mapping[str, Any]  # of metrics
_FEWER = 0.9  # of the loss at the start: a run on text that learns gets below it


class Finding(NamedTuple):
    """Proof that a run was to give. `text`: evidence for or against it."""

    what: str
    proven: bool
    text: str


def judge_cluster_checks(journal: Sequence[JournalEvent], rows: Sequence[_Row], checkpoint_fault: str) -> list[Finding]:
    """Judge from the records of a finished run what it has proven of its cluster (cluster.check): a Finding per proof.
    `journal`: its events; `rows`: its rows of metrics; `checkpoint_fault`: why its newest checkpoint could not be read
    back, "" if it could."""
    expected_workers = max((e.world_size for e in journal if isinstance(e, events.Starting)), default=0)
    formed = [e.workers for e in journal if isinstance(e, events.Formed)]
    largest = max(formed, key=len, default=[])
    return [
        _judge_joined_workers(largest, expected_workers),
        _judge_shared_storage(journal),
        _judge_collectives(rows, len(largest)),
        _judge_training(rows),
        _judge_checkpoints(journal, checkpoint_fault),
        _judge_failures(journal),
    ]


def _judge_joined_workers(workers: Sequence[Mapping[str, Any]], expected_workers: int) -> Finding:
    """Return the finding of a cluster check that all `expected_workers` workers joined, with each node's number."""
    nodes = Counter(str(worker.get("node", "?")).partition("/")[0] for worker in workers)
    each = ", ".join(f"{node} {count}" for node, count in sorted(nodes.items()))
    expected, places = format_count(expected_workers, "worker"), format_count(len(nodes), "node")
    text = f"{len(workers)} of {expected}, on {places}: {each}"
    return Finding("all joined", len(workers) == expected_workers > 0, text)


def _judge_shared_storage(journal: Sequence[JournalEvent]) -> Finding:
    """Return the finding of a cluster check on shared storage: every worker has read a file that the driver wrote."""
    reasons = [reason for e in journal if isinstance(e, events.Barred | events.NotProven) for reason in e.reasons]
    text = reasons[0] if reasons else "each worker read what the driver wrote to run directory and checkpoint storage"
    return Finding("shared storage", not reasons, text)


def _judge_collectives(rows: Sequence[_Row], workers: int) -> Finding:
    """Return the finding of a cluster check that the run's collectives ran, and their bytes; `rows`: its metrics."""
    moved: Counter[str] = Counter()
    for row in rows:
        moved.update(row.get("comm_bytes") or {})
    each = ", ".join(f"{name} {format_number(count).strip()}B" for name, count in sorted(moved.items()) if count)
    text = each or ("one worker has nobody to talk to" if workers == 1 else "none ran")
    return Finding("collectives", bool(each) or workers == 1, text)


def _judge_training(rows: Sequence[_Row]) -> Finding:
    """Return the finding of a cluster check that the run learned, as it does only if every gradient arrives: the median
    of its last losses is below 0.9 times the first. `rows`: its rows of metrics."""
    few = max(1, len(rows) // 20)
    losses = [row["loss"] for row in rows]
    if len(losses) < 2:
        return Finding("training", False, format_count(len(losses), "step"))
    first, last = losses[0], median(losses[-few:])
    speed = median(row.get("step_seconds") or 0.0 for row in rows)
    text = f"{format_count(len(rows), 'step')} of {speed:.3g} s; loss {first:.3f} -> {last:.3f}"
    return Finding("training", last < _FEWER * first, text)


def _judge_checkpoints(journal: Sequence[JournalEvent], checkpoint_fault: str) -> Finding:
    """Return the finding of a cluster check that checkpoints were saved and the newest was read back, with the bytes
    per second of the last save. `checkpoint_fault`: why it could not be read back, "" if it could."""
    saved = [e for e in journal if isinstance(e, events.Checkpoint)]
    if not saved or checkpoint_fault:
        return Finding("checkpoints", False, checkpoint_fault or "none was saved")
    newest = saved[-1]
    rate = newest.bytes / newest.seconds if newest.seconds else 0.0
    speed = f"{format_number(rate).strip()}B/s"
    text = f"{len(saved)} saved, the last in {newest.seconds:.2g} s ({speed}); all of it read back"
    return Finding("checkpoints", True, text)


def _judge_failures(journal: Sequence[JournalEvent]) -> Finding:
    """Return the finding of a cluster check that no worker failed, even if the run survived: it lists the failures."""
    failures = [f"rank {e.rank} {e.kind} on {e.node}" for e in journal if isinstance(e, events.Failure)]
    return Finding("no failures", not failures, ", ".join(failures) or "none")


def format_findings(findings: Sequence[Finding]) -> str:
    """Format the findings of a cluster check as lines for people, and whether the cluster is ready."""
    lines = [f"  {'proven' if f.proven else 'NOT   '}  {f.what:<14}  {f.text}" for f in findings]
    missing = sum(not f.proven for f in findings)
    end = f"this cluster is not ready: {missing} not proven" if missing else "this cluster is ready"
    return "\n".join(["what this run has proven of its cluster", *lines, end])
