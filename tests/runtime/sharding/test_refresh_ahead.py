"""Under ZeRO-1 and 2 updated shards are gathered under the next forward pass: each bucket is waited for where it is
read first, and before anything else reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.runtime.flat_buffers import FlatBucket
from platform.runtime.residency import ParameterResidency
from platform.train import rank_parameters
from platform.train.faults import Fault
from platform.train.generator import TextGenerator
from platform.train.rank_parameters import LossScale, RankWeights
from platform.train.replies import AskedTexts, Choice
from platform.train.state_recovery import compare_replicas
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState
from tests.harness.card import alone
from tests.harness.oracle import MODELS, configure, prove, run, trainer_of, validation_loss
from tests.harness.threads import run_threads

STAGES = {"pipeline": "1f1b", "stages": 2, "layers": 4}
PLANS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": MODELS["gpt_untied"],
    "t5": MODELS["t5"],
    "1f1b, tied": STAGES,
    "interleaved": {**STAGES, "pipeline": "interleaved", "chunks": 2},
    "zb_h1": {**STAGES, "pipeline": "zb_h1"},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "1d_sp, 1f1b": {"tensor": "1d_sp", "axes": {"t": 2}, **STAGES},
    "2d_gather": {"tensor": "2d_gather", "axes": {"r": 2, "c": 1}, **MODELS["gpt_untied"]},
    "3d, t5": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 1}, **MODELS["t5"]},
    "recompute": {"recompute": "full"},
    "groups": {"zero_group": 2},
}
FROZEN = ["layers.0.*", "embedding"]


def planned(name: str, data: int, zero: int) -> Config:
    """With a bucket for each span, as large models have."""
    batch = {"microbatch": {2: 6, 3: 4, 4: 2, 6: 2}[data], "global_batch": 24}
    return configure(**{"data": data, "zero": zero, "length": 8, "bucket_mib": 0, **batch, **PLANS[name]})


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("data", [2, 3, 4])
@pytest.mark.parametrize("name", PLANS)
def test_equals_one_process(name, data, zero):
    if name == "groups" and data == 3:
        data = 6
    prove(planned(name, data, zero))


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "nobody waits": lambda patch: patch.setattr(FlatBucket, "gather_parameters", lambda *_: None),
    "spans do not wait": lambda patch: patch.setattr(ParameterResidency, "_move_to_span", lambda *_: None),
    "the first span alone waits": lambda patch: patch.setattr(
        ParameterResidency, "run_block", lambda self, block, x: block(x)
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_negative_control_weights_that_are_read_before_they_are_there(how, monkeypatch):
    BROKEN[how](monkeypatch)
    with pytest.raises(AssertionError):
        prove(planned("untied", 2, 1))


def test_negative_control_conversions_that_start_ahead_of_their_span(monkeypatch):
    c = planned("2d_gather", 2, 1)
    monkeypatch.setattr(rank_parameters, "first_reads_by_span", lambda chunk: [set(names) for names in chunk.spans])
    with pytest.raises(AssertionError):
        prove(c)


def on_all_ranks(c: Config, work: Callable[[Trainer], Any]) -> list[Any]:
    plan = make_plan(c)
    return run_threads(plan.mesh, lambda communicator: work(trainer_of(c, plan, communicator)))


@pytest.mark.parametrize("overlap", [True, False])
def test_each_bucket_is_waited_for_at_its_first_use(overlap, monkeypatch):
    """In the order of the forward pass; nothing is left when it ends, and no later pass waits."""
    c = planned("untied", 2, 1)
    c.parallel.overlap = overlap
    move = ParameterResidency._move_to_span

    def work(trainer: Trainer) -> tuple[list[list[bool]], list[bool]]:
        buckets, seen = trainer.weights.buckets, []

        def moved(self: ParameterResidency, spans: Any, at: int, way: int) -> None:
            move(self, spans, at, way)
            seen.append([flat.resident for flat in buckets])

        trainer.step(1)
        after = [flat.resident for flat in buckets]
        trainer.weights.residency._move_to_span = moved.__get__(trainer.weights.residency)
        trainer.step(2)
        return seen, after

    needed = [1, 2, 2, 3, 4]  # by span: embedding, block, nothing, block, norm and head
    for seen, after in on_all_ranks(c, work):
        assert after == [not overlap] * 4
        first, *later = [seen[i : i + len(needed)] for i in range(0, len(seen), len(needed))]
        assert first == [[i < n or not overlap for i in range(4)] for n in needed]
        assert later and all(all(resident) for spans_of_pass in later for resident in spans_of_pass)


SPANS = 5  # embedding, block, nothing, block, norm and head


def after_an_update(c: Config, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank does from an update to the end of the next forward pass, in order, on a card that is not there:
    gathers of weights that it starts and waits for, and spans of the model that begin."""
    events: list[str] = []
    start, move = FlatBucket._launch_gather, ParameterResidency._move_to_span

    class Noted:
        def __init__(self, flat: FlatBucket, out: torch.Tensor):
            self.name, self.handle = flat.bucket.name, start(flat, out)
            events.append(f"start {self.name}")

        def wait(self) -> Any:
            events.append(f"wait {self.name}")
            return self.handle.wait()

    def moved(self: ParameterResidency, spans: Any, at: int, way: int) -> None:
        move(self, spans, at, way)
        events.append(f"span {at}")

    monkeypatch.setattr(FlatBucket, "_launch_gather", lambda flat, out: Noted(flat, out))
    monkeypatch.setattr(ParameterResidency, "_move_to_span", moved)
    with alone(c, 0, []) as trainer:
        trainer.step(1)
        trainer.step(2)
    updated = next(i for i, what in enumerate(events) if what.startswith("start"))
    return events[updated : events.index(f"span {SPANS - 1}", updated) + 1]


