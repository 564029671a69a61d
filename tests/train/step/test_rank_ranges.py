"""Spreads over the ranks of a step: gauges and bandwidths, with the ranks at the ends, on reports that go anyway."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import torch

from platform.predict.make_plan import make_plan
from platform.predict.tier_traffic import NetworkTiers, farthest_tiers
from platform.runtime.communicator import Communicator
from platform.train.rank_parameters import CollectiveBandwidths, compute_rank_ranges
from platform.train.replies import RankRange, StepReport
from platform.train.step_report import ReportCombiner
from platform.train.trainer import SECTIONS
from tests.harness.oracle import configure
from tests.harness.threads import run_threads

PLAN = make_plan(configure("1d", {"t": 2}, data=2, global_batch=8))
REACH = {"t": "inside a node", "data": "between nodes"}


def test_a_spread_names_the_ranks_at_its_ends() -> None:
    ranges = compute_rank_ranges(
        ["cpu", "gpu", "power"], torch.tensor([[1.0, nan, 9.0], [0.5, nan, nan], [2.0, nan, 7.0]]).double()
    )
    assert ranges == {"cpu": RankRange(0.5, 1.0, 2.0, 1, 2), "power": RankRange(7.0, 8.0, 9.0, 2, 0)}


def test_a_bandwidth_is_the_bytes_that_a_rank_sent_over_the_seconds_that_it_waited() -> None:
    keys, waits = ["all_gather/t", "all_reduce/data", "all_reduce/t", "send/stage"], ["data", "t"]
    bandwidths = CollectiveBandwidths(PLAN.mesh, keys, waits, REACH)
    assert PLAN.mesh.list_groups(["t"]) == [(0, 1), (2, 3)] and PLAN.mesh.list_groups(["data"]) == [(0, 2), (1, 3)]
    moved = torch.zeros(4, 4).double()
    moved[[0, 2], 0], moved[[0, 1], 1], moved[[0, 2], 2] = 600.0, 800.0, 200.0
    seconds = torch.tensor([[1.0, 2.0], [1.0, 4.0], [4.0, 2.0], [0.001, 8.0]]).double()
    rates = bandwidths.compute_bandwidths(moved, seconds, torch.full((4,), 10.0).double())
    of_tier = dict(zip(bandwidths.tiers, rates.T.tolist(), strict=True))
    assert of_tier["inside a node"] == [200.0, 100.0, 200.0, 50.0]  # (300 + 100) bytes each
    assert of_tier["between nodes"][:3] == [400.0, 400.0, 100.0]
    assert of_tier["between nodes"][3] != of_tier["between nodes"][3]  # it hardly waited


def test_a_collective_reaches_as_far_as_its_farthest_ranks() -> None:
    assert farthest_tiers(PLAN, NetworkTiers.build_tiers({"node": 2}, 4)) == REACH | {"data+t": "between nodes"}
    assert set(farthest_tiers(PLAN, NetworkTiers.build_tiers({"node": 4}, 4)).values()) == {"inside a node"}
    racks = farthest_tiers(PLAN, NetworkTiers.build_tiers({"node": 1, "rack": 2}, 4))
    assert (racks["t"], racks["data"]) == ("between nodes", "between racks")


def report(rank: int, gauges: dict[str, float]) -> StepReport:
    """Return a rank's report on a step of a second, of which it waited for half; group's first ranks count bytes."""
    seconds = dict.fromkeys(SECTIONS, 0.0) | {"forward": 1.0}
    mine = StepReport(1, 1.0, 1.0, 1.0, False, 1, (0, 1), 1.0, seconds, {}, 1, 1, [])
    return replace(mine, gauges=gauges, waits={"t": 0.5}, comm_bytes={"all_reduce/t": 100} if rank % 2 == 0 else {})


def counted(communicator: Communicator, combiner: ReportCombiner, mine: StepReport) -> tuple[StepReport, int]:
    """Combine reports, and count this rank's messages for it."""
    sent = []
    real, communicator.collect_numbers = (
        communicator.collect_numbers,
        lambda numbers: sent.append(len(numbers)) or real(numbers),
    )
    try:
        return combiner.combine_reports(mine), len(sent)
    finally:
        communicator.collect_numbers = real


def test_the_reports_of_a_step_carry_the_readings() -> None:
    def work(communicator: Communicator) -> list[tuple[StepReport, int]]:
        combiner, rank = ReportCombiner(PLAN, communicator, slow=0, reach=REACH), communicator.rank
        first = {"cpu": 1.0 + rank} | ({"power": 50.0} if rank == 3 else {})
        return [
            counted(communicator, combiner, report(rank, gauges))
            for gauges in ({}, first, first if rank == 0 else {"cpu": 9.0}, {"cpu": 2.0})
        ]

    every = run_threads(PLAN.mesh, work)
    nothing, one, same, new = (reported for reported, _ in every[0])
    assert nothing.workers.keys() == {"bandwidth/inside a node"}
    assert one.workers["cpu"] == RankRange(1.0, 2.5, 4.0, 0, 3) and one.workers["power"] == RankRange(
        50.0, 50.0, 50.0, 3, 3
    )
    assert one.workers["bandwidth/inside a node"].least == 100.0 and not one.gauges
    assert same.workers == one.workers, "they are taken anew once rank 0 has a new reading"
    assert new.workers["cpu"] == RankRange(2.0, 2.0, 2.0, 0, 0)
    assert {messages for rank in every for _, messages in rank} == {1}, "no message of their own"
