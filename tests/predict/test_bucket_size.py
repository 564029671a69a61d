"""The size of buckets: as many as cost least on the links that sum the gradients, whatever these are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from platform.launch import compose_config
from platform.plan.chunks import BUCKET_MIB
from platform.plan.plan import Plan
from platform.predict.bucket_size import choose_bucket_count, choose_bucket_mebibytes
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.step_price import read_hardware, step_price

GPT_2 = ("+experiment=one_gpu", "cluster.gpu=H100", "parallel.data=8")
NODES = (*GPT_2[:2], "parallel.data=64", "train.global_batch=128")


def planned(*overrides: str) -> Plan:
    return make_plan(compose_config([*overrides]))


def linked(latency: float = 1.0, rate: float = 1.0) -> Hardware:
    """Return an H100's hardware whose NVLink has so many times the latency, and the rate."""
    h100 = read_hardware("h100")
    node = h100.node
    return replace(h100, node=replace(node, bandwidth=node.bandwidth * rate, latency=node.latency * latency,
                                      hop=node.hop * latency))  # fmt: skip


@pytest.mark.parametrize(("transfer", "each"), [(1.0, 1e-4), (0.2, 3e-3), (1e-3, 5e-3)])
def test_no_other_number_of_buckets_costs_less(transfer, each):
    """Of n buckets: what each costs, and the transfer of the last one, which nothing hides."""
    costs = {n: n * each + transfer / n for n in range(1, 1000)}
    assert round(float(choose_bucket_count(transfer, each))) == min(costs, key=lambda n: costs[n])


def test_a_slow_link_of_high_latency_has_larger_buckets_than_nvlink():
    plan = planned(*GPT_2)
    nvlink = choose_bucket_mebibytes(plan, linked())
    assert 25 < nvlink < 60
    assert choose_bucket_mebibytes(plan, linked(latency=1000, rate=1 / 45)) > 3 * nvlink


def test_it_is_the_latency_and_not_the_slowness_that_makes_them_large():
    """A link that takes ten times as long for everything has the same; one that is slow alone has smaller ones."""
    plan = planned(*GPT_2)
    sizes = [choose_bucket_mebibytes(plan, linked(*link)) for link in ((1, 1), (10, 1 / 10), (10, 1), (1, 1 / 10))]
    assert sizes[0] == sizes[1] and sizes[3] < sizes[0] / 3 < sizes[0] * 3 < sizes[2]


def test_of_a_group_that_leaves_its_node_the_network_counts():
    h100 = read_hardware("h100")
    slow = replace(h100, network=replace(h100.network, latency=100 * h100.network.latency))
    near, far = planned(*GPT_2), planned(*NODES)
    assert choose_bucket_mebibytes(near, slow) == choose_bucket_mebibytes(near, h100)
    assert choose_bucket_mebibytes(far, slow) > 2 * choose_bucket_mebibytes(far, h100)


def test_without_sums_they_are_as_where_nothing_is_known():
    assert choose_bucket_mebibytes(planned(*GPT_2[:2]), linked()) == BUCKET_MIB


SIZES = (0, 12, 25, 50, 100, 200, 400, 1000)


@pytest.mark.parametrize(("zero", "behind", "ahead"), [(0, 1.02, 0.98), (1, 1.01, 1.01), (2, 1.01, 1.02)])
def test_the_price_finds_none_much_better(zero, behind, ahead):
    """And under ZeRO 25 MiB, or each block by itself, costs more, which is the negative control."""
    seconds = {}
    for size in ("auto", *SIZES):
        c = compose_config([*NODES, f"parallel.zero={zero}", f"parallel.bucket_mib={size}"])
        seconds[size] = step_price(c, make_plan(c), read_hardware("h100")).seconds
    best = min(seconds.values())
    assert seconds["auto"] < behind * best and min(seconds[0], seconds[25]) > ahead * seconds["auto"]