NAMES = ["embedding, position", "layers.0", "layers.1", "head, norm"]
STARTS, WAITS = ([f"{what} {name}" for name in NAMES] for what in ("start", "wait"))


@pytest.mark.parametrize("zero", [1, 2])
def test_gathers_run_under_the_next_forward_pass(zero, monkeypatch):
    """All start with the update; before the first block the embedding alone is waited for."""
    c = planned("untied", 2, zero)
    assert after_an_update(c, monkeypatch) == [
        *STARTS, WAITS[0], "span 0", WAITS[1], "span 1", "span 2", WAITS[2], "span 3", WAITS[3], "span 4",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["no overlap", "a refresh that waits"])
def test_negative_control_gathers_that_are_waited_for_at_once(how, monkeypatch):
    c, refresh = planned("untied", 2, 1), RankWeights.refresh_copies
    if how == "no overlap":
        c.parallel.overlap = False
    else:
        monkeypatch.setattr(RankWeights, "refresh_copies", lambda self, ahead: refresh(self))
    assert after_an_update(c, monkeypatch) == [*STARTS, *WAITS, *(f"span {i}" for i in range(SPANS))]


def losses(c: Config) -> list[float]:
    """Of evaluations after steps, by the weights and by their averages."""

    def work(trainer: Trainer) -> list[float]:
        measured = []
        for step in (1, 2):
            trainer.step(step)
            for trainer.config.eval.averaged in (False, True, False):
                measured.append(validation_loss(trainer))
        return measured

    c.train.ema = 0.5
    first, *others = on_all_ranks(c, work)
    assert all(other == first for other in others)
    return first


def test_an_evaluation_reads_what_an_update_has_made():
    expected = losses(planned("untied", 2, 0))
    actual = losses(planned("untied", 2, 1))
    assert actual == pytest.approx(expected, rel=1e-10)
    assert len(set(expected)) == 4, "averages begin as the first weights, and are put back"


def continued(c: Config) -> list[list[int]]:
    asked = AskedTexts([[1, 2, 3], [4, 5]]), 4, Choice(vocab=61), ()

    def work(trainer: Trainer) -> list[list[int]]:
        trainer.config.optimizer.lr = 1.0  # so that a step changes what is written
        trainer.step(1)
        generator = TextGenerator(trainer.config, trainer.plan, trainer.communicator, trainer.weights)
        with torch.no_grad():
            return [list(text.ids) for text in generator.continue_texts(*asked)]

    return on_all_ranks(c, work)[0]


