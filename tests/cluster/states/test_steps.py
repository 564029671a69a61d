"""Steps that are strange: spikes, slow, hung and damaged workers, injected faults."""

import re
from pathlib import Path

import pytest
import torch

from platform.monitor import MetricsLog
from platform.train.replies import Damage, Differences, Dispute
from tests.doubles.fake_crew import Dead, Hung
from tests.harness.scripted_run import events, once_each, seats, steps


def spikes(crew):
    crew.losses[4] = [9.0]


@pytest.mark.parametrize(("policy", "status"), [("rollback", 0), ("skip", 0), ("stop", 1)])
def test_spikes(config, drive, policy, status):
    config.train.spike, config.train.on_spike, config.train.steps = 3.0, policy, 12
    assert drive(prepare=lambda crew: crew.losses.update({10: [9.0]})) == status
    [spike] = events(config, "spike")
    assert (spike["step"], spike["loss"], spike["limit"], spike["policy"]) == (10, 9.0, 3.0, policy)
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    assert [row["step"] for row in rows if "skipped" in row] == ([10] if policy == "skip" else [])
    assert [row["step"] for row in rows] == [*range(1, 13 if status == 0 else 10)]


def test_no_spike_without_a_factor(config, drive):
    config.train.steps = 12
    assert drive(prepare=lambda crew: crew.losses.update({10: [9.0]})) == 0 and not events(config, "spike")


def test_not_a_number_in_the_first_step(config, drive):
    nan = float("nan")
    assert drive(prepare=lambda crew: crew.losses.update({1: [nan, nan]})) == 0 and once_each(config)
    config.run.dir += "-2"
    assert drive(prepare=lambda crew: crew.losses.update({1: [nan] * 3})) == 1


@pytest.mark.parametrize("every", [1, 2])
def test_after_a_skipped_step_memory_has_it(config, drive, every):
    config.train.on_spike, config.elastic.snapshot_every = "skip", every
    nan = float("nan")
    assert drive({"step(5)": [{0: Dead}]}, lambda crew: crew.losses.update({4: [nan]})) == 0
    assert events(config, "restored")[0]["step"] == 4 and once_each(config)


@pytest.mark.parametrize("policy", ["rollback", "skip", "stop"])
def test_a_loss_scale_that_was_too_large_is_no_spike(config, drive, policy):
    """The step is done, without an update, whatever the policy; memory has it."""
    config.train.on_spike = policy
    assert drive({"step(5)": [{0: Dead}]}, lambda crew: crew.overflows.add(4)) == 0
    assert not events(config, "spike") and events(config, "restored")[0]["step"] == 4 and once_each(config)
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    assert [(row["step"], row["loss_scale"]) for row in rows if "skipped" in row] == [(4, 1024.0)]
    assert "step 4 has a gradient that overflows fp16 at a loss scale of 1024, which falls: it is skipped" in drive.out


def test_a_slow_worker_is_said_once_and_stays(config, drive):
    config.train.steps = 12
    assert drive(prepare=lambda crew: crew.slow.add(2)) == 0
    [slow] = events(config, "slow")
    assert (slow["number"], slow["rank"], slow["ratio"]) == (2, 2, 2.0)
    assert drive.out.count("rank 2 on n0 is slow: 2.0 times its stage's median") == 1 and len(seats(config)) == 1


def test_a_slow_worker_is_replaced_for_good(config, drive):
    config.train.steps, config.elastic.spares, config.elastic.replace_slow = 12, 1, True
    assert drive({"step(9)": [{0: Dead}]}, lambda crew: crew.slow.add(2)) == 0
    assert seats(config)[1] == [0, 1, 4, 3] and all(2 not in members for members in seats(config)[1:])
    assert [step for step, _ in steps(config)] == [*range(1, 13)]


def test_deadlines(config, drive):
    config.eval.every, config.elastic.hang_seconds = 2, 7.0
    assert drive({"evaluate": [{}, {1: Hung}]}) == 0 and once_each(config)
    within = dict(drive.crew.calls)
    assert within["step(6)"] == 7.0 == within["evaluate"]  # 5 of these steps are shorter
    assert dict(reversed(drive.crew.calls))["step(1)"] == 120.0
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 6]


def test_faults_are_handed_on_once(config, drive):
    config.elastic.faults = ["3:kill:1", "3:nan:0", "9:stop:0"]
    assert drive({"step(3)": [{1: Dead}]}) == 0
    assert [(e["step"], e["faults"]) for e in events(config, "injected")] == [(3, ["3:kill:1", "3:nan:0"])]


def test_generations_count_over_drivers(config, drive):
    config.train.stop_at, config.elastic.replace = 3, False
    assert drive({"step(2)": [{0: Dead}]}) == 0
    config.train.stop_at = 0
    assert drive({"step(5)": [{0: Dead}]}) == 0
    assert [e["generation"] for e in events(config, "forming")] == [1, 2, 3, 4] and once_each(config)
    rows = MetricsLog.read_rows(Path(config.run.dir, "metrics.jsonl"))
    assert [row["generation"] for row in rows] == [1, 2, 2, 3, 4, 4]


DAMAGED = Differences([Damage(1, "model.embedding"), Damage(1, "model.head")])


def test_a_damaged_rank_is_named_and_restored_from_the_others(config, drive):
    """Its process stays; of its memory nothing is used; the step is done again, and none is lost."""
    assert drive(prepare=lambda crew: crew.verdicts.update({4: [DAMAGED]})) == 0
    [failure] = events(config, "failure")
    assert (failure["rank"], failure["number"], failure["kind"], failure["step"]) == (1, 1, "damaged", 4)
    assert "model.embedding and 1 more is not what its replicas hold" in failure["cause"]
    assert events(config, "damaged")[0]["ranks"] == [[1, ["model.embedding", "model.head"]]]
    [restored] = events(config, "restored")
    assert (restored["source"], restored["step"]) == ("memory", 3)
    assert events(config, "released")[0]["lost"] == [] and not events(config, "rolled_back")
    assert re.search(r"rank1\[data1\] on \S+ damaged in step\(4\)", drive.out)


def test_a_rank_that_is_damaged_again_and_again_ends_the_run(config, drive):
    assert drive(prepare=lambda crew: crew.verdicts.update({4: [DAMAGED] * 9})) == 1
    assert len(events(config, "failure")) == config.elastic.attempts and "model.embedding" in drive.out


def test_replicas_of_which_nobody_is_right_end_the_run(config, drive):
    verdict = Differences(undecided=[Dispute([0, 2], "model.embedding")])
    assert drive(prepare=lambda crew: crew.verdicts.update({4: [verdict]})) == 1
    assert events(config, "undecided")[0]["tensors"] == [[[0, 2], "model.embedding"]]
    assert "model.embedding of rank0[data0] and rank2[data2] differ" in drive.out


def of_the_host() -> RuntimeError:
    """What torch raises where this machine has no memory for a tensor."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"),
        of_the_host(),
    ],
    ids=["tensor", "communicator", "host"],
)
def test_what_has_no_memory_left_is_not_tried_again_unchanged(config, drive, error):
    """The line names what the plan needs, and changes that need less."""
    config.train.microbatch, config.train.global_batch = 2, 16
    unrelated = RuntimeError("DistBackendError: by peer")  # of the ranks that waited for it
    assert drive({"step(3)": [{0: unrelated, 1: error}]}) == 1
    assert len(events(config, "failure")) == 1 and events(config, "failure")[0]["number"] == 1
    assert re.search(r"memory.*; the plan needs \S+ [kM]B of a worker by our count; nearest legal: train", drive.out)
