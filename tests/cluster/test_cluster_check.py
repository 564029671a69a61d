"""What a run says that it has proven of its cluster is what it recorded."""

import pytest

from platform.cluster.cluster_check import format_findings, judge_cluster_checks
from platform.monitor import events

WORKERS = [{"rank": rank, "node": f"node{rank // 2}/ab12", "number": rank} for rank in range(4)]
JOURNAL = [
    events.Starting(world_size=4, cluster="ray", device="cuda"),
    events.Formed(workers=WORKERS),
    events.Checkpoint(step=50, directory="a", bytes=2_000_000, seconds=1.0),
    events.Checkpoint(step=100, directory="b", bytes=4_000_000, seconds=2.0),
    events.Done(step=100),
]
ROWS = [
    {"step": s, "loss": 8.0 - s / 20, "step_seconds": 0.5, "comm_bytes": {"all_gather/data": 10**6}}
    for s in range(1, 101)
]
FAILURE = events.Failure(
    number=1, rank=1, coordinates={}, node="node0", method="step", kind="died", cause="x", log=None, step=3
)


def proven(journal=JOURNAL, rows=ROWS, checkpoint_fault=""):
    return {finding.what: finding.proven for finding in judge_cluster_checks(journal, rows, checkpoint_fault)}


def test_all_is_proven():
    findings = judge_cluster_checks(JOURNAL, ROWS, "")
    assert all(finding.proven for finding in findings) and len(findings) == 6
    text = format_findings(findings)
    assert text.endswith("this cluster is ready")
    assert "4 of 4 workers, on 2 nodes: node0 2, node1 2" in text and "all_gather/data 100 MB" in text
    assert "2 saved, the last in 2 s (2 MB/s)" in text and "loss 7.950 -> 3.100" in text


@pytest.mark.parametrize(
    "missing, changed",
    [
        ("all joined", {"journal": [JOURNAL[0], events.Formed(workers=WORKERS[:2]), *JOURNAL[2:]]}),
        ("all joined", {"journal": [events.Starting(world_size=6, cluster="ray", device="cuda"), *JOURNAL[1:]]}),
        ("shared storage", {"journal": [*JOURNAL, events.Barred(numbers=[1], reasons=["sees another file"])]}),
        ("collectives", {"rows": [{**row, "comm_bytes": {}} for row in ROWS]}),
        ("training", {"rows": [{**row, "loss": 8.0} for row in ROWS]}),
        ("training", {"rows": [{**row, "loss": float("nan")} for row in ROWS]}),
        ("checkpoints", {"journal": [event for event in JOURNAL if not isinstance(event, events.Checkpoint)]}),
        ("checkpoints", {"checkpoint_fault": "the newest cannot be read back: a hash differs"}),
        ("no failures", {"journal": [*JOURNAL[:2], FAILURE, *JOURNAL[2:]]}),
    ],
)
def test_what_is_missing_is_named(missing, changed):
    verdicts = proven(**changed)
    assert [what for what, good in verdicts.items() if not good] == [missing]
    told = format_findings(
        judge_cluster_checks(**({"journal": JOURNAL, "rows": ROWS, "checkpoint_fault": ""} | changed))
    )
    assert f"NOT     {missing}" in told and told.endswith("this cluster is not ready: 1 not proven")


def test_nothing_recorded_proves_nothing():
    assert not any(good for what, good in proven([], []).items() if what not in ("shared storage", "no failures"))


def test_one_worker_has_nobody_to_talk_to():
    alone = [events.Starting(world_size=1, cluster="ray", device="cpu"), events.Formed(workers=WORKERS[:1])]
    assert proven([*alone, *JOURNAL[2:]], [{**row, "comm_bytes": {}} for row in ROWS])["collectives"]