@pytest.mark.parametrize("name", ["tied", "1f1b, tied", "1d"])
def test_texts_are_written_by_what_an_update_has_made(name, monkeypatch):
    expected = continued(planned(name, 2, 0))
    assert continued(planned(name, 2, 1)) == expected
    BROKEN["nobody waits"](monkeypatch)
    assert continued(planned(name, 2, 1)) != expected, "negative control"


@pytest.mark.parametrize("zero", [1, 2])
def test_frozen_parameters(zero):
    c, plain = planned("tied", 2, zero), planned("tied", 2, 0)
    for one in (c, plain):
        one.train.freeze = FROZEN
    actual, expected = ([r.losses for r in run(one)[1]] for one in (c, plain))
    assert actual[0] == pytest.approx(expected[0], rel=1e-10)


@pytest.mark.parametrize("name", ["tied", "1f1b, tied"])
def test_skipped_steps_leave_what_is_there(name):
    """In fp16, where the first loss scale is too large; a gather that was begun before is waited for all the same."""
    c = planned(name, 2, 1)
    c.precision, c.loss_scale.initial, c.loss_scale.backoff = "fp16", 2.0**40, 2.0**-28

    def work(trainer: Trainer) -> tuple[list[bool], list[float]]:
        skipped = trainer.step(1)
        after = [flat.resident for flat in trainer.weights.buckets]
        done = [trainer.step(2)]
        trainer.loss_scale = LossScale(2.0**40)
        done += [trainer.step(3), trainer.step(4)]
        assert [r.skipped for r in (skipped, *done)] == [True, False, True, False] and all(after)
        return [r.loss for r in (skipped, *done)]

    plain = planned(name, 2, 0)
    plain.precision, plain.loss_scale = c.precision, c.loss_scale
    for actual, expected in zip(on_all_ranks(c, work), on_all_ranks(plain, work), strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)


def test_damage_and_comparisons_see_what_an_update_has_made():
    """A bit that is flipped at once after a step is not overwritten, and is found; without it nothing is."""

    def work(fault: Fault | None) -> Callable[[Trainer], Any]:
        def of(trainer: Trainer) -> Any:
            mine = fault if fault and fault.rank == trainer.communicator.rank else None
            trainer.step(1)
            compared = compare_replicas(trainer, RankTrainingState(trainer), None) if fault is None else None
            return (
                compared
                or trainer.step(
                    2, fault=mine, verify=lambda: compare_replicas(trainer, RankTrainingState(trainer), None)
                ).differences
            )

        return of

    c = planned("tied", 3, 1)
    assert not any(on_all_ranks(c, work(None)))
    for differences in on_all_ranks(c, work(Fault(2, "flip", 1))):
        assert {damage.rank for damage in differences.damaged} == {1}


def test_negative_control_a_comparison_that_does_not_wait(monkeypatch):
    monkeypatch.setattr(RankWeights, "wait_for_gathers", lambda self: None)

    def work(trainer: Trainer) -> Any:
        trainer.step(1)
        return compare_replicas(trainer, RankTrainingState(trainer), None)

    assert all(on_all_ranks(planned("tied", 3, 1), work))


def test_a_later_update_of_the_masters_waits_for_the_gather_before(monkeypatch):
    """As where a state is restored: what is gathered would be overwritten while it is sent."""

    def work(trainer: Trainer) -> list[bool]:
        trainer.step(1)
        started = [flat._gathering for flat in trainer.weights.buckets]
        trainer.weights.refresh_copies()
        return [flat.resident and flat._gathering is None and bool(s) for flat, s in zip(
            trainer.weights.buckets, started, strict=True
        )]  # fmt: skip

    assert all(all(arrived) for arrived in on_all_ranks(planned("tied", 2, 1), work))
