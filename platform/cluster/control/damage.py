"""Damaged memory of workers, which their replicas show: those ranks fail, and recover from the others."""

from __future__ import annotations

from collections.abc import Sequence

from platform.cluster.control.forming.context import Generation
from platform.cluster.control.forming.snapshot_ledger import SnapshotLedger
from platform.cluster.crew.base.crew import Crew
from platform.cluster.crew.base.failures import Failure, GaveUp, Member, WorkerFailed
from platform.monitor import Journal
from platform.monitor.records import events
from platform.train.protocol.replies import StepReport


def check_replicas(
    crew: Crew, generation: Generation, report: StepReport, ledger: SnapshotLedger, journal: Journal
) -> None:
    """Raise WorkerFailed naming the ranks whose weights or optimizer state `report` shows to be damaged, so that they
    are restored from replicas; no snapshot of theirs is used. Raise GaveUp if replicas differ and nothing shows which
    is right. `Trainer.step` has updated nothing in either case."""
    step = report.step
    if unknown := report.differences.undecided:
        ranks, tensor = unknown[0]
        names = " and ".join(generation.job.name(rank) for rank in ranks)
        more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
        journal.write(events.Undecided(step=step, tensors=unknown))
        why = "differ, and nothing tells who is right: their memory is damaged"
        raise GaveUp(f"before step {step} was done, {tensor}{more} of {names} {why}")
    damaged: dict[int, list[str]] = {}
    for rank, tensor in report.differences.damaged:
        damaged.setdefault(rank, []).append(tensor)
    if not damaged:
        return
    ledger.distrust(generation.number, [generation.seats[rank] for rank in damaged])
    journal.write(events.Damaged(step=step, ranks=list(damaged.items())))
    raise WorkerFailed([_damage(crew, generation, step, *item) for item in damaged.items()])


def _damage(crew: Crew, generation: Generation, step: int, rank: int, tensors: Sequence[str]) -> Failure:
    """Return the failure of the rank whose worker's memory is damaged: its `tensors` differ from its replicas'."""
    number, job = generation.seats[rank], generation.job
    more = f" and {len(tensors) - 1} more" if tensors[1:] else ""
    cause = f"its {tensors[0]}{more} is not what its replicas hold"
    member = crew.members.get(number, Member(number, "", 0))
    return Failure(member, "damaged", f"step({step})", cause, rank, job.name(rank), job.coordinates[rank])
