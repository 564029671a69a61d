"""What makes a worker bad: beside its peers, or by itself; and what most have is nobody's own."""

import random
from dataclasses import replace
from statistics import median

import pytest

from platform.train.health import BY_NAME, CHECKS, EXACT, _median_of_others, judge_workers, merge_findings
from platform.train.replies import Findings

USUAL = {"gemm": 1e12, "wrong": 0.0, "memory": 1e11, "link": 1e9, "write": 1e9, "read": 2e9, "clock": 0.0}


def build_findings(*changes, size=4):
    """Findings on `size` workers, of which the first ones differ from USUAL so."""
    return {n: Findings(USUAL | (changes[n] if n < len(changes) else {})) for n in range(size)}


def bad(workers, device="cpu"):
    own, shared = judge_workers(workers, device)
    assert not shared
    return {number: list(why) for number, why in own.items() if why}


def test_equal_workers_are_sound():
    assert bad(build_findings()) == {} and bad(build_findings(size=1)) == {} and bad(build_findings(size=2)) == {}


@pytest.mark.parametrize("check", [check for check in CHECKS if "cpu" in check.bounds], ids=lambda check: check.name)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_check_finds_one_that_is_worse_and_leaves_alone_what_is_nearly_as_good(check, size):
    bound, usual = check.bounds["cpu"], USUAL[check.name]
    beside = usual / bound.apart if check.more else usual * bound.apart
    limit = bound.worst if bound == EXACT or check.name == "clock" else min(beside, bound.fine)
    worse, better = (limit * 0.99, limit * 1.01) if check.more else (limit + 0.5, limit)
    assert bad(build_findings({check.name: worse}, size=size)) == {0: [check.name]}
    assert bad(build_findings({check.name: better}, size=size)) == {}


def test_an_absolute_bound_needs_no_peers_but_a_majority_that_is_sound():
    assert judge_workers(build_findings({"clock": 5.0}, size=1), "cpu") == (
        {0: {}},
        {"clock": "5 s, where 1 s is the most"},
    )
    assert bad(build_findings({"clock": 5.0}, {"gemm": 1e6})) == {0: ["clock"], 1: ["gemm"]}


def test_what_is_fine_is_left_alone_however_good_the_peers_are():
    assert bad(build_findings({"write": 2.1e7})) == {} and bad(build_findings({"write": 1.9e7})) == {0: ["write"]}


def test_what_most_have_is_said_once_and_held_against_nobody():
    workers = {n: replace(f, errors={"write": f"denied to {n}"}) for n, f in build_findings(size=5).items()}
    workers[4] = Findings(USUAL | {"gemm": 1e10})
    own, shared = judge_workers(workers, "cpu")
    assert own == {0: {}, 1: {}, 2: {}, 3: {}, 4: {"gemm": "10 GFLOP/s, where its peers have 1 TFLOP/s"}}
    assert shared == {"write": "denied to 0"}


def test_facts_are_those_of_the_majority():
    workers = {n: Findings({}, {}, {"gpu": "H100", "gpu driver": "550"}) for n in range(5)}
    workers[2].facts["gpu"] = "A100"
    del workers[3].facts["gpu driver"]
    assert judge_workers(workers, "cuda")[0] == {
        0: {}, 1: {}, 2: {"gpu": "A100, where most have H100"},
        3: {"gpu driver": "none, where most have 550"}, 4: {},
    }  # fmt: skip
    halves = {n: Findings({}, {}, {"gpu": "H100" if n < 2 else "A100"}) for n in range(4)}
    assert not any(judge_workers(halves, "cuda")[0].values())


def test_bounds_of_gpus_are_their_own():
    assert bad(build_findings({"gemm": 6e12}, {"gemm": 9e12}, {"gemm": 9e12}, {"gemm": 9e12}), "cuda") == {0: ["gemm"]}
    assert bad(build_findings({"gemm": 6e12}, {"gemm": 9e12}, {"gemm": 9e12}, {"gemm": 9e12}), "cpu") == {}
    assert [check.name for check in CHECKS if "cpu" not in check.bounds] == ["peak", "free", "ecc", "rows", "node"]


def test_again_keeps_the_better_measurement_but_a_wrong_number_stays():
    first = Findings({"gemm": 1.0, "wrong": 2.0, "clock": 5.0}, {"write": "full", "read": "torn"})
    again = Findings({"gemm": 3.0, "wrong": 0.0, "clock": 0.0, "link": 7.0, "write": 1.0}, {"read": "torn again"})
    both = Findings({"gemm": 3.0, "wrong": 2.0, "clock": 0.0, "link": 7.0, "write": 1.0}, {"read": "torn again"})
    assert merge_findings(first, again) == both and merge_findings(again, first).readings == both.readings


def test_the_median_of_the_others():
    draw = random.Random(1)
    for _ in range(200):
        values = sorted(draw.choice([1.0, 2.0, 3.0, draw.random()]) for _ in range(draw.randint(2, 9)))
        for i, value in enumerate(values):
            assert _median_of_others(value, values) == median(values[:i] + values[i + 1 :])
    assert _median_of_others(4.0, [4.0]) == 4.0


def test_thousands_are_judged_in_a_moment():
    import time

    begin = time.process_time()
    assert bad(build_findings({"gemm": 1e10}, size=4000)) == {0: ["gemm"]}
    assert time.process_time() - begin < 2


def test_every_check_says_what_to_do():
    assert len(BY_NAME) == len(CHECKS) and all(c.what and c.remedy and c.bounds for c in CHECKS)
